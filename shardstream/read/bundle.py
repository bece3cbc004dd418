"""Several small batches in one message from a worker to the main process.

A message through torch's queues costs a third of a millisecond, whatever it holds. Batches that are made faster than that are sent
several at a time: as many as are made in two milliseconds. The main process says how many, and from which round of messages on, so
that all workers send equally many and batches can be handed out in turn with no more than a round of them waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from shardstream.read.tensors import shared_numbers

_T = TypeVar("_T")
Packed = tuple[Any, int]
_MOST = 16
_WORTH_S = 0.002
_LARGE_BYTES = 1 << 20


class Bundle(NamedTuple):
    """What is sent at once."""

    worker: int
    content: Any
    """What the packets were packed to."""
    size: int
    made_s: float
    """Seconds that it took to make them."""
    nbytes: int
    """Large bytes that they hold."""
    ended: bool
    """There will be no more of this worker."""


class Rounds:
    """How many packets a worker sends in each round of messages; in memory that workers and the main process share."""

    def __init__(self) -> None:
        # From which round on, how many before, how many then: one number, so that all of it is read at once.
        self._told = shared_numbers(0)
        self.begin()

    def begin(self) -> None:
        """Send one at a time, from round 0 on."""
        self._tell(0, 1, 1)

    def size(self, number: int) -> int:
        """Return how many packets are sent in round ``number``."""
        start, before, then = self._read()
        return then if number >= start else before

    def change(self, number: int, size: int) -> None:
        """Let ``size`` packets be sent from a round on that no worker has begun."""
        self._tell(number, self._read()[2], size)

    def is_changing(self, number: int) -> bool:
        """Tell whether a change is still to come in round ``number``."""
        return number < self._read()[0]

    def _read(self) -> tuple[int, int, int]:
        told = int(self._told.numpy()[0])
        return told >> 16, told >> 8 & 0xFF, told & 0xFF

    def _tell(self, number: int, before: int, then: int) -> None:
        self._told.numpy()[0] = number << 16 | before << 8 | then


def bundled(
    packets: Generator[_T], worker: int, rounds: Rounds, pack: Callable[[list[_T]], Packed]
) -> Generator[Bundle]:
    """In a worker: send what it makes in bundles. An error comes behind what was made before it.

    Args:
        packets: What it makes.
        worker: Its number.
        rounds: How many are sent at once.
        pack: Returns what is sent for some packets, and how many large bytes they hold.
    """
    with closing(packets):
        for number in count():
            begun = perf_counter()
            made, end = _take(packets, rounds.size(number))
            spent_s, ended = perf_counter() - begun, isinstance(end, StopIteration)
            if made or ended:
                size, (content, nbytes) = len(made), pack(made)
                packed = [Bundle(worker, content, size, spent_s, nbytes, ended)]
                del made, content
                yield packed.pop()  # while the next are made, only who has taken it holds what is in it
            if ended:
                return
            if end is not None:
                raise end


def unbundled(
    bundles: Iterator[Bundle],
    workers: int,
    rounds: Rounds,
    unpack: Callable[[Any], list[_T]],
    *,
    ahead: int,
) -> Generator[_T]:
    """In the main process: hand out packets, one of each worker in turn, as if they came one by one.

    Args:
        bundles: Of worker 0, 1, … in turn; a worker that has ended is passed over.
        workers: How many there are.
        rounds: How many packets they send at once; changed here by what comes.
        unpack: Returns the packets that were packed.
        ahead: For how many bundles each worker is asked before the first is taken.
    """
    waiting: list[deque[_T]] = [deque() for _ in range(workers)]
    ended, number, turn = set[int](), 0, 0
    while len(ended) < workers or any(waiting):
        while not waiting[turn] and turn not in ended:
            bundle = next(bundles)
            waiting[bundle.worker] += unpack(bundle.content)
            if bundle.ended:
                ended.add(bundle.worker)
            if bundle.worker == 0 and not ended:
                _adapt(rounds, number, bundle, ahead)
                number += 1
        if waiting[turn]:
            yield waiting[turn].popleft()
        turn = (turn + 1) % workers
    next(bundles, None)  # lets torch end the workers


def _adapt(rounds: Rounds, number: int, bundle: Bundle, ahead: int) -> None:
    """Let as many packets be sent at once as pay, after a bundle of round ``number`` has come."""
    if rounds.is_changing(number):
        return
    size, now = _worth(bundle), rounds.size(number)
    if not now / 2 < size < now * 2:
        # Those rounds behind this one that have been asked for are done as they were.
        rounds.change(number + ahead + 1, size)


def _worth(bundle: Bundle) -> int:
    """Return how many packets like these are worth a message."""
    by_time = _WORTH_S * bundle.size / max(bundle.made_s, 1e-6)
    by_bytes = _LARGE_BYTES * bundle.size / max(bundle.nbytes, 1)
    return max(1, min(_MOST, int(by_time), int(by_bytes)))


def _take(packets: Iterator[_T], size: int) -> tuple[list[_T], Exception | None]:
    """Take some packets; with what ended that, if there are fewer."""
    made: list[_T] = []
    try:
        while len(made) < size:
            made.append(next(packets))
    except Exception as end:  # noqa: BLE001  (told to the caller)
        return made, end
    return made, None
