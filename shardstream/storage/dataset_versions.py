"""Find the manifest of a version of a dataset, and read which of its samples are deleted."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from shardstream.errors import ManifestError, NotFoundError, OptionError, plural
from shardstream.format import (
    FIRST_VERSION,
    MANIFEST_NAME,
    DatasetVersion,
    Manifest,
    ShardInfo,
    has_digest,
    numbers_name,
    version_name,
)
from shardstream.storage.lazy_shards import LazyShards
from shardstream.storage.store import Storage
from shardstream.storage.urls import folder_of_manifest, join_url, parent_url

Numbers = npt.NDArray[np.int64]
Deleted = tuple[tuple[int, Numbers], ...]
"""Deleted samples: a shard by its place, and numbers counted from its first sample, ascending, which may be of later shards, too."""

_NUMBER_BYTES, _HEADER_BYTES = 8, 1 << 12
# No pattern of names that people give: `gc` deletes files in such folders.
_CHANGE = re.compile(r"append-[0-9a-f]{16}|compact-\d{6,}|fields-[0-9a-f]{12}")
_RESTORE = "restore the file, or read an earlier version (version=)"


def change_folder(operation: str, token: str) -> str:
    """Return the name of the folder of the files that an operation adds to a dataset.

    >>> change_folder("compact", "000001")
    'compact-000001'
    """
    return f"{operation}-{token}"


def dataset_of_change(folder: str) -> str | None:
    """Return the URL of the dataset that a folder of added files is a part of; None for any other folder.

    >>> dataset_of_change("s3://b/train/compact-000001"), dataset_of_change("s3://b/compact-cars")
    ('s3://b/train', None)
    """
    dataset, _, name = folder.rstrip("/").rpartition("/")
    return dataset if dataset and _CHANGE.fullmatch(name) else None


def find_version(current: DatasetVersion, asked: int | str, url: str) -> int:
    """Return the number of a version by number or tag.

    Args:
        current: The current version.
        asked: Number, or name of a tag.
        url: URL of the manifest, for messages.

    Raises:
        OptionError: If there is no such version, or it was removed.
    """
    if isinstance(asked, str) and asked not in current.tags:
        known = ", ".join(sorted(current.tags)) or "none"
        raise OptionError(f"version= names the tag {asked!r}; the tags are: {known}", shard=url)
    number = current.tags[asked] if isinstance(asked, str) else asked
    if type(number) is not int or not current.has(number):
        were = type(number) is int and 0 < number < current.number
        kept = ", ".join(map(str, [*current.kept_numbers[-20:], current.number]))
        raise OptionError(
            f"version {number!r} {'was removed (gc)' if were else 'does not exist'}; there are: {kept}",
            shard=url,
        )
    return number


def version_url(folder: str, current: DatasetVersion, number: int) -> str:
    """Return the URL of the manifest of a version that is there."""
    return join_url(folder, MANIFEST_NAME if number == current.number else version_name(number))


def read_deleted(manifest: Manifest, url: str, storage: Storage) -> Numbers:
    """Return the numbers of the deleted samples of a dataset, ascending.

    Args:
        manifest: Its manifest.
        url: URL of the manifest.
        storage: Where it is.

    Raises:
        ManifestError: If the file is missing, damaged, or names samples that the dataset does not have.
        StorageError: If it cannot be read.
    """
    version = manifest.dataset_version
    if version.deleted is None:
        return np.empty(0, dtype=np.int64)
    place = join_url(folder_of_manifest(url), version.deleted)
    return read_numbers(place, storage, version.ndeleted, count_samples(manifest.shards))


def read_numbers(url: str, storage: Storage, count: int, nsamples: int) -> Numbers:
    """Return the numbers of samples in a file of a version, ascending, shape (n,).

    Args:
        url: The file; its name has a part of its SHA-256.
        storage: Where it is.
        count: How many they are.
        nsamples: Samples of the dataset.

    Raises:
        ManifestError: If the file is missing, damaged, or names samples that the dataset does not have.
        StorageError: If it cannot be read.
    """
    try:
        data = storage.read(url, max_bytes=_NUMBER_BYTES * count + _HEADER_BYTES)
    except NotFoundError as error:
        raise ManifestError(
            "a file of the numbers of samples is missing, without which deleted samples or old fields would be read",
            remedy=_RESTORE,
            shard=url,
        ) from error
    try:
        return _decode_numbers(data, url.rpartition("/")[2], count, nsamples)
    except (ValueError, EOFError, OSError, MemoryError, AttributeError) as error:
        raise ManifestError(
            f"a file of the numbers of samples is damaged: {error}", remedy=_RESTORE, shard=url
        ) from error


def _decode_numbers(data: bytes, name: str, count: int, nsamples: int) -> Numbers:
    if not has_digest(name, data):
        raise ValueError("its bytes do not match its name")
    found: Numbers = np.load(io.BytesIO(data), allow_pickle=False)
    if found.dtype != np.int64 or found.shape != (count,):
        raise ValueError(f"{found.dtype} of shape {found.shape}, not {count} int64")
    if (np.diff(found, prepend=-1) <= 0).any():
        raise ValueError("the numbers are not ascending")
    if found[-1] >= nsamples:
        raise ValueError(f"sample {found[-1]} of {plural(nsamples, 'sample')}")
    return found


def encode_numbers(kind: str, numbers: Numbers) -> tuple[str, bytes]:
    """Return name and bytes of a file of the numbers of samples, such as "deleted" ones."""
    file = io.BytesIO()
    np.save(file, numbers.astype(np.int64))
    data = file.getvalue()
    return numbers_name(kind, data, uuid4().hex[:8]), data


def count_samples(shards: Sequence[ShardInfo]) -> int:
    """Return the samples of all shards, deleted ones, too."""
    if isinstance(shards, LazyShards):
        return shards.manifest.nsamples
    return sum(shard.nsamples or 0 for shard in shards)


def deleted_of_some(manifest: Manifest, deleted: Numbers, places: Mapping[str, int]) -> Deleted:
    """Return the deleted samples of some shards of a dataset.

    Args:
        manifest: Its manifest, with relative URLs.
        deleted: Numbers of its deleted samples, ascending.
        places: URL of a shard as the manifest has it -> its place in another list.
    """
    found: list[tuple[int, Numbers]] = []
    first = 0
    for shard in manifest.shards if len(deleted) else ():
        end = first + (shard.nsamples or 0)
        place = places.get(shard.url)
        if place is not None:
            mine = deleted[np.searchsorted(deleted, first) : np.searchsorted(deleted, end)]
            found += [(place, mine - first)] if len(mine) else []
        first = end
    return tuple(found)


def find_listed(
    manifest: Manifest, folder: str, manifest_url: str, names: Iterable[str]
) -> dict[str, ShardInfo]:
    """Return the shards that a manifest lists of the files in a folder, by their names; others are left out.

    Raises:
        OptionError: If fields were replaced: those are found by the number of a sample in the whole dataset; if the dataset was changed and does not list
            a file, which may have samples that were deleted.
    """
    shards, version = manifest.shards, manifest.dataset_version
    start = folder[len(parent_url(manifest_url)) :].strip("/")  # "", or that of added shards
    wanted = {join_url(start, name) if start else name: name for name in names}
    if isinstance(shards, LazyShards):
        found = shards.find_names(wanted)
    elif version == FIRST_VERSION:
        found = {shard.url.rsplit("/", 1)[-1]: shard for shard in shards}
    else:
        found = {shard.url.removeprefix("./"): shard for shard in shards}
    listed = {name: found[one] for one, name in wanted.items() if one in found}
    if version.replaced and listed:
        raise OptionError(
            "fields of this dataset were replaced: name its folder, not its tars, to read them",
            shard=manifest_url,
        )
    other = next((one for one in wanted if one not in found), None)
    if version != FIRST_VERSION and other is not None:
        raise OptionError(
            f"version {version.number} of the dataset does not list this tar, which may have deleted samples; name the folder of the dataset, and "
            "version= for an earlier one",
            shard=join_url(parent_url(manifest_url), other),
        )
    return listed


def warn_of_others(manifest: Manifest, manifest_url: str, named: Container[str]) -> None:
    """Warn if all tars in the folder of a dataset are named, but not those that were added to it later, in folders of their own."""
    if manifest.dataset_version == FIRST_VERSION:
        return
    folder = parent_url(manifest_url)
    urls = (join_url(folder, one.url) for one in manifest.shards)
    others = [one for one in urls if one not in named]
    if others and all(dataset_of_change(parent_url(one)) for one in others):
        warnings.warn(
            f"{folder}: left out: {plural(len(others), 'shard')} of this dataset in folders of later versions, such as "
            f"{others[0].removeprefix(f'{folder}/')}; name the folder to read all",
            stacklevel=2,
        )
