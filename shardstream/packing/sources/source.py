"""Define sources of a pack, which yield records; the encoder reads their files later."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from shardstream.errors import OptionError, SampleError, ShardStreamError, SourceError
from shardstream.format import is_image_field
from shardstream.packing.encode import encode_field
from shardstream.packing.sources.split import SplitNumbers

_RUNNING = re.compile(r"\{index[:}]")
PLACES_KEPT = 500_000
"""Keys that a `KeyMaker` remembers (200 bytes each), to find a repeated one early; all are compared before the dataset is published."""


class FileRef(NamedTuple):
    """A file whose bytes become a field."""

    url: str
    size: int = 0
    """Length in bytes, if a listing has it; else 0."""


class Record(NamedTuple):
    """One sample before it is encoded; picklable and small: files are named, not read."""

    key: str
    fields: Mapping[str, Any]
    """Field -> value (see `encode_field`) or `FileRef`. Values are encoded later, so they must not change."""
    where: str
    """The file or row it comes from, for messages."""
    error: SourceError | None = None
    """The reason why it cannot be packed, if it cannot."""


class Source(Protocol):
    """Yields the records of a dataset, the same ones in the same order each time."""

    @property
    def name(self) -> str:
        """Kind and location of the source, for messages and reports."""

    @property
    def length(self) -> int | None:
        """Number of records; None if unknown without a pass over them."""

    @property
    def extras(self) -> Mapping[str, bytes]:
        """Small files written to the folder of the manifest: name -> bytes."""

    @property
    def folders(self) -> frozenset[str]:
        """URLs of folders whose shards are read while packing: nothing must be written there."""

    @property
    def fingerprint(self) -> str | None:
        """Text that changes when the records do; None if that is unknown: then a stopped pack starts again."""

    @property
    def shuffled(self) -> bool:
        """Whether its order should be shuffled unless the user says otherwise: it is sorted by class."""

    def __iter__(self) -> Iterator[Record]:
        """Yield the records."""


@runtime_checkable
class SeekableSource(Protocol):
    """Records that can start at any one."""

    def iter_from(self, first: int) -> Iterator[Record]:
        """Yield the records from a number on."""


@runtime_checkable
class IndexedSource(Protocol):
    """A source whose records can be made in any order."""

    length: int

    def records_at(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield the records with these numbers."""


@runtime_checkable
class SplitSource(Protocol):
    """A source whose records may belong to several datasets."""

    splits: tuple[str, ...]
    """Names of the datasets; empty if all records belong to one."""

    def assigned(self) -> SplitNumbers:
        """Return the dataset of each record, as its number in `splits`; shape (n,)."""


def may_repeat_keys(source: Source) -> bool:
    """Return whether keys may be equal, so that they are compared before the dataset is published.

    A source that has compared all keys, or makes different ones, has a true attribute ``has_unique_keys``.
    """
    return not getattr(source, "has_unique_keys", False)


def records_from(records: Iterable[Record], first: int) -> Iterator[Record]:
    """Yield the records from a number on."""
    if first and isinstance(records, SeekableSource):
        return records.iter_from(first)
    return itertools.islice(records, first, None)


def fingerprint_of(kind: str, *parts: object) -> str:
    """Return a hash that changes with any of the parts; their text counts."""
    return fingerprint_of_many(kind, parts)


def fingerprint_of_many(kind: str, parts: Iterable[object]) -> str:
    """Return what `fingerprint_of` returns, for parts that are too many to be arguments."""
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        digest.update(b"\0" + str(part).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


class KeyMaker:
    """Makes the keys of one pass over a source, and detects repeated ones among the first `PLACES_KEPT`.

    A dot would end a key, so in its last part each becomes "_".

    >>> make = KeyMaker("{stem}", source="photos")
    >>> make("photos/a.b.jpg", index=0, stem="a.b")
    'a_b'

    Args:
        template: `str.format` text, e.g. ``"{index:08d}"``.
        source: Name of the source, for messages.
    """

    def __init__(self, template: str, *, source: str) -> None:
        self._template = template
        self._source = source
        self._places: dict[str, str] = {}
        # Running numbers cannot repeat: they need no memory.
        self._is_unique = _RUNNING.search(template) is not None

    @property
    def is_unique(self) -> bool:
        """Whether keys have running numbers, so that they all differ."""
        return self._is_unique

    def make(self, **names: Any) -> str:
        """Return the key of a record, without comparing it with others.

        Raises:
            OptionError: If the template names something unknown.
        """
        try:
            key = self._template.format_map(names)
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise OptionError(
                f"the key {self._template!r} cannot be filled in ({type(error).__name__}: {error}); "
                f"known here: {', '.join(f'{{{name}}}' for name in names)}",
                shard=self._source,
            ) from error
        folder, slash, last = key.rpartition("/")
        return folder + slash + last.replace(".", "_")

    def __call__(self, where: str, /, **names: Any) -> str:
        """Return the key of the record that comes from ``where``.

        Raises:
            OptionError: If the template names something unknown.
            SourceError: If another record has this key.
        """
        key = self.make(**names)
        if not self._is_unique:
            earlier = self._places.get(key)
            if earlier is not None:
                raise repeated_key(key, earlier, where, source=self._source)
            if len(self._places) < PLACES_KEPT:
                self._places[key] = where
        return key


def repeated_key(key: str, earlier: str, where: str, *, source: str) -> SourceError:
    """Return the error of a key that two records have."""
    return SourceError(
        f"the key {key!r} comes twice: from {earlier} and from {where}; "
        "choose another, e.g. key='{index:08d}' (--key)",
        shard=source,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesSource:
    """Samples from Python: a list of dicts, or any other iterable.

    Args:
        samples: Mappings as `ShardWriter.write` takes them; without ``__key__`` the key is the number.
        name: Name of the source, for messages.
        extras: Small files written to the folder of the manifest.
        shuffled: Whether to shuffle by default.
        fingerprint: Any text that identifies these samples in this order; a stopped pack is resumed if the text is equal.
    """

    samples: Iterable[Mapping[str, Any]]
    name: str = "samples"
    extras: Mapping[str, bytes] = field(default_factory=dict)
    shuffled: bool = False
    folders: frozenset[str] = frozenset()
    fingerprint: str | None = None

    @property
    def length(self) -> int | None:
        """Number of samples, if the iterable has a length."""
        samples: Any = self.samples
        return len(samples) if hasattr(samples, "__len__") else None

    def __iter__(self) -> Iterator[Record]:
        """Yield the records."""
        return itertools.starmap(self._record, enumerate(self.samples))

    def _record(self, index: int, sample: Mapping[str, Any]) -> Record:
        where = f"{self.name}, sample {index}"
        key = sample.get("__key__", f"{index:08d}")
        if not isinstance(key, str):
            raise SampleError(f"__key__ of {where} is {key!r}, not text; use str(key)")
        try:
            fields = {
                name: _as_it_is_now(name, value)
                for name, value in sample.items()
                if not (name.startswith("__") and name.endswith("__"))
            }
        except SampleError as error:
            return Record(key, {}, where, named(error, where))
        return Record(key, fields, where)


class SampleSequence(SamplesSource):
    """Samples of a list, or another sequence, which can be read in any order."""

    __slots__ = ()
    samples: Sequence[Mapping[str, Any]]

    @property
    def length(self) -> int:
        """Number of samples."""
        return len(self.samples)

    def records_at(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield the records with these numbers."""
        return (self._record(number, self.samples[number]) for number in numbers)


def _as_it_is_now(field: str, value: object) -> object:
    """Encode a value, since its owner may fill the same buffer with the next sample; pixels are copied: processes may encode them."""
    if is_image_field(field) and (type(value) is Image.Image or isinstance(value, np.ndarray)):
        return value.copy()
    return encode_field(field, value)


def named(error: ShardStreamError, where: str) -> SourceError:
    """Return an error that names its file or row."""
    text = str(error)
    return SourceError(text) if where in text else SourceError(text, shard=where)


def is_image_name(name: str) -> bool:
    """Return whether a file name is that of an image; those of hidden files are not."""
    last = name.rpartition("/")[2]
    return "." in last[1:] and last[0] != "." and is_image_field(last.lower())
