"""Read the samples that the page shows: by number and range reads, or the first ones of data without an index."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardstream.catalog import ShardCatalog, deleted_samples, lacks_index, stream_samples
from shardstream.catalog import open_samples as open_by_number
from shardstream.errors import OptionError, ShardStreamError
from shardstream.fetch import coalesce
from shardstream.format import Buffer, Group, iter_groups, iter_members, read_sample
from shardstream.samples import (
    Numbers,
    Samples,
    leaves_of,
    numbers_left,
    parts_in_rows,
    samples_in_rows,
)
from shardstream.storage import LocatedShards, Storage, Urls, is_compressed, locate_shards

FIELD_LIMIT_BYTES = 256 << 20
"""Largest field that is read to be shown."""
_THREADS = 24
_WHOLE_BYTES = 16 << 20  # of a page that is read whole; of larger samples only the headers are
_HEAD_BYTES = 4096  # read at once from a header on, so that a small body comes with it
_KEPT_BYTES = 256 << 20
_KEPT_SAMPLES = 20_000
_STREAMED, _STREAMED_BYTES = 200, 64 << 20
# A person waits: a store that does not answer is reported after seconds, not after a minute.
_TIMEOUTS = {"read_timeout_s": 10, "retry_timeout_s": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a sample is stored.

    Args:
        number: Number of the sample in the dataset.
        url: URL of its shard.
        start: Offset of its first header; None in a compressed shard.
        end: Offset after its last member.
    """

    number: int
    url: str
    start: int | None = None
    end: int | None = None

    @property
    def size(self) -> int | None:
        """Bytes of the sample in its shard, with headers."""
        return None if self.start is None or self.end is None else self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSample:
    """A sample whose headers were read.

    Args:
        place: Where it is stored.
        key: Its ``__key__``.
        fields: Field -> offset and size of its bytes in the shard.
        bodies: Field -> bytes, of the fields that were read along.
        shards: Field -> the shard with its bytes, and the catalog that has it; of fields that were replaced.
    """

    place: Place
    key: str
    fields: Mapping[str, tuple[int, int]]
    bodies: Mapping[str, Buffer] = field(repr=False)
    shards: Mapping[str, tuple[ShardCatalog, int]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenSample:
    """A sample that cannot be read.

    Args:
        place: Where it should be.
        message: What is wrong with it.
    """

    place: Place
    message: str


Shown = FoundSample | BrokenSample


class ViewedSamples(ABC):
    """The samples of a dataset, as the page asks for them; thread-safe.

    Args:
        located: The shards.
        storage: Their storage.
    """

    catalog: ShardCatalog | None = None
    """The stored samples by number; None if they can only be read in order."""
    samples: Samples | None = None
    """Those that readers see, by number; numbers on the page are of these."""
    hint = ""
    """What the user should know about this dataset."""

    def __init__(self, located: LocatedShards, storage: Storage) -> None:
        self.located, self.storage = located, storage

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples that can be shown."""

    @abstractmethod
    def find(self, numbers: Sequence[int]) -> list[Shown]:
        """Return samples by number.

        Raises:
            ShardStreamError: If the store cannot be read, or the dataset was replaced.
        """

    @abstractmethod
    def read_part(self, sample: FoundSample, name: str, start: int, end: int) -> bytes:
        """Return the bytes ``start`` to ``end`` of a field."""

    def read_field(self, sample: FoundSample, name: str) -> bytes:
        """Return the bytes of a field.

        Raises:
            OptionError: If there is no such field, or it is over `FIELD_LIMIT_BYTES`.
            ShardStreamError: If it cannot be read.
        """
        if name not in sample.fields:
            raise OptionError(
                f"the sample has no field {name!r}; it has {', '.join(sample.fields)}"
            )
        size = sample.fields[name][1]
        if size > FIELD_LIMIT_BYTES:
            raise OptionError(
                f"the field has {size:,} bytes, the viewer reads up to {FIELD_LIMIT_BYTES:,}; "
                "extract it with 'shardstream cat --field'"
            )
        return self.read_part(sample, name, 0, size)

    def number_at(self, url: str, offset: int) -> int | None:  # noqa: ARG002
        """Return the number of the sample at an offset of a shard; None if unknown."""
        return None

    def numbers_of(self, samples: Samples, numbers: Numbers) -> Numbers:  # noqa: ARG002
        """Return the numbers here of samples of another dataset, -1 for those that are not here; shape (n,)."""
        return np.full_like(numbers, -1)


class IndexedSamples(ViewedSamples):
    """Samples of shards with an index, or of local tars, by range reads.

    Args:
        located: The shards.
        storage: Their storage.
        samples: Their samples, if they are open.
    """

    def __init__(
        self, located: LocatedShards, storage: Storage, samples: Samples | None = None
    ) -> None:
        super().__init__(located, storage)
        self.samples: Samples = open_by_number(located, storage) if samples is None else samples
        stored, *others = leaves_of(self.samples)
        assert isinstance(stored, ShardCatalog)  # noqa: S101  (of shards)
        self.catalog: ShardCatalog = stored
        self._replaced = {one: IndexedSamples(located, storage, one) for one in others}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-view")
        self._kept: OrderedDict[int, FoundSample] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.samples)

    def find(self, numbers: Sequence[int]) -> list[Shown]:
        """Return samples by number: neighbours with one request, of large samples the headers only."""
        found: dict[int, Shown] = {}
        for part in self.samples.find_stored(np.array(numbers, dtype=np.int64)):
            places, theirs = part.places.tolist(), part.numbers.tolist()
            if not part.is_joined:
                found |= zip(places, self._find(theirs), strict=True)
                continue
            others = self._replaced[part.samples]
            for place, one in zip(places, others.find(theirs), strict=True):
                found[place] = _with_fields(found[place], one, part.fields or (), others.catalog)
        return [
            replace(found[place], place=replace(found[place].place, number=number))
            for place, number in enumerate(numbers)
        ]

    def numbers_here(self, whole: Numbers) -> Numbers:
        """Return the numbers of samples of the catalog, -1 for those that are deleted; shape (n,)."""
        return numbers_left(whole, self._deleted)

    def _find(self, numbers: Sequence[int]) -> list[Shown]:
        with self._lock:
            found: dict[int, Shown] = {n: self._kept[n] for n in numbers if n in self._kept}
        if self.catalog.is_local:  # what is kept may be of a shard that was overwritten
            self.catalog.check_unchanged(self.catalog.shards_of(np.array(numbers, dtype=np.int64)))
        missing = np.array([n for n in dict.fromkeys(numbers) if n not in found], dtype=np.int64)
        if len(missing):
            extents = self.catalog.extents(missing)
            total = int((extents.ends - extents.starts).sum())
            read = self._read_whole if total <= _WHOLE_BYTES else self._read_headers
            for one in read(missing):
                found[one.place.number] = one
                if isinstance(one, FoundSample):
                    self._keep(one)
        return [found[number] for number in numbers]

    def read_part(self, sample: FoundSample, name: str, start: int, end: int) -> bytes:
        """Return the bytes ``start`` to ``end`` of a field, by one range read if they were not read along."""
        kept = sample.bodies.get(name)
        if kept is not None:
            return bytes(kept[start:end])
        offset = sample.fields[name][0]
        if name in sample.shards:
            catalog, shard = sample.shards[name]
        else:
            catalog, shard = self.catalog, _shard_of(self.samples, sample)
        return bytes(catalog.fetch(shard, offset + start, offset + end))

    def number_at(self, url: str, offset: int) -> int | None:
        """Return the number of the sample at an offset of a shard; None if there is no such shard."""
        shard = self._shard_of.get(self._identity(url, self.storage))
        if shard is None:
            return None
        offsets = self.catalog.offsets(shard)
        within = int(np.searchsorted(offsets, offset, "right")) - 1
        if not 0 <= within < len(offsets) - 1:
            return None
        whole = self.catalog.first_samples([shard]) + within
        number = int(self.numbers_here(whole)[0])
        return None if number < 0 else number

    def numbers_of(self, samples: Samples, numbers: Numbers) -> Numbers:
        """Return the numbers here of samples of another dataset that are stored in these shards, -1 for others; shape (n,).

        Of rows those of the samples in them, one row after the other, so there may be more.

        Args:
            samples: The other dataset: a view of this one, or one that is opened from the same shards.
            numbers: Numbers of its samples, or of copies of them.
        """
        numbers = parts_in_rows(samples, numbers)[1]
        whole = np.full_like(numbers, -1)
        for one in samples_in_rows(samples).find_stored(numbers):
            if not one.is_joined and isinstance(one.samples, ShardCatalog):
                whole[one.places] = self._numbers_in_catalog(one.samples, one.numbers)
        return np.where(whole < 0, -1, self.numbers_here(whole.clip(0)))

    def _numbers_in_catalog(self, other: ShardCatalog, numbers: Numbers) -> Numbers:
        """Return the numbers in the catalog of samples of another one, -1 for those of other shards; shape (n,)."""
        numbers = numbers % len(other)
        if other is self.catalog:
            return numbers
        shards, of_shard = np.unique(other.find_shards(numbers), return_inverse=True)
        urls = [self._identity(other.url_of(one), other.storage) for one in shards.tolist()]
        here = np.array([self._shard_of.get(url, -1) for url in urls], np.int64)
        firsts = other.first_samples(shards.tolist())
        moved = self.catalog.first_samples(here.clip(0).tolist()) - firsts
        return np.where(here[of_shard] < 0, -1, numbers + moved[of_shard])

    @cached_property
    def _deleted(self) -> Numbers:
        return deleted_samples(self.located, self.catalog)

    @cached_property
    def _shard_of(self) -> dict[str, int]:
        urls = (shard.url for shard in self.catalog.shards)
        return {self._identity(url, self.storage): number for number, url in enumerate(urls)}

    @staticmethod
    def _identity(url: str, storage: Storage) -> str:
        """Return the same text for all names of a local file."""
        path = storage.local_path(url)
        return url if path is None else os.path.realpath(path)

    def _read_whole(self, numbers: Numbers) -> Iterator[Shown]:
        """Read all bytes of samples; neighbours together."""
        extents = self.catalog.extents(numbers)
        spans = coalesce(extents, self.catalog.max_read_ratio)
        data = self._pool.map(
            lambda span: self.catalog.fetch(span.shard, span.start, span.end), spans
        )
        for span, buffer in zip(spans, data, strict=True):
            url = self.catalog.url_of(span.shard)
            view = memoryview(buffer)
            for at in span.places.tolist():
                start, end = int(extents.starts[at]), int(extents.ends[at])
                part = view[start - span.start : end - span.start]
                place = Place(number=int(numbers[at]), url=url, start=start, end=end)
                yield _parse(part, place)

    def _read_headers(self, numbers: Numbers) -> Iterator[Shown]:
        """Read the headers of large samples, and small bodies with them; several samples at a time."""
        extents = self.catalog.extents(numbers)
        rows = zip(numbers.tolist(), *(column.tolist() for column in extents), strict=True)
        return self._pool.map(lambda row: self._walk(*row), rows)

    def _walk(self, number: int, shard: int, start: int, end: int) -> Shown:
        place = Place(number=number, url=self.catalog.url_of(shard), start=start, end=end)
        pieces: dict[int, Buffer] = {}

        def read(at: int, size: int) -> bytes:
            for begin, piece in pieces.items():
                if begin <= at and at + size <= begin + len(piece):
                    return bytes(piece[at - begin : at - begin + size])
            stop = min(end, at + max(size, _HEAD_BYTES))
            pieces[at] = self.catalog.fetch(shard, at, stop)
            return bytes(pieces[at][:size])

        try:
            groups = list(iter_groups(iter_members(read, start=start, end=end), shard=place.url))
        except ShardStreamError as error:
            if error.offset is None:  # not about these bytes, but about the store
                raise
            return BrokenSample(place=place, message=str(error))
        if len(groups) != 1:
            message = f"the index places one sample here, but {len(groups)} are in these bytes; run 'shardstream index' again"
            return BrokenSample(place=place, message=message)
        bodies = {
            name: piece[at - begin : at - begin + size]
            for name, (at, size) in groups[0].fields.items()
            for begin, piece in pieces.items()
            if begin <= at and at + size <= begin + len(piece)
        }
        return FoundSample(place=place, key=groups[0].key, fields=groups[0].fields, bodies=bodies)

    def _keep(self, one: FoundSample) -> None:
        with self._lock:
            if one.place.number in self._kept:
                return
            self._kept[one.place.number] = one
            self._kept_bytes += _size(one)
            while self._kept_bytes > _KEPT_BYTES or len(self._kept) > _KEPT_SAMPLES:
                self._kept_bytes -= _size(self._kept.popitem(last=False)[1])


class StreamedSamples(ViewedSamples):
    """The first samples of data without an index, read from start to end when they are opened.

    Args:
        located: The shards.
        storage: Their storage.
        unindexed: The shard that lacks an index.
    """

    def __init__(self, located: LocatedShards, storage: Storage, unindexed: str) -> None:
        super().__init__(located, storage)
        self._samples = list(_first_samples(located, storage))
        reason = "compressed tars" if is_compressed(unindexed) else "remote tars without an index"
        remedy = (
            "repack them with 'shardstream reshard'"
            if is_compressed(unindexed)
            else "run 'shardstream index' on the folder"
        )
        self.hint = (
            f"These are {reason}, which can only be read from start to end: the first {len(self._samples)} samples are shown. "
            f"To see all, {remedy}."
        )

    def __len__(self) -> int:
        return len(self._samples)

    def find(self, numbers: Sequence[int]) -> list[Shown]:
        """Return samples by number."""
        return [self._samples[number] for number in numbers]

    def read_part(self, sample: FoundSample, name: str, start: int, end: int) -> bytes:
        """Return the bytes ``start`` to ``end`` of a field."""
        return bytes(sample.bodies[name][start:end])


def open_samples(
    urls: Urls,
    storage_options: Mapping[str, Any] | None = None,
    version: int | str | None = None,
) -> ViewedSamples:
    """Open a dataset to look at it.

    Args:
        urls: A folder, a tar, a pattern, an ``index.json`` or a list.
        storage_options: ``storage_options`` of fsspec.
        version: Number or tag of a version of the dataset; by default the current one.

    Raises:
        UnfinishedError: If the dataset is being written, or its writer was stopped.
        StorageError: If nothing is found, or the store cannot be reached.
        ManifestError: If a manifest is invalid.
        ShardError: If a local tar without an index is damaged.
    """
    storage = Storage(_TIMEOUTS | dict(storage_options or {}))
    located = locate_shards(urls, storage, version)
    unindexed = lacks_index(located, storage)
    if unindexed is None:
        return IndexedSamples(located, storage)
    return StreamedSamples(located, storage, unindexed)


def _shard_of(samples: Samples, one: Shown) -> int:
    return int(samples.find_shards(np.array([one.place.number]))[0])


def _with_fields(one: Shown, other: Shown, names: Collection[str], catalog: ShardCatalog) -> Shown:
    """Return a sample with fields of another one, which replace its own, as readers join them."""
    if isinstance(one, BrokenSample):
        return one
    if isinstance(other, BrokenSample):
        return BrokenSample(place=one.place, message=f"its replaced fields: {other.message}")
    if other.key != one.key:
        message = f"its replaced fields are those of {other.key!r}: they are not in the same order"
        return BrokenSample(place=one.place, message=message)
    new = {name: other.fields[name] for name in names if name in other.fields}
    kept = {name: body for name, body in one.bodies.items() if name not in new}
    shard = catalog, _shard_of(catalog, other)
    return replace(
        one,
        fields={**one.fields, **new},
        bodies=kept | {name: body for name, body in other.bodies.items() if name in new},
        shards={**one.shards, **dict.fromkeys(new, shard)},
    )


def _parse(data: memoryview, place: Place) -> Shown:
    """Parse the bytes of one sample."""
    start, end = place.start or 0, place.end or 0
    try:
        members = iter_members(
            lambda at, size: bytes(data[at - start : at - start + size]), start=start, end=end
        )
        groups: list[Group] = list(iter_groups(members, shard=place.url))
        if len(groups) != 1:  # raises the error that a dataset would raise
            read_sample(data, start, start, end, place.url)
    except ShardStreamError as error:
        return BrokenSample(place=place, message=str(error))
    bodies = {
        name: data[at - start : at - start + size] for name, (at, size) in groups[0].fields.items()
    }
    return FoundSample(place=place, key=groups[0].key, fields=groups[0].fields, bodies=bodies)


def _first_samples(located: LocatedShards, storage: Storage) -> Iterator[Shown]:
    """Yield the first samples of shards in their order; at a damaged place the last one is broken."""
    number = size = 0
    for shard in located.shards:
        try:
            with closing(stream_samples(shard.url, storage)) as samples:
                for group, sample in samples:
                    found = _streamed(number, group, sample, shard.url)
                    yield found
                    number, size = number + 1, size + _size(found)
                    if number == _STREAMED or size > _STREAMED_BYTES:
                        return
        except ShardStreamError as error:
            if number == 0 and error.offset is None:
                raise
            yield BrokenSample(place=Place(number=number, url=shard.url), message=str(error))
            number += 1


def _streamed(number: int, group: Group, sample: Mapping[str, Any], url: str) -> FoundSample:
    offsets = {} if is_compressed(url) else {"start": group.start, "end": group.end}
    return FoundSample(
        place=Place(number=number, url=url, **offsets),
        key=group.key,
        fields=group.fields,
        bodies={name: sample[name] for name in group.fields},
    )


def _size(one: FoundSample) -> int:
    return sum(map(len, one.bodies.values()))
