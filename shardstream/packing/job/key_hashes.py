"""Find repeated keys in bounded memory, by sorting their hashes; compare keys with those of a dataset.

64 bits of each key of a dataset are in files next to its manifest, in the order of the samples. The first append reads the keys of the dataset and
writes them; later ones read 8 bytes a sample. Small files are merged with the next one, so that a dataset of n samples has about log n of them.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardstream.catalog import ShardCatalog, iter_keys
from shardstream.errors import ChangedError, IndexMismatchError, SourceError, get_logger, plural
from shardstream.format import (
    DatasetVersion,
    KeyFile,
    ShardInfo,
    decode_index,
    iter_members,
    split_member_name,
)
from shardstream.samples import Numbers
from shardstream.storage import (
    AllIndexed,
    LazyShards,
    LocatedShards,
    OutputFolder,
    Storage,
    TemporaryFile,
    count_samples,
    join_url,
    publish,
)

OTHER_KEYS = (
    "keys must differ within a dataset: choose others (pack: key='{index:08d}', --key; reshard: map= with another __key__; ss.ray.write: "
    "another column) and replace the shards with overwrite=True (--overwrite), or leave one shard out"
)
"""What to do about a key that comes twice."""

Hashes = npt.NDArray[np.uint64]
"""Shape (n,): 64 bits of each key."""
Places = npt.NDArray[np.int64]
"""Shape (n,): number of the sample that has each key, or its shard and its number in that (see `place_of`)."""

ReadKeys = Callable[[int, Sequence[int]], Sequence[str]]
"""Number of a shard, numbers of samples in it -> their keys."""

_KEPT_KEYS = 1 << 19  # in memory: 8 MiB, and 40 MiB while they are sorted
_PARTITION_BITS = 8  # 10^9 keys make partitions of 63 MB
_PAIR_BYTES = 16
_EMPTY = hashlib.blake2b(digest_size=8)  # a copy takes 0.25 us, a new one 0.4
_BATCH_KEYS = 4096
_LISTED_KEYS = 20
_SAMPLE_BITS = 32  # of a place
_log = get_logger(__name__)

_HASH_BYTES = 8
_BLOCK_BYTES = 1 << 23  # read at a time
_SORTED_KEYS = (
    1 << 23
)  # new keys that are compared in one pass over the files: 128 MB with their places
_CATALOG_SHARDS = 1024  # whose keys are read at a time


def hash_keys(keys: Sequence[str]) -> Hashes:
    """Return 64 bits of each key, equal for equal keys."""
    digests: list[bytes] = []
    for key in keys:
        one = _EMPTY.copy()
        one.update(key.encode("utf-8", "surrogateescape"))
        digests.append(one.digest())
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def encode_hashes(hashes: Hashes) -> str:
    """Return hashes as text for JSON."""
    return b64encode(hashes.tobytes()).decode()


def decode_hashes(text: str) -> Hashes:
    """Return the hashes that `encode_hashes` has written."""
    return np.frombuffer(b64decode(text), dtype=np.uint64)


class KeyHashes:
    """Hashes of keys with their places, sorted in partitions of a temporary file; use it in `contextlib.closing`.

    Memory holds up to ``kept`` keys, 16 bytes each, and later one partition: a 256th of all. The file has no name and 16 bytes for each
    key; it vanishes with the process.

    Args:
        kept: Keys that are collected in memory before they go to the file.

    Raises:
        StorageError: If the temporary folder is full.
    """

    def __init__(self, *, kept: int = _KEPT_KEYS) -> None:
        self.count = 0
        """Number of keys."""
        self._kept = kept
        self._waiting: list[tuple[Hashes, Places]] = []
        self._num_waiting = 0
        self._file: TemporaryFile | None = None
        self._runs: list[npt.NDArray[np.int64]] = []  # of each run: pairs before each partition

    def close(self) -> None:
        """Delete the temporary file; a second call does nothing."""
        if self._file is not None:
            self._file.close()

    def add(self, hashes: Hashes, places: Places) -> None:
        """Add keys, in any order.

        Args:
            hashes: Their hashes, shape (n,).
            places: Their places, shape (n,); those of all keys differ.
        """
        self.count += len(hashes)
        self._waiting.append((hashes, places))
        self._num_waiting += len(hashes)
        if self._num_waiting >= self._kept:
            self._write_run()

    def sorted_blocks(self) -> Iterator[tuple[Hashes, Places]]:
        """Yield all keys, sorted by hash, then by place; equal hashes are in one block."""
        if not self._runs:
            found = self._take_waiting()
            self._waiting, self._num_waiting = [found], len(found[0])
            yield _sort(*found)
            return
        self._write_run()
        starts = np.cumsum([0, *(int(run[-1]) for run in self._runs)])[:-1]
        for partition in range(1 << _PARTITION_BITS):
            pieces = [
                self._read(start + int(run[partition]), int(run[partition + 1] - run[partition]))
                for start, run in zip(starts.tolist(), self._runs, strict=True)
            ]
            pairs = np.concatenate(pieces)
            yield _sort(pairs[:, 0], pairs[:, 1].view(np.int64))

    def _take_waiting(self) -> tuple[Hashes, Places]:
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        empty = (np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64))
        hashes, places = zip(*(waiting or [empty]), strict=True)
        return np.concatenate(hashes), np.concatenate(places)

    def _write_run(self) -> None:
        """Append the waiting keys to the file, grouped by partition."""
        hashes, places = self._take_waiting()
        partitions = (hashes >> np.uint64(64 - _PARTITION_BITS)).astype(np.uint16)
        order = np.argsort(partitions, kind="stable")
        pairs = np.stack((hashes[order], places[order].view(np.uint64)), axis=1)
        counts = np.bincount(partitions, minlength=1 << _PARTITION_BITS)
        if self._file is None:
            self._file = TemporaryFile(f"{_PAIR_BYTES} bytes for each key")
        self._file.append(pairs.tobytes())
        self._runs.append(np.concatenate(([0], np.cumsum(counts))).astype(np.int64))

    def _read(self, first: int, count: int) -> npt.NDArray[np.uint64]:
        if self._file is None:
            raise AssertionError("runs are in the file")
        data = self._file.read(first * _PAIR_BYTES, (first + count) * _PAIR_BYTES)
        return np.frombuffer(data, dtype=np.uint64).reshape(-1, 2)


class RepeatedKey(NamedTuple):
    """A key that two samples have."""

    key: str
    first: str
    """The shard, the file or the row that has it first."""
    later: str

    def __str__(self) -> str:
        return f"the key {self.key!r} comes twice, in {self.first} and in {self.later}"


class RepeatedKeys(NamedTuple):
    """Keys that come more than once."""

    listed: Sequence[RepeatedKey]
    """The first of them in the order of the samples, up to 20."""
    others: int
    """Number of the rest."""

    def __str__(self) -> str:
        others = len(self.listed) - 1 + self.others
        return f"{self.listed[0]}" + (f", and so do {plural(others, 'other key')}" * bool(others))


def place_of(shard: int, count: int) -> Places:
    """Return the places of all samples of a shard, in order; shape (count,). Shard and number in it are 32 bits each."""
    return np.arange(count, dtype=np.int64) + (shard << _SAMPLE_BITS)


def split_place(place: int) -> tuple[int, int]:
    """Return shard and number of a place (see `place_of`)."""
    return place >> _SAMPLE_BITS, place & ((1 << _SAMPLE_BITS) - 1)


def find_repeated_keys(
    keys: KeyHashes, shards: Sequence[ShardInfo], read_keys: ReadKeys
) -> RepeatedKeys | None:
    """Find keys that samples of several shards have; None if all keys differ.

    Args:
        keys: The keys of all shards, with their places (see `place_of`).
        shards: The shards.
        read_keys: Reads some keys of a shard, to distinguish equal keys from equal hashes.
    """

    def key_of(places: Sequence[int]) -> dict[int, str]:
        found: dict[int, str] = {}
        for shard, mine in itertools.groupby(places, lambda place: place >> _SAMPLE_BITS):
            listed = list(mine)
            samples = [place - (shard << _SAMPLE_BITS) for place in listed]
            found |= zip(listed, read_keys(shard, samples), strict=True)
        return found

    found, others = _equal_keys(keys, key_of)
    listed = [
        RepeatedKey(key, *(shards[place >> _SAMPLE_BITS].url for place in pair))
        for key, *pair in found
    ]
    return RepeatedKeys(listed, others) if listed else None


def refuse_repeated_keys(
    keys: KeyHashes, shards: Sequence[ShardInfo], folder: OutputFolder
) -> None:
    """Refuse to publish shards in which a key comes twice.

    Args:
        keys: The keys of all shards, with their places (see `place_of`).
        shards: The shards, which are in the folder with their indexes.
        folder: Folder of the dataset.

    Raises:
        SourceError: If there is such a key; names two of its shards.
    """
    if not keys.count:  # none can repeat
        return

    def read(name: str, start: int, end: int | None) -> bytes:
        data = folder.read(name, start, end)
        if data is None:
            raise ChangedError(
                f"{name} was deleted meanwhile; nothing is published, run this again",
                shard=folder.url,
            )
        return data

    found = find_repeated_keys(keys, shards, partial(read_keys_by_index, read, shards))
    if found is not None:
        raise SourceError(f"{found}; nothing is published", remedy=OTHER_KEYS, shard=folder.url)


def read_keys_by_index(
    read: Callable[[str, int, int | None], bytes],
    shards: Sequence[ShardInfo],
    shard: int,
    samples: Sequence[int],
) -> list[str]:
    """Read the keys of some samples of a shard that has an index.

    Args:
        read: Returns the bytes of a file between two offsets.
        shards: The shards, with URLs or names that ``read`` takes.
        shard: Number of the shard.
        samples: Numbers of the samples in it.

    Raises:
        ChangedError: If the shard was replaced.
    """
    info, keys = shards[shard], list[str]()
    offsets = decode_index(read(info.index_url, 0, None), url=info.index_url)
    for sample in samples:
        start, end = int(offsets[sample]), int(offsets[sample + 1])
        members = iter_members(
            lambda at, size: read(info.url, at, at + size), start=start, end=end, shard=info.url
        )
        parts = next((parts for name, *_ in members if (parts := split_member_name(name))), None)
        if parts is None:
            raise ChangedError("the shard was replaced meanwhile; run this again", shard=info.url)
        keys.append(parts[0])
    return keys


def find_repeat(keys: Iterable[str], key_at: Callable[[int], str]) -> tuple[int, int] | None:
    """Return the numbers of the first key that comes again, and of its first repetition; None if all keys differ.

    Args:
        keys: All keys.
        key_at: Returns a key by its number.
    """
    with closing(KeyHashes()) as hashes:
        iterator = iter(keys)
        while some := list(itertools.islice(iterator, _BATCH_KEYS)):
            numbers = np.arange(hashes.count, hashes.count + len(some), dtype=np.int64)
            hashes.add(hash_keys(some), numbers)
        found, _ = _equal_keys(hashes, lambda places: {place: key_at(place) for place in places})
    return found[0][1:] if found else None


def _equal_keys(
    keys: KeyHashes, read: Callable[[Sequence[int]], Mapping[int, str]]
) -> tuple[list[tuple[str, int, int]], int]:
    """Return the first keys that come again, each with two of its places, and the number of the others."""
    pairs: list[tuple[int, int]] = []  # later place, and the one before it
    total = 0
    for hashes, places in keys.sorted_blocks():
        equal = np.flatnonzero(hashes[1:] == hashes[:-1])
        total += len(equal)
        some = equal[np.argsort(places[equal + 1])][:_LISTED_KEYS]
        pairs += zip(places[some + 1].tolist(), places[some].tolist(), strict=True)
        pairs = sorted(pairs)[:_LISTED_KEYS]
    if not pairs:
        return [], 0
    found = read(sorted({place for pair in pairs for place in pair}))
    # Else the hashes are equal by chance.
    same = [(found[one], one, later) for later, one in pairs if found[one] == found[later]]
    return same, total - len(pairs)


def _sort(hashes: Hashes, places: Places) -> tuple[Hashes, Places]:
    order = np.argsort(hashes)  # 0.01 us a key, by places as well 0.07
    found = hashes[order]
    if (found[1:] == found[:-1]).any():
        order = np.lexsort((places, hashes))
    return hashes[order], places[order]


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
