from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.errors import OptionError
from shardstream.pipeline import Context, GroupBatched, SkipBudget, SkipTracker
from shardstream.testing import ListRun, assert_resumes_exactly


def remainder(item: int) -> int:
    return item % 3


def stage_of(size: int = 2, buffer: int = 10, drop_last: bool = False) -> GroupBatched:
    return GroupBatched(
        group=remainder, size=size, buffer=buffer, collate=list, drop_last=drop_last
    )


def through(stage: GroupBatched, items: Any) -> list[list[int]]:
    return list(stage.open(ListRun(items), Context()))


@given(
    items=st.lists(st.integers(0, 20), max_size=40),
    size=st.integers(1, 5),
    more=st.integers(0, 9),
)
def test_batches_have_one_group_and_lose_no_items(items: list[int], size: int, more: int) -> None:
    batches = through(stage_of(size, size + more), items)
    assert all(len({remainder(item) for item in batch}) == 1 for batch in batches)
    assert all(0 < len(batch) <= size for batch in batches)
    assert Counter(item for batch in batches for item in batch) == Counter(items)


@given(
    items=st.lists(st.integers(0, 20), max_size=20),
    size=st.integers(1, 4),
    more=st.integers(0, 4),
    drop_last=st.booleans(),
)
def test_group_batched_resumes_exactly(
    items: list[int], size: int, more: int, drop_last: bool
) -> None:
    stage = stage_of(size, size + more, drop_last)
    assert_resumes_exactly(lambda: stage.open(ListRun(items), Context()))


@pytest.mark.parametrize(
    ("drop_last", "expected"), [(False, [[0, 3], [2, 5], [1], [6]]), (True, [[0, 3], [2, 5]])]
)
def test_incomplete_groups_are_kept_or_dropped(drop_last: bool, expected: Any) -> None:
    found = through(stage_of(drop_last=drop_last), [0, 1, 2, 3, 5, 6])
    assert sorted(map(sorted, found)) == sorted(expected)


def test_full_buffer_yields_the_largest_group() -> None:
    assert through(stage_of(3, 3), [0, 1, 3, 2, 6])[0] == [0, 3]


@pytest.mark.parametrize(("size", "buffer"), [(0, 5), (4, 3)])
def test_buffer_that_cannot_fill_a_batch_is_refused(size: int, buffer: int) -> None:
    with pytest.raises(
        OptionError, match=f"buffer of {buffer} items cannot fill batches of {size}"
    ):
        stage_of(size, buffer)


def test_item_without_a_group_is_a_bad_sample() -> None:
    stage = GroupBatched(group=lambda item: 1 // item, size=2, buffer=4, collate=list)
    with pytest.raises(ZeroDivisionError) as caught:
        list(stage.open(ListRun([1, 0]), Context()))
    assert "in group_batched(" in caught.value.__notes__[0]
    context = Context(skips=SkipTracker(SkipBudget(samples=1)))
    assert list(stage.open(ListRun([1, 0, 1]), context)) == [[1, 1]]
    assert context.skips.counts == {"ZeroDivisionError": 1}


def test_state_stays_small_while_a_rare_item_waits() -> None:
    stage = GroupBatched(group=lambda item: item == 0, size=4, buffer=8, collate=list)
    run = stage.open(ListRun(range(2000)), Context())
    assert max(len(json.dumps(run.state_dict())) for _ in run) < 200
