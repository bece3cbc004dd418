"""Local shards that are not in memory: the system is asked to read what will be wanted, while what is there is used.

A disk that is waited for at each page of a shuffled window does one read at a time; asked for a window it does many. Whether it is
waited for at all is told by the thread's page faults, so data in the page cache pay nothing for this.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator

import numpy as np

from shardstream.catalog import Catalog, Numbers
from shardstream.fetch.coalesce import coalesce


class Readahead:
    """Has pages read ahead of use, once one had to be waited for.

    Args:
        catalog: The dataset.
        upcoming: Sample numbers that will be asked for, in groups that are read together, in order of first need.
        budget_bytes: How much to have read ahead.
    """

    def __init__(self, catalog: Catalog, upcoming: Iterator[Numbers], budget_bytes: int) -> None:
        self._catalog = catalog
        self._upcoming = upcoming
        self._budget = budget_bytes if catalog.can_coalesce else 0
        self._used_bytes = self._requested_bytes = 0
        self._page_faults = page_faults()
        self.has_waited = False
        """Whether a page had to be waited for."""

    def record_read(self, nbytes: int) -> None:
        """Count bytes that have been used, and ask for what comes next."""
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
        if self._requested_bytes <= self._used_bytes:  # used before anybody had to wait
            return
        for span in coalesce(extents):
            tar = self._catalog.map_shard(span.shard)
            first = span.start // mmap.PAGESIZE * mmap.PAGESIZE
            if isinstance(tar, mmap.mmap) and first < len(tar):
                tar.madvise(mmap.MADV_WILLNEED, first, span.end - first)


def page_faults() -> int:
    """Return how often this thread, or where the system does not tell (macOS) this process, has waited for a page from a disk."""
    whose = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    return resource.getrusage(whose).ru_majflt
