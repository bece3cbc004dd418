"""Send batches from a worker to the main process through a shared-memory ring buffer.

A batch of bytes is copied in and out once; through a pipe it is copied five times, 64 KiB per system call. For each tensor torch
would create a file in /dev/shm, which containers keep small, and send its descriptor (0.2 ms). Very large tensors, and the
tensors of batches that do not fit into the ring, still go that way.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import reduction
from operator import attrgetter
from typing import Any, NamedTuple

from shardstream.loader.serialize import (
    NewTensor,
    SerializedValue,
    TensorLayout,
    deserialize_value,
    new_tensor,
    serialize_value,
    tensor_bytes,
    tensor_from_bytes,
    unsendable_error,
)

# Address space; physical memory is used only for messages in flight.
RING_BYTES = 256 << 20
# Messages start at multiples of these, so that a slightly larger message still fits into a freed place.
RING_STEP_BYTES, _SMALL_STEP_BYTES = 1 << 20, 1 << 16
_HEAD_BYTES = (
    mmap.PAGESIZE
)  # the number of unpacked messages, written by the main process; the worker's progress
_COUNT = struct.Struct("q")
_ALIGN_BYTES = 64
_START = attrgetter("start")


class RingMessage(NamedTuple):
    """Position of a serialised value in the ring, or the value's pieces."""

    number: int
    """Sequence number in the ring, from 1; 0 if the value is not in the ring."""
    start: int
    """Start offset in the ring."""
    places: list[tuple[int, int]]
    """Start and end of each tensor and large bytes object, relative to ``start``; the last one is the pickle."""
    pieces: list[Any] | None
    """The pieces themselves, the pickle last, if the ring had no room; else None."""
    rest: list[Any]
    """Objects that torch must send."""

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(end - start for start, end in self.places)

    @property
    def is_in_ring(self) -> bool:
        """Whether the message is only a place in the ring."""
        return self.pieces is None and not self.rest


class Channel:
    """Sends values from a worker to the main process in messages of a pipe: whole, where the system has no rings."""

    progress: int = 0
    """n while the worker makes its batch n, from 1, then -n; always 0 in a main process without shared memory."""

    def reset(self, *, give_back: bool) -> None:
        """In the worker: drop values that were not received."""

    def pack(self, value: Any) -> RingMessage:
        """In the worker: return the message for a value.

        Raises:
            SampleError: If the value cannot be pickled.
        """
        return _whole(*_serialize(value))

    def unpack(self, message: RingMessage, allocate: NewTensor = new_tensor) -> Any:
        """In the main process: return the value of a message, here one that holds it.

        Args:
            message: The message of `pack`.
            allocate: Returns the memory that a tensor is copied to, such as pinned memory.
        """
        del allocate  # torch has brought the tensors
        pieces = message.pieces or []
        return deserialize_value(pieces[-1], message.rest, lambda number, _: pieces[number])


class _InFlight(NamedTuple):
    """What a message uses until it is unpacked."""

    number: int
    start: int
    """Start offset in the ring."""
    end: int


class RingBuffer(Channel):
    """Shared memory that a worker fills and the main process empties, in the same order.

    Picklable only while a process is started. Uses ``memfd_create`` (Linux), which is not limited by the size of /dev/shm.
    """

    def __init__(self, handle: int | None = None) -> None:
        self._handle = os.memfd_create("shardstream") if handle is None else handle
        size = _HEAD_BYTES + RING_BYTES
        os.ftruncate(self._handle, size)
        self._memory = mmap.mmap(self._handle, size)
        self._in_flight: deque[_InFlight] = deque()
        self._number = 0

    def __reduce__(self) -> tuple[Callable[[Any], RingBuffer], tuple[Any]]:
        return _attach, (reduction.DupFd(self._handle),)

    @property
    def progress(self) -> int:
        """See `Channel`."""
        (number,) = _COUNT.unpack_from(self._memory, _COUNT.size)
        return int(number)

    @progress.setter
    def progress(self, number: int) -> None:
        _COUNT.pack_into(self._memory, _COUNT.size, number)

    # `close` is bound at definition: at interpreter exit the module `os` may already be cleared.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_handle"):
            close(self._handle)

    def reset(self, *, give_back: bool) -> None:
        """In the worker: reset the ring and drop undelivered batches.

        Args:
            give_back: Return the ring's pages to the system; otherwise it keeps its peak memory. New page faults cost
                milliseconds, which matters only for epochs as short as those of small local datasets.
        """
        self._in_flight.clear()
        if give_back:
            with suppress(OSError):  # not supported in some sandboxes
                self._memory.madvise(mmap.MADV_REMOVE, _HEAD_BYTES, RING_BYTES)

    def pack(self, value: Any) -> RingMessage:
        """In the worker: copy a value into the ring; return the message to send, which holds the value if there is no room.

        Raises:
            SampleError: If the value cannot be pickled.
        """
        pieces, rest = _serialize(value)
        places = _lay_out_pieces(pieces)
        size = places[-1][1]
        start = self._find_room(size)
        if start is None:
            return _whole(pieces, rest)
        base = _HEAD_BYTES + start
        for piece, (first, last) in zip(pieces, places, strict=True):
            data = piece if isinstance(piece, bytes) else tensor_bytes(piece).data
            self._memory[base + first : base + last] = data
        self._number += 1
        self._in_flight.append(_InFlight(self._number, start, start + size))
        return RingMessage(self._number, start, places, None, rest)

    def unpack(self, message: RingMessage, allocate: NewTensor = new_tensor) -> Any:
        """In the main process: copy a value out of the ring and free its space.

        Args:
            message: The message of `pack`.
            allocate: Returns the memory that a tensor is copied to, such as pinned memory.
        """
        if message.pieces is not None:
            return super().unpack(message)
        base = _HEAD_BYTES + message.start
        view = memoryview(self._memory)

        def load(number: int, kind: TensorLayout | None) -> Any:
            start, end = message.places[number]
            if kind is None:
                return self._memory[base + start : base + end]
            return tensor_from_bytes(kind, view[base + start : base + end], allocate)

        start, end = message.places[-1]
        value = deserialize_value(self._memory[base + start : base + end], message.rest, load)
        # Last: from here on the worker may overwrite the message.
        _COUNT.pack_into(self._memory, 0, message.number)
        return value

    def _find_room(self, size: int) -> int | None:
        """Return the lowest offset with ``size`` free bytes (first fit touches few pages), or None."""
        (unpacked,) = _COUNT.unpack_from(self._memory)
        while self._in_flight and self._in_flight[0].number <= unpacked:
            self._in_flight.popleft()
        place, step = 0, RING_STEP_BYTES if size > RING_STEP_BYTES // 2 else _SMALL_STEP_BYTES
        for message in sorted(self._in_flight, key=_START):
            if place + size <= message.start:
                return place
            place = -(-message.end // step) * step
        return place if place + size <= RING_BYTES else None


def _lay_out_pieces(pieces: list[Any]) -> list[tuple[int, int]]:
    """Return start and end of each piece in a message; tensors are aligned."""
    places, end = [], 0
    for piece in pieces:
        if isinstance(piece, bytes):
            start, end = end, end + len(piece)
        else:
            start = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
            end = start + piece.nbytes
        places.append((start, end))
    return places


def open_channels(workers: int) -> Sequence[Channel]:
    """Return a channel for each worker: a ring, if the system supports it."""
    if hasattr(os, "memfd_create"):
        with suppress(OSError):  # a sandbox, or a limit on address space, open files or file size
            return [RingBuffer() for _ in range(workers)]
    return [Channel() for _ in range(workers)]


def _serialize(value: Any) -> SerializedValue:
    try:
        return serialize_value(value)
    except Exception as error:
        raise unsendable_error(error) from error


def _whole(pieces: list[Any], rest: list[Any]) -> RingMessage:
    """Return a message that holds its pieces; tensors are copied, because torch sends their memory, which a step may use again."""
    held = [one if isinstance(one, bytes) else one.clone() for one in pieces]
    return RingMessage(0, 0, _lay_out_pieces(pieces), held, rest)


def _attach(handle: Any) -> RingBuffer:
    return RingBuffer(handle.detach())
