"""One file of the cache: a piece of a remote file, with checksums that are looked at whenever it is read.

Little-endian: the magic, the chunk's name (16 bytes), its length, the CRC-32 of each of its pages, the CRC-32 of all this;
then the bytes. Pages are checked one by one, so that a small sample need not pay for the whole chunk.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
import zlib
from typing import cast

PAGE_BYTES = 64 << 10
_PAGES = 16
CACHE_CHUNK_BYTES = _PAGES * PAGE_BYTES
"""Of one file: large enough that opening it costs little, small enough that little is fetched around what is asked for."""

_MAGIC = b"shardst1"
_HEAD = struct.Struct(f"<8s16sI{_PAGES}I")
_SUM = struct.Struct("<I")
_local = threading.local()
HEADER_BYTES = _HEAD.size + _SUM.size


class ChunkError(Exception):
    """What lies under the name of a chunk is something else, or damaged."""


def encode_header(name: bytes, data: memoryview) -> bytes:
    """Return what goes in front of the bytes of a chunk."""
    sums = [zlib.crc32(data[at : at + PAGE_BYTES]) for at in range(0, len(data), PAGE_BYTES)]
    head = _HEAD.pack(_MAGIC, name, len(data), *sums, *[0] * (_PAGES - len(sums)))
    return head + _SUM.pack(zlib.crc32(head))


def read_chunk(handle: int, name: bytes, length: int, start: int, end: int) -> memoryview:
    """Return the bytes ``start`` to ``end`` of a chunk that is ``length`` bytes long, checked.

    They stand in memory that the next call of this thread writes over: new memory for each would cost more than all else.

    Args:
        handle: An open file; it may be anything.
        name: The chunk's name.
        length: What the remote file says.
        start: Within the chunk.
        end: Within the chunk, above ``start``.

    Raises:
        ChunkError: If the file is not this chunk, or damaged where it is read.
        OSError: If it cannot be read.
    """
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_size != HEADER_BYTES + length:
        raise ChunkError("no file of the right length")
    sums = _read_sums(os.pread(handle, HEADER_BYTES, 0), name, length)
    first, last = start // PAGE_BYTES, -(-end // PAGE_BYTES)
    base = first * PAGE_BYTES
    size = min(last * PAGE_BYTES, length) - base
    data = _buffer()[:size]
    if os.preadv(handle, [data], HEADER_BYTES + base) != size:
        raise ChunkError("it became shorter")
    for page in range(first, last):
        at = page * PAGE_BYTES - base
        if zlib.crc32(data[at : at + PAGE_BYTES]) != sums[page]:
            raise ChunkError(f"the checksum of its page {page} is wrong")
    return data[start - base : end - base]


def _buffer() -> memoryview:
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(CACHE_CHUNK_BYTES))
    return cast("memoryview", _local.buffer)


def _read_sums(header: bytes, name: bytes, length: int) -> tuple[int, ...]:
    head, total = header[: _HEAD.size], header[_HEAD.size :]
    if total != _SUM.pack(zlib.crc32(head)):
        raise ChunkError("the checksum of its header is wrong")
    magic, found, size, *sums = _HEAD.unpack(head)
    if (magic, found, size) != (_MAGIC, name, length):
        raise ChunkError("it is another chunk")
    return tuple(sums)
