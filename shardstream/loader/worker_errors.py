"""Errors for loader workers that die, with the samples that each was reading.

torch notices a dead worker by SIGCHLD, or when it next waits for the worker's queue, and names its process id. Where the loader waits
for a batch, this module adds which worker it was, which samples of which shards it was reading, and what to do. A worker reports its
position as one number for each batch, in shared memory.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any, Self, TypeVar

import numpy as np
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import signal_handling

from shardstream.catalog import Catalog
from shardstream.errors import ShardStreamError, WorkerError, plural, redact
from shardstream.loader.serialize import is_picklable_type
from shardstream.order import RankPartition
from shardstream.pipeline import worker_steps

_T = TypeVar("_T")
_REMEDIES = {
    "SIGKILL": "mostly the system ran out of memory (see dmesg): use fewer workers, or a smaller prefetch_factor, "
    "prefetch_bytes or window",
    "SIGBUS": "mostly /dev/shm is full: give it more room (docker run --shm-size), or use fewer workers",
}
_CRASHED = "a library crashed: iterate with num_workers=0 and python -X faulthandler to see where"
_IN_WORKER = "in DataLoader worker process"
# A worker's connections are closed before it is dead: long before, on a machine that is busy, or where it writes a core dump.
_DEATH_S = 60.0


def track_progress(worker_batches: Generator[_T], begun: Any, worker: int) -> Generator[_T]:
    """Hand worker batches on, and note in shared memory which is being made: number n from 1, or -n once it has been handed on.

    Args:
        worker_batches: What a worker makes.
        begun: Shape (workers,), int64, in shared memory.
        worker: Its place there.
    """
    place = begun.numpy()
    with closing(worker_batches):
        number = 0
        while True:
            number += 1
            place[worker] = number
            worker_batch = next(worker_batches, None)
            place[worker] = -number
            if worker_batch is None:
                return
            yield worker_batch


class WorkerWatch:
    """Knows what the workers of one iteration are at; while it is open, a dead one is told by a `WorkerError`.

    Args:
        workers: torch's iterator, which holds the processes; any other has none.
        begun: As in `track_progress`.
        partition: The rank's steps, where they are known.
        catalog: Whose samples they are.
    """

    def __init__(
        self,
        workers: Any,
        begun: Any,
        partition: RankPartition | None,
        catalog: Catalog | None,
    ) -> None:
        self._workers: list[Any] = list(getattr(workers, "_workers", ()))
        self._begun = begun
        self._partition, self._catalog = partition, catalog

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        if self._workers and _is_lost_connection(error):
            self._wait_for_exit()
        if isinstance(error, RuntimeError | OSError | EOFError) and not isinstance(
            error, ShardStreamError
        ):
            told = self.explain()
            if told is not None:
                raise told from error

    def _wait_for_exit(self) -> None:
        """Give a worker whose connections are closed the moment that it takes to be dead."""
        until = time.monotonic() + _DEATH_S
        while all(worker.is_alive() for worker in self._workers) and time.monotonic() < until:
            time.sleep(0.005)

    def explain(self) -> WorkerError | None:
        """Return what to say of a dead worker; None if all live."""
        for number, worker in enumerate(self._workers):
            if not worker.is_alive() and (worker.exitcode or int(self._begun[number]) > 0):
                return WorkerError(self._describe(number, worker))
        return None

    def _describe(self, number: int, worker: Any) -> str:
        code = worker.exitcode
        name = _signal_name(code)
        how = f"was killed by {name}" if name else f"ended by itself (exit code {code})"
        remedy = _REMEDIES.get(name, _CRASHED) if name else "something in it called exit()"
        return (
            f"loader worker {number} of {len(self._workers)} (pid {worker.pid}) {how} "
            f"{self._at(number)}; {remedy}"
        )

    def _at(self, worker: int) -> str:
        """Say what a worker is reading, or has sent last."""
        begun = int(self._begun[worker])
        if begun == 0:
            return "before it read anything"
        doing = "while it made" if begun > 0 else "after it had made"
        text = f"{doing} batch {abs(begun)} of its own"
        if self._partition is None or self._catalog is None:
            return text
        steps = worker_steps(self._partition, worker, len(self._workers))
        if abs(begun) > len(steps):
            return "after its last batch"
        step = steps[abs(begun) - 1]
        numbers = self._partition.samples(np.array([step], dtype=np.int64))[0]
        catalog = self._catalog
        urls = [redact(catalog.url_of(shard)) for shard in catalog.shards_of(numbers)]
        more = f" and {plural(len(urls) - 3, 'more shard')}" if len(urls) > 3 else ""
        where = f" of {', '.join(urls[:3])}{more}" if urls else ""
        return f"{doing} batch {step} of the rank: {plural(len(numbers), 'sample')}{where}"


def _is_lost_connection(error: object) -> bool:
    """Tell whether a worker could not be reached; what a user's function met in a worker is none of that."""
    # Its socket is gone before it is.
    is_connection = isinstance(error, ConnectionError | EOFError | FileNotFoundError)
    return (
        is_connection and not isinstance(error, ShardStreamError) and _IN_WORKER not in str(error)
    )


def _signal_name(exitcode: int | None) -> str:
    """Return the signal that ended a process; empty if none did."""
    if exitcode is None or exitcode >= 0:
        return ""
    try:
        return signal.Signals(-exitcode).name
    except ValueError:  # one of the real-time signals
        return f"signal {-exitcode}"


def end_workers(workers: Any, *, at_once: bool = False) -> None:
    """End the processes of torch's iterator; any other has none.

    Args:
        workers: The iterator.
        at_once: Do not wait for them to end by themselves: a dead one may have taken a lock along that they wait for.
    """
    end = getattr(workers, "_shutdown_workers", None)
    if end is None:
        return
    if at_once and workers._worker_pids_set:
        signal_handling._remove_worker_pids(id(workers))  # type: ignore[attr-defined]  # that they end is no error any more
        workers._worker_pids_set = False
        for worker in workers._workers:
            worker.terminate()
    end()


def live_workers(workers: Any) -> Any:
    """Return torch's iterator of persistent workers if all live; else end it, so that new ones are started."""
    if all(worker.is_alive() for worker in getattr(workers, "_workers", ())):
        return workers
    end_workers(workers, at_once=True)
    return None


def wrap_exception(error: Exception, worker: int) -> ExceptionWrapper:
    """In a worker: return an error as torch sends it, with the worker's traceback in its text.

    Its class is the nearest one that the main process can find: a class made in a function cannot be sent.
    """
    where = (type(error), error, error.__traceback__)
    told = ExceptionWrapper(where, f"{_IN_WORKER} {worker}")  # type: ignore[no-untyped-call]
    told.exc_type = next(kind for kind in type(error).__mro__ if is_picklable_type(kind))
    return told
