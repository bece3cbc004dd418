"""A small count that several processes keep in a file, under a lock of the kernel's, which ends with its holder."""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class CacheUsage(NamedTuple):
    """What is kept in the files of a cache."""

    total: int
    """Bytes of all that are whole."""
    oldest_ns: int = 0
    """None was last used before."""
    surveyed_ns: int = 0
    """When this was last looked up, not reckoned."""


_USAGE = struct.Struct("<8sQQQ")
_SUM = struct.Struct("<I")
_MAGIC = b"shardst1"


@contextmanager
def lock_file(path: str, wait_s: float) -> Iterator[int | None]:
    """Open and lock a file, made if need be; None if another holds the lock all that time."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        is_locked = _try_lock(handle, wait_s)
        try:
            yield handle if is_locked else None
        finally:
            if (
                is_locked
            ):  # a child forked meanwhile holds the same open file: closing it here would not do
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
    data = os.pread(handle, _USAGE.size + _SUM.size, 0)
    head, total = data[: _USAGE.size], data[_USAGE.size :]
    if total != _SUM.pack(zlib.crc32(head)) or not head.startswith(_MAGIC):
        return None
    return CacheUsage(*_USAGE.unpack(head)[1:])


def save_usage(handle: int, usage: CacheUsage) -> None:
    """Write the usage."""
    head = _USAGE.pack(_MAGIC, *usage)
    os.pwrite(handle, head + _SUM.pack(zlib.crc32(head)), 0)
