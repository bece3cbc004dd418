"""Tables as sources of fields that `reshard` adds by key."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np

from shardstream.errors import (
    ChangedError,
    OptionError,
    SampleError,
    SourceError,
    StorageError,
    redact,
)
from shardstream.format import column_chunks, read_parquet
from shardstream.packing.added_source import KEY, AddedSpec, mean_tar_bytes
from shardstream.packing.encode import encode_field
from shardstream.packing.job.key_hashes import Places
from shardstream.packing.sources.arrow_rows import number_dtypes, rows_of
from shardstream.packing.sources.parquet_table import open_parquet
from shardstream.packing.sources.source import FileRef, fingerprint_of
from shardstream.packing.sources.table_source import convert_cell, key_of
from shardstream.packing.sources.tables import Row, iter_rows
from shardstream.storage import FileInfo, Storage

_KEY_COLUMNS = (KEY, "key")
_PROBES = 64  # rows whose sizes are measured
_KEYS_AT_ONCE = 1 << 16
_CACHE_BYTES = 256 << 20  # of row groups in memory
_GROUP_LIMIT_BYTES = 1 << 30  # of the columns of a row group, which is read whole
_TEXT_LIMIT_BYTES = 256 << 20  # of tables that are read into memory


def open_table(
    spec: AddedSpec, urls: Sequence[str], storage: Storage
) -> ParquetFields | TextTableFields:
    """Open tables of one format.

    Raises:
        OptionError: If columns are not named, or tables of text are too large.
        SourceError: If a column is missing.
        StorageError: If a table cannot be reached.
    """
    if spec.fields is None or spec.fields.keys() == {KEY}:
        raise OptionError(
            "name the columns to add: add={URL: {'txt': 'caption'}} (--add URL:txt=caption)",
            shard=spec.url,
        )
    columns = {field: column for field, column in spec.fields.items() if field != KEY}
    files = [storage.info(url) for url in urls]
    is_parquet = [url.lower().endswith(".parquet") for url in urls]
    if all(is_parquet):
        return ParquetFields(spec, columns, files, storage)
    if any(is_parquet):
        raise OptionError("these are tables of two kinds; name one of them", shard=spec.url)
    return TextTableFields(spec, columns, files, storage)


class _TableFields:
    """Common part of tables.

    Args:
        spec: The source.
        columns: Field -> column.
        files: The tables.
        storage: Their storage.
    """

    folders: frozenset[str] = frozenset()
    is_strict = True

    def __init__(
        self,
        spec: AddedSpec,
        columns: Mapping[str, str],
        files: Sequence[FileInfo],
        storage: Storage,
    ) -> None:
        self.url, self.fields = redact(spec.url), frozenset(columns)
        self.identity = _identity(files)
        self._spec, self._columns, self._files, self._storage = spec, columns, files, storage

    def check_unchanged(self) -> None:
        """Check that sizes and times, or ETags, of the tables are those of before.

        Raises:
            ChangedError: If one was replaced.
        """
        if _identity([self._storage.info(file.url) for file in self._files]) != self.identity:
            raise ChangedError(
                "the table was replaced while it was read; run the command again", shard=self.url
            )

    def _key_column(self, names: Sequence[str], where: str) -> str:
        """Return the column of the keys: the one that is named as ``__key__``, else ``__key__`` or ``key``.

        Raises:
            SourceError: If it is missing.
        """
        named = (self._spec.fields or {}).get(KEY)
        found = next((one for one in ([named] if named else _KEY_COLUMNS) if one in names), None)
        if found is None:
            raise SourceError(
                f"the table has no column {named or ' or '.join(_KEY_COLUMNS)} for the keys; there are: {', '.join(map(repr, names))}. Name the "
                "column of the keys: add={URL: {'__key__': COLUMN, ...}} (--add URL:__key__=COLUMN,...)",
                shard=where,
            )
        return found

    def _encode(self, row: Row, key_column: str) -> tuple[str, dict[str, bytes]]:
        """Return key and encoded fields of a row; empty cells are left out."""
        fields = {}
        for field, column in self._columns.items():
            if row.get(column) is None:
                continue
            value = convert_cell(field, row, column, "")
            if isinstance(value, FileRef):
                raise row.error(
                    f"column {column!r} holds text, but {field!r} takes bytes; pack the files into shards first, and add those, or use "
                    f"a field of text, e.g. 'txt'"
                )
            try:
                fields[field] = encode_field(field, value)
            except SampleError as error:
                raise row.error(f"column {column!r}: {error}") from error
        return key_of(row.get(key_column), row), fields


class ParquetFields(_TableFields):
    """Rows of Parquet files, read by row group; up to 256 MiB of them are kept.

    Raises:
        OptionError: If a row group holds more than 1 GiB of the columns.
        SourceError: If a column is missing.
    """

    def __init__(
        self,
        spec: AddedSpec,
        columns: Mapping[str, str],
        files: Sequence[FileInfo],
        storage: Storage,
    ) -> None:
        super().__init__(spec, columns, files, storage)
        self._groups: list[tuple[int, int]] = []  # file and number of each row group
        self._metadata: list[Any] = []
        self._key = ""
        counts = [0]
        for number, file in enumerate(files):
            with storage.open(file.url) as stream, open_parquet(stream, file.url, storage) as table:
                metadata, names = table.metadata, table.schema_arrow.names
            self._check_columns(names, file.url)
            self._metadata.append(metadata)
            for group in range(metadata.num_row_groups):
                self._check_size(metadata, group, file.url)
                self._groups.append((number, group))
                counts.append(metadata.row_group(group).num_rows)
        self._firsts = np.cumsum(counts, dtype=np.int64)
        if not len(self):
            raise SourceError("the table has no rows", shard=spec.url)
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._firsts[-1])

    @cached_property
    def mean_bytes(self) -> float:
        """Mean size of the fields of a row; measured on rows of a few row groups."""
        groups = np.unique(np.linspace(0, len(self._groups) - 1, 4).astype(np.int64))
        ranges = [
            np.arange(first, min(first + _PROBES // 4, last))
            for first, last in zip(
                self._firsts[groups].tolist(), self._firsts[groups + 1].tolist(), strict=True
            )
        ]
        return mean_tar_bytes(fields for _, fields in self.read(np.concatenate(ranges)))

    def iter_keys(self) -> Iterator[list[str]]:
        """Yield the keys of all rows; reads their column only.

        Raises:
            SourceError: If a key is empty.
        """
        for number, file in enumerate(self._files):
            row = 0
            with self._storage.open(file.url) as stream:
                for group in range(self._metadata[number].num_row_groups):
                    for batch in self._read(stream, number, group, [self._key]).to_batches(
                        max_chunksize=_KEYS_AT_ONCE
                    ):
                        cells = batch.column(0).to_pylist()
                        yield [
                            key_of(
                                cell, Row(cells={}, where=f"{file.url}, row {at}", is_text=False)
                            )
                            for at, cell in enumerate(cells, start=row + 1)
                        ]
                        row += len(cells)

    def read(self, places: Places) -> list[tuple[str, dict[str, bytes]]]:
        """Return key and fields of some rows (see `AddedSource.read`)."""
        found: list[tuple[str, dict[str, bytes]]] = [("", {})] * len(places)
        groups = np.searchsorted(self._firsts, places, side="right") - 1
        # One row group after the other: each is read at most once.
        order = np.argsort(groups, kind="stable")
        runs = np.flatnonzero(np.diff(groups[order], prepend=-1)).tolist()
        for first, last in pairwise([*runs, len(order)]):
            mine, group = order[first:last], int(groups[order[first]])
            rows = places[mine] - self._firsts[group]
            taken = self._load(group).take(rows)
            dtypes, cells = number_dtypes(taken.schema), rows_of(taken, self.url)
            for place, at, one in zip(mine.tolist(), places[mine].tolist(), cells, strict=True):
                row = Row(cells=one, where=self.where(at), is_text=False, dtypes=dtypes)
                found[place] = self._encode(row, self._key)
        return found

    def where(self, place: int) -> str:
        """Return table and number of a row."""
        group = int(np.searchsorted(self._firsts, place, side="right")) - 1
        file, _ = self._groups[group]
        before = int(self._firsts[[one for one, _ in self._groups].index(file)])
        return f"{self._files[file].url}, row {place - before + 1}"

    def close(self) -> None:
        """Drop the row groups in memory."""
        self._kept.clear()

    def _check_columns(self, names: Sequence[str], url: str) -> None:
        key = self._key_column(names, url)
        if self._key and key != self._key:
            raise SourceError(
                f"the column of the keys is {key!r} here and {self._key!r} in {self._files[0].url}; name it: '__key__': COLUMN",
                shard=url,
            )
        self._key = key
        missing = next((one for one in self._columns.values() if one not in names), None)
        if missing is not None:
            raise SourceError(
                f"no column {missing!r}; there are: {', '.join(map(repr, names))}", shard=url
            )

    def _check_size(self, metadata: Any, group: int, url: str) -> None:
        columns = [*self._columns.values(), self._key]
        chunks = column_chunks(metadata, group, columns)
        size = sum(chunk.total_uncompressed_size for chunk in chunks)
        if size > _GROUP_LIMIT_BYTES:
            raise OptionError(
                f"a row group of {metadata.row_group(group).num_rows} rows holds {size >> 20} MiB of these columns, and it is read whole; the limit is "
                f"{_GROUP_LIMIT_BYTES >> 20} MiB: write the table with a smaller row_group_size",
                shard=url,
            )

    def _load(self, group: int) -> Any:
        """Read the columns of a row group, or take them from the cache."""
        if group in self._kept:
            self._kept.move_to_end(group)
            return self._kept[group]
        number, group_in_file = self._groups[group]
        columns = list(dict.fromkeys([self._key, *self._columns.values()]))
        try:
            with self._storage.open(self._files[number].url) as stream:
                loaded = self._read(stream, number, group_in_file, columns)
        except StorageError:
            self.check_unchanged()  # the likely reason, if the file does not fit its metadata
            raise
        self._kept[group] = loaded
        self._kept_bytes += loaded.nbytes
        while self._kept_bytes > _CACHE_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return loaded

    def _read(self, stream: BinaryIO, number: int, group: int, columns: Sequence[str]) -> Any:
        """Read columns of a row group of a file, if they fit in memory."""
        url = self._files[number].url
        with self._storage.translate_errors(url):
            return read_parquet(
                stream,
                columns,
                url=url,
                limit_bytes=_GROUP_LIMIT_BYTES,
                row_groups=[group],
                metadata=self._metadata[number],
            )


class TextTableFields(_TableFields):
    """Rows of CSV, TSV or JSON lines, encoded in memory when the table is opened.

    Raises:
        OptionError: If the tables have over 256 MiB.
        SourceError: If a row is malformed, or a column is missing.
    """

    def __init__(
        self,
        spec: AddedSpec,
        columns: Mapping[str, str],
        files: Sequence[FileInfo],
        storage: Storage,
    ) -> None:
        super().__init__(spec, columns, files, storage)
        size = sum(file.size for file in files)
        if size > _TEXT_LIMIT_BYTES:
            raise OptionError(
                f"a table of text is read into memory, and this one has {size >> 20} MiB, the limit is {_TEXT_LIMIT_BYTES >> 20} MiB; "
                "write it as Parquet, or pack it into shards",
                shard=spec.url,
            )
        self._key = ""  # the column; the same for all rows
        self._blob = bytearray()  # key and fields of all rows
        self._ends = array("q", [0])  # of the key and of each field in the blob
        self._has = bytearray()  # whether the row has each field
        self._rows = [0]  # before each table, and in all
        for file in files:
            count = self._rows[-1]
            for row in iter_rows(file.url, storage, columns=None):
                self._append(row.checked())
                count += 1
            self._rows.append(count)
        if not len(self):
            raise SourceError("the table has no rows", shard=spec.url)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._rows[-1]

    @cached_property
    def mean_bytes(self) -> float:
        """Mean size of the fields of a row; measured on evenly spaced rows."""
        places = np.unique(np.linspace(0, len(self) - 1, _PROBES).astype(np.int64))
        return mean_tar_bytes(fields for _, fields in self.read(places))

    def iter_keys(self) -> Iterator[list[str]]:
        """Yield the keys of all rows."""
        for first in range(0, len(self), _KEYS_AT_ONCE):
            yield [
                self._key_at(place) for place in range(first, min(first + _KEYS_AT_ONCE, len(self)))
            ]

    def read(self, places: Places) -> list[tuple[str, dict[str, bytes]]]:
        """Return key and fields of some rows (see `AddedSource.read`)."""
        width = len(self._columns)
        found = []
        for place in places.tolist():
            at = place * (width + 1) + 1
            fields = {
                field: bytes(self._blob[self._ends[at + number] : self._ends[at + number + 1]])
                for number, field in enumerate(self._columns)
                if self._has[place * width + number]
            }
            found.append((self._key_at(place), fields))
        return found

    def where(self, place: int) -> str:
        """Return table and number of a row."""
        file = int(np.searchsorted(self._rows, place, side="right")) - 1
        return f"{self._files[file].url}, row {place - self._rows[file] + 1}"

    def close(self) -> None:
        """Do nothing."""

    def _append(self, row: Row) -> None:
        if not self._key:
            self._key = self._key_column(list(row.cells), row.where)
        key, fields = self._encode(row, self._key)
        self._blob += key.encode("utf-8", "surrogateescape")
        self._ends.append(len(self._blob))
        for field in self._columns:
            self._blob += fields.get(field, b"")
            self._ends.append(len(self._blob))
            self._has.append(field in fields)

    def _key_at(self, place: int) -> str:
        at = place * (len(self._columns) + 1)
        data = self._blob[self._ends[at] : self._ends[at + 1]]
        return data.decode("utf-8", "surrogateescape")


def _identity(files: Sequence[FileInfo]) -> str:
    return fingerprint_of(
        "table", *(part for file in files for part in (file.size_or_none, file.version))
    )
