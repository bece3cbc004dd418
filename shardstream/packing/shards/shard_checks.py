"""Compare a shard that was read with the manifest and with the files next to it; all functions return problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np

from shardstream.errors import ShardStreamError, plural
from shardstream.format import (
    KEY_COLUMN,
    Member,
    Offsets,
    ShardInfo,
    decode_column_file,
    decode_index,
    decode_member_index,
    encode_member_index,
)
from shardstream.packing.shards.column_builder import ColumnBuilder
from shardstream.packing.shards.shard_scan import Problem
from shardstream.storage import is_compressed

_INDEX_AGAIN = "run 'shardstream index' again"
_COLUMNS_AGAIN = "run 'shardstream index --columns' again"
_CHANGED = f"fetch it again, or {_INDEX_AGAIN} if it was changed on purpose"


@contextmanager
def noted(
    problems: list[Problem], url: str, *, but: type[ShardStreamError] | None = None
) -> Iterator[None]:
    """Append the error of a block to the problems, by default as one of this file; raise one of the type ``but``."""
    try:
        yield
    except ShardStreamError as error:
        if but is not None and isinstance(error, but):
            raise
        problem = Problem(
            shard=error.shard or url,
            what=error.what,
            remedy=error.remedy,
            offset=error.offset,
            key=error.key,
        )
        problems.append(problem)


def check_file(info: ShardInfo, *, sha256: str, nbytes: int) -> Iterator[Problem]:
    """Compare length and sha256 of a file with the manifest."""
    if info.filesize is not None and info.filesize != nbytes:
        yield Problem(
            shard=info.url,
            what=f"{nbytes} bytes, the manifest says {info.filesize}: it was cut or written again",
            remedy=_CHANGED,
        )
    elif info.sha256 is not None and info.sha256.lower() != sha256:
        yield Problem(
            shard=info.url,
            what=f"sha256 is {sha256[:16]}…, the manifest says {info.sha256[:16]}…: some bytes changed",
            remedy=_CHANGED,
        )


def check_count(info: ShardInfo, found: int, *, has_index: bool) -> Iterator[Problem]:
    """Compare the number of samples with the manifest; warn of a missing index."""
    if not has_index and not is_compressed(info.url):
        yield Problem(
            shard=info.url,
            what=f"its index, {info.index_url.rsplit('/', 1)[-1]}, is missing",
            remedy="run 'shardstream index' to read it by number, shuffled and resumed exactly",
            severity="warning",
        )
    if info.nsamples not in (None, found):
        yield Problem(
            shard=info.url,
            what=f"{plural(found, 'sample')}, the manifest or the index says {info.nsamples}",
            remedy=_CHANGED,
        )


def check_index(data: bytes, scanned: Offsets, *, url: str) -> Iterator[Problem]:
    """Compare an index with the offsets that a fresh scan found."""
    index = decode_index(data, url=url)
    if np.array_equal(index, scanned):
        return
    common = min(len(index), len(scanned))
    differing = np.flatnonzero(index[:common] != scanned[:common])
    number = int(differing[0]) if differing.size else common - 1
    indexed_text = f"byte {index[number]}" if differing.size else plural(len(index) - 1, "sample")
    scanned_text = f"byte {scanned[number]}" if differing.size else f"{len(scanned) - 1}"
    yield Problem(
        shard=url,
        what=f"the index is not that of its tar: it says {indexed_text} where a scan finds {scanned_text} (sample {number} of the shard)",
        remedy=_INDEX_AGAIN,
    )


def check_members(data: bytes, members: Sequence[Member], *, url: str) -> Iterator[Problem]:
    """Compare an index of members with the members that a fresh scan found."""
    listed = decode_member_index(data, url=url)
    read = decode_member_index(encode_member_index(members, shard=url))
    for number, (one, other) in enumerate(zip_longest(listed, read)):
        if one != other:
            yield Problem(
                shard=url,
                what=f"it is not that of its tar: sample {number} of the shard has {_shown(other)}, it says {_shown(one)}",
                remedy="run 'shardstream index --members' again",
            )
            return


def check_columns(
    data: bytes, builder: ColumnBuilder, keys: Sequence[str], info: ShardInfo
) -> Iterator[Problem]:
    """Compare a file of columns with the values that a fresh scan found, the first wrong one of each column.

    Args:
        data: The file.
        builder: The values.
        keys: Keys of the samples.
        info: The shard as it was read.
    """
    found = decode_column_file(data, info, None)
    read = decode_column_file(builder.encode(keys, info), info, None)
    if found[KEY_COLUMN] != read[KEY_COLUMN]:
        yield Problem(
            shard=info.columns_url,
            what="the keys are not those of the shard",
            remedy=_COLUMNS_AGAIN,
        )
        return
    for name in read.column_names:
        values = zip(keys, found[name].to_pylist(), read[name].to_pylist(), strict=True)
        wrong = next((one for one in values if not _is_same(*one[1:])), None)
        if wrong is not None:
            key, listed, value = wrong
            yield Problem(
                shard=info.columns_url,
                what=f"the column {name} says {listed!r:.60}, the sample has {value!r:.60}",
                remedy=_COLUMNS_AGAIN,
                key=key,
            )


def check_presence(columns: Mapping[str, Sequence[str] | None]) -> Iterator[Problem]:
    """Compare the columns of all shards: readers need the same in each.

    Args:
        columns: URL of a shard -> its columns; None if it has no file of columns.
    """
    first = next(((url, found) for url, found in columns.items() if found is not None), None)
    for url, found in columns.items() if first is not None else ():
        if first is not None and found != first[1]:
            listed = (
                "no columns" if found is None else f"the columns {', '.join(found) or 'of keys'}"
            )
            yield Problem(
                shard=url,
                what=f"{listed}, but {first[0]} has {', '.join(first[1]) or 'those of keys'}",
                remedy="run 'shardstream index --columns' on all shards",
            )


def _is_same(one: Any, other: Any) -> bool:
    both_nan = one != one and other != other  # noqa: PLR0124
    return type(one) is type(other) and (one == other or both_nan)


def _shown(members: Sequence[tuple[str, int, int, str]] | None) -> str:
    if members is None:
        return "nothing"
    return ", ".join(f"{field} at byte {start}" for field, start, *_ in members)[:200]
