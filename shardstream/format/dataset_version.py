"""Describe the version of a dataset in its manifest.

A version says what made it, which earlier versions are kept, and what it leaves out or replaces. The current version is ``index.json``;
``versions/000012.json`` is the ``index.json`` that was version 12, byte for byte. A manifest without the key ``dataset_version`` is
version 1. Numbers of samples count those of the shards in their order, deleted ones, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from shardstream.format.names import is_name

COUNT_LIMIT = 1 << 60  # of samples and bytes of a dataset: sums stay below 2**63

VERSIONS_FOLDER = "versions"
"""Folder of earlier manifests, in that of ``index.json``."""
VERSION_KEY = "dataset_version"
_NUMBERS = re.compile(r"([a-z0-9-]+/)?(deleted|numbers)-[0-9a-f]{16}-[0-9a-f]{8}\.npy")
_REPLACED = re.compile(r"fields-[0-9a-f]{12}-[0-9a-f]{16}\.json")
_KEYS = re.compile(r"keys-[0-9a-f]{16}\.npy")
_TAG = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,99}")


def version_name(number: int) -> str:
    """Return the name of the manifest of an earlier version, in the folder of the dataset.

    >>> version_name(12)
    'versions/000012.json'
    """
    return f"{VERSIONS_FOLDER}/{number:06d}.json"


def numbers_name(kind: str, data: bytes, writer: str) -> str:
    """Return the name of a file of the numbers of samples, such as "deleted" ones.

    It has a part of its SHA-256, and 8 hex digits of its writer: what `gc` removes is never the file of a writer that makes the same change again.
    """
    return f"{kind}-{sha256(data).hexdigest()[:16]}-{writer}.npy"


def has_digest(name: str, data: bytes) -> bool:
    """Return whether a file of the numbers of samples has these bytes, by its name."""
    return sha256(data).hexdigest()[:16] == re.split("[-.]", name)[1]


def is_numbers_name(name: str) -> bool:
    """Return whether a file in the folder of a dataset has numbers of samples, by its name.

    >>> is_numbers_name("deleted-0123456789abcdef-01234567.npy"), is_numbers_name("deleted.npy")
    (True, False)
    """
    return "/" not in name and _NUMBERS.fullmatch(name) is not None


def is_replaced_name(name: str) -> bool:
    """Return whether a file is the manifest of replaced fields that were compacted, by its name.

    >>> is_replaced_name("fields-0123456789ab-0123456789abcdef.json"), is_replaced_name("fields.json")
    (True, False)
    """
    return _REPLACED.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedFields:
    """Fields that another dataset has, sample by sample.

    Args:
        fields: Names of the fields.
        url: Its manifest, relative to the folder of the dataset.
        nsamples: Its samples.
        numbers: Name of the file with their numbers in the dataset; None if they are its first ones. Others have their own fields.
    """

    fields: tuple[str, ...]
    url: str
    nsamples: int
    numbers: str | None = None

    @property
    def change(self) -> str:
        """Name of the folder that the change has made, which stays in compactions.

        >>> ReplacedFields(fields=("txt",), url="fields-0123456789ab-0123456789abcdef.json", nsamples=1).change
        'fields-0123456789ab'
        """
        return self.url[: len("fields-") + 12]

    def manifest_name(self, data: bytes) -> str:
        """Return the name of the manifest of these fields after a compaction, by its bytes."""
        return f"{self.change}-{sha256(data).hexdigest()[:16]}.json"


def count_fields(counts: Mapping[str, int], replaced: Iterable[ReplacedFields]) -> dict[str, int]:
    """Return field -> number of samples that have it: of those that replaced fields add at least so many.

    >>> count_fields({"txt": 9}, [ReplacedFields(fields=("npy", "txt"), url="fields-0123456789ab/index.json", nsamples=5)])
    {'txt': 9, 'npy': 5}
    """
    found = dict(counts)
    for one in replaced if counts else ():  # without counts, the fields are unknown
        found |= {name: max(found.get(name, 0), one.nsamples) for name in one.fields}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """A file with 64 bits of the key of each of some samples, in their order.

    Args:
        name: Its name in the folder of the dataset, with a part of its SHA-256.
        nsamples: How many samples it has.
        compactions: Those of the version whose samples they are.
    """

    name: str
    nsamples: int
    compactions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWriter:
    """A writer that goes on to append: readers that follow the dataset wait for it.

    Args:
        token: Differs for any two writers.
        host: Name of its machine and number of its process, for messages.
        published: Time of its last publication in UTC, ISO 8601; by its clock, for messages.
    """

    token: str
    host: str
    published: str

    def __str__(self) -> str:
        return f"{self.token} of {self.host}, whose last publication was at {self.published}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetVersion:
    """The version of a dataset.

    Args:
        number: Number of the version, from 1.
        operation: What made it: "pack", "append", "delete", "compact" or "replace_fields".
        created: Time in UTC, ISO 8601; of the writer's clock, for display only.
        writer: Differs for any two writers.
        kept: Earlier versions that can be read, as ranges of the first and the last, in order.
        tags: Name -> version, of this one or a kept one.
        deleted: Name of the file with the numbers of the deleted samples; None if there are none.
        ndeleted: How many they are.
        replaced: Fields that other datasets have; the last one that has a field counts.
        class_counts: Where names were added to ``classes.json``: the version that did so, and how many names were there before.
        keys: Files of the keys of its samples, from the first on; later samples may have none.
        renumbered: Versions that a compaction made, ascending: it removed all samples that were deleted in the version before.
        writers: Writers that go on to append.

    Raises:
        ValueError: If they are not consistent.
    """

    number: int = 1
    operation: str = "pack"
    created: str = ""
    writer: str = ""
    kept: tuple[tuple[int, int], ...] = ()
    tags: Mapping[str, int] = field(default_factory=dict)
    deleted: str | None = None
    ndeleted: int = 0
    replaced: tuple[ReplacedFields, ...] = ()
    class_counts: tuple[tuple[int, int], ...] = ()
    keys: tuple[KeyFile, ...] = ()
    renumbered: tuple[int, ...] = ()
    writers: tuple[OpenWriter, ...] = ()

    def __post_init__(self) -> None:
        _require(_is_count(self.number) and self.number > 0, "number")
        texts = self.operation, self.created, self.writer
        _require({type(one) for one in texts} == {str}, "operation")
        _require(_are_ranges(self.kept, self.number), "kept")
        _require(all(map(_TAG.fullmatch, self.tags)), "tags")
        _require(all(_is_count(one) and self.has(one) for one in self.tags.values()), "tags")
        _require(self.deleted is None or _NUMBERS.fullmatch(self.deleted) is not None, "deleted")
        _require(_is_count(self.ndeleted) and (self.ndeleted > 0) == bool(self.deleted), "ndeleted")
        for one in self.class_counts:
            _require(len([*one]) == 2 and all(map(_is_count, one)), "class_counts")
        for file in self.keys:
            _require(_KEYS.fullmatch(file.name) is not None and file.nsamples > 0, "keys")
            _require(_is_count(file.nsamples) and _is_count(file.compactions), "keys")
        _require(_are_ascending(self.renumbered, self.number), "renumbered")
        for writer in self.writers:
            values = writer.token, writer.host, writer.published
            _require({type(one) for one in values} == {str} and bool(writer.token), "writers")

    def has(self, number: int) -> bool:
        """Return whether a version is this one or can be read."""
        return number == self.number or any(first <= number <= last for first, last in self.kept)

    @property
    def kept_numbers(self) -> list[int]:
        """Earlier versions that can be read, ascending."""
        return [number for first, last in self.kept for number in range(first, last + 1)]

    @property
    def compactions(self) -> int:
        """How often samples got other numbers."""
        return len(self.renumbered)

    def compacted_since(self, number: int) -> tuple[int, ...]:
        """Return the versions that were compacted since a version, ascending: each was followed by one without its deleted samples.

        >>> DatasetVersion(number=9, renumbered=(3, 7)).compacted_since(4)
        (6,)
        """
        return tuple([made - 1 for made in self.renumbered if made > number])

    @property
    def has_other_numbers(self) -> bool:
        """Whether samples have other numbers than in the first version, because some were deleted."""
        return bool(self.ndeleted or self.renumbered)

    def other_writers(self, token: str) -> tuple[OpenWriter, ...]:
        """Return the writers that go on to append, without one of them."""
        return tuple([one for one in self.writers if one.token != token])

    def num_classes(self, number: int) -> int | None:
        """Return how many names of ``classes.json`` an earlier version had, by its number; None for all."""
        return next((count for since, count in self.class_counts if since > number), None)


def ranges_of(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return numbers as ranges of the first and the last, in order.

    >>> ranges_of([5, 1, 2, 3])
    ((1, 3), (5, 5))
    """
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return tuple(found)


def encode_version(version: DatasetVersion) -> dict[str, Any]:
    """Return the entry of ``index.json``."""
    default = asdict(DatasetVersion(number=version.number))
    values = {name: value for name, value in asdict(version).items() if value != default[name]}
    return {VERSION_KEY: {"number": version.number} | values}


def decode_version(document: Mapping[str, Any]) -> DatasetVersion:
    """Read the entry of an ``index.json``.

    Raises:
        TypeError, ValueError: If it is not consistent, or has keys of a later shardstream.
    """
    found = dict(document[VERSION_KEY])
    replaced = tuple(map(_decode_replaced, found.pop("replaced", ())))
    kept = tuple(tuple(one) for one in found.pop("kept", ()))
    counts = tuple(tuple(one) for one in found.pop("class_counts", ()))
    keys = tuple(KeyFile(**one) for one in found.pop("keys", ()))
    writers = tuple(OpenWriter(**one) for one in found.pop("writers", ()))
    found |= {"kept": kept, "replaced": replaced, "class_counts": counts, "keys": keys}
    found |= {"writers": writers}
    return DatasetVersion(**found | {"renumbered": tuple(found.get("renumbered", ()))})


def _decode_replaced(entry: Mapping[str, Any]) -> ReplacedFields:
    found = ReplacedFields(**{**entry, "fields": tuple(entry["fields"])})
    are_names = bool(found.fields) and all(map(is_name, found.fields))
    is_inside = is_name(found.url) and ".." not in found.url.split("/")
    _require(found.numbers is None or _NUMBERS.fullmatch(found.numbers) is not None, "replaced")
    _require(
        are_names and is_inside and ":" not in found.url and _is_count(found.nsamples), "replaced"
    )
    return found


def _are_ranges(ranges: Iterable[tuple[int, ...]], before: int) -> bool:
    """Return whether these are ranges in order, that end before a number."""
    end = 0
    for one in ranges:
        if len(one) != 2 or not all(map(_is_count, one)) or not end < one[0] <= one[1] < before:
            return False
        end = one[1]
    return True


def _are_ascending(numbers: tuple[int, ...], until: int) -> bool:
    is_ascending = list(numbers) == sorted(set(numbers))
    return all(map(_is_count, numbers)) and is_ascending and max(numbers, default=0) <= until


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < COUNT_LIMIT


def _require(is_valid: bool, what: str) -> None:
    if not is_valid:
        raise ValueError(f"{VERSION_KEY}: {what}")


FIRST_VERSION = DatasetVersion()
"""The version of a dataset that was never changed."""
