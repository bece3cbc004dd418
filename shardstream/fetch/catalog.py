"""The base class of catalogs, which map sample numbers to byte ranges of shards; samples of local shards, which are mapped to memory.

The kernel is asked to read pages before they are used: page faults in a shuffled window make the disk do one read at a time; a request for the
whole window allows many. The thread's count of major page faults shows whether it waits for the disk, so data in the page cache cost nothing.
"""

from __future__ import annotations

import itertools
import mmap
import resource
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from shardstream.fetch.range_requests import FAR_READ_RATIO, Extents, IndexChunk, coalesce
from shardstream.fetch.remote import BatchFetcher, RangeFetcher
from shardstream.format import (
    Buffer,
    Rows,
    ShardSlice,
    find_samples,
    is_worth_vectorizing,
    read_one,
    read_samples,
    restore_order,
)
from shardstream.process import keep_freed_memory
from shardstream.samples import (
    Fetcher,
    FetchOptions,
    FieldChoice,
    MappedSamples,
    Numbers,
    Samples,
    split_by_step,
)
from shardstream.storage import DEFAULT_REQUESTS, AdaptiveLimit

LARGE_BYTES = 16 << 10
"""Mean size of samples from which finding many before any is copied is faster."""
# Number of samples too small to judge whether finding many before copying any is faster.
_MIN_SAMPLES_TO_JUDGE = 256


class Readahead:
    """Request pages ahead of use, from the first major page fault on.

    Args:
        catalog: The dataset.
        upcoming: Sample numbers that will be requested, in groups that are read together, in order of first use.
        budget_bytes: Maximum of bytes to read ahead.
    """

    def __init__(self, catalog: Catalog, upcoming: Iterator[Numbers], budget_bytes: int) -> None:
        self._catalog = catalog
        self._upcoming = upcoming
        self._budget = budget_bytes if catalog.can_coalesce else 0
        self.used_bytes = 0
        """Bytes of the samples that were read."""
        self._requested_bytes = 0
        self._page_faults = page_faults()
        self.has_waited = False
        """Whether the thread had a major page fault."""

    def request(self, extents: Extents) -> None:
        """Request samples that are read next, if not yet done, and the next groups within the budget, if the disk is waited for."""
        if len(extents.shards):
            start = int(extents.starts[0])
            self._catalog.map_shard(int(extents.shards[0]))[start : start + 1]  # may wait
        before, self._page_faults = self._page_faults, page_faults()
        waits = self._page_faults > before
        self.has_waited = self.has_waited or waits
        if not self.has_waited:
            return
        # Page faults would read one after the other; of data that a former epoch left in memory nothing is requested.
        if waits and self._requested_bytes <= self.used_bytes:
            for shard, start, end in zip(*extents, strict=True):
                self._will_need(int(shard), int(start), int(end))
        ahead = min(self._budget, 4 * self.used_bytes)  # less at first: asking takes time, too
        while self._requested_bytes <= self.used_bytes + ahead and self._budget:
            numbers = next(self._upcoming, np.empty(0, dtype=np.int64))
            if len(numbers):
                self._request_group(numbers)
            else:
                self._budget = 0

    def _request_group(self, numbers: Numbers) -> None:
        extents = self._catalog.extents(numbers % max(1, len(self._catalog)))
        self._requested_bytes += int((extents.ends - extents.starts).sum())
        if self._requested_bytes <= self.used_bytes:  # used already, before the first page fault
            return
        for span in coalesce(extents):
            self._will_need(span.shard, span.start, span.end)

    def _will_need(self, shard: int, start: int, end: int) -> None:
        tar = self._catalog.map_shard(shard)
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if isinstance(tar, mmap.mmap) and first < len(tar):
            tar.madvise(mmap.MADV_WILLNEED, first, end - first)


def page_faults() -> int:
    """Return the major page faults of this thread, or of this process where threads have no count (macOS)."""
    scope = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(scope).ru_majflt


class LocalFetcher(Fetcher):
    """Read samples from local tars that are mapped to memory.

    Args:
        catalog: The dataset.
        readahead: Loads pages before they are needed.
    """

    def __init__(self, catalog: Catalog, readahead: Readahead) -> None:
        self._catalog, self._readahead = catalog, readahead
        self._nsamples = max(1, len(catalog))

    def samples(self, numbers: Numbers) -> Rows:
        """Return for each number its sample, or what is wrong with it."""
        if not len(numbers):
            return []
        extents = self._catalog.extents(numbers % self._nsamples)
        self._readahead.request(extents)
        shards = set(extents.shards.tolist())
        if is_worth_vectorizing(len(numbers), len(shards)):
            by_shard = np.argsort(extents.shards, kind="stable")
            found = restore_order(read_samples(self._shard_slices(extents, by_shard)), by_shard)
        else:
            found = self._read_each(*extents)
        self._catalog.check_unchanged(shards)
        self._readahead.used_bytes += int((extents.ends - extents.starts).sum())
        return found

    def _read_each(self, shards: Numbers, starts: Numbers, ends: Numbers) -> Rows:
        """Read samples one by one, shard by shard, so that each shard is found and checked once."""
        found: list[Any] = [None] * len(shards)
        last, url = -1, ""
        tar: Buffer = b""
        places = zip(shards.tolist(), starts.tolist(), ends.tolist(), itertools.count())
        for shard, start, end, place in sorted(places):
            if shard != last:
                last, url, tar = shard, self._catalog.url_of(shard), self._catalog.map_shard(shard)
            found[place] = read_one(tar, 0, start, end, url)
        return found

    def find(self, numbers: Numbers) -> MappedSamples | None:
        """Return samples whose bytes are copied at access; None unless all have the form of the first."""
        if not len(numbers):
            return None
        extents = self._catalog.extents(numbers % self._nsamples)
        self._readahead.request(extents)
        by_shard = np.argsort(extents.shards, kind="stable")
        found = find_samples(self._shard_slices(extents, by_shard))
        if found is None:
            return None
        self._readahead.used_bytes += int((extents.ends - extents.starts).sum())
        found = found.restore_order(by_shard)
        return MappedSamples(found, extents.shards, self._catalog.check_unchanged)

    def _shard_slices(self, extents: Extents, by_shard: Numbers) -> list[ShardSlice]:
        shards, starts, ends = (column[by_shard] for column in extents)
        runs = np.flatnonzero(np.diff(shards, prepend=-1)).tolist()
        shard_slices = []
        for first, last in itertools.pairwise([*runs, len(shards)]):
            shard = int(shards[first])
            url, tar = self._catalog.url_of(shard), self._catalog.map_shard(shard)
            shard_slices.append(
                ShardSlice(shard, url, tar, 0, starts[first:last], ends[first:last])
            )
        return shard_slices

    def stats(self) -> dict[str, float]:
        """Return what it has cost so far."""
        return {"read_bytes": self._readahead.used_bytes}


class LargeSampleFetcher(LocalFetcher):
    """Read large samples from local tars: found for all steps at once, as one batch has too few of each shard to vectorise."""

    _finds = True

    def read(
        self, steps: Sequence[Numbers], max_samples: int, choice: FieldChoice | None = None
    ) -> Iterator[Rows]:
        """Yield the samples of each step."""
        numbers = np.concatenate(steps)
        found = self.find(numbers) if self._finds else None
        if found is None:  # the next samples will probably not fit either
            self._finds = self._finds and len(numbers) < _MIN_SAMPLES_TO_JUDGE
            yield from super().read(steps, max_samples)
            return
        chosen = None if choice is None else choice(found.fields)
        yield from split_by_step(steps, found if chosen is None else found.select(chosen))


class Catalog(Samples):
    """The samples of a dataset by number, 0 to n - 1; picklable, thread-safe and fork-safe.

    A sample is a byte range of a shard: tar members that share a key, as `shardstream.format.encode_member` writes them. A
    catalog over another storage format creates these bytes in `fetch` and chooses its own unit as a shard.
    `shardstream.testing.check_catalog` checks an implementation.
    """

    threads: int = DEFAULT_REQUESTS
    """Requests in flight in each process at the start; they are adapted, up to 32. A mix starts with 24 for all its parts."""
    max_prefetch_samples: int = sys.maxsize
    """Maximum of prefetched samples."""
    max_read_ratio: float | None = None
    """Maximum of the bytes that are read for each byte of the requested samples, to fetch samples with gaps together; None for no maximum."""

    @property
    def timeout_s(self) -> float:
        """Maximum time in seconds that `fetch` takes without receiving bytes before it raises; by default that of the storage."""
        return self.storage.timeouts.total_s

    @abstractmethod
    def extents(self, numbers: Numbers | Sequence[int]) -> Extents:
        """Return the byte ranges of samples, in the order given.

        Raises:
            IndexError: If there is no such sample.
        """

    @abstractmethod
    def fetch(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None = None
    ) -> bytes | memoryview:
        """Return the bytes ``start`` to ``end`` of a shard.

        Args:
            shard: Number of the shard.
            start: Offset of the first byte.
            end: Offset after the last.
            concurrency: Limit of concurrent requests; throttling by the server is reported to it.

        Raises:
            StorageError: If they cannot be read.
        """

    def index_chunks(self, numbers: Numbers) -> list[IndexChunk]:  # noqa: ARG002
        """Return the parts of indexes that `extents` needs for some samples; by default none.

        `load_index` is called for each before `extents`, several in parallel, so that `extents` does not wait.
        """
        return []

    def load_index(self, chunk: IndexChunk) -> object:
        """Read a part of an index.

        Raises:
            StorageError: If it cannot be read.
        """

    def map_shard(self, shard: int) -> Buffer:
        """Return a local shard as a buffer; called only if `is_local` is true."""
        raise NotImplementedError(f"{type(self).__name__} has no local shards")

    def check_unchanged(self, shards: Iterable[int]) -> None:
        """Check that local shards are unchanged since the dataset was opened; called after their bytes were copied.

        Raises:
            ChangedError: If one was overwritten.
        """

    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return the shard of each sample, shape (n,); by default those of `extents`."""
        return self.extents(numbers % max(1, len(self))).shards

    def place_of(self, number: int) -> tuple[str, int | None]:
        """Return the URL of a sample's shard, and its offset there."""
        extents = self.extents(np.array([number % len(self)]))
        return self.url_of(int(extents.shards[0])), int(extents.starts[0])

    def sizes(self, numbers: Numbers) -> Numbers:
        """Return the bytes of each sample, shape (n,)."""
        extents = self.extents(numbers % max(1, len(self)))
        return extents.ends - extents.starts

    def open_fetcher(
        self, upcoming: Iterable[Numbers] | None = None, options: FetchOptions | None = None
    ) -> Fetcher:
        """Open a fetcher: memory maps if all shards are local, else range reads, which prefetch if numbers are known."""
        options = options or FetchOptions()
        if self.is_local:
            keep_freed_memory()  # of the samples that are parsed or copied together
            readahead = Readahead(self, iter(upcoming or ()), options.prefetch_bytes)
            is_large = self.total_bytes >= LARGE_BYTES * max(1, len(self))
            return (LargeSampleFetcher if is_large else LocalFetcher)(self, readahead)
        ratios = [self.max_read_ratio, FAR_READ_RATIO if options.is_sparse else None]
        max_read_ratio = min((ratio for ratio in ratios if ratio is not None), default=None)
        if upcoming is None:
            return BatchFetcher(self, max_read_ratio)
        return RangeFetcher(self, iter(upcoming), options, max_read_ratio)
