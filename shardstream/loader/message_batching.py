"""Send several small batches in one message from a worker to the main process.

A message through torch's queues costs about 0.3 ms, whatever its size. Batches that are made faster are grouped: as many per
message as a worker makes in 8 ms. The main process sets the size and the round of messages from which it holds, so that all
workers send equally many: it yields their batches in turn, and few batches queue up. A message is flushed after 50 ms.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from shardstream.errors import OptionError
from shardstream.loader.collation import SharedNumbers
from shardstream.loader.worker_errors import wrap_exception

_T = TypeVar("_T")
_MAX_ITEMS = 64
MESSAGE_WORK_S, MAX_DELAY_S = 0.008, 0.05
_LARGE_BYTES = 1 << 21
SIZES_KEPT = 5


class TakenOverError(OptionError):
    """Raised in an iteration whose workers serve a later one, which goes on."""


class WorkerMessage(NamedTuple):
    """One message: the items of a worker in one round."""

    worker: int
    packed: list[Any]
    made_s: float
    """Seconds that it took to make the items."""
    nbytes: float
    """Bytes in the ring buffer; infinite if an item goes through torch's shared memory or the pipe."""
    ended: bool
    """This is the worker's last message."""
    error: Any = None
    """The worker's error (torch's ``ExceptionWrapper``), or None."""


class MessageSizes:
    """Items per message in each round, in memory shared by workers and the main process."""

    def __init__(self) -> None:
        # Start round, size before it and size from it on, packed into one int64 so that reads are never torn.
        self._packed = SharedNumbers(0)
        self.begin()

    def begin(self) -> None:
        """Reset to one item per message from round 0 on."""
        self._store(0, 1, 1)

    def size(self, number: int) -> int:
        """Return the items per message in round ``number``."""
        start, before, then = self._read()
        return then if number >= start else before

    def change(self, number: int, size: int) -> None:
        """Set the size from round ``number`` on, which no worker may have begun."""
        self._store(number, self._read()[2], size)

    def is_changing(self, number: int) -> bool:
        """Return whether a change of size is still pending in round ``number``."""
        return number < self._read()[0]

    def _read(self) -> tuple[int, int, int]:
        value = int(self._packed.values[0])
        return value >> 16, value >> 8 & 0xFF, value & 0xFF

    def _store(self, number: int, before: int, then: int) -> None:
        self._packed.values[0] = number << 16 | before << 8 | then


def send_messages(
    items: Generator[_T],
    worker: int,
    message_sizes: MessageSizes,
    pack: Callable[[_T], tuple[Any, float]],
    *,
    clock: Callable[[], float] = perf_counter,
) -> Generator[WorkerMessage]:
    """In a worker: group items into messages. An error is sent after the items made before it.

    Args:
        items: The worker's items.
        worker: Its number.
        message_sizes: Items per message.
        pack: Returns the packed item, and its bytes as in `WorkerMessage`. Called as soon as the item is made.
        clock: Monotonic clock, in seconds.
    """
    missing = 0  # items missing from flushed messages; later rounds send them, so that all workers are even again
    with closing(items):
        for number in count():
            started, size = clock(), missing + message_sizes.size(number)
            is_past_deadline = partial(_is_past, clock, started + MAX_DELAY_S)
            packed_items, end = _take_items(items, size, pack, is_past_deadline)
            missing = size - len(packed_items)
            error = (
                wrap_exception(end, worker) if end and not isinstance(end, StopIteration) else None
            )
            packed, nbytes = (
                [one for one, _ in packed_items],
                sum(nbytes for _, nbytes in packed_items),
            )
            made_s = clock() - started
            messages = [WorkerMessage(worker, packed, made_s, nbytes, end is not None, error)]
            del packed_items, packed
            yield messages.pop()  # popped, so that this frame does not keep the batches alive while the next are made
            if end is not None:
                return


def receive_items(  # noqa: PLR0913  (one call, in `BatchDataset.receive_batches`)
    messages: Iterator[WorkerMessage],
    workers: int,
    message_sizes: MessageSizes,
    unpack: Callable[[Any], _T],
    *,
    prefetch_factor: int,
    is_current: Callable[[], bool] = lambda: True,
    choose_size: Callable[[WorkerMessage], int] | None = None,
) -> Generator[_T]:
    """In the main process: yield the items of all workers in turn, one of each.

    Args:
        messages: Messages of worker 0, 1, … in turn; workers that have ended are left out.
        workers: Number of workers.
        message_sizes: Items per message; adapted here to the messages received.
        unpack: Returns the item of a packed item.
        prefetch_factor: Messages requested from each worker before the first is received.
        is_current: Returns False once another iteration has taken over the workers, and with them messages and rings.
        choose_size: Returns the best number of items per message, given a message; by default `preferred_size`.

    Raises:
        TakenOverError: If another iteration has taken over the workers.
        Exception: The error of a worker, at its turn.
    """
    waiting: list[deque[Any]] = [deque() for _ in range(workers)]
    ended, failed, number, current_worker = set[int](), dict[int, Any](), 0, 0
    sizes: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=SIZES_KEPT))
    while len(ended) < workers or any(waiting) or failed:
        if not is_current():
            raise TakenOverError(
                "another iteration of this loader has taken over its persistent workers; finish one iteration before "
                "starting the next, or use two loaders"
            )
        while not waiting[current_worker] and current_worker not in ended:
            message = next(messages)
            waiting[message.worker] += message.packed
            if message.error is not None:
                failed[message.worker] = message.error
            if message.ended:
                ended.add(message.worker)
                continue
            sizes[message.worker].append((choose_size or preferred_size)(message))
            # A round counts only while all workers send: once one has ended, torch polls the others more often.
            if message.worker == workers - 1 and not ended:
                is_backlogged = max(map(len, waiting)) > 2 * _MAX_ITEMS
                size = (
                    1
                    if is_backlogged
                    else int(min(median(worker_sizes) for worker_sizes in sizes.values()))
                )
                _adapt_size(message_sizes, number, size, prefetch_factor)
                number += 1
        if waiting[current_worker]:
            yield unpack(waiting[current_worker].popleft())
        elif current_worker in failed:
            failed[current_worker].reraise()
        current_worker = (current_worker + 1) % workers
    next(messages, None)  # lets torch end the workers


def _adapt_size(message_sizes: MessageSizes, number: int, size: int, prefetch_factor: int) -> None:
    """Change the message size if it is off by a factor of two, after round ``number`` is complete."""
    current_size = message_sizes.size(number)
    if not message_sizes.is_changing(number) and not current_size / 2 < size < current_size * 2:
        # The next `prefetch_factor` rounds are already requested, so they keep the old size.
        message_sizes.change(number + prefetch_factor + 1, size)


def preferred_size(message: WorkerMessage) -> int:
    """Return the best number of items per message, given the time and bytes of one."""
    size = max(1, len(message.packed))
    by_time = MESSAGE_WORK_S * size / max(message.made_s, 1e-6)
    by_bytes = _LARGE_BYTES * size / max(message.nbytes, 1)
    return int(max(1, min(_MAX_ITEMS, by_time, by_bytes)))


def _is_past(clock: Callable[[], float], deadline: float) -> bool:
    return clock() >= deadline


def _take_items(
    items: Iterator[_T],
    size: int,
    pack: Callable[[_T], tuple[Any, float]],
    is_late: Callable[[], bool],
) -> tuple[list[tuple[Any, float]], Exception | None]:
    """Take and pack up to ``size`` items, fewer if late; also return the exception that ended them."""
    packed_items: list[tuple[Any, float]] = []
    try:
        while not packed_items or (len(packed_items) < size and not is_late()):
            packed_items.append(pack(next(items)))
    except Exception as end:  # noqa: BLE001  (returned to the caller)
        return packed_items, end
    return packed_items, None
