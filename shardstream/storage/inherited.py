"""Keeps the connections that a forked child inherits: freeing one there would break it for the parent.

Parent and child share the epoll that the parent's event loop waits on. When the child frees a connection, its socket is
taken out of that epoll, and the parent waits for an answer for ever. fsspec forgets its instances in a child, which frees
them; here they are held before the fork and never let go in the child.
"""

from __future__ import annotations

import os
from typing import Any

from fsspec.asyn import AsyncFileSystem

_held: list[Any] = []
_inherited: list[Any] = []


def keep_inherited(*things: object) -> None:
    """In a forked child: keep what the parent had opened, for the life of the child."""
    _inherited.extend(things)


def _hold_opened() -> None:
    kinds: list[Any] = [AsyncFileSystem]
    for kind in kinds:  # grows meanwhile
        kinds += kind.__subclasses__()
        _held.extend(getattr(kind, "_cache", {}).values())


os.register_at_fork(
    before=_hold_opened,
    after_in_parent=_held.clear,
    after_in_child=lambda: keep_inherited(*_held),
)
