"""Replace fields of samples: the new ones go to shards of their own, and the old shards are not written again."""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from shardstream.catalog import open_samples, read_classes
from shardstream.errors import ChangedError, OptionError, SampleError, get_logger, plural, redact
from shardstream.format import (
    FIRST_VERSION,
    KEY_COLUMN,
    MANIFEST_NAME,
    ReplacedFields,
    columns_in_file,
    count_fields,
    import_parquet,
    mask_fields,
)
from shardstream.packing.encode import MASK_ALONE, encode_field
from shardstream.packing.sample_range import read_rows
from shardstream.packing.shards.part_writer import check_class
from shardstream.packing.shards.shard_writer import DEFAULT_MAX_BYTES, ShardWriter
from shardstream.packing.sources.joined_table import open_table_part
from shardstream.packing.sources.tables import is_table
from shardstream.samples import Numbers, Samples, match_keys, open_part
from shardstream.storage import (
    LocatedShards,
    Storage,
    change_folder,
    encode_numbers,
    join_url,
    locate_shards,
    publish_bytes,
)
from shardstream.versions import AnyManifest, dataset_folder, next_version, publish_version

AddedUrls: TypeAlias = "str | os.PathLike[str] | Mapping[str, Collection[str] | None]"
"""URL of shards or of a table -> its fields: names, or field -> name there; None for all."""
_log = get_logger(__name__)


def replace_fields(
    url: str | os.PathLike[str],
    fields: Mapping[str, Mapping[str, Any] | Iterable[Any]] | None = None,
    *,
    add: AddedUrls | None = None,
    version: int | None = None,
    max_bytes: int | str = DEFAULT_MAX_BYTES,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Replace fields of samples, or add them, as a new version; return the number of samples that get them.

    The new fields are written to shards in a folder ``fields-…`` of the dataset, with the keys of their samples; readers join them by position and
    compare the keys. The shards that are there stay as they are, so earlier versions have the old fields.

        ss.replace_fields("s3://bucket/train/", {"txt": {"0001": "a cat", "0007": "a dog"}})
        ss.replace_fields("s3://bucket/train/", add={"captions.parquet": {"txt": "caption"}})

    Args:
        url: Folder of the dataset.
        fields: Field -> key -> value, for all samples or some, which leaves the others as they are; or field -> one value for each sample of the
            current version, in its order: pass ``version``, too. Values are encoded as by `ShardWriter`.
        add: ``{URL: fields}`` of shards or a table, as in `join`; they need the keys of all samples or some.
        version: The version in whose order the values are: an error if it is not the current one any more.
        max_bytes: Maximum size of a shard.
        storage_options: For fsspec.

    Raises:
        OptionError: If a key is unknown, values are too few or too many, or a column of the dataset (``columns=``) is made of one of the fields.
        SampleError: If a value cannot be encoded, or a class number has no name in ``classes.json`` of the dataset.
        ChangedError: If another writer publishes a compaction meanwhile, or has published a version since ``version``.
        StorageError: If the dataset cannot be read or written.
    """
    if (fields is None) == (add is None):
        raise OptionError("pass either fields= with the values, or add= with their URLs")
    folder, storage = dataset_folder(url), Storage(storage_options)
    located = locate_shards(folder, storage)
    now = (located.version or FIRST_VERSION).number
    if version not in (None, now):
        raise ChangedError(
            f"the values are in the order of version {version}, but version {now} is the current one; give them by key, or in its order",
            shard=folder,
        )
    current = _open_current(located, storage)
    new = _given(current, fields or {}) if add is None else _added(current, add, storage_options)
    _check_columns(located, new.names, storage)
    name = change_folder("fields", uuid.uuid4().hex[:12])
    target = join_url(folder, name)
    classes = read_classes(folder, storage, located.version) if "cls" in new.names else None
    with ShardWriter(target, max_bytes=max_bytes, storage_options=storage_options) as writer:
        for sample in new.samples:
            writer.write(sample)
            if classes is not None:
                check_class(sample[KEY_COLUMN], encode_field("cls", sample["cls"]), len(classes))
    numbers_name = None
    if len(new.numbers) < len(current.whole):
        file, data = encode_numbers("numbers", new.numbers)
        publish_bytes(storage, join_url(target, file), data)
        numbers_name = f"{name}/{file}"
    entry = ReplacedFields(
        fields=tuple(sorted(new.names)),
        url=f"{name}/{MANIFEST_NAME}",
        nsamples=len(new.numbers),
        numbers=numbers_name,
    )
    _publish(folder, storage, located, entry)
    return entry.nsamples


class _Current(NamedTuple):
    """The samples that get fields."""

    whole: Samples
    """All samples, deleted ones, too."""
    numbers: Numbers
    """Those that are left, among all, ascending."""
    keys: Any
    """Their keys, as an Arrow array."""


class _New(NamedTuple):
    names: tuple[str, ...]
    """Fields."""
    numbers: Numbers
    """Numbers of the samples among all, ascending."""
    samples: Iterator[Mapping[str, Any]]
    """Key and new fields of each."""


def _open_current(located: LocatedShards, storage: Storage) -> _Current:
    whole = open_samples(replace(located, deleted=(), version=None), storage)
    left = np.ones(len(whole), dtype=bool)
    for _, deleted in located.deleted:
        left[deleted] = False
    keys = whole.read_columns([KEY_COLUMN], scans=True)[KEY_COLUMN]
    return _Current(whole, np.flatnonzero(left), keys.filter(left))


def _given(current: _Current, fields: Mapping[str, Mapping[str, Any] | Iterable[Any]]) -> _New:
    """Return the values that a user gave."""
    by_key = {name: values for name, values in fields.items() if isinstance(values, Mapping)}
    if not fields or (by_key and len(by_key) < len(fields)):
        raise OptionError(
            "give values for all fields by key, or for all in the order of the samples"
        )
    if not by_key:
        return _New(tuple(fields), current.numbers, _in_order(current, fields))
    keys = [*next(iter(by_key.values()))]
    if any({*values} != {*keys} for values in by_key.values()):
        raise OptionError(
            "the fields have values for different keys; call replace_fields once for each"
        )
    pa, _ = import_parquet()
    places = match_keys(
        current.keys, pa.chunked_array([pa.array(keys, pa.string())]), current.whole
    )
    mine = np.flatnonzero(places >= 0)
    if len(mine) < len(keys):
        unknown = np.delete(np.arange(len(keys)), places[mine])
        raise OptionError(
            f"{plural(len(unknown), 'key')} of {len(keys)} are of no sample, the first {keys[unknown[0]]!r}; leave them out"
        )
    ordered = (keys[place] for place in places[mine].tolist())
    samples = (
        {KEY_COLUMN: key, **{name: values[key] for name, values in by_key.items()}}
        for key in ordered
    )
    return _New(tuple(fields), current.numbers[mine], samples)


def _in_order(current: _Current, fields: Mapping[str, Iterable[Any]]) -> Iterator[dict[str, Any]]:
    keys = (key for chunk in current.keys.chunks for key in chunk.to_pylist())
    try:
        for key, *values in zip(keys, *fields.values(), strict=True):
            yield {KEY_COLUMN: key, **dict(zip(fields, values, strict=True))}
    except ValueError as error:
        raise OptionError(
            f"give one value for each of the {plural(len(current.numbers), 'sample')}, in their order: {error}"
        ) from error


def _added(current: _Current, add: AddedUrls, options: Mapping[str, Any] | None) -> _New:
    """Return the values of shards or tables, found by key."""
    named: Mapping[Any, Collection[str] | None] = add if isinstance(add, Mapping) else {add: None}
    if len(named) != 1:
        raise OptionError("add= takes one source; call replace_fields once for each")
    [(url, fields)] = named.items()
    url, storage = os.fspath(url), Storage(options)
    fields = [fields] if isinstance(fields, str) else fields
    if is_table(url):
        part = open_table_part(url, fields, storage)
    else:
        part = open_part(open_samples(locate_shards(url, storage), storage), fields or None)
    if part.known_fields is None:
        raise OptionError(
            "the manifest does not list the fields; name those to add: add={URL: ['txt']}",
            shard=url,
        )
    theirs = part.samples.read_columns([KEY_COLUMN], scans=True)[KEY_COLUMN]
    places = match_keys(current.keys, theirs, part.samples)
    mine = np.flatnonzero(places >= 0)
    if not len(mine):
        raise OptionError("no sample of the dataset has a key of this source", shard=url)
    if len(mine) < len(theirs):
        unused = len(theirs) - len(mine)
        _log.warning("%s: %s of no sample, left out", redact(url), plural(unused, "key"))
    names = part.fields or {name: name for name in part.known_fields}
    _warn_of_masks(part.samples.fields, names, current.whole.fields)
    rows = _read(part.samples, places[mine].astype(np.int64), names)
    return _New(tuple(names), current.numbers[mine], rows)


def _warn_of_masks(
    theirs: Sequence[str] | None, names: Mapping[str, str], own: Sequence[str] | None
) -> None:
    """Warn of fields that are masks beside those of their source, but not beside those of the dataset, where both are known."""
    if theirs is None or own is None:
        return
    masks = mask_fields(theirs)
    taken = {new for new, old in names.items() if old in masks}
    for name in sorted(taken - mask_fields([*own, *names])):
        _log.warning("%s: %s", name, MASK_ALONE)


def _read(
    samples: Samples, numbers: Numbers, names: Mapping[str, str]
) -> Iterator[Mapping[str, Any]]:
    with closing(read_rows(samples, numbers, is_sparse=True)) as rows:
        for row in rows:
            missing = [one for one in names.values() if one not in row]
            if missing:
                raise SampleError(
                    "its sample or row has no such field", field=missing[0], key=row[KEY_COLUMN]
                )
            yield {KEY_COLUMN: row[KEY_COLUMN], **{n: row[one] for n, one in names.items()}}


def _check_columns(located: LocatedShards, names: Collection[str], storage: Storage) -> None:
    """Refuse fields of which columns are made, which would keep the old values.

    Raises:
        OptionError: If there are such columns.
    """
    url = located.shards[0].columns_url
    for column in columns_in_file(storage.read(url), url=url) if storage.exists(url) else ():
        if column.source.partition(".")[0] in names:
            raise OptionError(
                f"the column {column.spec} is made of this field, and where= and others would use its old values; write the dataset "
                "again instead: ss.reshard(ss.join(...), columns=...)",
                shard=url,
            )
        if column.is_computed:
            _log.warning("%s: the column %s keeps its values", redact(url), column.spec)


def _publish(folder: str, storage: Storage, located: LocatedShards, entry: ReplacedFields) -> None:
    """Publish the next version; a field that all samples get takes the place of earlier ones."""
    begun = located.version or FIRST_VERSION

    def change(manifest: AnyManifest) -> AnyManifest:
        version = manifest.dataset_version
        if version.compactions != begun.compactions:
            raise ChangedError(
                "another writer has compacted the dataset since this began, so its samples have other numbers; run it again",
                shard=folder,
            )
        before: list[ReplacedFields] = []
        for one in version.replaced:
            left = one.fields
            if (
                entry.nsamples == manifest.nsamples
            ):  # others may have been appended since this began
                left = tuple(name for name in one.fields if name not in entry.fields)
            before += [replace(one, fields=left)] if left else []
        after = replace(manifest, fields=count_fields(manifest.fields, [entry]))
        return next_version(after, "replace_fields", replaced=(*before, entry))

    publish_version(folder, storage, change)
