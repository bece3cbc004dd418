"""Define records and the base class of sources, which yield them, and those of samples from Python; the encoder reads their files later."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardstream.catalog import Classes
from shardstream.errors import OptionError, SampleError, ShardStreamError, SourceError
from shardstream.format import CLASSES_NAME, encode_classes, is_image_field
from shardstream.packing.encode import encode_field
from shardstream.packing.job.key_hashes import KeyHashes
from shardstream.storage import FileVersions, RowFile, Storage, TemporaryFile

KINDS = ("images", "files", "table", "tars")
FILE_KEYS = ("{stem}", "{path}", "{path}_{index:08d}")
"""Default templates of images: the first is taken that gives each image of a dataset a key of its own."""
# Next to another name the number may not tell keys apart: "{class}{index}" gives "1" + "11" and "11" + "1".
_RUNNING = re.compile(r"[^{}]*\{index(:\d*d?)?\}[^{}]*")
Numbers = npt.NDArray[np.int64]
_PROBES = 32
_LEAST_PROBES = 4
_RECORDS_OF_A_PROBE = 16  # measuring costs at most about a sixteenth of the job
SplitNumbers = npt.NDArray[np.uint16]
"""Shape (n,): number of the split of each record."""
_DRAWS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Options for reading a source.

    Args:
        kind: One of `KINDS`; None: guessed.
        key: Template of the keys; None: the default of the kind.
        fields: For a table: field -> column.
        root: For a table: URL of the folder that its paths are relative to.
        allow: For a remote table: beginnings of URLs that it may name outside this folder.
        header: For CSV and TSV whose first line is a row: names of the columns.

    Raises:
        OptionError: If the kind is unknown.
    """

    kind: str | None = None
    key: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    root: str | None = None
    allow: Sequence[str] = ()
    header: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise OptionError(f"kind {self.kind!r} is unknown; it is one of {', '.join(KINDS)}")


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


class Source(ABC):
    """Yields the records of a dataset, the same ones in the same order each time.

    A subclass has a `name` and `iter_from`; all else has defaults.
    """

    name: str
    """Kind and location of the source, for messages and reports."""
    folders: frozenset[str] = frozenset()
    """URLs of folders whose shards are read while packing: nothing must be written there."""
    reads_remote: bool = True
    """Whether files that are not on this machine may be read: a table may name some."""
    shuffled: bool = False
    """Whether its order should be shuffled unless the user says otherwise: it is sorted by class."""
    may_name_files: bool = True
    """Whether records may name files; if not, they hold all their values."""
    is_repeatable: bool = True
    """Whether the records can be read a second time; those of a generator cannot."""
    may_repeat_keys: bool = True
    """Whether keys may be equal, so that they are compared before the dataset is published."""
    num_files: int | None = None
    """Number of loose files that the records were made of."""
    splits: tuple[str, ...] = ()
    """Names of the datasets that the records belong to; empty if all belong to one."""
    classes: Classes | None = None
    """Names of its classes in the order of their numbers; None while it numbers none (see `set_classes`)."""
    labels: Mapping[str, int] = {}
    """Name of each class -> its number."""
    number_prefix: str = ""
    """Text before keys that are running numbers because nothing else was chosen."""
    empty_folders: Sequence[str] = ()
    """Names of folders that could be of classes, but hold no image."""

    @property
    def length(self) -> int | None:
        """Number of records; None if unknown without a pass over them."""
        return None

    @property
    def fingerprint(self) -> str | None:
        """Text that changes when the records do; None if that is unknown: then a stopped pack starts again."""
        return None

    @property
    def extras(self) -> Mapping[str, str]:
        """Small files written to the folder of the manifest: name -> text; by default ``classes.json``, if there are classes."""
        return {} if self.classes is None else {CLASSES_NAME: encode_classes(self.classes)}

    @property
    def has_sizes(self) -> bool:
        """Whether records are values and files of known sizes: their bytes in a tar are known before files are read."""
        return False

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all records in a tar, if they are known without a pass over them."""
        return None

    def spaced_records(self, count: int) -> Iterator[Record]:
        """Yield a few records that are evenly spaced among ``count``, all of them: the first ones may be smaller than the others."""
        return (next(self.iter_from(number)) for number in spaced_numbers(count))

    def count(self) -> int:
        """Return the number of records, after a pass over them if `length` is unknown."""
        return sum(1 for _ in self) if self.length is None else self.length

    def __iter__(self) -> Iterator[Record]:
        """Yield the records."""
        return self.iter_from(0)

    @abstractmethod
    def iter_from(self, first: int) -> Iterator[Record]:
        """Yield the records from a number on."""

    def iter_some(self, first: int, is_wanted: Callable[[int], bool]) -> Iterator[Record]:
        """Yield the records from a number on whose numbers are wanted."""
        records = enumerate(self.iter_from(first), start=first)
        return (record for number, record in records if is_wanted(number))

    def records_at(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield the records with these numbers, in any order; see `in_any_order`."""
        return self.in_any_order().records_at(numbers)

    def in_any_order(self) -> Source:
        """Return a source of these records that has a length and quick `records_at`: by default a copy in a temporary file.

        Raises:
            StorageError: If the temporary folder is full.
        """
        return StoredRecords(self)

    def assigned(self) -> SplitNumbers:
        """Return the dataset of each record, as its number in `splits`; shape (n,)."""
        raise NotImplementedError

    def with_own_class_numbers(self) -> Self:
        """Return the source with `classes`, if they are known only after a pass over its records."""
        return self

    def with_class_numbers(self, classes: Classes, where: str) -> Self:  # noqa: ARG002
        """Return the source with these class numbers; ``where`` is their origin, for messages.

        Raises:
            OptionError: If it numbers no classes.
            SourceError: If it has a class that is not among them.
        """
        raise OptionError(
            "classes (--classes) numbers the folders of images, or the column of a table that becomes 'cls'; "
            f"the numbers in {self.name} stay as they are"
        )

    def set_classes(self, names: Sequence[str]) -> None:
        """Number the classes in the order of their names."""
        self.classes = tuple(names)
        self.labels = dict(zip(names, itertools.count()))


class SequentialSource(Source):
    """Records that are read in their order, as the rows of a table or the samples of tars.

    An iteration goes on in what an earlier one has read ahead and left, so that a process reads each record once for all its parts.

    Args:
        name: Kind and location of the source.
        key: Template of the keys.
        urls: Files that are read.
        storage: Their storage. It compares the versions of remote ones; those of local ones are in ``_versions``.
    """

    def __init__(self, name: str, key: str, urls: Iterable[str], storage: Storage) -> None:
        self.name = name
        self._storage = storage
        self._versions = FileVersions([storage.local_path(url) for url in urls])
        self._key = key
        self.may_repeat_keys = not has_numbers(key)
        self._left: list[tuple[int, Iterator[tuple[int, Any]]]] = []  # each with its next number

    def count(self) -> int:
        """Return the number of records; without `length` all are read, but none but the first is made."""
        if self.length is not None:
            return self.length
        next(iter(self), None)  # an option that does not fit is an error before anything is written
        return sum(1 for _ in self._read_from(0))

    def iter_from(self, first: int) -> Iterator[Record]:
        """Yield the records from a number on.

        Raises:
            SourceError: If the source is malformed.
            ShardError: If a tar is damaged.
            ChangedError: If a file is another one than when the source was opened.
        """
        return self.iter_some(first, lambda _: True)

    def iter_some(self, first: int, is_wanted: Callable[[int], bool]) -> Iterator[Record]:
        """Yield the records from a number on whose numbers are wanted; the others are not made."""
        items = self._items_from(first)
        for number, item in items:
            if number < first or not is_wanted(number):
                continue
            try:
                yield self._record(number, item)
            except GeneratorExit:
                self._left.append((number + 1, items))
                raise

    def _items_from(self, first: int) -> Iterator[tuple[int, Any]]:
        with suppress(IndexError):  # `pop` gives items to one of several threads
            number, items = self._left.pop()
            if self._begin(first) <= number <= first:
                return items
        return self._read_from(first)

    def _begin(self, first: int) -> int:
        """Return the number of the item where reading can begin to reach a record."""
        raise NotImplementedError

    def _read_from(self, first: int) -> Iterator[tuple[int, Any]]:
        """Read what records are made of, each with its number, from `_begin` on."""
        raise NotImplementedError

    def _record(self, number: int, item: Any) -> Record:
        """Make a record."""
        raise NotImplementedError

    def _make_key(self, **names: Any) -> str:
        """Return the key of a record from the values for its template."""
        return make_key(self._key, names, source=self.name)


class StoredRecords(Source):
    """Records in a temporary file; memory holds half a byte for each.

    Args:
        source: The records; their values are encoded, and files that they name stay where they are.

    Raises:
        StorageError: If the temporary folder is full.
    """

    def __init__(self, source: Source) -> None:
        self.name = source.name
        self._data = TemporaryFile("the rows to shuffle")
        self._rows: RowFile[Any] = RowFile(map(self._store, source))

    @property
    def length(self) -> int:
        """Number of records."""
        return len(self._rows)

    def iter_from(self, first: int) -> Iterator[Record]:
        """Yield the records from a number on."""
        return (self._load(*row) for row in self._rows.iter_from(first))

    def records_at(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield the records with these numbers."""
        return (self._load(*self._rows[number]) for number in numbers)

    def in_any_order(self) -> StoredRecords:
        """Return this source."""
        return self

    def _store(self, record: Record) -> tuple[Any, ...]:
        """Return a record as a row: key, origin, error, start of its data in the file, and its fields with URLs or lengths."""
        fields: list[tuple[Any, ...]] = []
        error, start = record.error, self._data.size
        data = bytearray()
        try:
            for name, value in record.fields.items():
                if isinstance(value, FileRef):
                    fields.append((name, *value))
                else:
                    encoded = encode_field(name, value)
                    fields.append((name, len(encoded)))
                    data += encoded
        except SampleError as unfit:
            error, fields = named(unfit, record.where), []
        else:
            self._data.append(data)
        return record.key, record.where, None if error is None else str(error), start, fields

    def _load(
        self, key: str, where: str, error: str | None, start: int, stored: list[list[Any]]
    ) -> Record:
        if error is not None:
            return Record(key, {}, where, SourceError(error))
        sizes = [0 if len(rest) > 1 else rest[0] for _, *rest in stored]
        data = self._data.read(start, start + sum(sizes)) if any(sizes) else b""
        fields: dict[str, Any] = {}
        end = 0
        for (name, *rest), size in zip(stored, sizes, strict=True):
            fields[name] = FileRef(*rest) if len(rest) > 1 else data[end : end + size]
            end += size
        return Record(key, fields, where)


class ShuffledSource(Source):
    """The records of a source in a random order, which is kept in a temporary file.

    Args:
        source: The source.
        seed: Decides the order.

    Raises:
        StorageError: If the temporary folder is full.
    """

    def __init__(self, source: Source, *, seed: int) -> None:
        self.name = source.name
        self._source = source.in_any_order()
        self._blocks = partial(shuffled_order, self._source.count(), seed=seed, purpose="order")
        self._order = RowFile(itertools.chain.from_iterable(map(np.ndarray.tolist, self._blocks())))

    @property
    def length(self) -> int:
        """Number of records."""
        return len(self._order)

    def iter_from(self, first: int) -> Iterator[Record]:
        """Yield the records from a place in the order on."""
        return self._source.records_at(self._order.iter_from(first))

    def assigned(self) -> SplitNumbers:
        """Return the dataset of each record; shape (n,)."""
        assigned = self._source.assigned()
        return np.concatenate([assigned[block] for block in self._blocks()])


def named(error: ShardStreamError, where: str) -> SourceError:
    """Return an error that names its file or row."""
    text = str(error)
    return SourceError(text) if where in text else SourceError(text, shard=where)


def fingerprint_of(kind: str, parts: Iterable[object]) -> str:
    """Return a hash that changes with any of the parts; their text counts."""
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        digest.update(b"\0" + str(part).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def has_numbers(template: str) -> bool:
    """Return whether keys are running numbers with constant text, so that they all differ.

    >>> [has_numbers(key) for key in ("a/{index:08d}", "{class}{index}", "{index:.0e}", "{{index}}")]
    [True, False, False, False]
    """
    return _RUNNING.fullmatch(template) is not None


def make_key(template: str, names: Mapping[str, Any], *, source: str) -> str:
    """Return a key; a dot would end it, so in its last part each becomes "_".

    >>> make_key("photos/{stem}", {"stem": "a.b"}, source="photos")
    'photos/a_b'

    Args:
        template: `str.format` text, e.g. ``"{index:08d}"``.
        names: What it may name.
        source: Name of the source, for messages.

    Raises:
        OptionError: If the template names something unknown.
    """
    try:
        folder, slash, last = template.format_map(names).rpartition("/")
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise OptionError(
            f"the key {template!r} cannot be filled in ({type(error).__name__}: {error}); "
            f"known here: {', '.join(f'{{{name}}}' for name in names)}",
            shard=source,
        ) from error
    return folder + slash + last.replace(".", "_")


class SamplesSource(Source):
    """Samples from Python: a list of dicts, or any other iterable.

    Args:
        samples: Mappings as `ShardWriter.write` takes them; without ``__key__`` the key is the number.
        name: Name of the source, for messages.
        fingerprint: Any text that identifies these samples in this order; a stopped pack is resumed if the text is equal. By default
            the attribute of this name of ``samples``, if it has one.
    """

    def __init__(
        self,
        samples: Iterable[Mapping[str, Any]],
        *,
        name: str = "samples",
        fingerprint: str | None = None,
    ) -> None:
        self.name = name
        self.is_repeatable = isinstance(samples, Sequence)
        self._samples = samples
        own = getattr(samples, "fingerprint", None)
        self._fingerprint = fingerprint or (own if isinstance(own, str) else None)

    @property
    def length(self) -> int | None:
        """Number of samples, if the iterable has a length."""
        samples: Any = self._samples
        return len(samples) if hasattr(samples, "__len__") else None

    @property
    def fingerprint(self) -> str | None:
        """Text that identifies the samples, if there is one."""
        return self._fingerprint

    @property
    def named_classes(self) -> tuple[str, ...] | None:
        """Names of the class numbers that the samples have, where they say so, as a `ShardDataset` does."""
        found = getattr(self._samples, "classes", None)
        return found if isinstance(found, tuple) else None

    def iter_from(self, first: int) -> Iterator[Record]:
        """Yield the records from a number on."""
        return itertools.starmap(
            self._record, itertools.islice(enumerate(self._samples), first, None)
        )

    def records_at(self, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield the records with these numbers, of a sequence (see `in_any_order`)."""
        samples: Any = self._samples
        return (self._record(number, samples[number]) for number in numbers)

    def in_any_order(self) -> Source:
        """Return this source if its samples are a sequence, else a copy in a temporary file."""
        return self if isinstance(self._samples, Sequence) else super().in_any_order()

    def _record(self, index: int, sample: Mapping[str, Any]) -> Record:
        where = f"{self.name}, sample {index}"
        key = sample.get("__key__", f"{self.number_prefix}{index:08d}")
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


def _as_it_is_now(field: str, value: object) -> object:
    """Encode a value, since its owner may fill the same buffer with the next sample; pixels are copied: processes may encode them."""
    if is_image_field(field) and (type(value) is Image.Image or isinstance(value, np.ndarray)):
        return value.copy()
    return encode_field(field, value)


def spaced_numbers(count: int) -> list[int]:
    """Return the numbers of some of ``count`` records, evenly spaced: samples often grow, or come sorted by size.

    >>> spaced_numbers(100)
    [8, 25, 41, 58, 75, 91]
    >>> [len(spaced_numbers(count)) for count in (0, 3, 10, 10_000)]
    [0, 3, 4, 32]
    """
    probes = min(count, _PROBES, max(_LEAST_PROBES, count // _RECORDS_OF_A_PROBE))
    return [(2 * number + 1) * count // (2 * probes) for number in range(probes)]


def shuffled_order(count: int, *, seed: int, purpose: str) -> Iterator[Numbers]:
    """Yield the numbers 0 to ``count`` - 1, many at a time, in an order that the seed and the purpose decide.

    Memory holds a few million numbers, a temporary file the others.

    >>> np.concatenate([*shuffled_order(5, seed=0, purpose="order")]).tolist()
    [3, 1, 4, 2, 0]

    Raises:
        StorageError: If the temporary folder is full.
    """
    # Python guarantees equal random() for equal seeds, but not equal shuffle().
    source = random.Random(f"{purpose}/{seed}")
    with closing(KeyHashes()) as draws:
        for first in range(0, count, _DRAWS):
            numbers = np.arange(first, min(first + _DRAWS, count), dtype=np.int64)
            some = np.fromiter((source.random() for _ in numbers), dtype=np.float64)
            # random() is a multiple of 2**-53: 53 bits, as the first of 64, have the same order.
            draws.add((some * 2.0**53).astype(np.uint64) << np.uint64(11), numbers)
        for _, numbers in draws.sorted_blocks():
            yield numbers
