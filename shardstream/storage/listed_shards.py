"""The shards that the manifest of a version lists, and the samples of it that are deleted.

Where the manifest has a file of records, those around a shard are read when it is needed. A process keeps `CHUNKS_KEPT` chunks of
records, so its memory does not grow with the number of shards.
"""

from __future__ import annotations

import io
import re
import warnings
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, overload
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from shardstream.errors import (
    ChangedError,
    IndexMismatchError,
    ManifestError,
    NotFoundError,
    OptionError,
    plural,
)
from shardstream.format import (
    FIRST_VERSION,
    MANIFEST_NAME,
    BinaryManifest,
    DatasetVersion,
    Manifest,
    Records,
    ShardInfo,
    decode_manifest,
    has_digest,
    numbers_name,
    shards_of,
    version_name,
)
from shardstream.process import new_lock
from shardstream.storage.store import Storage
from shardstream.storage.urls import folder_of_manifest, join_url, parent_url

if TYPE_CHECKING:
    from shardstream.storage.discover import LocatedShards

CHUNKS_KEPT = 128  # of 64 KiB with short names: 8 MB
_TRIES = 4
_THREADS = 16
_lock = new_lock()  # guards the kept chunks of all datasets; not held while one is read

Numbers = npt.NDArray[np.int64]
Deleted = tuple[tuple[int, Numbers], ...]
"""Deleted samples: a shard by its place, and numbers counted from its first sample, ascending, which may be of later shards, too."""

_NUMBER_BYTES, _HEADER_BYTES = 8, 1 << 12
# No pattern of names that people give: `gc` deletes files in such folders.
_CHANGE = re.compile(r"append-[0-9a-f]{16}|compact-\d{6,}|fields-[0-9a-f]{12}")
_RESTORE = "restore the file, or read an earlier version (version=)"


class AllIndexed(Container[str]):
    """Contains all shards: a binary manifest lists shards with indexes only."""

    def __contains__(self, url: object) -> bool:
        return True


class LazyShards(Sequence[ShardInfo]):
    """Shards with absolute URLs, in the order of the dataset; picklable (without their records) and thread-safe.

    Args:
        manifest: The decoded ``index.json``.
        url: Its URL.
        storage: Storage of the records.
    """

    def __init__(self, manifest: BinaryManifest, url: str, storage: Storage) -> None:
        self.manifest = manifest
        self.manifest_url = url
        self.folder = folder_of_manifest(url)
        """The folder of all shards, without a slash at its end."""
        self._storage = storage
        self._is_local = storage.local_path(url) is not None
        self._prefix = join_url(self.folder, "x")[:-1]
        self._firsts = np.array([0, *manifest.chunk_ends])
        self._kept: OrderedDict[int, Records] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict()}

    def __len__(self) -> int:
        return self.manifest.num_shards

    @overload
    def __getitem__(self, number: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[ShardInfo, ...]: ...
    def __getitem__(self, number: int | slice) -> ShardInfo | tuple[ShardInfo, ...]:
        if isinstance(number, slice):
            return tuple([self[one] for one in range(len(self))[number]])
        chunk, place = divmod(range(len(self))[number], self.manifest.chunk_shards)
        return shards_of(self.read_chunk(chunk)[place : place + 1], self._prefix)[0]

    def __iter__(self) -> Iterator[ShardInfo]:
        for number in range(len(self.manifest.chunk_ends)):
            kept = self._kept.get(number)  # one that is not kept stays so: others are in use
            yield from shards_of(self._read(number) if kept is None else kept, self._prefix)

    def local_path(self, number: int) -> str | None:
        """Return the local path of a shard; None if it is remote."""
        return self._storage.local_path(self[number].url) if self._is_local else None

    def find_samples(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of each sample, and the sample's number in it; chunks that are not kept are read concurrently.

        Args:
            numbers: Numbers of samples that exist, shape (n,).

        Returns:
            Two arrays of shape (n,).
        """
        chunks = np.searchsorted(self._firsts, numbers, side="right") - 1
        shards, within = np.empty_like(numbers), np.empty_like(numbers)
        found = np.unique(chunks).tolist()
        for number, records in zip(found, self._chunks(found), strict=True):
            mine = chunks == number
            ends = self._firsts[number] + np.cumsum(records["nsamples"])
            places = np.searchsorted(ends, numbers[mine], side="right")
            shards[mine] = number * self.manifest.chunk_shards + places
            within[mine] = numbers[mine] - (ends - records["nsamples"])[places]
        return shards, within

    def first_samples(self, shards: Iterable[int]) -> Numbers:
        """Return the number of the first sample of each shard, shape (n,)."""
        places = [divmod(shard, self.manifest.chunk_shards) for shard in shards]
        before = [self.read_chunk(chunk)["nsamples"][:place].sum() for chunk, place in places]
        return self._firsts[[chunk for chunk, _ in places]] + np.array(before, dtype=np.int64)

    def find_names(self, names: Iterable[str]) -> dict[str, ShardInfo]:
        """Return the shards of some file names; names that are not listed are left out."""
        wanted, start = set(names), len(self._prefix)
        found: Iterable[ShardInfo] = self
        if self.manifest.is_sorted:
            firsts = self.manifest.chunk_names
            chunks = sorted({max(1, bisect_right(firsts, name)) - 1 for name in wanted})
            found = chain.from_iterable(
                shards_of(records, self._prefix) for records in self._chunks(chunks)
            )
        return {name: shard for shard in found if (name := shard.url[start:]) in wanted}

    def has_same_beginning(self, now: LazyShards) -> bool:
        """Return whether a later manifest of the folder begins with these shards, so that shards were added at most."""
        return all(
            now.manifest.chunk_sha256[number : number + 1] == [digest]
            or self._read_from(now, number) is not None
            for number, digest in enumerate(self.manifest.chunk_sha256)
        )

    def read_chunk(self, number: int) -> Records:
        """Return the records of a chunk, which is kept.

        Raises:
            ChangedError: If the dataset was replaced.
            IndexMismatchError: If the bytes do not match the manifest.
        """
        with _lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        records = self._read(number)
        with _lock:
            self._kept[number] = records
            while len(self._kept) > CHUNKS_KEPT:
                self._kept.popitem(last=False)
        return records

    def _chunks(self, numbers: Sequence[int]) -> list[Records]:
        missing = sum(number not in self._kept for number in numbers)
        if missing < 2 or self._is_local:
            return [self.read_chunk(number) for number in numbers]
        with ThreadPoolExecutor(min(missing, _THREADS), "shardstream-shards") as pool:
            return list(pool.map(self.read_chunk, numbers))

    def _read(self, number: int) -> Records:
        """Read a chunk; bytes that do not match their checksum are read again, as they may have been damaged in transfer.

        Raises:
            ChangedError: If the dataset was replaced.
            IndexMismatchError: If the bytes do not match the manifest.
        """
        manifest = self.manifest
        file = manifest.file_of(number)
        url = self._prefix + file.records
        start, end = manifest.chunk_range(number)
        is_last = file == manifest.files[-1]  # others may have a chunk that was written again
        size = manifest.chunk_range(len(manifest.chunk_ends) - 1)[1] if is_last else None
        for attempts_left in reversed(range(_TRIES)):
            try:
                data = self._storage.read(url, start, end, size=size)
                return manifest.decode_chunk(data, number, url=url)
            except NotFoundError as error:
                return self._read_replaced(number, error)
            except IndexMismatchError:
                if not attempts_left:
                    raise
                self._storage.forget(url, start, end)
        raise AssertionError  # for the type checker: the last attempt returns or raises

    def _read_replaced(self, number: int, error: NotFoundError) -> Records:
        """Read a chunk of a manifest that was written again since it was opened; shards may have been added.

        Raises:
            NotFoundError: If the manifest is the same, so that its records are missing.
            ChangedError: If the records are others, or there are none any more.
        """
        url = self.manifest_url
        # Not from a cache, which may have the manifest from before.
        now = decode_manifest(self._storage.uncached().read(url), url=url)
        if isinstance(now, BinaryManifest):
            if now.files == self.manifest.files:
                raise NotFoundError(
                    "the file of records of the shards is missing, which index.json names",
                    remedy="fetch the whole folder, or run 'shardstream index' to write both files again",
                    shard=error.shard,
                ) from error
            records = self._read_from(LazyShards(now, url, self._storage), number)
            if records is not None:
                return records
        raise ChangedError(
            "the dataset was replaced since it was opened: its manifest lists other shards",
            remedy="open the dataset again and start the epoch again; write a new dataset to a folder of its own",
            shard=url,
        ) from error

    def _read_from(self, now: LazyShards, number: int) -> Records | None:
        """Read a chunk of these shards from a later manifest; None if that has others."""
        if number >= len(now.manifest.chunk_ends):
            return None
        start, end = self.manifest.chunk_range(number)
        kind = self.manifest.file_of(number).record_type  # names may have become longer
        records = now.read_chunk(number).astype(kind)[: (end - start) // kind.itemsize]
        with suppress(IndexMismatchError):
            return self.manifest.decode_chunk(records.tobytes(), number, url=now.manifest_url)
        return None


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


def read_deleted(manifest: Manifest | BinaryManifest, url: str, storage: Storage) -> Numbers:
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
    if isinstance(manifest, BinaryManifest):
        return read_numbers(place, storage, version.ndeleted, manifest.nsamples)
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


def refuse_deleted(located: LocatedShards, what: str) -> None:
    """Refuse a dataset of which samples are left out or fields replaced, where shards are read from start to end.

    Raises:
        OptionError: If it is one.
    """
    is_replaced = located.version is not None and bool(located.version.replaced)
    if located.deleted or is_replaced:
        how = "fields were replaced" if is_replaced else "samples were deleted"
        rewrite = "reshard" if is_replaced else "compact"
        raise OptionError(
            f"{how} in this dataset, and {what} would return the old ones; read it by its index, or run 'shardstream {rewrite}' first",
            shard=located.manifest_url or located.shards[0].url,
        )


def deleted_by_shard(located: LocatedShards) -> dict[int, Numbers]:
    """Return place of a shard -> its deleted samples, by their numbers in it, ascending; of the shards that have some."""
    found: dict[int, Numbers] = {}
    if not located.deleted:
        return found
    firsts = np.cumsum([0, *(shard.nsamples or 0 for shard in located.shards)])
    for place, numbers in located.deleted:
        whole = numbers + firsts[place]
        cuts = np.searchsorted(whole, firsts)
        for one in np.flatnonzero(np.diff(cuts)).tolist():
            found[one] = whole[cuts[one] : cuts[one + 1]] - firsts[one]
    return found


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
