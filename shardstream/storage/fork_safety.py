"""Protect a forked child from the clients of its parent, which it can neither use nor free.

Parent and child share the epoll instance of the parent's event loop. If the child frees a connection, its socket is removed from that
epoll, and the parent waits forever for a response. fsspec drops its instances in a child, which frees them. So they are referenced
before the fork, and the child keeps the references.

obstore reads with threads of its own, one set per process. A child does not have them, but obstore assumes that it does: a read would
wait forever. So a child of a process that had started them must not use obstore. Importing it alone starts none.

A lock that another thread of the parent holds at the fork is never released in the child.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from fsspec.asyn import AsyncFileSystem

_held: list[Any] = []
_inherited: list[Any] = []
_OBSTORE_THREAD_NAME = "tokio-rt-worker"
_threads = {"started": False, "dead": False}


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


def note_obstore_started() -> None:
    """Record that obstore has started its threads in this process."""
    _threads["started"] = True


def has_obstore_threads() -> bool:
    """Return whether obstore is known to have threads in this process."""
    return _threads["started"]


def has_lost_obstore_threads() -> bool:
    """Return whether this process was forked from one in which obstore had started its threads."""
    return _threads["dead"]


def _before_fork() -> None:
    kinds: list[Any] = [AsyncFileSystem]
    for kind in kinds:  # the loop appends to it
        kinds += kind.__subclasses__()
        _held.extend(getattr(kind, "_cache", {}).values())
    if not _threads["started"] and "obstore" in sys.modules:
        _threads["started"] = _finds_obstore_threads()  # other code may use it


def _finds_obstore_threads() -> bool:
    """Look for obstore's threads in /proc, which only Linux has."""
    try:
        names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    except OSError:  # a thread has just ended, or there is no /proc
        return False
    return _OBSTORE_THREAD_NAME in names


def _in_child() -> None:
    keep_inherited(*_held)
    _threads.update(dead=_threads["dead"] or _threads["started"], started=False)


os.register_at_fork(before=_before_fork, after_in_parent=_held.clear, after_in_child=_in_child)
