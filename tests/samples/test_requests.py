"""The parts of a concatenation have one limit of requests, and none waits for another one."""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from shardstream.catalog import ShardCatalog
from shardstream.fetch import Catalog, Extents
from shardstream.format import encode_member
from shardstream.samples import (
    Concat,
    Fetcher,
    FetchOptions,
    Join,
    JoinPart,
    Numbers,
    Samples,
    Subset,
)
from shardstream.storage import AdaptiveLimit, Storage, locate_shards, share_requests
from shardstream.testing import make_shards

NUM_SAMPLES = 12


class Gate(ShardCatalog):
    """Remote shards of one sample, whose bytes come when several requests are in flight at the same time."""

    def __init__(self, barrier: threading.Barrier) -> None:
        folder = f"memory://gate-{uuid.uuid4().hex}"
        make_shards(folder, samples=NUM_SAMPLES, per_shard=1)
        super().__init__(locate_shards(folder, Storage()), Storage())
        self.barrier = barrier

    def fetch(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None = None
    ) -> bytes | memoryview:
        self.barrier.wait(timeout=300)
        return super().fetch(shard, start, end, concurrency)


def read_keys(samples: Concat, numbers: Numbers, num_workers: int = 1) -> list[str]:
    options = FetchOptions(prefetch_bytes=1 << 20, num_workers=num_workers)
    with closing(samples.open_fetcher(iter([numbers]), options)) as fetcher:
        rows: list[Any] = list(fetcher.samples(numbers))
    return [row["__key__"] for row in rows]


def test_a_part_has_all_requests_while_the_others_need_none() -> None:
    cores = os.cpu_count() or 1
    num_workers = max(48, 16 * cores) // NUM_SAMPLES
    assert share_requests(24, num_workers, cores)[0] == NUM_SAMPLES
    gate = Gate(threading.Barrier(NUM_SAMPLES))
    mixed = Concat([gate, Gate(threading.Barrier(1))])
    keys = read_keys(mixed, np.arange(NUM_SAMPLES), num_workers)
    assert keys == [f"{n:06d}" for n in range(NUM_SAMPLES)]


def test_samples_of_all_parts_are_requested_before_one_is_waited_for() -> None:
    barrier = threading.Barrier(4)
    first, second, third = Gate(barrier), Gate(barrier), Gate(barrier)
    mixed = Concat([first, Subset(second, np.array([5, 0, 3])), Concat([third])])
    numbers = np.array([0, 1, NUM_SAMPLES, NUM_SAMPLES + 3])
    assert read_keys(mixed, numbers) == ["000000", "000001", "000005", "000000"]


@pytest.mark.parametrize(("is_planned", "error"), [(False, CancelledError), (True, RuntimeError)])
def test_waiting_for_requests_after_a_close_ends(is_planned: bool, error: type[Exception]) -> None:
    released = threading.Event()

    class Slow(Gate):
        threads = 1  # so that the other requests have not begun at the close

        def fetch(self, *args: Any) -> bytes | memoryview:
            released.wait(timeout=300)
            return super().fetch(*args)

    numbers = np.arange(NUM_SAMPLES)
    upcoming = iter([numbers]) if is_planned else None
    fetcher = Slow(threading.Barrier(1)).open_fetcher(upcoming, FetchOptions(prefetch_bytes=1))
    rows = fetcher.request(numbers)
    fetcher.close()
    released.set()
    with pytest.raises(error):
        rows()


def test_samples_that_were_read_are_not_returned_after_a_close() -> None:
    folder = f"memory://close-{uuid.uuid4().hex}"
    make_shards(folder, samples=NUM_SAMPLES, per_shard=NUM_SAMPLES)
    numbers = np.arange(NUM_SAMPLES)
    whole = ShardCatalog(locate_shards(folder, Storage()), Storage())
    fetcher = whole.open_fetcher(iter([numbers]), FetchOptions(prefetch_bytes=1 << 20))
    assert len(fetcher.samples(numbers[:3])) == 3  # one request reads all
    rows = fetcher.request(numbers[3:])
    fetcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        rows()


class Tiny(Catalog):
    """Equal remote samples of 1 KiB, which count the bytes that are read."""

    fingerprint, num_shards, total_bytes = "0123456789abcdef", 1, 1 << 40

    def __init__(self, count: int) -> None:
        self.count, self.read_bytes = count, 0

    def __len__(self) -> int:
        return self.count

    def url_of(self, shard: int) -> str:  # noqa: ARG002
        return "memory://tiny"

    def extents(self, numbers: Any) -> Extents:
        return Extents(np.zeros_like(numbers), numbers << 10, (numbers + 1) << 10)

    def fetch(self, shard: int, start: int, end: int, concurrency: Any = None) -> bytes:  # noqa: ARG002
        self.read_bytes += end - start
        return b"".join(encode_member("a.txt", b"x")) * ((end - start) >> 10)


class Asked(Tiny):
    """Samples that keep the options of their fetcher."""

    options = FetchOptions()

    def open_fetcher(
        self, upcoming: Iterable[Numbers] | None = None, options: FetchOptions | None = None
    ) -> Fetcher:
        self.options = options or self.options
        return super().open_fetcher(upcoming, options)


MIB = 1 << 20


def test_parts_have_shares_of_the_prefetch_and_one_limit_of_requests() -> None:
    parts = [Asked(10), Asked(30)]

    def opened(samples: Samples, options: FetchOptions) -> list[FetchOptions]:
        with closing(samples.open_fetcher(None, options)):
            return [part.options for part in parts]

    first, second = opened(Concat(parts), FetchOptions(prefetch_bytes=12 * MIB, hedge=True))
    assert first.prefetch_bytes == second.prefetch_bytes == 6 * MIB
    assert first.concurrency is second.concurrency is not None
    assert first.hedge and second.hedge  # noqa: PT018
    limit = AdaptiveLimit(3)
    for one in opened(Concat(parts), FetchOptions(prefetch_bytes=MIB, concurrency=limit)):
        assert (one.prefetch_bytes, one.concurrency) == (MIB, limit)
    assert opened(Concat(parts[:1]), FetchOptions())[0].concurrency is None
    joined = Join(parts[1], [JoinPart(samples=parts[0], defaults={})])  # a third of its mean size
    first, second = opened(joined, FetchOptions(prefetch_bytes=12 * MIB))
    assert (first.prefetch_bytes, second.prefetch_bytes) == (9 * MIB, 3 * MIB)
    assert first.concurrency is second.concurrency is None


def test_statistics_of_a_view_are_sums_over_its_parts() -> None:
    parts = [Asked(10), Asked(30)]
    with closing(Concat(parts).open_fetcher(None, FetchOptions(prefetch_bytes=MIB))) as fetcher:
        fetcher.samples(np.array([3, 15, 16]))
        limit = parts[0].options.concurrency
        assert limit is not None
        limit.num_throttled = 2  # as after two answers of a busy server
        stats = fetcher.stats()
    assert stats["read_bytes"] == parts[0].read_bytes + parts[1].read_bytes == 3 << 10
    assert stats["requests"] == 2
    assert stats["throttled"] == 2


class Closed(Asked):
    """Samples that count checks, and the fetchers that are closed, which take no plan."""

    num_checked = num_closed = 0

    def check_manifests(self) -> None:
        self.num_checked += 1

    def open_fetcher(
        self, upcoming: Iterable[Numbers] | None = None, options: FetchOptions | None = None
    ) -> Fetcher:
        del upcoming
        fetcher = super().open_fetcher(None, options)
        close = fetcher.close

        def counted() -> None:
            self.num_closed += 1
            close()

        fetcher.close = counted  # type: ignore[method-assign]
        return fetcher


def test_all_parts_are_checked_and_closed() -> None:
    parts = [Closed(3), Closed(4)]
    both = Concat([parts[0], Subset(parts[1], np.array([2]))])
    both.check_manifests()
    both.open_fetcher().close()
    assert [(part.num_checked, part.num_closed) for part in parts] == [(1, 1), (1, 1)]


def test_a_plan_is_not_kept_for_a_part_that_takes_none() -> None:
    group, num_groups = 100_000, 40
    parts = [Tiny(num_groups), Closed(num_groups * group)]
    given: list[weakref.ref[Numbers]] = []
    kept: list[int] = []

    def plan() -> Iterator[Numbers]:
        for n in range(num_groups):
            numbers = num_groups + np.arange(n * group, (n + 1) * group)
            kept.append(sum(one() is not None for one in given))
            given.append(weakref.ref(both := np.append(numbers, n)))
            yield both

    options = FetchOptions(prefetch_bytes=MIB)
    with closing(Concat(parts).open_fetcher(plan(), options)) as fetcher:
        assert len(fetcher.samples(np.arange(num_groups))) == num_groups
    assert len(kept) == num_groups
    assert max(kept) < 13  # a million numbers


def test_a_plan_is_kept_for_a_part_while_a_rare_one_is_far_ahead_of_it() -> None:
    """The samples of the rare part that fit its budget are found after more numbers than wait for a part that takes none."""
    group, num_groups = 10_000, 130
    parts = [Tiny(num_groups), Tiny(num_groups * group)]
    plan = [
        np.append(num_groups + np.arange(n * group, (n + 1) * group), n) for n in range(num_groups)
    ]
    options = FetchOptions(prefetch_bytes=1 << 20)
    rng = np.random.default_rng(0)
    with closing(Concat(parts).open_fetcher(iter(plan), options)) as fetcher:
        for numbers in plan[:5]:
            for some in np.array_split(rng.permutation(numbers), 100):
                assert len(fetcher.samples(some)) == len(some)
    assert parts[1].read_bytes < 7 * group << 10
