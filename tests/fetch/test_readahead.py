"""Test that pages of local shards are requested ahead of use after the first wait for a disk, and not before."""

from __future__ import annotations

import itertools
import mmap
import os
from pathlib import Path

import pytest

import shardstream as ss
from shardstream.catalog import ShardCatalog
from shardstream.fetch import Readahead, coalesce
from shardstream.testing import make_shards
from tests.limits import module_of, set_limits
from tests.small_datasets import grouped


class Spy(mmap.mmap):
    """A map that records the requested ranges."""

    requested: list[tuple[int, int]]

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        assert option == mmap.MADV_WILLNEED
        self.requested.append((start, length))
        super().madvise(option, start, length)


@pytest.fixture
def requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Eight shards of about 1 MB, and the ranges requested of their maps."""
    with ss.ShardWriter(tmp_path, max_samples=25) as writer:
        for number in range(200):
            writer.write({"__key__": f"{number}", "bin": bytes([number]) * 40_000})
    found: list[tuple[int, int]] = []

    def map_file(path: str, *_: object) -> mmap.mmap:
        handle = os.open(path, os.O_RDONLY)
        tar = Spy(handle, 0, access=mmap.ACCESS_READ)
        os.close(handle)
        tar.requested = found
        return tar

    monkeypatch.setattr(module_of(ShardCatalog), "map_file", map_file)
    set_limits(monkeypatch, coalesce, GAP_BYTES=0)  # no other reads
    return found


def faults_from(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Simulate waits for the disk from a given call on."""
    calls = iter(range(10**6))
    monkeypatch.setattr(module_of(Readahead), "page_faults", lambda: max(0, next(calls) - call))


def epoch(folder: Path, **options: int) -> int:
    dataset = ss.ShardDataset(folder, **grouped(shuffle=True, **options))
    keys = [key for batch in ss.ShardLoader(dataset, batch_size=5) for key in batch["__key__"]]
    assert sorted(map(int, keys)) == list(range(200))
    return sum(file.stat().st_size for file in folder.glob("*.tar"))


def test_no_readahead_before_a_page_fault(
    requested: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults_from(monkeypatch, 10**6)
    epoch(tmp_path)
    assert requested == []


@pytest.mark.parametrize("window", [20, 200])
def test_next_samples_are_advised_after_a_page_fault(
    window: int,
    requested: list[tuple[int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults_from(monkeypatch, 0)
    total = epoch(tmp_path, window=window)
    assert 0.8 * total < sum(length for _, length in requested) < 1.2 * total
    assert all(start % mmap.PAGESIZE == 0 for start, _ in requested)


def test_used_samples_are_not_advised(
    requested: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults_from(monkeypatch, 10)  # when half of the batches are read
    total = epoch(tmp_path, window=20)
    # The other half at once, and again as the windows ahead.
    assert 0 < sum(length for _, length in requested) < 1.1 * total


@pytest.mark.parametrize("call", [0, 1])
def test_samples_that_nothing_was_requested_of_are_requested_together(
    call: int,
    requested: list[tuple[int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first sample of a batch shows that the disk is needed; batches by number are not known ahead."""
    faults_from(monkeypatch, call)
    dataset = ss.ShardDataset(tmp_path).by_number()
    for numbers in ([5, 150, 80], [151, 7]):
        assert len(dataset.__getitems__(numbers)) == len(numbers)
    assert len(requested) == (5 if call == 0 else 2)


def test_samples_in_memory_are_not_requested_because_others_were_not(
    requested: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = itertools.chain([0], itertools.repeat(1))
    monkeypatch.setattr(module_of(Readahead), "page_faults", lambda: next(counts))
    dataset = ss.ShardDataset(tmp_path).by_number()
    for _ in range(3):
        assert len(dataset.__getitems__([5, 150, 80])) == 3
    assert len(requested) == 3


def test_readahead_is_limited_to_budget_plus_one_window(
    requested: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults_from(monkeypatch, 0)
    dataset = ss.ShardDataset(
        tmp_path,
        shuffle=True,
        order=ss.OrderOptions(window=20),
        read=ss.ReadOptions(prefetch_bytes=2_000_000),
    )
    batches = iter(ss.ShardLoader(dataset, batch_size=5))
    next(batches)
    first = sum(length for _, length in requested)
    assert 0 < first < 2_000_000 + 2 * (1 << 21) + 2 * 20 * 41_000
    assert len(list(batches)) == 39


@pytest.mark.parametrize("has_thread_counts", [True, False])
def test_local_shards_are_read_without_per_thread_page_fault_counts(
    has_thread_counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS, which has no RUSAGE_THREAD."""
    monkeypatch.delattr("resource.RUSAGE_THREAD", raising=False)
    if has_thread_counts:
        monkeypatch.setattr("resource.RUSAGE_THREAD", 1, raising=False)
    folder = make_shards(tmp_path, samples=20)
    assert len(list(ss.ShardDataset(folder))) == 20
