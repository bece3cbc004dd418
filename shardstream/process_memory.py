"""Garbage collector and malloc settings for loader workers."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

# The largest freed block that raises glibc's dynamic M_MMAP_THRESHOLD (mallopt(3)): under 32 MiB with its header.
_MMAP_THRESHOLD_PROBE_BYTES = 31 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_WORKERS_MALLOC = {_M_TRIM_THRESHOLD: 8 << 20, _M_MMAP_THRESHOLD: 4 << 20, _M_ARENA_MAX: 1}
_trim: list[Callable[[int], int]] = []  # malloc_trim(3), only in a tuned worker process


@contextmanager
def pause_gc_for_import() -> Iterator[None]:
    """Pause garbage collection during large imports, which create no garbage (torch: 1.2 s instead of 1.4 s)."""
    was_enabled, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        # Only after a real import: freeze/unfreeze resets the collector's counters, and plain look-ups are frequent. Objects
        # that the application has frozen must stay frozen, so unfreeze() is not called then.
        if len(sys.modules) > modules and gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()  # moves all objects to the oldest generation, which young collections skip
        if was_enabled:
            gc.enable()


@cache
def tune_worker_process() -> None:
    """Tune a worker process once after it starts.

    Its existing objects are excluded from garbage collections, each of which takes 70 ms with torch imported and copies the
    pages shared with the parent process. glibc's malloc (mallopt(3)) reuses blocks of up to 4 MiB, as in `keep_freed_memory`,
    and threads share one arena: per-thread arenas would retain range responses that another thread frees.
    """
    gc.freeze()
    try:
        libc = ctypes.CDLL(None)
        for parameter, value in _WORKERS_MALLOC.items():
            libc.mallopt(parameter, value)
        _trim.append(libc.malloc_trim)
    except (OSError, AttributeError):  # another C library
        return


def give_back_freed_memory() -> None:
    """Return a worker's free heap pages to the system; fragmentation would grow over the epochs.

    It takes a few milliseconds. It does nothing outside tuned worker processes, whose heaps may be much larger.
    """
    for trim in _trim:
        trim(0)


@cache
def keep_freed_memory() -> None:
    """Make glibc reuse freed blocks of up to 31 MiB instead of unmapping them.

    Freeing one block of that size raises glibc's dynamic mmap threshold for the life of the process. Called once, because a second
    block would come from the heap and be cleared. Without page faults, photos of 100 kB are copied eight times as fast.
    """
    bytes(_MMAP_THRESHOLD_PROBE_BYTES)  # freed at once; untouched pages cost nothing
