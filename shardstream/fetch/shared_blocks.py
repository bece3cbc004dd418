"""Keep the bytes of large samples in memory that a worker shares with the main process.

A worker that reads raw samples receives, or copies, each into a block of its own, and sends a batch by naming the places of
its fields. A block is free again when nothing refers to its bytes: neither a sample that is not used yet, nor a message that
the main process has not unpacked.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable

MIN_SHARED_BYTES = 4096
"""Smaller fields are copied: they are pickled as fast."""
# Reserved bytes of a block: four sizes for each doubling, so that few blocks of other sizes stay unused.
_ROOMS = tuple((4 + quarter) << doubling for doubling in range(10, 28) for quarter in range(4))
_LARGER_ROOMS = 3  # unused rooms of how many sizes are tried before new memory is taken


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
        return self._block.copy(self.start, self._size)

    def __reduce__(self) -> tuple[Callable[[bytes], bytes], tuple[bytes]]:
        return bytes, (bytes(self),)


class Block:
    """Memory of one sample, or of one field; its slices are `SharedBytes`.

    Args:
        blocks: The memory that it is part of.
        start: Offset in it.
        size: Number of bytes.
        room: Number of its reserved size.
    """

    __slots__ = ("_blocks", "_room", "_size", "_start")

    def __init__(self, blocks: SharedBlocks, start: int, size: int, room: int) -> None:
        self._blocks, self._start, self._size, self._room = blocks, start, size, room

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, taken: slice) -> SharedBytes:
        start, stop, _ = taken.indices(self._size)
        return SharedBytes(self, self._start + start, max(0, stop - start))

    def __del__(self) -> None:
        self._blocks.give_back(self._start, self._room)

    @property
    def view(self) -> memoryview:
        """Its memory, shape (size,), uint8; to be used only while the block exists."""
        return self._blocks.memory[self._start : self._start + self._size]

    def copy(self, start: int, size: int) -> bytes:
        """Return a copy of bytes by their offset in the shared memory."""
        return bytes(self._blocks.memory[start : start + size])


class SharedBlocks:
    """Divide shared memory into blocks; for the threads of one process.

    Reserved sizes are few and never change, so that taking a block is cheap. Memory that no block has used costs nothing.

    Args:
        memory: Writable memory, shape (n,), uint8.
        first: Offset of the first byte that blocks may use.
    """

    def __init__(self, memory: memoryview, first: int) -> None:
        self.memory = memory
        self._end = first  # of the memory that was ever reserved
        self._lock = threading.Lock()  # guards the end
        self._unused: tuple[list[int], ...] = tuple([] for _ in _ROOMS)  # offsets by size

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
        block = self._take(len(data)) if len(data) >= MIN_SHARED_BYTES else None
        if block is None:
            return bytes(data)
        block.view[:] = data
        return block[:]

    def give_back(self, start: int, room: int) -> None:
        """Note that a block is not used any more; called by the block."""
        self._unused[room].append(start)  # without a lock: a collection may call this anywhere

    def _take(self, size: int) -> Block | None:
        own = bisect_left(_ROOMS, size)
        for room in range(own, min(own + 1 + _LARGER_ROOMS, len(_ROOMS))):
            try:
                return Block(self, self._unused[room].pop(), size, room)
            except IndexError:  # none, or another thread was first
                continue
        if own == len(_ROOMS):
            return None
        with self._lock:
            start = self._end
            if start + _ROOMS[own] > len(self.memory):
                return None
            self._end += _ROOMS[own]
        return Block(self, start, size, own)


def keep_shared(data: SharedBytes) -> SharedBytes | bytes:
    """Return the bytes of a field as they are, or as ``bytes`` if they are few."""
    return data if len(data) >= MIN_SHARED_BYTES else bytes(data)
