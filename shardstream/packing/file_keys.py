"""Make the default keys of files that are one sample each: the shortest unique part of the path."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Levels = npt.NDArray[np.uint8]

_PATH, _NUMBERED = 1, 2
_HASH_BYTES = 8


def file_key(path: str, number: int, level: int) -> str:
    """Return the key of a file.

    A dot would end a key, so in the last part of the path each becomes "_".

    >>> [file_key("cat/a.1.jpg", 7, level) for level in (0, 1, 2)]
    ['a_1', 'cat/a_1', 'cat/a_1_00000007']

    Args:
        path: Path of the file in its dataset, with its extension.
        number: Number of the file in the dataset.
        level: 0: the stem, 1: the path without extension, 2: this and the number.
    """
    folder, slash, name = path.rpartition("/")
    stem = name.rpartition(".")[0].replace(".", "_")
    if level < _PATH:
        return stem
    return folder + slash + stem + (f"_{number:08d}" if level >= _NUMBERED else "")


def key_levels(paths: Sequence[str]) -> Levels:
    """Return for each file of a dataset the lowest level of `file_key` at which no other file has its key; shape (n,).

    A pure function of the sorted paths: equal folders give equal keys. No two keys are equal: those of the highest level end in
    numbers that differ, and a file with a repeated key goes up a level. It holds 8 bytes a file, a hash of its key, and twice that
    while it sorts them: two hashes that are equal by chance (1 in 10^5 for 10^7 files) make two keys longer than necessary.

    >>> key_levels(["cat/a.jpg", "cat/b.jpg", "dog/a.jpg", "dog/c.1.jpg", "dog/c_1.jpg"]).tolist()
    [1, 0, 1, 2, 2]
    """
    levels = np.zeros(len(paths), dtype=np.uint8)
    hashes = np.empty(len(paths), dtype=np.uint64)
    changed: Iterable[int] = range(len(paths))
    while True:
        for number in map(int, changed):
            hashes[number] = _hash(file_key(paths[number], number, int(levels[number])))
        repeated = _repeated(hashes)
        rising = repeated[levels[repeated] < _NUMBERED]
        if not len(rising):
            return levels
        levels[rising] += 1
        changed = rising


def _hash(key: str) -> int:
    # Not Python's hash(): it differs between processes.
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=_HASH_BYTES)
    return int.from_bytes(digest.digest(), "little")


def _repeated(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the sorted positions of hashes that occur more than once."""
    order = np.argsort(hashes, kind="stable")
    in_order = hashes[order]
    equal = in_order[1:] == in_order[:-1]
    is_repeated = np.zeros(len(hashes), dtype=bool)
    is_repeated[1:] |= equal
    is_repeated[:-1] |= equal
    return np.sort(order[is_repeated])
