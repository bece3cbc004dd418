"""Processes that make the batches of a loader: each has a pipe and a ring, and works ahead by credits.

    WorkerPool                                 worker process (`worker_process`)
      Begin(iteration, position)  -- pipe -->    makes batches, copies them to its ring
      PoolIteration  <-- pipe -- Message         where the batch lies in the ring, or that there is none left
      cost of received messages   -- pipe -->    may make as many again

The main process receives in the order of the plan, so it knows which worker sends the next batch, and waits for that one only: for
its pipe and for its end. Nothing else is shared, so no worker can hold a lock that another one waits for.
"""

from __future__ import annotations

import errno
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.profiler import record_function

from shardstream.errors import OptionError, WorkerError, without_addresses
from shardstream.loader.batch_transfer import (
    Channel,
    NewTensor,
    RingMessage,
    new_tensor,
    open_channels,
)
from shardstream.loader.worker import WorkerBatch
from shardstream.loader.workers import (
    END_S,
    Begin,
    Message,
    ThreadChannel,
    WorkerSetup,
    WorkerThread,
    describe_batch,
    describe_death,
    run_worker,
)
from shardstream.order import RankPartition
from shardstream.pipeline import LoaderPosition
from shardstream.process import forked_workers_keep_objects
from shardstream.samples import Samples

_DEATH_S = 60.0  # a worker's pipe closes before the process ends; during a core dump long before
_POLL_MS = 5000
_WAIT = (
    "enumerate(DataLoader)#ShardLoader.__next__"  # PyTorch's profiler counts such names as waits
)


class _Worker:
    """A worker process, seen from the main process."""

    def __init__(self, setup: WorkerSetup, number: int, channel: Channel, context: Any) -> None:
        self.number, self.channel = number, channel
        self.pipe, theirs = context.Pipe()
        _pipes.add(self.pipe)  # before the start: a forked worker has a copy of it
        self.is_started = False
        self.waiting: deque[Any] = deque()
        """Contents of the last message that were not used yet."""
        self.process = context.Process(
            target=run_worker, args=(setup, number, channel, theirs), daemon=True
        )
        try:
            self.process.start()
        finally:
            theirs.close()
        self._poller = select.poll()
        self._poller.register(self.pipe.fileno(), select.POLLIN)
        if not setup.uses_threads:
            self._poller.register(self.process.sentinel, select.POLLIN)

    def begin(self, begin: Begin) -> None:
        """Let the worker begin an iteration."""
        self._cost = self.received = 0
        self.waiting.clear()
        self._send(begin)

    def is_ready(self) -> bool:
        """Return whether a batch, or the end of the process, is there."""
        return bool(self.waiting or self._poller.poll(0))

    def receive(self, timeout_ms: float) -> Message | None:
        """Return the next message; None if there is none yet.

        Raises:
            EOFError: If the process has ended and left none.
        """
        ready = [handle for handle, _ in self._poller.poll(timeout_ms)]
        if self.pipe.fileno() not in ready:
            # A process that it started may hold copies of both ends, so it is asked, too.
            if not ready and self.process.is_alive():
                return None
            if not self.pipe.poll():  # what it sent just before its end
                raise EOFError
        message: Message = self.pipe.recv()
        self.is_started = True
        return message

    def take(self, message: Message) -> None:
        """Use the contents of a message."""
        self.waiting.extend(message.contents)
        self.received += len(message.contents)
        self._cost = message.cost

    def acknowledge(self) -> None:
        """Let the worker make as much again if all of the last message was used."""
        if not self.waiting and self._cost:
            self._send(self._cost)

    def _send(self, command: Begin | int) -> None:
        with suppress(ConnectionError):  # reported at the worker's turn
            self.pipe.send(command)


class WorkerPool:
    """Worker processes of one loader.

    Args:
        setup: Values for all workers.
        context: Context of multiprocessing that starts them, or a `ThreadContext`.
        timeout_s: Seconds that a batch may take; 0 for no limit.

    Raises:
        OptionError: If the dataset cannot be sent to a process that is not forked.
    """

    def __init__(self, setup: WorkerSetup, context: Any, timeout_s: float) -> None:
        self.iteration = 0
        """Number of the latest iteration."""
        self.setup, self.timeout_s = setup, timeout_s
        self.workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end_workers, self.workers, os.getpid())
        numbers = range(setup.num_workers)
        channels = (
            [ThreadChannel() for _ in numbers]
            if setup.uses_threads
            else open_channels(len(numbers))
        )
        try:
            with _starting_workers():
                for number, channel in enumerate(channels):
                    self.workers.append(_Worker(setup, number, channel, context))
        except BaseException:
            self.close()  # its traceback, which a notebook keeps, refers to the pool
            raise

    @property
    def is_usable(self) -> bool:
        """Whether all workers are alive, and are those of this process: a forked one has closed its copies of the pipes."""
        return self._end.alive and all(
            not worker.pipe.closed and worker.process.is_alive() for worker in self.workers
        )

    def close(self) -> None:
        """End the workers; garbage collection of the pool does the same."""
        self._end()


class PoolIteration:
    """The batches of all workers in one iteration, in the order of the plan.

    Persistent workers serve the latest iteration only. Without a plan each worker sends its own batches, and they take turns.

    Args:
        pool: The workers.
        position: Where the iteration begins.
        partition: The rank's steps, if they are known.
        samples: All samples by number, for errors.
        allocate: Returns the memory that a tensor is copied to, such as pinned memory.
    """

    def __init__(
        self,
        pool: WorkerPool,
        position: LoaderPosition,
        partition: RankPartition | None,
        samples: Samples | None,
        allocate: NewTensor = new_tensor,
    ) -> None:
        pool.iteration += 1
        self._pool, self._number = pool, pool.iteration
        self._partition, self._all_samples, self._allocate = partition, samples, allocate
        source = pool.setup.dataset.new_source
        for worker in pool.workers:
            worker.begin(Begin(self._number, position, source))
        self._live = list(pool.workers)
        self._steps_left = 0 if partition is None else partition.num_steps
        turns = _planned_turns(partition, pool.workers)
        # After their last steps the workers have only to say that they have ended.
        self._turns = chain(turns, _turns_of(self._live))
        self._next = next(self._turns, None)

    def __iter__(self) -> PoolIteration:
        return self

    def __next__(self) -> WorkerBatch:
        if self._number != self._pool.iteration:
            raise OptionError(
                "another iteration of this loader has taken over its persistent workers; finish one iteration before "
                "starting the next, or use two loaders"
            )
        while (worker := self._next) is not None:
            if not worker.waiting:
                with record_function(_WAIT):
                    worker.take(self._receive(worker))
            content = worker.waiting.popleft()
            if isinstance(content, ExceptionWrapper):
                content.reraise()  # type: ignore[no-untyped-call]
            is_end, is_planned = content is None, self._steps_left > 0
            if self._partition is not None and is_end == is_planned:
                raise WorkerError(
                    f"loader worker {worker.number} made {'fewer' if is_end else 'more'} batches than its part of the epoch has; "
                    "this is an error of shardstream, please report it"
                )
            if is_end:
                self._live.remove(worker)
                self._next = next(self._turns, None)
                continue
            self._steps_left -= is_planned
            batch = WorkerBatch(*worker.channel.unpack(content, self._allocate))
            worker.acknowledge()
            self._next = next(self._turns, None)
            return batch
        raise StopIteration

    def is_ready(self) -> bool:
        """Return whether the next batch can be taken without waiting; only wrong where a worker has just ended or begun."""
        return self._next is not None and self._next.is_ready()

    def end(self, *, keeps_workers: bool) -> None:
        """End the iteration, and the workers with it if they are not kept; those of a later iteration are."""
        if not keeps_workers and self._number == self._pool.iteration:
            self._pool.close()

    def _receive(self, worker: _Worker) -> Message:
        """Return the next message of this iteration.

        Raises:
            WorkerError: If the worker has died.
            RuntimeError: If a message takes longer than ``timeout``.
        """
        timeout_s = self._pool.timeout_s
        until, timeout_ms = time.monotonic() + timeout_s, _POLL_MS
        while True:
            if timeout_s:
                left_ms = max(0, int(1000 * (until - time.monotonic())))
                timeout_ms = min(_POLL_MS, left_ms)
            try:
                message = worker.receive(timeout_ms)
            except (RuntimeError, OSError, EOFError) as error:
                raise self._death(worker, error) or error from error
            if message is not None and message.iteration == self._number:
                return message
            if message is None:
                self._check_others(worker)
                if timeout_s and time.monotonic() >= until:
                    raise RuntimeError(f"DataLoader timed out after {timeout_s} seconds")

    def _check_others(self, waited_for: _Worker) -> None:
        """Check that the other workers live: the one that is waited for may need minutes, if a store stalls.

        Raises:
            WorkerError: If one has died before it has sent all its batches.
        """
        for worker in self._live:
            if worker is waited_for or worker.process.is_alive():
                continue
            if not self._has_sent_all(worker) and (death := self._death(worker, EOFError())):
                raise death

    def _has_sent_all(self, worker: _Worker) -> bool:
        """Return whether a worker that has ended left all its batches, or its error; take its messages."""
        with suppress(EOFError, OSError):
            while (message := worker.receive(0)) is not None:
                if message.iteration == self._number:
                    worker.take(message)
        return bool(worker.waiting) and not isinstance(worker.waiting[-1], RingMessage)

    def _death(self, worker: _Worker, error: Exception) -> WorkerError | None:
        """Return the error for a worker that has died; None if it is alive, and the error has another cause."""
        # FileNotFoundError: the socket file for tensors that torch sends is removed before the process ends.
        if isinstance(error, ConnectionError | EOFError | FileNotFoundError):
            worker.process.join(_DEATH_S)
        if worker.process.is_alive():
            return None
        workers = len(self._pool.workers)
        doing = "before its first batch came"
        # Without shared memory the batches that came count: each has a message of its own.
        if progress := worker.channel.progress or (worker.received and worker.received + 1):
            doing = describe_batch(
                progress, self._partition, self._all_samples, worker.number, workers
            )
        return describe_death(worker.process, worker.number, workers, doing, worker.is_started)


@contextmanager
def _starting_workers() -> Iterator[None]:
    """Start workers whose inherited objects are not collected; explain what cannot be sent to spawned ones.

    Raises:
        OptionError: If a function of the dataset, or something else in it, cannot be pickled.
    """
    # Forked workers inherit a default device. Only if it is another one: in this context each function of torch calls Python, and
    # `is_contiguous` takes 6 us, not 0.1.
    is_cpu = torch.empty(0).device.type == "cpu"
    try:
        with forked_workers_keep_objects(), nullcontext() if is_cpu else torch.device("cpu"):
            yield
    except Exception as error:
        # A PicklingError, or an AttributeError or TypeError of a local function.
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            error.add_note(
                "each worker needs three open files in the main process: raise the limit (ulimit -n), or use fewer workers"
            )
        if isinstance(error, OSError | OptionError) or "pickle" not in str(error):
            raise
        raise OptionError(
            f"the dataset cannot be sent to a worker that is spawned ({without_addresses(str(error))}); "
            "its functions must be importable: at the top level of a module, not lambdas or local functions"
        ) from error


def _planned_turns(
    partition: RankPartition | None, workers: Sequence[_Worker]
) -> Iterator[_Worker]:
    """Yield the worker of each step of a rank."""
    for step in range(0 if partition is None else partition.num_steps):
        assert partition is not None  # noqa: S101  (it has steps)
        yield workers[partition.worker_of(step, len(workers))[0]]


def _turns_of(live: list[_Worker]) -> Generator[_Worker]:
    """Yield the workers in turn while they are in a list."""
    while live:
        for worker in tuple(live):
            if worker in live:
                yield worker


def _end_workers(workers: list[_Worker], owner: int) -> None:
    """End workers, which finish the batch that they make if it does not take long; a thread does so later if it does."""
    if os.getpid() != owner:  # a forked process, which has only copies
        return
    for worker in workers:
        worker.pipe.close()
    until = time.monotonic() + END_S
    for worker in workers:
        worker.process.join(max(0, until - time.monotonic()))
    processes = [one.process for one in workers if not isinstance(one.process, WorkerThread)]
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(END_S)
        process.kill()  # if it handles SIGTERM, as the user's process may
        process.join()
    workers.clear()


_pipes: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_pipes() -> None:
    """In a forked process: close its copies of the pipes, so that workers see when the main process closes its own."""
    for pipe in list(_pipes):
        pipe.close()


os.register_at_fork(after_in_child=_close_pipes)
