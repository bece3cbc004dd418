"""How many requests are in flight: more while that brings more bytes a second, fewer when the server says that it is too much."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardstream.storage.retry import Told

_FIRST, _MOST = 8, 32
_GAIN = 1.08  # a rate that much higher pays for more connections
_WINDOW_S = 0.1  # a rate is measured over at least that long
_HOLD_WINDOWS = 16  # without gain, before it is tried again
_CALM_S = 1.0  # answers to what was sent before a halving come in for about that long


class Pace:
    """A number of slots that finds its own size, by climbing as long as the rate grows and halving at each refusal.

    Args:
        first: Slots to begin with.
        most: Slots at most.
        clock: Seconds, growing.
    """

    def __init__(
        self,
        first: int = _FIRST,
        most: int = _MOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = first
        self.throttled_times = 0
        self.closed = threading.Event()
        """Set when nobody waits for answers any more."""
        self.arrived_at = clock()
        self._usual_s, self._answers = 0.0, 0
        self._most, self._clock = most, clock
        self._turns = self._ended = 0
        self._changed = threading.Condition()
        self._halved_at = -_CALM_S
        self._best = 0.0  # bytes a second before the last climb
        self._before = first  # slots before it
        self._hold = 0
        self._begin(clock())

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Wait for a slot, and hold it; first come, first served, for what is asked for first is needed first."""
        with self._changed:
            turn = self._turns
            self._turns += 1
            while turn - self._ended >= self.limit and not self.closed.is_set():
                self._crowded = True
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._ended += 1
                self._changed.notify_all()

    @property
    def straggler_s(self) -> float:
        """Seconds after which an answer is late: three times the usual, at least 0.2."""
        return max(0.2, 3 * self._usual_s)

    def arrived(self, nbytes: int, seconds: float) -> None:
        """Hear that a request has brought so many bytes in so many seconds."""
        with self._changed:
            self._usual_s += (seconds - self._usual_s) / min(32, self._answers + 1)
            self._answers += 1
            self._bytes += nbytes
            self._count += 1
            self.arrived_at = now = self._clock()
            elapsed = now - self._since
            if elapsed >= _WINDOW_S and self._count >= self.limit:
                if self._crowded:  # else it is the reader that sets the rate
                    self._adjust(self._bytes / elapsed)
                self._begin(now)
            self._changed.notify_all()

    def throttled(self) -> None:
        """Hear that the server asked for fewer requests."""
        with self._changed:
            self.throttled_times += 1
            now = self._clock()
            if now - self._halved_at >= _CALM_S:
                self._halved_at = now
                self.limit = self._before = max(1, self.limit // 2)
                self._best, self._hold = 0.0, _HOLD_WINDOWS
                self._begin(now)

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self.closed.set()
            self._changed.notify_all()

    def _begin(self, now: float) -> None:
        self._since, self._bytes, self._count, self._crowded = now, 0, 0, False

    def _adjust(self, rate: float) -> None:
        if self._hold:
            self._hold -= 1
            return
        if rate > self._best * _GAIN:
            self._best, self._before = rate, self.limit
            self.limit = min(self._most, self.limit + max(1, self.limit // 4))
        else:
            self.limit, self._best, self._hold = self._before, 0.0, _HOLD_WINDOWS


def asking(pace: Pace | None) -> Told:
    """Return the arguments of `retry.fetch` that keep to a pace."""
    if pace is None:
        return {}
    return {"on_throttle": pace.throttled, "given_up": pace.closed}
