"""Read samples of local shards, which are mapped to memory, and ask the kernel to read pages before they are used.

Page faults in a shuffled window make the disk do one read at a time; a request for the whole window allows many. The thread's count
of major page faults shows whether it waits for the disk, so data in the page cache cost nothing.
"""

from __future__ import annotations

import itertools
import mmap
import resource
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardstream.fetch.range_requests import Extents, coalesce
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
from shardstream.samples import Fetcher, FieldChoice, MappedSamples, Numbers, split_by_step

if TYPE_CHECKING:
    from shardstream.fetch.catalog import Catalog

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
