"""Checks of `verify`: pure functions that return problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardstream.errors import ShardStreamError, plural
from shardstream.format import Offsets, ShardInfo

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
