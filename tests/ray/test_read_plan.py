"""Row ranges of read tasks: they are all rows, each once, whatever the sizes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardstream.ray import cut_by_bytes, cut_rows

PARTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10**9)), min_size=1, max_size=8)


@given(PARTS, st.integers(1, 40), st.integers(1, 20))
def test_ranges_are_all_rows_once_and_in_order(
    parts: list[tuple[int, int]], num_tasks: int, unit: int
) -> None:
    rows, nbytes = [part[0] for part in parts], [part[1] for part in parts]
    ranges = cut_rows(rows, nbytes, num_tasks, unit)
    assert [row for one in ranges for row in range(one.start, one.stop)] == [*range(sum(rows))]
    assert all(one.start < one.stop and one.start % unit == 0 for one in ranges)
    assert len(ranges) <= num_tasks


@given(st.integers(1, 30), st.integers(1, 10**6))
def test_ranges_of_equal_rows_are_of_about_equal_bytes(num_tasks: int, row_bytes: int) -> None:
    ranges = cut_rows([300, 700], [300 * row_bytes, 700 * row_bytes], num_tasks)
    sizes = [one.nbytes for one in ranges]
    assert len(ranges) == num_tasks
    assert sum(sizes) == 1000 * row_bytes
    assert max(sizes) - min(sizes) <= 2 * row_bytes


def test_a_shard_of_large_samples_is_cut_into_more_ranges_than_one_of_small_samples() -> None:
    ranges = cut_rows([1000, 10], [1000, 9000], 10)
    assert [one.start for one in ranges][:2] == [0, 1000]
    assert len(ranges) == 10


@given(st.lists(st.integers(0, 100), max_size=50), st.integers(1, 150))
def test_slices_hold_at_most_the_limit_or_one_row(sizes: list[int], limit: int) -> None:
    slices = cut_by_bytes(np.array(sizes, dtype=np.int64), limit)
    assert [place for one in slices for place in range(one.start, one.stop)] == [*range(len(sizes))]
    for one in slices:
        assert sum(sizes[one]) <= limit or one.stop - one.start == 1
