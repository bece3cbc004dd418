"""This process: its cores, locks that survive a fork, and its garbage collector and malloc."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

# The largest block that raises glibc's threshold (mallopt(3), M_MMAP_THRESHOLD): under 32 MiB with its header.
MMAP_THRESHOLD_PROBE_BYTES = 31 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_WORKERS_MALLOC = {_M_TRIM_THRESHOLD: 16 << 20, _M_MMAP_THRESHOLD: 4 << 20, _M_ARENA_MAX: 1}
TRIM_AFTER_BYTES = 1 << 30
"""Bytes that a worker reads until free pages are returned: new pages for each short epoch took a tenth of its time."""
_trim: list[Callable[[int], int]] = []  # malloc_trim(3), in a tuned worker
_read_bytes = [0]  # of the process, since the last trim


def num_cores() -> int:
    """Return how many CPU cores this process may use (`os.process_cpu_count` of Python 3.13)."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def new_lock() -> threading.Lock:
    """Return a lock that is held during each fork, so it is free in the child; it lives as long as the process.

    A lock that another thread of the parent holds at the fork would never be released in the child.
    """
    lock = threading.Lock()
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock


@contextmanager
def forked_workers_keep_objects() -> Iterator[None]:
    """Exclude the objects that a worker inherits from its garbage collections, from its first instruction on.

    A worker collects before `tune_worker_process` is called, and what it frees then may need the threads of its parent: a codec
    of PyAV that the user's process has left as garbage waits for ever for its own.
    """
    state = _watch_forks()
    state.forks_workers = True
    try:
        yield
    finally:
        state.forks_workers = False


@cache
def _watch_forks() -> threading.local:
    state = threading.local()

    def freeze_in_worker() -> None:
        if getattr(state, "forks_workers", False):
            gc.freeze()

    os.register_at_fork(after_in_child=freeze_in_worker)
    return state


@cache
def tune_worker_process() -> None:
    """Tune a worker process once after it starts.

    Objects that it inherited or imported are excluded from garbage collections: each collection takes 70 ms with torch
    imported, and copies the pages that the worker shares with its parent. glibc's malloc (mallopt(3)) reuses blocks of up to
    4 MiB, as with `keep_freed_memory`, and threads share one arena, so that a block that one thread frees serves the others.
    """
    gc.freeze()
    try:
        libc = ctypes.CDLL(None)
        for parameter, value in _WORKERS_MALLOC.items():
            libc.mallopt(parameter, value)
        _trim.append(libc.malloc_trim)
    except (OSError, AttributeError):  # another C library
        return


def release_freed_memory(read_bytes: int) -> None:
    """Return a worker's free pages to the system after each GiB read; otherwise those between used ones add up over the epochs.

    This takes some milliseconds, and new pages. In the user's process it does nothing: its heap may be large.

    Args:
        read_bytes: Bytes that were read since the last call.
    """
    _read_bytes[0] += read_bytes
    if _read_bytes[0] < TRIM_AFTER_BYTES:
        return
    _read_bytes[0] = 0
    for trim in _trim:
        trim(0)


@cache
def keep_freed_memory() -> None:
    """Make malloc reuse freed blocks of up to 31 MiB instead of returning them to the system page by page.

    glibc raises its threshold when the first block of that size is freed, for the life of the process. A second call would
    only clear kept memory. Photos of 100 kB are copied eight times as fast.
    """
    bytes(MMAP_THRESHOLD_PROBE_BYTES)  # pages that are never touched cost nothing; freed here
