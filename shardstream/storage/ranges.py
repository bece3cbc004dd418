"""A remote file as a stream of length-checked range reads."""

from __future__ import annotations

from shardstream.storage.filesystem import Storage


class RangeStream:
    """Reads a file from its start on, each piece by one range read.

    A file object of fsspec would do as well, but for two things: clients hand out bodies that were cut without a word
    (`Storage.read` checks the length), and a file object reads ahead what a seek then throws away.

    Args:
        storage: Where the file is.
        url: Its URL.
        size: Its length in bytes.
    """

    def __init__(self, storage: Storage, url: str, size: int) -> None:
        self._storage = storage
        self._url = url
        self._size = size
        self._position = 0

    def read(self, size: int, /) -> bytes:
        """Return ``size`` bytes, fewer only at the end.

        Raises:
            StorageError: If the file is shorter than it was said to be, or out of reach.
        """
        start, end = self._position, min(self._position + size, self._size)
        if end <= start:
            return b""
        data = self._storage.read(self._url, start, end)
        self._position = end
        return data

    def seek(self, offset: int, /) -> int:
        """Go on reading at an offset."""
        self._position = offset
        return offset

    def seekable(self) -> bool:
        """Say that `seek` works."""
        return True
