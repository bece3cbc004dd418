"""What Python's collector and the C library do with memory, kept out of a loader's way."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

# The largest block that teaches glibc (mallopt(3), M_MMAP_THRESHOLD): it must be under 32 MiB with its header.
_MMAP_THRESHOLD_PROBE_BYTES = 31 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_WORKERS_MALLOC = {_M_TRIM_THRESHOLD: 8 << 20, _M_MMAP_THRESHOLD: 4 << 20, _M_ARENA_MAX: 1}
_trim: list[Callable[[int], int]] = []  # malloc_trim(3), in a worker that is settled


@contextmanager
def pause_gc_for_import() -> Iterator[None]:
    """Import large packages without looking for garbage meanwhile, of which there is none: torch takes 0.2 s of 1.4 less."""
    was_enabled, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        # If nothing was imported it is a look-up, of which there may be many: each would begin the count anew after which
        # garbage is looked for. What is frozen already is somebody's wish.
        if len(sys.modules) > modules and gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()  # all is old now: the next collection of what is young need not look at it
        if was_enabled:
            gc.enable()


@cache
def tune_worker_process() -> None:
    """Make a fresh worker at home in what it has inherited or imported; once in its life.

    Its objects are left out of garbage collections, each of which takes 70 ms with torch imported, and copies the pages that
    it shares with the process it was forked from. Of glibc's malloc (mallopt(3)), blocks of up to 4 MiB are used again, as in
    `keep_freed_memory`, and threads share one arena: that of each thread would keep range reads that another one frees.
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
    """Give a worker's free pages back to the system: else those that lie between used ones add up over the epochs.

    It takes some milliseconds. In a process that is not ours it does nothing: there may be much more to look through.
    """
    for trim in _trim:
        trim(0)


@cache
def keep_freed_memory() -> None:
    """Have freed blocks of up to 31 MiB used again, instead of given back to the system and asked for anew, page by page.

    glibc learns that from the first such block that is freed, for the life of the process: once, because the next one would be taken
    of what is kept, and cleared. Photos of 100 kB are copied eight times as fast then.
    """
    bytes(_MMAP_THRESHOLD_PROBE_BYTES)  # pages that are never touched cost nothing; freed here
