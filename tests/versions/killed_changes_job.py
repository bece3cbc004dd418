"""Kill a change of a dataset before each call that renames or deletes a file, look at the dataset, and make the change again.

    python -m tests.versions.killed_changes_job FOLDER delete

Each run is a fork of this process, which itself opens nothing. Prints the number of kills.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import shardstream as ss
from tests.small_datasets import numbered

N = 30
LEFT = [number for number in range(N) if number not in (0, 20, 21)]
VERSIONS = {1: [*range(N)], 2: LEFT}


def prepare(url: str) -> None:
    """Write a dataset with two versions, the second with deleted samples."""
    numbered(url, N, 5, columns=["cls"])
    ss.delete(url, numbers=[0, 20, 21])


def change(url: str, operation: str) -> None:
    """Make a change, unless it was made before."""
    if operation == "delete":
        ss.delete(url, keys=["000007", "000029"], missing="ignore")
    elif operation == "compact":
        ss.compact(url, threads=1)
    elif operation == "tag":
        ss.versions.tag(url, "paper", 1)
    else:
        ss.versions.gc(url, keep=1, dry_run=False)


def expected(operation: str) -> dict[int, list[int]]:
    """Return the versions afterwards, with their samples."""
    if operation == "delete":
        return VERSIONS | {3: [number for number in LEFT if number not in (7, 29)]}
    if operation == "compact":
        return VERSIONS | {3: LEFT}
    return {2: LEFT} if operation == "gc" else VERSIONS


def check(url: str, allowed: list[dict[int, list[int]]]) -> None:
    """Compare the versions of the dataset with those before or after the change."""
    found = {}
    for record in ss.versions.log(url):
        dataset = ss.ShardDataset(url, version=record.number)
        found[record.number] = [int(sample["cls"]) for sample in dataset]
    assert found in allowed, found
    if len(allowed) == 1:
        assert ss.verify(url).errors == ()
        assert not [*Path(url).glob("compact-*/*.part-*")]


def kill_at(number: int) -> None:
    """Kill this process before a call of the operating system."""
    calls = count()

    def seen(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in ("replace", "rename", "unlink", "remove"):
        setattr(os, name, seen(getattr(os, name)))


def in_fork(work: Callable[[], None]) -> int:
    """Run a function in a process of its own; return its exit status, negative for a signal."""
    process = os.fork()
    if not process:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001  (told by the exit status)
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main(folder: str, operation: str) -> None:
    """Kill the change at each moment."""
    # Imported once, not in each fork.
    _ = (ss.ShardDataset, ss.delete, ss.compact, ss.catalog.read_columns)
    for name in ("pyarrow.dataset", "pyarrow.parquet", "fsspec.implementations.local"):
        importlib.import_module(name)
    first, url = f"{folder}/first", f"{folder}/data"
    assert in_fork(lambda: prepare(first)) == 0
    after = expected(operation)
    for number in count():
        shutil.rmtree(url, ignore_errors=True)
        shutil.copytree(first, url)

        def killed(at: int = number) -> None:
            kill_at(at)
            change(url, operation)

        status = in_fork(killed)
        assert status in (0, -signal.SIGKILL), status
        assert in_fork(lambda: check(url, [VERSIONS, after])) == 0, number
        assert in_fork(lambda: change(url, operation)) == 0, number
        assert in_fork(lambda: check(url, [after])) == 0, number
        if not status:
            sys.stdout.write(f"{number}\n")
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
