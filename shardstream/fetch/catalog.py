"""Define the base class of catalogs, which map sample numbers to byte ranges of shards."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shardstream.fetch.byte_ranges import FAR_READ_RATIO, ByteRanges
from shardstream.fetch.local import LARGE_BYTES, LargeSampleFetcher, LocalFetcher, Readahead
from shardstream.fetch.remote import BatchFetcher, RangeFetcher
from shardstream.process_memory import keep_freed_memory
from shardstream.samples import Fetcher, FetchOptions, Numbers


class Catalog(ByteRanges):
    """The samples of a dataset by number, 0 to n - 1; picklable, thread-safe and fork-safe.

    A sample is a byte range of a shard: tar members that share a key, as `shardstream.format.encode_member` writes them. A
    catalog over another storage format creates these bytes in `fetch` and chooses its own unit as a shard.
    `shardstream.testing.check_catalog` checks an implementation.
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
