"""Protect a forked child from the clients of its parent, which it can neither use nor free.

Parent and child share the epoll instance of the parent's event loop. If the child frees a connection, its socket is removed from that
epoll, and the parent waits forever for a response. fsspec drops its instances in a child, which frees them. So they are referenced
before the fork, and the child keeps the references.

A lock that another thread of the parent holds at the fork is never released in the child.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from fsspec.asyn import AsyncFileSystem

_held: list[Any] = []
_inherited: list[Any] = []


def new_lock() -> threading.Lock:
    """Return a fork-safe lock: it is held during each fork, so it is free in the child. It lives as long as the process."""
    lock = threading.Lock()
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock


def keep_inherited(*things: object) -> None:
    """Keep references to the clients of the parent for the life of a forked child."""
    _inherited.extend(things)


def _before_fork() -> None:
    kinds: list[Any] = [AsyncFileSystem]
    for kind in kinds:  # the loop appends to it
        kinds += kind.__subclasses__()
        _held.extend(getattr(kind, "_cache", {}).values())


def _in_child() -> None:
    keep_inherited(*_held)


os.register_at_fork(before=_before_fork, after_in_parent=_held.clear, after_in_child=_in_child)
