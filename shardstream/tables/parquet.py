"""Rows of Parquet files as samples by number: a row group is a block, and columns of Arrow become values of fields."""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from shardstream.errors import (
    ChangedError,
    OptionError,
    ShardError,
    ShardStreamError,
    SourceError,
    plural,
    shown,
)
from shardstream.format import (
    KEY_COLUMN,
    column_chunks,
    import_parquet,
    is_reserved_column,
    key_array,
    limit_of_rows,
    read_parquet,
)
from shardstream.packing import read_row_group, rows_of
from shardstream.process import new_lock
from shardstream.samples import Numbers
from shardstream.storage import FileInfo, FileVersions, RangeStream, Storage
from shardstream.tables.block_samples import (
    Block,
    BlockSamples,
    Fields,
    choose_columns,
    keys_of,
    names_below,
)

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_TAIL = struct.Struct("<I4s")  # length of the footer, magic
_FOOTER_BYTES = 64 << 10  # that are read at once
_FOOTER_LIMIT_BYTES = 256 << 20
_THREADS = 16  # files of which footers, or columns for conditions, are read at the same time
_FOOTERS_KEPT = 64
_CONDITION_TYPES = frozenset(("int", "uint", "float", "double", "bool", "string", "large_string"))
_LARGE_BYTES = 4 << 10  # mean size of values of which a row group is converted at once
_FETCH_AGAIN = "fetch or write the file again"
_lock = new_lock()  # guards the footers that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _Footer:
    """The footer of a file.

    Args:
        digest: SHA-256 of its bytes, which hold the place, length and extremes of each column of each row group.
        metadata: What it says, as a `pyarrow.parquet.FileMetaData`.
    """

    digest: bytes
    metadata: Any

    @property
    def schema(self) -> pa.Schema:
        """The columns and their types."""
        return self.metadata.schema.to_arrow_schema()

    def rows(self) -> list[int]:
        """Return the number of rows of each row group."""
        return [int(group.num_rows) for group in self._groups()]

    def group_bytes(self, columns: Sequence[str] | None = None) -> list[int]:
        """Return the uncompressed bytes of each row group, of some columns or of all."""
        if columns is None:
            return [int(group.total_byte_size) for group in self._groups()]
        return [
            sum(chunk.total_uncompressed_size for chunk in column_chunks(self.metadata, n, columns))
            for n in range(self.metadata.num_row_groups)
        ]

    def _groups(self) -> Iterator[Any]:
        return map(self.metadata.row_group, range(self.metadata.num_row_groups))


class ParquetSamples(BlockSamples):
    """The rows of Parquet files by number, in the order of the files.

    Args:
        files: The files, at least one; versions of remote ones are remembered, so that a replaced file is an error.
        storage: Their storage.
        fields: See `Fields`.

    Raises:
        OptionError: If pyarrow is not installed, or there is no such column.
        ShardError: If a file is no Parquet, or cut.
        SourceError: If a file has other types than the first, or, where all are read, further columns; or there is no row.
        StorageError: If one cannot be read.
    """

    def __init__(
        self,
        files: Sequence[FileInfo],
        storage: Storage,
        fields: Fields = None,
    ) -> None:
        for file in files:
            storage.pin_listed(file)
        self._urls, self._sizes = [file.url for file in files], [file.size for file in files]
        self._stems = names_below(self._urls, ".parquet")
        self._versions = FileVersions([storage.local_path(url) for url in self._urls])
        self._storage = storage
        self._kept: dict[int, _Footer] = {}  # of some files, in this process
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-footers") as pool:
            footers = list(pool.map(self._read_footer, range(len(files))))
        self._digests = [footer.digest for footer in footers]
        file_rows = [footer.metadata.num_rows for footer in footers]
        full = np.flatnonzero(file_rows).tolist()  # a file without rows may have other types
        if not full:
            raise SourceError(f"no row in {plural(len(files), 'file')}", shard=self._urls[0])
        self._first, self._schema = self._urls[full[0]], footers[full[0]].schema
        self._columns, self._key = choose_columns(self._schema.names, fields, self._first)
        for place in full:
            self._check_schema(footers[place].schema, self._names, self._urls[place])
            if fields is None:
                self._refuse_further(footers[place].schema.names, self._urls[place])
        rows = np.array([n for footer in footers for n in footer.rows()], dtype=np.int64)
        groups = [(n, g) for n, one in enumerate(footers) for g in range(len(one.rows()))]
        self._groups = np.array(groups)[rows > 0]  # file, row group in it; shape (blocks, 2)
        names = self._names if {*self._names} < {*self._schema.names} else None
        read = np.array([n for f in footers for n in f.group_bytes(names)], dtype=np.int64)
        super().__init__(rows[rows > 0], read[rows > 0], storage)
        self._total_bytes = sum(sum(footer.group_bytes()) for footer in footers)
        self._file_firsts: Numbers = np.cumsum([0, *file_rows], dtype=np.int64)
        digest = hashlib.sha256(b"parquet\n")
        for stem, size, footer in zip(self._stems, self._sizes, footers, strict=True):
            digest.update(f"{stem}\n{size}\n".encode() + footer.digest)
        self._fingerprint = digest.hexdigest()[:16]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}}

    @property
    def total_bytes(self) -> int:
        """Uncompressed bytes of all columns, so that the order is the same whichever are read."""
        return self._total_bytes

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the names of the files below their folder, their lengths and their footers."""
        return self._fingerprint

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of the samples."""
        return tuple(self._columns)

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        counts = (len(self._urls), "file"), (self.num_shards, "row group"), (len(self), "sample")
        return ", ".join(plural(count, name) for count, name in counts)

    def url_of(self, shard: int) -> str:
        """Return the URL of the file of a row group."""
        return self._urls[int(self._groups[shard, 0])]

    def read_block(self, block: int) -> Block:
        """Read the columns of a row group.

        Raises:
            StorageError: If the file cannot be read.
            ChangedError: If it was replaced.
            ShardError: If it is damaged.
            SourceError: If its rows would fill the memory.
        """
        file, group = self._groups[block].tolist()
        url, metadata = self._urls[file], self._footer(file).metadata
        with self._reading(file) as stream:
            table = read_row_group(stream, metadata, group, self._names, url, self._storage)
        first = int(self.blocks[block] - self._file_firsts[file])
        return _RowGroup(table, self._columns, self._key, (url, self._stems[file]), first)

    def column_names(self) -> list[str]:
        """Return the names of the columns of single numbers and texts, for conditions: of fields, and of columns that are no field."""
        return [KEY_COLUMN, *self._conditions()]

    def read_columns(self, names: Sequence[str] | None, *, scans: bool = False) -> pa.Table:  # noqa: ARG002  (keys are columns)
        """Return columns of all samples, read from the files; row i is sample i.

        Raises:
            OptionError: If there is no such column, or its values take too much memory.
            ShardError: If a file is damaged.
            StorageError: If one cannot be read.
        """
        wanted = self.column_names() if names is None else [*names]
        if missing := {*wanted} - {*self.column_names()}:
            raise OptionError(
                f"no column {min(missing)!r} of numbers or text; there are: {', '.join(self._conditions())}",
                shard=self._urls[0],
            )
        arrow, _ = import_parquet()
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-columns") as pool:
            files = np.flatnonzero(np.diff(self._file_firsts)).tolist()
            tables = pool.map(partial(self._read_conditions, wanted), files)
            return arrow.concat_tables(tables, promote_options="default")  # of nulls alone

    def _read_conditions(self, names: Sequence[str], file: int) -> pa.Table:
        """Return columns of the rows of a file."""
        arrow, _ = import_parquet()
        url, footer, known = self._urls[file], self._footer(file), self._conditions()
        metadata = footer.metadata
        own = {known[name] for name in names if name != KEY_COLUMN}
        own |= {self._key} if self._key and KEY_COLUMN in names else set()
        self._check_schema(footer.schema, own, url)
        with self._reading(file) as stream:
            limit_bytes = limit_of_rows(self._sizes[file])
            table = read_parquet(
                stream, sorted(own), url=url, limit_bytes=limit_bytes, metadata=metadata
            )
        found = {name: table[known[name]] for name in names if name != KEY_COLUMN}
        if KEY_COLUMN in names:
            cells = table[self._key].to_pylist() if self._key else None
            rows = np.arange(metadata.num_rows)
            found[KEY_COLUMN] = key_array(keys_of(cells, rows, (url, self._stems[file])), url)
        return arrow.table({name: found[name] for name in names})

    @property
    def _names(self) -> list[str]:
        """Columns that are read of each row group."""
        return [*dict.fromkeys([*self._columns.values(), *([self._key] if self._key else [])])]

    def _conditions(self) -> dict[str, str]:
        """Return name -> column, of single numbers and texts."""
        named = {n: n for n in self._schema.names if n not in self._columns} | self._columns
        return {
            name: column
            for name, column in named.items()
            if str(self._schema.field(column).type).rstrip("0123456789") in _CONDITION_TYPES
            and not is_reserved_column(name)
        }

    def _check_schema(self, schema: pa.Schema, names: Iterable[str], url: str) -> None:
        """Refuse a file of which columns are missing, or have other types than in the first; a column of nulls alone may have their type."""
        for name in names:
            place, expected = schema.get_field_index(name), self._schema.field(name).type
            found = "missing" if place < 0 else str(schema.field(place).type)
            if found not in (str(expected), "null"):
                raise SourceError(
                    f"column {name!r} is {found}, but {expected} in {shown(self._first)}; write the files with one schema, or leave it out",
                    shard=url,
                )

    def _refuse_further(self, names: Iterable[str], url: str) -> None:
        """Refuse a file with a column that the first lacks, where all are read: its values would be left out."""
        if further := {*names} - {*self._schema.names}:
            raise SourceError(
                f"column {min(further)!r} is not in {shown(self._first)}; name the columns to read with fields=",
                shard=url,
            )

    def _footer(self, file: int) -> _Footer:
        """Return the footer of a file, which workers read again.

        Raises:
            ChangedError: If it is not the one of the time when the dataset was opened.
        """
        footer = self._kept.get(file) or self._read_footer(file)
        if footer.digest != self._digests[file]:
            raise ChangedError(
                "the file was replaced after the dataset was opened; open it again",
                shard=self._urls[file],
            )
        with _lock:
            self._kept[file] = footer
            if len(self._kept) > _FOOTERS_KEPT:
                del self._kept[next(iter(self._kept))]
        return footer

    def _read_footer(self, file: int) -> _Footer:
        url, size = self._urls[file], self._sizes[file]
        _, parquet = import_parquet()
        with self._reading(file) as stream:
            tail = _read_tail(stream, size, url)
            metadata = parquet.read_metadata(io.BytesIO(tail))
        return _Footer(digest=hashlib.sha256(tail).digest(), metadata=metadata)

    @contextmanager
    def _reading(self, file: int) -> Iterator[BinaryIO]:
        """Open a file; after the read, check that it is the one of the time when the dataset was opened."""
        url, size = self._urls[file], self._sizes[file]
        try:  # a buffer would copy what is read
            yield cast("BinaryIO", RangeStream(self._storage, url, size))
        except Exception as error:
            self._versions.check([file])
            if isinstance(error, ShardStreamError) or not isinstance(error, OSError | ValueError):
                raise
            raise ShardError(  # of Arrow
                f"Parquet that cannot be read: {error}", remedy=_FETCH_AGAIN, shard=url
            ) from error
        self._versions.check([file])


class _RowGroup:
    """The rows of a row group, as columns of Arrow.

    Args:
        table: The columns that are read.
        fields: Field -> its column.
        key: Column of the keys, if there is one.
        file: URL of the file, and its name in keys.
        first: Number of the first row in the file.
    """

    def __init__(
        self,
        table: pa.Table,
        fields: Mapping[str, str],
        key: str | None,
        file: tuple[str, str],
        first: int,
    ) -> None:
        self._fields, self._key, self._file, self._first = fields, key, file, first
        large = [name for name in table.column_names if _become_objects(table[name])]
        self._files = {n: values_of(table[n], table.schema.field(n), file[0]) for n in large}
        self._table = table.drop_columns(large).combine_chunks()

    def columns(self, places: Numbers) -> dict[str, list[Any]]:
        """Return keys, URLs and fields of some rows."""
        url = self._file[0]
        taken = self._table.take(places) if self._table.num_columns else self._table
        cells = taken[self._key].to_pylist() if self._key else None
        keys = keys_of(cells, places + self._first, self._file)
        found: dict[str, list[Any]] = {"__key__": keys, "__url__": [url] * len(places)}
        for name, column in self._fields.items():
            if column in self._files:
                files = self._files[column]
                found[name] = [files[row] for row in places.tolist()]
            else:
                found[name] = values_of(taken[column], taken.schema.field(column), url)
        return found


def _become_objects(column: pa.ChunkedArray) -> bool:
    """Return whether a column is converted at once: bytes, of which `take` would copy more than a Python object, and views, which it lacks."""
    kind = column.type.storage_type if hasattr(column.type, "storage_type") else column.type
    is_binary = str(kind) in ("binary", "large_binary") or "bytes: binary" in str(kind)
    return "_view" in str(kind) or (is_binary and column.nbytes > _LARGE_BYTES * len(column))


def _read_tail(stream: BinaryIO, size: int, url: str) -> bytes:
    """Return the footer of a file, with its length and magic.

    Raises:
        ShardError: If there is none.
    """
    stream.seek(max(0, size - _FOOTER_BYTES))
    tail = stream.read()
    length, magic = _TAIL.unpack(tail[-_TAIL.size :]) if len(tail) >= _TAIL.size else (0, b"")
    length += _TAIL.size
    if magic == _ENCRYPTED:
        raise OptionError("the file is encrypted; write it again without encryption", shard=url)
    if magic != _MAGIC or length > size:
        raise ShardError(
            f"no Parquet, or cut: its {size:,} bytes end without a footer",
            remedy=_FETCH_AGAIN,
            shard=url,
        )
    if length > len(tail):
        if length > _FOOTER_LIMIT_BYTES:
            raise ShardError(
                f"a footer of {length:,} bytes, the limit is {_FOOTER_LIMIT_BYTES:,}",
                remedy="write several files",
                shard=url,
            )
        stream.seek(size - length)
        tail = stream.read()
    return tail[-length:]


def values_of(column: pa.ChunkedArray, field: pa.Field, url: str) -> list[Any]:
    """Return the values of a column; a null is None.

    A list of numbers becomes an array of its own, shape (n,), of the column's dtype; a tensor one of its shape; the ``{bytes, path}`` that
    Hugging Face writes for a picture or a sound its bytes. Others are Python's values: text, numbers, `datetime`, `Decimal`, dicts, and
    lists of values. A dictionary is written out.

    Args:
        column: The column.
        field: Its field in the schema.
        url: URL of its file, for messages.

    Raises:
        SourceError: If a value has no such form; names the column.
    """
    import pyarrow as pa  # noqa: PLC0415  (an extra; whoever has a column has it)

    if "tensor" in f"{getattr(field.type, 'extension_name', '')} {field.metadata}":
        table = pa.table([column], schema=pa.schema([field]))
        return [row[field.name] for row in rows_of(table, url)]
    try:
        return [value for chunk in column.chunks for value in _values(chunk)]
    except (ValueError, TypeError, NotImplementedError) as error:  # ArrowInvalid is a ValueError
        raise SourceError(
            f"column {field.name!r} ({field.type}): {error}; leave it out with fields=, or pack the table",
            shard=url,
        ) from error


def _values(array: pa.Array) -> list[Any]:
    from pyarrow import types  # noqa: PLC0415  (an extra)

    kind = array.type
    if hasattr(array, "storage"):  # an extension type: the same where its package is not imported
        return _values(array.storage)
    if types.is_dictionary(kind):
        return _values(array.dictionary_decode())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _lists(array)
    if types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}:
        return _embedded_files(array)
    values: list[Any] = _in_microseconds(array).to_pylist()
    return values


def _lists(array: pa.Array) -> list[Any]:
    """Return an array for each list of numbers, and a list for each of other values.

    Raises:
        ValueError: If a number is missing: an array of whole numbers would become one of floats.
    """
    from pyarrow import compute, types  # noqa: PLC0415  (an extra)

    flat, kind = array.flatten(), array.type.value_type
    lengths = compute.list_value_length(array).to_pylist()
    ends = np.cumsum([0, *(length or 0 for length in lengths)]).tolist()
    cuts = zip(lengths, pairwise(ends), strict=True)
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        values = _values(flat)
        return [None if length is None else values[a:b] for length, (a, b) in cuts]
    if flat.null_count:
        raise ValueError("a list has a null among its numbers")
    numbers = flat.to_numpy(zero_copy_only=False)
    return [None if length is None else numbers[a:b].copy() for length, (a, b) in cuts]


def _embedded_files(array: pa.Array) -> list[bytes | None]:
    """Return the bytes of files that Hugging Face writes as ``{bytes, path}``.

    Raises:
        ValueError: If only the path is in the table.
    """
    from pyarrow import compute  # noqa: PLC0415  (an extra)

    data, paths = compute.struct_field(array, "bytes"), compute.struct_field(array, "path")
    for is_missing, path in zip(data.is_null().to_pylist(), paths, strict=True):
        if is_missing and path.is_valid:
            raise ValueError(f"the bytes of {path.as_py()!r} are not in the table, only its path")
    values: list[bytes | None] = data.to_pylist()
    return values


def _in_microseconds(array: pa.Array) -> pa.Array:
    """Return times as Python has them; of nanoseconds, pyarrow would return those of pandas where it is installed.

    Raises:
        ValueError: If nanoseconds would be lost.
    """
    import pyarrow as pa  # noqa: PLC0415  (an extra)

    kind = array.type
    if getattr(kind, "unit", None) != "ns":
        return array
    if pa.types.is_timestamp(kind):
        return array.cast(pa.timestamp("us", kind.tz))
    return array.cast(pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us"))
