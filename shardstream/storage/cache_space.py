"""Limit and evict the files of a cache on a disk, shared by processes without a coordinator.

FOLDER/shardstream-cache-1/     accessible to this user only
    total                       bytes in the cache, counted under a file lock of the kernel, which ends with the process that holds it
    evicting                    locked by the one process that evicts files
    parts/                      files while they are written
    00/ ... ff/                 complete files
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import time
import uuid
import warnings
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from shardstream.errors import CacheWarning, OptionError

_MAGIC = b"shardst1"
_SUM = struct.Struct("<I")
_USAGE = struct.Struct("<8sQQQ")
_FOLDER = "shardstream-cache-1"
_BLOCK_BYTES = 4096  # a file occupies a multiple of this
_KEEP_FREE = 0.1  # of a disk, if the user sets no limit
_SLACK = 0.05  # of the cache is freed at once, so that surveys are rare
_LOCK_WAIT_S = 0.1
_PAUSE_S = 60.0
_PART_AGE_S = 60.0  # writing one takes milliseconds
_AHEAD_NS = 60 * 10**9


class CacheUsage(NamedTuple):
    """The bytes in a cache, counted in a file."""

    total: int
    """Bytes of all complete files."""
    oldest_ns: int = 0
    """No file was last used before this time."""
    surveyed_ns: int = 0
    """Time of the last count of all files."""


class CacheSpace:
    """Files on a local disk up to a number of bytes, over all processes; picklable.

    When it is full, files that were not used since this object was made are evicted, the least recently used first. Files that were
    used since then are kept, and no new ones are admitted: an epoch reads everything once, so evicting a file that is needed in the
    next epoch for another one that is needed in the next epoch gains nothing.

    Args:
        folder: The folder to keep the files in.
        max_bytes: Limit of their bytes on disk; None leaves a tenth of the disk free.

    Raises:
        OptionError: If the folder is a file, or the cache in it is a link, belongs to another user, or can be written by others.
    """

    survey_ns = 600 * 10**9
    """Time after which the files of a full cache are counted again, to find those that this run does not use."""

    def __init__(self, folder: str, max_bytes: int | None) -> None:
        self.root = os.path.join(folder, _FOLDER)
        self.started_ns = time.time_ns()
        self._max_bytes = max_bytes
        self._paused_until = 0.0
        self._warned = False
        self._has_swept = False
        try:
            self._make_folders()
        except (FileExistsError, NotADirectoryError) as error:
            raise OptionError(f"cache_dir is not a folder: {folder}") from error
        except OSError as error:
            self._pause_writing(error.strerror or str(error))
            return
        _check_owner(self.root)

    def make_room(self, nbytes: int) -> int:
        """Evict files if ``nbytes`` do not fit; return how many bytes on disk are free."""
        if time.monotonic() < self._paused_until:
            return 0
        try:
            state = self._read_usage() or CacheUsage(0)
            free_bytes = self._free_bytes(state.total)
            all_in_use = state.oldest_ns >= self.started_ns
            if free_bytes >= nbytes or (
                all_in_use and time.time_ns() - state.surveyed_ns < self.survey_ns
            ):
                return free_bytes
            self._evict(nbytes)
            total = (self._read_usage() or state).total
            free_bytes = self._free_bytes(total)
        except FileNotFoundError:  # the folder was deleted: `publish` creates it again
            return nbytes
        except OSError as error:
            self._pause_writing(error.strerror or str(error))
            return 0
        if free_bytes <= 0 and not total and self._max_bytes is None:
            self._pause_writing("less than a tenth of its disk is free, and cache_bytes is not set")
        return free_bytes

    def publish(self, path: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Publish a file atomically; if that fails, warn once and write no file for a minute."""
        if time.monotonic() < self._paused_until:
            return
        part = os.path.join(self.root, "parts", uuid.uuid4().hex)
        try:
            try:
                _write(part, pieces)
            except FileNotFoundError:  # the folder was deleted meanwhile
                self._make_folders()
                _write(part, pieces)
            self._commit(part, path, sum(len(piece) for piece in pieces))
            self._delete_stale_parts()
        except FileNotFoundError:
            return
        except OSError as error:
            self._pause_writing(error.strerror or str(error))
        finally:
            with suppress(OSError):
                os.unlink(part)

    def discard(self, path: str, nbytes: int) -> None:
        """Delete a damaged file that was counted with ``nbytes``, if it exists."""
        with suppress(OSError), lock_file(self._path("total"), _LOCK_WAIT_S) as handle:
            os.unlink(path)
            state = None if handle is None else load_usage(handle)
            if handle is not None and state is not None:
                save_usage(handle, state._replace(total=max(0, state.total - on_disk(nbytes))))

    def path_of(self, name: str) -> str:
        """Return the path of the file of that name, which is hex digits."""
        return os.path.join(self.root, name[:2], name[2:])

    def touch(self, handle: int) -> None:
        """Mark a file as used by this run."""
        if os.fstat(handle).st_mtime_ns < self.started_ns:
            with suppress(OSError):
                os.utime(handle, ns=(now := time.time_ns(), now))

    def _path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def _make_folders(self) -> None:
        os.makedirs(os.path.dirname(self.root), mode=0o700, exist_ok=True)
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        os.makedirs(self._path("parts"), mode=0o700, exist_ok=True)

    def _pause_writing(self, why: str) -> None:
        self._paused_until = time.monotonic() + _PAUSE_S
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"cannot write to the cache {self.root}: {why}; reads continue without it. "
                "Free some space, or change cache_dir or cache_bytes",
                CacheWarning,
                stacklevel=3,
            )

    def _read_usage(self) -> CacheUsage | None:
        """Read the usage without a lock, as an estimate."""
        try:
            handle = os.open(self._path("total"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            return load_usage(handle)
        finally:
            os.close(handle)

    def _free_bytes(self, total: int) -> int:
        """Return how many bytes may be written."""
        if self._max_bytes is not None:
            return self._max_bytes - total
        disk = os.statvfs(self.root)
        return int((disk.f_bavail - _KEEP_FREE * disk.f_blocks) * disk.f_frsize)

    def _commit(self, part: str, path: str, nbytes: int) -> None:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with lock_file(self._path("total"), _LOCK_WAIT_S) as handle:
            if handle is None or os.path.lexists(path):  # or another process published it
                return
            state = load_usage(handle) or self._count_usage()
            if self._free_bytes(state.total) >= on_disk(nbytes):
                # Counted before the rename: if the process dies in between, the total is too high, never too low.
                save_usage(handle, state._replace(total=state.total + on_disk(nbytes)))
                os.replace(part, path)

    def _files(self) -> Iterator[tuple[str, int, int]]:
        """Yield path, bytes on disk and time of last use of each file."""
        limit_ns = time.time_ns() + _AHEAD_NS
        with os.scandir(self.root) as folders:
            # No link is followed: its target does not belong to the cache.
            names = [
                folder.path
                for folder in folders
                if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False)
            ]
        for name in names:
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(name) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        # A file from the future, by a clock that was set back, must not stay forever.
                        used_ns = found.st_mtime_ns if found.st_mtime_ns < limit_ns else 0
                        yield entry.path, on_disk(found.st_size), used_ns

    def _count_usage(self) -> CacheUsage:
        return CacheUsage(sum(nbytes for _, nbytes, _ in self._files()))

    def _evict(self, nbytes: int) -> None:
        """Delete files that were not used since this object was made, until there is room; one process at a time."""
        with lock_file(self._path("evicting"), 0) as eviction_lock:
            if eviction_lock is None:
                return
            with lock_file(self._path("total"), _LOCK_WAIT_S) as handle:
                before = None if handle is None else (load_usage(handle) or self._count_usage())
            if before is None or self._free_bytes(before.total) >= nbytes:
                return
            now_ns = time.time_ns()
            total, used, cutoff_ns = self._survey(nbytes)
            freed = self._delete_used_until(cutoff_ns) if cutoff_ns >= 0 else 0
            remaining_ns = used[used > cutoff_ns]
            with lock_file(self._path("total"), _LOCK_WAIT_S) as handle:
                state = None if handle is None else load_usage(handle)
                if handle is None or state is None:
                    return
                # Files added since `before` may be in the survey or not: counting them twice is safe.
                total += max(0, state.total - before.total) - freed
                oldest_ns = int(remaining_ns.min()) if remaining_ns.size else now_ns
                save_usage(handle, CacheUsage(max(0, total), oldest_ns, now_ns))

    def _survey(self, nbytes: int) -> tuple[int, np.ndarray[tuple[int], np.dtype[np.int64]], int]:
        """Return the total bytes, the time of last use of each file, and the newest such time to evict (-1: none)."""
        columns = array("q"), array("q")
        for _, size, used_ns in self._files():
            columns[0].append(size)
            columns[1].append(used_ns)
        sizes, used = (np.frombuffer(column, dtype=np.int64) for column in columns)
        total = int(sizes.sum())
        free_bytes = self._free_bytes(total)
        order = np.argsort(used)
        wanted = nbytes - free_bytes + int(_SLACK * (total + free_bytes))
        count = int(np.searchsorted(np.cumsum(sizes[order]), wanted)) + 1
        count = min(count, int((used < self.started_ns).sum()))
        return total, used, int(used[order[count - 1]]) if count else -1

    def _delete_used_until(self, cutoff_ns: int) -> int:
        freed = 0
        for path, nbytes, used_ns in self._files():
            if used_ns <= cutoff_ns:
                with suppress(OSError):
                    os.unlink(path)
                    freed += nbytes
        return freed

    def _delete_stale_parts(self) -> None:
        """Delete the unfinished files of killed processes, once per process."""
        if self._has_swept:
            return
        self._has_swept = True
        with os.scandir(self._path("parts")) as entries:
            for entry in entries:
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _PART_AGE_S:
                        os.unlink(entry.path)


def _check_owner(root: str) -> None:
    """Refuse a folder whose files another user may have written: they would be returned as samples.

    Raises:
        OptionError: If it is a link, belongs to another user, or can be written by others.
    """
    found = os.lstat(root)
    if stat.S_ISLNK(found.st_mode):
        raise OptionError(f"{root} is a link; delete it, or choose another cache_dir")
    if found.st_uid != os.geteuid():
        raise OptionError(f"{root} belongs to another user; choose another cache_dir")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OptionError(
            f"{root} can be written by others (mode {stat.S_IMODE(found.st_mode):o}, the limit is 755); delete it, "
            "because they may have written its files, or choose another cache_dir"
        )


def on_disk(nbytes: int) -> int:
    """Return the bytes that a file occupies on the disk."""
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _write(path: str, pieces: Sequence[bytes | memoryview]) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for piece in pieces:
            unwritten = memoryview(piece)
            while unwritten:
                unwritten = unwritten[os.write(handle, unwritten) :]
        # The clock of the kernel is slightly late.
        os.utime(handle, ns=(now := time.time_ns(), now))
    finally:
        os.close(handle)


@contextmanager
def lock_file(path: str, wait_s: float) -> Iterator[int | None]:
    """Open and lock a file, which is created if missing; None if another process holds the lock for ``wait_s``."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        is_locked = _try_lock(handle, wait_s)
        try:
            yield handle if is_locked else None
        finally:
            # Closing alone does not unlock: a child that was forked meanwhile holds the same open file.
            if is_locked:
                fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def _try_lock(handle: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        else:
            return True


def load_usage(handle: int) -> CacheUsage | None:
    """Read the usage; None if there is none, or it is damaged."""
    values = open_record(_USAGE, os.pread(handle, record_bytes(_USAGE), 0))
    return None if values is None else CacheUsage(*values)


def save_usage(handle: int, usage: CacheUsage) -> None:
    """Write the usage."""
    os.pwrite(handle, seal_record(_USAGE, *usage), 0)


def seal_record(head: struct.Struct, *values: object) -> bytes:
    """Return a record of the cache: the magic, the values, and the CRC-32 of both."""
    data = head.pack(_MAGIC, *values)
    return data + _SUM.pack(zlib.crc32(data))


def open_record(head: struct.Struct, data: bytes) -> tuple[Any, ...] | None:
    """Return the values of a record; None if it is damaged, or not a record of this cache."""
    found, total = data[: head.size], data[head.size :]
    if total != _SUM.pack(zlib.crc32(found)):
        return None
    magic, *values = head.unpack(found)
    return tuple(values) if magic == _MAGIC else None


def record_bytes(head: struct.Struct) -> int:
    """Return the length of a record."""
    return head.size + _SUM.size
