"""Checks of `verify`: pure functions that return problems; the search for repeated keys, also before a dataset is published."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from shardstream.errors import ChangedError, ShardStreamError, SourceError, plural
from shardstream.format import (
    INDEX_SUFFIX,
    Offsets,
    ShardInfo,
    decode_index,
    iter_members,
    split_member_name,
)
from shardstream.packing.job.key_hashes import KeyHashes, Places
from shardstream.storage import OutputFolder, join_url

_LISTED_KEYS = 20
_NUMBER_BITS = 32
_INDEX_AGAIN = "run 'shardstream index' again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    Args:
        shard: URL of the shard, or of its index.
        what: Description of the problem.
        remedy: One action; empty if none is known.
        offset: Byte offset in that file.
        key: Key of the sample.
        severity: An error loses or changes samples, or stops a reader; a warning does not.
    """

    shard: str
    what: str
    remedy: str = ""
    offset: int | None = None
    key: str | None = None
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        location = self.shard
        if self.offset is not None:
            location += f", byte {self.offset}"
        if self.key is not None:
            location += f", sample {self.key!r}"
        return f"{location}: {self.what}" + (f"; {self.remedy}" if self.remedy else "")


class KeyPlace(NamedTuple):
    """A key, where it was found."""

    key: str
    shard: str
    """URL of the shard."""
    offset: int
    """Offset of the sample in the tar."""


def problem_from_error(error: ShardStreamError, *, shard: str) -> Problem:
    """Return an error as a `Problem`, by default of this shard."""
    return Problem(
        shard=error.shard or shard,
        what=error.what,
        remedy=error.remedy,
        offset=error.offset,
        key=error.key,
    )


def check_file(info: ShardInfo, *, sha256: str, nbytes: int) -> Iterator[Problem]:
    """Compare length and sha256 of a file with the manifest."""
    if info.filesize is not None and info.filesize != nbytes:
        yield Problem(
            shard=info.url,
            what=f"{nbytes} bytes, the manifest says {info.filesize}: it was cut or written again",
            remedy=f"fetch it again, or {_INDEX_AGAIN} if it was changed on purpose",
        )
    elif info.sha256 is not None and info.sha256.lower() != sha256:
        yield Problem(
            shard=info.url,
            what=f"sha256 is {sha256[:16]}…, the manifest says {info.sha256[:16]}…: some bytes changed",
            remedy=f"fetch it again, or {_INDEX_AGAIN} if it was changed on purpose",
        )


def check_index(index: Offsets, scanned: Offsets, *, url: str) -> Problem | None:
    """Compare an index with the offsets that a fresh scan found."""
    if np.array_equal(index, scanned):
        return None
    common = min(len(index), len(scanned))
    differing = np.flatnonzero(index[:common] != scanned[:common])
    number = int(differing[0]) if differing.size else common - 1
    indexed_text = f"byte {index[number]}" if differing.size else plural(len(index) - 1, "sample")
    scanned_text = f"byte {scanned[number]}" if differing.size else f"{len(scanned) - 1}"
    return Problem(
        shard=url,
        what=f"the index is not that of its tar: it says {indexed_text} where a scan finds {scanned_text} (sample {number} of the shard)",
        remedy=_INDEX_AGAIN,
    )


def place_of(shard: int, count: int) -> Places:
    """Return the places of all samples of a shard, in order; shape (count,). Shard and number in it are 32 bits each."""
    return np.arange(count, dtype=np.int64) + (shard << _NUMBER_BITS)


def split_place(place: int) -> tuple[int, int]:
    """Return the number of the shard, and the number of the sample in it.

    >>> split_place(int(place_of(3, 8)[5]))
    (3, 5)
    """
    return place >> _NUMBER_BITS, place & ((1 << _NUMBER_BITS) - 1)


def find_repeated_keys(
    keys: KeyHashes, read_keys: Callable[[Sequence[int]], Mapping[int, KeyPlace]]
) -> Iterator[Problem]:
    """Find keys that come more than once: 16 bytes a sample in a temporary file.

    Args:
        keys: The keys of all shards, with their places (see `place_of`); within one shard they differ.
        read_keys: Reads the keys at some places, to distinguish equal keys from equal hashes.
    """
    pairs, total = _equal_hashes(keys)
    listed, rest = sorted(pairs[:_LISTED_KEYS]), pairs[_LISTED_KEYS:]
    found = read_keys(sorted({place for pair in [*listed, *rest] for place in pair}))
    for later, earlier in listed:
        if found[later].key == found[earlier].key:
            yield _repeated_key_problem(found[later], found[earlier])
    if rest:
        yield Problem(
            shard=found[rest[0][0]].shard,
            what=f"{plural(total - _LISTED_KEYS, 'more key')} in two shards",
            remedy="check whether a shard was copied under another name",
        )


def _equal_hashes(keys: KeyHashes) -> tuple[list[tuple[int, int]], int]:
    """Return later and earlier place of some keys with equal hashes, and the number of all."""
    pairs: list[tuple[int, int]] = []
    total = 0
    for hashes, places in keys.sorted_blocks():
        repeats = np.flatnonzero(hashes[1:] == hashes[:-1])
        total += len(repeats)
        some = repeats[: _LISTED_KEYS + 1 - len(pairs)]
        pairs += zip(places[some + 1].tolist(), places[some].tolist(), strict=True)
    return pairs, total


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
    pairs, total = _equal_hashes(keys)
    for later, earlier in sorted(pairs):
        (key, second), (other, first) = (
            _key_at(place, shards, folder) for place in (later, earlier)
        )
        if key == other:  # else the hashes are equal by chance
            more = f", and so do {plural(total - 1, 'other key')}" if total > 1 else ""
            raise SourceError(
                f"the key {key!r} comes twice, in {first} and in {second}{more}; nothing is published, "
                "choose other keys, e.g. key='{index:08d}' (--key), for reshard map= with another __key__, for ss.ray.write another column, and replace the shards with overwrite=True (--overwrite)",
                shard=folder.url,
            )


def _key_at(place: int, shards: Sequence[ShardInfo], folder: OutputFolder) -> tuple[str, str]:
    """Return the key at a place, and the name of its shard."""
    number, sample = split_place(place)
    name = shards[number].url
    index_name = name + INDEX_SUFFIX
    offsets = decode_index(folder.read(index_name), url=join_url(folder.url, index_name))
    start, end = int(offsets[sample]), int(offsets[sample + 1])
    return read_key(partial(folder.read, name), join_url(folder.url, name), start, end), name


def read_key(read: Callable[[int, int], bytes], shard: str, start: int, end: int) -> str:
    """Read the key of the sample at an offset.

    Args:
        read: Returns the bytes of the shard between two offsets.
        shard: URL of the shard, for messages.
        start: Offset of the sample.
        end: Offset after it.

    Raises:
        ChangedError: If there is none.
    """
    members = iter_members(lambda at, size: read(at, at + size), start=start, end=end, shard=shard)
    parts = next((parts for name, *_ in members if (parts := split_member_name(name))), None)
    if parts is None:
        raise ChangedError("the shard was replaced meanwhile; run this again", shard=shard)
    return parts[0]


def _repeated_key_problem(later: KeyPlace, earlier: KeyPlace) -> Problem:
    return Problem(
        shard=later.shard,
        what=f"the key is in {earlier.shard} as well, at byte {earlier.offset}",
        remedy="keys must differ within a dataset: pack again with other keys, or leave one shard out",
        offset=later.offset,
        key=later.key,
    )
