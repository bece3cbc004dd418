"""Define what fetchers need of samples that are byte ranges of shards."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardstream.format import Buffer
from shardstream.samples import Numbers, Samples
from shardstream.storage import DEFAULT_REQUESTS, AdaptiveLimit

FAR_READ_RATIO = 3.0
"""`ByteRanges.max_read_ratio` of samples with gaps between them."""


class Extents(NamedTuple):
    """Byte ranges of samples: int64 arrays of equal length."""

    shards: Numbers
    """Number of the shard, from 0."""
    starts: Numbers
    """Offset of the sample's first header in its tar."""
    ends: Numbers
    """Offset after the sample."""


class IndexChunk(NamedTuple):
    """A part of the index of a shard."""

    shard: int
    number: int
    """Place of the chunk in the index, from 0."""


class ByteRanges(Samples):
    """What fetchers need of samples that are byte ranges of shards; see `Catalog`, which chooses one of the fetchers."""

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
