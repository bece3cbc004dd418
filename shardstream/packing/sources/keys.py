"""Make the keys of records: by a template, or of files the shortest unique part of the path."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, SourceError
from shardstream.packing.job.key_hashes import KeyHashes, RepeatedKey, batches, hash_keys

Levels = npt.NDArray[np.uint8]

PLACES_KEPT = 1 << 16
"""Keys that a `KeyMaker` remembers (200 bytes each), to find a repeated one early; all are compared before the dataset is published."""
_RUNNING = re.compile(r"\{index[:}]")
_STEM, _PATH, _NUMBERED = range(3)
_TEMPLATES = ("{stem}", "{path}", "{path}_{index:08d}")


def fill_key(template: str, names: dict[str, Any]) -> str:
    """Return a key; a dot would end it, so in its last part each becomes "_".

    >>> fill_key("photos/{stem}", {"stem": "a.b"})
    'photos/a_b'
    """
    folder, slash, last = template.format_map(names).rpartition("/")
    return folder + slash + last.replace(".", "_")


def has_numbers(template: str) -> bool:
    """Return whether keys have running numbers, so that they all differ."""
    return _RUNNING.search(template) is not None


class KeyMaker:
    """Makes the keys of one pass over a source, and detects repeated ones among the first `PLACES_KEPT`.

    Args:
        template: `str.format` text, e.g. ``"{index:08d}"``.
        source: Name of the source, for messages.
    """

    def __init__(self, template: str, *, source: str) -> None:
        self._template = template
        self._source = source
        self._places: dict[str, str] = {}
        self._is_unique = has_numbers(template)

    def make(self, **names: Any) -> str:
        """Return the key of a record, without comparing it with others.

        Raises:
            OptionError: If the template names something unknown.
        """
        try:
            return fill_key(self._template, names)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise OptionError(
                f"the key {self._template!r} cannot be filled in ({type(error).__name__}: {error}); "
                f"known here: {', '.join(f'{{{name}}}' for name in names)}",
                shard=self._source,
            ) from error

    def __call__(self, where: str, /, **names: Any) -> str:
        """Return the key of the record that comes from ``where``.

        Raises:
            OptionError: If the template names something unknown.
            SourceError: If another record has this key.
        """
        key = self.make(**names)
        if not self._is_unique:  # else they need no memory
            earlier = self._places.get(key)
            if earlier is not None:
                raise repeated_key(key, earlier, where, source=self._source)
            if len(self._places) < PLACES_KEPT:
                self._places[key] = where
        return key


def repeated_key(key: str, earlier: str, where: str, *, source: str) -> SourceError:
    """Return the error of a key that two records have."""
    return SourceError(
        str(RepeatedKey(key, earlier, where)),
        remedy="choose another, e.g. key='{index:08d}' (--key)",
        shard=source,
    )


def names_of_file(path: str, number: int) -> dict[str, Any]:
    """Return the values for the key template of a file that is one sample: ``index``, ``stem`` and ``path``, without extension."""
    path = path.rpartition(".")[0]
    return {"index": number, "stem": path.rpartition("/")[2], "path": path}


def file_key(path: str, number: int, level: int) -> str:
    """Return the default key of a file.

    >>> [file_key("cat/a.1.jpg", 7, level) for level in (0, 1, 2)]
    ['a_1', 'cat/a_1', 'cat/a_1_00000007']

    Args:
        path: Path of the file in its dataset, with its extension.
        number: Number of the file in the dataset.
        level: 0: the stem, 1: the path without extension, 2: this and the number.
    """
    return fill_key(_TEMPLATES[level], names_of_file(path, number))


def key_levels(read: Callable[[], Iterable[str]], count: int) -> Levels:
    """Return for each file of a dataset the lowest level of `file_key` at which no other file has its key; shape (n,).

    A pure function of the sorted paths: equal folders give equal keys. No two keys are equal: those of the highest level end in
    numbers that differ, and a file with a repeated key goes up a level. It holds one byte a file, and sorts hashes of the keys in a
    temporary file: two hashes that are equal by chance (1 in 10^5 for 10^7 files) make two keys longer than necessary.

    >>> paths = ["cat/a.jpg", "cat/b.jpg", "dog/a.jpg", "dog/c.1.jpg", "dog/c_1.jpg"]
    >>> key_levels(lambda: paths, 5).tolist()
    [1, 0, 1, 2, 2]

    Args:
        read: Returns the paths, each in a folder; called up to four times.
        count: Number of the paths.

    Raises:
        StorageError: If the temporary folder is full.
    """
    levels = np.zeros(count, dtype=np.uint8)
    lowest = _STEM  # keys of higher levels have a folder: they differ from all stems
    while (rising := _repeated(read(), levels, lowest)).any():
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
