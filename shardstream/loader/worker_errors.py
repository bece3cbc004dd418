"""Errors for loader workers that die, with the samples that each was reading.

A worker's end is noticed when its next batch is due. The error says which worker it was, which samples of which shards it was
reading, and what to do. The batches that it has sent tell which one it was making.
"""

from __future__ import annotations

import multiprocessing
import signal
from typing import Any

import numpy as np
from torch._utils import ExceptionWrapper

from shardstream.errors import (
    WorkerError,
    plural,
    redact,
    why_not_imported,
)
from shardstream.loader.serialize import is_picklable_type
from shardstream.order import RankPartition, WorkerSteps
from shardstream.samples import Samples

_REMEDIES = {
    "SIGKILL": "usually the system ran out of memory (see dmesg): use fewer workers, or a smaller prefetch_factor, "
    "prefetch_bytes or window (docs/troubleshooting.md)",
    "SIGBUS": "either /dev/shm is full: enlarge it (docker run --shm-size), or use fewer workers; or a local shard was cut while it was "
    "read: write new data to a folder of its own",
}
_CRASHED = "a library crashed: iterate with num_workers=0 and python -X faulthandler to see where"
_IN_WORKER = "in DataLoader worker process"


def describe_death(
    process: Any, number: int, workers: int, doing: str, is_started: bool
) -> WorkerError:
    """Return the error for a worker process that has ended before its last batch.

    Args:
        process: The process.
        number: Of the worker.
        workers: Number of workers.
        doing: See `describe_batch`.
        is_started: Whether it has begun to serve.
    """
    code = process.exitcode
    name = _signal_name(code)
    ending = f"was killed by {name}" if name else f"ended by itself (exit code {code})"
    remedy = _REMEDIES.get(name, _CRASHED) if name else "something in it called exit()"
    if not name and not is_started and not _is_forked(process):
        remedy = f"see its traceback above; {why_not_imported()}"
    return WorkerError(
        f"loader worker {number} of {workers} (pid {process.pid}) {ending} {doing}; {remedy}"
    )


def describe_batch(
    progress: int,
    partition: RankPartition | None,
    samples: Samples | None,
    worker: int,
    workers: int,
) -> str:
    """Describe the batch that a worker was making, or had sent last.

    Args:
        progress: n while the worker made its batch n, from 1, then -n.
        partition: The rank's steps, if they are known.
        samples: All samples by number.
        worker: Number of the worker.
        workers: Number of workers.
    """
    batch, doing = abs(progress), "while it made" if progress > 0 else "after it had made"
    if partition is None or samples is None:
        return f"{doing} batch {batch} of its own"
    steps = WorkerSteps(partition, worker, workers)
    if batch > len(steps):
        return "after its last batch"
    step = steps[batch - 1]
    numbers = partition.samples(np.array([step], dtype=np.int64))[0]
    urls = [redact(samples.url_of(shard)) for shard in samples.shards_of(numbers)]
    more = f" and {plural(len(urls) - 3, 'more shard')}" if len(urls) > 3 else ""
    where = f" of {', '.join(urls[:3])}{more}" if urls else ""
    return f"{doing} batch {step} of the rank: {plural(len(numbers), 'sample')}{where}"


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


def wrap_exception(error: Exception, worker: int) -> ExceptionWrapper:
    """In a worker: wrap an error as torch sends it, with the worker's traceback in its text.

    Its class is the nearest base that is picklable: a class defined in a function cannot be sent.
    """
    where = (type(error), error, error.__traceback__)
    worker_error = ExceptionWrapper(where, f"{_IN_WORKER} {worker}")  # type: ignore[no-untyped-call]
    worker_error.exc_type = next(kind for kind in type(error).__mro__ if is_picklable_type(kind))
    return worker_error
