"""Define what fetchers need of samples that are byte ranges of shards, and merge those that are close together, one for each request."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardstream.format import Buffer
from shardstream.samples import Numbers, Samples
from shardstream.storage import DEFAULT_REQUESTS, AdaptiveLimit

FAR_READ_RATIO = 3.0
"""`ByteRanges.max_read_ratio` of samples with gaps between them."""
# Size of one request: large enough to hide latency, small enough to spread over connections.
_RANGE_BYTES = 4 << 20
# Largest gap that is read and discarded: a second request costs as much CPU time as reading this many bytes.
GAP_BYTES = 256 << 10


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


class ByteRange(NamedTuple):
    """Consecutive samples of a shard."""

    shard: int
    """Number of the shard in the dataset."""
    start: int
    """Offset of the first sample in the tar."""
    end: int
    """Offset after the last sample."""
    places: Numbers
    """Places of its samples in the extents passed to `coalesce`, shape (n,), in the order of the tar."""

    @property
    def size(self) -> int:
        """Size of the range in bytes."""
        return self.end - self.start


def coalesce(extents: Extents, max_read_ratio: float | None = None) -> list[ByteRange]:
    """Merge samples that are close together in a shard into ranges of at most 4 MiB, or one larger sample.

    Args:
        extents: Byte ranges of samples.
        max_read_ratio: Maximum of the bytes of a range for each byte of its samples.

    Returns:
        The ranges, ordered by the first of their samples in ``extents``.
    """
    shards, starts, ends = extents
    order = np.lexsort((starts, shards))
    shards, starts, ends = shards[order], starts[order], ends[order]
    is_split = (np.diff(shards) != 0) | (starts[1:] - ends[:-1] > GAP_BYTES)
    if max_read_ratio is not None:
        is_split |= _is_sparse(starts, ends, is_split, max_read_ratio)
    runs = [0, *(np.flatnonzero(is_split) + 1).tolist(), len(order)]
    ranges: list[ByteRange] = []
    for run, run_end in pairwise(runs):
        first = run
        while first < run_end:
            max_end = starts[first] + _RANGE_BYTES
            last = max(first + 1, run + int(np.searchsorted(ends[run:run_end], max_end, "right")))
            begin, end = int(starts[first]), int(ends[last - 1])
            ranges.append(ByteRange(int(shards[first]), begin, end, order[first:last]))
            first = last
    return sorted(ranges, key=lambda span: int(span.places.min()))


def _is_sparse(
    starts: Numbers, ends: Numbers, is_split: np.ndarray, max_read_ratio: float
) -> np.ndarray:
    """Return the gaps at which to split, so that no range has too few bytes of samples, shape (n - 1,)."""
    result = np.zeros_like(is_split)
    gaps = np.flatnonzero((starts[1:] > ends[:-1]) | is_split)  # neighbours are never split
    sizes = np.concatenate(([0], np.cumsum(ends - starts)))
    first = 0  # sample at which the current range begins
    for gap, last in pairwise([*gaps.tolist(), len(starts) - 1]):
        used = int(sizes[last + 1] - sizes[first])
        if is_split[gap]:
            first = gap + 1
        elif int(ends[last] - starts[first]) > max_read_ratio * used:
            result[gap] = True
            first = gap + 1
    return result
