"""Keep the bytes of large samples in memory that a worker shares with the main process.

A worker that reads raw samples receives, or copies, each into a block of its own, and sends a batch by naming the places of
its fields. A block is free again when nothing refers to its bytes: neither a sample that is not used yet, nor a message that
the main process has not unpacked.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import chain
from mmap import PAGESIZE

LARGE_BYTES = 16 << 10
"""Mean size of samples from which a block of each, or finding many before any is copied, is faster."""
MIN_LARGE_BYTES = 4096
"""Smaller fields are pickled as fast as they are sent otherwise."""
UNUSED_BYTES = 64 << 20
"""Memory of unused blocks that is kept for later ones; the rest is returned to the system."""
# Bytes that are reserved for a block: whole pages, four sizes for each doubling.
_ROOMS = tuple(
    PAGESIZE * pages for pages in chain((1, 2, 3), ((4 + n % 4) << n // 4 for n in range(64)))
)


class SharedBytes:
    """Some bytes of a block, in place of the ``bytes`` of a field until a batch is sent.

    Args:
        block: Keeps the memory in use.
        start: Offset in the shared memory.
        size: Number of bytes.
    """

    __slots__ = ("_block", "_size", "start")

    def __init__(self, block: Block, start: int, size: int) -> None:
        self._block, self.start, self._size = block, start, size

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return bytes(self._block.blocks.memory[self.start : self.start + self._size])

    def __reduce__(self) -> tuple[Callable[[bytes], bytes], tuple[bytes]]:
        return bytes, (bytes(self),)


class Block:
    """Memory of one sample, or of one field; its slices are `SharedBytes`.

    Args:
        blocks: The memory that it is part of.
        start: Offset in it.
        size: Number of bytes.
        room: Place of its reserved size among the sizes.
    """

    __slots__ = ("_room", "_size", "_start", "blocks")

    def __init__(self, blocks: SharedBlocks, start: int, size: int, room: int) -> None:
        self.blocks, self._start, self._size, self._room = blocks, start, size, room

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, taken: slice) -> SharedBytes:
        start, stop, _ = taken.indices(self._size)
        return SharedBytes(self, self._start + start, max(0, stop - start))

    def __del__(self) -> None:
        self.blocks.give_back(self._start, self._room)

    @property
    def view(self) -> memoryview:
        """Its memory, shape (size,), uint8; to be used only while the block exists."""
        return self.blocks.memory[self._start : self._start + self._size]


class SharedBlocks:
    """Divide shared memory into blocks; for the threads of one process.

    Reserved sizes are few and are never merged, so that taking a block is cheap. Memory that no block uses takes at most
    `UNUSED_BYTES`.

    Args:
        memory: Writable memory, shape (n,), uint8.
        first: Offset of the first byte that blocks may use; a multiple of the page size.
        release: Returns pages to the system, given their offset and size.
    """

    def __init__(
        self, memory: memoryview, first: int, release: Callable[[int, int], object]
    ) -> None:
        self.memory = memory
        self._release = release
        self._first = self._end = first  # of the memory that was ever reserved
        self._unused: tuple[list[int], ...] = tuple([] for _ in _ROOMS)  # offsets by size
        self._released: tuple[list[int], ...] = tuple([] for _ in _ROOMS)  # without memory
        self._unused_bytes = self._in_use = 0
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: a collection may give back a block anywhere

    def take(self, sizes: Iterable[int]) -> list[Block] | None:
        """Return a block of each size; None if there is no memory for all."""
        blocks: list[Block] = []
        for size in sizes:
            block = self._take(size)
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def hold(self, data: memoryview) -> SharedBytes | bytes:
        """Copy the bytes of a field to a block; as ``bytes`` if they are few, or there is no memory."""
        block = self._take(len(data)) if len(data) >= MIN_LARGE_BYTES else None
        if block is None:
            return bytes(data)
        block.view[:] = data
        return block[:]

    def give_back(self, start: int, room: int) -> None:
        """Note that a block is not used any more; called by the block."""
        if os.getpid() != self._pid:  # a forked child shares the memory, but does not own it
            return
        with self._lock:
            self._in_use -= 1
            if self._unused_bytes + _ROOMS[room] <= UNUSED_BYTES:
                self._unused[room].append(start)
                self._unused_bytes += _ROOMS[room]
            else:
                self._release(start, _ROOMS[room])
                self._released[room].append(start)

    def reset(self) -> None:
        """Divide the memory anew if more than half of it is reserved for sizes that are not in use."""
        with self._lock:
            if self._in_use or self._end - self._first < (len(self.memory) - self._first) // 2:
                return
            for room, offsets in enumerate(self._unused):
                for start in offsets:
                    self._release(start, _ROOMS[room])
            for offsets in chain(self._unused, self._released):
                offsets.clear()
            self._unused_bytes, self._end = 0, self._first

    def _take(self, size: int) -> Block | None:
        own = bisect_left(_ROOMS, size)
        if own == len(_ROOMS):
            return None
        with self._lock:
            found = self._take_unused(own) or self._take_new(own)
            if found is None:
                return None
            self._in_use += 1
            start, room = found
            return Block(self, start, size, room)

    def _take_unused(self, room: int) -> tuple[int, int] | None:
        for one in range(room, min(room + 2, len(_ROOMS))):  # or the next size, before new memory
            if self._unused[one]:
                self._unused_bytes -= _ROOMS[one]
                return self._unused[one].pop(), one
        return None

    def _take_new(self, room: int) -> tuple[int, int] | None:
        if self._released[room]:
            return self._released[room].pop(), room
        start = self._end
        if start + _ROOMS[room] <= len(self.memory):
            self._end += _ROOMS[room]
            return start, room
        larger = next((one for one in range(room, len(_ROOMS)) if self._released[one]), None)
        return None if larger is None else (self._released[larger].pop(), larger)


def keep_shared(data: SharedBytes) -> SharedBytes | bytes:
    """Return the bytes of a field as they are, or as ``bytes`` if they are few."""
    return data if len(data) >= MIN_LARGE_BYTES else bytes(data)
