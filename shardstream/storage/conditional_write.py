"""Replace a small file if it is still the one that was read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from shardstream.errors import ChangedError, NotFoundError
from shardstream.storage.publish import publish_bytes_over
from shardstream.storage.store import Storage

_TRIES = 20


def update_file(
    storage: Storage, url: str, change: Callable[[bytes | None], bytes | None]
) -> bytes | None:
    """Replace a file by what ``change`` returns for its bytes; again if another writer was faster.

    Raises:
        ChangedError: If other writers were faster too often.
        StorageError: If it cannot be read or written.
    """
    for _ in range(_TRIES):
        old = None
        with suppress(NotFoundError):
            old = storage.uncached().read(url)
        new = change(old)
        if new is None:
            return old
        with suppress(ChangedError):
            publish_bytes_over(storage, url, new, old=old)
            return new
    raise ChangedError("other writers have replaced the file too often meanwhile", shard=url)
