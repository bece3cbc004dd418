"""Merge byte ranges of samples that are close together, and request them concurrently, with optional hedging.

Requests run in threads that a process does not wait for at its end. The threads of a `ThreadPoolExecutor` are joined before any code that could
end their requests runs: after Ctrl-C a process would live until the last body has arrived.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from shardstream.errors import StorageError
from shardstream.samples import Numbers
from shardstream.storage import SLOWEST_BYTES_PER_S, AdaptiveLimit, Slot, limit_of_worker

if TYPE_CHECKING:
    from shardstream.fetch.catalog import Catalog


FAR_READ_RATIO = 3.0
"""`Catalog.max_read_ratio` of samples with gaps between them."""
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


_P = ParamSpec("_P")
_T = TypeVar("_T")
_Call = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads:
    """Up to ``most`` threads, each started when it is needed.

    Args:
        most: The largest number of threads.
        name: Prefix of their names.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False
        weakref.finalize(self, self._calls.put, None)

    def submit(self, call: Callable[_P, _T], *args: _P.args, **options: _P.kwargs) -> Future[_T]:
        """Call a function in a thread, in the order of submission.

        Raises:
            RuntimeError: If the threads were closed.
        """
        future: Future[_T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("no request can be sent after the close")
            self._calls.put((future, lambda: call(*args, **options)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
                thread = threading.Thread(
                    target=_run_calls,
                    args=(self._calls, self._idle),
                    name=f"{self._name}_{len(self._threads)}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
        return future

    def close(self) -> None:
        """Cancel the calls that have not begun; threads end after their current call."""
        with self._lock:
            self._is_closed = True
            while not self._calls.empty():
                waiting = self._calls.get()
                if waiting is not None:
                    waiting[0].cancel()
                    waiting[
                        0
                    ].set_running_or_notify_cancel()  # else who waits for it would not be told
            self._calls.put(None)

    def join(self, until: float) -> None:
        """Wait until the threads have ended, at most until a time of the monotonic clock."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


def _run_calls(calls: SimpleQueue[_Call | None], idle: threading.Semaphore) -> None:
    while True:
        try:
            waiting = calls.get_nowait()
        except Empty:
            idle.release()
            waiting = calls.get()
        if waiting is None:
            calls.put(None)  # for the next thread
            return
        future, call = waiting
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001  (raised where the result is awaited)
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del waiting, future, call  # they keep the response in memory


_SIDE_THREADS = 16  # for indexes and second requests, which do not wait for a slot
_HEDGE_POLL_S = 0.05  # interval of the check for slow requests
# At the end of the process: a thread that leaves a client's native code after it could abort the process.
_LAST_RESPONSES_S = 2.0

Data = bytes | memoryview


class InFlightRange:
    """A requested range."""

    __slots__ = ("first", "second", "sent_at", "slot", "span")

    def __init__(self, span: ByteRange) -> None:
        self.span = span
        self.first: Future[Data] | None = None
        self.second: Future[Data] | None = None  # hedge for the same range
        self.slot: Slot | None = None
        self.sent_at = math.inf  # time.monotonic()

    @property
    def requests(self) -> set[Future[Data]]:
        """The first request, and the second if it was sent."""
        return {one for one in (self.first, self.second) if one is not None}

    @property
    def is_done(self) -> bool:
        """Whether the bytes have arrived."""
        return any(one.done() and one.exception() is None for one in self.requests)


class RequestPool:
    """Request ranges of a dataset's shards; thread-safe.

    Args:
        catalog: The dataset.
        hedges: Send a second request when the first takes three times as long as usual, and use the first response.
        num_workers: Processes that read at the same time on this machine, which share its requests.
        concurrency: Limit of requests in flight of several pools; None for one of its own.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        hedges: bool,
        num_workers: int = 1,
        concurrency: AdaptiveLimit | None = None,
    ) -> None:
        self._is_shared = concurrency is not None
        self.concurrency = concurrency or limit_of_worker(catalog.threads, num_workers)
        most = self.concurrency.max_limit
        self._catalog, self._hedges = catalog, hedges
        self._pending: list[InFlightRange] = []
        self.read_bytes = self._requests = 0
        self._wait_s = 0.0
        self._lock = threading.Lock()  # guards the three counts and the list above
        # Pools with one limit share its threads: 64 datasets of a mix have as many as one.
        self._pool, self._side_pool = _threads_of_limit.setdefault(
            self.concurrency,
            (
                DaemonThreads(most, "shardstream-fetch"),
                DaemonThreads(min(most, _SIDE_THREADS), "shardstream-aside"),
            ),
        )
        _open_pools.add(self)

    def submit(self, span: ByteRange) -> InFlightRange:
        """Request a range."""
        in_flight = InFlightRange(span)
        in_flight.first = self._pool.submit(self._fetch, in_flight)
        if self._hedges:
            with self._lock:
                self._pending.append(in_flight)
        return in_flight

    def submit_index(self, chunk: IndexChunk) -> Future[object]:
        """Request a part of an index."""
        return self._side_pool.submit(self._catalog.load_index, chunk)

    def wait_for_index(self, chunk: IndexChunk, index: Future[object], sent_at: float) -> None:
        """Wait for an index, or for a second request for it."""
        begin, requests = time.monotonic(), {index}
        look_s = _HEDGE_POLL_S if self._hedges else None
        while not (done := wait(requests, timeout=look_s, return_when=FIRST_COMPLETED).done):
            self._hedge_late()  # ranges, too: they are needed as soon as the index has arrived
            if len(requests) == 1 and time.monotonic() - sent_at > self.concurrency.hedge_after_s:
                requests.add(self.submit_index(chunk))
        with self._lock:
            self._wait_s += time.monotonic() - begin
        for answered in done:
            answered.result()

    def wait_for_range(self, in_flight: InFlightRange) -> Data:
        """Wait for the bytes of a range.

        Raises:
            StorageError: If they cannot be read, or no response arrives within the timeout.
            IndexMismatchError: If they do not match the manifest.
            CancelledError: If the requests were closed before.
        """
        begin = time.monotonic()
        try:
            data = self._wait_for_success(in_flight)
        finally:
            with self._lock:
                self._wait_s += time.monotonic() - begin
        with self._lock:
            self._requests += 1
            self.read_bytes += in_flight.span.size
        return data

    def stats(self) -> dict[str, float]:
        """Return the statistics so far."""
        return {
            "read_bytes": self.read_bytes,
            "requests": self._requests,
            "throttled": 0 if self._is_shared else self.concurrency.num_throttled,
            "wait_s": self._wait_s,
        }

    def close(self) -> None:
        """Send no more requests, and end those in flight where their client can, without waiting for it."""
        self.concurrency.close()
        for pool in (self._pool, self._side_pool):
            pool.close()

    def join(self, until: float) -> None:
        """Wait until no request is in flight, at most until a time of the monotonic clock."""
        for pool in (self._pool, self._side_pool):
            pool.join(until)

    def _fetch(self, in_flight: InFlightRange) -> Data:
        """Read a range in a thread of the pool, when a slot is free."""
        with self.concurrency.slot() as slot:
            if self.concurrency.closed.is_set():
                raise CancelledError
            in_flight.slot, in_flight.sent_at = slot, time.monotonic()
            return self._read_range(in_flight)

    def _hedge_late(self) -> None:
        """Send second requests for slow ranges."""
        late = time.monotonic() - self.concurrency.hedge_after_s
        with self._lock:
            self._pending = [
                in_flight
                for in_flight in self._pending
                if in_flight.requests and not any(one.done() for one in in_flight.requests)
            ]
            for in_flight in self._pending:
                if in_flight.second is None and in_flight.sent_at < late:
                    in_flight.second = self._side_pool.submit(self._hedge, in_flight)

    def _hedge(self, in_flight: InFlightRange) -> Data:
        """Read a slow range again, and then release the slot of the first request."""
        data = self._read_range(in_flight)
        if in_flight.slot is not None:
            in_flight.slot.release()
        return data

    def _read_range(self, in_flight: InFlightRange) -> Data:
        begin, span = time.monotonic(), in_flight.span
        data = self._catalog.fetch(span.shard, span.start, span.end, self.concurrency)
        self.concurrency.record_response(len(data), time.monotonic() - begin)
        return data

    def _wait_for_success(self, in_flight: InFlightRange) -> Data:
        timeout_s, begin = self._catalog.timeout_s, time.monotonic()
        # Each client limits the time of its responses; some report no byte before the last has arrived.
        timeout_s += in_flight.span.size / SLOWEST_BYTES_PER_S
        failed: set[Future[Data]] = set()
        while True:
            requests = in_flight.requests - failed
            look_s = _HEDGE_POLL_S if self._hedges else timeout_s
            answered = wait(requests, timeout=look_s, return_when=FIRST_COMPLETED).done
            good = [request for request in answered if request.exception() is None]
            if good or answered == requests:
                return (good or list(answered))[0].result()
            failed |= answered
            if time.monotonic() - max(begin, self.concurrency.last_response_at) >= timeout_s:
                span = in_flight.span
                raise StorageError(
                    f"no response for {span.size} bytes in {timeout_s:.0f} s",
                    remedy="check the server and the network",
                    shard=self._catalog.url_of(span.shard),
                    offset=span.start,
                )
            if self._hedges:
                self._hedge_late()


_threads_of_limit: weakref.WeakKeyDictionary[AdaptiveLimit, tuple[DaemonThreads, DaemonThreads]] = (
    weakref.WeakKeyDictionary()
)
_open_pools: weakref.WeakSet[RequestPool] = weakref.WeakSet()
# Their threads stayed with the parent, which may have held their locks.
os.register_at_fork(after_in_child=_open_pools.clear)


@atexit.register
def _close_pools() -> None:
    """End the requests of loops that were left by an interrupt: the process does not wait for their bodies."""
    pools = list(_open_pools)
    for pool in pools:
        pool.close()
    until = time.monotonic() + _LAST_RESPONSES_S
    for pool in pools:
        pool.join(until)
