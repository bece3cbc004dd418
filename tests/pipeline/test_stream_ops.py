from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.pipeline import Compose, Context, Repeat, Shuffle, Slice, Stage
from shardstream.testing import ListRun


def through(stage: Stage, items: Any, **context: Any) -> list[Any]:
    return list(stage.open(ListRun(items), Context(**context)))


@given(size=st.integers(0, 60), window=st.integers(1, 70), seed=st.integers(0, 99))
def test_shuffle_moves_items_within_their_window(size: int, window: int, seed: int) -> None:
    found = through(Shuffle(window=window), range(size), seed=seed)
    for start in range(0, size, window):
        assert sorted(found[start : start + window]) == list(
            range(start, min(start + window, size))
        )


def test_shuffle_depends_on_seed_epoch_worker_and_stage_position() -> None:
    contexts: tuple[dict[str, int], ...] = ({}, {"seed": 1}, {"epoch": 1})
    orders = [through(Shuffle(window=50), range(50), **context) for context in contexts]
    orders.append(through(Shuffle(window=50, purpose=1), range(50)))
    assert len(set(map(tuple, orders))) == 4
    assert orders[0] == through(Shuffle(window=50), range(50))
    two_turns = through(Shuffle(window=25), range(50))
    assert [item - 25 for item in two_turns[25:]] != two_turns[:25]


def test_shuffled_item_keeps_its_number() -> None:
    run = Shuffle(window=4).open(ListRun(range(10)), Context())
    assert all(run.number == item for item in run)


@given(
    start=st.integers(0, 12),
    stop=st.none() | st.integers(0, 30),
    step=st.integers(1, 5),
    size=st.integers(0, 20),
)
def test_slice_matches_islice(start: int, stop: int | None, step: int, size: int) -> None:
    found = through(Slice(start=start, stop=stop, step=step), range(size))
    assert found == list(islice(range(size), start, stop, step))


def test_slice_reads_no_further_than_needed() -> None:
    source = ListRun(range(100))
    assert list(Slice(start=0, stop=5, step=1).open(source, Context())) == [0, 1, 2, 3, 4]
    assert source.state_dict() == {"taken": 5}


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (Repeat(times=2), [0, 1, 2, 0, 1, 2]),
        (Repeat(times=1), [0, 1, 2]),
        (Repeat(times=0), []),
        (Repeat(items=7), [0, 1, 2, 0, 1, 2, 0]),
        (Repeat(items=2), [0, 1]),
        (Repeat(items=0), []),
        (Repeat(times=2, items=4), [0, 1, 2, 0]),
        (Repeat(times=1, items=4), [0, 1, 2]),
    ],
)
def test_repeat_restarts_the_epoch(stage: Repeat, expected: list[int]) -> None:
    assert through(stage, range(3)) == expected


def test_repeat_without_limit_is_endless() -> None:
    run = Repeat().open(ListRun(range(3)), Context())
    assert len(list(islice(run, 1000))) == 1000


@pytest.mark.parametrize("stage", [Repeat(), Repeat(items=5), Repeat(times=3)])
def test_repeat_of_an_empty_stream_ends(stage: Repeat) -> None:
    assert through(stage, []) == []


def pairs(items: Iterator[int]) -> Iterator[tuple[int, int]]:
    for item in items:
        yield item, next(items, -1)


def test_compose_applies_a_function_to_the_stream() -> None:
    assert through(Compose(function=pairs), range(5)) == [(0, 1), (2, 3), (4, -1)]
    assert through(Compose(function=lambda items: [sum(items)]), range(5)) == [10]


def test_composed_items_have_different_numbers() -> None:
    def numbers(global_worker: int) -> list[int]:
        run = Compose(function=pairs).open(ListRun(range(6)), Context(global_worker=global_worker))
        return [run.number for _ in run]

    assert len({*numbers(0), *numbers(1)}) == 6
