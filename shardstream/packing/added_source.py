"""Sources of fields that `reshard` adds by key: their description, and shards as such a source."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np

from shardstream.errors import IndexMismatchError, OptionError, plural, redact
from shardstream.fetch import open_batch_fetcher
from shardstream.format import (
    ForwardReader,
    TarDiagnostics,
    is_meta_name,
    iter_whole,
    member_bytes,
    scan_members,
)
from shardstream.packing.job.key_hashes import Places
from shardstream.packing.opened_shards import OpenedShards
from shardstream.storage import RangeStream, absolute_url, parent_url

KEY = "__key__"
AddedUrls: TypeAlias = "str | os.PathLike[str] | Mapping[str, Collection[str] | None]"
"""URL of each source -> its fields: names, or field -> name there; None for all."""

_SCAN_READ_BYTES = 1 << 20
_SCANS = 4  # shards whose keys are read at a time; each takes 150 bytes for each of its samples
_PROBES = 64  # samples whose sizes are measured


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedSpec:
    """One source of added fields, as the user describes it.

    Args:
        url: URL of shards or tables, absolute.
        fields: Field -> its name there, or the column; None for all.
    """

    url: str
    fields: Mapping[str, str] | None


class AddedSource(Protocol):
    """Samples that are found by key, in a fixed order."""

    url: str
    """Its URL without secrets, for messages."""
    identity: str
    """Changes with its bytes."""
    fields: frozenset[str]
    """Fields that it adds."""
    folders: frozenset[str]
    """URLs of the folders of its shards: nothing must be written there."""
    is_strict: bool
    """Whether each sample must have all fields."""

    @property
    def mean_bytes(self) -> float:
        """Mean size of the fields of a sample in a tar; estimated."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def iter_keys(self) -> Iterator[list[str]]:
        """Yield all keys, in order."""

    def read(self, places: Places) -> list[tuple[str, dict[str, bytes]]]:
        """Return key and fields of some samples, in the order given; a field that a sample lacks is left out."""

    def where(self, place: int) -> str:
        """Return the file of a sample, or table and row, for messages."""

    def check_unchanged(self) -> None:
        """Raise `ChangedError` if the source has been replaced since it was opened."""

    def close(self) -> None:
        """Release threads and memory."""


def parse_added(add: AddedUrls | None) -> tuple[AddedSpec, ...]:
    """Return the sources that a user describes.

    >>> parse_added({"/d/captions": ["txt"]})
    (AddedSpec(url='/d/captions', fields={'txt': 'txt'}),)

    Raises:
        OptionError: If there is none, or a field is named twice or cannot be one.
    """
    if add is None:
        return ()
    named: Mapping[Any, Collection[str] | None] = add if isinstance(add, Mapping) else {add: None}
    specs = tuple(
        AddedSpec(url=absolute_url(url), fields=_parse_fields(wanted))
        for url, wanted in named.items()
    )
    if not specs:
        raise OptionError("add names no source; leave it out, or give {URL: fields}")
    taken: dict[str, str] = {}
    for spec in specs:
        for field in spec.fields or ():
            if field == KEY:
                continue
            if field != field.lower() or not field or "/" in field or is_meta_name(field):
                raise OptionError(
                    f"{field!r} is not a field name; use lower case, e.g. 'txt'", shard=spec.url
                )
            if field in taken:
                raise OptionError(
                    f"the field {field!r} is added from {taken[field]}, too; name the field differently: {{'NEW.{field}': {field!r}}}",
                    shard=spec.url,
                )
            taken[field] = spec.url
    return specs


def _parse_fields(wanted: Collection[str] | None) -> dict[str, str] | None:
    if wanted is None:
        return None
    if isinstance(wanted, str):
        wanted = [wanted]
    fields = dict(wanted) if isinstance(wanted, Mapping) else {name: name for name in wanted}
    return fields or None


class AddedShards:
    """Samples of shards with an index.

    Args:
        spec: The source.
        opened: Its shards.

    Raises:
        OptionError: If a field is unknown.
    """

    def __init__(self, spec: AddedSpec, opened: OpenedShards) -> None:
        self.url, self.identity = redact(spec.url), opened.identity
        self._catalog = opened.catalog
        known = opened.located.fields
        if spec.fields is None and known is None:
            raise OptionError(
                "the manifest does not list the fields; name those to add: add={URL: ['txt']} (--add URL:txt)",
                shard=spec.url,
            )
        self._names = {name: name for name in known or ()} if spec.fields is None else spec.fields
        self.is_strict = spec.fields is not None
        self.fields = frozenset(self._names)
        self.folders = frozenset(parent_url(shard.url) for shard in self._catalog.shards)
        unknown = sorted(set(self._names.values()) - set(known or self._names.values()))
        if unknown or KEY in self._names:
            raise OptionError(
                f"no sample has the field {', '.join(unknown) or KEY}; the fields are {', '.join(known or ())}",
                shard=spec.url,
            )
        self._fetcher = open_batch_fetcher(self._catalog)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._catalog)

    @cached_property
    def mean_bytes(self) -> float:
        """Mean size of the fields of a sample; measured on evenly spaced samples."""
        numbers = np.unique(np.linspace(0, len(self) - 1, _PROBES).astype(np.int64))
        return mean_tar_bytes(fields for _, fields in self.read(numbers))

    def iter_keys(self) -> Iterator[list[str]]:
        """Yield the keys of each shard; reads the shards once, several at a time.

        Raises:
            IndexMismatchError: If a shard has another number of samples than its index.
        """
        shards = range(self._catalog.num_shards)
        with ThreadPoolExecutor(_SCANS, thread_name_prefix="shardstream-keys") as pool:
            for first in shards[::_SCANS]:  # not all at once: results would wait in memory
                yield from pool.map(self._keys_of, shards[first : first + _SCANS])

    def _keys_of(self, shard: int) -> list[str]:
        info, storage = self._catalog.shards[shard], self._catalog.storage
        size = info.filesize or storage.info(info.url).size
        stream = RangeStream(storage, info.url, size, min_read_bytes=_SCAN_READ_BYTES)
        read = ForwardReader(stream, chunk_bytes=_SCAN_READ_BYTES)
        keys = scan_members(
            iter_whole(read, end=size, shard=info.url, diagnostics=TarDiagnostics()), shard=info.url
        ).keys
        if len(keys) != info.nsamples:
            raise IndexMismatchError(
                f"{plural(len(keys), 'sample')} in the tar, {info.nsamples} in its index",
                remedy="run 'shardstream index' again",
                shard=info.url,
            )
        return keys

    def read(self, places: Places) -> list[tuple[str, dict[str, bytes]]]:
        """Return key and fields of some samples (see `AddedSource.read`).

        Raises:
            ShardError: If one is damaged.
        """
        found = []
        for sample in self._fetcher.samples(places) if len(places) else ():
            if isinstance(sample, Exception):
                raise sample
            fields = {field: sample[name] for field, name in self._names.items() if name in sample}
            found.append((str(sample[KEY]), fields))
        return found

    def where(self, place: int) -> str:
        """Return the URL of the shard of a sample."""
        return self._catalog.url_of(self._catalog.shards_of(np.array([place]))[0])

    def check_unchanged(self) -> None:
        """Check that the manifests still list these shards."""
        self._catalog.check_manifests()

    def close(self) -> None:
        """Release threads and maps."""
        self._fetcher.close()


def mean_tar_bytes(samples: Iterable[Mapping[str, bytes]]) -> float:
    """Return the mean size that fields take in a tar, with headers; names of fields decide nothing here."""
    sizes = [sum(member_bytes(name, len(data)) for name, data in one.items()) for one in samples]
    return sum(sizes) / max(1, len(sizes))
