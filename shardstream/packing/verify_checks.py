"""Checks of `verify`: pure functions that return problems, and the search for repeated keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from shardstream.errors import ShardStreamError, plural
from shardstream.format import Offsets, ShardInfo
from shardstream.packing.key_hashes import Hashes

_LISTED_KEYS = 20
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


class ShardKeys(NamedTuple):
    """The keys of one shard, small enough to keep for all shards."""

    shard: str
    hashes: Hashes
    offsets: Offsets
    """Shape (n + 1,): where each sample is."""


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


def find_repeated_keys(
    shards: Sequence[ShardKeys], read_key: Callable[[str, int, int], str | None]
) -> Iterator[Problem]:
    """Find keys that are in more than one shard, by sorting the hashes of all: 24 bytes a sample.

    Args:
        shards: The keys of each shard; within one they differ.
        read_key: ``read_key(shard, start, end)``: returns the key of that sample, to distinguish equal keys from equal hashes;
            None if it cannot be read.
    """
    if not shards:
        return
    hashes = np.concatenate([shard.hashes for shard in shards])
    firsts = np.cumsum([0] + [len(shard.hashes) for shard in shards])
    order = np.argsort(hashes, kind="stable")
    repeats = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])

    def locate(number: int) -> tuple[str, int, int]:
        shard_number = int(np.searchsorted(firsts, number, side="right")) - 1
        number_in_shard = number - int(firsts[shard_number])
        offsets = shards[shard_number].offsets
        return (
            shards[shard_number].shard,
            int(offsets[number_in_shard]),
            int(offsets[number_in_shard + 1]),
        )

    pairs = sorted(
        (int(order[row + 1]), int(order[row])) for row in repeats[:_LISTED_KEYS].tolist()
    )
    for later, earlier in pairs:
        key = read_key(*locate(later))
        if key == read_key(*locate(earlier)):
            yield _repeated_key_problem(key, locate(later), locate(earlier))
    if len(repeats) > _LISTED_KEYS:
        yield Problem(
            shard=locate(int(order[repeats[_LISTED_KEYS] + 1]))[0],
            what=f"{plural(len(repeats) - _LISTED_KEYS, 'more key')} in two shards",
            remedy="check whether a shard was copied under another name",
        )


def _repeated_key_problem(
    key: str | None, later: tuple[str, int, int], earlier: tuple[str, int, int]
) -> Problem:
    return Problem(
        shard=later[0],
        what=f"the key is in {earlier[0]} as well, at byte {earlier[1]}",
        remedy="keys must differ within a dataset: pack again with other keys, or leave one shard out",
        offset=later[1],
        key=key,
    )
