"""Batches on their way from a worker to the main process: through memory that both see, not through a pipe.

A batch of photos as bytes is copied in and copied out; through the pipe it is copied five times, 64 KiB with each system call.
Of a tensor torch would make a file in /dev/shm, which containers keep small, and send its descriptor: 0.2 ms. So it still does
of tensors that are very large, and of those that find no room.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from operator import attrgetter
from typing import Any, NamedTuple

from shardstream.loader.serialize import (
    TensorLayout,
    deserialize_value,
    serialize_value,
    tensor_bytes,
    tensor_from_bytes,
    unsendable_error,
)

RING_BYTES = 256 << 20  # of addresses: memory is taken by what is on its way at one time
# Messages begin at multiples of that: one that is a little larger than another still fits its place.
RING_STEP_BYTES, _SMALL_STEP_BYTES = 1 << 20, 1 << 16
_HEAD_BYTES = mmap.PAGESIZE  # which begin with how many messages are unpacked
_COUNT = struct.Struct("q")
_ALIGN_BYTES = 64
_START = attrgetter("start")


class RingMessage(NamedTuple):
    """A value taken apart."""

    worker: int
    number: int
    """Messages of the ring so far, with this one; 0 if it is not in there."""
    start: int
    """Where it begins in the ring."""
    places: list[tuple[int, int]]
    """Where its tensors and large bytes begin and end, from there; at last the pickle."""
    pieces: list[Any] | None
    """Those, and the pickle, if they found no room in the ring."""
    rest: list[Any]
    """What torch has to send."""

    @property
    def nbytes(self) -> int:
        """What it takes of the ring."""
        return self.places[-1][1]


class RingBuffer:
    """Memory that a worker fills and the main process empties, in the same order.

    Picklable while a process is being started. Needs ``memfd_create`` (Linux), which has no limit of its own, where
    containers keep /dev/shm small.
    """

    def __init__(self, handle: int | None = None) -> None:
        self._handle = os.memfd_create("shardstream") if handle is None else handle
        os.ftruncate(self._handle, _HEAD_BYTES + RING_BYTES)
        self._memory = mmap.mmap(self._handle, _HEAD_BYTES + RING_BYTES)
        self._in_flight: deque[RingMessage] = deque()
        self._number = 0

    def __reduce__(self) -> tuple[Callable[[Any], RingBuffer], tuple[Any]]:
        return _attach, (reduction.DupFd(self._handle),)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit `os` may be gone
        if hasattr(self, "_handle"):
            close(self._handle)

    def reset(self, *, give_back: bool) -> None:
        """In the worker: take all room as free, because nobody waits any more for what is on its way.

        Args:
            give_back: Return its memory to the system: what was taken when the main process was late once is held for good otherwise. To
                take it anew costs milliseconds, a fifth of an epoch of 2,000 photos from the page cache.
        """
        self._in_flight.clear()
        if give_back:
            with suppress(OSError):  # a sandbox that cannot
                self._memory.madvise(mmap.MADV_REMOVE, _HEAD_BYTES, RING_BYTES)

    def pack(self, value: Any, worker: int) -> RingMessage:
        """In the worker: copy a value; return what is to be sent for it.

        Raises:
            SampleError: If it cannot be pickled.
        """
        try:
            pieces, rest = serialize_value(value)
        except Exception as error:
            raise unsendable_error(error) from error
        places = _lay_out_pieces(pieces)
        base = self._find_room(places[-1][1])
        if base is None:
            # The queue's thread sends them later: a step may have changed its tensors by then.
            copies = [one if isinstance(one, bytes) else one.clone() for one in pieces]
            return RingMessage(worker, 0, 0, places, copies, rest)
        for (start, end), piece in zip(places, pieces, strict=True):
            data = piece if isinstance(piece, bytes) else tensor_bytes(piece).data
            self._memory[_HEAD_BYTES + base + start : _HEAD_BYTES + base + end] = data
        self._number += 1
        message = RingMessage(worker, self._number, base, places, None, rest)
        self._in_flight.append(message._replace(rest=[]))
        return message

    def unpack(self, message: RingMessage) -> Any:
        """In the main process: return the value, and let its room be used again."""
        if (pieces := message.pieces) is not None:
            return deserialize_value(pieces[-1], message.rest, lambda number, _: pieces[number])
        base = _HEAD_BYTES + message.start
        view = memoryview(self._memory)

        def load(number: int, kind: TensorLayout | None) -> Any:
            start, end = message.places[number]
            if kind is None:
                return self._memory[base + start : base + end]
            return tensor_from_bytes(kind, view[base + start : base + end])

        start, end = message.places[-1]
        value = deserialize_value(self._memory[base + start : base + end], message.rest, load)
        _COUNT.pack_into(self._memory, 0, message.number)
        return value

    def _find_room(self, size: int) -> int | None:
        """Return the first place with that many free bytes, so that few pages are used."""
        (unpacked,) = _COUNT.unpack_from(self._memory)
        while self._in_flight and self._in_flight[0].number <= unpacked:
            self._in_flight.popleft()
        place, step = 0, RING_STEP_BYTES if size > RING_STEP_BYTES // 2 else _SMALL_STEP_BYTES
        for message in sorted(self._in_flight, key=_START):
            if place + size <= message.start:
                return place
            place = -(-(message.start + message.nbytes) // step) * step
        return place if place + size <= RING_BYTES else None


def _lay_out_pieces(pieces: list[Any]) -> list[tuple[int, int]]:
    """Return where each piece begins and ends in a message."""
    places, end = [], 0
    for piece in pieces:
        if isinstance(piece, bytes):
            start, end = end, end + len(piece)
        else:
            start = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
            end = start + piece.nbytes
        places.append((start, end))
    return places


def open_rings(workers: int) -> list[RingBuffer]:
    """Return a ring for each worker; none where the system cannot, or may not."""
    if not hasattr(os, "memfd_create"):
        return []
    try:
        return [RingBuffer() for _ in range(workers)]
    except OSError:  # a sandbox, or a limit of addresses, files or their size
        return []


def _attach(handle: Any) -> RingBuffer:
    return RingBuffer(handle.detach())
