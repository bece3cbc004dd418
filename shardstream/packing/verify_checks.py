"""Checks of `verify`: pure functions that return problems, and the search for repeated keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from shardstream.errors import ShardStreamError, plural
from shardstream.format import Offsets, ShardInfo
from shardstream.packing.key_hashes import KeyHashes, Places

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
    pairs: list[tuple[int, int]] = []  # later and earlier place
    total = 0
    for hashes, places in keys.sorted_blocks():
        repeats = np.flatnonzero(hashes[1:] == hashes[:-1])
        total += len(repeats)
        some = repeats[: _LISTED_KEYS + 1 - len(pairs)]
        pairs += zip(places[some + 1].tolist(), places[some].tolist(), strict=True)
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


def _repeated_key_problem(later: KeyPlace, earlier: KeyPlace) -> Problem:
    return Problem(
        shard=later.shard,
        what=f"the key is in {earlier.shard} as well, at byte {earlier.offset}",
        remedy="keys must differ within a dataset: pack again with other keys, or leave one shard out",
        offset=later.offset,
        key=later.key,
    )
