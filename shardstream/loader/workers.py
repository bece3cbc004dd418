"""Run the workers of a `WorkerPool`: receive positions, make batches, send them; in processes, or in threads with the messages that processes send.

A step that releases the lock of the interpreter, such as the decoding of a photo, runs while other threads run Python. A thread gets a
copy of the dataset and hands out copies of its batches, as a process does, so that no step or batch is used by two threads.

The end of a worker that dies is noticed when its next batch is due. The error says which worker it was, which samples of which shards it was
reading, and what to do. The batches that it has sent tell which one it was making.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from time import perf_counter, sleep, thread_time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker

from shardstream.errors import (
    OptionError,
    WorkerError,
    describe_error,
    plural,
    redact,
    why_not_imported,
)
from shardstream.loader.batch_dataset import BatchDataset
from shardstream.loader.batch_transfer import (
    Channel,
    NewTensor,
    RingMessage,
    is_picklable_type,
    new_tensor,
    unsendable_error,
)
from shardstream.loader.worker import WorkerBatch
from shardstream.order import RankPartition, WorkerSteps
from shardstream.pipeline import IndexedSource, LoaderPosition
from shardstream.process import tune_worker_process
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


_this_thread = threading.local()
_worker_info: Any = None  # in `_get_worker_info` the one of torch


class WorkerThread(threading.Thread):
    """A worker as a thread, with the attributes of a process that the pool uses.

    It cannot be ended from outside, only by closing its pipe. A step that takes long delays its end, but not that of the process.
    """

    exitcode = 0

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, int, Any, Connection], *, daemon: bool
    ) -> None:
        setup, number, channel, pipe = args
        self.pid = os.getpid()
        setup = replace(setup, dataset=_copied(setup.dataset))
        self._pipe = Connection(os.dup(pipe.fileno()))  # the pool closes its own, as for a process
        super().__init__(
            target=target,
            args=(setup, number, channel, self._pipe),
            name=f"ShardLoader worker {number}",
            daemon=daemon,
        )

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end; not in this thread itself, which may collect a pool as garbage."""
        if self is not threading.current_thread():
            super().join(timeout)

    def run(self) -> None:
        """Serve the pool, then close the pipe, which is how the pool sees the end."""
        with self._pipe, suppress(SystemExit):  # the pool reports it
            super().run()


class ThreadContext:
    """Starts threads, in place of a context of ``multiprocessing``."""

    Pipe = staticmethod(multiprocessing.Pipe)
    Process = WorkerThread


class ThreadChannel(Channel):
    """Hands over the values of messages within a process; the pipe carries only their numbers."""

    def __init__(self) -> None:
        self._messages: dict[int, RingMessage] = {}
        self._numbers = itertools.count(1)

    def reset(self, *, give_back: bool) -> None:
        """In the worker: drop values that were not received."""
        del give_back
        self._messages.clear()

    def pack(self, value: Any) -> RingMessage:
        """In the worker: keep a copy of a value; return the message to send."""
        message = super().pack(value)
        number = next(self._numbers)
        self._messages[number] = message
        return RingMessage(number, 0, message.places, None, [])

    def unpack(self, message: RingMessage, allocate: NewTensor = new_tensor) -> Any:
        """In the main thread: return the value."""
        return super().unpack(self._messages.pop(message.number), allocate)


def _copied(dataset: Any) -> Any:
    """Return a copy of a dataset.

    Raises:
        OptionError: If something in it cannot be copied.
    """
    try:
        return copy.deepcopy(dataset)
    except Exception as error:
        raise OptionError(
            f"the dataset cannot be copied for a worker that is a thread ({describe_error(error)}); give the class of what cannot "
            "be copied a __deepcopy__, which may return the object itself if threads can share it"
        ) from error


def set_worker_info(info: Any) -> None:
    """Set the worker that torch's ``get_worker_info`` returns in this thread.

    Before torch has workers that are threads, it has one variable for the whole process. Its function is changed, not replaced in
    its module, because other modules have imported it.
    """
    _this_thread.info = info
    vars(torch_worker)["_this_thread"] = _this_thread
    torch_worker.get_worker_info.__code__ = _get_worker_info.__code__


def _get_worker_info() -> Any:
    """Return the worker of this thread, or that of the process."""
    return getattr(_this_thread, "info", _worker_info)


def _forget_worker() -> None:
    """In a forked process: its main thread is that of the step that forked it, but no worker of its parent."""
    vars(_this_thread).clear()


os.register_at_fork(after_in_child=_forget_worker)


END_S = 1.0
"""Seconds to finish the current batch after the main process has closed the pipe, or has ended."""
BATCH_COST = 64
"""Cost of a batch that counts in full for ``prefetch_factor``; the smallest and fastest cost 1."""
_FULL_COST_S, _FULL_COST_BYTES = 0.016, 1 << 21
# Batches share a message up to this cost and delay: a message costs as much as a small batch if it wakes up the main process. Half of both
# is a tenth slower for small decoded samples (docs/decisions/optimisations.md).
_MESSAGE_COST, _MESSAGE_S = 3 * BATCH_COST // 4, 0.016


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """The values that all workers of a pool get when they start.

    Args:
        dataset: Makes the batches.
        num_workers: Workers of the pool.
        base_seed: Seed of worker 0; the others count on from it, as in torch.
        init_fn: The user's ``worker_init_fn``.
        prefetch_factor: Batches that a worker may be ahead of the main process.
        uses_threads: Whether workers are threads of the main process.
    """

    dataset: BatchDataset
    num_workers: int
    base_seed: int
    init_fn: Callable[[int], Any] | None
    prefetch_factor: int
    uses_threads: bool = False


class Begin(NamedTuple):
    """Command to a worker: make the batches from a position on, and drop those of an older iteration."""

    iteration: int
    """Number of the iteration in the pool, from 1."""
    position: LoaderPosition
    source: IndexedSource | None = None
    """Samples to read in place of those that the worker has."""


class Message(NamedTuple):
    """Message of a worker."""

    iteration: int
    """Iteration that it belongs to; 0 for the first message, which says that the worker has started."""
    contents: list[RingMessage | ExceptionWrapper | None]
    """Packed batches; the last one is an error if there was one, or None if there are no more batches."""
    cost: int = 0
    """Sum of the costs of the batches."""


def run_worker(setup: WorkerSetup, worker: int, channel: Channel, pipe: Connection) -> None:
    """Serve a pool until it closes the pipe, or its process ends.

    Args:
        setup: Values for all workers.
        worker: Number of the worker, from 0.
        channel: The worker's channel for batches.
        pipe: Receives `Begin` and costs of received messages; sends `Message`.
    """
    # Ctrl-C reaches the workers too: the main process shows it. A closed pipe is the usual end.
    with suppress(KeyboardInterrupt, EOFError, ConnectionError):
        if not setup.uses_threads:
            threading.Thread(target=_end_with_main_process, daemon=True).start()
        pipe.send(Message(0, []))
        begin: Begin = pipe.recv()
        problem = _set_up(setup, worker)
        outbox = _Outbox(pipe, worker)
        while True:
            begin = _send_batches(setup, channel, pipe, outbox, begin, problem)


def _end_with_main_process() -> None:
    """End this process after the one that has started it: a read from a store that stalls, or a step, may need hours."""
    main = multiprocessing.parent_process()
    if main is not None:
        main.join()
        sleep(END_S)
        os._exit(1)


def batch_cost(cpu_s: float, nbytes: int) -> int:
    """Return the cost of a batch, from 1 to `BATCH_COST`, in proportion to its processor time or its bytes.

    >>> batch_cost(0.001, 4096), batch_cost(0.1, 4096), batch_cost(0.0001, 1 << 20)
    (4, 64, 32)
    """
    share = max(cpu_s / _FULL_COST_S, nbytes / _FULL_COST_BYTES)
    return max(1, min(BATCH_COST, int(share * BATCH_COST)))


def _set_up(setup: WorkerSetup, worker: int) -> Exception | None:
    """Set torch's worker info, and seeds in a process, as in torch's workers; call ``worker_init_fn`` and return its error."""
    torch.set_num_threads(1)  # of this thread
    seed = setup.base_seed + worker
    info = torch_worker.WorkerInfo(
        id=worker,
        num_workers=setup.num_workers,
        seed=seed,
        dataset=setup.dataset,
        worker_method="thread" if setup.uses_threads else "multiprocessing",
    )
    if setup.uses_threads:  # the global generators are those of the main thread, too
        set_worker_info(info)
    else:
        random.seed(seed)
        torch.manual_seed(seed)
        # The algorithm and entropy that torch uses for NumPy.
        entropy = [worker, setup.base_seed & 0xFFFFFFFF, setup.base_seed >> 32, 0]
        np.random.seed(np.random.SeedSequence(entropy).generate_state(4))
        torch_worker._worker_info = info  # private, but the only way to make `get_worker_info` work
        tune_worker_process()
    try:
        if setup.init_fn is not None:
            setup.init_fn(worker)
    except Exception as error:  # noqa: BLE001  (raised in the main process)
        return error
    return None


def _send_batches(
    setup: WorkerSetup,
    channel: Channel,
    pipe: Connection,
    outbox: _Outbox,
    begin: Begin,
    problem: Exception | None,
) -> Begin:
    """Send the batches of an iteration; return the command that begins the next one."""
    channel.reset(give_back=setup.dataset.is_remote)
    outbox.begin(begin.iteration)
    credit, number = BATCH_COST * setup.prefetch_factor, 0
    with closing(_make_batches(setup, begin, problem)) as batches:
        while not outbox.is_closed:
            while credit <= 0:
                outbox.flush()
                command = pipe.recv()
                if isinstance(command, Begin):
                    return command
                credit += command
            number += 1
            channel.progress = number
            content, cost = _next_content(batches, outbox.worker, channel)
            channel.progress = -number
            outbox.add(content, cost)
            credit -= cost
            del content
    # Not ended before the main process closes the pipe: it fetches tensors that torch sends from here.
    while not isinstance(command := pipe.recv(), Begin):
        pass
    return command


class _Outbox:
    """Contents on their way to the main process, of which small ones share a message: each message may wake it up.

    A thread sends them if the next batch takes longer, so that no batch waits for another one.

    Args:
        pipe: Sends messages.
        worker: Number of the worker.
    """

    def __init__(self, pipe: Connection, worker: int) -> None:
        self._pipe, self.worker = pipe, worker
        self._lock, self._holds = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._send_held, daemon=True)
        self.begin(0)

    def begin(self, iteration: int) -> None:
        """Begin an iteration, and drop the contents of the one before."""
        with self._lock:
            self._iteration = iteration
            self._contents: list[Any] = []
            self._cost, self._sent_at = 0, 0.0  # the first batch is sent at once
            self.is_closed = False
            """Whether the last content was added."""

    def add(self, content: RingMessage | ExceptionWrapper | None, cost: int) -> None:
        """Add a content; send it at once if it is the last one or holds more than a place in the ring."""
        is_alone = isinstance(content, RingMessage) and not content.is_in_ring
        with self._lock:
            self.is_closed = not isinstance(content, RingMessage)
            if is_alone:  # pickling it may fail
                self.flush()
            self._contents.append(content)
            self._cost += cost
            is_late = perf_counter() - self._sent_at > _MESSAGE_S
            if is_alone or self.is_closed or is_late or self._cost >= _MESSAGE_COST:
                self.flush()
                return
        if self._thread.ident is None:
            self._thread.start()
        self._holds.set()

    def flush(self) -> None:
        """Send all contents."""
        with self._lock:
            self._holds.clear()
            if not self._contents:
                return
            message = Message(self._iteration, self._contents, self._cost)
            try:
                data = ForkingPickler.dumps(message)
            except Exception as error:  # noqa: BLE001  (raised in the main process)
                problem = wrap_exception(unsendable_error(error), self.worker)
                data = ForkingPickler.dumps(Message(self._iteration, [problem]))
                self.is_closed = True
            self._contents, self._cost, self._sent_at = [], 0, perf_counter()
            self._pipe.send_bytes(data)

    def _send_held(self) -> None:
        with suppress(OSError):  # the pool has closed the pipe: the worker sees it, too
            while self._holds.wait():
                left_s = self._sent_at + _MESSAGE_S - perf_counter()
                if left_s > 0:
                    sleep(left_s)
                else:
                    self.flush()


def _make_batches(
    setup: WorkerSetup, begin: Begin, problem: Exception | None
) -> Generator[WorkerBatch]:
    """Yield the worker's batches; all errors come with the first or a later one."""
    if problem is not None:
        raise problem
    if begin.source is not None:
        setup.dataset.indexed_source = begin.source
    yield from setup.dataset.read(begin.position)


def _next_content(
    batches: Generator[WorkerBatch], worker: int, channel: Channel
) -> tuple[RingMessage | ExceptionWrapper | None, int]:
    """Make and pack the next batch; return the content for it, and its cost."""
    started = thread_time()
    try:
        batch = next(batches, None)
        if batch is None:
            return None, 0
        packed = channel.pack(tuple(batch))
    except Exception as error:  # noqa: BLE001  (raised in the main process)
        return wrap_exception(error, worker), 0
    return packed, batch_cost(thread_time() - started, packed.nbytes)
