"""Test prefetching range reads: requests to the store, bytes held, and failures."""

from __future__ import annotations

import pickle
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardstream as ss
from shardstream.catalog import Extents, ShardCatalog
from shardstream.errors import AccessDeniedError, ChangedError, NotFoundError, StorageError
from shardstream.fetch import LocalFetcher, RangeFetcher, coalesce
from shardstream.order import Ints
from shardstream.pipeline import IndexedRun
from shardstream.samples import FetchOptions
from shardstream.storage import AdaptiveLimit, RangeResponse, Storage, locate_shards, num_maps
from tests.limits import module_of, set_limits
from tests.small_datasets import FEW_CORES, flat, labels, loader, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


@dataclass
class Wire:
    """Record the requests to the store, and control its next responses."""

    reads: list[tuple[str, int, int]] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)
    sleeps: list[float] = field(default_factory=list)

    @property
    def tar_bytes(self) -> int:
        return sum(end - start for _, start, end in self.reads)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    made = Wire()
    really_read = Storage.read_once

    def read_once(
        self: Storage, url: str, start: int = 0, end: int | None = None, **options: Any
    ) -> RangeResponse:
        if end is None or not url.endswith(".tar"):
            return really_read(self, url, start, end, **options)
        made.reads.append((url, start, end))
        if made.faults:
            raise made.faults.pop(0)
        return really_read(self, url, start, end, **options)

    monkeypatch.setattr(Storage, "read_once", read_once)
    monkeypatch.setattr("time.sleep", made.sleeps.append)
    return made


@pytest.fixture(scope="module")
def url() -> str:
    return numbered(f"memory://fetch-{random.getrandbits(64):x}", 100, 15)


def catalog_of(url: str) -> ShardCatalog:
    storage = Storage()
    return ShardCatalog(locate_shards(url, storage), storage)


def groups(*numbers: range) -> Iterator[Ints]:
    return iter([np.array(group, dtype=np.int64) for group in numbers])


def keys(fetcher: Any, numbers: Sequence[int]) -> list[str]:
    found = fetcher.samples(np.array(numbers, dtype=np.int64))
    for sample in found:
        if isinstance(sample, Exception):
            raise sample
    return [sample["__key__"] for sample in found]


def names(numbers: Any) -> list[str]:
    return [f"{number:06d}" for number in numbers]


# -- coalescing ------------------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 1 << 12).map(lambda blocks: blocks * 512),
            st.integers(1, 1 << 13).map(lambda blocks: blocks * 512),
        ),
        max_size=40,
    ),
    st.data(),
)
def test_coalesced_ranges_cover_each_sample_once(
    gaps_and_sizes: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    behind = [0, 0, 0]
    samples = []
    for shard, gap, size in gaps_and_sizes:
        samples.append((shard, behind[shard] + gap, behind[shard] + gap + size))
        behind[shard] = samples[-1][2]
    if samples:  # in any order, some of them twice
        samples = data.draw(st.lists(st.sampled_from(samples), max_size=60))
    extents = Extents(*(np.array([s[i] for s in samples], dtype=np.int64) for i in range(3)))
    ranges = coalesce(extents)
    assert sorted(i for span in ranges for i in span.places.tolist()) == list(range(len(samples)))
    for span in ranges:
        members = span.places.tolist()
        assert all(
            (samples[i][0], span.start <= samples[i][1]) == (span.shard, True)
            and samples[i][2] <= span.end
            for i in members
        )
        assert span.end - span.start <= 4 << 20 or len({samples[i] for i in members}) == 1
    needed = [int(span.places.min()) for span in ranges]
    assert needed == sorted(needed)


@pytest.mark.parametrize(
    ("starts", "sizes", "ranges"),
    [
        ([0, 1024], [1024, 512], [(0, 1536)]),
        ([1024, 0], [512, 1024], [(0, 1536)]),
        ([0, 512 + (128 << 10)], [512, 512], [(0, 1024 + (128 << 10))]),
        ([0, 1024 + (256 << 10)], [512, 512], [(0, 512), (263168, 263680)]),
        ([0, 4 << 20], [4 << 20, 512], [(0, 4 << 20), (4 << 20, (4 << 20) + 512)]),
        ([0, 9 << 20], [9 << 20, 512], [(0, 9 << 20), (9 << 20, (9 << 20) + 512)]),
        ([512, 512], [512, 512], [(512, 1024)]),
    ],
)
def test_neighbouring_samples_share_a_request(
    starts: list[int], sizes: list[int], ranges: list[tuple[int, int]]
) -> None:
    begins = np.array(starts)
    extents = Extents(np.zeros_like(begins), begins, begins + np.array(sizes))
    assert sorted((span.start, span.end) for span in coalesce(extents)) == ranges


# -- reading -------------------------------------------------------------------------------------------------------------------


def test_samples_have_the_order_of_the_request(url: str) -> None:
    requested = [7, 3, 99, 14, 15, 3]
    fetcher = RangeFetcher(catalog_of(url), groups(range(20)), FetchOptions(prefetch_bytes=1 << 20))
    assert keys(fetcher, requested) == names(requested)
    fetcher.close()


@pytest.mark.parametrize("ahead", [(), (range(10),), (range(90, 100), range(10))])
def test_samples_missing_from_the_plan_are_read_on_demand(
    ahead: tuple[range, ...], url: str
) -> None:
    fetcher = RangeFetcher(catalog_of(url), groups(*ahead), FetchOptions(prefetch_bytes=1 << 20))
    assert keys(fetcher, range(20)) == names(range(20))
    fetcher.close()


def test_close_returns_freed_memory_to_the_system(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(module_of(RangeFetcher), "release_freed_memory", trimmed.append)
    fetcher = RangeFetcher(catalog_of(url), groups(range(20)), FetchOptions(prefetch_bytes=1 << 20))
    keys(fetcher, range(20))
    assert not trimmed
    fetcher.close()
    assert trimmed == [fetcher.stats()["read_bytes"]]


def test_one_read_fetches_many_samples(url: str, wire: Wire) -> None:
    fetcher = RangeFetcher(catalog_of(url), groups(range(30)), FetchOptions(prefetch_bytes=1 << 20))
    assert keys(fetcher, range(30)) == names(range(30))
    fetcher.close()
    assert len(wire.reads) == 2  # one per shard


@pytest.mark.parametrize("prefetch_bytes", [0, 1, 30_000, 1 << 30])
def test_prefetch_is_limited_to_the_budget_or_a_group_and_a_fifth(
    prefetch_bytes: int, url: str, wire: Wire
) -> None:
    parts = [range(start, start + 15) for start in range(0, 90, 15)]  # one shard each
    fetcher = RangeFetcher(
        catalog_of(url), groups(*parts), FetchOptions(prefetch_bytes=prefetch_bytes)
    )
    group_bytes = 15 * 2048
    used = 0
    for part in parts:
        for first in range(part.start, part.stop, 5):
            assert keys(fetcher, range(first, first + 5)) == names(range(first, first + 5))
            requested = sum(end - start for _, start, end in wire.reads)
            assert requested - used <= max(prefetch_bytes, group_bytes * 6 // 5)
            used += 5 * 2048
    fetcher.close()
    assert (used, fetcher._bytes) == (90 * 2048, 0)


def test_released_samples_make_room_for_the_next_requests(url: str) -> None:
    """While a window is used, the prefetch limit for the next one grows from a fifth to the whole window."""
    parts = [range(45), range(45, 90)]  # three shards each, one request per shard
    fetcher = RangeFetcher(catalog_of(url), groups(*parts), FetchOptions(prefetch_bytes=0))
    requested: set[int] = set()
    counts = []
    for first in range(0, 45, 5):
        keys(fetcher, range(first, first + 5))
        requested |= {part.span.shard for part in fetcher._parts.values() if part.in_flight}
        counts.append(len(requested))
    fetcher.close()
    assert counts[0] == 3
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_completed_ranges_are_kept_as_samples(url: str) -> None:
    fetcher = RangeFetcher(catalog_of(url), groups(range(30)), FetchOptions(prefetch_bytes=1 << 20))
    keys(fetcher, range(10))
    range_ = fetcher._parts[15].in_flight
    wait_until(lambda: not (range_ and range_.requests) or range_.is_done)
    keys(fetcher, range(10, 15))
    assert sorted(fetcher._rows) == list(range(15, 30))
    assert {
        part.in_flight and len(part.in_flight.requests) for part in fetcher._parts.values()
    } == {0}
    keys(fetcher, range(15, 30))
    assert not fetcher._rows
    assert not fetcher._parts
    fetcher.close()


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.fixture
def requested(url: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests of an epoch in which the first response for the sixth shard comes after a second request."""
    set_limits(monkeypatch, AdaptiveLimit, MIN_LATE_S=1.5)  # no other response takes as long
    requested: list[str] = []
    late = catalog_of(url).shards[5].url
    really_read = Storage.read_once

    def read_once(self: Storage, url: str, *args: Any, **options: Any) -> RangeResponse:
        requested.append(url)
        if url == late and requested.count(late) == 1:
            wait_until(lambda: requested.count(late) == 2)
        return really_read(self, url, *args, **options)

    monkeypatch.setattr(Storage, "read_once", read_once)
    return requested


def test_hedging_does_not_repeat_completed_requests(url: str, requested: list[str]) -> None:
    catalog = catalog_of(url)
    parts = [range(start, start + 15) for start in range(0, 90, 15)]
    fetcher = RangeFetcher(catalog, groups(*parts), FetchOptions(prefetch_bytes=0, hedge=True))
    for part in parts:
        assert keys(fetcher, part) == names(part)
        time.sleep(0.1)
    fetcher.close()
    counts = Counter(requested)
    assert [counts[shard.url] for shard in catalog.shards[:6]] == [1, 1, 1, 1, 1, 2]


def test_slow_range_is_hedged_while_waiting_for_an_index(
    url: str, requested: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = catalog_of(url)
    late, really_offsets = catalog.shards[5].url, ShardCatalog.offsets

    def offsets(self: ShardCatalog, shard: int) -> Any:
        if shard == 6 and "aside" in threading.current_thread().name:
            wait_until(lambda: requested.count(late) == 2)
        return really_offsets(self, shard)

    monkeypatch.setattr(ShardCatalog, "offsets", offsets)
    parts = [range(start, min(start + 15, 100)) for start in range(0, 100, 15)]
    fetcher = RangeFetcher(catalog, groups(*parts), FetchOptions(prefetch_bytes=0, hedge=True))
    for part in parts:
        assert keys(fetcher, part) == names(part)
    fetcher.close()
    assert requested.count(late) == 2


def test_group_may_repeat_samples(url: str) -> None:
    twice = [np.array([3, 3, 4]), np.array([4, 20, 21, 20])]
    fetcher = RangeFetcher(catalog_of(url), iter(twice), FetchOptions(prefetch_bytes=1 << 20))
    assert keys(fetcher, [3, 4]) == names([3, 4])
    assert keys(fetcher, [20, 21, 4]) == names([20, 21, 4])
    assert (fetcher._bytes, len(fetcher._parts), len(fetcher._rows)) == (0, 0, 0)
    fetcher.close()


def test_state_after_the_last_large_sample_has_no_samples_left(tmp_path: Any) -> None:
    with ss.ShardWriter(tmp_path, max_samples=50) as writer:
        for number in range(103):
            writer.write({"__key__": f"{number:06d}", "bin": bytes([number]) * 30_000})
    samples = iter(ss.ShardDataset(tmp_path))
    states = [samples.state_dict() for _ in samples]
    for taken in (0, 95, 101, 102):
        again = iter(ss.ShardDataset(tmp_path))
        again.load_state_dict(states[taken])
        assert len(list(again)) == 102 - taken


def test_epoch_reads_each_byte_once(url: str, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    # such small shards are smaller than the gap that is read over
    set_limits(monkeypatch, coalesce, GAP_BYTES=0)
    for _ in range(2):
        wire.reads.clear()
        one = loader(url, shuffle=True, window=8)
        assert sorted(flat(labels(one))) == list(range(100))
        total = one._batches.source_dataset.pipeline.indexed_source.samples.total_bytes  # type: ignore[union-attr]
        assert wire.tar_bytes <= total


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True, "lanes": 3, "window": 24, "block": 5},
        {"shuffle": True, "lanes": 3, "window": 16, "block": 1, "batch_size": 24, "microbatch": 8},
        {"batch_size": 24, "microbatch": 8, "window": 16},
        {"remainder": "drop", "placement": ss.Placement(1, 3), "shuffle": True, "lanes": 3},
    ],
)
def test_finished_epoch_leaves_no_threads_or_buffers(
    options: dict[str, Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    really_close = RangeFetcher.close

    def close(self: RangeFetcher) -> None:
        left.append(len(self._rows) + len(self._parts) + len(self._started))
        really_close(self)

    monkeypatch.setattr(RangeFetcher, "close", close)
    list(loader(url, **options))
    assert set(left) == {0}


def fetch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("shardstream-fetch")]


def test_abandoned_loader_leaves_no_threads(url: str) -> None:
    batches = iter(loader(url, shuffle=True))
    next(batches)
    assert fetch_threads()
    del batches
    wait_until(lambda: not fetch_threads())
    assert fetch_threads() == []


def test_resume_reads_only_the_remaining_bytes(url: str, wire: Wire) -> None:
    one = loader(url, shuffle=True, window=8, prefetch_bytes=1)
    state = [one.state_dict() for _, _ in zip(range(11), one, strict=False)][-1]
    other = loader(url, shuffle=True, window=8, prefetch_bytes=1)
    wire.reads.clear()
    other.load_state_dict(state)
    assert wire.reads == []
    assert len(flat(labels(other))) == 12
    assert len(wire.reads) <= 12


def test_local_shards_are_mapped_not_read(tmp_path: Any, wire: Wire) -> None:
    catalog = catalog_of(numbered(tmp_path, 20, 7))
    fetcher = catalog.open_fetcher()
    assert isinstance(fetcher, LocalFetcher)
    assert keys(fetcher, range(20)) == names(range(20))
    fetcher.close()
    fetcher.close()
    assert wire.reads == []


@pytest.mark.parametrize("bad", [None, 3, 277])
def test_large_samples_are_located_per_window(
    bad: int | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = bytes(20_000)
    with ss.ShardWriter(tmp_path, max_samples=100) as writer:
        for number in range(300):
            writer.write({"__key__": f"{number:03d}", "bin": body + number.to_bytes(2, "big")})
    if bad is not None:
        tar = tmp_path / f"{bad // 100:06d}.tar"
        data = bytearray(tar.read_bytes())
        data[bad % 100 * (512 + 20480) + 10] ^= 1
        tar.write_bytes(data)
    copied: list[int] = []
    really_read = LocalFetcher.samples

    def samples(self: LocalFetcher, numbers: Ints) -> Any:
        copied.append(len(numbers))
        return really_read(self, numbers)

    monkeypatch.setattr(LocalFetcher, "samples", samples)
    set_limits(monkeypatch, IndexedRun, LOOK_AHEAD_BYTES=2 << 20)  # 100 samples
    dataset = ss.ShardDataset(tmp_path, shuffle=True, on_error="skip" if bad else "raise")
    found = [sample for sample in dataset if sample["bin"][:-2] == body]
    numbers = sorted(int.from_bytes(sample["bin"][-2:], "big") for sample in found)
    assert numbers == [number for number in range(300) if number != bad]
    assert (
        sum(copied) < 160
    )  # the first few, a short last step, and those in the batch of a bad one


@pytest.mark.parametrize("last", [0, 1, 7])
def test_short_last_batch_does_not_make_others_wait_for_all_samples(
    last: int, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = numbered(f"memory://short-{random.getrandbits(64):x}", 96 + last, 200)
    set_limits(monkeypatch, IndexedRun, LOOK_AHEAD_BYTES=10 << 12)  # a batch and a bit
    batches = iter(loader(url, shuffle=True, window=8, prefetch_bytes=1))
    read = [wire.tar_bytes for _ in batches]
    assert len(read) == 12 + bool(last)
    assert read[5] < 0.7 * read[-1]


def test_open_maps_are_limited_over_all_datasets(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))  # half of the limit is for maps
    catalogs = [catalog_of(numbered(tmp_path / name, 10, 2)) for name in "ab"]
    before = num_maps()
    for _ in range(2):
        for catalog in catalogs:
            assert keys(catalog.open_fetcher(), range(10)) == names(range(10))
            assert num_maps() <= max(3, before)


def test_second_epoch_reuses_the_maps(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = catalog_of(numbered(tmp_path, 10, 2))
    assert keys(catalog.open_fetcher(), range(10)) == names(range(10))
    monkeypatch.setattr(module_of(ShardCatalog), "map_file", None)
    assert keys(catalog.open_fetcher(), range(10)) == names(range(10))
    again = pickle.loads(pickle.dumps(catalog))  # noqa: S301  (as a spawned worker gets it)
    assert again._mmap_pool.get(0) is None


# -- failing -------------------------------------------------------------------------------------------------------------------


def read(storage: Storage, url: str, *arguments: int, **hints: Any) -> bytes:
    return storage.read(url, *arguments, **hints)


def first_range(url: str) -> tuple[Storage, str, int, int]:
    catalog = catalog_of(url)
    return catalog.storage, catalog.shards[0].url, 0, 1024


@pytest.mark.parametrize("faults", [0, 1, 4])
def test_read_is_retried_with_exponential_backoff(faults: int, url: str, wire: Wire) -> None:
    wire.faults += [OSError("503 SlowDown")] * faults
    assert len(read(*first_range(url))) == 1024
    assert len(wire.reads) == faults + 1
    assert len(wire.sleeps) == faults
    bounds = [(0.1, 0.2), (0.2, 0.4), (0.4, 0.8), (0.8, 1.6)]
    assert all(low <= nap <= high for nap, (low, high) in zip(wire.sleeps, bounds, strict=False))


def test_pauses_double_up_to_eight_seconds(
    url: str, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random.Random, "uniform", lambda _self, _low, high: high)  # the longest
    wire.faults += [OSError("503 SlowDown")] * 8
    read(*first_range(url))
    assert wire.sleeps == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0, 8.0]


def test_error_is_raised_after_the_retry_timeout(url: str, wire: Wire) -> None:
    wire.faults += [OSError(f"attempt {number}") for number in range(99)]
    with pytest.raises(StorageError, match="attempt") as raised:
        read(*first_range(url))
    assert 52 < sum(wire.sleeps) <= 60
    assert raised.value.__notes__ == [f"tried {len(wire.reads)} times in {sum(wire.sleeps):.0f} s"]


def test_server_that_never_responded_has_a_shorter_retry_timeout(wire: Wire) -> None:
    with pytest.raises(StorageError, match="the server cannot be reached"):
        Storage().read("http://127.0.0.1:9/a.tar", 0, 10)
    assert (
        1 < sum(wire.sleeps) <= 10
    )  # the pauses are random; none begins that would end after 10 s


class ThrottledError(OSError):
    """The error of a client that reports a status."""

    def __init__(self, status: int) -> None:
        super().__init__("slow down")
        self.status = status


def test_throttling_is_reported_to_the_caller(url: str, wire: Wire) -> None:
    throttled_at: list[int] = []
    wire.faults += [ThrottledError(503), OSError("reset"), ThrottledError(429)]
    read(*first_range(url), on_throttle=lambda: throttled_at.append(len(wire.reads)))
    assert throttled_at == [1, 3]


@pytest.mark.parametrize("fault", [NotFoundError("gone"), AccessDeniedError("no"), KeyError("bug")])
def test_permanent_errors_are_raised_without_retry(fault: Exception, url: str, wire: Wire) -> None:
    wire.faults.append(fault)
    with pytest.raises(type(fault)):
        read(*first_range(url))
    assert len(wire.reads) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (NotFoundError("nothing is there"), NotFoundError),
        (ChangedError("the file changed"), ChangedError),
        (OSError("503 SlowDown"), StorageError),
        (ZeroDivisionError("a bug of a client"), ZeroDivisionError),
    ],
)
def test_store_that_fails_stops_the_epoch(
    fault: Exception, kind: type[Exception], num_workers: int, url: str, wire: Wire
) -> None:
    options = {"retry_timeout_s": 0.5}
    one = loader(
        url, num_workers=num_workers, shuffle=True, on_error="skip", storage_options=options
    )
    wire.faults += [fault] * 1000
    with pytest.raises(kind, match=str(fault)):
        list(one)
    assert one.skipped == {}


def test_stalled_store_raises_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def stall(*_: Any, **__: Any) -> bytes:
        released.wait(300)
        return b""

    monkeypatch.setattr(ShardCatalog, "fetch", stall)
    options = {"retry_timeout_s": 0.1, "read_timeout_s": 0.05}
    try:
        with pytest.raises(
            StorageError, match=r"no response for \d+ bytes in \d s; check the server"
        ):
            list(loader(url, storage_options=options))
    finally:
        released.set()
