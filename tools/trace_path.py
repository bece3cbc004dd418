"""Count the files and functions of shardstream that a small job enters.

    python tools/trace_path.py            # a table of six paths
    python tools/trace_path.py --list     # with each file and its functions, in the order of their first call
    python tools/trace_path.py --plain --limits   # exit status 1 if a path is longer than its limit

The job is that of the README: 40 photos in one local shard, shuffled, decoded, batches of 4, no workers.

What is counted: code of the package, each function once for each path, in all threads. Lambdas, comprehensions and generator
expressions are functions here, as they are to the interpreter; Python 3.12 and later run most comprehensions inside of
their function, so compare numbers of one Python version only. What is not counted: code that runs while a module is imported, and
methods that ``dataclasses`` generates.

``PYTHONPATH`` chooses another version of the package, so two revisions can be compared.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
from PIL import Image

import shardstream as ss

PACKAGE = f"{Path(ss.__file__).parent}{os.sep}"
# With --plain, on Python 3.11: paths may become longer only with a reason. What the functions are for: docs/decisions/project.md.
LIMITS = {
    "open to first batch": (31, 169),
    "next batch": (12, 39),
    "first state_dict": (7, 14),
    "next state_dict": (4, 7),
    "with one worker": (29, 132),
    "ShardWriter, 40 samples": (15, 84),
    "pack of four photos": (37, 278),
}
SAMPLES, PACKED, BATCH_SIZE = 40, 4, 4
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """One function that was entered."""

    file: str
    line: int
    name: str

    @property
    def is_comprehension(self) -> bool:
        """Whether it is a comprehension or a generator expression inside a function."""
        return self.name.endswith(_COMPREHENSIONS)


Trace = list[Entered]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The traced job.

    Args:
        shards: Number of shards of the samples.
        plain: Read samples in order without decoding.
    """

    shards: int = 1
    plain: bool = False


@contextmanager
def traced(found: Trace) -> Iterator[None]:
    """Append each function of the package that is called inside the block, once, in order."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in seen or not is_own_function(code) or is_importing(frame):
            return
        seen.add(code)
        file = code.co_filename.removeprefix(PACKAGE)
        found.append(Entered(file=file, line=code.co_firstlineno, name=code.co_qualname))

    gc.collect()
    gc.disable()  # a destructor belongs to the path that made its object
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()


def is_own_function(code: CodeType) -> bool:
    """Return whether code is a function of the package, not a module or a class body."""
    return code.co_filename.startswith(PACKAGE) and bool(code.co_flags & inspect.CO_OPTIMIZED)


def is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame runs because a module of the package is being imported."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def trace_writing(folder: str, job: Job) -> dict[str, Trace]:
    """Trace the writing of the photos."""
    samples, found = list(photos()), Trace()
    with traced(found), ss.ShardWriter(folder, max_samples=SAMPLES // job.shards) as writer:
        for sample in samples:
            writer.write(sample)
    return {"ShardWriter, 40 samples": found}


def trace_packing(folder: str, job: Job) -> dict[str, Trace]:  # noqa: ARG001
    """Trace the packing of a folder with one class of photos."""
    source, found = Path(f"{folder}-photos", "cat"), Trace()
    source.mkdir(parents=True)
    for photo in itertools.islice(photos(), PACKED):
        (source / f"{photo['__key__']}.jpg").write_bytes(photo["jpg"])
    with traced(found):
        ss.pack(str(source.parent), f"{folder}-packed")
    return {"pack of four photos": found}


def trace_reading(folder: str, job: Job) -> dict[str, Trace]:
    """Trace the reading of two batches and two states."""
    first, following, state, next_state = Trace(), Trace(), Trace(), Trace()
    with traced(first):
        dataset = ss.ShardDataset(folder, shuffle=not job.plain)
        if not job.plain:
            dataset = dataset.decode("rgb8").to_tuple("jpg", "cls")
        loader = ss.ShardLoader(dataset, batch_size=BATCH_SIZE)
        batches = iter(loader)
        next(batches)
    with traced(following):
        next(batches)
    for trace in (state, next_state):
        with traced(trace):
            loader.state_dict()
    return {
        "open to first batch": first,
        "next batch": following,
        "first state_dict": state,
        "next state_dict": next_state,
    }


def trace_worker(folder: str, job: Job) -> dict[str, Trace]:
    """Trace the main process until the first batch of one forked worker."""
    found = Trace()
    with traced(found):
        dataset = ss.ShardDataset(folder, shuffle=not job.plain)
        if not job.plain:
            dataset = dataset.decode("rgb8").to_tuple("jpg", "cls")
        options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
        batches = iter(ss.ShardLoader(dataset, batch_size=BATCH_SIZE, **options))
        next(batches)
    return {"with one worker": found}


def photos() -> Iterator[dict[str, Any]]:
    """Yield small photos with a label, encoded."""
    rng = np.random.default_rng(0)
    for number in range(SAMPLES):
        file = BytesIO()
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file, "JPEG")
        yield {"__key__": f"{number:06d}", "jpg": file.getvalue(), "cls": number % 10}


def trace_all(job: Job) -> dict[str, Trace]:
    """Trace all paths, with writing and reading in separate processes, so that neither uses caches of the other."""
    _ = (
        ss.ShardDataset,
        ss.ShardLoader,
        ss.ShardWriter,
        ss.pack,
    )  # imported before the processes are forked
    paths: dict[str, Trace] = {}
    with tempfile.TemporaryDirectory() as folder:
        for trace in (trace_writing, trace_packing, trace_reading, trace_worker):
            paths |= in_own_process(trace, f"{folder}/train", job)
    return {path: paths[path] for path in LIMITS}


def in_own_process(
    trace: Callable[[str, Job], dict[str, Trace]], folder: str, job: Job
) -> dict[str, Trace]:
    """Run a function in a new process; return its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(trace, folder, job).result()


def num_files(trace: Trace) -> int:
    """Return the number of entered files."""
    return len({one.file for one in trace})


def table(paths: dict[str, Trace]) -> str:
    """Return the numbers of all paths as a table, one row per path."""
    columns = ("files", "limit", "functions", "limit", "of these comprehensions")
    lines = [f"{'path':<25}" + "".join(f"{name:>{len(name) + 3}}" for name in columns)]
    for path, trace in paths.items():
        most_files, most_functions = LIMITS[path]
        parts = sum(one.is_comprehension for one in trace)
        numbers = (num_files(trace), most_files, len(trace), most_functions, parts)
        pairs = zip(columns, numbers, strict=True)
        lines.append(
            f"{path:<25}" + "".join(f"{number:>{len(name) + 3}}" for name, number in pairs)
        )
    return "\n".join(lines)


def listing(trace: Trace) -> str:
    """Return the files of a path with their functions, in the order of their first call."""
    files: dict[str, list[str]] = {}
    for one in trace:
        files.setdefault(one.file, []).append(f"{one.name}:{one.line}")
    return "\n".join(
        f"  {file} ({len(names)}): {', '.join(names)}" for file, names in files.items()
    )


def beyond_limits(paths: dict[str, Trace]) -> list[str]:
    """Return a line for each path that is longer than its limit."""
    return [
        f"{path}: {num_files(trace)} files and {len(trace)} functions; "
        f"at most {most_files} and {most_functions} are allowed"
        for path, trace in paths.items()
        for most_files, most_functions in [LIMITS[path]]
        if num_files(trace) > most_files or len(trace) > most_functions
    ]


def main() -> int:
    """Print the requested output; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print each file and its functions")
    parser.add_argument("--limits", action="store_true", help="fail if a path is too long")
    parser.add_argument("--plain", action="store_true", help="no shuffle and no decoding")
    parser.add_argument("--shards", type=int, default=1, choices=(1, 2, 4, 8), help="default: 1")
    options = parser.parse_args()
    paths = trace_all(Job(shards=options.shards, plain=options.plain))
    print(table(paths))
    if options.list:
        for path, trace in paths.items():
            print(f"\n{path}\n{listing(trace)}")
    too_long = beyond_limits(paths) if options.limits else []
    print(*too_long, sep="\n", end="\n" if too_long else "", file=sys.stderr)
    return bool(too_long)


if __name__ == "__main__":
    sys.exit(main())
