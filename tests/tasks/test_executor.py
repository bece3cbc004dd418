"""Test that executors run the same tasks with the same results, and never hang after a failure."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.packing import Progress
from tests.pairs import with_slow_rest
from tests.small_tars import make_dataset

ROOT = Path(__file__).parent.parent.parent
NEVER_S = 600.0
# Python 3.12 and later warn of forks with threads; the children here use no lock of a thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@dataclass(frozen=True)
class Square:
    number: int

    @property
    def name(self) -> str:
        return f"square {self.number}"

    def run(self) -> Mapping[str, Any]:
        return {"square": self.number**2, "process": os.getpid()}


class Fails(Square):
    def run(self) -> Mapping[str, Any]:
        raise ss.errors.ShardError("the tar is damaged", shard="s3://b/a.tar", offset=512)


class DiesOfSigkill(Square):
    def run(self) -> Mapping[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Sleeps(Square):
    def run(self) -> Mapping[str, Any]:
        time.sleep(NEVER_S)
        return {}


@contextmanager
def local_1() -> Iterator[ss.tasks.Executor]:
    yield ss.tasks.LocalExecutor()


@contextmanager
def local_2() -> Iterator[ss.tasks.Executor]:
    yield ss.tasks.LocalExecutor(processes=2)


@contextmanager
def threads() -> Iterator[ss.tasks.Executor]:
    with ThreadPoolExecutor(2) as pool:
        yield ss.tasks.FuturesExecutor(pool)


@contextmanager
def forked() -> Iterator[ss.tasks.Executor]:
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        yield ss.tasks.FuturesExecutor(pool)


OPENED = {one.__name__: one for one in (local_1, local_2, threads, forked)}
PROCESSES = ("local_2", "forked", "spawned")


@pytest.fixture(
    params=with_slow_rest(["local_1", "threads", "forked", "spawned"], [*OPENED, "spawned"])
)
def executor(request: pytest.FixtureRequest) -> Iterator[ss.tasks.Executor]:
    if request.param == "spawned":
        yield ss.tasks.FuturesExecutor(request.getfixturevalue("two_processes"), in_flight=3)
    else:
        with OPENED[request.param]() as opened:
            yield opened


def test_each_task_runs_once_and_done_is_called_in_the_callers_thread(
    executor: ss.tasks.Executor, request: pytest.FixtureRequest
) -> None:
    results: dict[str, Mapping[str, Any]] = {}

    def done(task: ss.tasks.Task, result: Mapping[str, Any]) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert task.name not in results
        results[task.name] = result

    executor.run(map(Square, range(20)), done)
    assert {name: result["square"] for name, result in results.items()} == {
        f"square {n}": n**2 for n in range(20)
    }
    executor.run([], done)
    has_processes = request.node.callspec.params["executor"] in PROCESSES
    assert (os.getpid() in {result["process"] for result in results.values()}) != has_processes


def test_error_keeps_its_type_and_names_its_task(executor: ss.tasks.Executor) -> None:
    with pytest.raises(ss.errors.ShardError, match="is damaged") as caught:
        executor.run([Square(1), Fails(2), Square(3)], lambda _task, _result: None)
    assert caught.value.__notes__ == ["in task 'square 2'"]
    assert (caught.value.shard, caught.value.offset) == ("s3://b/a.tar", 512)


@pytest.mark.parametrize("opened", [local_2, forked])
def test_killed_process_raises_without_hanging(
    opened: Callable[[], AbstractContextManager[ss.tasks.Executor]],
) -> None:
    with opened() as executor, pytest.raises(ss.errors.WorkerError, match="died: killed.*square 7"):
        executor.run([DiesOfSigkill(7), *map(Square, range(50))], lambda _task, _result: None)


def test_after_an_error_local_processes_are_not_waited_for() -> None:
    begin = time.monotonic()
    with pytest.raises(ss.errors.ShardError):
        ss.tasks.LocalExecutor(processes=2).run([Sleeps(1), Fails(2)], lambda _task, _result: None)
    assert time.monotonic() - begin < NEVER_S / 2


def test_error_of_done_ends_the_run(executor: ss.tasks.Executor) -> None:
    def fail(_task: ss.tasks.Task, _result: Mapping[str, Any]) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        executor.run(map(Square, range(10_000)), fail)


def test_tasks_are_consumed_lazily() -> None:
    """A million tasks are not created before the first one runs."""
    taken: list[int] = []

    def tasks() -> Iterator[Square]:
        for number in range(100):
            taken.append(number)
            yield Square(number)

    first: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        executor = ss.tasks.FuturesExecutor(pool, in_flight=4)
        executor.run(tasks(), lambda _task, _result: first.append(len(taken)))
    assert first[0] <= 5
    assert len(first) == 100


@pytest.mark.parametrize("count", [0, -1])
def test_counts_under_one_are_refused(count: int) -> None:
    with pytest.raises(ss.errors.OptionError, match="processes must be 1 or more"):
        ss.tasks.LocalExecutor(processes=count)
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(ss.errors.OptionError, match="in_flight must be"),
    ):
        ss.tasks.FuturesExecutor(pool, in_flight=count)


def test_processes_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """The processes hold the write end of a pipe, which ends when the last of them has exited."""
    code = (
        "import os, signal\n"
        "import shardstream as ss\n"
        "from tests.tasks.test_executor import Square\n"
        "if __name__ == '__main__':\n"
        "    ss.tasks.LocalExecutor(processes=2).run(map(Square, range(10**9)),"
        " lambda task, result: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == -signal.SIGKILL


_VERIFY = "ss.verify(sys.argv[-1], executor=ss.tasks.LocalExecutor(processes=2))"
_MAP = """def change(sample): return sample
ss.reshard(sys.argv[-1], sys.argv[-1] + "/out", map=change, executor=ss.tasks.LocalExecutor(processes=2))"""


@pytest.mark.parametrize(
    ("start", "code", "message"),
    [
        ("script.py", _VERIFY, r"imports .*/script\.py .*put what the script runs under 'if __name__ =="),
        pytest.param("-c", _MAP, "functions and classes of a notebook .*write them to a module", marks=pytest.mark.slow),
        pytest.param("-", _MAP, "a program that is read from standard input: save it to a file", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_process_that_cannot_import_the_program_is_explained(
    start: str, code: str, message: str, tmp_path: Path
) -> None:
    make_dataset(tmp_path)
    code = f"import sys, shardstream as ss\n{code}"
    (tmp_path / "script.py").write_text(code)
    command = {"-c": ["-c", code], "-": ["-"]}.get(start, [f"{tmp_path}/script.py"])
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=code if start == "-" else "",
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(
        rf"WorkerError: .* died: it could not start, .*traceback above; .*{message}", done.stderr
    )


def test_index_and_verify_are_equal_with_all_executors(
    executor: ss.tasks.Executor, tmp_path: Path
) -> None:
    paths = make_dataset(tmp_path)
    expected = ss.index(str(tmp_path), members=True)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    damaged = bytearray(paths[0].read_bytes())
    damaged[600] ^= 1
    for path in tmp_path.iterdir():
        if path.suffix != ".tar":
            path.unlink()
    progress: list[Progress] = []
    report = ss.index(
        str(tmp_path),
        members=True,
        executor=executor,
        progress=progress.append,
    )
    assert report == expected
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert (progress[-1].size_bytes, progress[-1].total_bytes) == (report.manifest.total_bytes,) * 2
    assert (progress[-1].shards, progress[-1].samples) == (3, 12)
    assert len(progress) == len(paths)
    paths[0].write_bytes(damaged)
    found = ss.verify(str(tmp_path), executor=executor, progress=progress.append)
    assert (progress[-1].shards, progress[-1].failures) == (3, 1)
    assert found == ss.verify(str(tmp_path))
    assert "sha256" in found.errors[0].what


def test_bad_tar_keeps_its_type_through_processes(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"x" * 1024)
    with pytest.raises(ss.errors.ShardError, match="a.tar") as caught:
        ss.index(str(tmp_path), executor=ss.tasks.LocalExecutor(processes=2))
    assert caught.value.__notes__ == [f"in task 'index {tmp_path}/a.tar'"]
    assert not (tmp_path / "index.json").exists()
