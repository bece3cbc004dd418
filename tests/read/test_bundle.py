"""Small batches are sent several at a time, and nobody notices but by the clock."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardstream as ss
from shardstream.read import bundle as module
from shardstream.read.bundle import Bundle, Rounds, bundled, unbundled
from tests.read.sets import FEW_CORES, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


class BrokenError(Exception):
    """Of a worker."""


def worker(number: int, counts: list[int], broken: int | None) -> Generator[tuple[int, int]]:
    """Make packets: who, and which of its own."""
    for place in range(counts[number]):
        if (number, place) == (0, broken):
            raise BrokenError
        yield number, place


def in_turn(workers: list[Generator[Any]], ahead: int, most: list[int]) -> Iterator[Any]:
    """As torch does: ask each worker for so many ahead, hand out in the order of asking, pass over who has ended."""
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

    for _ in range(ahead * len(workers)):
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
        if isinstance(came, Bundle):
            most[0] = max(most[0], came.size)
        yield came


def handed_out(packets: Iterator[Any]) -> list[Any]:
    """Return what comes, with the error that ends it."""
    came = []
    try:
        for packet in packets:
            came.append(packet)  # noqa: PERF402  (an error must not lose them)
    except BrokenError as error:
        came.append(type(error))
    return came


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    ahead=st.integers(1, 4),
    broken=st.none() | st.integers(0, 60),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=20),
)
def test_batches_come_in_the_order_in_which_they_would_come_alone(
    counts: list[int], ahead: int, broken: int | None, sizes: list[int]
) -> None:
    def workers() -> list[Generator[Any]]:
        return [worker(number, counts, broken) for number in range(len(counts))]

    rounds, planned = Rounds(), iter(sizes * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_worth", lambda _: next(planned))
        senders: list[Generator[Any]] = [
            bundled(one, number, rounds, lambda packets: (packets, 0))
            for number, one in enumerate(workers())
        ]
        most = [0]
        came = handed_out(
            unbundled(
                in_turn(senders, ahead, most), len(counts), rounds, lambda sent: sent, ahead=ahead
            )
        )
    assert came == handed_out(in_turn(workers(), ahead, [0]))
    assert most[0] <= max(sizes)


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_all_workers_send_equally_many_in_a_round(ahead: int) -> None:
    """Else one would be read far ahead of another, and wait in the main process."""
    rounds, planned = Rounds(), iter([16, 1, 7, 3, 16, 2] * 50)
    sent: list[list[int]] = [[], [], []]

    def pack(packets: list[tuple[int, int]]) -> tuple[Any, int]:
        sent[packets[0][0]].append(len(packets))
        return packets, 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_worth", lambda _: next(planned))
        senders: list[Generator[Any]] = [
            bundled(worker(number, [1600] * 3, None), number, rounds, pack) for number in range(3)
        ]
        came = list(
            unbundled(in_turn(senders, ahead, [0]), 3, rounds, lambda one: one, ahead=ahead)
        )
    assert came == [(number, place) for place in range(1600) for number in range(3)]
    assert sent[0] == sent[1] == sent[2]
    assert len(set(sent[0])) > 3


def test_what_takes_long_or_is_large_is_sent_alone() -> None:
    def worth(made_s: float, nbytes: int, size: int = 1) -> int:
        return module._worth(Bundle(0, None, size, made_s, nbytes, ended=False))

    assert worth(0.0001, 0) == 16
    assert worth(0.0005, 0) == 4
    assert worth(0.004, 0, size=16) == 8
    assert worth(0.1, 0) == worth(0.0001, 6 << 20) == 1
    assert worth(0.0, 300_000) == 3


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("many") / "data", 4000, 500)


def batches_of(loader: ss.ShardLoader) -> list[list[int]]:
    return [batch["cls"].tolist() for batch in loader]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_small_batches_are_sent_together(
    many: str, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    really = module._adapt

    def adapt(rounds: Rounds, number: int, bundle: Bundle, ahead: int) -> None:
        sizes.append(bundle.size)
        really(rounds, number, bundle, ahead)

    monkeypatch.setattr(module, "_adapt", adapt)
    monkeypatch.setattr(module, "_WORTH_S", 100)  # also on the busiest machine
    dataset = ss.ShardDataset(many, shuffle=True).decode()
    loader = ss.ShardLoader(
        dataset, 4, num_workers=2, persistent_workers=True, multiprocessing_context=context
    )
    for _ in range(3):
        sizes.clear()
        assert sorted(functools.reduce(operator.iadd, batches_of(loader), [])) == list(range(4000))
        assert sizes[0] == 1
        assert max(sizes) == 16


def test_a_state_is_of_what_was_handed_out_whatever_is_waiting(many: str) -> None:
    def loader() -> ss.ShardLoader:
        return ss.ShardLoader(ss.ShardDataset(many, shuffle=True).decode(), 4, num_workers=2)

    whole = batches_of(loader())
    one = loader()
    batches = iter(one)
    for taken in range(1, 800):
        assert next(batches)["cls"].tolist() == whole[taken - 1]
        if taken % 97 == 0:
            other = loader()
            other.load_state_dict(one.state_dict())
            assert batches_of(other) == whole[taken:]


def test_so_is_the_state_of_a_stream(many: str) -> None:
    """Where steps change counts, and one worker has more batches than the other."""

    def loader() -> ss.ShardLoader:
        dataset = ss.ShardDataset(many, shuffle=True).decode().select(not_every_third)
        return ss.ShardLoader(dataset, 4, num_workers=3)

    whole = batches_of(loader())
    assert sorted(functools.reduce(operator.iadd, whole, [])) == [
        number for number in range(4000) if number % 3
    ]
    one = loader()
    for taken, _ in enumerate(one, start=1):
        if taken % 197 == 0:
            other = loader()
            other.load_state_dict(one.state_dict())
            assert batches_of(other) == whole[taken:]


def not_every_third(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 3)


def test_batches_before_an_error_are_handed_out(many: str) -> None:
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


def test_what_was_left_in_the_middle_begins_anew(many: str) -> None:
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


def test_iterations_at_once_keep_their_own_rounds(many: str) -> None:
    loader = ss.ShardLoader(ss.ShardDataset(many).decode(), 4, num_workers=1)
    both = [(a["cls"].tolist(), b["cls"].tolist()) for a, b in zip(loader, loader, strict=True)]
    assert all(a == b for a, b in both)
    assert len(both) == 1000
