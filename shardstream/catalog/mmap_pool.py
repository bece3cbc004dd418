"""Tars of this machine, mapped to memory once and kept over the epochs.

To map a page anew takes as long as to copy it: a second epoch over kept maps is half again as fast. Each holds a file descriptor, so a
process has a limited number, shared by all its data sets.
"""

from __future__ import annotations

import mmap
import os
import resource
from collections import OrderedDict
from weakref import WeakSet

from shardstream.format.tar_reader import Buffer, empty_tar
from shardstream.storage.error_messages import translate_errors
from shardstream.storage.fork_safety import new_lock

_MAX_MAPS = 4096
_all: WeakSet[MmapPool] = WeakSet()
_lock = new_lock()


class MmapPool:
    """The mapped shards of a data set, by number."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Buffer] = OrderedDict()
        with _lock:
            _all.add(self)

    def __reduce__(self) -> tuple[type[MmapPool], tuple[()]]:
        return MmapPool, ()

    def get(self, shard: int) -> Buffer | None:
        """Return what is kept of a shard."""
        with _lock:
            tar = self._kept.get(shard)
            if tar is not None:
                self._kept.move_to_end(shard)
            return tar

    def keep(self, shard: int, tar: Buffer) -> None:
        """Keep a map, and drop the least used where there are too many; it closes when nobody reads it any more."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = _MAX_MAPS if files == resource.RLIM_INFINITY else max(1, min(_MAX_MAPS, files // 2))
        with _lock:
            others = list(_all)
            if sum(len(one._kept) for one in others) >= most:
                max(others, key=lambda one: len(one._kept))._kept.popitem(last=False)
            self._kept[shard] = tar


def map_file(path: str, url: str) -> mmap.mmap:
    """Map a local file to memory, for reading.

    Raises:
        StorageError: If it cannot be opened.
        ShardError: If it is empty.
    """
    with translate_errors(url):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(handle).st_size
        if size == 0:
            raise empty_tar(url)
        return mmap.mmap(handle, size, access=mmap.ACCESS_READ)
    finally:
        os.close(handle)
