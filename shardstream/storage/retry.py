"""Requests that are tried again where that can help."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from shardstream.errors import MissingError, RefusedError, StorageError
from shardstream.storage.filesystem import Storage

_ATTEMPTS = 5
_Answer = TypeVar("_Answer")
_jitter = random.Random()  # of its own: the user's global generator is left alone


def fetch(storage: Storage, url: str, start: int = 0, end: int | None = None) -> bytes:
    """Read a range, or a whole file, trying again with growing pauses where that can help.

    Raises:
        StorageError: If it still fails after five attempts; at once if the file is missing or access refused.
    """
    return retrying(lambda: storage.read(url, start, end))


def retrying(
    request: Callable[[], _Answer],
    *,
    attempts: int | None = None,
    given_up: threading.Event | None = None,
) -> _Answer:
    """Make a request, again with growing pauses while it fails and trying again can help.

    Args:
        request: Asks once.
        attempts: At most so many; by default five.
        given_up: Ends the pauses, and the attempts, when it is set from another thread.

    Raises:
        StorageError: If it still fails after the last attempt; at once if something is missing or access refused.
    """
    most = attempts or _ATTEMPTS
    for attempt in range(1, most + 1):
        try:
            return request()
        except (MissingError, RefusedError):
            raise
        except StorageError:
            pause_s = min(8.0, 0.2 * 2**attempt) * _jitter.uniform(0.5, 1.0)
            if attempt == most or _pause(pause_s, given_up):
                raise
    raise AssertionError("unreachable")


def _pause(seconds: float, given_up: threading.Event | None) -> bool:
    """Wait; tell whether it was given up meanwhile."""
    if given_up is not None:
        return given_up.wait(seconds)
    time.sleep(seconds)
    return False
