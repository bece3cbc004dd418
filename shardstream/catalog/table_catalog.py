"""Rows of a Parquet table as samples that are joined to others."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from shardstream.catalog.base import Catalog, Extents, Numbers, check_numbers
from shardstream.errors import OptionError, SampleError, plural
from shardstream.format import (
    JSON_FIELDS,
    KEY_COLUMN,
    Sample,
    import_parquet,
    limit_of_rows,
    read_parquet,
)
from shardstream.storage import AdaptiveLimit, Storage

if TYPE_CHECKING:
    import pyarrow as pa

_KEY_COLUMNS = (KEY_COLUMN, "key")
_ARRAY = "npy"


class TableCatalog(Catalog):
    """Rows of a table in memory, as samples of encoded fields; `rows` reads them, as there are no shards.

    Args:
        table: The columns of keys and of fields.
        url: URL of the table.
        columns: Field -> column; ``__key__`` -> the column of the keys.
    """

    is_local = True

    def __init__(self, table: pa.Table, url: str, columns: Mapping[str, str]) -> None:
        self._table, self._url = table, url
        self._columns = {field: column for field, column in columns.items() if field != KEY_COLUMN}
        self.keys: pa.Array = table[columns[KEY_COLUMN]].combine_chunks()
        """Keys of the rows."""

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def num_shards(self) -> int:
        """One: the table."""
        return 1

    @property
    def total_bytes(self) -> int:
        """Bytes of the table in memory."""
        return int(self._table.nbytes)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the values, and with the fields they go to."""
        pa, _ = import_parquet()
        digest = hashlib.sha256(f"table {sorted(self._columns.items())}\n".encode())
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._table.schema) as writer:
            writer.write_table(self._table.combine_chunks())
        digest.update(sink.getvalue())
        return digest.hexdigest()[:16]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that columns go to."""
        return tuple(sorted(self._columns))

    def url_of(self, shard: int) -> str:  # noqa: ARG002
        """Return the URL of the table."""
        return self._url

    def rows(self, numbers: Numbers) -> list[Sample | Exception]:
        """Return rows as samples of bytes, or what is wrong with them; null is a missing field."""
        check_numbers(numbers, len(self))
        taken = self._table.take(numbers)
        keys = self.keys.take(numbers).to_pylist()
        found: list[Sample | Exception] = [{"__key__": key, "__url__": self._url} for key in keys]
        for field, column in self._columns.items():
            is_array = field.rpartition(".")[2] == _ARRAY
            values = taken[column] if is_array else taken[column].to_pylist()
            for place, value in enumerate(values):
                row = found[place]
                if isinstance(row, Exception):
                    continue
                try:
                    data = _array(value) if is_array else _encode(field, value)
                except (TypeError, ValueError, AttributeError) as error:
                    found[place] = SampleError(
                        f"the column {column!r} cannot be the field {field!r}: {error}",
                        shard=self._url,
                        key=keys[place],
                        field=field,
                    )
                else:
                    row |= {} if data is None else {field: data}
        return found

    def extents(self, numbers: Numbers | Sequence[int]) -> Extents:  # noqa: ARG002
        """Refuse: rows are no ranges of bytes."""
        self._refuse()

    def fetch(
        self,
        shard: int,  # noqa: ARG002
        start: int,  # noqa: ARG002
        end: int,  # noqa: ARG002
        concurrency: AdaptiveLimit | None = None,  # noqa: ARG002
    ) -> bytes:
        """Refuse: rows are no ranges of bytes."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError("rows of a table are read by `rows`")


def open_table(url: str, columns: Mapping[str, str], storage: Storage) -> TableCatalog:
    """Read columns of a Parquet file.

    Args:
        url: URL of the file.
        columns: Field -> column. The keys are in the column ``__key__`` or ``key``, or in the one that ``{"__key__": column}`` names.
        storage: Its storage.

    Raises:
        OptionError: If it lacks a column, a key is missing or no text, or pyarrow is not installed.
        StorageError: If it cannot be read.
    """
    pa, parquet = import_parquet()
    data = storage.read_bounded(url, expected_bytes=storage.info(url).size_or_none or 0)
    try:
        file = parquet.ParquetFile(pa.BufferReader(data))
    except (pa.ArrowInvalid, OSError) as error:
        raise OptionError(f"not a Parquet file: {error}", shard=url) from error
    names: list[str] = file.schema_arrow.names
    key = columns.get(KEY_COLUMN) or next((one for one in _KEY_COLUMNS if one in names), KEY_COLUMN)
    wanted = {**columns, KEY_COLUMN: key}
    missing = next((column for column in wanted.values() if column not in names), None)
    if missing is not None or len(wanted) == 1:
        raise OptionError(
            f"the table has no column {missing!r}, but {', '.join(names)}"
            if missing is not None
            else "name the columns to take: ss.join(first, {url: {'txt': 'caption'}})",
            shard=url,
        )
    try:
        table = read_parquet(
            pa.BufferReader(data),
            [*dict.fromkeys(wanted.values())],
            url=url,
            limit_bytes=limit_of_rows(len(data)),
        )
    except (pa.ArrowInvalid, OSError) as error:
        raise OptionError(f"the table cannot be read: {error}", shard=url) from error
    keys = table[key]
    if not pa.types.is_string(keys.type) and not pa.types.is_large_string(keys.type):
        raise OptionError(f"the keys in the column {key!r} are {keys.type}, not text", shard=url)
    if keys.null_count:
        raise OptionError(f"{plural(keys.null_count, 'row')} without a key", shard=url)
    place = table.column_names.index(key)
    return TableCatalog(table.set_column(place, key, keys.cast(pa.string())), url, wanted)


def _array(scalar: Any) -> bytes | None:
    """Return a list as a ``.npy`` file, in its type."""
    if not scalar.is_valid:
        return None
    array = scalar.values.to_numpy(zero_copy_only=False)
    if scalar.values.null_count and scalar.values.type != _type_of(array):
        raise ValueError(f"a list of {scalar.values.type} with null")
    if array.dtype == object:
        raise ValueError(f"a list of {scalar.values.type}, not of numbers")
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def _type_of(array: Any) -> Any:
    pa, _ = import_parquet()
    return None if array.dtype == object else pa.from_numpy_dtype(array.dtype)


def _encode(field: str, value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if field.rpartition(".")[2] in JSON_FIELDS:
        return json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, int) and not isinstance(value, bool):
        return b"%d" % value
    raise TypeError(f"a {type(value).__name__} needs a field of JSON, such as 'value.json'")
