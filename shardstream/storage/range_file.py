"""A remote file as a stream of length-checked range reads."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from shardstream.storage.store import Storage
    from shardstream.storage.transfer import Cancellation

BUFFER_BYTES = 8 << 20  # a reader of lines requests few bytes at a time


class RangeStream:
    """Reads a file in order, each piece by one range read.

    Not a file object of fsspec, for two reasons: clients return truncated bodies without an error (`Storage.read` checks the
    length), and a file object reads ahead bytes that a seek then discards.

    Args:
        storage: The storage of the file.
        url: URL of the file.
        size: Length of the file in bytes.
        min_read_bytes: Minimum bytes of one range read; smaller reads (decompressors read 8 KiB) take from these.
        cancelled: Ends a read when another thread sets it.
    """

    def __init__(
        self,
        storage: Storage,
        url: str,
        size: int,
        *,
        min_read_bytes: int = 0,
        cancelled: Cancellation | None = None,
    ) -> None:
        self._storage, self._cancelled = storage, cancelled
        self._min_read_bytes = min_read_bytes
        self._kept, self._kept_start = b"", 0
        self._url = url
        self._size = size
        self._position = 0

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes; an empty result is the end.

        Raises:
            StorageError: If the file is shorter than ``size``, or cannot be reached.
        """
        start, end = self._position, min(self._position + size, self._size)
        if end <= start:
            return b""
        at = start - self._kept_start
        if not 0 <= at < len(self._kept):
            read_end = min(max(end, start + self._min_read_bytes), self._size)
            self._kept = self._storage.read(
                self._url, start, read_end, size=self._size, cancelled=self._cancelled
            )
            self._kept_start, at = start, 0
        data = self._kept[at : at + end - start]
        self._position = start + len(data)
        return data

    def seek(self, offset: int, /) -> int:
        """Continue at an offset."""
        self._position = offset
        return offset

    def seekable(self) -> bool:
        """Return True."""
        return True


def open_ranges(
    storage: Storage, url: str, size: int, buffer_bytes: int = BUFFER_BYTES
) -> io.BufferedReader:
    """Open a remote file as a buffered binary file, of which at least so many bytes are read at a time."""
    return io.BufferedReader(_RawRanges(RangeStream(storage, url, size), size), buffer_bytes)


class _RawRanges(io.RawIOBase):
    def __init__(self, stream: RangeStream, size: int) -> None:
        self._stream, self._size, self._position = stream, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = self._stream.seek(base + offset)
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        data = self._stream.read(len(view := memoryview(buffer)))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)
