"""Run shard tasks in this thread, in processes or in a ``concurrent.futures`` pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shardstream.errors import OptionError, WorkerError
from shardstream.tasks.process_pool import ProcessPool

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
"""Values that JSON can hold."""
Result: TypeAlias = Mapping[str, JSON]
Done: TypeAlias = "Callable[[Task, Result], None]"

# Enough that no process waits for the next task; few, so that a long iterable of tasks is not read at once.
_TASKS_PER_PROCESS = 2


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
    """Runs tasks in threads, processes or a cluster."""

    def run(self, tasks: Iterable[Task], done: Callable[[Task, Mapping[str, JSON]], None]) -> None:
        """Run all tasks, and return when each has been handed to ``done``.

        Args:
            tasks: Read one after the other, as fast as they are run.
            done: Called with each task and its result, in any order, in the thread that called `run`.

        Raises:
            Exception: The first error of a task, with its own type and a note that names the task, or of ``done``. No more
                tasks are started then.
        """


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
                done(task, _run(task))
            return
        with ProcessPool(self.processes) as pool:
            _run_futures(
                lambda task: pool.submit(_run, task),
                tasks,
                done,
                most=_TASKS_PER_PROCESS * self.processes,
            )


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
        _run_futures(lambda task: self._pool.submit(_run, task), tasks, done, most=self._in_flight)


def _run(task: Task) -> Result:
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
            f"a process that runs tasks died: killed, out of memory, or the script lacks 'if __name__ == \"__main__\":'; "
            f"try fewer processes. Tasks that were not finished: {names}"
        ) from error
    finally:
        for future in in_flight:
            future.cancel()


def _collect(in_flight: dict[futures.Future[Result], Task], done: Done) -> None:
    """Wait for a task to end, and hand over the results of all that have ended, oldest first."""
    ended = futures.wait(in_flight, return_when=futures.FIRST_COMPLETED).done
    for future, task in list(in_flight.items()):
        if future in ended:
            result = future.result()
            del in_flight[future]
            done(task, result)
