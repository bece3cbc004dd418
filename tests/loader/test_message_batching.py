"""Test that small batches are grouped into messages and arrive unchanged."""

from __future__ import annotations

import functools
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from itertools import count, cycle
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardstream as ss
from shardstream.loader import (
    BatchDataset,
    MessageSizes,
    PinnedMemory,
    WorkerMessage,
    preferred_size,
    receive_items,
    send_messages,
)
from tests.limits import module_of, set_limits
from tests.small_datasets import FEW_CORES, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


class BrokenError(Exception):
    """An error in a worker."""


def worker(number: int, counts: list[int], broken: int | None) -> Generator[tuple[int, int]]:
    """Yield items: worker number and item number."""
    for place in range(counts[number]):
        if (number, place) == (0, broken):
            raise BrokenError
        yield number, place


def in_turn(workers: list[Generator[Any]], prefetch_factor: int) -> Iterator[Any]:
    """Receive messages as torch does: request some from each worker, and yield them in the order of the requests."""
    asked: deque[tuple[int, Any]] = deque()
    live, turn = set(range(len(workers))), 0

    def ask() -> None:
        nonlocal turn
        while live:
            number, turn = turn % len(workers), turn + 1
            if number in live:
                try:
                    asked.append((number, next(workers[number], None)))
                except BrokenError as error:
                    asked.append((number, error))
                return

    for _ in range(prefetch_factor * len(workers)):
        ask()
    while asked:
        number, came = asked.popleft()
        if came is None:
            live.discard(number)
            ask()
            continue
        ask()
        if isinstance(came, BrokenError):
            raise came
        yield came


def received(items: Iterator[Any]) -> list[Any]:
    """Return the items, with the error that ends them."""
    came = []
    try:
        for item in items:
            came.append(item)  # noqa: PERF402  (an error must not lose them)
    except BrokenError as error:
        came.append(type(error))
    return came


def as_it_is(item: Any) -> tuple[Any, float]:
    return item, 0.0


class Line:
    """Simulates workers, messages and the main process in one process."""

    def __init__(
        self,
        workers: list[Generator[Any]],
        prefetch_factor: int,
        sizes: list[int],
        clock: Callable[[], float],
    ) -> None:
        self.message_sizes, self.waited = MessageSizes(), 0
        self._sizes = cycle(sizes)
        self.sent = [0] * len(workers)
        senders = [
            self._counted(
                number, send_messages(one, number, self.message_sizes, as_it_is, clock=clock)
            )
            for number, one in enumerate(workers)
        ]
        self._messages = in_turn(senders, prefetch_factor)
        self._workers, self._prefetch_factor = len(workers), prefetch_factor

    def _counted(self, number: int, messages: Generator[WorkerMessage]) -> Generator[WorkerMessage]:
        for message in messages:
            self.sent[number] += len(message.packed)
            yield message

    def __iter__(self) -> Iterator[Any]:
        with pytest.MonkeyPatch.context() as patch:
            set_limits(patch, MessageSizes, SIZES_KEPT=1)
            yield from receive_items(
                self._messages,
                self._workers,
                self.message_sizes,
                self._unpack,
                prefetch_factor=self._prefetch_factor,
                choose_size=lambda _: next(self._sizes),
            )

    def _unpack(self, item: Any) -> Any:
        self.waited = max(self.waited, max(self.sent) - min(self.sent))
        return item


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    prefetch_factor=st.integers(1, 4),
    broken=st.none() | st.integers(0, 60),
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=20),
    late=st.randoms(use_true_random=False),
)
def test_batches_keep_their_order_in_messages_of_any_size(
    counts: list[int], prefetch_factor: int, broken: int | None, sizes: list[int], late: Random
) -> None:
    def workers() -> list[Generator[Any]]:
        return [worker(number, counts, broken) for number in range(len(counts))]

    line = Line(workers(), prefetch_factor, sizes, lambda: late.choice([0.0, 0.0, 0.0, 1.0]))
    assert received(iter(line)) == received(in_turn(workers(), prefetch_factor))


@pytest.mark.parametrize("prefetch_factor", [1, 2, 4])
@pytest.mark.parametrize("sizes", [[64], [64, 1, 7, 3, 64, 2]])
def test_main_process_buffers_a_bounded_number_of_batches(
    prefetch_factor: int, sizes: list[int]
) -> None:
    """Otherwise ever more of its items would wait in the main process."""
    seeded = Random(0)
    line = Line(
        [worker(number, [5000] * 3, None) for number in range(3)],
        prefetch_factor,
        sizes,
        lambda: seeded.choice([0.0, 0.0, 0.0, 1.0]),
    )
    assert list(line) == [(number, place) for place in range(5000) for number in range(3)]
    assert line.waited <= 64 * (prefetch_factor + 6)


def test_slow_worker_stays_in_turn() -> None:
    ticks = count()
    line = Line(
        [worker(number, [3000] * 2, None) for number in range(2)],
        2,
        [16],
        lambda: next(ticks) * 0.04,
    )
    assert list(line) == [(number, place) for place in range(3000) for number in range(2)]
    assert line.waited <= 100


def test_slow_or_large_batches_are_sent_alone() -> None:
    def worth(made_s: float, nbytes: float, size: int = 1) -> int:
        return preferred_size(WorkerMessage(0, [None] * size, made_s, nbytes, ended=False))

    assert worth(0.0001, 0) == 64
    assert worth(0.0005, 0) == 16
    assert worth(0.016, 0, size=16) == 8
    assert worth(0.1, 0) == worth(0.0001, 6 << 20) == worth(0.0001, math.inf) == 1
    assert worth(0.0, 600_000) == 3


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("many") / "data", 4000, 500)


def batches_of(loader: ss.ShardLoader) -> list[list[int]]:
    return [batch["cls"].tolist() for batch in loader]


def message_sizes_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many batches the main process receives in each message."""
    sizes: list[int] = []
    really = BatchDataset.receive_batches

    def receive(self: BatchDataset, sent: Any, *rest: int, allocate: Any) -> Any:
        return really(self, tapped(sent), *rest, allocate=allocate)

    def tapped(sent: Iterator[WorkerMessage]) -> Iterator[WorkerMessage]:
        for message in sent:
            if message.packed:  # the last message may have no batches
                sizes.append(len(message.packed))
            yield message

    monkeypatch.setattr(BatchDataset, "receive_batches", receive)
    return sizes


@pytest.mark.parametrize(("context", "num_workers"), [("fork", 2), ("spawn", 1)])
def test_small_batches_are_sent_together(
    many: str, context: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = message_sizes_of(monkeypatch)
    set_limits(monkeypatch, MessageSizes, MESSAGE_WORK_S=100)  # also on a busy machine
    set_limits(monkeypatch, MessageSizes, MAX_DELAY_S=100)
    dataset = ss.ShardDataset(many, shuffle=True).decode()
    options: dict[str, Any] = {"num_workers": num_workers, "multiprocessing_context": context}
    loader = ss.ShardLoader(dataset, 4, persistent_workers=True, **options)
    for _ in range(3):
        sizes.clear()
        assert sorted(functools.reduce(operator.iadd, batches_of(loader), [])) == list(range(4000))
        assert sizes[0] == 1
        if context == "fork":  # spawned workers do not have the patched time limit
            assert max(sizes) == 64


def test_without_rings_torch_sends_batches_one_at_a_time(
    many: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor then needs a file descriptor, and a process has few of these."""
    sizes = message_sizes_of(monkeypatch)
    monkeypatch.setattr(module_of(BatchDataset), "open_rings", lambda _: [])
    loader = ss.ShardLoader(ss.ShardDataset(many).decode(), 4, num_workers=1)
    assert all(batch["cls"].is_shared() for batch in loader)
    assert sizes == [1] * 1000


class OrdinaryMemory(PinnedMemory):
    """Memory in the place of pinned memory, which needs a GPU."""

    def new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def pin(self, value: Any) -> Any:
        return value


def test_pinned_batches_are_sent_together(many: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = message_sizes_of(monkeypatch)
    monkeypatch.setattr(module_of(ss.ShardLoader), "open_pinned_memory", OrdinaryMemory)
    loader = ss.ShardLoader(ss.ShardDataset(many).decode(), 4, num_workers=1, pin_memory=True)
    assert not any(batch["cls"].is_shared() for batch in loader)
    assert max(sizes) > 1


def test_state_counts_only_yielded_batches(many: str) -> None:
    def loader() -> ss.ShardLoader:
        return ss.ShardLoader(ss.ShardDataset(many, shuffle=True).decode(), 4, num_workers=2)

    whole = batches_of(loader())
    one = loader()
    batches = iter(one)
    for taken in range(1, 800):
        assert next(batches)["cls"].tolist() == whole[taken - 1]
        if taken % 263 == 0:
            other = loader()
            other.load_state_dict(one.state_dict())
            assert batches_of(other) == whole[taken:]


def test_state_of_a_stream_counts_only_yielded_batches(many: str) -> None:
    """Steps change counts, and one worker has more batches than the other."""

    def loader() -> ss.ShardLoader:
        dataset = ss.ShardDataset(many, shuffle=True).decode().select(not_every_third)
        return ss.ShardLoader(dataset, 4, num_workers=3)

    whole = batches_of(loader())
    assert sorted(functools.reduce(operator.iadd, whole, [])) == [
        number for number in range(4000) if number % 3
    ]
    one = loader()
    for taken, _ in enumerate(one, start=1):
        if taken % 307 == 0:
            other = loader()
            other.load_state_dict(one.state_dict())
            assert batches_of(other) == whole[taken:]


def not_every_third(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 3)


def test_batches_before_an_error_are_yielded(many: str) -> None:
    def broken(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == 3001:
            raise ValueError("this one is bad")
        return sample

    def came(num_workers: int) -> list[list[int]]:
        dataset = ss.ShardDataset(many).decode().map(broken)
        taken = []
        with suppress(ValueError):
            for batch in ss.ShardLoader(dataset, 4, num_workers=num_workers):
                taken.append(batch["cls"].tolist())  # noqa: PERF401  (an error ends it)
        return taken

    assert came(1) == came(0)
    assert len(came(1)) == 750


def test_abandoned_iteration_restarts_with_persistent_workers(many: str) -> None:
    loader = ss.ShardLoader(
        ss.ShardDataset(many).decode(), 4, num_workers=2, persistent_workers=True
    )
    whole = batches_of(loader)
    for left in (1, 40, 400):
        for taken, batch in enumerate(loader, start=1):
            assert batch["cls"].tolist() == whole[taken - 1]
            if taken == left:
                break
    assert batches_of(loader) == whole


def test_concurrent_iterations_have_separate_rounds(many: str) -> None:
    loader = ss.ShardLoader(ss.ShardDataset(many).decode(), 4, num_workers=1)
    both = [(a["cls"].tolist(), b["cls"].tolist()) for a, b in zip(loader, loader, strict=True)]
    assert all(a == b for a, b in both)
    assert len(both) == 1000


def test_second_iteration_with_the_same_workers_raises_in_the_first(many: str) -> None:
    loader = ss.ShardLoader(
        ss.ShardDataset(many).decode(), 4, num_workers=1, persistent_workers=True
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


def test_batches_of_one_message_share_no_memory(many: str) -> None:
    """Each batch is copied when it is made, even if collate_fn reuses its memory."""
    loader = ss.ShardLoader(ss.ShardDataset(many).decode(), 4, num_workers=1, collate_fn=Collated())
    for batch in loader:
        assert batch["cls"].tolist() == batch["text"]
        assert batch["config"] == {"seen": [0]}
        batch["config"]["seen"].append(1)


def test_unsendable_batch_raises_after_the_batches_before_it(many: str) -> None:
    def odd(sample: dict[str, Any]) -> dict[str, Any]:
        return sample | {"x": (lambda: None) if sample["cls"] == 3001 else 0}

    came = 0
    with pytest.raises(ss.errors.SampleError, match="cannot be sent"):  # noqa: PT012  (an error ends the loop)
        for _ in ss.ShardLoader(ss.ShardDataset(many).decode().map(odd), 4, num_workers=1):
            came += 1
    assert came == 750


def test_batch_is_unpacked_in_the_inference_mode_of_the_caller(many: str) -> None:
    batches = iter(ss.ShardLoader(ss.ShardDataset(many).decode(), 4, num_workers=1))
    for _ in range(100):
        with torch.inference_mode():
            next(batches)
        assert not next(batches)["cls"].is_inference()


def test_message_is_flushed_when_a_step_becomes_slow(many: str) -> None:
    def slow(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] >= 3960:
            time.sleep(0.1)  # 0.4 s per batch; torch would time out after 16 of them
        return sample

    loader = ss.ShardLoader(ss.ShardDataset(many).decode().map(slow), 4, num_workers=1, timeout=4)
    assert len(batches_of(loader)) == 1000
