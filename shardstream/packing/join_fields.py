"""Add fields of other sources to samples, joined by key.

`FieldJoin` describes the sources and travels with the tasks. The first process of a job reads the keys of each source and leaves them as a
sorted index next to the shards (``key_index``). A task looks up the keys of some samples at a time, reads the rows at these places, and
compares the keys that it finds there, because two keys may have one hash.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self, get_args

import numpy as np

from shardstream.errors import ChangedError, OptionError, SampleError, SourceError
from shardstream.format import Sample
from shardstream.packing.added_source import (
    AddedShards,
    AddedSource,
    AddedSpec,
    AddedUrls,
    parse_added,
)
from shardstream.packing.added_table import open_table
from shardstream.packing.job.key_hashes import Hashes, KeyHashes, Places, hash_keys
from shardstream.packing.key_index import (
    KeyIndex,
    has_key_index,
    key_index_name,
    open_key_index,
    write_key_index,
)
from shardstream.packing.opened_shards import open_shards
from shardstream.packing.sample_steps import batched
from shardstream.packing.sources.detection import find_tables, guess_kind
from shardstream.storage import OutputFolder, Storage, join_url

Missing = Literal["error", "keep", "drop"]
"""What happens to a sample whose key, or whose field, is missing in a source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldJoin:
    """The sources of added fields; picklable.

    Args:
        specs: The sources, in order.
        missing: What happens to samples without their key.
        kept: Fields of the samples that are kept; None keeps all.
        options: ``storage_options`` of the sources.
        writing: ``storage_options`` of the folder with the indexes of keys.
        identities: Identity of each source when the job was planned.
    """

    specs: tuple[AddedSpec, ...]
    missing: Missing
    kept: frozenset[str] | None
    options: Mapping[str, Any] | None
    writing: Mapping[str, Any] | None
    identities: tuple[str, ...] = ()

    @classmethod
    def checked(
        cls,
        add: AddedUrls | None,
        missing: Missing,
        kept: frozenset[str] | None,
        options: Mapping[str, Any] | None,
        writing: Mapping[str, Any] | None,
    ) -> Self:
        """Return the join that a user describes; one without sources adds nothing.

        Raises:
            OptionError: If an argument is wrong.
        """
        if missing not in get_args(Missing):
            raise OptionError(f"missing is one of {', '.join(get_args(Missing))}, not {missing!r}")
        specs = parse_added(add)
        if not specs and missing != "error":
            raise OptionError("missing is used with add only; name a source, or leave it out")
        return cls(specs=specs, missing=missing, kept=kept, options=options, writing=writing)

    @property
    def choices(self) -> dict[str, Any]:
        """Options that decide the result, as JSON values; none without sources."""
        if not self.specs:
            return {}
        fields = [None if spec.fields is None else dict(spec.fields) for spec in self.specs]
        return {"add": fields, "missing": self.missing}

    def open(self) -> OpenedJoin:
        """Open all sources.

        Raises:
            OptionError: If a source or field is wrong, or two sources add the same field.
            ChangedError: If a source has changed since the job was planned.
            StorageError: If one cannot be reached.
        """
        with ExitStack() as stack:
            sources = []
            for spec in self.specs:
                sources.append(_open_source(spec, self.options))
                stack.callback(sources[-1].close)
            for source, before in zip(sources, self.identities, strict=bool(self.identities)):
                if source.identity != before:
                    raise ChangedError(
                        "the source of the added fields has changed since the job began; start the job again in another folder, or with "
                        "overwrite=True (--overwrite)",
                        shard=source.url,
                    )
            _refuse_common_fields(sources)
            stack.pop_all()
        return OpenedJoin(self, sources)


class OpenedJoin:
    """The sources of a join, opened in one process.

    Args:
        join: The description.
        sources: Its sources.
    """

    def __init__(self, join: FieldJoin, sources: Sequence[AddedSource]) -> None:
        self.sources = sources
        self._join = join

    @property
    def described(self) -> FieldJoin:
        """The description, with the identities of the sources."""
        return replace(self._join, identities=self.identities)

    @property
    def fields(self) -> frozenset[str]:
        """Fields that are added."""
        return frozenset[str]().union(*(source.fields for source in self.sources))

    @property
    def identities(self) -> tuple[str, ...]:
        """Identity of each source."""
        return tuple(source.identity for source in self.sources)

    @property
    def mean_bytes(self) -> int:
        """Bytes that are added to a sample in a tar; a mean."""
        return round(sum(source.mean_bytes for source in self.sources))

    def close(self) -> None:
        """Close the sources."""
        for source in self.sources:
            source.close()

    def write_indexes(self, folder: OutputFolder, job: str) -> None:
        """Leave the keys of each source next to the shards, unless another process of the job has done so.

        Raises:
            SourceError: If a key comes twice in a source.
            StorageError: If the keys cannot be read or written.
        """
        storage = Storage(self._join.writing).uncached()
        for number, source in enumerate(self.sources):
            name = key_index_name(number)
            if has_key_index(folder, storage, name, job):
                continue
            with KeyHashes() as keys:
                for some in source.iter_keys():
                    first = keys.count
                    places = np.arange(first, first + len(some), dtype=np.int64)
                    keys.add(hash_keys(some), places)
                source.check_unchanged()
                write_key_index(folder, name, job, keys, partial(_refuse_repeats, source))

    def open_joiner(self, folder_url: str, job: str) -> Joiner:
        """Open the indexes of keys (see `write_indexes`).

        Raises:
            StorageError: If one is missing or damaged.
        """
        storage = Storage(self._join.writing).uncached()
        indexes = [
            open_key_index(join_url(folder_url, key_index_name(number)), storage, job)
            for number in range(len(self.sources))
        ]
        return Joiner(self._join, self.sources, indexes)


class Joiner:
    """Adds the fields to samples, in one process.

    Args:
        join: The description.
        sources: Its sources.
        indexes: The places of their keys.
    """

    def __init__(
        self, join: FieldJoin, sources: Sequence[AddedSource], indexes: Sequence[KeyIndex]
    ) -> None:
        self._join, self._sources, self._indexes = join, sources, indexes

    def apply(
        self, samples: Iterator[Sample], batch_size: int, matched: list[int]
    ) -> Generator[Sample]:
        """Yield samples with the added fields.

        The rows of the next samples are read while those before are used.

        Args:
            samples: The samples.
            batch_size: Samples whose rows are read together.
            matched: Number of samples whose key each source has; counted up.

        Raises:
            SampleError: If a key or field is missing, or a sample has a field already.
        """
        if not self._sources:
            yield from samples
            return
        with ThreadPoolExecutor(1, thread_name_prefix="shardstream-join") as pool:
            before = None
            for batch in batched(samples, batch_size):
                upcoming = pool.submit(self._join_batch, batch, matched)
                if before is not None:
                    yield from before.result()
                before = upcoming
            if before is not None:
                yield from before.result()

    def _join_batch(self, batch: list[Sample], matched: list[int]) -> list[Sample]:
        joined: list[Sample | None] = [*batch]
        keys = [str(sample["__key__"]) for sample in batch]
        hashes = hash_keys(keys)
        for number, source in enumerate(self._sources):
            rows = _find_rows(source, self._indexes[number], keys, hashes)
            for at, row in enumerate(rows):
                matched[number] += row is not None
                sample = joined[at]
                if sample is not None:
                    joined[at] = self._add(sample, row, source)
        return [sample for sample in joined if sample is not None]

    def _add(
        self, sample: Sample, row: Mapping[str, bytes] | None, source: AddedSource
    ) -> Sample | None:
        """Return a sample with the fields of its row; None drops it."""
        if row is None and self._join.missing == "error":
            raise SampleError(
                f"the key is not in {source.url}, whose fields are added",
                remedy="pass missing='keep' or 'drop' (--missing) if some samples have no such fields",
                shard=str(sample["__url__"]),
                key=str(sample["__key__"]),
            )
        absent = sorted(source.fields - row.keys()) if row is not None and source.is_strict else []
        if absent and self._join.missing == "error":
            raise SampleError(
                f"its sample or row in {source.url} has no such field",
                remedy="pass missing='keep' or 'drop' (--missing) if some samples lack it",
                shard=str(sample["__url__"]),
                key=str(sample["__key__"]),
                field=absent[0],
            )
        if self._join.missing == "drop" and (row is None or absent):
            return None
        kept = self._join.kept
        if kept is not None:  # fields that are replaced; also if this sample gets no new ones
            replaced = source.fields - kept
            sample = {name: value for name, value in sample.items() if name not in replaced}
        for field in row or ():
            if field in sample:
                raise SampleError(
                    f"the sample has this field already, and it is added from {source.url}",
                    remedy=f"rename the added one, e.g. {{'new.{field}': {field!r}}}, or leave the field out of fields= (--fields) to "
                    "replace it",
                    shard=str(sample["__url__"]),
                    key=str(sample["__key__"]),
                    field=field,
                )
        return {**sample, **(row or {})}


def _find_rows(
    source: AddedSource, index: KeyIndex, keys: Sequence[str], hashes: Hashes
) -> list[Mapping[str, bytes] | None]:
    """Return the fields of each key; None where the source does not have it."""
    rows: list[Mapping[str, bytes] | None] = [None] * len(keys)
    starts, ends = index.find(hashes)
    open_ = np.flatnonzero(starts < ends)
    while open_.size:  # again for keys whose hash another key has
        found = source.read(index.places[starts[open_]])
        is_other = np.zeros(len(open_), dtype=bool)
        for number, (place, (key, fields)) in enumerate(zip(open_.tolist(), found, strict=True)):
            if key == keys[place]:
                rows[place] = fields
            else:
                is_other[number] = True
        starts[open_] += 1
        open_ = open_[is_other & (starts[open_] < ends[open_])]
    return rows


def _refuse_repeats(source: AddedSource, places: Places) -> None:
    """Compare the keys at places whose hashes are equal.

    Raises:
        SourceError: If a key comes twice.
    """
    seen: dict[str, int] = {}
    for place in places.tolist():
        ((key, _),) = source.read(np.array([place]))
        if key in seen:
            raise SourceError(
                f"the key {key!r} comes twice, in {source.where(seen[key])} and {source.where(place)}; fields are added by key, so "
                "remove one of them",
                shard=source.url,
            )
        seen[key] = place


def _open_source(spec: AddedSpec, options: Mapping[str, Any] | None) -> AddedSource:
    storage = Storage(options)
    kind = guess_kind(spec.url, storage)
    if kind == "table":
        return open_table(spec, find_tables(spec.url, storage), storage)
    if kind == "tars":
        return AddedShards(spec, open_shards(spec.url, options))
    raise OptionError(
        "fields are added from shards or from tables; pack these files into shards first",
        shard=spec.url,
    )


def _refuse_common_fields(sources: Sequence[AddedSource]) -> None:
    taken: dict[str, str] = {}
    for source in sources:
        for field in sorted(source.fields):
            if field in taken:
                raise OptionError(
                    f"the field {field!r} is added from {taken[field]}, too; name the fields of one of them: add={{URL: [...]}} (--add URL:...)",
                    shard=source.url,
                )
            taken[field] = source.url
