"""Remote samples ahead of their use: few large range reads, several in flight, within a budget of bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import pairwise, repeat

import numpy as np

from shardstream.errors import IndexMismatchError, StorageError
from shardstream.format.many import Samples, Stretch, in_place, read_samples
from shardstream.storage.catalog import Extents, Numbers
from shardstream.storage.joined import AnyCatalog
from shardstream.storage.pace import Pace, Slot

# Of one request: large enough to hide latency, small enough to spread over connections.
_RANGE_BYTES = 4 << 20
# Read through: another request costs as much of a processor as so many bytes, and its latency is hidden by those beside it.
_GAP_BYTES = 256 << 10

_THREADS = 32  # of which `Pace` lets some work
_THREADS_ASIDE = 16  # for indexes and second requests, which do not wait for a slot
_LOOK_S = 0.05  # between looks at what may become late


Data = bytes | memoryview


class Range:
    """One request for consecutive samples of a shard."""

    __slots__ = (
        "data",
        "end",
        "future",
        "group",
        "left",
        "places",
        "second",
        "sent_at",
        "shard",
        "slot",
        "start",
    )

    def __init__(self, shard: int, start: int, end: int, places: Numbers) -> None:
        self.shard, self.start, self.end = shard, start, end
        self.places = places  # of its samples, in what it was made of
        self.left = len(places)
        self.group = 0  # that it was asked for with
        self.data: Data = b""
        self.future: Future[Data] | None = None
        self.second: Future[Data] | None = None  # of the same, if the first is late
        self.slot: Slot | None = None
        self.sent_at = math.inf  # on the clock

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start

    @property
    def is_answered(self) -> bool:
        """Whether its bytes are there, or will not come."""
        return any(one is not None and one.done() for one in (self.future, self.second)) or (
            self.future is None
        )


def coalesce(extents: Extents) -> list[Range]:
    """Join samples that are near each other in a shard to ranges of at most 4 MiB, or one larger sample.

    Returns:
        The ranges, in the order in which their first samples are in ``extents``.
    """
    shards, starts, ends = extents
    order = np.lexsort((starts, shards))
    shards, starts, ends = shards[order], starts[order], ends[order]
    apart = (np.diff(shards) != 0) | (starts[1:] - ends[:-1] > _GAP_BYTES)
    runs = [0, *(np.flatnonzero(apart) + 1).tolist(), len(order)]
    ranges: list[Range] = []
    for run, run_end in pairwise(runs):
        first = run
        while first < run_end:
            reach = starts[first] + _RANGE_BYTES
            last = max(first + 1, run + int(np.searchsorted(ends[run:run_end], reach, "right")))
            begin, end = int(starts[first]), int(ends[last - 1])
            ranges.append(Range(int(shards[first]), begin, end, order[first:last]))
            first = last
    return sorted(ranges, key=lambda span: int(span.places.min()))


class RangeFetcher:
    """Samples of remote tars, by range reads ahead of use.

    Args:
        catalog: The dataset.
        upcoming: Sample numbers that will be asked for, in groups that are read together, in order of first need.
        prefetch_bytes: How much to hold ahead of use; what has been begun (a shuffled window, mostly) is held beside it.
        hedges: Send a second request where an answer takes three times as long as usual, and take what comes first.
    """

    def __init__(
        self,
        catalog: AnyCatalog,
        upcoming: Iterator[Numbers],
        *,
        prefetch_bytes: int,
        hedges: bool = False,
    ) -> None:
        self._catalog = catalog
        self._upcoming = upcoming
        self._budget = prefetch_bytes
        self._hedges = hedges
        self._held: dict[int, Range] = {}
        self._ahead: dict[int, int] = {}  # bytes of the groups from which nothing has been taken
        self._groups = 0
        self._unanswered: list[Range] = []
        self._pace = Pace(catalog.threads, _THREADS)
        self._read_bytes = self._requests = 0
        self._wait_s = 0.0
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-fetch")
        self._aside = ThreadPoolExecutor(_THREADS_ASIDE, thread_name_prefix="shardstream-aside")
        self._next: tuple[Numbers, dict[int, Future[object]]] | None = None
        self._announced_at = 0.0

    def samples(self, numbers: Numbers) -> Samples:
        """Return for each number its sample, once its bytes have come, or what is wrong with it."""
        if not len(numbers):
            return []
        while self._has_room() and self._request_next():
            pass
        wanted = numbers.tolist()
        while any(number not in self._held for number in wanted) and self._request_next():
            pass
        missing = [number for number in dict.fromkeys(wanted) if number not in self._held]
        if missing:
            self._request(np.array(missing, dtype=np.int64))
        by_range: dict[Range, list[int]] = {}
        for place, number in enumerate(wanted):
            by_range.setdefault(self._held[number], []).append(place)
        return self._read(numbers, by_range)

    def stats(self) -> dict[str, float]:
        """Return what it has cost so far."""
        return {
            "read_bytes": self._read_bytes,
            "requests": self._requests,
            "throttled": self._pace.throttled_times,
            "wait_s": self._wait_s,
        }

    def close(self) -> None:
        """Drop what is held; requests in flight end by themselves, and no more are sent."""
        self._held.clear()
        self._pace.close()
        for pool in (self._pool, self._aside):
            pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, numbers: Numbers, by_range: dict[Range, list[int]]) -> Samples:
        """Read ranges in order of need; a store that fails, or lies, is the end of all that is not there yet."""
        extents = self._catalog.extents(numbers)
        stretches, order = [], []
        failed: StorageError | IndexMismatchError | None = None
        for span, places in by_range.items():
            try:
                data = self._wait(span)
            except (StorageError, IndexMismatchError) as error:
                failed = error
                break
            url = self._catalog.url_of(span.shard)
            starts, ends = extents.starts[places], extents.ends[places]
            stretches.append(Stretch(span.shard, url, data, span.start, starts, ends))
            order += places
            self._let_go(span, {int(numbers[place]) for place in places})
        samples = read_samples(stretches)
        missing = len(numbers) - len(order)
        if failed is None or not missing:
            return in_place(samples, order)
        left = sorted(set(range(len(numbers))) - set(order))
        return in_place([*samples, *repeat(failed, missing)], order + left)

    def _let_go(self, span: Range, used: set[int]) -> None:
        for number in used:
            del self._held[number]
        span.left -= len(used)
        if span.left == 0:
            span.data = b""

    def _has_room(self) -> bool:
        """Tell whether another group fits the budget; one may be ahead whatever its size."""
        ahead = sum(self._ahead.values())
        if ahead >= self._budget or len(self._held) >= self._catalog.most_ahead:
            return False
        if ahead == 0:
            return True
        self._next = self._next or self._announce()
        mean = self._catalog.total_bytes / max(1, len(self._catalog))
        return ahead + mean * len(self._next[0]) <= self._budget

    def _request_next(self) -> bool:
        """Ask for the next group; the indexes of the one after it are on their way meanwhile."""
        numbers, indexes = self._next or self._announce()
        if not len(numbers):
            return False
        for shard, index in indexes.items():
            self._await_index(shard, index)
        self._request(numbers)
        self._next = self._announce()
        return True

    def _await_index(self, shard: int, index: Future[object]) -> None:
        asked = {index}
        due_s = self._announced_at + self._pace.straggler_s - time.monotonic()
        if self._hedges and not wait(asked, timeout=min(max(0, due_s), self._catalog.limit_s)).done:
            asked.add(self._aside.submit(self._catalog.offsets, shard))
        for answered in wait(asked, return_when=FIRST_COMPLETED).done:
            answered.result()

    def _announce(self) -> tuple[Numbers, dict[int, Future[object]]]:
        numbers = next(self._upcoming, np.empty(0, dtype=np.int64))
        shards = self._catalog.shards_of(numbers) if len(numbers) else []
        self._announced_at = time.monotonic()
        return numbers, {
            shard: self._aside.submit(self._catalog.offsets, shard) for shard in shards
        }

    def _request(self, numbers: Numbers) -> None:
        self._groups += 1
        for span in coalesce(self._catalog.extents(numbers)):
            span.future = self._pool.submit(self._fetch, span)
            if self._hedges:
                self._unanswered.append(span)
            span.group = self._groups
            self._ahead[self._groups] = self._ahead.get(self._groups, 0) + span.size
            mine = numbers[span.places].tolist()
            self._held.update(zip(mine, repeat(span)))
            span.left = len(set(mine))

    def _fetch(self, span: Range) -> Data:
        """Read a range, in a thread of the pool."""
        with self._pace.slot() as slot:
            if self._pace.closed.is_set():
                return b""  # nobody is there to see it
            span.slot, span.sent_at = slot, time.monotonic()
            return self._read_range(span)

    def _hedge_late(self) -> None:
        """Send second requests for what is late."""
        self._unanswered = [span for span in self._unanswered if not span.is_answered]
        late = time.monotonic() - self._pace.straggler_s
        for span in self._unanswered:
            if span.second is None and span.sent_at < late:
                span.second = self._aside.submit(self._hedge, span)

    def _hedge(self, span: Range) -> Data:
        """Read a range whose answer is late; what the late one held is free for others then."""
        data = self._read_range(span)
        if span.slot is not None:
            span.slot.free()
        return data

    def _read_range(self, span: Range) -> Data:
        begin = time.monotonic()
        data = self._catalog.fetch(span.shard, span.start, span.end, self._pace)
        self._pace.arrived(len(data), time.monotonic() - begin)
        return data

    def _wait(self, span: Range) -> Data:
        """Return the bytes of a range.

        Raises:
            StorageError: If they cannot be had, or nothing at all comes any more.
            IndexMismatchError: If they are not those of the manifest.
        """
        if span.future is None:
            return span.data
        begin = time.monotonic()
        self._ahead.pop(span.group, None)
        try:
            span.data = self._answer(span)
        except Exception:
            self._forget(span)
            raise
        finally:
            self._wait_s += time.monotonic() - begin
        self._requests += 1
        self._read_bytes += span.size
        span.future = span.second = None
        return span.data

    def _answer(self, span: Range) -> Data:
        """Wait for a request, or for the second one like it."""
        limit_s, begin = self._catalog.limit_s, time.monotonic()
        failed: set[Future[Data]] = set()
        while True:
            asked = {one for one in (span.future, span.second) if one is not None} - failed
            look_s = _LOOK_S if self._hedges else limit_s
            answered = wait(asked, timeout=look_s, return_when=FIRST_COMPLETED).done
            good = [request for request in answered if request.exception() is None]
            if good or answered == asked:
                return (good or list(answered))[0].result()
            failed |= answered
            if time.monotonic() - max(begin, self._pace.arrived_at) >= limit_s:
                raise StorageError(
                    f"no answer for {span.size} bytes in {limit_s:.0f} s; check the server and the network",
                    shard=self._catalog.url_of(span.shard),
                    offset=span.start,
                )
            if self._hedges:
                self._hedge_late()

    def _forget(self, span: Range) -> None:
        """Let what a failed request was for be asked for again."""
        self._held = {number: held for number, held in self._held.items() if held is not span}
