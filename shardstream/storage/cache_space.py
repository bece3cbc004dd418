"""The room that a cache may take on a disk: what is kept, what has to go, for several processes that know nothing of each other.

FOLDER/shardstream-cache-1/     of this user alone
    total                       bytes kept, counted under a lock of the kernel's, which ends with its holder
    evicting                    locked by the one process that makes room
    parts/                      files while they are written
    00/ ... ff/                 files that are whole
"""

from __future__ import annotations

import os
import stat
import time
import uuid
import warnings
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from shardstream.errors import CacheWarning, OptionError
from shardstream.storage.cache_usage import CacheUsage, load_usage, lock_file, save_usage

_FOLDER = "shardstream-cache-1"
_BLOCK_BYTES = 4096  # what a file takes of a disk is a multiple
_KEEP_FREE = 0.1  # of a disk, where the user gave no limit
_SLACK = 0.05  # of the cache is freed at once, so that looking for what has to go is rare
_LOCK_WAIT_S = 0.1
_PAUSE_S = 60.0
_PART_AGE_S = 60.0  # writing one takes milliseconds
_SURVEY_NS = 600 * 10**9
_AHEAD_NS = 60 * 10**9


class CacheSpace:
    """Files on a local disk up to a number of bytes, over all processes; picklable.

    When it is full, files go that were not used since this object was made, the least recently used first; what has been
    used since is kept, and nothing new comes in. Epochs read everything once: to drop what comes again for what comes again
    later would make room for nothing.

    Args:
        folder: Where.
        max_bytes: How much; None leaves a tenth of the disk free.

    Raises:
        OptionError: If the folder is a file, or what is in it is a link, belongs to somebody else, or can be written by others.
    """

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
            raise OptionError(f"cache_dir is no folder: {folder}") from error
        except OSError as error:
            self._pause_writing(error.strerror or str(error))
            return
        _check_owner(self.root)

    def make_room(self, nbytes: int) -> int:
        """Return how much may still come, in bytes on disk, after making room for ``nbytes`` if that can help."""
        if time.monotonic() < self._paused_until:
            return 0
        try:
            state = self._read_usage() or CacheUsage(0)
            room = self._free_bytes(state.total)
            all_in_use = state.oldest_ns >= self.started_ns
            if room >= nbytes or (all_in_use and time.time_ns() - state.surveyed_ns < _SURVEY_NS):
                return room
            self._evict(nbytes)
            total = (self._read_usage() or state).total
            room = self._free_bytes(total)
        except FileNotFoundError:  # deleted meanwhile: it is made again
            return nbytes
        except OSError as error:
            self._pause_writing(error.strerror or str(error))
            return 0
        if room <= 0 and not total and self._max_bytes is None:
            self._pause_writing(
                "less than a tenth of its disk is free, and cache_bytes says nothing else"
            )
        return room

    def publish(self, path: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a file that is there whole or not at all; if it cannot be kept, warn once and keep no more for a minute."""
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
        """Delete a file that is damaged, and was counted with so many bytes; one that is not there is fine."""
        with suppress(OSError), lock_file(self._path("total"), _LOCK_WAIT_S) as handle:
            os.unlink(path)
            state = None if handle is None else load_usage(handle)
            if handle is not None and state is not None:
                save_usage(handle, state._replace(total=max(0, state.total - on_disk(nbytes))))

    def path_of(self, name: str) -> str:
        """Return where a file of that name, hex digits, is kept."""
        return os.path.join(self.root, name[:2], name[2:])

    def touch(self, handle: int) -> None:
        """Note that a file is in use, once a run."""
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
                f"nothing more is kept in the cache {self.root}: {why}; reading goes on without. "
                "Free some space, or choose another cache_dir or other cache_bytes",
                CacheWarning,
                stacklevel=3,
            )

    def _read_usage(self) -> CacheUsage | None:
        """Read the state without a lock: good enough to decide what is worth trying."""
        try:
            handle = os.open(self._path("total"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            return load_usage(handle)
        finally:
            os.close(handle)

    def _free_bytes(self, total: int) -> int:
        """Return how many bytes may still come."""
        if self._max_bytes is not None:
            return self._max_bytes - total
        disk = os.statvfs(self.root)
        return int((disk.f_bavail - _KEEP_FREE * disk.f_blocks) * disk.f_frsize)

    def _commit(self, part: str, path: str, nbytes: int) -> None:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with lock_file(self._path("total"), _LOCK_WAIT_S) as handle:
            if handle is None or os.path.lexists(path):  # or another process was first
                return
            state = load_usage(handle) or self._count_usage()
            if self._free_bytes(state.total) >= on_disk(nbytes):
                # Counted before it is there: a process that dies in between leaves a bit too little room, not too much.
                save_usage(handle, state._replace(total=state.total + on_disk(nbytes)))
                os.replace(part, path)

    def _files(self) -> Iterator[tuple[str, int, int]]:
        """Yield path, bytes on disk and time of last use of each file."""
        limit_ns = time.time_ns() + _AHEAD_NS
        with os.scandir(self.root) as folders:
            # No link is followed: what it leads to is not ours to delete.
            names = [
                each.path
                for each in folders
                if len(each.name) == 2 and each.is_dir(follow_symlinks=False)
            ]
        for name in names:
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(name) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        # A clock that was set back must not make files immortal.
                        used_ns = found.st_mtime_ns if found.st_mtime_ns < limit_ns else 0
                        yield entry.path, on_disk(found.st_size), used_ns

    def _count_usage(self) -> CacheUsage:
        return CacheUsage(sum(nbytes for _, nbytes, _ in self._files()))

    def _evict(self, nbytes: int) -> None:
        """Delete what was not used since this object was made, until there is room; one process at a time."""
        with lock_file(self._path("evicting"), 0) as alone:
            if alone is None:
                return
            with lock_file(self._path("total"), _LOCK_WAIT_S) as handle:
                before = None if handle is None else (load_usage(handle) or self._count_usage())
            if before is None or self._free_bytes(before.total) >= nbytes:
                return
            now_ns = time.time_ns()
            total, used, cutoff_ns = self._survey(nbytes)
            freed = self._delete_used_until(cutoff_ns) if cutoff_ns >= 0 else 0
            left = used[used > cutoff_ns]
            with lock_file(self._path("total"), _LOCK_WAIT_S) as handle:
                state = None if handle is None else load_usage(handle)
                if handle is None or state is None:
                    return
                # What came since `before` may be in the survey or not: counted twice is on the safe side.
                total += max(0, state.total - before.total) - freed
                oldest_ns = int(left.min()) if left.size else now_ns
                save_usage(handle, CacheUsage(max(0, total), oldest_ns, now_ns))

    def _survey(self, nbytes: int) -> tuple[int, np.ndarray[tuple[int], np.dtype[np.int64]], int]:
        """Return the bytes kept, when each file was used, and until when those were used that have to go (-1: none)."""
        columns = array("q"), array("q")
        for _, size, used_ns in self._files():
            columns[0].append(size)
            columns[1].append(used_ns)
        sizes, used = (np.frombuffer(column, dtype=np.int64) for column in columns)
        total = int(sizes.sum())
        room = self._free_bytes(total)
        order = np.argsort(used)
        wanted = nbytes - room + int(_SLACK * (total + room))
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
        """Delete, once a process, what killed processes were writing."""
        if self._has_swept:
            return
        self._has_swept = True
        with os.scandir(self._path("parts")) as entries:
            for entry in entries:
                with suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _PART_AGE_S:
                        os.unlink(entry.path)


def _check_owner(root: str) -> None:
    """Refuse a folder whose files somebody else may have put there: they would be handed out as samples.

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
            f"{root} can be written by others (mode {stat.S_IMODE(found.st_mode):o}, the limit is 755): delete it, "
            "as what is in it may be theirs, or choose another cache_dir"
        )


def on_disk(nbytes: int) -> int:
    """Return what a file takes of a disk, in bytes."""
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _write(path: str, pieces: Sequence[bytes | memoryview]) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[os.write(handle, left) :]
        os.utime(handle, ns=(now := time.time_ns(), now))  # the kernel's own clock is a bit behind
    finally:
        os.close(handle)
