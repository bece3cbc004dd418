"""Errors for loader workers that die, with the samples that each was reading.

torch notices a dead worker by SIGCHLD, or when it next waits for the worker's queue, and names its process id. Where the loader waits
for a batch, this module adds which worker it was, which samples of which shards it was reading, and what to do. A worker reports its
position as one number for each batch, in shared memory.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any, Self, TypeVar

import numpy as np
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import signal_handling

from shardstream.errors import (
    ShardStreamError,
    WorkerError,
    plural,
    redact,
    why_not_imported,
)
from shardstream.loader.serialize import is_picklable_type
from shardstream.order import RankPartition, WorkerSteps
from shardstream.samples import Samples

_T = TypeVar("_T")
_REMEDIES = {
    "SIGKILL": "usually the system ran out of memory (see dmesg): use fewer workers, or a smaller prefetch_factor, "
    "prefetch_bytes or window",
    "SIGBUS": "either /dev/shm is full: enlarge it (docker run --shm-size), or use fewer workers; or a local shard was cut while it was "
    "read: write new data to a folder of its own",
}
_CRASHED = "a library crashed: iterate with num_workers=0 and python -X faulthandler to see where"
_IN_WORKER = "in DataLoader worker process"
# A worker's connections close before the process ends; on a busy machine, or during a core dump, long before.
_DEATH_S = 60.0


def track_progress(
    worker_batches: Generator[_T], current_batches: Any, worker: int
) -> Generator[_T]:
    """Yield worker batches and record progress in shared memory: n while batch n is made, then -n.

    Args:
        worker_batches: The worker's batches, numbered from 1.
        current_batches: Shape (workers,), int64, in shared memory.
        worker: Its place there.
    """
    with closing(worker_batches):
        number = 0
        while True:
            number += 1
            current_batches[worker] = number
            try:
                worker_batch = next(worker_batches, None)
            # The worker sends it and ends by itself; after exit() the number stays.
            except Exception:
                current_batches[worker] = -number
                raise
            current_batches[worker] = -number
            if worker_batch is None:
                return
            yield worker_batch


def is_batch_made(current_batches: Any, number: int, partition: RankPartition | None) -> bool:
    """Return whether the worker whose turn it is has made the loader's batch ``number``, from 0 (see `track_progress`).

    Once a worker has ended, turns are no longer known: the answer may be wrong, and must decide nothing but when to wait.
    """
    workers = len(current_batches)
    worker, own = number % workers, number // workers
    if partition is not None:
        worker, own = partition.worker_of(number, workers)
    current = int(current_batches[worker])
    made = -current if current <= 0 else current - 1
    return made > own


class WorkerWatch:
    """Context that turns errors caused by a dead worker into a `WorkerError` with its position.

    Args:
        workers: torch's iterator, which holds the processes; other iterators have none.
        current_batches: As in `track_progress`.
        partition: The rank's steps, if they are known.
        catalog: All samples by number.
    """

    def __init__(
        self,
        workers: Any,
        current_batches: Any,
        partition: RankPartition | None,
        catalog: Samples | None,
    ) -> None:
        self._workers: list[Any] = list(getattr(workers, "_workers", ()))
        self._current_batches = current_batches
        self._partition, self._catalog = partition, catalog

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        if self._workers and _is_lost_connection(error):
            self._wait_for_exit()
        if isinstance(error, RuntimeError | OSError | EOFError) and not isinstance(
            error, ShardStreamError
        ):
            worker_error = self.dead_worker_error()
            if worker_error is not None:
                raise worker_error from error

    def _wait_for_exit(self) -> None:
        """Wait until a worker with closed connections has ended, so that it has an exit code."""
        until = time.monotonic() + _DEATH_S
        while all(worker.is_alive() for worker in self._workers) and time.monotonic() < until:
            time.sleep(0.005)

    def dead_worker_error(self) -> WorkerError | None:
        """Return the error for the first dead worker; None if all are alive."""
        for number, worker in enumerate(self._workers):
            if not worker.is_alive() and (
                worker.exitcode or int(self._current_batches[number]) > 0
            ):
                return WorkerError(self._describe(number, worker))
        return None

    def _describe(self, number: int, worker: Any) -> str:
        code = worker.exitcode
        name = _signal_name(code)
        ending = f"was killed by {name}" if name else f"ended by itself (exit code {code})"
        remedy = _REMEDIES.get(name, _CRASHED) if name else "something in it called exit()"
        if not name and int(self._current_batches[number]) == 0 and not _is_forked(worker):
            remedy = f"see its traceback above; {why_not_imported()}"
        return (
            f"loader worker {number} of {len(self._workers)} (pid {worker.pid}) {ending} "
            f"{self._describe_batch(number)}; {remedy}"
        )

    def _describe_batch(self, worker: int) -> str:
        """Describe the batch that a worker is making, or has sent last."""
        batch_number = int(self._current_batches[worker])
        if batch_number == 0:
            return "before it read anything"
        doing = "while it made" if batch_number > 0 else "after it had made"
        text = f"{doing} batch {abs(batch_number)} of its own"
        if self._partition is None or self._catalog is None:
            return text
        steps = WorkerSteps(self._partition, worker, len(self._workers))
        if abs(batch_number) > len(steps):
            return "after its last batch"
        step = steps[abs(batch_number) - 1]
        numbers = self._partition.samples(np.array([step], dtype=np.int64))[0]
        catalog = self._catalog
        urls = [redact(catalog.url_of(shard)) for shard in catalog.shards_of(numbers)]
        more = f" and {plural(len(urls) - 3, 'more shard')}" if len(urls) > 3 else ""
        where = f" of {', '.join(urls[:3])}{more}" if urls else ""
        return f"{doing} batch {step} of the rank: {plural(len(numbers), 'sample')}{where}"


def _is_lost_connection(error: object) -> bool:
    """Return whether a worker could not be reached; errors of user functions inside a worker do not count."""
    # FileNotFoundError: the worker's socket file is removed before the process ends.
    is_connection = isinstance(error, ConnectionError | EOFError | FileNotFoundError)
    return (
        is_connection and not isinstance(error, ShardStreamError) and _IN_WORKER not in str(error)
    )


def _is_forked(worker: Any) -> bool:
    """Return whether a process is a copy of this one, which imports nothing when it starts."""
    method = getattr(worker, "_start_method", None) or multiprocessing.get_start_method()
    return bool(method == "fork")


def _signal_name(exitcode: int | None) -> str:
    """Return the signal that ended a process; empty if none did."""
    if exitcode is None or exitcode >= 0:
        return ""
    try:
        return signal.Signals(-exitcode).name
    except ValueError:  # one of the real-time signals
        return f"signal {-exitcode}"


def end_workers(workers: Any, *, immediately: bool = False) -> None:
    """End the worker processes of torch's iterator; other iterators have none.

    Args:
        workers: The iterator.
        immediately: Terminate them without waiting: a dead worker may hold a lock that the others wait for.
    """
    end = getattr(workers, "_shutdown_workers", None)
    if end is None:
        return
    if immediately and workers._worker_pids_set:
        signal_handling._remove_worker_pids(id(workers))  # type: ignore[attr-defined]  # torch must not report their end as an error
        workers._worker_pids_set = False
        for worker in workers._workers:
            worker.terminate()
        # A worker that was killed while it asked for the event still holds its lock, and `set` would wait for ever.
        workers._workers_done_event = multiprocessing.Event()
    end()


def live_workers(workers: Any) -> Any:
    """Return torch's iterator if all its workers are alive; else end it and return None."""
    if all(worker.is_alive() for worker in getattr(workers, "_workers", ())):
        return workers
    end_workers(workers, immediately=True)
    return None


def wrap_exception(error: Exception, worker: int) -> ExceptionWrapper:
    """In a worker: wrap an error as torch sends it, with the worker's traceback in its text.

    Its class is the nearest base that is picklable: a class defined in a function cannot be sent.
    """
    where = (type(error), error, error.__traceback__)
    worker_error = ExceptionWrapper(where, f"{_IN_WORKER} {worker}")  # type: ignore[no-untyped-call]
    worker_error.exc_type = next(kind for kind in type(error).__mro__ if is_picklable_type(kind))
    return worker_error
