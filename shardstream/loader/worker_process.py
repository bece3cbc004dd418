"""Run a worker of a `WorkerPool`: receive positions, make batches, send them through the worker's pipe and ring."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from time import perf_counter, sleep, thread_time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import worker as torch_worker

from shardstream.loader.batch_dataset import BatchDataset
from shardstream.loader.serialize import unsendable_error
from shardstream.loader.shared_memory import Channel, RingMessage
from shardstream.loader.worker import WorkerBatch
from shardstream.loader.worker_errors import wrap_exception
from shardstream.loader.worker_thread import set_worker_info
from shardstream.pipeline import IndexedSource, LoaderPosition
from shardstream.process_memory import tune_worker_process

END_S = 1.0
"""Seconds to finish the current batch after the main process has closed the pipe, or has ended."""
BATCH_COST = 64
"""Cost of a batch that counts in full for ``prefetch_factor``; the smallest and fastest cost 1."""
_FULL_COST_S, _FULL_COST_BYTES = 0.016, 1 << 21
# Batches share a message up to this cost and delay: a message costs as much as a small batch if it wakes up the main process.
_MESSAGE_COST, _MESSAGE_S = BATCH_COST // 2, 0.008


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
