"""Keep values that all tasks of a job share, in each process that runs them: an open source, indexes, a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")

# Of this process: what it keeps of the job whose task it runs, by job and name.
_kept: dict[tuple[str, str], Any] = {}
_lock = threading.RLock()


def keep(job: str, name: str, make: Callable[[], T]) -> T:
    """Return the value of a job that this process keeps; if there is none, make it, and drop those of other jobs.

    Args:
        job: Identity of the call.
        name: Name of the value in its job.
        make: Makes the value; other threads wait meanwhile.
    """
    with _lock:
        if (job, name) not in _kept:
            value = make()
            for other in [one for one in _kept if one[0] != job]:
                del _kept[other]
            _kept[job, name] = value
        return cast("T", _kept[job, name])


def forget(job: str) -> None:
    """Drop the values of a job."""
    with _lock:
        for one in [one for one in _kept if one[0] == job]:
            del _kept[one]
