"""Make the default keys of files that are one sample each: the shortest unique part of the path."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from shardstream.packing.job.key_hashes import KeyHashes, batches, hash_keys

Levels = npt.NDArray[np.uint8]

_PATH, _NUMBERED = 1, 2


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


def key_levels(paths: Collection[str]) -> Levels:
    """Return for each file of a dataset the lowest level of `file_key` at which no other file has its key; shape (n,).

    A pure function of the sorted paths: equal folders give equal keys. No two keys are equal: those of the highest level end in
    numbers that differ, and a file with a repeated key goes up a level. It holds one byte a file, and sorts hashes of the keys in a
    temporary file: two hashes that are equal by chance (1 in 10^5 for 10^7 files) make two keys longer than necessary.

    >>> key_levels(["cat/a.jpg", "cat/b.jpg", "dog/a.jpg", "dog/c.1.jpg", "dog/c_1.jpg"]).tolist()
    [1, 0, 1, 2, 2]

    Args:
        paths: The paths, each in a folder; they are read up to four times.

    Raises:
        StorageError: If the temporary folder is full.
    """
    levels = np.zeros(len(paths), dtype=np.uint8)
    lowest = 0  # keys of higher levels have a folder: they differ from all stems
    while (rising := _repeated(paths, levels, lowest)).any():
        levels += rising
        lowest = _PATH
    return levels


def _repeated(paths: Iterable[str], levels: Levels, lowest: int) -> npt.NDArray[np.bool_]:
    """Return which files, of those from a level on, have the key of another and can go up a level."""
    found = np.zeros(len(levels), dtype=bool)
    with KeyHashes() as hashes:
        first = 0
        for some in batches(paths):
            numbers = first + np.flatnonzero(levels[first : first + len(some)] >= lowest)
            keys = [file_key(some[n - first], n, int(levels[n])) for n in numbers.tolist()]
            hashes.add(hash_keys(keys), numbers)
            first += len(some)
        for block, places in hashes.sorted_blocks():
            equal = block[1:] == block[:-1]
            found[places[1:][equal]] = True
            found[places[:-1][equal]] = True
    return found & (levels < _NUMBERED)
