"""Collect the values of columns while a shard is written or scanned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardstream.codecs import properties_of, read_property
from shardstream.errors import OptionError, SampleError, ShardStreamError, plural
from shardstream.format import (
    INT_FIELDS,
    JSON_FIELDS,
    TEXT_FIELDS,
    Column,
    ColumnSources,
    ShardInfo,
    encode_column_file,
    import_parquet,
    parse_columns,
)
from shardstream.storage import FieldFile
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
        self._functions = [(one, one.function) for one in columns if one.function is not None]
        self._sample: dict[str, Any] = {}  # whose members come one by one

    @property
    def summary(self) -> ColumnSummary:
        """Number and type of the values, by the name of the column."""
        return {
            column.name: (len(values), self._kinds.get(column, ("", ""))[0])
            for column, values in self._values.items()
        }

    def takes(self, field: str) -> bool:
        """Return whether values are made of a field."""
        return bool(self._functions or self._columns_of(field))

    def _columns_of(self, field: str) -> list[Column]:
        """Return the columns whose values are in a field."""
        found = self._by_field.get(field)
        if found is None:
            found = self._by_field[field] = [
                column
                for column in self.columns
                if column.source == field.lower()
                or (
                    column.source.startswith(f"{field.lower()}.")
                    and (_is_json(field) or _path(column, field) in properties_of(field))
                )
            ]
        return found

    def add(self, key: str, fields: Mapping[str, bytes | memoryview]) -> None:
        """Take the values of a sample.

        Raises:
            SampleError: If a value is not a bool, a number or text, or not of the type of the values before; then none is taken.
        """
        found = [
            one
            for field, data in fields.items()
            if self._columns_of(field)
            for one in self._values_in(key, field, FieldFile(bytes(data)))
        ]
        if self._functions:
            found += self._results({"__key__": key} | {n: bytes(v) for n, v in fields.items()})
        self._take(key, found)

    def add_member(self, key: str, field: str, file: FieldFile) -> None:
        """Take the values of a field; those of a sample come one after the other.

        Raises:
            SampleError: As `add`.
        """
        if self._functions:
            if key != self._sample.get("__key__"):
                self._end_sample()
            self._sample |= {"__key__": key, field: file.read()}
        self._take(key, self._values_in(key, field, file))

    def encode(self, keys: Sequence[str], info: ShardInfo) -> bytes:
        """Return the file of columns of the finished shard; its samples have these keys, in order."""
        self._end_sample()
        values = {
            column: [found.get(key) for key in keys] for column, found in self._values.items()
        }
        return encode_column_file(keys, values, info)

    def _values_in(self, key: str, field: str, file: FieldFile) -> list[tuple[Column, Any]]:
        return [(one, self._value(key, field, file, one)) for one in self._columns_of(field)]

    def _results(self, sample: dict[str, Any]) -> list[tuple[Column, Any]]:
        """Return the results of the functions for a sample."""
        key, found = sample["__key__"], list[tuple[Column, Any]]()
        for column, function in self._functions:
            try:
                value = function(dict(sample))
            except Exception as error:
                error.add_note(f"in the column {column.name} of sample {key!r} in {self._shard}")
                raise
            value = value.item() if isinstance(value, np.generic) else value
            found.append((column, self._checked(value, column, key, None)))
        return found

    def _end_sample(self) -> None:
        sample, self._sample = self._sample, {}
        if sample:
            self._take(sample["__key__"], self._results(sample))

    def _take(self, key: str, found: Iterable[tuple[Column, Any]]) -> None:
        for column, value in found:
            if value is not None:
                self._kinds.setdefault(column, (_KINDS[type(value)], key))
                self._values[column][key] = value

    def _value(self, key: str, field: str, file: FieldFile, column: Column) -> Any:
        path = _path(column, field)
        is_property = path and not _is_json(field)
        if len(file) > VALUE_LIMIT_BYTES and not is_property:
            problem = f"a field of {len(file)} bytes, the limit is {VALUE_LIMIT_BYTES}"
            raise self._error(problem, column, key, field)
        try:
            if is_property:
                value: Any = read_property(field, path, file)
            else:
                value = _value_of(field, file.read(), path)
        except (ValueError, RecursionError) as error:
            if isinstance(error, ShardStreamError):
                raise
            raise self._error(f"the value cannot be read: {error}", column, key, field) from error
        return self._checked(value, column, key, field)

    def _checked(self, value: Any, column: Column, key: str, field: str | None) -> Any:
        """Return a value that fits its column, or None.

        Raises:
            SampleError: If it does not fit.
        """
        if value is None:
            return None
        if type(value) not in _KINDS:
            problem = (
                f"the value is a {type(value).__name__}; a column holds bools, numbers or text"
            )
            raise self._error(problem, column, key, field)
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            raise self._error(f"{value} needs more than 64 bits", column, key, field)
        kind = _KINDS[type(value)]
        known, first = self._kinds.get(column, (kind, key))
        if known != kind:
            problem = f"the value is {kind}, but that of {first} is {known}; make it one type"
            raise self._error(problem, column, key, field)
        return value

    def _error(self, problem: str, column: Column, key: str, field: str | None) -> SampleError:
        return SampleError(
            f"the column {column.name} ({column.source}): {problem}",
            shard=self._shard,
            key=key,
            field=field,
        )


def _path(column: Column, field: str) -> str:
    """Return what follows the field in the source of a column: names in its JSON, or a property of its files."""
    return column.source[len(field) + 1 :]


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
        "columns are made of whole numbers (cls, id, ...), text and JSON, and of lengths and sizes of files, such as npy.len or jpg.bytes; "
        "write others to a field of JSON, or give a function"
    )


def checked_columns(columns: ColumnSources, *, takes_functions: bool) -> tuple[Column, ...]:
    """Return the columns that a user names (see `parse_columns`).

    Raises:
        OptionError: If they are invalid, functions are not taken, or pyarrow is not installed.
    """
    import_parquet()  # before the first sample is read or written
    found = parse_columns(columns)
    for column in found:
        if column.is_computed and (column.function is None or not takes_functions):
            raise OptionError(
                f"the column {column.name!r} is made by a function, which a stopped job could not compare when it is resumed; "
                "write the shards, then ss.index(url, columns={name: function})"
            )
        _check_property(column.source)
    return found


def _check_property(source: str) -> None:
    """Refuse a property that the files of a field do not have.

    Raises:
        OptionError: If there is none of this name.
    """
    field, _, name = source.rpartition(".")
    known = [*properties_of(field)] if field else []
    if len(known) > 1 and name not in known and name not in TEXT_FIELDS | INT_FIELDS | JSON_FIELDS:
        raise OptionError(
            f"files of {field} have no property {name!r}, but {', '.join(known)}; correct the column {source}"
        )


def columns_identity(columns: Iterable[Column] | None) -> list[JSON] | None:
    """Return columns as JSON, for the identity of a job."""
    return None if columns is None else [one.spec for one in columns]


def check_summaries(
    columns: Sequence[Column], summaries: Iterable[ColumnSummary], nsamples: int, folder: str
) -> list[str]:
    """Return a warning for each column that some samples lack.

    Args:
        columns: The columns.
        summaries: Those of all shards.
        nsamples: Number of all samples.
        folder: Folder of the dataset, for errors.

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
                    f"the column {name} has {kinds[name]} in some shards and {kind} in others; make it one type",
                    shard=folder,
                )
    warnings = []
    for column in columns:
        name, source = column.name, column.source
        if not totals[name]:
            raise OptionError(
                f"no sample has a value for the column {name} ({source}); "
                "'shardstream ls' lists the fields, correct columns= (--columns)",
                shard=folder,
            )
        if totals[name] < nsamples:
            warnings.append(
                f"column {name} ({source}): {plural(nsamples - totals[name], 'sample')} of {nsamples:,} without a value"
            )
    return warnings
