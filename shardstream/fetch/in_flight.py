"""Range reads in flight: as many at a time as pays, and a second one for what is late, where that is wanted."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from shardstream.catalog.concat_catalog import AnyCatalog
from shardstream.errors import StorageError
from shardstream.fetch.coalesce import Range
from shardstream.storage.concurrency import Pace, Slot

_THREADS = 32  # of which `Pace` lets some work
_THREADS_ASIDE = 16  # for indexes and second requests, which do not wait for a slot
_LOOK_S = 0.05  # between looks at what may become late

Data = bytes | memoryview


class Asked:
    """A range that has been asked for."""

    __slots__ = ("first", "second", "sent_at", "slot", "span")

    def __init__(self, span: Range) -> None:
        self.span = span
        self.first: Future[Data] | None = None
        self.second: Future[Data] | None = None  # for the same, if the first is late
        self.slot: Slot | None = None
        self.sent_at = math.inf  # on the clock

    @property
    def requests(self) -> set[Future[Data]]:
        """One, or two."""
        return {one for one in (self.first, self.second) if one is not None}

    @property
    def has_come(self) -> bool:
        """Whether its bytes are there."""
        return any(one.done() and one.exception() is None for one in self.requests)


class Asking:
    """Asks for ranges of a dataset's shards; safe among threads.

    Args:
        catalog: The dataset.
        hedges: Send a second request where an answer takes three times as long as usual, and take what comes first.
    """

    def __init__(self, catalog: AnyCatalog, *, hedges: bool) -> None:
        self.pace = Pace(catalog.threads, _THREADS)
        self._catalog, self._hedges = catalog, hedges
        self._unanswered: list[Asked] = []
        self._read_bytes = self._requests = 0
        self._wait_s = 0.0
        self._lock = threading.Lock()  # of the three counts and the list above
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-fetch")
        self._aside = ThreadPoolExecutor(_THREADS_ASIDE, thread_name_prefix="shardstream-aside")

    def ask(self, span: Range) -> Asked:
        """Have a range read."""
        asked = Asked(span)
        asked.first = self._pool.submit(self._fetch, asked)
        if self._hedges:
            with self._lock:
                self._unanswered.append(asked)
        return asked

    def ask_index(self, shard: int) -> Future[object]:
        """Have the index of a shard read."""
        return self._aside.submit(self._catalog.offsets, shard)

    def await_index(self, shard: int, index: Future[object], asked_at: float) -> None:
        """Wait for an index, or for the answer to a second request for it."""
        requests = {index}
        look_s = _LOOK_S if self._hedges else None
        while not (done := wait(requests, timeout=look_s, return_when=FIRST_COMPLETED).done):
            self._hedge_late()  # ranges, too: they are needed as soon as the index is there
            if len(requests) == 1 and time.monotonic() - asked_at > self.pace.straggler_s:
                requests.add(self.ask_index(shard))
        for answered in done:
            answered.result()

    def answer(self, asked: Asked) -> Data:
        """Wait for the bytes of a range.

        Raises:
            StorageError: If they cannot be had, or nothing at all comes any more.
            IndexMismatchError: If they are not those of the manifest.
        """
        begin = time.monotonic()
        try:
            data = self._first_good(asked)
        finally:
            with self._lock:
                self._wait_s += time.monotonic() - begin
        with self._lock:
            self._requests += 1
            self._read_bytes += asked.span.size
        return data

    def stats(self) -> dict[str, float]:
        """Return what it has cost so far."""
        return {
            "read_bytes": self._read_bytes,
            "requests": self._requests,
            "throttled": self.pace.throttled_times,
            "wait_s": self._wait_s,
        }

    def close(self) -> None:
        """Requests in flight end by themselves, and no more are sent."""
        self.pace.close()
        for pool in (self._pool, self._aside):
            pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, asked: Asked) -> Data:
        """Read a range, in a thread of the pool."""
        with self.pace.slot() as slot:
            if self.pace.closed.is_set():
                return b""  # nobody is there to see it
            asked.slot, asked.sent_at = slot, time.monotonic()
            return self._read_range(asked.span)

    def _hedge_late(self) -> None:
        """Send second requests for what is late."""
        late = time.monotonic() - self.pace.straggler_s
        with self._lock:
            self._unanswered = [
                asked
                for asked in self._unanswered
                if asked.requests and not any(one.done() for one in asked.requests)
            ]
            for asked in self._unanswered:
                if asked.second is None and asked.sent_at < late:
                    asked.second = self._aside.submit(self._hedge, asked)

    def _hedge(self, asked: Asked) -> Data:
        """Read a range whose answer is late; what the late one held is free for others then."""
        data = self._read_range(asked.span)
        if asked.slot is not None:
            asked.slot.free()
        return data

    def _read_range(self, span: Range) -> Data:
        begin = time.monotonic()
        data = self._catalog.fetch(span.shard, span.start, span.end, self.pace)
        self.pace.arrived(len(data), time.monotonic() - begin)
        return data

    def _first_good(self, asked: Asked) -> Data:
        limit_s, begin = self._catalog.limit_s, time.monotonic()
        failed: set[Future[Data]] = set()
        while True:
            requests = asked.requests - failed
            look_s = _LOOK_S if self._hedges else limit_s
            answered = wait(requests, timeout=look_s, return_when=FIRST_COMPLETED).done
            good = [request for request in answered if request.exception() is None]
            if good or answered == requests:
                return (good or list(answered))[0].result()
            failed |= answered
            if time.monotonic() - max(begin, self.pace.arrived_at) >= limit_s:
                span = asked.span
                raise StorageError(
                    f"no answer for {span.size} bytes in {limit_s:.0f} s",
                    remedy="check the server and the network",
                    shard=self._catalog.url_of(span.shard),
                    offset=span.start,
                )
            if self._hedges:
                self._hedge_late()
