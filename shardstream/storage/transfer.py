"""Watch a response on its way: limit its time by the bytes that have arrived, report them, and end it from another thread.

Any client may use it; those with an event loop do so by `collect` and `run_on_loop`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")
SLOWEST_BYTES_PER_S = 10_000
"""A server that sends fewer, averaged over a response, is treated like one that sends none."""


class CancelledReadError(ConnectionAbortedError):
    """A response that is not needed any more."""

    def __init__(self) -> None:
        super().__init__("the response is not needed any more")


class Cancellation(threading.Event):
    """An event that ends what blocks a thread when it is set, such as a receive."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: set[Callable[[], object]] = set()
        self._lock = threading.Lock()

    def set(self) -> None:
        """Set it, and call the functions of all `ending` blocks."""
        with self._lock:
            super().set()
            ends, self._ends = self._ends, set()
        for end in ends:
            end()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Call a function, once, if the event is set within the block or was before.

        Raises:
            CancelledReadError: If it was before.
        """
        with self._lock:
            if self.is_set():
                raise CancelledReadError
            self._ends.add(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.discard(end)


class Transfer:
    """A response on its way: by when its next bytes are due, and whether they are still needed.

    Args:
        read_timeout_s: Limit of the time without a byte. On average `SLOWEST_BYTES_PER_S` must arrive after that time.
        on_receive: Called when bytes have arrived.
        cancelled: Set when the response is not needed any more.
    """

    def __init__(
        self,
        read_timeout_s: float,
        *,
        on_receive: Callable[[], None] | None = None,
        cancelled: Cancellation | None = None,
    ) -> None:
        self.cancelled = cancelled or Cancellation()
        self.nbytes = 0
        self._begin = time.monotonic()
        self._read_timeout_s, self._on_receive = read_timeout_s, on_receive

    @property
    def due_at(self) -> float:
        """By when the next bytes must arrive, in seconds of the monotonic clock, which is the one of event loops, too."""
        average_s = self.nbytes / SLOWEST_BYTES_PER_S
        return min(time.monotonic(), self._begin + average_s) + self._read_timeout_s

    @property
    def left_s(self) -> float:
        """Seconds within which the next bytes must arrive.

        Raises:
            TimeoutError: If none are left.
        """
        left_s = self.due_at - time.monotonic()
        if left_s <= 0:
            raise self.late()
        return left_s

    def begin_body(self) -> None:
        """Count the time from now on, when the headers have arrived."""
        self._begin = time.monotonic()

    def receive(self, nbytes: int) -> None:
        """Record that bytes have arrived.

        Raises:
            CancelledReadError: If they are not needed any more.
            TimeoutError: If they arrive too slowly.
        """
        self.nbytes += nbytes
        if self._on_receive is not None:
            self._on_receive()
        if self.cancelled.is_set():
            raise CancelledReadError
        if time.monotonic() > self.due_at:
            raise self.late()

    def late(self) -> TimeoutError:
        """Return the error of a response that has stalled.

        Raises:
            TooSlowError: If it was too slow on average.
        """
        passed_s = time.monotonic() - self._begin
        problem = f"{self.nbytes} bytes arrived in {passed_s:.1f} s"
        if passed_s >= self._read_timeout_s + self.nbytes / SLOWEST_BYTES_PER_S:
            raise TooSlowError(problem)
        return TimeoutError(problem)


class TooSlowError(TimeoutError):
    """The bytes of a response arrive too slowly; those that did are not kept, or a slow server would be read from for ever."""


def collect_parts(
    chunks: Iterable[bytes], transfer: Transfer, max_bytes: float
) -> tuple[list[bytes], Exception | None]:
    """Collect the parts of a body until they have more than ``max_bytes``; return them, and why they end early.

    Raises:
        TooSlowError: If they arrive too slowly.
    """
    parts: list[bytes] = []
    try:
        for chunk in chunks:
            parts.append(chunk)
            transfer.receive(len(chunk))
            if transfer.nbytes > max_bytes:
                break
    except TooSlowError:
        raise
    except Exception as broken:  # noqa: BLE001  (the caller judges it and keeps the bytes before it)
        return parts, broken
    return parts, None


async def collect(
    chunks: AsyncIterable[bytes], transfer: Transfer, max_bytes: float
) -> tuple[bytes, Exception | None]:
    """Collect a body of an event loop as `collect_parts`, in one piece; it need not send bytes to be found too slow.

    Raises:
        TooSlowError: If they arrive too slowly.
    """
    parts: list[bytes] = []
    try:
        async with asyncio.timeout_at(transfer.due_at) as limit:
            async for chunk in chunks:
                parts.append(chunk)
                transfer.receive(len(chunk))
                if transfer.nbytes > max_bytes:
                    break
                limit.reschedule(transfer.due_at)
    except TimeoutError:
        return b"".join(parts), transfer.late()
    except Exception as broken:  # noqa: BLE001  (the caller judges it and keeps the bytes before it)
        return b"".join(parts), broken
    return b"".join(parts), None


def run_on_loop(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _T], cancelled: Cancellation
) -> _T:
    """Run a coroutine on a loop of another thread, and wait for its result; it ends when it is not needed any more.

    Raises:
        CancelledReadError: If it was cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        with cancelled.ending(future.cancel):
            return future.result()
    except CancelledError:
        raise CancelledReadError from None
    finally:
        future.cancel()  # after an interrupt of this thread
