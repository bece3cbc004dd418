"""One writer at a time in a folder of this machine, by a lock that ends with its process."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import weakref
from contextlib import suppress

from shardstream.errors import StorageError
from shardstream.storage.store import Storage

_log = logging.getLogger(__name__)

# Locks of this process: a token of each -> the folder's device and inode, and the open handle.
_held: dict[object, tuple[tuple[int, int], int]] = {}


class FolderLock:
    """Locks a folder against other packs and writers, until it is closed or this process ends; no file is left behind.

    Only folders of this machine: elsewhere it does nothing, nor where the file system has no such locks (some NFS).

    Args:
        storage: Where the folder is.
        url: Its URL; it is created if it is missing.

    Raises:
        StorageError: If another pack or writer holds the lock, or the folder cannot be created.
    """

    def __init__(self, storage: Storage, url: str) -> None:
        path = storage.local_path(url)
        if path is None:
            return
        with storage.translate_errors(url):
            os.makedirs(path, exist_ok=True)
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        status = os.fstat(handle)
        folder = (status.st_dev, status.st_ino)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                os.close(handle)
                raise _locked_error(
                    url, by_us=folder in (one for one, _ in _held.values())
                ) from None
            _log.info("%s: the folder cannot be locked: %s", url, error)
        token = object()
        _held[token] = folder, handle
        self._close = weakref.finalize(self, _release, token)

    def close(self) -> None:
        """Unlock; a second time it does nothing."""
        if hasattr(self, "_close"):
            self._close()


def _locked_error(url: str, *, by_us: bool) -> StorageError:
    if by_us:
        return StorageError(
            "a pack or ShardWriter of this process has this folder open; call the writer's close() or abort(), or write elsewhere",
            shard=url,
        )
    return StorageError(
        "another pack or ShardWriter writes here; wait until it ends, or write elsewhere", shard=url
    )


def _release(token: object) -> None:
    """Unlock for all that have the handle: a lock belongs to the opened file, which forked children share (flock(2))."""
    _, handle = _held.pop(token, (None, None))
    if handle is None:  # of the process that this one was forked from
        return
    with suppress(OSError):  # where there are no such locks
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _close_inherited() -> None:
    """In a forked child: close the handles, without unlocking, so that the locks end with their own process."""
    for _, handle in _held.values():
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited)
