"""A listing of many files in a few large buffers: about 100 bytes a file instead of 500."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

_NO_VERSION = b"\xff"  # no text in UTF-8


class ListedFile(NamedTuple):
    """A file under the folder that was listed."""

    path: str
    """Relative to that folder."""
    url: str
    size: int
    version: str | None = None
    """Changes with the bytes, if the file system lists a version."""


class _Texts:
    """Texts one after the other in one buffer, in UTF-8, whose order is that of the texts."""

    def __init__(self) -> None:
        self._data: bytearray | bytes = bytearray()
        self._ends = array("q", [0])

    def append(self, text: bytes) -> None:
        self._data += text  # a bytearray until `freeze`
        self._ends.append(len(self._data))

    def get(self, number: int) -> bytes | bytearray:
        return self._data[self._ends[number] : self._ends[number + 1]]

    def freeze(self) -> None:
        """End appending: slices of bytes need one copy instead of two."""
        self._data = bytes(self._data)


class FileList(Sequence[ListedFile]):
    """Files sorted by path; a `ListedFile` is made when it is asked for.

    Args:
        files: The files, in any order.
    """

    def __init__(self, files: Iterable[ListedFile]) -> None:
        self._paths, self._versions = _Texts(), _Texts()
        self._urls: _Texts | None = None  # where a URL is not the prefix and the path
        self._prefix = ""
        self._sizes = array("q")
        is_sorted, before = True, b""
        for number, file in enumerate(files):
            path = _encode(file.path)
            is_sorted = is_sorted and before <= path
            before = path
            if not number:
                self._prefix = file.url.removesuffix(file.path)
            if self._urls is None and file.url != self._prefix + file.path:
                self._urls = self._all_urls(number)
            if self._urls is not None:
                self._urls.append(_encode(file.url))
            self._paths.append(path)
            self._sizes.append(file.size)
            self._versions.append(_NO_VERSION if file.version is None else _encode(file.version))
        for texts in (self._paths, self._versions, self._urls):
            if texts is not None:
                texts.freeze()
        self._rows = np.arange(len(self._sizes), dtype=np.int64)
        if not is_sorted:
            keys = list(map(self._paths.get, range(len(self._sizes))))
            self._rows = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> ListedFile: ...

    @overload
    def __getitem__(self, at: slice) -> FileList: ...

    def __getitem__(self, at: int | slice) -> ListedFile | FileList:
        if isinstance(at, slice):
            return self._view(self._rows[at])
        return self._file(int(self._rows[at]))

    def _file(self, row: int) -> ListedFile:
        path = _decode(self._paths.get(row))
        url = self._prefix + path if self._urls is None else _decode(self._urls.get(row))
        version = self._versions.get(row)
        return ListedFile(
            path, url, self._sizes[row], None if version == _NO_VERSION else _decode(version)
        )

    def __iter__(self) -> Iterator[ListedFile]:
        return map(self._file, self._rows.tolist())

    def path(self, number: int) -> str:
        """Return the path of a file."""
        return _decode(self._paths.get(self._rows[number]))

    def paths(self) -> Iterator[str]:
        """Yield all paths, in order."""
        return (_decode(self._paths.get(row)) for row in self._rows.tolist())

    def take(self, numbers: npt.NDArray[np.int64]) -> FileList:
        """Return some of the files, in this order, without copying them."""
        return self._view(self._rows[numbers])

    def _view(self, rows: npt.NDArray[np.int64]) -> FileList:
        view = FileList(())
        view.__dict__.update(self.__dict__, _rows=rows)
        return view

    def _all_urls(self, count: int) -> _Texts:
        """Return the URLs of the first files."""
        urls = _Texts()
        for number in range(count):
            urls.append(_encode(self._prefix) + bytes(self._paths.get(number)))
        return urls


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "surrogatepass")
