"""Read tables into memory, as samples that are joined to others by key (`ss.join`)."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from shardstream.errors import OptionError, SampleError, SourceError, plural
from shardstream.format import KEY_COLUMN, Rows, Sample, import_parquet, limit_of_rows, read_parquet
from shardstream.packing.encode import encode_field
from shardstream.packing.sources.detection import find_tables
from shardstream.packing.sources.source import FileRef
from shardstream.packing.sources.table_source import convert_cell, key_of
from shardstream.packing.sources.tables import Row, check_columns, iter_rows, number_dtypes, rows_of
from shardstream.samples import (
    Fetcher,
    FetchOptions,
    JoinPart,
    Numbers,
    Samples,
    open_part,
    places_in,
)
from shardstream.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

_KEY_COLUMNS = (KEY_COLUMN, "key")
_TEXT_LIMIT_BYTES = 256 << 20  # of CSV, TSV and JSON lines
_ROWS_AT_ONCE = 1 << 16


class JoinedTable(Samples):
    """Rows of tables in memory, as samples of fields that are encoded as `pack` does.

    Args:
        table: The columns of keys (``__key__``) and of fields.
        columns: Field -> column.
        urls: URLs of the tables.
        firsts: Number of the first row of each table, and of all rows, shape (tables + 1,).
    """

    is_local = True

    def __init__(
        self, table: pa.Table, columns: Mapping[str, str], urls: Sequence[str], firsts: Numbers
    ) -> None:
        self._table, self._columns = table, columns
        self._urls, self._firsts = tuple(urls), firsts
        self._kept: Numbers | None = None  # numbers of these rows, after `restrict_to`

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @property
    def num_shards(self) -> int:
        """One: all tables."""
        return 1

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of the tables in memory."""
        return int(self._table.nbytes)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the values, and with the fields they go to."""
        digest = hashlib.sha256(f"table {sorted(self._columns.items())}\n".encode())
        # A copy of all would double the memory.
        for first in range(0, self._table.num_rows, _ROWS_AT_ONCE):
            (rows,) = self._table.slice(first, _ROWS_AT_ONCE).combine_chunks().to_batches()
            digest.update(rows.serialize())
        return digest.hexdigest()[:16]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that columns go to."""
        return tuple(sorted(self._columns))

    def url_of(self, shard: int) -> str:  # noqa: ARG002
        """Return the URL of the first table."""
        return self._urls[0]

    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return zeros: all rows are in the tables."""
        return np.zeros_like(numbers)

    def place_of(self, number: int) -> tuple[str, int | None]:
        """Return the table of a row, and its number there, from 1."""
        number %= len(self)
        table = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return f"{self._urls[table]}, row {number - int(self._firsts[table]) + 1}", None

    def column_names(self) -> list[str]:
        """Return the name of the column of keys; other columns are fields."""
        return [KEY_COLUMN]

    def read_columns(self, names: Sequence[str] | None, *, scans: bool = False) -> pa.Table:
        """Return the keys of the rows as a table.

        Raises:
            OptionError: If others are wanted.
        """
        if names is not None and [*names] != self.column_names():
            return super().read_columns(names, scans=scans)
        return self._table.select([KEY_COLUMN])

    def restrict_to(self, numbers: Numbers) -> JoinedTable:
        """Return some rows under the same numbers (see `Samples.restrict_to`)."""
        kept = np.unique(numbers % max(1, len(self)))
        part = copy.copy(self)
        part.__dict__.pop("fingerprint", None)
        part.__dict__["total_bytes"] = self.total_bytes
        part._table, part._kept = self._table.take(places_in(self._kept, kept)), kept
        return part

    def open_fetcher(
        self,
        upcoming: Iterable[Numbers] | None = None,  # noqa: ARG002  (rows are in memory)
        options: FetchOptions | None = None,  # noqa: ARG002
    ) -> Fetcher:
        """Open a fetcher that encodes rows."""
        return _RowFetcher(self)

    def rows(self, numbers: Numbers) -> list[Sample | Exception]:
        """Return rows as samples of bytes, or what is wrong with them; null is a missing field."""
        numbers = numbers % max(1, len(self))
        taken = self._table.take(places_in(self._kept, numbers))
        dtypes, found = number_dtypes(taken.schema), list[Sample | Exception]()
        for cells, number in zip(rows_of(taken, self._urls[0]), numbers.tolist(), strict=True):
            where, key = self.place_of(number)[0], str(cells[KEY_COLUMN])
            row = Row(cells=cells, where=where, is_text=False, dtypes=dtypes)
            try:
                fields = _encode_row(row, self._columns)
                found.append({**fields, "__key__": key, "__url__": self._urls[0]})
            except SourceError as error:  # of one sample, so that `on_error` may skip it
                found.append(SampleError(error.what, shard=where, key=key))
        return found


class _RowFetcher(Fetcher):
    def __init__(self, table: JoinedTable) -> None:
        self._table = table

    def samples(self, numbers: Numbers) -> Rows:
        return self._table.rows(numbers)


def open_table_part(url: str, fields: Collection[str] | None, storage: Storage) -> JoinPart:
    """Return the rows of a table, or of all that match a pattern, to be joined to samples.

    Args:
        url: URL or pattern.
        fields: Names of columns, or field -> column, as `open_joined_table` takes them.
        storage: Their storage.

    Raises:
        OptionError: As `open_joined_table`, like the other errors.
    """
    columns = fields if isinstance(fields, Mapping) else {one: one for one in fields or ()}
    table = open_joined_table(find_tables(url, storage), columns, storage)
    return open_part(table, table.fields)


def open_joined_table(
    urls: Sequence[str], fields: Mapping[str, str] | None, storage: Storage
) -> JoinedTable:
    """Read the columns of tables of one kind: Parquet, CSV, TSV or JSON lines.

    Args:
        urls: URLs of the tables.
        fields: Field -> column. The keys are in the column ``__key__`` or ``key``, or in the one that ``{"__key__": column}`` names.
        storage: Their storage.

    Raises:
        OptionError: If columns are not named, the rows are too large for the memory, keys are no text, or pyarrow is not installed.
        SourceError: If a column is missing, a row is malformed, or the tables have no rows.
        StorageError: If a table cannot be reached.
    """
    columns = {field: column for field, column in (fields or {}).items() if field != KEY_COLUMN}
    if not columns:
        raise OptionError(
            "name the columns to take: {URL: {'txt': 'caption'}} (--add URL:txt=caption)",
            shard=urls[0],
        )
    is_parquet = [url.lower().endswith(".parquet") for url in urls]
    if any(is_parquet) and not all(is_parquet):
        raise OptionError("these are tables of two kinds; name one of them", shard=urls[0])
    named = (fields or {}).get(KEY_COLUMN)
    read = _read_parquet if all(is_parquet) else _read_text
    tables = [read(url, columns, named, storage) for url in urls]
    pa, _ = import_parquet()
    try:
        table = pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise SourceError(f"two tables differ in their columns: {error}", shard=urls[0]) from error
    firsts: Numbers = np.cumsum([0, *(one.num_rows for one in tables)])
    if not table.num_rows:
        raise SourceError("the table has no rows", shard=urls[0])
    if not all(is_parquet):  # the cells are bytes by now, and the columns are named as the fields
        columns = {field: field for field in columns}
    return JoinedTable(table, columns, urls, firsts)


def _read_parquet(
    url: str, columns: Mapping[str, str], named: str | None, storage: Storage
) -> pa.Table:
    """Return the columns of a file, and its keys as the column ``__key__``."""
    pa, parquet = import_parquet()
    size, whole = storage.info(url).size_or_none, b""
    if size is None:  # a web server that sends no length
        whole = storage.read_bounded(url)
    with storage.open(url) if size is not None else io.BytesIO(whole) as stream:
        try:
            file = parquet.ParquetFile(stream)
            names: list[str] = file.schema_arrow.names
            key = _key_column(names, named, url)
            check_columns(names, [*columns.values(), key], url)
            # The column of keys gets this name.
            if key != KEY_COLUMN and KEY_COLUMN in columns.values():
                raise OptionError(
                    f"the column {KEY_COLUMN!r} cannot be a field where the keys are in {key!r}; rename it in the table",
                    shard=url,
                )
            wanted = list(dict.fromkeys([*columns.values(), key]))
            left, groups = limit_of_rows(size or len(whole)), []
            for group in range(file.metadata.num_row_groups):  # Arrow reads no structs of several
                groups.append(
                    read_parquet(
                        stream,
                        wanted,
                        url=url,
                        limit_bytes=left,
                        row_groups=[group],
                        metadata=file.metadata,
                    )
                )
                left -= groups[-1].nbytes
            table = pa.concat_tables(groups)
        except (pa.ArrowInvalid, OSError) as error:
            raise OptionError(f"not a Parquet file that can be read: {error}", shard=url) from error
    keys = _text_keys(table[key], key, url)
    if KEY_COLUMN in table.column_names:
        return table.set_column(table.column_names.index(KEY_COLUMN), KEY_COLUMN, keys)
    return table.append_column(KEY_COLUMN, keys)


def _text_keys(keys: pa.ChunkedArray, name: str, url: str) -> pa.ChunkedArray:
    """Return keys as text; whole numbers become their digits."""
    pa, _ = import_parquet()
    import pyarrow.compute as pc  # noqa: PLC0415  (an extra)

    kind = keys.type.value_type if pa.types.is_dictionary(keys.type) else keys.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not is_text and not pa.types.is_integer(kind):
        raise OptionError(f"the keys in the column {name!r} are {kind}, not text", shard=url)
    keys = keys.cast(pa.string())
    empty = pc.sum(pc.equal(keys, "")).as_py() or 0
    if keys.null_count or empty:
        raise OptionError(
            f"{plural(keys.null_count + empty, 'row')} without a key in the column {name!r}; give each row a key, or filter the row out",
            shard=url,
        )
    return keys


def _key_column(names: Sequence[str], named: str | None, where: str) -> str:
    """Return the column of the keys: the one that is named as ``__key__``, else ``__key__`` or ``key``.

    Raises:
        SourceError: If it is missing.
    """
    found = next((one for one in ([named] if named else _KEY_COLUMNS) if one in names), None)
    if found is None:
        raise SourceError(
            f"the table has no column {named or ' or '.join(_KEY_COLUMNS)} for the keys; there are: {', '.join(map(repr, names))}. Name the "
            "column of the keys: {URL: {'__key__': COLUMN, ...}} (--add URL:__key__=COLUMN,...)",
            shard=where,
        )
    return found


def _read_text(
    url: str, columns: Mapping[str, str], named: str | None, storage: Storage
) -> pa.Table:
    """Return the encoded fields of all rows, each as a column of bytes, and their keys."""
    pa, _ = import_parquet()
    size = storage.info(url).size_or_none or 0
    if size > _TEXT_LIMIT_BYTES:
        raise OptionError(
            f"a table of text is read into memory, and this one has {size >> 20} MiB, the limit is {_TEXT_LIMIT_BYTES >> 20} MiB; "
            "write it as Parquet, or pack it into shards",
            shard=url,
        )
    kinds = {KEY_COLUMN: pa.string(), **{field: pa.large_binary() for field in columns}}
    schema = pa.schema([pa.field(name, kind) for name, kind in kinds.items()])
    encoded = _encoded_rows(iter_rows(url, storage, columns=None), columns, named)
    batches = []
    while some := list(islice(encoded, _ROWS_AT_ONCE)):
        batches.append(pa.RecordBatch.from_pylist(some, schema=schema))
    return pa.Table.from_batches(batches, schema=schema)


def _encoded_rows(
    rows: Iterator[Row], columns: Mapping[str, str], named: str | None
) -> Iterator[dict[str, Any]]:
    key = ""
    for row in rows:
        cells = row.checked().cells
        key = key or _key_column(list(cells), named, row.where)
        yield {KEY_COLUMN: key_of(row.get(key), row), **_encode_row(row, columns)}


def _encode_row(row: Row, columns: Mapping[str, str]) -> dict[str, bytes]:
    """Return the encoded fields of a row; empty cells are left out.

    Raises:
        SourceError: If a cell does not fit its field.
    """
    fields = {}
    for field, column in columns.items():
        if row.get(column) is None:
            continue
        value = convert_cell(field, row, column, "")
        if isinstance(value, FileRef):
            raise row.error(
                f"column {column!r} holds text, but {field!r} takes bytes; pack the files into shards first, and join those, or use "
                "a field of text, e.g. 'txt'"
            )
        try:
            fields[field] = encode_field(field, value)
        except SampleError as error:
            raise row.error(f"column {column!r}: {error}") from error
    return fields
