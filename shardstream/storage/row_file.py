"""Sort rows, and keep many rows in order, in a bounded amount of memory and a temporary file."""

from __future__ import annotations

import heapq
import json
import os
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar, overload

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


R = TypeVar("R", bound=Any)

KEPT_BYTES = 4 << 20
"""A `RowFile` up to this size stays in memory."""
RUN_ROWS = 1 << 15
"""Rows that are sorted in memory, before they go to a file."""
_CONTENT = "the names and the order of the files"
_RUNS = 64  # merged together
_BLOCK_ROWS = 16  # read together for one row; memory holds 8 bytes for each block
_READ_BLOCKS = 16
_WRITE_BYTES = 1 << 18
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode


class RowFile(Sequence[R], Generic[R]):
    """Rows in the order given: in memory while they are few, else in a temporary file.

    It holds half a byte of memory for each row. Several threads may read it, and forked children; it cannot be pickled.

    Args:
        rows: Numbers, or sequences of text, numbers and sequences; a tuple comes back as a list.
        kept_bytes: Largest size that stays in memory.

    Raises:
        StorageError: If the temporary folder is full.
    """

    def __init__(self, rows: Iterable[R], *, kept_bytes: int | None = None) -> None:
        limit = KEPT_BYTES if kept_bytes is None else kept_bytes
        self._file: TemporaryFile | None = None
        self._data = b""
        self._starts = array("q", [0])
        self._count = 0
        iterator = iter(rows)
        buffer, before = bytearray(), 0
        while block := list(islice(iterator, _BLOCK_ROWS)):
            # Raw text, because escapes of two lone surrogates would be read as one character.
            buffer += _encode(block).encode("utf-8", "surrogatepass")
            self._count += len(block)
            self._starts.append(before + len(buffer))
            if len(buffer) > (limit if self._file is None else _WRITE_BYTES):
                if self._file is None:
                    self._file = TemporaryFile(_CONTENT)
                self._file.append(buffer)
                before += len(buffer)
                buffer = bytearray()
        if self._file is not None:
            self._file.append(buffer)
        else:
            self._data = bytes(buffer)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> R: ...

    @overload
    def __getitem__(self, at: slice) -> list[R]: ...

    def __getitem__(self, at: int | slice) -> R | list[R]:
        if isinstance(at, slice):
            return [self[number] for number in range(self._count)[at]]
        block, place = divmod(range(self._count)[at], _BLOCK_ROWS)
        return self._load(self._read(block, block + 1))[place]

    def __iter__(self) -> Iterator[R]:
        return self.iter_from(0)

    def iter_from(self, first: int) -> Iterator[R]:
        """Yield the rows from a number on."""
        begin, skipped = divmod(first, _BLOCK_ROWS)
        blocks = len(self._starts) - 1
        for block in range(begin, blocks, _READ_BLOCKS):
            last = min(block + _READ_BLOCKS, blocks)
            data, start = memoryview(self._read(block, last)), self._starts[block]
            for at in range(block, last):
                rows = self._load(data[self._starts[at] - start : self._starts[at + 1] - start])
                yield from rows[skipped:] if skipped else rows
                skipped = 0

    def _read(self, block: int, last: int) -> bytes:
        start, end = self._starts[block], self._starts[last]
        return self._data[start:end] if self._file is None else self._file.read(start, end)

    @staticmethod
    def _load(data: bytes | memoryview) -> list[R]:
        rows: list[R] = json.loads(str(data, "utf-8", "surrogatepass"))
        return rows


def sort_rows(rows: Iterable[R], *, run_rows: int | None = None) -> Iterator[R]:
    """Return an iterator over rows in ascending order; more than fit in memory are sorted in temporary files.

    Memory holds the rows of a run, and of each run that is merged the rows that are read together.

    Args:
        rows: As for `RowFile`; no two that are compared may have values of different types in one place.
        run_rows: Rows that are sorted in memory.

    Raises:
        StorageError: If the temporary folder is full.
    """
    iterator = iter(rows)
    limit = RUN_ROWS if run_rows is None else run_rows
    # The runs of a level have been merged as often as its number.
    levels: list[list[RowFile[R]]] = [[]]
    while run := sorted(islice(iterator, limit)):
        if not levels[0] and len(levels) == 1 and len(run) < limit:
            return iter(run)
        levels[0].append(RowFile(run, kept_bytes=0))
        for number, level in enumerate(levels):
            if len(level) == _RUNS:
                if number + 1 == len(levels):
                    levels.append([])
                levels[number + 1].append(RowFile(heapq.merge(*level), kept_bytes=0))
                level.clear()
    del run
    return heapq.merge(*(one for level in reversed(levels) for one in level))
