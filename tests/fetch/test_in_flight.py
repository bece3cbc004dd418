"""Test that the requests of a machine are shared by its workers."""

from __future__ import annotations

import pytest

from shardstream.fetch import share_requests


@pytest.mark.parametrize(
    ("num_workers", "cores", "expected"),
    [(1, 2, (24, 32)), (2, 2, (24, 32)), (8, 2, (6, 8)), (24, 2, (2, 3)), (24, 64, (24, 32))],
)
def test_workers_share_the_requests_of_a_machine(
    num_workers: int, cores: int, expected: tuple[int, int]
) -> None:
    assert share_requests(24, num_workers, cores) == expected


@pytest.mark.parametrize("num_workers", [1, 2, 5, 48, 1000])
def test_every_worker_has_requests(num_workers: int) -> None:
    initial, most = share_requests(24, num_workers, cores=1)
    assert 2 <= initial <= most <= 32
