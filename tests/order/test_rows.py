"""Plans of rows: each element once, the number of rows as computed, the same from any place."""

from __future__ import annotations

import pickle

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
    RowPlan,
    WindowRows,
)

lengths = st.lists(st.integers(0, 40), min_size=1, max_size=600).map(
    lambda found: np.array(found, dtype=np.int64)
)


def tokens(plan: RowPlan, copy: int = 0) -> list[list[tuple[int, int]]]:
    """Return sample and place of each element of each row; a sample that is taken whole is one element."""
    parts = plan.parts(np.arange(len(plan), dtype=np.int64) + copy * len(plan))
    assert parts.counts.sum() == len(parts.numbers)
    assert (parts.counts > 0).all()
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
    assert not len(plan.parts(np.array([], dtype=np.int64)).numbers)


@given(lengths, st.integers(1, 50), st.booleans(), st.integers(0, 3))
@example(np.full(300, 1), 50, True, 1)
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


@given(lengths, st.integers(1, 50), st.booleans())
def test_concat_has_each_token_once_in_order(found: Ints, length: int, drop_last: bool) -> None:
    plan = ConcatRows(found, length=length, drop_last=drop_last)
    whole = every_token(found)
    kept = len(whole) // length * length if drop_last else len(whole)
    assert len(plan) == -(-kept // length)
    if len(plan):
        rows = tokens(plan)
        assert [token for row in rows for token in row] == whole[:kept]
        assert {len(row) for row in rows[:-1]} <= {length}
        check_plan(plan, 0)


@given(lengths, st.integers(1, 12), st.integers(1, 12), st.booleans(), st.booleans())
def test_windows_are_those_of_slicing(
    found: Ints, size: int, stride: int, drop_last: bool, of_runs: bool
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
        assert tokens(plan) == expected
        check_plan(plan, 0)


@given(
    lengths,
    st.integers(41, 400),
    st.none() | st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.integers(1, 8),
    st.integers(0, 3),
)
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
    assert len(plan) % multiple == 0 or len(found) < len(plan) + multiple
    check_plan(plan, copy)


def test_lognormal_lengths_fill_over_98_percent_and_copies_have_other_rows() -> None:
    draws = np.random.default_rng(0).lognormal(np.log(700) - 0.5, 1.0, 20_000)
    plan = BestFitRows(draws.astype(np.int64), length=8192, is_new_each_epoch=True)
    assert plan.filled >= 0.98
    first, second = ({frozenset(row) for row in tokens(plan, copy)} for copy in (0, 1))
    assert len(first & second) < 0.05 * len(plan)


def test_long_sequences_are_split_cut_or_refused_as_asked() -> None:
    found = np.array([3, 25, 0, 10])
    split = BestFitRows(found, length=10)
    assert sorted(map(len, tokens(split))) == [8, 10, 10, 10]
    cut = BestFitRows(found, length=10, long="cut")
    assert sorted(map(len, tokens(cut))) == [3, 10, 10]
    assert "1 longer ones cut, 1 without tokens left out" in cut.summary
    with pytest.raises(OptionError, match="sample 1 has 25 tokens, more than a row of 10"):
        BestFitRows(found, length=10, long="error")


def test_a_sample_that_costs_too_much_alone_is_named() -> None:
    with pytest.raises(OptionError, match="sample 1 costs 25, more than max_cost=24"):
        CostBatches(np.array([3.0, 25.0]), BatchLimits(max_cost=24))
