"""Adapt the number of requests in flight: more while that raises the byte rate, fewer when the server throttles."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from shardstream.storage.response import Cancellation
from shardstream.storage.retry import ReadHints

DEFAULT_REQUESTS = 24
"""Requests in flight of a process at the start."""

_INITIAL_LIMIT, _MAX_LIMIT = 8, 32
# Requests of all workers of a machine at the start, unless each would have fewer than two.
_MACHINE_REQUESTS, _CORE_REQUESTS, _MIN_REQUESTS = 48, 16, 2
_GAIN = 1.08  # a rate this much higher justifies more connections
_WINDOW_S = 0.1  # a rate is measured over at least that long
_HOLD_WINDOWS = 16  # windows without gain before more are tried again
_COOLDOWN_S = 1.0  # responses to requests from before a halving arrive for about this time
_LATENCIES_KEPT = 32  # the median of these is the usual latency
_LATE, MIN_LATE_S = 3, 0.2  # times the median, but not less
_FEW, _LATE_AT_FIRST_S = 4, 2.0  # the first responses wait for connections


class Slot:
    """Permission for one request in flight."""

    __slots__ = ("_limit", "is_held")

    def __init__(self, concurrency: AdaptiveLimit) -> None:
        self._limit, self.is_held = concurrency, True

    def release(self) -> None:
        """Release it before the request ends, because its result is not needed any more."""
        self._limit.release(self)


class AdaptiveLimit:
    """A number of slots that grows while the byte rate grows, and is halved when the server throttles.

    Args:
        initial: Slots at the start.
        max_limit: Maximum of slots.
        clock: Returns a monotonic time in seconds.
    """

    def __init__(
        self,
        initial: int = _INITIAL_LIMIT,
        max_limit: int = _MAX_LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = initial
        self.num_throttled = 0
        self.closed = Cancellation()
        """Set when no response is needed any more."""
        self.last_response_at = clock()
        self._latencies_s: deque[float] = deque(maxlen=_LATENCIES_KEPT)
        self.max_limit, self._clock = max_limit, clock
        self._active = 0
        self._changed = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._halved_at = self._throttled_at = clock() - _COOLDOWN_S
        self._best_rate = 0.0  # bytes a second before the last climb
        self._previous_limit = initial  # slots before it
        self._windows_to_hold = 0
        self._begin_window(clock())

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """Wait for a slot, and hold it until it is released or the block ends."""
        turn_lock = threading.Lock()
        with self._changed:
            turn_lock.acquire()
            self._waiting.append(turn_lock)
            self._is_saturated |= self._active >= self.limit
            self._admit_waiting()
        turn_lock.acquire()  # in the order of arrival, which is the order of need
        slot = Slot(self)
        try:
            yield slot
        finally:
            self.release(slot)

    def release(self, slot: Slot) -> None:
        """Release a slot; a second call does nothing."""
        with self._changed:
            if slot.is_held:
                slot.is_held = False
                self._active -= 1
                self._admit_waiting()

    @property
    def hedge_after_s(self) -> float:
        """Seconds after which a response is late: three times the median, at least 0.2; infinite while the server throttles."""
        with self._changed:
            if self._clock() - self._throttled_at < _COOLDOWN_S:
                return math.inf
            if len(self._latencies_s) < _FEW:
                return _LATE_AT_FIRST_S
            return max(MIN_LATE_S, _LATE * median(self._latencies_s))

    def record_response(self, nbytes: int, seconds: float) -> None:
        """Record the bytes and the seconds of a request that has ended."""
        with self._changed:
            self._latencies_s.append(seconds)
            self._bytes += nbytes
            self._count += 1
            self.last_response_at = now = self._clock()
            elapsed = now - self._since
            if elapsed >= _WINDOW_S and self._count >= self.limit:
                if self._is_saturated:  # else the reader limits the rate
                    self._adjust_limit(self._bytes / elapsed)
                self._begin_window(now)
            self._admit_waiting()

    def record_activity(self) -> None:
        """Record that bytes have arrived, for this request or for another one that waits for them."""
        self.last_response_at = self._clock()

    def record_throttling(self) -> None:
        """Record that the server asked for fewer requests."""
        with self._changed:
            self.num_throttled += 1
            now = self._throttled_at = self._clock()
            if now - self._halved_at >= _COOLDOWN_S:
                self._halved_at = now
                self.limit = self._previous_limit = max(1, self.limit // 2)
                self._best_rate, self._windows_to_hold = 0.0, _HOLD_WINDOWS
                self._begin_window(now)

    def close(self) -> None:
        """Release all waiting threads, now and later."""
        self.closed.set()
        with self._changed:
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        # A thread may request a slot after the close; nothing would wake it.
        while self._waiting and (self.closed.is_set() or self._active < self.limit):
            self._active += 1
            self._waiting.popleft().release()

    def _begin_window(self, now: float) -> None:
        self._since, self._bytes, self._count, self._is_saturated = now, 0, 0, False

    def _adjust_limit(self, rate: float) -> None:
        if self._windows_to_hold:
            self._windows_to_hold -= 1
            return
        if rate > self._best_rate * _GAIN:
            self._best_rate, self._previous_limit = rate, self.limit
            self.limit = min(self.max_limit, self.limit + max(1, self.limit // 4))
        else:
            self.limit = self._previous_limit
            self._best_rate, self._windows_to_hold = 0.0, _HOLD_WINDOWS


def share_requests(wanted: int, num_workers: int, cores: int) -> tuple[int, int]:
    """Return the number of requests in flight of each worker at the start, and its maximum.

    >>> share_requests(24, 2, cores=2), share_requests(24, 24, cores=2), share_requests(24, 24, cores=64)
    ((24, 32), (2, 3), (24, 32))
    """
    share = max(_MIN_REQUESTS, max(_MACHINE_REQUESTS, _CORE_REQUESTS * cores) // num_workers)
    return min(wanted, share), min(_MAX_LIMIT, -(-share * 4 // 3))


def limit_of_worker(wanted: int, num_workers: int) -> AdaptiveLimit:
    """Return the limit of one of the workers that read at the same time on this machine."""
    return AdaptiveLimit(*share_requests(wanted, num_workers, os.cpu_count() or 1))


def hints_of(concurrency: AdaptiveLimit | None) -> ReadHints:
    """Return the arguments of `Storage.read` that apply a limit."""
    if concurrency is None:
        return {}
    return {
        "on_throttle": concurrency.record_throttling,
        "on_receive": concurrency.record_activity,
        "cancelled": concurrency.closed,
    }
