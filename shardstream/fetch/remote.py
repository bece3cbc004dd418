"""Read remote samples by few large range requests: prefetched within a byte budget, or batches that are not known in advance."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from shardstream.errors import IndexMismatchError, StorageError
from shardstream.fetch.range_requests import (
    ByteRange,
    Data,
    Extents,
    IndexChunk,
    InFlightRange,
    RequestPool,
    coalesce,
)
from shardstream.format import Rows, ShardSlice, as_rows, from_rows, read_samples
from shardstream.process import release_freed_memory
from shardstream.samples import Fetcher, FetchOptions, Numbers

if TYPE_CHECKING:
    from shardstream.fetch.catalog import Catalog

_NEXT_GROUP_FRACTION = (
    0.2  # prefetch of the next group when a group is started, as a fraction of the started one
)


class _Group:
    """Samples that are read together, usually a window."""

    def __init__(self) -> None:
        self.left_bytes = 0.0


class _Part:
    """The samples of a group that one request reads."""

    __slots__ = ("bytes_each", "ends", "group", "in_flight", "is_read", "numbers", "span", "starts")

    def __init__(self, group: _Group, span: ByteRange, numbers: Numbers, extents: Extents) -> None:
        self.group, self.span = group, span
        self.numbers = numbers[span.places]  # sample numbers, in the order of the tar
        self.starts, self.ends = extents.starts[span.places], extents.ends[span.places]
        self.bytes_each = span.size / len(self.numbers)
        self.in_flight: InFlightRange | None = None
        self.is_read = False


class RangeFetcher(Fetcher):
    """Prefetch samples of remote tars by range reads; for one thread.

    Completed ranges are parsed into samples at once, so that each sample's memory is freed after its use: a shuffled window shrinks
    while the next one is read. Whole ranges would stay in memory until the end of the window.

    Args:
        catalog: The dataset.
        upcoming: Sample numbers that will be requested, in groups that are read together, in order of first use.
        options: Of the fetcher. The unused rest of all started groups plus a fifth of the last one may exceed ``prefetch_bytes``.
        max_read_ratio: As `Catalog.max_read_ratio`.
    """

    def __init__(
        self,
        catalog: Catalog,
        upcoming: Iterator[Numbers],
        options: FetchOptions,
        max_read_ratio: float | None = None,
    ) -> None:
        self._catalog = catalog
        self._upcoming, self._max_read_ratio = upcoming, max_read_ratio
        self._requests = RequestPool(
            catalog,
            hedges=options.hedge,
            num_workers=options.num_workers,
            concurrency=options.concurrency,
        )
        self._budget = self._limit = float(options.prefetch_bytes)
        self._bytes = 0.0  # requested and not used yet
        self._parts: dict[int, _Part] = {}  # by sample number, until the sample is used
        self._rows: dict[int, object] = {}  # by sample number: parsed and not used yet
        self._queue: deque[_Part] = deque()  # of planned groups, in order of use
        self._parts_in_flight: list[_Part] = []
        self._started: set[_Group] = set()
        self._next: tuple[Numbers, dict[IndexChunk, Future[object]]] | None = None
        self._indexes_requested_at = 0.0

    def request(self, numbers: Numbers) -> Callable[[], Rows]:
        """Request the ranges of samples; return a function that requests the next ones, and then waits, as `samples`."""
        if not len(numbers):
            return list
        wanted = numbers.tolist()
        parts = self._parts_of(dict.fromkeys(wanted))
        for part in parts:
            self._request(part)
        self._mark_started({part.group for part in parts})
        return partial(self._wait, wanted, parts)

    def _wait(self, wanted: list[int], parts: list[_Part]) -> Rows:
        if wanted[0] not in self._parts:
            raise RuntimeError("these samples were returned before, or the fetcher was closed")
        self._prefetch()
        failed = self._read(parts)
        self._read_completed()
        found = from_rows([self._rows.get(number, failed) for number in wanted])
        self._release_samples(self._rows.keys() & wanted)
        return found

    def stats(self) -> dict[str, float]:
        """Return the statistics so far."""
        return self._requests.stats()

    def close(self) -> None:
        """Free all samples and send no more requests, without waiting for those in flight."""
        self._parts.clear()
        self._rows.clear()
        self._queue.clear()
        self._parts_in_flight.clear()
        self._requests.close()
        release_freed_memory(self._requests.read_bytes)

    def _parts_of(self, wanted: dict[int, None]) -> list[_Part]:
        """Return the parts that contain these samples, in order of use."""
        while not self._parts.keys() >= wanted.keys() and self._plan_next_group():
            pass
        missing = [number for number in wanted if number not in self._parts]
        if missing:
            self._plan_group(np.array(missing, dtype=np.int64))
        return list(dict.fromkeys(map(self._parts.__getitem__, wanted)))

    def _mark_started(self, groups: set[_Group]) -> None:
        """Mark groups as started and raise the prefetch limit."""
        for group in groups - self._started:
            self._started.add(group)
            started_bytes = sum(one.left_bytes for one in self._started)
            self._limit = max(self._budget, started_bytes + _NEXT_GROUP_FRACTION * group.left_bytes)

    def _prefetch(self) -> None:
        """Request the next parts within the limit."""
        while self._bytes < self._limit:
            if not self._queue:
                if (
                    len(self._parts) >= self._catalog.max_prefetch_samples
                    or not self._plan_next_group()
                ):
                    return
            elif self._queue[0].in_flight is not None:
                self._queue.popleft()
            elif self._bytes + self._queue[0].span.size <= self._limit or not self._bytes:
                self._request(self._queue.popleft())
            else:
                return

    def _request(self, part: _Part) -> None:
        if part.in_flight is None:
            part.in_flight = self._requests.submit(part.span)
            self._parts_in_flight.append(part)
            self._bytes += part.span.size

    def _plan_next_group(self) -> bool:
        """Plan the requests of the next group, and request the indexes of the group after it."""
        numbers, indexes = self._next or self._request_indexes()
        if not len(numbers):
            return False
        for chunk, index in indexes.items():
            self._requests.wait_for_index(chunk, index, self._indexes_requested_at)
        # A tail may repeat samples.
        unplanned = [n for n in dict.fromkeys(numbers.tolist()) if n not in self._parts]
        self._plan_group(
            numbers if len(unplanned) == len(numbers) else np.array(unplanned, dtype=np.int64)
        )
        self._next = self._request_indexes()
        return True

    def _request_indexes(self) -> tuple[Numbers, dict[IndexChunk, Future[object]]]:
        numbers = next(self._upcoming, np.empty(0, dtype=np.int64))
        chunks = self._catalog.index_chunks(numbers % max(1, len(self._catalog)))
        self._indexes_requested_at = time.monotonic()
        return numbers, {chunk: self._requests.submit_index(chunk) for chunk in chunks}

    def _plan_group(self, numbers: Numbers) -> None:
        group = _Group()
        extents = self._catalog.extents(numbers % max(1, len(self._catalog)))
        for span in coalesce(extents, self._max_read_ratio):
            part = _Part(group, span, numbers, extents)
            group.left_bytes += span.size
            self._queue.append(part)
            self._parts.update(zip(part.numbers.tolist(), repeat(part)))

    def _read(self, parts: Iterable[_Part]) -> StorageError | IndexMismatchError | None:
        """Parse parts in order of use; return the first error of storage or checksums, which ends the parsing."""
        for part in parts:
            if part.is_read:
                continue
            assert part.in_flight is not None  # noqa: S101  (by the caller)
            try:
                self._read_part(part, part.in_flight)
            except (StorageError, IndexMismatchError) as error:
                self._discard_part(part)
                return error
        return None

    def _read_completed(self) -> None:
        """Parse completed parts that are not needed yet, so that they reuse the memory of samples just freed."""
        for part in self._parts_in_flight:
            if not part.is_read and part.in_flight is not None and part.in_flight.is_done:
                self._read_part(part, part.in_flight)
        self._parts_in_flight = [part for part in self._parts_in_flight if not part.is_read]

    def _read_part(self, part: _Part, in_flight: InFlightRange) -> None:
        data = self._requests.wait_for_range(in_flight)
        rows = _parse(self._catalog, part.span, data, part.starts, part.ends)
        self._rows.update(zip(part.numbers.tolist(), rows, strict=True))
        part.is_read = True
        in_flight.first = in_flight.second = None  # the futures keep the response in memory

    def _release_samples(self, used: set[int]) -> None:
        deque(map(self._rows.__delitem__, used), maxlen=0)
        for part, count in Counter(map(self._parts.pop, used)).items():
            self._bytes -= count * part.bytes_each
            part.group.left_bytes -= count * part.bytes_each
        self._started = {group for group in self._started if group.left_bytes > 0.5}

    def _discard_part(self, part: _Part) -> None:
        """Forget a failed part, so that its samples can be requested again."""
        part.is_read = True
        self._bytes -= part.span.size
        part.group.left_bytes -= part.span.size
        self._parts = {number: held for number, held in self._parts.items() if held is not part}


class BatchFetcher(Fetcher):
    """Read batches of remote samples by range requests without prefetching; thread-safe.

    Args:
        catalog: The dataset.
        max_read_ratio: As `Catalog.max_read_ratio`.
    """

    def __init__(self, catalog: Catalog, max_read_ratio: float | None = None) -> None:
        self._catalog, self._max_read_ratio = catalog, max_read_ratio
        self._pool = RequestPool(catalog, hedges=False)

    def request(self, numbers: Numbers) -> Callable[[], Rows]:
        """Request the ranges of samples; return a function that waits for them, as `samples`.

        The function raises `StorageError` if bytes cannot be read, and `IndexMismatchError` if they do not match the manifest.
        """
        extents = self._catalog.extents(numbers % max(1, len(self._catalog)))
        spans = coalesce(extents, self._max_read_ratio)
        return partial(self._wait, extents, [self._pool.submit(span) for span in spans])

    def _wait(self, extents: Extents, ranges: Sequence[InFlightRange]) -> Rows:
        rows: dict[int, object] = {}
        for in_flight in ranges:
            span, data = in_flight.span, self._pool.wait_for_range(in_flight)
            starts, ends = extents.starts[span.places], extents.ends[span.places]
            found = _parse(self._catalog, span, data, starts, ends)
            rows.update(zip(span.places.tolist(), found, strict=True))
        return from_rows([rows[place] for place in range(len(extents.shards))])

    def stats(self) -> dict[str, float]:
        """Return what it has cost so far."""
        return self._pool.stats()

    def close(self) -> None:
        """Send no more requests, without waiting for those in flight."""
        self._pool.close()


def _parse(
    catalog: Catalog, span: ByteRange, data: Data, starts: Numbers, ends: Numbers
) -> list[object]:
    """Return the samples of a range, or their errors, in the order of the tar."""
    url = catalog.url_of(span.shard)
    return as_rows(read_samples([ShardSlice(span.shard, url, data, span.start, starts, ends)]))
