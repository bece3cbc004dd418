"""A worker that dies or cannot send a batch gives an error with its position at once, never a hang."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardstream as ss
from shardstream.errors import SampleError, WorkerError
from tests.small_datasets import FEW_CORES, numbered, take

pytestmark = pytest.mark.filterwarnings(FEW_CORES)
NEVER_S = 300.0  # the machine may be busy; these tests do not depend on its speed
_OUT_OF_MEMORY = r"killed by SIGKILL .*ran out of memory \(see dmesg\): use fewer workers"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("watch"), nsamples=80, per_shard=10)


def dies(sample: dict[str, Any]) -> dict[str, Any]:
    """Kill the process at sample 26, in the way that ``DEATH`` names."""
    if sample["cls"] == 26:
        how = os.environ["SHARDSTREAM_TEST_DEATH"]
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
    return sample


def crawls(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.02)
    return sample


def unsendable(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"function": lambda: sample}


def loader(folder: str, *functions: Any, **options: Any) -> ss.ShardLoader:
    dataset = ss.ShardDataset(folder).decode()
    for function in functions:
        dataset = dataset.map(function)
    return ss.ShardLoader(dataset, batch_size=4, **({"num_workers": 2} | options))


def children() -> set[int]:
    return {child.pid or 0 for child in multiprocessing.active_children()}


@pytest.fixture
def _no_children_left() -> Iterator[None]:
    before = children()
    yield
    waited = time.monotonic()
    while children() - before and time.monotonic() - waited < NEVER_S:
        time.sleep(0.05)
    assert not children() - before


@pytest.mark.usefixtures("_no_children_left")
@pytest.mark.parametrize(
    ("how", "method", "persistent", "message"),
    [
        ("SIGKILL", "fork", False, _OUT_OF_MEMORY),
        ("SIGKILL", "fork", True, _OUT_OF_MEMORY),
        pytest.param("SIGKILL", "spawn", True, _OUT_OF_MEMORY, marks=pytest.mark.slow),
        ("SIGBUS", "fork", False, r"killed by SIGBUS .*/dev/shm is full.*was cut"),
        ("SIGSEGV", "fork", False, r"killed by SIGSEGV .*a library crashed"),
        ("exit", "fork", False, r"ended by itself \(exit code 3\)"),
    ],
)
def test_dead_worker_is_reported_with_its_shard(
    how: str, message: str, method: str, persistent: bool, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("SHARDSTREAM_TEST_DEATH", how)
    one = loader(
        folder,
        dies,
        multiprocessing_context=method,
        persistent_workers=persistent,
        prefetch_factor=1,
    )
    with pytest.raises(WorkerError, match=message) as caught:
        list(one)
    # sample 26 is in batch 6, of worker 0
    assert "loader worker 0 of 2" in str(caught.value)
    assert "batch 6 of the rank: 4 samples of " in str(caught.value)
    assert "000002.tar" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)  # torch's own error
    assert one.state_dict()["consumed"] <= 24


@pytest.mark.usefixtures("_no_children_left")
def test_dead_worker_without_shared_memory_is_reported_with_its_shard(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = multiprocessing.get_context("fork").Event()

    def dies_late(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 26:  # of batch 6, of worker 0
            received.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    monkeypatch.setattr(os, "memfd_create", _refuse_memory)
    batches = iter(loader(folder, dies_late))
    take(batches, 5)
    received.set()
    with pytest.raises(WorkerError, match=r"batch 6 of the rank: 4 samples of .*000002\.tar"):
        list(batches)


@pytest.mark.usefixtures("_no_children_left")
def test_worker_that_ends_in_its_init_function_has_no_batch(folder: str) -> None:
    one = loader(folder, worker_init_fn=lambda _: os._exit(3))
    with pytest.raises(WorkerError, match=r"exit code 3\) before its first batch came; .*exit\(\)"):
        list(one)


@pytest.mark.usefixtures("_no_children_left")
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_killed_between_batches_is_reported_at_its_next_one(
    persistent: bool, folder: str
) -> None:
    before = children()
    one = loader(folder, crawls, persistent_workers=persistent)
    batches = iter(one)
    next(batches)
    _kill_and_wait(min(children() - before))  # a step of the training is not interrupted
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        take(batches, 1000)
    # the loader can be used again
    again = iter(one)
    assert len(take(again, 5)) == 5
    del again, batches, one


@pytest.mark.slow  # the others are looked at every 5 s
@pytest.mark.usefixtures("_no_children_left")
def test_dead_worker_is_reported_while_another_one_is_waited_for(folder: str) -> None:
    def stops(sample: dict[str, Any]) -> dict[str, Any]:
        info = torch.utils.data.get_worker_info()
        if info is not None and info.id == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2 * NEVER_S)
        return sample

    with pytest.raises(WorkerError, match="loader worker 1 of 2 .* killed by SIGKILL"):
        next(iter(loader(folder, stops, timeout=NEVER_S)))


@pytest.mark.slow  # a worker is looked at every 5 s
@pytest.mark.usefixtures("_no_children_left")
def test_dead_worker_is_reported_although_its_own_process_has_its_pipe(
    folder: str, tmp_path: Path
) -> None:
    def leaves(sample: dict[str, Any]) -> dict[str, Any]:
        if child := os.fork():
            (tmp_path / "pid").write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(NEVER_S)
        os._exit(0)

    with pytest.raises(WorkerError, match="loader worker 0 of 1 .* killed by SIGKILL"):
        next(iter(loader(folder, leaves, num_workers=1)))
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.usefixtures("_no_children_left")
def test_worker_killed_between_epochs_is_replaced(folder: str) -> None:
    before = children()
    one = loader(folder, persistent_workers=True)
    assert len(list(one)) == 20
    _kill_and_wait(min(children() - before))
    assert len(list(one)) == 20
    del one


def _kill_and_wait(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    waited = time.monotonic()
    while pid in children() and time.monotonic() - waited < NEVER_S:
        time.sleep(0.01)


@pytest.mark.usefixtures("_no_children_left")
def test_killed_worker_of_a_stream_is_reported(folder: str) -> None:
    before = children()
    dataset = ss.ShardDataset(folder).decode().map(crawls).repeat()
    batches = iter(ss.ShardLoader(dataset, 4, num_workers=2))
    next(batches)
    os.kill(max(children() - before), signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker \d of 2 .* batch \d+ of its own"):
        take(batches, 1000)


@pytest.mark.usefixtures("_no_children_left")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_batch_that_cannot_be_sent_is_an_error(method: str, folder: str) -> None:
    # torch's own workers print a traceback and wait for ever.
    one = loader(folder, unsendable, multiprocessing_context=method, timeout=NEVER_S)
    with pytest.raises(SampleError, match=r"cannot be sent to the main process .*lambda"):
        list(one)


def test_function_that_no_spawned_worker_can_import_is_named(folder: str) -> None:
    one = loader(folder, lambda sample: sample, multiprocessing_context="spawn")
    with pytest.raises(
        ss.errors.OptionError, match=r"worker that is spawned .*lambda.*importable"
    ) as info:
        list(one)
    assert "0x" not in str(info.value)


@pytest.mark.slow
def test_script_that_its_spawned_workers_cannot_import_is_named(
    folder: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import shardstream as ss\n"
        f"list(ss.ShardLoader(ss.ShardDataset({folder!r}), num_workers=1, multiprocessing_context='spawn'))"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert re.search(
        r"before its first batch came; .*imports .*/script\.py .*under 'if", done.stderr
    )


def with_history(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a non-leaf tensor that requires gradients, which torch refuses to send."""
    return sample | {"npy": torch.ones(3, requires_grad=True) * 2}


def _refuse_memory(name: str) -> int:
    raise OSError(errno.ENOSYS, "not in this sandbox")


def as_dicts(items: list[Any]) -> list[Any]:
    return items


@pytest.mark.usefixtures("_no_children_left")
@pytest.mark.parametrize(
    ("function", "has_rings", "message"),
    [(with_history, True, "non-leaf"), (with_history, False, "non-leaf"), (unsendable, False, "lambda")],
)  # fmt: skip
def test_unsendable_values_raise_at_their_batch(
    function: Any, has_rings: bool, message: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_rings:  # as with pinned memory, or without shared memory
        monkeypatch.setattr(os, "memfd_create", _refuse_memory)

    def late(sample: dict[str, Any]) -> dict[str, Any]:
        return function(sample) if sample["cls"] == 26 else sample

    one = loader(folder, late, collate_fn=as_dicts, timeout=NEVER_S)
    came = iter(one)
    assert len(take(came, 6)) == 6
    with pytest.raises(SampleError, match=rf"cannot be sent to the main process .*{message}"):
        next(came)


@pytest.mark.parametrize("has_rings", [True, False])
def test_storages_sent_by_torch_arrive_after_the_exit_of_the_worker(
    has_rings: bool, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_rings:
        monkeypatch.setattr(os, "memfd_create", _refuse_memory)

    def leaf(sample: dict[str, Any]) -> Any:
        if sample["cls"] % 8 < 4:
            time.sleep(0.01)  # worker 1 makes all of its batches long before worker 0
        return torch.full((3,), float(sample["cls"]), requires_grad=True)

    one = loader(folder, leaf, collate_fn=as_dicts, prefetch_factor=20, timeout=NEVER_S)
    found = [int(tensor[0]) for batch in one for tensor in batch]
    assert found == list(range(80))


def test_unpicklable_error_arrives_as_its_nearest_picklable_base(
    folder: str,
) -> None:
    class PickyError(ValueError):
        pass

    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        raise PickyError("mine")

    with pytest.raises(ValueError, match=r"(?s)PickyError: mine") as caught:
        list(loader(folder, fails, timeout=NEVER_S))
    assert type(caught.value) is ValueError


def test_connection_error_of_a_user_function_is_not_a_dead_worker(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        raise ConnectionResetError("the database is gone")

    def never(seconds: float) -> None:
        raise AssertionError("it waits for a worker to die")

    monkeypatch.setattr("time.sleep", never)
    with pytest.raises(ConnectionResetError, match="the database is gone"):
        list(loader(folder, fails))


def test_user_error_is_raised_although_another_worker_has_failed_before(
    folder: str, tmp_path: Path
) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        (tmp_path / str(info.id)).write_text(str(os.getpid()))
        until = time.monotonic() + NEVER_S
        while info.id == 0 and not (tmp_path / "1").exists() and time.monotonic() < until:
            time.sleep(0.01)  # the other worker has failed first
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as caught:
        list(loader(folder, fails))
    assert type(caught.value) is RuntimeError


def test_user_errors_keep_their_type(folder: str) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("mine")

    for num_workers in (0, 2):
        with pytest.raises(RuntimeError, match="mine") as caught:
            list(loader(folder, fails, num_workers=num_workers))
        assert type(caught.value) is RuntimeError


def test_memory_error_in_a_worker_is_raised(tmp_path: Path, folder: str) -> None:
    def hungry(sample: dict[str, Any]) -> dict[str, Any]:
        return sample | {"npy": ctypes.create_string_buffer(1 << 60)}

    with pytest.raises((MemoryError, OverflowError, ValueError)):
        list(loader(folder, hungry))


def test_batch_larger_than_shared_memory_names_the_remedy(folder: str) -> None:
    system = os.statvfs("/dev/shm")  # noqa: S108  (torch's place)
    pixels = np.zeros(system.f_blocks * system.f_frsize // 2, np.uint8)  # never touched
    one = loader(folder, lambda sample: sample | {"npy": pixels})
    with pytest.raises(SampleError, match=r"no room in /dev/shm: enlarge it .*smaller batches"):
        next(iter(one))
