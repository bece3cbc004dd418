"""Ask the kernel to read pages of local shards before they are used.

Page faults in a shuffled window make the disk do one read at a time; a request for the whole window allows many. The thread's count
of major page faults shows whether it waits for the disk, so data in the page cache cost nothing.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator

import numpy as np

from shardstream.catalog import Catalog, Numbers
from shardstream.fetch.coalesce import coalesce


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
        self._used_bytes = self._requested_bytes = 0
        self._page_faults = page_faults()
        self.has_waited = False
        """Whether the thread had a major page fault."""

    def record_read(self, nbytes: int) -> None:
        """Count used bytes, and request the next groups within the budget."""
        self._used_bytes += nbytes
        faults = page_faults()
        self.has_waited = self.has_waited or faults > self._page_faults
        self._page_faults = faults
        while self.has_waited and self._requested_bytes < self._used_bytes + self._budget:
            numbers = next(self._upcoming, np.empty(0, dtype=np.int64))
            if not len(numbers):
                self._budget = 0
                return
            self._advise(numbers)

    def _advise(self, numbers: Numbers) -> None:
        extents = self._catalog.extents(numbers)
        self._requested_bytes += int((extents.ends - extents.starts).sum())
        if self._requested_bytes <= self._used_bytes:  # used already, before the first page fault
            return
        for span in coalesce(extents):
            tar = self._catalog.map_shard(span.shard)
            first = span.start // mmap.PAGESIZE * mmap.PAGESIZE
            if isinstance(tar, mmap.mmap) and first < len(tar):
                tar.madvise(mmap.MADV_WILLNEED, first, span.end - first)


def page_faults() -> int:
    """Return the major page faults of this thread, or of this process where threads have no count (macOS)."""
    scope = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(scope).ru_majflt
