"""Compare keys with those of a dataset: 64 bits of each are in files next to its manifest, in the order of the samples.

The first append reads the keys of the dataset and writes them; later ones read 8 bytes a sample. Small files are merged with the next one, so that
a dataset of n samples has about log n of them.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import NamedTuple

import numpy as np

from shardstream.catalog import ShardCatalog, iter_keys
from shardstream.errors import IndexMismatchError, SourceError, get_logger, plural
from shardstream.format import DatasetVersion, KeyFile, ShardInfo
from shardstream.packing.job.key_hashes import (
    Hashes,
    KeyHashes,
    Places,
    hash_keys,
    read_keys_by_index,
    split_place,
)
from shardstream.samples import Numbers
from shardstream.storage import (
    AllIndexed,
    LazyShards,
    LocatedShards,
    Storage,
    TemporaryFile,
    count_samples,
    join_url,
    publish,
)

_log = get_logger(__name__)

_HASH_BYTES = 8
_BLOCK_BYTES = 1 << 23  # read at a time
_SORTED_KEYS = (
    1 << 23
)  # new keys that are compared in one pass over the files: 128 MB with their places
_CATALOG_SHARDS = 1024  # whose keys are read at a time


class KeyList:
    """Hashes of keys in the order of their samples, in a temporary file; use it in `contextlib.closing`.

    Raises:
        StorageError: If the temporary folder is full.
    """

    def __init__(self) -> None:
        self._file = TemporaryFile("8 bytes for each key")

    def __len__(self) -> int:
        return self._file.size // _HASH_BYTES

    def add(self, hashes: Hashes) -> None:
        """Append the hashes of the next samples."""
        self._file.append(hashes.astype("<u8").tobytes())

    def blocks(self) -> Iterator[Hashes]:
        """Yield all hashes, in order."""
        for start in range(0, self._file.size, _BLOCK_BYTES):
            data = self._file.read(start, min(start + _BLOCK_BYTES, self._file.size))
            yield np.frombuffer(data, "<u8")

    def publish(self, folder: str, storage: Storage, compactions: int) -> KeyFile:
        """Write the hashes to a file in a folder.

        Raises:
            StorageError: If it cannot be written.
        """
        digest = sha256()
        for block in self.blocks():
            digest.update(block.tobytes())
        name = _name(digest.hexdigest())
        with publish(storage, join_url(folder, name)) as stream:
            stream.write(_header(len(self)))
            for block in self.blocks():
                stream.write(block.tobytes())
        return KeyFile(name=name, nsamples=len(self), compactions=compactions)

    def close(self) -> None:
        """Delete the temporary file; a second call does nothing."""
        self._file.close()


class NewKeys:
    """The keys of samples that are to be appended: to be compared, and in their order; use it in `contextlib.closing`."""

    def __init__(self) -> None:
        self.hashes, self.ordered = KeyHashes(), KeyList()

    def add(self, hashes: Hashes, places: Places) -> None:
        """Add keys, in their order (see `KeyHashes.add`)."""
        self.hashes.add(hashes, places)
        self.ordered.add(hashes)

    def close(self) -> None:
        """Delete the temporary files; a second call does nothing."""
        self.hashes.close()
        self.ordered.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSamples:
    """The samples of a dataset whose keys may not come again.

    Args:
        folder: URL of its folder.
        storage: Where it is.
        version: Its version.
        shards: Its shards, with absolute URLs.
        deleted: Numbers of the deleted samples, whose keys may come again.
    """

    folder: str
    storage: Storage
    version: DatasetVersion
    shards: Sequence[ShardInfo]
    deleted: Numbers

    def add(self, new: NewKeys, shards: Sequence[ShardInfo]) -> tuple[KeyFile, ...]:
        """Return the files of all keys, after those of new samples were compared and written.

        Args:
            new: The keys of the new samples.
            shards: Their shards, with absolute URLs.

        Raises:
            SourceError: If a sample that is there has one of the keys.
            IndexMismatchError: If a file is damaged.
            StorageError: If keys cannot be read or written.
        """
        files = self._complete_files()
        for pairs in self._find_equal(new.hashes, files):
            self._refuse(pairs, shards)
        merged: list[KeyFile] = []
        while files and files[-1].nsamples <= len(new.ordered) + sum(
            one.nsamples for one in merged
        ):
            merged.insert(0, files.pop())
        with closing(KeyList()) as together:
            for block in chain(*map(self._read, merged), new.ordered.blocks()):
                together.add(block)
            last = together.publish(self.folder, self.storage, self.version.compactions)
        return (*files, last)

    def _complete_files(self) -> list[KeyFile]:
        """Return files of all keys; those that have no file yet are read from the shards, and written."""
        compactions, count = self.version.compactions, count_samples(self.shards)
        files = [one for one in self.version.keys if one.compactions == compactions]
        first = sum(one.nsamples for one in files)
        if first > count:
            files, first = [], 0
        if first == count:
            return files
        _log.info("%s: reading the keys of %s", self.folder, plural(count - first, "sample"))
        with closing(KeyList()) as rest:
            for keys in self._read_from(first):
                rest.add(hash_keys(keys))
            if first + len(rest) != count:
                raise IndexMismatchError(
                    f"{first + len(rest)} keys of {plural(count, 'sample')}; run 'shardstream verify'",
                    shard=self.folder,
                )
            return [*files, rest.publish(self.folder, self.storage, compactions)]

    def _read_from(self, number: int) -> Iterator[Sequence[str]]:
        """Yield the keys of the samples from a number on, which is the first of a shard."""
        first = int(self._find(np.array([number]))[0][0])
        for start in range(first, len(self.shards), _CATALOG_SHARDS):
            some = self.shards[start : start + _CATALOG_SHARDS]
            located = LocatedShards(shards=some, indexed=AllIndexed())
            catalog = ShardCatalog(located, self.storage)
            maps = catalog.map_shard if catalog.is_local else None
            yield from iter_keys(catalog.shards, self.storage, maps)

    def _read(self, file: KeyFile) -> Iterator[Hashes]:
        """Yield the hashes of a file."""
        url, digest, header = join_url(self.folder, file.name), sha256(), _header(file.nsamples)
        end = len(header) + file.nsamples * _HASH_BYTES
        is_right = self.storage.read(url, 0, len(header)) == header
        for start in range(len(header), end, _BLOCK_BYTES):
            data = self.storage.read(url, start, min(start + _BLOCK_BYTES, end))
            digest.update(data)
            yield np.frombuffer(data, "<u8")
        if not is_right or _name(digest.hexdigest()) != file.name:
            raise IndexMismatchError(
                "the keys do not match the name of their file",
                remedy="restore the file, or append without the comparison (check_keys=False, --no-key-check)",
                shard=url,
            )

    def _find_equal(self, new: KeyHashes, files: Sequence[KeyFile]) -> Iterator[_Pairs]:
        """Yield pairs of samples that are there and new ones with equal hashes."""
        for hashes, places in _together(new.sorted_blocks()):
            first = 0
            for block in chain.from_iterable(map(self._read, files)):
                at = np.minimum(np.searchsorted(hashes, block), len(hashes) - 1)
                equal = np.flatnonzero(hashes[at] == block)
                if len(equal) and len(left := equal[~np.isin(equal + first, self.deleted)]):
                    yield _Pairs(left + first, places[at[left]])
                first += len(block)

    def _refuse(self, pairs: _Pairs, shards: Sequence[ShardInfo]) -> None:
        """Refuse the first of some keys that are equal, not only their hashes."""
        read = partial(read_keys_by_index, self.storage.read)
        of_shards = zip(*self._find(pairs.numbers), pairs.places.tolist(), strict=True)
        for shard, within, place in of_shards:
            later, number = split_place(place)
            key = read(shards, later, [number])[0]
            if read(self.shards, int(shard), [int(within)])[0] == key:
                others = f", and so may be {plural(len(pairs.numbers) - 1, 'other key')}"
                raise SourceError(
                    f"the key {key!r} of {shards[later].url} is in {self.shards[int(shard)].url} already"
                    f"{others * (len(pairs.numbers) > 1)}; nothing is published",
                    remedy="keys must differ within a dataset: choose others (key=, --key), or delete the samples that are there first",
                    shard=self.folder,
                )

    def _find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the shard of each sample, and the sample's number in it."""
        if isinstance(self.shards, LazyShards):
            return self.shards.find_samples(numbers)
        counts = np.array([shard.nsamples for shard in self.shards])
        ends = np.cumsum(counts)
        places = np.searchsorted(ends, numbers, side="right")
        return places, numbers - (ends - counts)[places]


class _Pairs(NamedTuple):
    numbers: Numbers
    """Samples that are there."""
    places: Places
    """The new sample with the same hash, for each."""


def _together(
    blocks: Iterable[tuple[Hashes, Places]],
) -> Iterator[tuple[Hashes, Places]]:
    """Join sorted blocks to as many keys as are compared in one pass."""
    waiting: list[tuple[Hashes, Places]] = []
    for block in blocks:
        waiting += [block] if len(block[0]) else []
        if sum(len(hashes) for hashes, _ in waiting) >= _SORTED_KEYS:
            yield _join(waiting)
            waiting = []
    if waiting:
        yield _join(waiting)


def _join(blocks: Sequence[tuple[Hashes, Places]]) -> tuple[Hashes, Places]:
    hashes, places = zip(*blocks, strict=True)
    return np.concatenate(hashes), np.concatenate(places)


def _name(digest: str) -> str:
    return f"keys-{digest[:16]}.npy"


def _header(count: int) -> bytes:
    """Return the beginning of a NumPy file of so many hashes."""
    file = io.BytesIO()
    header = {"descr": "<u8", "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()
