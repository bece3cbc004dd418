"""Run shard tasks in this thread, in processes or in a ``concurrent.futures`` pool."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, ParamSpec, Protocol, Self, TypeAlias, TypeVar, cast

from shardstream.errors import OptionError, WorkerError, why_not_imported

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
"""Values that JSON can hold."""
Result: TypeAlias = Mapping[str, JSON]
Done: TypeAlias = "Callable[[Task, Result], None]"

# Enough that no process waits for the next task; few, so that a long iterable of tasks is not read at once.
_TASKS_PER_PROCESS = 2
_EXCEPTION = 1
"""Exit code of a process that an exception has ended: a call raises it in the parent, so it was before one."""
_END_S = 60.0
_POLL_S = 0.01
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_P = ParamSpec("_P")
_T = TypeVar("_T")

# Of this process: what it keeps of the job whose task it runs, by job and name.
_kept: dict[tuple[str, str], Any] = {}
_kept_lock = threading.RLock()


class Task(Protocol):
    """A small piece of work on one shard, which any process may run.

    It can be pickled, depends on its own fields only, and does the same when it is run again. Its result is small and
    JSON: large data are written to storage by the task.
    """

    @property
    def name(self) -> str:
        """Text that identifies the task in errors."""

    def run(self) -> Mapping[str, JSON]:
        """Do the work and return its result."""


class Executor(Protocol):
    """Runs tasks in threads, processes or a cluster.

    One that runs tasks again after their worker has died counts them in an attribute ``retries``, which grows with each; progress displays
    show it.
    """

    def run(self, tasks: Iterable[Task], done: Callable[[Task, Mapping[str, JSON]], None]) -> None:
        """Run all tasks, and return when each has been handed to ``done``.

        Args:
            tasks: Read one after the other, as fast as they are run.
            done: Called with each task and its result, in any order, in the thread that called `run`.

        Raises:
            Exception: The first error of a task, with its own type and a note that names the task, or of ``done``. No more
                tasks are started then.
        """


class RetryCount:
    """Counts the tasks that an executor runs again from now on.

    Args:
        executor: The executor; those without ``retries`` never run a task again.

    Raises:
        OptionError: If it is no executor.
    """

    def __init__(self, executor: Executor | None) -> None:
        if executor is not None and not callable(getattr(executor, "run", None)):
            raise OptionError(
                f"executor= takes an executor such as ss.tasks.LocalExecutor(processes=8) or ss.ray.RayExecutor(), not {executor!r:.60}"
            )
        self._executor = executor
        self._before = self._total()

    @property
    def count(self) -> int:
        """Number of such tasks."""
        return self._total() - self._before

    def _total(self) -> int:
        return int(getattr(self._executor, "retries", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalExecutor:
    """Runs tasks on this machine: one after the other in this thread, or in several processes.

    Processes are spawned, so a script that uses them needs ``if __name__ == "__main__":``.

    Args:
        processes: 1 runs the tasks in order in this thread.

    Raises:
        OptionError: If ``processes`` is under 1.
    """

    processes: int = 1

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise OptionError(f"processes must be 1 or more, not {self.processes}")

    def run(self, tasks: Iterable[Task], done: Callable[[Task, Mapping[str, JSON]], None]) -> None:
        """Run all tasks (see `Executor.run`).

        Raises:
            WorkerError: If a process dies.
        """
        if self.processes == 1:
            for task in tasks:
                done(task, run_task(task))
            return
        with ProcessPool(self.processes) as pool:
            _run_futures(
                lambda task: pool.submit(run_task, task),
                tasks,
                done,
                most=_TASKS_PER_PROCESS * self.processes,
                why_broken=pool.why_broken,
            )


@dataclass(frozen=True, slots=True)
class Parts:
    """Runs one part of a job: the tasks ``part``, ``part + of``, ``part + 2 of`` and so on, in this process or in several.

    For jobs whose parts run in separate processes that do not know each other: a Slurm array, torchrun, several machines. The parts
    may run in any order and at the same time; `merge` publishes the dataset when all are done.

    Args:
        part: Number of this part, from 1 to ``of``.
        of: Number of parts.
        processes: Processes that run its tasks.

    Raises:
        OptionError: If there is no such part.
    """

    part: int
    of: int
    processes: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.part <= self.of:
            raise OptionError(
                f"part {self.part} of {self.of} does not exist; parts go from 1 to {max(1, self.of)}"
            )

    @classmethod
    def parse(cls, text: str, *, processes: int = 1) -> Self:
        """Parse ``part/of``.

        >>> Parts.parse("3/16")
        Parts(part=3, of=16, processes=1)

        Raises:
            OptionError: If it is anything else.
        """
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if match is None:
            raise OptionError(f"a part is given as PART/PARTS, e.g. 3/16, not {text!r}")
        return cls(int(match[1]), int(match[2]), processes)

    def run(self, tasks: Iterable[Task], done: Callable[[Task, Mapping[str, JSON]], None]) -> None:
        """Run the tasks of this part (see `Executor.run`).

        Raises:
            WorkerError: If a process dies.
        """
        mine = itertools.islice(tasks, self.part - 1, None, self.of)
        LocalExecutor(processes=self.processes).run(mine, done)


class FuturesExecutor:
    """Runs tasks in a pool of ``concurrent.futures``: threads, processes, or a cluster's client with that interface.

    The pool stays open. After an error, tasks that have begun run on in it.

    Args:
        pool: Any ``concurrent.futures.Executor``.
        in_flight: Maximum of tasks that are submitted to the pool and not finished.

    Raises:
        OptionError: If ``in_flight`` is under 1.
    """

    def __init__(self, pool: futures.Executor, *, in_flight: int = 256) -> None:
        if in_flight < 1:
            raise OptionError(f"in_flight must be 1 or more, not {in_flight}")
        self._pool = pool
        self._in_flight = in_flight

    def run(self, tasks: Iterable[Task], done: Callable[[Task, Mapping[str, JSON]], None]) -> None:
        """Run all tasks (see `Executor.run`).

        Raises:
            WorkerError: If a process of the pool dies.
        """
        _run_futures(
            lambda task: self._pool.submit(run_task, task),
            tasks,
            done,
            most=self._in_flight,
            why_broken=lambda: (
                f"killed, out of memory, or it could not start: {why_not_imported()}"
            ),
        )


def run_task(task: Task) -> Result:
    """Run a task; an error gets a note with its name."""
    try:
        return task.run()
    except Exception as error:
        # Noted where it is raised: the note is pickled with the exception.
        error.add_note(f"in task {task.name!r}")
        raise


def _run_futures(
    submit: Callable[[Task], futures.Future[Result]],
    tasks: Iterable[Task],
    done: Done,
    *,
    most: int,
    why_broken: Callable[[], str],
) -> None:
    """Keep up to ``most`` tasks in flight, and call ``done`` with each result as it arrives."""
    in_flight: dict[futures.Future[Result], Task] = {}
    try:
        for task in tasks:
            if len(in_flight) >= most:
                _collect(in_flight, done)
            in_flight[submit(task)] = task
        while in_flight:
            _collect(in_flight, done)
    except BrokenProcessPool as error:
        # The pool does not say which process ran which task.
        names = ", ".join(repr(task.name) for task in list(in_flight.values())[:8])
        raise WorkerError(
            f"a process that runs tasks died: {why_broken()}. Tasks that were not finished: {names}"
        ) from error
    finally:
        for future in in_flight:
            future.cancel()


def _collect(in_flight: dict[futures.Future[Result], Task], done: Done) -> None:
    """Wait for a task to end, and hand over the results of all that have ended, oldest first."""
    ended = futures.wait(in_flight, return_when=futures.FIRST_COMPLETED).done
    for future, task in list(in_flight.items()):
        if future in ended:
            try:
                result = future.result()
            except Exception as error:
                if _is_of_pickling(error):
                    raise OptionError(
                        f"task {task.name!r} cannot be sent to another process ({error}); functions must be importable there: at the top "
                        "level of a module, not lambdas or local functions"
                    ) from error
                raise
            del in_flight[future]
            done(task, result)


def _is_of_pickling(error: Exception) -> bool:
    """Return whether an error comes from sending a task, not from running it: `run_task` adds a note to the latter."""
    if getattr(error, "__notes__", ()):
        return False
    return isinstance(error, AttributeError | TypeError) or type(error).__name__ == "PicklingError"


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


def keep(job: str, name: str, make: Callable[[], _T]) -> _T:
    """Return a value that all tasks of a job share in this process, such as an open source or a model; if there is none, make it, and drop those of other jobs.

    Args:
        job: Identity of the call.
        name: Name of the value in its job.
        make: Makes the value; other threads wait meanwhile.
    """
    with _kept_lock:
        if (job, name) not in _kept:
            value = make()
            for other in [one for one in _kept if one[0] != job]:
                del _kept[other]
            _kept[job, name] = value
        return cast("_T", _kept[job, name])


def forget(job: str) -> None:
    """Drop the values of a job."""
    with _kept_lock:
        for one in [one for one in _kept if one[0] == job]:
            del _kept[one]
