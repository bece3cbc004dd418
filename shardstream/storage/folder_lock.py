"""One writer at a time in a folder of this machine, by a lock that ends with its process."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import weakref

from shardstream.errors import StorageError
from shardstream.storage.filesystem import Storage

_log = logging.getLogger(__name__)


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
        with storage.explained(url):
            os.makedirs(path, exist_ok=True)
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                self._close()
                raise StorageError(
                    "another pack or ShardWriter writes here; wait until it ends, or write elsewhere",
                    shard=url,
                ) from None
            _log.info("%s: the folder cannot be locked: %s", url, error)

    def close(self) -> None:
        """Unlock; a second time it does nothing."""
        if hasattr(self, "_close"):
            self._close()
