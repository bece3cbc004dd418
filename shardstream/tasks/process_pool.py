"""Run functions in spawned worker processes that ignore Ctrl-C and end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, ParamSpec, Self, TypeVar

from shardstream.errors import why_not_imported

_EXCEPTION = 1
"""Exit code of a process that an exception has ended: a call raises it in the parent, so it was before one."""
_END_S = 60.0
_POLL_S = 0.01
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class ProcessPool:
    """Runs functions in worker processes; use it as a context manager.

    When the block ends with an exception, the processes are killed: their results are not needed, and some may
    still be importing numpy for seconds. When a process dies, the futures raise `BrokenProcessPool`.

    Args:
        processes: Number of processes.
        initializer: Called once in each process, with ``arguments``.
        arguments: Picklable arguments of ``initializer``.
    """

    def __init__(
        self,
        processes: int,
        initializer: Callable[..., object] | None = None,
        arguments: tuple[object, ...] = (),
    ) -> None:
        # No fork: this process has threads (fsspec's, the uploader's), and a child would inherit their locks. No fork server: it
        # keeps the environment of its own start, and credentials may have been set since.
        self._context = _Context()
        self._pool = ProcessPoolExecutor(
            processes,
            mp_context=self._context,
            initializer=_begin,
            initargs=(initializer, arguments),
        )
        # Processes are started by a thread that blocks signals: a signal ends the main thread, which would leave a process
        # that was started halfway.
        self._starter = ThreadPoolExecutor(
            1, thread_name_prefix="shardstream-start", initializer=_hold_signals
        )

    def submit(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Call a function in a worker process; return its future."""
        return self._starter.submit(self._pool.submit, function, *args, **kwargs).result()

    def why_broken(self) -> str:
        """Say why a process has died, and what to do, after the `BrokenProcessPool`."""
        end_s = time.monotonic() + _END_S
        for process in self._context.started:  # all have ended, or are killed by the pool
            process.join(_END_S)
            while process.exitcode is None and time.monotonic() < end_s:
                time.sleep(
                    _POLL_S
                )  # the pool's thread has just waited for it, too, and is about to note its exit code
        if any(process.exitcode == _EXCEPTION for process in self._context.started):
            return f"it could not start, see its traceback above; {why_not_imported()}"
        return "killed, crashed or out of memory; try fewer processes"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._starter.shutdown(wait=True)
            if kind is not None:
                # Python 3.14 has kill_workers() for this.
                for process in dict(getattr(self._pool, "_processes", None) or {}).values():
                    process.kill()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _hold_signals() -> None:
    """Let processes that this thread starts inherit blocked signals, until `_begin` ignores them."""
    resource_tracker.ensure_running()  # if it started later, it would unblock the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


class _Process(SpawnProcess):
    """A process that ends at once when the pool terminates it.

    When one has died, the pool terminates the others and waits for them before it accepts submissions. They ignore SIGTERM (see
    `_begin`), so the wait would last as long as their work, and from Python 3.12 on forever: the pool sends no other signal.
    """

    def terminate(self) -> None:
        self.kill()


class _Context(SpawnContext):
    def __init__(self) -> None:
        self.started: list[_Process] = []

    def Process(self, *args: Any, **kwargs: Any) -> _Process:  # type: ignore[override]  # noqa: N802  (as in its base)
        process = _Process(*args, **kwargs)
        self.started.append(process)
        return process


def _begin(initializer: Callable[..., object] | None, arguments: tuple[object, ...]) -> None:
    # Ctrl-C and signals to the process group reach all processes; the main process ends the workers.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="shardstream-parent", daemon=True).start()
    if initializer is not None:
        initializer(*arguments)


def _exit_with_parent() -> None:
    """End this process when its parent was killed: it would wait for the pool's queue forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
