"""List, compare and name the versions of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardstream.catalog import open_samples
from shardstream.errors import ManifestError, NotFoundError, OptionError
from shardstream.format import (
    KEY_COLUMN,
    MANIFEST_NAME,
    DatasetVersion,
    OpenWriter,
    decode_manifest,
)
from shardstream.samples import Numbers, deleted_since, numbers_left
from shardstream.storage import (
    Storage,
    Urls,
    find_version,
    join_url,
    locate_shards,
    read_deleted,
    version_url,
)
from shardstream.versions.publish_version import (
    AnyManifest,
    all_shards,
    dataset_folder,
    publish_version,
)

_THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """A version of a dataset.

    Args:
        number: Its number, from 1.
        operation: What made it: "pack", "append", "delete", "compact" or "replace_fields".
        created: Time in UTC, ISO 8601, by the writer's clock; "" if it is unknown.
        samples: Samples that readers see.
        deleted: Samples that are left out, and whose bytes are still in the shards.
        shards: Number of shards.
        total_bytes: Bytes of their tars.
        tags: Names of the version.
        writers: Of the current version, the writers that go on to append.
    """

    number: int
    operation: str
    created: str
    samples: int
    deleted: int
    shards: int
    total_bytes: int
    tags: Sequence[str] = ()
    writers: Sequence[OpenWriter] = ()


def log(
    url: Urls, *, limit: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> list[VersionRecord]:
    """Return the versions of a dataset that can be read, the latest first.

    Args:
        url: Folder of the dataset.
        limit: Return the latest ones only; the manifest of each is read.
        storage_options: For fsspec.

    Raises:
        NotFoundError: If there is no dataset.
        ManifestError: If the manifest of a version is missing or damaged.
        StorageError: If one cannot be read.
    """
    folder, storage = dataset_folder(url), Storage(storage_options)
    current = read_current(folder, storage)
    version = current.dataset_version
    numbers = [*reversed(version.kept_numbers)][: None if limit is None else max(0, limit - 1)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-log") as pool:
        kept = pool.map(lambda number: read_kept(folder, version, number, storage), numbers)
        return [_record(one, version) for one in (current, *kept)]


def _record(manifest: AnyManifest, current: DatasetVersion) -> VersionRecord:
    version = manifest.dataset_version
    return VersionRecord(
        number=version.number,
        operation=version.operation,
        created=version.created,
        samples=manifest.nsamples - version.ndeleted,
        deleted=version.ndeleted,
        shards=manifest.num_shards,
        total_bytes=manifest.total_bytes,
        tags=sorted(name for name, number in current.tags.items() if number == version.number),
        writers=current.writers if version.number == current.number else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDiff:
    """What a later version of a dataset has changed since an earlier one.

    Args:
        earlier: Number of the earlier version.
        later: Number of the later one.
        added: Samples that the later one has in addition.
        deleted: Samples that it does not have any more.
        deleted_keys: Their keys, if they were asked for, in the order of the earlier version.
        shards_added: Shards that only the later one lists, by URLs relative to the dataset.
        shards_removed: Shards that only the earlier one lists.
        fields: Fields that were added or replaced.
    """

    earlier: int
    later: int
    added: int
    deleted: int
    deleted_keys: Sequence[str] | None
    shards_added: Sequence[str]
    shards_removed: Sequence[str]
    fields: Sequence[str]


def diff(
    url: Urls,
    a: int | str,
    b: int | str | None = None,
    *,
    keys: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> VersionDiff:
    """Compare two versions of a dataset.

    Args:
        url: Folder of the dataset.
        a: Number or tag of a version.
        b: That of another one, earlier or later; by default the current one.
        keys: Also list the keys of the deleted samples, from the columns or the shards.
        storage_options: For fsspec.

    Raises:
        OptionError: If there is no such version.
        ManifestError: If a file of a version is missing or damaged.
        StorageError: If one cannot be read.
    """
    folder, storage = dataset_folder(url), Storage(storage_options)
    current = read_current(folder, storage)
    version = current.dataset_version
    manifest_url = join_url(folder, MANIFEST_NAME)
    asked = [version.number if one is None else one for one in (a, b)]
    first, last = sorted(find_version(version, one, manifest_url) for one in asked)
    before, after = (read_kept(folder, version, one, storage) for one in (first, last))
    removed, added = _removed_between(before, after, version, folder, storage)
    old, new = (
        dict.fromkeys(one.url for one in all_shards(manifest, folder, storage))
        for manifest in (before, after)
    )
    known = {one.change for one in before.dataset_version.replaced}
    replaced = [one for one in after.dataset_version.replaced if one.change not in known]
    fields = {*after.fields} - {*before.fields} | {name for one in replaced for name in one.fields}
    found = None
    if keys:
        samples = open_samples(locate_shards(folder, storage, first), storage)
        removed = numbers_left(removed, read_deleted(before, manifest_url, storage))
        table = samples.read_columns([KEY_COLUMN], scans=True)
        found = table[KEY_COLUMN].take(removed).to_pylist()
    return VersionDiff(
        earlier=first,
        later=last,
        added=added,
        deleted=len(removed),
        deleted_keys=found,
        shards_added=[one for one in new if one not in old],
        shards_removed=[one for one in old if one not in new],
        fields=sorted(fields),
    )


def _removed_between(
    before: AnyManifest,
    after: AnyManifest,
    current: DatasetVersion,
    folder: str,
    storage: Storage,
) -> tuple[Numbers, int]:
    """Return the samples of a version that a later one does not have, by their numbers of all samples; and how many it has in addition."""
    first, last = before.dataset_version, after.dataset_version
    compacted = (
        read_kept(folder, current, one, storage) for one in last.compacted_since(first.number)
    )
    url = join_url(folder, MANIFEST_NAME)
    here, there, *removed = (read_deleted(one, url, storage) for one in (before, after, *compacted))
    gone = np.setdiff1d(deleted_since(there, removed, before.nsamples), here)
    left = before.nsamples - first.ndeleted - len(gone)
    return gone, after.nsamples - last.ndeleted - left


def tag(
    url: Urls,
    name: str,
    version: int | str | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Give a version of a dataset a name, which `gc` keeps it for; return its number.

    A name that another version has moves to this one. ``ShardDataset(url, version=name)`` reads it.

    Args:
        url: Folder of the dataset.
        name: Letters, digits, and ``._-``, a letter first.
        version: Its number, or another of its names; by default the current one.
        storage_options: For fsspec.

    Raises:
        OptionError: If the name is not valid, or there is no such version.
        ChangedError: If other writers publish versions again and again.
        StorageError: If the dataset cannot be read or written.
    """
    folder, storage = dataset_folder(url), Storage(storage_options)

    def change(manifest: AnyManifest) -> AnyManifest:
        current = manifest.dataset_version
        number = current.number
        if version is not None:
            number = find_version(current, version, join_url(folder, MANIFEST_NAME))
        try:
            tagged = replace(current, tags={**current.tags, name: number})
        except (ValueError, TypeError) as error:
            raise OptionError(
                f"the name of a tag has letters, digits and ._-, a letter first, and at most 100 of them, not {name!r}"
            ) from error
        return replace(manifest, dataset_version=tagged)

    return publish_version(folder, storage, change).dataset_version.tags[name]


def untag(url: Urls, name: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Remove the name of a version of a dataset; the version stays until `gc` removes it.

    Args:
        url: Folder of the dataset.
        name: The name.
        storage_options: For fsspec.

    Raises:
        OptionError: If no version has it.
        StorageError: If the dataset cannot be read or written.
    """
    folder, storage = dataset_folder(url), Storage(storage_options)

    def change(manifest: AnyManifest) -> AnyManifest:
        current = manifest.dataset_version
        if name not in current.tags:
            known = ", ".join(sorted(current.tags)) or "none"
            raise OptionError(f"no version has the tag {name!r}; the tags are: {known}")
        left = {one: number for one, number in current.tags.items() if one != name}
        return replace(manifest, dataset_version=replace(current, tags=left))

    publish_version(folder, storage, change)


def read_current(folder: str, storage: Storage) -> AnyManifest:
    """Read the manifest of the current version of a dataset.

    Raises:
        NotFoundError: If there is none.
        ManifestError: If it is damaged.
    """
    url = join_url(folder, MANIFEST_NAME)
    return decode_manifest(storage.read_bounded(url), url=url)


def read_kept(folder: str, current: DatasetVersion, number: int, storage: Storage) -> AnyManifest:
    """Read the manifest of a version of a dataset that can be read.

    Raises:
        ManifestError: If it is missing or damaged, or that of another version.
    """
    url = version_url(folder, current, number)
    try:
        found = decode_manifest(storage.read_bounded(url), url=url)
    except NotFoundError as error:
        raise ManifestError(
            f"the manifest of version {number} is missing",
            remedy="restore the file, or remove the version ('shardstream gc')",
            shard=url,
        ) from error
    if found.dataset_version.number != number:
        raise ManifestError(
            f"it is that of version {found.dataset_version.number}, not {number}",
            remedy="restore the file as it was",
            shard=url,
        )
    return found
