"""The shards of a dataset whose manifest has a file of records; those around a shard are read when it is needed.

A process keeps `CHUNKS_KEPT` chunks of records, so its memory does not grow with the number of shards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from shardstream.errors import ChangedError, IndexMismatchError, NotFoundError
from shardstream.format import (
    BinaryManifest,
    Records,
    ShardInfo,
    checksum,
    decode_manifest,
    fingerprint,
    shards_of,
)
from shardstream.process_memory import new_lock
from shardstream.storage.store import Storage
from shardstream.storage.urls import folder_of_manifest, join_url

CHUNKS_KEPT = 128  # of 64 KiB with short names: 8 MB
_TRIES = 4
_THREADS = 16
_lock = new_lock()  # guards the kept chunks of all datasets; not held while one is read

Numbers = npt.NDArray[np.int64]


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


def fingerprint_of_shards(shards: Sequence[ShardInfo]) -> str:
    """Return the `fingerprint` of shards, which a binary manifest has ready."""
    return shards.manifest.fingerprint if isinstance(shards, LazyShards) else fingerprint(shards)


def checksum_of_shards(shards: Sequence[ShardInfo]) -> str | None:
    """Return the `checksum` of shards, which a binary manifest has ready."""
    return shards.manifest.checksum if isinstance(shards, LazyShards) else checksum(shards)
