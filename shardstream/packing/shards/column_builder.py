"""Collect the values of columns while a shard is written or scanned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardstream.errors import OptionError, SampleError, plural
from shardstream.format import (
    INT_FIELDS,
    JSON_FIELDS,
    Column,
    ShardInfo,
    encode_column_file,
    import_parquet,
    parse_columns,
)
from shardstream.packing.encode import TEXT_FIELDS
from shardstream.tasks import JSON

VALUE_LIMIT_BYTES = 16 << 20
"""Maximum size of a field that holds values of columns."""
_KINDS = {bool: "true or false", int: "numbers", float: "numbers", str: "text"}


ColumnSummary = Mapping[str, tuple[int, str]]
"""Name of a column -> number of its values, and their type in words."""


class ColumnBuilder:
    """The columns of one shard.

    Args:
        columns: The columns to make.
        shard: URL of the shard, for messages.
    """

    def __init__(self, columns: Sequence[Column], shard: str) -> None:
        self.columns = columns
        self._shard = shard
        self._values: dict[Column, dict[str, Any]] = {column: {} for column in columns}
        self._kinds: dict[Column, tuple[str, str]] = {}
        self._by_field: dict[str, list[Column]] = {}

    @property
    def summary(self) -> ColumnSummary:
        """Number and type of the values, by the name of the column."""
        return {
            column.name: (len(values), self._kinds.get(column, ("", ""))[0])
            for column, values in self._values.items()
        }

    def columns_of(self, field: str) -> list[Column]:
        """Return the columns whose values are in a field."""
        found = self._by_field.get(field)
        if found is None:
            found = self._by_field[field] = [
                column
                for column in self.columns
                if column.source == field.lower()
                or (_is_json(field) and column.source.startswith(f"{field.lower()}."))
            ]
        return found

    def add(self, key: str, fields: Mapping[str, bytes | memoryview]) -> None:
        """Take the values of a sample, or of some of its fields.

        Raises:
            SampleError: If a value is not a bool, a number or text, or not of the type of the values before; then none is taken.
        """
        found: list[tuple[Column, Any]] = []
        for field, data in fields.items():
            for column in self.columns_of(field):
                value = self._value(key, field, bytes(data), column)
                found += [] if value is None else [(column, value)]
        for column, value in found:
            self._kinds.setdefault(column, (_KINDS[type(value)], key))
            self._values[column][key] = value

    def encode(self, keys: Sequence[str], info: ShardInfo) -> bytes:
        """Return the file of columns of the finished shard; its samples have these keys, in order."""
        values = {
            column: [found.get(key) for key in keys] for column, found in self._values.items()
        }
        return encode_column_file(keys, values, info)

    def _value(self, key: str, field: str, data: bytes, column: Column) -> Any:
        def failed(problem: str) -> SampleError:
            return SampleError(
                f"the column {column.name} ({column.source}): {problem}",
                shard=self._shard,
                key=key,
                field=field,
            )

        if len(data) > VALUE_LIMIT_BYTES:
            raise failed(f"a field of {len(data)} bytes, the limit is {VALUE_LIMIT_BYTES}")
        try:
            value = _value_of(field, data, column.source[len(field) + 1 :])
        except (ValueError, RecursionError) as error:
            raise failed(f"the value cannot be read: {error}") from error
        if value is None:
            return None
        if type(value) not in _KINDS:
            raise failed(
                f"the value is a {type(value).__name__}; a column holds bools, numbers or text"
            )
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            raise failed(f"{value} needs more than 64 bits")
        kind = _KINDS[type(value)]
        known, first = self._kinds.get(column, (kind, key))
        if known != kind:
            raise failed(f"the value is {kind}, but that of {first} is {known}; make it one type")
        return value


def _is_json(field: str) -> bool:
    return field.rpartition(".")[2].lower() in JSON_FIELDS


def _value_of(field: str, data: bytes, path: str) -> Any:
    """Return the value of a field, or one in its JSON; None if it is missing."""
    kind = field.rpartition(".")[2].lower()
    if kind in JSON_FIELDS:
        value = json.loads(data)  # orjson makes numbers over 64 bits to floats
        for part in path.split(".") if path else ():
            value = value.get(part) if isinstance(value, dict) else None
        return value
    if kind in INT_FIELDS:
        return int(data)
    if kind in TEXT_FIELDS:
        return data.decode()
    raise ValueError(
        "columns are made of whole numbers (cls, id, ...), text and JSON; "
        "write others to a field of JSON"
    )


def checked_columns(
    columns: str | Sequence[str] | Mapping[str, str] | None,
) -> tuple[Column, ...] | None:
    """Return the columns that a user names (see `parse_columns`); None for no columns at all.

    Raises:
        OptionError: If they are invalid, or pyarrow is not installed.
    """
    if columns is None:
        return None
    import_parquet()  # before the first sample is read or written
    return parse_columns(columns)


def columns_identity(columns: Iterable[Column] | None) -> list[JSON] | None:
    """Return columns as JSON, for the identity of a job."""
    return None if columns is None else [f"{name}={source}" for name, source in columns]


def check_summaries(
    columns: Sequence[Column], summaries: Iterable[ColumnSummary], nsamples: int
) -> list[str]:
    """Return a warning for each column that some samples lack.

    Args:
        columns: The columns.
        summaries: Those of all shards.
        nsamples: Number of all samples.

    Raises:
        OptionError: If no sample has a value, or values of two shards have different types.
    """
    totals = dict.fromkeys((column.name for column in columns), 0)
    kinds: dict[str, str] = {}
    for summary in summaries:
        for name, (count, kind) in summary.items():
            totals[name] += count
            if count and kinds.setdefault(name, kind) != kind:
                raise OptionError(
                    f"the column {name} has {kinds[name]} in some shards and {kind} in others; make it one type"
                )
    warnings = []
    for name, source in columns:
        if not totals[name]:
            raise OptionError(
                f"no sample has a value for the column {name} ({source}); "
                "'shardstream ls' lists the fields, correct columns= (--columns)"
            )
        if totals[name] < nsamples:
            warnings.append(
                f"column {name} ({source}): {plural(nsamples - totals[name], 'sample')} of {nsamples:,} without a value"
            )
    return warnings
