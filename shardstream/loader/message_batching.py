"""Several small batches in one message from a worker to the main process.

A message through torch's queues costs a third of a millisecond, whatever it holds. Batches that are made faster than that are sent
several at a time: as many as are made in two milliseconds. The main process says how many, and from which round of messages on, so
that all workers send equally many, and batches can be handed out in turn while few of them wait; but no message is waited for over 50 ms
for the sake of its size.
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
from shardstream.loader.collation import shared_numbers
from shardstream.loader.worker_errors import wrap_exception

_T = TypeVar("_T")
_MAX_ITEMS = 16
MESSAGE_WORK_S, MAX_DELAY_S = 0.002, 0.05
_LARGE_BYTES = 1 << 20
SIZES_KEPT = 5


class WorkerMessage(NamedTuple):
    """What is sent at once."""

    worker: int
    packed: list[Any]
    made_s: float
    """Seconds that it took to make."""
    nbytes: float
    """What it takes of memory that is shared; infinite if it goes through torch's own, or the pipe."""
    ended: bool
    """There will be no more of this worker."""
    error: Any = None
    """Why, if it failed (torch's ``ExceptionWrapper``)."""


class MessageSizes:
    """How many items a worker sends in each round of messages; in memory that workers and the main process share."""

    def __init__(self) -> None:
        # From which round on, how many before, how many then: one number, so that all of it is read at once.
        self._packed = shared_numbers(0)
        self.begin()

    def begin(self) -> None:
        """Send one at a time, from round 0 on."""
        self._store(0, 1, 1)

    def size(self, number: int) -> int:
        """Return how many items are sent in round ``number``."""
        start, before, then = self._read()
        return then if number >= start else before

    def change(self, number: int, size: int) -> None:
        """Let ``size`` items be sent from a round on that no worker has begun."""
        self._store(number, self._read()[2], size)

    def is_changing(self, number: int) -> bool:
        """Tell whether a change is still to come in round ``number``."""
        return number < self._read()[0]

    def _read(self) -> tuple[int, int, int]:
        value = int(self._packed.numpy()[0])
        return value >> 16, value >> 8 & 0xFF, value & 0xFF

    def _store(self, number: int, before: int, then: int) -> None:
        self._packed.numpy()[0] = number << 16 | before << 8 | then


def send_messages(
    items: Generator[_T],
    worker: int,
    message_sizes: MessageSizes,
    pack: Callable[[_T], tuple[Any, float]],
    *,
    clock: Callable[[], float] = perf_counter,
) -> Generator[WorkerMessage]:
    """In a worker: send what it makes in messages of several items. An error comes behind what was made before it.

    Args:
        items: What it makes.
        worker: Its number.
        message_sizes: How many are sent at once.
        pack: Returns what is sent for an item, and its bytes as in `WorkerMessage`. Called as soon as it is made.
        clock: Seconds, growing.
    """
    owed = 0  # what was late is sent with later rounds, so that all workers have sent equally many again
    with closing(items):
        for number in count():
            begun, size = clock(), owed + message_sizes.size(number)
            late = partial(_is_past, clock, begun + MAX_DELAY_S)
            made, end = _take_items(items, size, pack, late)
            owed = size - len(made)
            error = (
                wrap_exception(end, worker) if end and not isinstance(end, StopIteration) else None
            )
            packed, nbytes = [one for one, _ in made], sum(nbytes for _, nbytes in made)
            made_s = clock() - begun
            messages = [WorkerMessage(worker, packed, made_s, nbytes, end is not None, error)]
            del made, packed
            yield messages.pop()  # while the next are made, only who has taken it holds what is in it
            if end is not None:
                return


def receive_items(
    messages: Iterator[WorkerMessage],
    workers: int,
    message_sizes: MessageSizes,
    unpack: Callable[[Any], _T],
    *,
    ahead: int,
    choose_size: Callable[[WorkerMessage], int] | None = None,
) -> Generator[_T]:
    """In the main process: hand out items, one of each worker in turn, as if they came one by one.

    Args:
        messages: Of worker 0, 1, … in turn; a worker that has ended is passed over.
        workers: How many there are.
        message_sizes: How many items they send at once; changed here by what comes.
        unpack: Returns the item of what was sent for it.
        ahead: For how many messages each worker is asked before the first is taken.
        choose_size: Returns how many items like those of a message are worth one; by default `preferred_size`.

    Raises:
        OptionError: If another iteration has taken them.
        Exception: That of a worker, when it is its turn.
    """
    waiting: list[deque[Any]] = [deque() for _ in range(workers)]
    ended, failed, number, turn = set[int](), dict[int, Any](), 0, 0
    sizes: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=SIZES_KEPT))
    while len(ended) < workers or any(waiting) or failed:
        while not waiting[turn] and turn not in ended:
            if (message := next(messages, None)) is None:
                raise OptionError(
                    "another iteration of this loader has begun, and taken its persistent workers: finish one "
                    "before the next begins, or use two loaders"
                )
            waiting[message.worker] += message.packed
            if message.error is not None:
                failed[message.worker] = message.error
            if message.ended:
                ended.add(message.worker)
                continue
            sizes[message.worker].append((choose_size or preferred_size)(message))
            # Once one has ended, the others are asked more often.
            if message.worker == workers - 1 and not ended:
                crowded = max(map(len, waiting)) > 2 * _MAX_ITEMS
                size = 1 if crowded else int(min(median(judged) for judged in sizes.values()))
                _adapt_size(message_sizes, number, size, ahead)
                number += 1
        if waiting[turn]:
            yield unpack(waiting[turn].popleft())
        elif turn in failed:
            failed[turn].reraise()
        turn = (turn + 1) % workers
    next(messages, None)  # lets torch end the workers


def _adapt_size(message_sizes: MessageSizes, number: int, size: int, ahead: int) -> None:
    """Let so many items be sent at once, now that round ``number`` has come from all."""
    now = message_sizes.size(number)
    if not message_sizes.is_changing(number) and not now / 2 < size < now * 2:
        # Those rounds behind this one that have been asked for are done as they were.
        message_sizes.change(number + ahead + 1, size)


def preferred_size(message: WorkerMessage) -> int:
    """Return how many items like these are worth a message."""
    size = max(1, len(message.packed))
    by_time = MESSAGE_WORK_S * size / max(message.made_s, 1e-6)
    by_bytes = _LARGE_BYTES * size / max(message.nbytes, 1)
    return int(max(1, min(_MAX_ITEMS, by_time, by_bytes)))


def _is_past(clock: Callable[[], float], until: float) -> bool:
    return clock() >= until


def _take_items(
    items: Iterator[_T],
    size: int,
    pack: Callable[[_T], tuple[Any, float]],
    is_late: Callable[[], bool],
) -> tuple[list[tuple[Any, float]], Exception | None]:
    """Take and pack some items, fewer if it gets late; with what ended that."""
    made: list[tuple[Any, float]] = []
    try:
        while not made or (len(made) < size and not is_late()):
            made.append(pack(next(items)))
    except Exception as end:  # noqa: BLE001  (told to the caller)
        return made, end
    return made, None
