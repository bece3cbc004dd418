"""Merge samples that are close together in a shard into byte ranges, one per request."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from shardstream.fetch.byte_ranges import Extents
from shardstream.samples import Numbers

# Size of one request: large enough to hide latency, small enough to spread over connections.
_RANGE_BYTES = 4 << 20
# Largest gap that is read and discarded: a second request costs as much CPU time as reading this many bytes.
GAP_BYTES = 256 << 10


class ByteRange:
    """Consecutive samples of a shard.

    Args:
        shard: Number of the shard in the dataset.
        start: Offset of the first sample in the tar.
        end: Offset after the last sample.
        places: Places of its samples in the extents passed to `coalesce`, shape (n,), in the order of the tar.
    """

    __slots__ = ("end", "places", "shard", "start")

    def __init__(self, shard: int, start: int, end: int, places: Numbers) -> None:
        self.shard, self.start, self.end, self.places = shard, start, end, places

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
