"""Sort the hashes of keys in bounded memory."""

from __future__ import annotations

import hashlib
import itertools
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from shardstream.storage import TemporaryFile

Hashes = npt.NDArray[np.uint64]
"""Shape (n,): 64 bits of each key."""
Places = npt.NDArray[np.int64]
"""Shape (n,): number of the sample that has each key."""

_KEPT_KEYS = 1 << 19  # in memory: 8 MiB, and 40 MiB while they are sorted
_PARTITION_BITS = 8  # 10^9 keys make partitions of 63 MB
_PAIR_BYTES = 16
_BATCH_KEYS = 4096


def hash_keys(keys: Sequence[str]) -> Hashes:
    """Return 64 bits of each key, equal for equal keys."""
    digests = b"".join(
        hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
        for key in keys
    )
    return np.frombuffer(digests, dtype=np.uint64)


def encode_hashes(hashes: Hashes) -> str:
    """Return hashes as text for JSON."""
    return b64encode(hashes.tobytes()).decode()


def decode_hashes(text: str) -> Hashes:
    """Return the hashes that `encode_hashes` has written."""
    return np.frombuffer(b64decode(text), dtype=np.uint64)


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
        self._file: TemporaryFile | None = None
        self._runs: list[npt.NDArray[np.int64]] = []  # of each run: pairs before each partition

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the temporary file; a second call does nothing."""
        if self._file is not None:
            self._file.close()

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
        if self._file is None:
            self._file = TemporaryFile(f"{_PAIR_BYTES} bytes for each key")
        self._file.append(pairs.tobytes())
        self._runs.append(np.concatenate(([0], np.cumsum(counts))).astype(np.int64))

    def _read(self, first: int, count: int) -> npt.NDArray[np.uint64]:
        if self._file is None:
            raise AssertionError("runs are in the file")
        data = self._file.read(first * _PAIR_BYTES, (first + count) * _PAIR_BYTES)
        return np.frombuffer(data, dtype=np.uint64).reshape(-1, 2)


def find_repeat(keys: Iterable[str], key_at: Callable[[int], str]) -> tuple[int, int] | None:
    """Return the numbers of the first key that comes again, and of its first repetition; None if all keys differ.

    Args:
        keys: All keys.
        key_at: Returns a key by its number.
    """
    found: tuple[int, int] | None = None
    with KeyHashes() as hashes:
        for some in batches(keys):
            numbers = np.arange(hashes.count, hashes.count + len(some), dtype=np.int64)
            hashes.add(hash_keys(some), numbers)
        for block, places in hashes.sorted_blocks():
            equal = np.flatnonzero(block[1:] == block[:-1])
            for at in equal[np.argsort(places[equal + 1])].tolist():
                first, second = int(places[at]), int(places[at + 1])
                if found is not None and second > found[1]:
                    break
                if key_at(first) == key_at(second):  # else the hashes are equal by chance
                    found = (first, second)
                    break
    return found


def batches(keys: Iterable[str]) -> Iterator[list[str]]:
    """Yield keys in lists of a few thousand."""
    iterator = iter(keys)
    while some := list(itertools.islice(iterator, _BATCH_KEYS)):
        yield some


def _sort(hashes: Hashes, places: Places) -> tuple[Hashes, Places]:
    order = np.lexsort((places, hashes))
    return hashes[order], places[order]
