"""Reads that are tried again where that can help."""

from __future__ import annotations

import random
import time

from shardstream.errors import MissingError, RefusedError, StorageError
from shardstream.storage.filesystem import Storage

_ATTEMPTS = 5
_jitter = random.Random()  # of its own: the user's global generator is left alone


def fetch(storage: Storage, url: str, start: int = 0, end: int | None = None) -> bytes:
    """Read a range, or a whole file, trying again with growing pauses where that can help.

    Raises:
        StorageError: If it still fails after five attempts; at once if the file is missing or access refused.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return storage.read(url, start, end)
        except (MissingError, RefusedError):
            raise
        except StorageError:
            if attempt == _ATTEMPTS:
                raise
            time.sleep(min(8.0, 0.2 * 2**attempt) * _jitter.uniform(0.5, 1.0))
    raise AssertionError("unreachable")
