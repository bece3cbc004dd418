"""Plans of rows: each element once, the number of rows as computed, the same from any place."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardstream.errors import OptionError
from shardstream.order import (
    BatchLimits,
    BestFitRows,
    ConcatRows,
    CostBatches,
    Ints,
    RowParts,
    RowPlan,
    WindowRows,
)

FIVE, EMPTY = np.array([3, 0, 25, 10, 9]), np.array([], dtype=np.int64)
COSTS = FIVE.astype(float)
LIMITS = BatchLimits(max_cost=30)
PLANS: list[tuple[RowPlan, int, int, str]] = [
    (
        BestFitRows(FIVE, length=10), 5, 6,
        "5 rows of 10 tokens, 94.0% filled, from 5 sequences, 1 longer ones split, 1 without tokens left out",
    ),
    (
        BestFitRows(FIVE, length=10, long="cut"), 4, 4,
        "4 rows of 10 tokens, 80.0% filled, from 5 sequences, 1 longer ones cut, 1 without tokens left out",
    ),
    (BestFitRows(FIVE, length=25), 2, 4, "2 rows of 25 tokens, 94.0% filled, from 5 sequences, 1 without tokens left out"),
    (ConcatRows(FIVE, length=10), 5, 10, "5 rows of 10 tokens, cut out of 5 sequences"),
    (ConcatRows(FIVE, length=10, drop_last=True), 4, 9, "4 rows of 10 tokens, cut out of 5 sequences"),
    (
        WindowRows(FIVE, size=10, stride=5, drop_last=True), 5, 5,
        "5 windows of 10, from 5 samples, 3 samples too short",
    ),
    (
        WindowRows(FIVE, size=10, stride=5, drop_last=False), 7, 7,
        "7 windows of 10, from 5 samples, 1 sample too short",
    ),
    (
        WindowRows(FIVE, size=3, stride=5, drop_last=False, of_runs=True), 10, 30,
        "10 windows of 3, from 5 runs, 1 run too short",
    ),
    (CostBatches(COSTS, LIMITS), 4, 5, "4 batches of a padded cost of at most 30, 24.2% padding, from 5 samples"),
    (
        CostBatches(COSTS, replace(LIMITS, padded=False)), 3, 5,
        "3 batches of a cost of at most 30, from 5 samples",
    ),
]  # fmt: skip
NONE: list[RowPlan] = [
    BestFitRows(EMPTY, length=3),
    ConcatRows(EMPTY, length=3),
    WindowRows(EMPTY, size=10, stride=5, drop_last=True),
    CostBatches(EMPTY.astype(float), BatchLimits(max_cost=30)),
]
OTHERS: list[RowPlan] = [
    BestFitRows(FIVE + 1, length=10),
    BestFitRows(FIVE, length=10, is_new_each_epoch=True),
    ConcatRows(FIVE + 1, length=10),
    WindowRows(FIVE + 1, size=10, stride=5, drop_last=True),
    WindowRows(FIVE, size=3, stride=5, drop_last=False),
    WindowRows(FIVE, size=9, stride=5, drop_last=False),
    WindowRows(FIVE, size=10, stride=6, drop_last=False),
    CostBatches(COSTS + 1, LIMITS),
    CostBatches(COSTS, LIMITS, is_new_each_epoch=False),
    CostBatches(COSTS, replace(LIMITS, max_samples=2)),
    CostBatches(COSTS, replace(LIMITS, multiple=2)),
]

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=600).map(
    lambda found: np.array(found, dtype=np.int64)
)


def tokens(plan: RowPlan, copy: int = 0) -> list[list[tuple[int, int]]]:
    """Return sample and place of each element of each row; a sample that is taken whole is one element."""
    parts = plan.parts(np.arange(len(plan), dtype=np.int64) + copy * len(plan))
    assert parts.counts.sum() == len(parts.numbers)
    assert (parts.counts > 0).all()
    assert (parts.stops >= -1).all()
    rows = np.split(np.arange(len(parts.numbers)), np.cumsum(parts.counts)[:-1])
    return [
        [
            (int(parts.numbers[place]), element)
            for place in row
            for element in (
                range(parts.starts[place], parts.stops[place]) if parts.stops[place] >= 0 else [0]
            )
        ]
        for row in rows
    ]


def samples_of_rows(plan: RowPlan, copy: int) -> set[frozenset[int]]:
    parts = plan.parts(np.arange(len(plan)) + copy * len(plan))
    return {frozenset(row.tolist()) for row in np.split(parts.numbers, parts.firsts[1:])}


def every_token(found: Ints) -> list[tuple[int, int]]:
    return [(number, place) for number, length in enumerate(found) for place in range(length)]


def check_plan(plan: RowPlan, copy: int) -> None:
    """Check that parts do not depend on what was asked for before, or together."""
    rows = np.arange(len(plan), dtype=np.int64) + copy * len(plan)
    together, other = plan.parts(rows), pickle.loads(pickle.dumps(plan))  # noqa: S301
    some = np.random.default_rng(0).permutation(rows)[:20]
    alone = [other.parts(np.array([row])) for row in some]
    taken = together.take(some - copy * len(plan))
    for name in ("counts", "numbers", "starts", "stops"):
        joined = np.concatenate([getattr(one, name) for one in alone])
        assert np.array_equal(getattr(taken, name), joined)
    assert other.fingerprint == plan.fingerprint
    assert len(together.numbers) <= plan.num_parts
    assert not len(plan.parts(np.array([], dtype=np.int64)).numbers)


@given(lengths, st.integers(1, 50), st.booleans(), st.integers(0, 3))
@example(np.full(300, 1), 50, True, 1)
@example(np.full(9000, 7), 10, True, 1)  # more groups than are planned at once
def test_best_fit_has_each_token_once_and_no_row_is_too_long(
    found: Ints, length: int, is_new: bool, copy: int
) -> None:
    plan = BestFitRows(found, length=length, is_new_each_epoch=is_new, seed=4)
    if not found.any():
        assert len(plan) == 0
        return
    rows = tokens(plan, copy)
    assert sorted(token for row in rows for token in row) == every_token(found)
    assert max(map(len, rows)) <= length
    assert found.sum() / (len(plan) * length) == pytest.approx(plan.filled)
    check_plan(plan, copy)


@given(lengths, st.integers(1, 50), st.booleans(), st.integers(0, 3))
@example(np.array([3, 0, 2]), 9, False, 1)
def test_concat_has_each_token_once_in_order(
    found: Ints, length: int, drop_last: bool, copy: int
) -> None:
    plan = ConcatRows(found, length=length, drop_last=drop_last)
    whole = every_token(found)
    kept = len(whole) // length * length if drop_last else len(whole)
    assert len(plan) == -(-kept // length)
    if len(plan):
        rows = tokens(plan, copy)
        assert [token for row in rows for token in row] == whole[:kept]
        assert {len(row) for row in rows[:-1]} <= {length}
        assert kept / (len(plan) * length) == pytest.approx(plan.filled)
        check_plan(plan, copy)


@given(
    lengths,
    st.integers(1, 12),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
@example(np.array([4]), 4, 1, False, False, 1)
def test_windows_are_those_of_slicing(
    found: Ints, size: int, stride: int, drop_last: bool, of_runs: bool, copy: int
) -> None:
    plan = WindowRows(found, size=size, stride=stride, drop_last=drop_last, of_runs=of_runs)
    first = np.cumsum(found) - found
    expected = []
    for number, length in enumerate(found.tolist()):
        starts = [
            start
            for start in range(0, max(length, 1), stride)
            if start + size <= length
            or (not drop_last and (start == 0 or start - stride + size < length))
        ]
        for start in starts if length else []:
            elements = range(start, min(start + size, length))
            expected.append(
                [(int(first[number]) + one, 0) if of_runs else (number, one) for one in elements]
            )
    assert len(plan) == len(expected)
    if expected:
        assert tokens(plan, copy) == expected
        check_plan(plan, copy)


@given(
    lengths,
    st.integers(41, 400),
    st.none() | st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.integers(1, 8),
    st.integers(0, 3),
)
@example(np.full(3, 9), 41, None, True, False, 3, 0)  # just enough samples for so many batches
@example(np.full(300, 1), 41, 4, True, False, 290, 0)  # the last group cannot have a half of them
@example(np.full(17_000, 40), 41, None, True, True, 2, 1)  # more groups than are planned at once
def test_batches_have_each_sample_once_and_none_costs_too_much(  # noqa: PLR0913, PLR0917
    found: Ints,
    max_cost: int,
    max_samples: int | None,
    padded: bool,
    is_new: bool,
    multiple: int,
    copy: int,
) -> None:
    limits = BatchLimits(
        max_cost=max_cost, max_samples=max_samples, padded=padded, multiple=multiple
    )
    plan = CostBatches(found.astype(float), limits, is_new_each_epoch=is_new, seed=1)
    batches = [[number for number, _ in batch] for batch in tokens(plan, copy)]
    assert sorted(number for batch in batches for number in batch) == list(range(len(found)))
    for batch in batches:
        costs = found[batch]
        assert (costs.max() * len(batch) if padded else costs.sum()) <= max_cost
        assert len(batch) <= (max_samples or len(batch))
    one = CostBatches(found.astype(float), replace(limits, multiple=1), is_new_each_epoch=is_new)
    rounded = -(-len(one) // multiple) * multiple
    assert len(plan) == (rounded if rounded <= len(found) else len(one))
    check_plan(plan, copy)


def test_lognormal_lengths_fill_over_98_percent_and_copies_have_other_rows() -> None:
    draws = np.random.default_rng(0).lognormal(np.log(700) - 0.5, 1.0, 20_000)
    plan = BestFitRows(draws.astype(np.int64), length=8192, is_new_each_epoch=True)
    assert plan.filled >= 0.98
    first, second = (samples_of_rows(plan, copy) for copy in (0, 1))
    assert len(first & second) < 0.05 * len(plan)
    other = BestFitRows(draws.astype(np.int64), length=8192, is_new_each_epoch=True, seed=1)
    assert samples_of_rows(other, 0) == first
    assert len(samples_of_rows(other, 1) & second) < 0.05 * len(plan)


def test_samples_of_a_batch_are_of_similar_cost_and_meet_others_in_other_epochs() -> None:
    costs = np.random.default_rng(0).lognormal(5, 0.6, 5000)
    plan = CostBatches(costs, BatchLimits(max_cost=8192))
    for copy in (0, 1):
        parts = plan.parts(np.arange(len(plan)) + copy * len(plan))
        largest = np.maximum.reduceat(costs[parts.numbers], parts.firsts)
        assert costs.sum() / (largest * parts.counts).sum() > 0.9
    assert len(samples_of_rows(plan, 0) & samples_of_rows(plan, 1)) < 0.1 * len(plan)
    same = CostBatches(costs, BatchLimits(max_cost=8192), is_new_each_epoch=False)
    assert samples_of_rows(same, 0) == samples_of_rows(same, 1)
    assert len(same) < len(plan) < 1.05 * len(same)
    assert len(CostBatches(np.ones(102), BatchLimits(max_cost=2))) == 53  # 51, and two of room


DRAWS = np.random.default_rng(0).lognormal(3, 1, 3000).astype(np.int64)
PINNED: list[tuple[RowPlan, str]] = [
    (BestFitRows(DRAWS, length=128), "c6af98ee2988699c 270257cfbc2e59f9"),
    (BestFitRows(DRAWS, length=20), "033abe05f8843d87 9a0d88b98f73e87a"),
    (BestFitRows(DRAWS, length=128, is_new_each_epoch=True), "dce1b7171be38b0b 3fefd0d416a2a89c"),
    # Copies of it have fewer rows than the first, before some are split.
    (
        BestFitRows(np.where(DRAWS % 2, 21, 17)[:400], length=57, is_new_each_epoch=True),
        "320533807a13eccb e66bd38968d97da1",
    ),
    (ConcatRows(DRAWS, length=100), "43dd6219d528fb41 9335a1e5c8f69c35"),
    (WindowRows(DRAWS, size=16, stride=8, drop_last=True), "cc40b8aa92502797 40ca31dd43515789"),
    (
        CostBatches(DRAWS.astype(float), BatchLimits(max_cost=2048)),
        "d1ed1fb89d13dbc4 1a7c0ed1817b323c",
    ),
    (
        CostBatches(DRAWS.astype(float), BatchLimits(max_cost=2048, multiple=64)),
        "611ecec768621dd6 8af3fe95d77d3c41",
    ),
]


@pytest.mark.parametrize(("plan", "pinned"), PINNED, ids=lambda one: type(one).__name__)
def test_rows_are_pinned(plan: RowPlan, pinned: str) -> None:
    """Rows are part of the order: a state of an earlier version continues with the same ones."""
    parts = plan.parts(np.arange(2 * len(plan)))  # two copies
    columns = (parts.counts, parts.numbers, parts.starts, parts.stops)
    found = b"".join(column.astype("<i8").tobytes() for column in columns)
    assert f"{plan.fingerprint} {hashlib.sha256(found).hexdigest()[:16]}" == pinned


class CountedBatches(CostBatches):
    """Batches that count how often a group is planned."""

    planned = 0

    def plan(self, groups: Ints, keys: Sequence[int | None]) -> list[RowParts]:
        self.planned += len(groups)
        return super().plan(groups, keys)


def test_the_groups_that_were_planned_last_are_kept_but_not_pickled() -> None:
    plan = CountedBatches(np.ones(65_536), BatchLimits(max_cost=1024))  # one group

    def planned(copy: int) -> int:
        plan.parts(np.array([3, 4]) + copy * len(plan))
        return plan.planned

    assert [planned(copy) for copy in (0, 1, 0)] == [1, 2, 2]
    assert [planned(copy) for copy in range(2, 61)][-1] == 61
    assert [planned(copy) for copy in (0, 61, 1, 0)] == [61, 62, 62, 63]
    assert len(pickle.dumps(plan)) < 2 * plan.costs.nbytes


class BusyBatches(CostBatches):
    """Batches of which many copies are planned in between, as by another thread."""

    is_busy = False

    def plan(self, groups: Ints, keys: Sequence[int | None]) -> list[RowParts]:
        if self.is_busy:
            self.is_busy = False
            for copy in range(2, 70):
                self.parts(np.array([copy * len(self)]))
        return super().plan(groups, keys)


def test_a_group_that_is_dropped_while_another_is_planned_is_returned() -> None:
    plan = BusyBatches(np.ones(65_536), BatchLimits(max_cost=1024))
    rows = np.array([0, len(plan)])
    first = plan.parts(rows[:1])
    plan.is_busy = True
    assert np.array_equal(plan.parts(rows).numbers[: len(first.numbers)], first.numbers)


def test_plans_say_what_they_hold() -> None:
    for plan, rows, num_parts, summary in PLANS:
        assert (len(plan), plan.num_parts, plan.summary) == (rows, num_parts, summary)
        taken_whole = isinstance(plan, CostBatches) or "run" in summary
        assert (plan.lengths is None) == taken_whole
        assert plan.lengths is None or np.array_equal(plan.lengths, FIVE)
        assert plan.is_new_each_epoch == isinstance(plan, CostBatches)
    for plan in NONE:
        assert (len(plan), plan.num_parts, plan.summary.split()[0]) == (0, 0, "0")


def test_fingerprint_changes_with_each_option_and_length() -> None:
    plans = [one for one, *_ in PLANS] + NONE + OTHERS
    assert len({plan.fingerprint for plan in plans}) == len(plans)


def test_long_sequences_are_split_cut_or_refused_as_asked() -> None:
    found = np.array([3, 25, 0, 10])
    split = BestFitRows(found, length=10)
    assert sorted(map(len, tokens(split))) == [8, 10, 10, 10]
    cut = BestFitRows(found, length=10, long="cut")
    assert sorted(map(len, tokens(cut))) == [3, 10, 10]
    assert "1 longer ones cut, 1 without tokens left out" in cut.summary
    with pytest.raises(OptionError, match="sample 1 has 25 tokens, more than a row of 10"):
        BestFitRows(found, length=10, long="error")


def test_padding_is_the_share_of_the_padded_cost_that_is_no_samples() -> None:
    costs = np.random.default_rng(0).integers(1, 90, 3000)
    plan = CostBatches(costs.astype(float), BatchLimits(max_cost=900), is_new_each_epoch=False)
    batches = [[number for number, _ in batch] for batch in tokens(plan)]
    padded = sum(costs[batch].max() * len(batch) for batch in batches)
    assert plan.padding == pytest.approx(1 - costs.sum() / padded)
    assert f"{plan.padding:.1%} padding" in plan.summary


def test_a_sample_that_costs_too_much_alone_is_named() -> None:
    with pytest.raises(OptionError, match="sample 1 costs 25, more than max_cost=24"):
        CostBatches(np.array([3.0, 25.0]), BatchLimits(max_cost=24))
    assert len(CostBatches(np.array([3.0, 25.0]), BatchLimits(max_cost=25))) == 2
    assert len(CostBatches(np.array([0.2, 0.5]), BatchLimits(max_cost=0.5))) == 2
