"""What a forked child has of its parent's clients: nothing that works, and nothing that it may let go.

Parent and child share the epoll that the parent's event loop waits on. When the child frees a connection, its socket is
taken out of that epoll, and the parent waits for an answer for ever. fsspec forgets its instances in a child, which frees
them; here they are held before the fork and never let go in the child.

obstore reads with threads of its own, one set for each process, which are not there in the child, while obstore takes them to be:
a read would wait for ever. A child of a process that had started them must do without obstore. (Merely imported it is harmless.)

A lock that another thread of the parent holds is never given back in the child.
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
_OBSTORES_THREAD = "tokio-rt-worker"
_threads = {"started": False, "dead": False}


def new_lock() -> threading.Lock:
    """Return a lock, for the life of the process, that no child is forked under: it is free there."""
    lock = threading.Lock()
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock


def keep_inherited(*things: object) -> None:
    """In a forked child: keep what the parent had opened, for the life of the child."""
    _inherited.extend(things)


def note_obstore_started() -> None:
    """Say that obstore is used in this process from now on."""
    _threads["started"] = True


def has_obstore_threads() -> bool:
    """Tell whether obstore is known to be used in this process."""
    return _threads["started"]


def has_lost_obstore_threads() -> bool:
    """Tell whether this process was forked from one in which obstore had started its threads."""
    return _threads["dead"]


def _before_fork() -> None:
    kinds: list[Any] = [AsyncFileSystem]
    for kind in kinds:  # grows meanwhile
        kinds += kind.__subclasses__()
        _held.extend(getattr(kind, "_cache", {}).values())
    if not _threads["started"] and "obstore" in sys.modules:
        _threads["started"] = _finds_obstore_threads()  # somebody else uses it, too


def _finds_obstore_threads() -> bool:
    """Look for obstore's threads, where the system shows them (Linux)."""
    try:
        names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    except OSError:  # one ended meanwhile, or there is no such folder
        return False
    return _OBSTORES_THREAD in names


def _in_child() -> None:
    keep_inherited(*_held)
    _threads.update(dead=_threads["dead"] or _threads["started"], started=False)


os.register_at_fork(before=_before_fork, after_in_parent=_held.clear, after_in_child=_in_child)
