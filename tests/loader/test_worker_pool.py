"""Workers of a loader: what they are given, in which order their batches arrive, and how they end."""

from __future__ import annotations

import functools
import operator
import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import islice
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import shardstream as ss
from shardstream.loader import MAX_TENSOR_BYTES, collate
from tests.small_datasets import FEW_CORES, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)
METHODS = [
    "fork",
    pytest.param("spawn", marks=pytest.mark.slow),
    pytest.param("forkserver", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("many") / "data", 4000, 500)


@pytest.fixture(params=["multiprocessing", "thread"])
def worker_method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def batches_of(loader: ss.ShardLoader) -> list[list[int]]:
    return [batch["cls"].tolist() for batch in loader]


def test_state_counts_only_yielded_batches(many: str, worker_method: str) -> None:
    def loader() -> ss.ShardLoader:
        return ss.ShardLoader(
            ss.ShardDataset(many, shuffle=True).decode(),
            4,
            num_workers=2,
            worker_method=worker_method,
        )

    whole = batches_of(loader())
    one = loader()
    batches = iter(one)
    for taken in range(1, 800):
        assert next(batches)["cls"].tolist() == whole[taken - 1]
        if taken % 263 == 0:
            other = loader()
            other.load_state_dict(one.state_dict())
            assert batches_of(other) == whole[taken:]


def test_state_of_a_stream_counts_only_yielded_batches(many: str, worker_method: str) -> None:
    """Steps change counts, and one worker has more batches than the other."""

    def loader() -> ss.ShardLoader:
        dataset = ss.ShardDataset(many, shuffle=True, subset=slice(1500))
        dataset = dataset.decode().select(not_every_third).shuffle(1)
        return ss.ShardLoader(dataset, 4, num_workers=3, worker_method=worker_method)

    whole = batches_of(loader())
    assert sorted(functools.reduce(operator.iadd, whole, [])) == [
        number for number in range(1500) if number % 3
    ]
    one = loader()
    for taken, _ in enumerate(one, start=1):
        if taken % 107 == 0:
            other = loader()
            other.load_state_dict(one.state_dict())
            assert batches_of(other) == whole[taken:]


def not_every_third(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 3)


def test_batches_before_an_error_are_yielded(many: str, worker_method: str) -> None:
    def broken(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 3001:
            raise ValueError("this one is bad")
        return sample

    def came(num_workers: int) -> list[list[int]]:
        dataset = ss.ShardDataset(many).decode().map(broken)
        taken = []
        with suppress(ValueError):
            for batch in ss.ShardLoader(
                dataset, 4, num_workers=num_workers, worker_method=worker_method
            ):
                taken.append(batch["cls"].tolist())  # noqa: PERF401  (an error ends it)
        return taken

    assert came(1) == came(0)
    assert len(came(1)) == 750


def test_abandoned_iteration_restarts_with_persistent_workers(
    many: str, worker_method: str
) -> None:
    loader = ss.ShardLoader(
        ss.ShardDataset(many).decode(),
        4,
        num_workers=2,
        worker_method=worker_method,
        persistent_workers=True,
    )
    whole = batches_of(loader)
    for left in (1, 40, 400):
        for taken, batch in enumerate(loader, start=1):
            assert batch["cls"].tolist() == whole[taken - 1]
            if taken == left:
                break
    assert batches_of(loader) == whole


def test_two_iterations_at_once_have_workers_of_their_own(many: str, worker_method: str) -> None:
    loader = ss.ShardLoader(
        ss.ShardDataset(many).decode(), 4, num_workers=1, worker_method=worker_method
    )
    with pytest.warns(UserWarning, match="make two loaders with other seeds"):
        both = [(a["cls"].tolist(), b["cls"].tolist()) for a, b in zip(loader, loader, strict=True)]
    assert all(a == b for a, b in both)
    assert len(both) == 1000


def test_second_iteration_with_the_same_workers_raises_in_the_first(
    many: str, worker_method: str
) -> None:
    loader = ss.ShardLoader(
        ss.ShardDataset(many).decode(),
        4,
        num_workers=1,
        worker_method=worker_method,
        persistent_workers=True,
    )
    first = iter(loader)
    next(first)
    assert len(batches_of(loader)) == 1000
    with pytest.raises(ss.errors.OptionError, match="use two loaders"):
        list(first)


class Collated:
    """A collate function with attributes."""

    def __init__(self) -> None:
        self.config = {"seen": [0]}
        self.buffer = torch.zeros(4, dtype=torch.int64)

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        self.buffer[:] = torch.tensor([item["cls"] for item in items])
        return {"cls": self.buffer, "config": self.config, "text": [item["cls"] for item in items]}


def test_batches_share_no_memory(many: str, worker_method: str) -> None:
    """Each batch is copied when it is made, even if collate_fn reuses its memory."""
    loader = ss.ShardLoader(
        ss.ShardDataset(many).decode(),
        4,
        num_workers=1,
        worker_method=worker_method,
        collate_fn=Collated(),
    )
    for batch in loader:
        assert batch["cls"].tolist() == batch["text"]
        assert batch["config"] == {"seen": [0]}
        batch["config"]["seen"].append(1)


class LargeCollated:
    """A collate function whose batches are too large for the ring, and have one memory."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(MAX_TENSOR_BYTES + 1, dtype=torch.uint8)

    def __call__(self, items: list[dict[str, Any]]) -> Any:
        self.buffer[:] = items[0]["cls"]
        return {"cls": items[0]["cls"], "buffer": self.buffer}


def test_batches_too_large_for_the_ring_share_no_memory(many: str, worker_method: str) -> None:
    """With torch's loader they do."""
    dataset = ss.ShardDataset(many).decode()
    loader = ss.ShardLoader(
        dataset, 4, num_workers=1, worker_method=worker_method, collate_fn=LargeCollated()
    )
    for batch in islice(loader, 8):
        assert {int(batch["buffer"][place]) for place in (0, 1000, -1)} == {batch["cls"]}


@pytest.mark.parametrize(
    ("worker_method", "unsendable"),
    [
        ("multiprocessing", lambda: None),
        ("multiprocessing", torch.ones(3, requires_grad=True) * 2),  # torch refuses when it is sent
        ("thread", lambda: None),
    ],
)
def test_unsendable_batch_raises_after_the_batches_before_it(
    many: str, worker_method: str, unsendable: Any
) -> None:
    def odd(sample: dict[str, Any]) -> dict[str, Any]:
        return sample | {"x": unsendable if sample["cls"] == 3001 else 0}

    came = 0
    with pytest.raises(ss.errors.SampleError, match="cannot be sent"):  # noqa: PT012  (an error ends the loop)
        for _ in ss.ShardLoader(
            ss.ShardDataset(many).decode().map(odd),
            4,
            num_workers=1,
            worker_method=worker_method,
            collate_fn=as_dicts,
        ):
            came += 1
    assert came == 750


def test_batch_is_unpacked_in_the_inference_mode_of_the_caller(
    many: str, worker_method: str
) -> None:
    batches = iter(
        ss.ShardLoader(
            ss.ShardDataset(many).decode(), 4, num_workers=1, worker_method=worker_method
        )
    )
    for _ in range(100):
        with torch.inference_mode():
            next(batches)
        assert not next(batches)["cls"].is_inference()


def test_batch_that_is_made_arrives_while_the_next_one_is_slow(many: str) -> None:
    """Small batches share messages, but none waits for another one."""
    received = get_context("fork").Event()

    def waits(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 40:
            received.wait()
        return sample

    loader = ss.ShardLoader(ss.ShardDataset(many).decode().map(waits), 1, num_workers=1, timeout=60)
    for number, batch in enumerate(loader):
        assert batch["cls"].item() == number
        if number == 39:
            received.set()
    assert number == 3999


def test_profiler_shows_the_waits_for_workers(many: str) -> None:
    loader = ss.ShardLoader(ss.ShardDataset(many), 1000, num_workers=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        list(loader)
    names = [event.key for event in profiler.key_averages()]
    assert any(name.startswith("enumerate(DataLoader)#") for name in names)


def test_functions_of_torch_call_no_python_in_workers(many: str) -> None:
    """As they do where a default device was set, which makes each of them slow."""

    def watched(sample: dict[str, Any]) -> dict[str, Any]:
        called: list[str] = []
        sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name))  # noqa: ARG005
        torch.ones(3).is_contiguous()
        sys.setprofile(None)
        return {"calls": "__torch_function__" in called}

    batch = next(iter(ss.ShardLoader(ss.ShardDataset(many).map(watched), 4, num_workers=1)))
    assert not batch["calls"].any()


def shown_worker(sample: dict[str, Any]) -> dict[str, Any]:
    """Add what a function sees of its worker."""
    info = get_worker_info()
    assert info is not None
    numbers = info.id, info.num_workers, info.seed, torch.initial_seed(), INITIAL[0]
    return sample | {"seen": [*numbers, torch.get_num_threads(), len(info.dataset)]}  # type: ignore[arg-type]


INITIAL = [-1]


def set_initial(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == worker  # noqa: PT018
    INITIAL[0] = worker
    random.seed(100 + worker)


def as_dicts(items: list[Any]) -> list[Any]:
    return items


@pytest.mark.parametrize("method", METHODS)
def test_workers_have_torchs_info_and_seeds(method: str, many: str) -> None:
    generator = torch.Generator().manual_seed(5)
    base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    loader = ss.ShardLoader(
        ss.ShardDataset(many).decode().map(shown_worker),
        100,
        num_workers=2,
        collate_fn=as_dicts,
        multiprocessing_context=method,
        worker_init_fn=set_initial,
        generator=torch.Generator().manual_seed(5),
    )
    for number, batch in enumerate(loader):
        worker = number % 2
        seed = base_seed + worker
        assert batch[0]["seen"] == [worker, 2, seed, seed, worker, 1, 4000]


class Drawn(IterableDataset[Any]):
    """Numbers from the global generators of a worker, of which torch's loader sets the seeds."""

    def __iter__(self) -> Any:
        yield drawn({})["drawn"]


def drawn(sample: dict[str, Any]) -> dict[str, Any]:
    numbers = random.random(), float(np.random.random()), float(torch.rand(()))
    return sample | {"drawn": numbers}


def test_global_generators_have_the_seeds_of_torchs_workers(many: str) -> None:
    options: dict[str, Any] = {"num_workers": 2, "collate_fn": as_dicts}
    theirs = DataLoader(Drawn(), 1, generator=torch.Generator().manual_seed(9), **options)
    ours = ss.ShardLoader(
        ss.ShardDataset(many).map(drawn), 1, generator=torch.Generator().manual_seed(9), **options
    )
    expected = [batch[0] for batch in theirs]
    found = iter(ours)
    assert [next(found)[0]["drawn"] for _ in range(2)] == expected


def fail_in_second(worker: int) -> None:
    if worker == 1:
        raise KeyError("no such setting")


def test_error_of_worker_init_fn_has_its_type_and_traceback(many: str, worker_method: str) -> None:
    loader = ss.ShardLoader(
        ss.ShardDataset(many),
        8,
        num_workers=2,
        worker_method=worker_method,
        worker_init_fn=fail_in_second,
    )
    with pytest.raises(KeyError, match=r"(?s)worker process 1.*fail_in_second"):
        list(loader)


def sleepy(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(3600 if sample["cls"] == 16 else 0.01)
    return sample


def test_batch_that_takes_longer_than_the_timeout_is_an_error(many: str) -> None:
    before = active_children()
    loader = ss.ShardLoader(ss.ShardDataset(many).decode().map(sleepy), 8, num_workers=1, timeout=6)
    batches = iter(loader)
    assert [next(batches)["cls"][0].item() for _ in range(2)] == [0, 8]
    with pytest.raises(RuntimeError, match="timed out after 6 seconds"):
        next(batches)
    assert set(active_children()) <= set(before)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 60])
def test_workers_end_with_the_iteration_or_the_loader(
    many: str, persistent: bool, taken: int
) -> None:
    before = active_children()
    loader = ss.ShardLoader(ss.ShardDataset(many), 8, num_workers=2, persistent_workers=persistent)
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    assert len(set(active_children()) - set(before)) == 2
    del batches
    assert len(set(active_children()) - set(before)) == (2 if persistent else 0)
    del loader
    assert set(active_children()) <= set(before)


def test_batches_larger_than_the_ring_arrive(tmp_path: Path) -> None:
    """Neither the worker nor the main process waits for room."""
    url = numbered(tmp_path / "data", 6, 3)
    dataset = ss.ShardDataset(url).decode().map(with_many_bytes)
    loader = ss.ShardLoader(dataset, 1, num_workers=2, collate_fn=as_dicts)
    for number, (item,) in enumerate(loader):
        assert [len(part) for part in item["large"]] == [1 << 20] * 300
        assert {part[:1] for part in item["large"]} == {bytes([number])}


def with_many_bytes(sample: dict[str, Any]) -> dict[str, Any]:
    return sample | {"large": [bytes([sample["cls"]]) * (1 << 20)] * 300}


@pytest.mark.slow
def test_24_workers_read_each_sample_once(many: str, worker_method: str) -> None:
    loader = ss.ShardLoader(
        ss.ShardDataset(many, shuffle=True).decode(),
        8,
        num_workers=24,
        worker_method=worker_method,
        prefetch_factor=3,
    )
    assert sorted(functools.reduce(operator.iadd, batches_of(loader), [])) == list(range(4000))


def test_too_many_workers_for_the_limit_of_open_files_name_it(many: str) -> None:
    before, limits = active_children(), resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 16, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as caught:
            list(ss.ShardLoader(ss.ShardDataset(many), 8, num_workers=16))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "ulimit -n" in caught.value.__notes__[0]
    assert set(active_children()) <= set(before)


def with_arrays(sample: dict[str, Any]) -> dict[str, Any]:
    size = MAX_TENSOR_BYTES // 2 + 1 if sample["cls"] < 2 else 64
    return {"array": np.zeros(size, np.uint8), "tensor": torch.zeros(size, dtype=torch.uint8)}


def shared(items: list[Any]) -> list[bool]:
    return [batch.is_shared() for batch in collate(items).values()]


def test_only_batches_too_large_for_the_ring_are_made_in_shared_memory(many: str) -> None:
    """Others would be copied once more, and each have a new file: two thirds of the processor time of small photos."""
    dataset = ss.ShardDataset(many).decode().map(with_arrays)
    batches = iter(ss.ShardLoader(dataset, 2, num_workers=1, collate_fn=shared))
    assert [next(batches) for _ in range(3)] == [[True, True], [False, False], [False, False]]


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_tensors_arrive_by_both_sharing_strategies(many: str, strategy: str) -> None:
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    try:
        dataset = ss.ShardDataset(many).decode().map(with_leaf)
        loader = ss.ShardLoader(dataset, 100, num_workers=2, collate_fn=as_dicts)
        found = [float(item["leaf"].detach().sum()) for batch in loader for item in batch[:1]]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
    assert found == [100.0 * number * 3 for number in range(40)]


def with_leaf(sample: dict[str, Any]) -> dict[str, Any]:
    """Add a tensor that only torch can send."""
    if sample["cls"] % 100:
        return sample
    return sample | {"leaf": torch.full((3,), float(sample["cls"]), requires_grad=True)}


def with_result(sample: dict[str, Any]) -> dict[str, Any]:
    """Add the result of a computation at one sample: torch refuses to send it, but not before the message is sent."""
    if sample["cls"] != 7:
        return sample
    return sample | {"result": torch.ones(3, requires_grad=True) * 2}


def test_batch_that_torch_cannot_send_loses_none_before_it(many: str) -> None:
    """Small batches share a message; this one must not spoil theirs."""
    dataset = ss.ShardDataset(many).decode().map(with_result)
    batches = iter(ss.ShardLoader(dataset, 1, num_workers=1, collate_fn=as_dicts))
    assert [next(batches)[0]["cls"] for _ in range(7)] == list(range(7))
    with pytest.raises(ss.errors.SampleError, match="requires_grad"):
        next(batches)


def test_daemonic_process_may_not_start_workers(many: str) -> None:
    context = get_context("fork")
    ours, theirs = context.Pipe()

    def read() -> None:
        try:
            list(ss.ShardLoader(ss.ShardDataset(many), 8, num_workers=1))
        except AssertionError as error:
            theirs.send(str(error))

    process = context.Process(target=read, daemon=True)
    process.start()
    assert "daemonic processes are not allowed to have children" in ours.recv()
    process.join()


def test_forked_process_starts_workers_of_its_own(many: str, worker_method: str) -> None:
    """It has copies of the pipes to the persistent workers of its parent, which go on."""
    options: dict[str, Any] = {"worker_method": worker_method, "persistent_workers": True}
    loader = ss.ShardLoader(ss.ShardDataset(many).decode(), 100, num_workers=2, **options)
    batches = iter(loader)
    whole = [next(batches)["cls"].tolist()]
    context = get_context("fork")
    ours, theirs = context.Pipe()

    def read() -> None:
        loader.set_epoch(0)
        theirs.send(batches_of(loader))

    process = context.Process(target=read)
    process.start()
    found = ours.recv()
    process.join()
    whole += [batch["cls"].tolist() for batch in batches]
    assert found == whole


READER = """
import os, signal, sys, time
import shardstream as ss

def slow(sample):
    time.sleep(0.01)
    return sample

dataset = ss.ShardDataset(sys.argv[1]).map(slow)
loader = ss.ShardLoader(
    dataset, 4, num_workers=2, persistent_workers=sys.argv[2] == "True", multiprocessing_context="fork"
)
for number, _ in enumerate(loader):
    if number == 3:
        import multiprocessing
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
"""


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sent", "to_group"),
    [
        (signal.SIGKILL, False),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
        (signal.SIGINT, True),
    ],
)
def test_workers_end_with_a_main_process_that_is_killed_or_interrupted(
    many: str, sent: int, to_group: bool, persistent: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(READER)
    main = subprocess.Popen(
        [sys.executable, script, many, str(persistent)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert main.stdout is not None
    workers = [int(pid) for pid in main.stdout.readline().split()]
    assert len(workers) == 2
    (os.killpg if to_group else os.kill)(main.pid, sent)
    _, printed = main.communicate()
    until = time.monotonic() + 300  # the machine may be busy
    while any(map(is_running, workers)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(is_running, workers))
    assert main.returncode == -sent
    assert printed.count("Traceback") == (sent == signal.SIGINT)  # of the main process only
