"""Sort the hashes of keys in bounded memory."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from shardstream.errors import StorageError

Hashes = npt.NDArray[np.uint64]
"""Shape (n,): 64 bits of each key."""
Places = npt.NDArray[np.int64]
"""Shape (n,): number of the sample that has each key."""

_KEPT_KEYS = 1 << 19  # in memory: 8 MiB, and 40 MiB while they are sorted
_PARTITION_BITS = 8  # 10^9 keys make partitions of 63 MB
_PAIR_BYTES = 16


def hash_keys(keys: Sequence[str]) -> Hashes:
    """Return 64 bits of each key, equal for equal keys."""
    digests = b"".join(
        hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        for key in keys
    )
    return np.frombuffer(digests, dtype=np.uint64)


class KeyHashes:
    """Hashes of keys with their places, sorted in partitions of a temporary file; use it as a context manager.

    Memory holds up to ``kept`` keys, 16 bytes each, and later one partition: a 256th of all. The file has no name and 16 bytes for each
    key; it vanishes with the process.

    Args:
        kept: Keys that are collected in memory before they go to the file.

    Raises:
        StorageError: If the temporary folder is full.
    """

    def __init__(self, *, kept: int = _KEPT_KEYS) -> None:
        self.count = 0
        """Number of keys."""
        self._kept = kept
        self._waiting: list[tuple[Hashes, Places]] = []
        self._num_waiting = 0
        self._file = -1
        self._runs: list[npt.NDArray[np.int64]] = []  # of each run: pairs before each partition

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def add(self, hashes: Hashes, places: Places) -> None:
        """Add keys, in any order.

        Args:
            hashes: Their hashes, shape (n,).
            places: Their places, shape (n,); those of all keys differ.
        """
        self.count += len(hashes)
        self._waiting.append((hashes, places))
        self._num_waiting += len(hashes)
        if self._num_waiting >= self._kept:
            self._write_run()

    def sorted_blocks(self) -> Iterator[tuple[Hashes, Places]]:
        """Yield all keys, sorted by hash, then by place; equal hashes are in one block."""
        if not self._runs:
            found = self._take_waiting()
            self._waiting, self._num_waiting = [found], len(found[0])
            yield _sort(*found)
            return
        self._write_run()
        starts = np.cumsum([0, *(int(run[-1]) for run in self._runs)])[:-1]
        for partition in range(1 << _PARTITION_BITS):
            pieces = [
                self._read(start + int(run[partition]), int(run[partition + 1] - run[partition]))
                for start, run in zip(starts.tolist(), self._runs, strict=True)
            ]
            pairs = np.concatenate(pieces)
            yield _sort(pairs[:, 0], pairs[:, 1].view(np.int64))

    def _take_waiting(self) -> tuple[Hashes, Places]:
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        empty = (np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64))
        hashes, places = zip(*(waiting or [empty]), strict=True)
        return np.concatenate(hashes), np.concatenate(places)

    def _write_run(self) -> None:
        """Append the waiting keys to the file, grouped by partition."""
        hashes, places = self._take_waiting()
        partitions = (hashes >> np.uint64(64 - _PARTITION_BITS)).astype(np.uint16)
        order = np.argsort(partitions, kind="stable")
        pairs = np.stack((hashes[order], places[order].view(np.uint64)), axis=1)
        counts = np.bincount(partitions, minlength=1 << _PARTITION_BITS)
        try:
            if self._file < 0:
                with tempfile.TemporaryFile(buffering=0) as file:
                    self._file = os.dup(file.fileno())
            view = memoryview(pairs.tobytes())
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            raise StorageError(
                f"{_PAIR_BYTES} bytes for each key do not fit in the temporary folder: {error.strerror}",
                remedy="set TMPDIR to a folder with more space",
                shard=tempfile.gettempdir(),
            ) from error
        self._runs.append(np.concatenate(([0], np.cumsum(counts))).astype(np.int64))

    def _read(self, first: int, count: int) -> npt.NDArray[np.uint64]:
        data = os.pread(self._file, count * _PAIR_BYTES, first * _PAIR_BYTES)
        if len(data) != count * _PAIR_BYTES:
            raise StorageError(
                "a temporary file was cut while it was used", shard=tempfile.gettempdir()
            )
        return np.frombuffer(data, dtype=np.uint64).reshape(-1, 2)


def _sort(hashes: Hashes, places: Places) -> tuple[Hashes, Places]:
    order = np.lexsort((places, hashes))
    return hashes[order], places[order]
