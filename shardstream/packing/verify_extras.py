"""Compare the files of columns and of members, which a shard may have, with its samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from shardstream.errors import (
    NotFoundError,
    OptionError,
    SampleError,
    ShardStreamError,
)
from shardstream.format import (
    KEY_COLUMN,
    Column,
    Member,
    ShardInfo,
    ShardScan,
    columns_in_file,
    decode_column_file,
    decode_member_index,
    encode_member_index,
)
from shardstream.packing.shards.column_builder import ColumnBuilder
from shardstream.packing.verify_checks import Problem, problem_from_error
from shardstream.storage import Storage, is_compressed

_COLUMNS_AGAIN = "run 'shardstream index --columns' again"
_MEMBERS_AGAIN = "run 'shardstream index --members' again"


class ExtraFiles:
    """The file of columns and the index of members of a shard, if there are any.

    Args:
        info: The shard.
        storage: Where the files are.

    Attributes:
        columns: Columns of the file; None if there is none, or it is not such a file.
        builder: Collects the values of these columns in a pass over the shard.
        has_members: Whether there is an index of members.
        members: Set it to the members of the shard, if there is such an index.
    """

    def __init__(self, info: ShardInfo, storage: Storage) -> None:
        self._info = info
        self._problems: list[Problem] = []
        self._data = self._read(storage, info.columns_url)
        self._index = None if is_compressed(info.url) else self._read(storage, info.members_url)
        self.has_members = self._index is not None
        self.members: Sequence[Member] = ()
        self.columns = self._columns()
        self.builder = None if self.columns is None else ColumnBuilder(self.columns, shard=info.url)

    def check(self, info: ShardInfo, scan: ShardScan) -> Iterator[Problem]:
        """Compare both files with the shard and its samples, as they were read."""
        yield from self._problems
        if self.builder is not None and self._data is not None:
            try:
                yield from self._check_columns(info, scan.keys, self.builder, self._data)
            except ShardStreamError as error:
                yield problem_from_error(error, shard=info.columns_url)
        if self._index is not None:
            yield from self._check_members(self._index)

    def _read(self, storage: Storage, url: str) -> bytes | None:
        try:
            return storage.read_bounded(url)
        except NotFoundError:
            return None
        except ShardStreamError as error:
            self._problems.append(problem_from_error(error, shard=url))
            return None

    def _columns(self) -> tuple[Column, ...] | None:
        try:
            return (
                None
                if self._data is None
                else columns_in_file(self._data, url=self._info.columns_url)
            )
        except OptionError:  # no pyarrow to read them
            return None
        except ShardStreamError as error:
            self._problems.append(problem_from_error(error, shard=self._info.columns_url))
            return None

    def _check_columns(
        self, info: ShardInfo, keys: Sequence[str], builder: ColumnBuilder, data: bytes
    ) -> Iterator[Problem]:
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
            values = found[name].to_pylist(), read[name].to_pylist()
            for key, listed, value in zip(keys, *values, strict=True):
                if not _is_same(listed, value):
                    yield Problem(
                        shard=info.columns_url,
                        what=f"the column {name} says {listed!r:.60}, the sample has {value!r:.60}",
                        remedy=_COLUMNS_AGAIN,
                        key=key,
                    )
                    break  # the first of each column

    def _check_members(self, data: bytes) -> Iterator[Problem]:
        url = self._info.members_url
        try:
            listed = decode_member_index(data, url=url)
            read = decode_member_index(encode_member_index(self.members, shard=self._info.url))
        except SampleError:  # a name that such an index cannot hold
            return
        except ShardStreamError as error:
            yield problem_from_error(error, shard=url)
            return
        for number, (one, other) in enumerate(zip_longest(listed, read)):
            if one != other:
                yield Problem(
                    shard=url,
                    what=f"it is not that of its tar: sample {number} of the shard has {_shown(other)}, "
                    f"it says {_shown(one)}",
                    remedy=_MEMBERS_AGAIN,
                )
                return


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
