"""Remote samples ahead of their use: few large range reads, several in flight, within a budget of bytes."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import repeat

import numpy as np

from shardstream.catalog import Catalog, Numbers
from shardstream.errors import IndexMismatchError, StorageError
from shardstream.fetch.coalesce import ByteRange, coalesce
from shardstream.fetch.in_flight import InFlightRange, RequestPool
from shardstream.format import Samples, ShardSlice, as_rows, from_rows, read_samples
from shardstream.process_memory import give_back_freed_memory

_NEXT_GROUP_FRACTION = 0.2  # of a group, when it is begun; the more of it is used, the more


class _Group:
    """Samples that are read together, a window mostly."""

    def __init__(self) -> None:
        self.left_bytes = 0.0


class _Part:
    """The samples of a group that one request brings."""

    __slots__ = ("bytes_each", "group", "in_flight", "is_read", "numbers", "span")

    def __init__(self, group: _Group, span: ByteRange, numbers: Numbers) -> None:
        self.group, self.span = group, span
        self.numbers = numbers  # of its samples, in the order of the tar
        self.bytes_each = span.size / len(numbers)
        self.in_flight: InFlightRange | None = None
        self.is_read = False


class RangeFetcher:
    """Samples of remote tars, by range reads ahead of use; for one thread.

    What has come is taken apart at once, and each sample's memory is free again when it is used: a shuffled window shrinks while
    the next one comes in, where its ranges would be held to its end.

    Args:
        catalog: The dataset.
        upcoming: Sample numbers that will be asked for, in groups that are read together, in order of first need.
        prefetch_bytes: How much to hold, or have asked for, before it is used; but what is left of groups that have been begun, and a
            fifth of the last of them beside, may be more.
        hedges: Send a second request where an answer takes three times as long as usual, and take what comes first.
    """

    def __init__(
        self,
        catalog: Catalog,
        upcoming: Iterator[Numbers],
        *,
        prefetch_bytes: int,
        hedges: bool = False,
    ) -> None:
        self._catalog = catalog
        self._upcoming = upcoming
        self._requests = RequestPool(catalog, hedges=hedges)
        self._budget = self._limit = float(prefetch_bytes)
        self._bytes = 0.0  # asked for, and not used yet
        self._parts: dict[int, _Part] = {}  # by number, until that is used
        self._rows: dict[int, object] = {}  # by number: what has come, and is not used yet
        self._queue: deque[_Part] = deque()  # of opened groups, in order of need
        self._parts_in_flight: list[_Part] = []
        self._started: set[_Group] = set()
        self._next: tuple[Numbers, dict[int, Future[object]]] | None = None
        self._indexes_requested_at = 0.0

    def samples(self, numbers: Numbers) -> Samples:
        """Return for each number its sample, once its bytes have come, or what is wrong with it."""
        if not len(numbers):
            return []
        wanted = numbers.tolist()
        parts = self._parts_of(dict.fromkeys(wanted))
        for part in parts:
            self._request(part)
        self._mark_started({part.group for part in parts})
        self._prefetch()
        failed = self._read(parts)
        self._read_completed()
        found = from_rows([self._rows.get(number, failed) for number in wanted])
        self._release_samples(self._rows.keys() & wanted)
        return found

    def find(self, numbers: Numbers) -> None:
        """Return nothing: `samples` copies no more than was asked for."""

    def stats(self) -> dict[str, float]:
        """Return what it has cost so far."""
        return self._requests.stats()

    def close(self) -> None:
        """Drop what is held; requests in flight end by themselves, and no more are sent."""
        self._parts.clear()
        self._rows.clear()
        self._queue.clear()
        self._requests.close()
        give_back_freed_memory()

    def _parts_of(self, wanted: dict[int, None]) -> list[_Part]:
        """Return what brings these samples, in order of need."""
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
            begun_bytes = sum(one.left_bytes for one in self._started)
            self._limit = max(self._budget, begun_bytes + _NEXT_GROUP_FRACTION * group.left_bytes)

    def _prefetch(self) -> None:
        """Ask for what will be needed next, within the limit."""
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
        """Plan the requests of the next group; the indexes of the one after it are on their way meanwhile."""
        numbers, indexes = self._next or self._request_indexes()
        if not len(numbers):
            return False
        for shard, index in indexes.items():
            self._requests.wait_for_index(shard, index, self._indexes_requested_at)
        fresh = [n for n in dict.fromkeys(numbers.tolist()) if n not in self._parts]  # in a tail
        self._plan_group(numbers if len(fresh) == len(numbers) else np.array(fresh, dtype=np.int64))
        self._next = self._request_indexes()
        return True

    def _request_indexes(self) -> tuple[Numbers, dict[int, Future[object]]]:
        numbers = next(self._upcoming, np.empty(0, dtype=np.int64))
        shards = self._catalog.shards_of(numbers) if self._catalog.has_indexes else []
        self._indexes_requested_at = time.monotonic()
        return numbers, {shard: self._requests.submit_index(shard) for shard in shards}

    def _plan_group(self, numbers: Numbers) -> None:
        group = _Group()
        for span in coalesce(self._catalog.extents(numbers)):
            part = _Part(group, span, numbers[span.places])
            group.left_bytes += span.size
            self._queue.append(part)
            self._parts.update(zip(part.numbers.tolist(), repeat(part)))

    def _read(self, parts: Iterable[_Part]) -> StorageError | IndexMismatchError | None:
        """Take parts apart, in order of need; a store that fails, or lies, is the end of all that is not there yet."""
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
        """Take apart what is not needed yet: its memory is that of samples just used, where whole answers need new."""
        for part in self._parts_in_flight:
            if not part.is_read and part.in_flight is not None and part.in_flight.is_done:
                self._read_part(part, part.in_flight)
        self._parts_in_flight = [part for part in self._parts_in_flight if not part.is_read]

    def _read_part(self, part: _Part, in_flight: InFlightRange) -> None:
        data = self._requests.wait_for_range(in_flight)
        _, starts, ends = self._catalog.extents(part.numbers)
        url = self._catalog.url_of(part.span.shard)
        shard_slice = ShardSlice(part.span.shard, url, data, part.span.start, starts, ends)
        rows = as_rows(read_samples([shard_slice]))
        self._rows.update(zip(part.numbers.tolist(), rows, strict=True))
        part.is_read = True
        in_flight.first = in_flight.second = None  # who hold the answer

    def _release_samples(self, used: set[int]) -> None:
        deque(map(self._rows.__delitem__, used), maxlen=0)
        for part, count in Counter(map(self._parts.pop, used)).items():
            self._bytes -= count * part.bytes_each
            part.group.left_bytes -= count * part.bytes_each
        self._started = {group for group in self._started if group.left_bytes > 0.5}

    def _discard_part(self, part: _Part) -> None:
        """Let what a failed request was for be asked for again."""
        part.is_read = True
        self._bytes -= part.span.size
        part.group.left_bytes -= part.span.size
        self._parts = {number: held for number, held in self._parts.items() if held is not part}
