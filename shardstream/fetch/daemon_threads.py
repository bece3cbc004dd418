"""Run requests in threads that a process does not wait for at its end, whatever their server does.

The threads of a `ThreadPoolExecutor` are joined before any code that could end their requests runs: after Ctrl-C a process would live
until the last body has arrived.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

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
