"""What is read by one request: samples that are near each other in a shard."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from shardstream.catalog import Extents, Numbers

# Of one request: large enough to hide latency, small enough to spread over connections.
_RANGE_BYTES = 4 << 20
# Read through: another request costs as much of a processor as so many bytes, and its latency is hidden by those beside it.
GAP_BYTES = 256 << 10


class ByteRange:
    """Consecutive samples of a shard.

    Args:
        shard: Its number in the dataset.
        start: Of the first sample, an offset in the tar.
        end: Behind the last sample.
        places: Of its samples in the extents that it was made of, shape (n,), in the order of the tar.
    """

    __slots__ = ("end", "places", "shard", "start")

    def __init__(self, shard: int, start: int, end: int, places: Numbers) -> None:
        self.shard, self.start, self.end, self.places = shard, start, end, places

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start


def coalesce(extents: Extents) -> list[ByteRange]:
    """Join samples that are near each other in a shard to ranges of at most 4 MiB, or one larger sample.

    Returns:
        The ranges, in the order in which their first samples are in ``extents``.
    """
    shards, starts, ends = extents
    order = np.lexsort((starts, shards))
    shards, starts, ends = shards[order], starts[order], ends[order]
    apart = (np.diff(shards) != 0) | (starts[1:] - ends[:-1] > GAP_BYTES)
    runs = [0, *(np.flatnonzero(apart) + 1).tolist(), len(order)]
    ranges: list[ByteRange] = []
    for run, run_end in pairwise(runs):
        first = run
        while first < run_end:
            reach = starts[first] + _RANGE_BYTES
            last = max(first + 1, run + int(np.searchsorted(ends[run:run_end], reach, "right")))
            begin, end = int(starts[first]), int(ends[last - 1])
            ranges.append(ByteRange(int(shards[first]), begin, end, order[first:last]))
            first = last
    return sorted(ranges, key=lambda span: int(span.places.min()))
