"""Append to a file without a name in the temporary folder, and read it by ranges."""

from __future__ import annotations

import os
import tempfile
import weakref

from shardstream.errors import StorageError


class TemporaryFile:
    """A file that only this object can read; it vanishes with the object, or with a killed process.

    Several threads may read it, and forked children.

    Args:
        content: What it holds, in the plural, for messages.

    Raises:
        StorageError: If the temporary folder is full or missing.
    """

    def __init__(self, content: str) -> None:
        self._content = content
        try:
            with tempfile.TemporaryFile(buffering=0) as file:
                self._file = os.dup(file.fileno())
        except OSError as error:
            raise self._is_full(error) from error
        self.close = weakref.finalize(self, os.close, self._file)
        """Give the space back; the file cannot be read any more."""
        self.size = 0
        """Length in bytes."""

    def append(self, data: bytes | bytearray) -> None:
        """Write bytes at the end.

        Raises:
            StorageError: If the temporary folder is full.
        """
        view = memoryview(data)
        try:
            while view:
                written = os.write(self._file, view)
                view = view[written:]
                self.size += written
        except OSError as error:
            raise self._is_full(error) from error

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes ``start`` to ``end``.

        Raises:
            StorageError: If the file was cut or cannot be read.
        """
        parts = []
        while start < end:  # Linux reads 2 GiB at most at a time
            try:
                part = os.pread(self._file, end - start, start)
            except OSError as error:
                raise self._error(f"{self._content} cannot be read: {error.strerror}") from error
            if not part:
                raise self._error("a temporary file was cut while it was used")
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _is_full(self, error: OSError) -> StorageError:
        return self._error(
            f"{self._content} do not fit in the temporary folder: {error.strerror or error}"
        )

    @staticmethod
    def _error(message: str) -> StorageError:
        # `gettempdir` fails if there is no folder at all; `tempdir` is what it has found.
        return StorageError(
            message,
            remedy="set TMPDIR to a folder with more space",
            shard=tempfile.tempdir,
        )
