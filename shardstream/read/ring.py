"""Large bytes on their way from a worker to the main process: through memory that both see, not pickled through a pipe.

A batch of photos as bytes is copied in and copied out; through the pipe it is copied five times, 64 KiB with each system call.
What finds no room goes the usual way, and so does whatever is not bytes: torch has shared memory of its own for tensors.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from multiprocessing import reduction
from typing import Any, NamedTuple

_LEAST_BYTES = 4096  # smaller ones are pickled as fast
_RING_BYTES = 64 << 20  # of addresses: memory is taken by what is on its way at one time
# Parcels begin at multiples of that: one that is a little larger than another still fits its place.
_STEP_BYTES = 1 << 20
_HEAD_BYTES = mmap.PAGESIZE  # which begin with how many parcels are unpacked
_COUNT = struct.Struct("q")
# What begins so is a column of keys or of numbers, and not looked through.
_PLAIN = frozenset({str, int, float})


class _Place(NamedTuple):
    """Stands for bytes that are in the ring."""

    number: int
    """Of these bytes in their parcel."""


class Parcel(NamedTuple):
    """A batch whose large bytes are in a ring."""

    worker: int
    number: int
    """Parcels of the ring so far, with this one."""
    content: Any
    """The batch, with places instead of large bytes."""
    ends: list[int]
    """Where the bytes of its first, second … place end in the ring; each begins where the one before ends."""
    start: int
    """Where those of its first begin."""


class Ring:
    """Memory that a worker fills and the main process empties, in the same order.

    Picklable while a process is being started. Needs ``memfd_create`` (Linux), which has no limit of its own, where
    containers keep /dev/shm small.
    """

    def __init__(self, handle: int | None = None) -> None:
        self._handle = os.memfd_create("shardstream") if handle is None else handle
        os.ftruncate(self._handle, _HEAD_BYTES + _RING_BYTES)
        self._memory = mmap.mmap(self._handle, _HEAD_BYTES + _RING_BYTES)
        self._on_way: deque[Parcel] = deque()  # without what they hold
        self._number = 0

    def __reduce__(self) -> tuple[Callable[[Any], Ring], tuple[Any]]:
        return _attach, (reduction.DupFd(self._handle),)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit `os` may be gone
        if hasattr(self, "_handle"):
            close(self._handle)

    def forget(self, *, give_back: bool) -> None:
        """In the worker: take all room as free, because nobody waits any more for what is on its way.

        Args:
            give_back: Return its memory to the system: what was taken when the main process was late once is held for good otherwise. To
                take it anew costs milliseconds, a fifth of an epoch of 2,000 photos from the page cache.
        """
        self._on_way.clear()
        if give_back:
            with suppress(OSError):  # a sandbox that cannot
                self._memory.madvise(mmap.MADV_REMOVE, _HEAD_BYTES, _RING_BYTES)

    def pack(self, batch: Any, worker: int) -> Any:
        """In the worker: return what is to be sent for a batch: a parcel, or itself where nothing is gained."""
        large: list[bytes] = []

        def take_out(data: bytes) -> bytes | _Place:
            if len(data) < _LEAST_BYTES:
                return data
            large.append(data)
            return _Place(len(large) - 1)

        try:
            content = _swapped(batch, bytes, take_out)
        except RecursionError:  # it holds itself, or is very deep: pickle may know how
            return batch
        sizes = [len(data) for data in large]
        start = self._find_room(sum(sizes)) if large else None
        if start is None:
            return batch
        ends = list(accumulate(sizes, initial=start))
        for first, end, data in zip(ends, ends[1:], large, strict=False):
            self._memory[_HEAD_BYTES + first : _HEAD_BYTES + end] = data
        self._number += 1
        parcel = Parcel(worker, self._number, content, ends[1:], start)
        self._on_way.append(parcel._replace(content=None))
        return parcel

    def unpack(self, parcel: Parcel) -> Any:
        """In the main process: return the batch, and let its room be used again."""
        bounds = [_HEAD_BYTES + end for end in (parcel.start, *parcel.ends)]
        large = [self._memory[a:b] for a, b in pairwise(bounds)]
        _COUNT.pack_into(self._memory, 0, parcel.number)
        return _swapped(parcel.content, _Place, lambda place: large[place.number])

    def _find_room(self, size: int) -> int | None:
        """Return the first place with that many free bytes, so that few pages are used."""
        (unpacked,) = _COUNT.unpack_from(self._memory)
        while self._on_way and self._on_way[0].number <= unpacked:
            self._on_way.popleft()
        place = 0
        for parcel in sorted(self._on_way, key=lambda one: one.start):
            if place + size <= parcel.start:
                return place
            place = -(-parcel.ends[-1] // _STEP_BYTES) * _STEP_BYTES
        return place if place + size <= _RING_BYTES else None


def open_rings(workers: int) -> list[Ring]:
    """Return a ring for each worker; none where the system cannot, or may not."""
    if not hasattr(os, "memfd_create"):
        return []
    try:
        return [Ring() for _ in range(workers)]
    except OSError:  # a sandbox, or a limit of addresses, files or their size
        return []


def unpacked(batch: Any, rings: Sequence[Ring]) -> Any:
    """Return a batch that was sent by one of the rings, or by none."""
    return rings[batch.worker].unpack(batch) if type(batch) is Parcel else batch


def _attach(handle: Any) -> Ring:
    return Ring(handle.detach())


def _swapped(value: Any, leaf: type, swap: Callable[[Any], Any]) -> Any:
    """Return a batch in which each value of one type is swapped for another."""
    kind = type(value)
    if kind is leaf:
        return swap(value)
    if kind is dict:
        return {name: _swapped(one, leaf, swap) for name, one in value.items()}
    if (kind is list or kind is tuple) and not (value and type(value[0]) in _PLAIN):
        return kind(_swapped(one, leaf, swap) for one in value)
    return value
