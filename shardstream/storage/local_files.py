"""List, read and memory-map local files, and detect files that are overwritten.

Local files need no client, no retries and no cache. `Storage` repeats a failed call once on the general path, which explains
the error.
"""

from __future__ import annotations

import copy
import itertools
import mmap
import os
import resource
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakSet

from shardstream.errors import ChangedError, StorageError, get_logger
from shardstream.format import Buffer, empty_tar
from shardstream.process import new_lock
from shardstream.storage.error_messages import translate_errors

_log = get_logger(__name__)

MAX_MAPS = 4096
"""Shards that a process keeps mapped to memory: each map holds a file descriptor."""
_PAGE_ENTRIES = 1024
_MAX_VERSIONS = 50_000  # about 15 MB
LocalStatus = tuple[str, int, os.stat_result]
"""Path of a file, its size, and its status."""
PathOf = Callable[[int], str | None]
"""Returns the local path of the shard of a number; None for a remote one."""
_pools: WeakSet[MmapPool] = WeakSet()
_lock = new_lock()


def folder_pages(path: str) -> Iterator[tuple[list[LocalStatus], list[str]]]:
    """Yield the files and the names of the folders in a folder, some at a time, in any order; links are followed.

    Raises:
        OSError: If it is not a folder, or cannot be read.
    """
    with os.scandir(path) as entries:
        while page := list(itertools.islice(entries, _PAGE_ENTRIES)):
            files: list[LocalStatus] = []
            folders: list[str] = []
            for entry in page:
                if entry.is_dir():
                    folders.append(entry.name)
                    continue
                # A link without a target is listed, too: reading it is an error, leaving it out would be fewer samples.
                is_dangling = entry.is_symlink() and not os.path.exists(entry.path)
                if is_dangling or entry.is_file():
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        status = entry.stat(follow_symlinks=not is_dangling)
                        files.append((entry.path, status.st_size, status))
            yield files, folders


def tree_pages(path: str) -> Iterator[list[LocalStatus]]:
    """Yield all files under a folder, some at a time, in any order.

    A link to a folder is a file, as for fsspec: links could form a circle. The status is that of a link, the size that of its target.

    Raises:
        OSError: If it is not a folder, or one of the folders cannot be read.
    """
    folders = [path]
    while folders:
        try:
            entries = os.scandir(folders.pop())
        except FileNotFoundError:  # deleted meanwhile
            continue
        with entries:
            while page := list(itertools.islice(entries, _PAGE_ENTRIES)):
                files: list[LocalStatus] = []
                for entry in page:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                        continue
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if not (stat.S_ISREG(status.st_mode) or entry.is_symlink()):
                            _log.warning("%s: skipped: a FIFO, socket or device", entry.path)
                            continue
                        files.append((entry.path, _size_of(entry, status), status))
                yield files


def _size_of(entry: os.DirEntry[str], status: os.stat_result) -> int:
    if not entry.is_symlink():
        return status.st_size
    try:
        return entry.stat().st_size
    except OSError:  # the link has no target
        return 0


def is_there(path: str) -> bool | None:
    """Return whether there is a file or folder; None if that cannot be told, for example without permission."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return None
    return True


def check_regular(path: str) -> None:
    """Refuse a FIFO, a socket or a device: reading one may wait for ever, or never end.

    Raises:
        StorageError: If it is one.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:  # opening it raises the error
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise StorageError("a FIFO, a socket or a device", remedy="name a regular file", shard=path)


def read_range(path: str, start: int, end: int | None, max_bytes: int | None) -> bytes | None:
    """Return the bytes ``start`` to ``end``, at most ``max_bytes``; None if the file ends before.

    Raises:
        OSError: If the file cannot be read.
    """
    check_regular(path)
    size = max_bytes if end is None else max(0, end - start)
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        parts: list[bytes] = []
        # A raw file may return less than asked for: Linux reads 2 GiB at most at a time.
        while (left := -1 if size is None else size - sum(map(len, parts))) and (
            part := file.read(left)
        ):
            parts.append(part)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    return None if end is not None and len(data) < end - start else data


def map_file(path: str, url: str, expected: int | None = None) -> mmap.mmap:
    """Map a local file to memory, for reading.

    Args:
        path: Its path.
        url: Its URL, for messages.
        expected: Its bytes, by the manifest or a listing; None if they are not compared.

    Raises:
        StorageError: If it cannot be opened.
        ShardError: If it is empty.
        ChangedError: If it has not the bytes that are expected.
    """
    check_regular(path)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        with translate_errors(url):
            raise
    try:
        size = os.fstat(handle).st_size
        if size == 0:
            raise empty_tar(url)
        if expected not in (None, size):
            raise ChangedError(
                f"the file changed: it has {size} bytes, {expected} by the manifest or when the dataset was opened; fetch it again, or run 'shardstream index' again",
                shard=url,
            )
        return mmap.mmap(handle, size, access=mmap.ACCESS_READ)
    finally:
        os.close(handle)


def check_map(tar: Buffer, url: str) -> None:
    """Check that a mapped file is still as long as its map: a copy of pages past its end kills the process (SIGBUS).

    Raises:
        ChangedError: If it was cut.
    """
    if isinstance(tar, mmap.mmap) and (size := tar.size()) < len(tar):
        raise ChangedError(
            f"the file was overwritten after the dataset was opened ({len(tar)} bytes then, {size} now); open the dataset again",
            shard=url,
        )


class MmapPool:
    """The mapped shards of a dataset, by number, kept across epochs.

    Mapping a page again takes as long as copying it: a second epoch over kept maps is 1.5 times as fast. All pools of a
    process together keep at most `MAX_MAPS` maps, or half as many as the process may open files.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Buffer] = OrderedDict()
        with _lock:
            _pools.add(self)

    def __reduce__(self) -> tuple[type[MmapPool], tuple[()]]:
        return MmapPool, ()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, shard: int) -> Buffer | None:
        """Return the map of a shard, if it is kept."""
        with _lock:
            tar = self._kept.get(shard)
            if tar is not None:
                self._kept.move_to_end(shard)
            return tar

    def keep(self, shard: int, tar: Buffer) -> None:
        """Keep a map, and drop the least used one of the largest pool if there are too many; readers still hold theirs."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = MAX_MAPS if files == resource.RLIM_INFINITY else max(1, min(MAX_MAPS, files // 2))
        with _lock:
            if num_maps() >= most:
                max(_pools, key=len)._kept.popitem(last=False)
            self._kept[shard] = tar


def num_maps() -> int:
    """Return how many shards this process keeps mapped to memory."""
    return sum(map(len, _pools))


class FileVersion(NamedTuple):
    """Identifies a file, to detect another one at the same path."""

    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int

    def differs_from(self, before: FileVersion) -> bool:
        """Return whether the bytes may differ from those of the version before.

        A new inode alone proves nothing: some network file systems renumber their files. Nor does a new ctime: changes of
        permissions or links set it, too.
        """
        if (self.size, self.mtime_ns) != (before.size, before.mtime_ns):
            return True
        return self.inode != before.inode and self.ctime_ns != before.ctime_ns


class FileVersions:
    """Versions of the local files of a dataset when it was opened; picklable, so that workers compare with the same ones.

    A store sends the version of a file with each response; a disk does not. A map of a file that is overwritten in place shows
    the new bytes at once, while other shards of the dataset may be old: without a check of each file an epoch would mix both.

    Args:
        paths: Local path of each shard; None for a remote one. Versions of the files of a sequence are recorded now; those of a function of
            the number of a shard when a process first uses a file, as a hundred thousand files take seconds.
    """

    def __init__(self, paths: Sequence[str | None] | PathOf) -> None:
        self._path_of = paths if callable(paths) else paths.__getitem__
        # None for a file that is missing or cannot be reached: opening it raises the error.
        self._known: _VersionsAtFirstUse | list[FileVersion | None] = (
            _VersionsAtFirstUse(paths) if callable(paths) else list(map(stat_version, paths))
        )

    def restrict_to(self, shards: Sequence[int]) -> FileVersions:
        """Return the versions of some shards, in the order given."""
        part = copy.copy(self)
        part._path_of = tuple([self._path_of(shard) for shard in shards]).__getitem__
        part._known = (
            _VersionsAtFirstUse(part._path_of)
            if isinstance(self._known, _VersionsAtFirstUse)
            else [self._known[shard] for shard in shards]
        )
        return part

    def version(self, shard: int) -> FileVersion | None:
        """Return the version of a file, which is recorded now if it was not when the dataset was opened; None for a remote one."""
        return self._known[shard]

    def check(self, shards: Iterable[int]) -> None:
        """Compare shards with their recorded versions; called after their bytes were read.

        Raises:
            ChangedError: If one has changed. A deleted one is accepted: its map or open file stays complete.
        """
        for shard in shards:
            path, before = self._path_of(shard), self._known[shard]
            if path is None or before is None:
                continue
            try:
                found = os.stat(path)
            except OSError:
                continue
            # Called for each shard of each batch: no objects are built for a file that has not changed.
            if (
                found.st_mtime_ns == before[1]
                and found.st_size == before[0]
                and found.st_ctime_ns == before[3]
            ):
                continue
            now = _version_of(found)
            if now.differs_from(before):
                raise ChangedError(_difference(before, now), shard=path)


class _VersionsAtFirstUse(dict[int, FileVersion | None]):
    """Versions of files by number, recorded at the first access; the oldest records are dropped. Pickled without records."""

    def __init__(self, path_of: PathOf) -> None:
        super().__init__()
        self._path_of = path_of

    def __missing__(self, shard: int) -> FileVersion | None:
        path = self._path_of(shard)
        self[shard] = version = stat_version(path)
        if len(self) > _MAX_VERSIONS:
            with suppress(KeyError, RuntimeError):  # another thread was faster
                del self[next(iter(self))]
        return version

    def __reduce__(self) -> tuple[type[_VersionsAtFirstUse], tuple[PathOf]]:
        return _VersionsAtFirstUse, (self._path_of,)


def stat_version(path: str | None) -> FileVersion | None:
    """Return the version of a local file; None if it is missing, cannot be reached, or is remote, without a path."""
    try:
        return None if path is None else _version_of(os.stat(path))
    except OSError:
        return None


def _version_of(found: os.stat_result) -> FileVersion:
    return FileVersion(found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)


def _difference(before: FileVersion, now: FileVersion) -> str:
    """Describe a change; if only the time differs, the bytes may be equal (copied again or touched)."""
    if (now.size, now.inode) == (before.size, before.inode):
        return (
            "the file may have been overwritten after the dataset was opened: "
            f"it was changed at {_format_time(before)} then, at {_format_time(now)} now; "
            "open the dataset again, and if the bytes are the same, start the epoch again or load the state"
        )
    return (
        "the file was overwritten after the dataset was opened "
        f"({_format_version(before)} then, {_format_version(now)} now); open the dataset again"
    )


def _format_version(version: FileVersion) -> str:
    return f"{version.size} bytes, changed at {_format_time(version)}, inode {version.inode}"


def _format_time(version: FileVersion) -> str:
    seconds, rest = divmod(version.mtime_ns, 10**9)
    return f"{seconds}.{rest:09d}"
