"""A listing of any number of files, sorted by path, in a temporary file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, overload

from shardstream.errors import StorageError
from shardstream.storage.row_file import RowFile, sort_rows

LISTED_TWICE = (
    "the store lists this file twice, so its samples would be read twice; list it again, and report it to the "
    "operator of the store if it stays so"
)
FileRow: TypeAlias = Sequence[Any]
"""Path, size, URL ("": the prefix and the path) and, if there is one, version: None cannot be compared with text."""


class ListedFile(NamedTuple):
    """A file under the folder that was listed."""

    path: str
    """Relative to that folder."""
    url: str
    size: int
    version: str | None = None
    """Changes with the bytes, if the file system lists a version."""


class FileRows:
    """Converts files to rows of a `RowFile`, which share the beginning of their URLs, and back."""

    def __init__(self) -> None:
        self._prefix: str | None = None

    def row(self, file: ListedFile) -> FileRow:
        """Return the row of a file; rows with different paths are in the order of their paths."""
        path, url, size, version = file
        if self._prefix is None:
            self._prefix = url.removesuffix(path)
        row = (path, size, "" if url == self._prefix + path else url)
        return row if version is None else (*row, version)

    def file(self, row: FileRow) -> ListedFile:
        """Return the file of a row that this object has made."""
        path, size, url, *version = row
        return ListedFile(
            path, url or f"{self._prefix}{path}", size, version[0] if version else None
        )


class FileList(Sequence[ListedFile]):
    """Files sorted by path, that is by its bytes in UTF-8; a `ListedFile` is made when it is asked for.

    Args:
        files: The files; they are read once.
        is_sorted: Whether they are sorted already.

    Raises:
        StorageError: If a file is listed twice, or the temporary folder is full.
    """

    def __init__(self, files: Iterable[ListedFile], *, is_sorted: bool = False) -> None:
        convert = FileRows()
        self._file = convert.file
        rows = map(convert.row, files)
        self._rows = RowFile(self._each_once(rows if is_sorted else sort_rows(rows)))

    def _each_once(self, rows: Iterable[FileRow]) -> Iterator[FileRow]:
        before = None
        for row in rows:
            if row[0] == before:
                raise StorageError(LISTED_TWICE, shard=self._file(row).url)
            before = row[0]
            yield row

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> ListedFile: ...

    @overload
    def __getitem__(self, at: slice) -> list[ListedFile]: ...

    def __getitem__(self, at: int | slice) -> ListedFile | list[ListedFile]:
        if isinstance(at, slice):
            return [*map(self._file, self._rows[at])]
        return self._file(self._rows[at])

    def __iter__(self) -> Iterator[ListedFile]:
        return self.iter_from(0)

    def iter_from(self, first: int) -> Iterator[ListedFile]:
        """Yield the files from a number on."""
        return map(self._file, self._rows.iter_from(first))

    def paths(self, first: int = 0) -> Iterator[str]:
        """Yield the paths from a number on, in order."""
        return map(itemgetter(0), self._rows.iter_from(first))
