"""Define the base class of catalogs, which map sample numbers to byte ranges of shards."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np

from shardstream.fetch.local import LARGE_BYTES, LargeSampleFetcher, LocalFetcher, Readahead
from shardstream.fetch.range_requests import FAR_READ_RATIO, Extents, IndexChunk
from shardstream.fetch.remote import BatchFetcher, RangeFetcher
from shardstream.format import Buffer
from shardstream.process import keep_freed_memory
from shardstream.samples import Fetcher, FetchOptions, Numbers, Samples
from shardstream.storage import DEFAULT_REQUESTS, AdaptiveLimit


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
    timeout_s: float = 100.0
    """Maximum time in seconds that `fetch` takes without receiving bytes before it raises."""

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
