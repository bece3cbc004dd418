"""Iterate over the rows of a table: CSV, TSV, JSON lines or Parquet, whose tensors become arrays of their shape."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from shardstream.codecs import VIDEO_EXTENSIONS, AudioDecoder, audio_decoders, iter_tsv
from shardstream.errors import OptionError, SourceError, get_logger, plural
from shardstream.format import (
    IMAGE_FORMATS,
    column_chunks,
    import_parquet,
    least_bytes,
    limit_of_rows,
)
from shardstream.storage import Storage

_log = get_logger(__name__)

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
METADATA_NAMES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
FILE_COLUMN = "file_name"
"""Column of the files in a table of these names, which Hugging Face's ``imagefolder`` reads."""
_HEADER_CHARS = 1 << 16  # below the limit of csv for one cell
_VALUE = re.compile(r"[-+]?[0-9.]*[0-9]([eE][-+]?[0-9]+)?|[A-Za-z0-9+]+://.*")
MEDIA = frozenset({*VIDEO_EXTENSIONS, *audio_decoders(AudioDecoder())})
"""Extensions of video and sound."""
_FILES = MEDIA | IMAGE_FORMATS.keys() | {"npy", "npz", "txt", "json"}
_CELL_CHARS = 64 << 20  # a quote that is not closed makes a cell of the rest of the table
_BATCH_ROWS, _BATCH_BYTES = 256, 16 << 20  # rows may hold whole images
_WORST_BYTES = 128 << 20  # of a batch, if all its rows refer to the longest text of a dictionary
_GROUP_BYTES = 64 << 20  # a row group up to this is read by few requests; a larger one in pieces
_BUFFER_BYTES = 8 << 20  # as `Storage.open` reads remote files
_BINARY, _TEXT = ("BYTE_ARRAY", "NONE", 0), ("BYTE_ARRAY", "UTF8", 0)  # outside of lists
_RAY_TENSORS = frozenset({"ray.data.arrow_tensor", "ray.data.arrow_tensor_v2"})
_RAY_VARIABLE = "ray.data.arrow_variable_shaped_tensor"
_NAME, _METADATA = b"ARROW:extension:name", b"ARROW:extension:metadata"


class Row(NamedTuple):
    """One row; a tuple, which takes a quarter of the time of a frozen dataclass.

    Args:
        cells: Column -> value.
        where: Table and number of the row, the first being 1 (a header does not count).
        is_text: Whether every cell is text, also a number.
        dtypes: Column -> dtype of its numbers, if the table tells it.
        fault: Why the row has no cells, if it is malformed; rows after it can be read.
    """

    cells: Mapping[str, Any]
    where: str
    is_text: bool
    dtypes: Mapping[str, np.dtype[Any]] = MappingProxyType({})
    fault: str | None = None

    def checked(self) -> Row:
        """Return the row.

        Raises:
            SourceError: If it is malformed.
        """
        if self.fault is not None:
            raise self.error(self.fault)
        return self

    def get(self, column: str) -> Any:
        """Return a cell.

        Raises:
            SourceError: If there is no such column.
        """
        try:
            return self.cells[column]
        except KeyError:
            has_values = self.is_text and any(map(is_value, self.cells))
            advice = "; if its first line is a row, name the columns with header= (--header)"
            raise self.error(
                f"no column {column!r}; there are: {', '.join(map(repr, self.cells)) or 'none'}{advice if has_values else ''}"
            ) from None

    def error(self, message: str) -> SourceError:
        """Make an error that names the row."""
        return SourceError(message, shard=self.where)


def is_value(name: str) -> bool:
    """Return whether a name of a column seems to be a value of a row: a number, a file or a URL.

    >>> [name for name in ("label", "seg.png", "12.5", "caption (en)", "s3://b/a") if is_value(name)]
    ['seg.png', '12.5', 's3://b/a']
    """
    extension = name.rpartition(".")[2].lower()
    return _VALUE.fullmatch(name) is not None or ("." in name and extension in _FILES)


def is_table(name: str) -> bool:
    """Return whether a file is a table, by its name."""
    return name.lower().endswith(TABLE_SUFFIXES)


def iter_rows(
    url: str,
    storage: Storage,
    *,
    columns: Sequence[str] | None,
    first: int = 0,
    header: Sequence[str] = (),
) -> Iterator[Row]:
    """Yield the rows of a table, read in small pieces.

    Args:
        url: URL of the table; its suffix determines the format.
        storage: The storage of the files.
        columns: Columns that are needed; None for all.
        first: Rows to leave out.
        header: Names of the columns of CSV or TSV whose first line is a row; by default the first line names them.

    Raises:
        OptionError: If it is Parquet and pyarrow is not installed, or names are given to another format than CSV and TSV.
        SourceError: If the table is malformed, or lacks a column; a malformed row tells it by `Row.checked`.
        StorageError: If it cannot be reached.
    """
    if header and not url.lower().endswith((".csv", ".tsv")):
        raise OptionError(
            "header (--header) names the columns of CSV and TSV; this table names its own",
            shard=url,
        )
    if url.lower().endswith(".parquet"):
        cells_and_dtypes = iter_parquet(url, storage, columns=columns, first=first)
        for number, (cells, dtypes) in enumerate(cells_and_dtypes, start=first + 1):
            yield Row(cells=cells, where=f"{url}, row {number}", is_text=False, dtypes=dtypes)
        return
    yield from itertools.islice(_iter_text(url, storage, header), first, None)


def _iter_text(url: str, storage: Storage, header: Sequence[str]) -> Iterator[Row]:
    name = url.lower()
    with storage.open(url) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        is_json = name.endswith((".jsonl", ".ndjson"))
        rows = (
            _iter_json(text)
            if is_json
            else _iter_separated(text, url, header, is_tsv=name.endswith(".tsv"))
        )
        number = 0
        try:
            for number, found in enumerate(rows, start=1):
                cells, fault = ({}, found) if isinstance(found, str) else (found, None)
                where = f"{url}, row {number}"
                yield Row(cells=cells, where=where, is_text=not is_json, fault=fault)
        except UnicodeDecodeError as error:
            raise SourceError(
                f"the text after row {number} is not UTF-8 ({error.reason}); convert the table to UTF-8",
                shard=url,
            ) from error


def count_rows(url: str, storage: Storage, columns: Collection[str]) -> ParquetCounts | None:
    """Return the numbers of rows, and the bytes of some columns, if the file stores them, else None."""
    return count_parquet(url, storage, columns) if url.lower().endswith(".parquet") else None


def _iter_separated(
    text: Iterable[str], url: str, header: Sequence[str], *, is_tsv: bool
) -> Iterator[dict[str, str] | str]:
    """Yield the cells of each row, or what is wrong with it."""
    rows = enumerate(iter_tsv(text), start=1) if is_tsv else _iter_commas(text, url, len(header))
    if not header:
        _, header = next(rows, (0, []))
    if not header:
        raise SourceError("the table is empty; its first line names the columns", shard=url)
    repeated_name = next((name for name in header if header.count(name) > 1), None)
    if repeated_name is not None:
        raise SourceError(
            f"two columns are named {repeated_name!r}; rename one, or, if the first line is a row, name the columns with header= (--header)",
            shard=url,
        )
    for line, cells in rows:
        if not cells:  # a blank line
            continue
        if len(cells) != len(header):
            advice = (
                "a row is one line: write cells with line breaks as CSV or Parquet"
                if is_tsv
                else "quote cells that hold the separator"
            )
            yield f"the row has {plural(len(cells), 'cell')}, the header {len(header)} (line {line}); {advice}"
        else:
            yield dict(zip(header, cells, strict=True))


def _iter_commas(
    text: Iterable[str], url: str, num_columns: int
) -> Iterator[tuple[int, list[str]]]:
    lines = iter(text)
    first = next(lines, "")
    separator = _separator(first, num_columns)
    if separator != ",":
        _log.warning("%s: the header has no commas; columns are separated by %r", url, separator)
    # Python has one limit for all readers of a process, 128 KiB: it is raised, never lowered.
    csv.field_size_limit(max(csv.field_size_limit(), _CELL_CHARS))
    reader = csv.reader(itertools.chain([first], lines), strict=True, delimiter=separator)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        problem = str(error)
        if "field limit" in problem:
            problem = f"a cell has over {_CELL_CHARS >> 20} MiB; close the quote before it, or keep long values in files"
        raise SourceError(f"line {reader.line_num}: {problem}", shard=url) from error


def _separator(first: str, num_columns: int) -> str:
    """Return the separator of a first line: of "," ";" "|" and tab the first that makes several cells; as many as there are columns, if known."""
    for separator in ",;|\t":
        count = len(next(csv.reader([first[:_HEADER_CHARS]], delimiter=separator), []))
        if count > 1 and num_columns in (0, count):
            return separator
    return ","


def _iter_json(text: io.TextIOWrapper) -> Iterator[dict[str, Any] | str]:
    """Yield the cells of each row, or what is wrong with it."""
    for line in text:
        if not line.strip():
            continue
        try:
            cells = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield f"not JSON: {error}"
            continue
        is_row = isinstance(cells, dict)
        yield cells if is_row else f"a row is a JSON object, not {type(cells).__name__}"


def iter_parquet(
    url: str, storage: Storage, *, columns: Sequence[str] | None, first: int = 0
) -> Iterator[tuple[dict[str, Any], Mapping[str, np.dtype[Any]]]]:
    """Yield the cells of each row, with the dtypes of the columns of numbers.

    Memory holds a batch of rows, and a row group up to 64 MiB, or pieces of a larger one.

    Args:
        url: URL of the file.
        storage: Its storage.
        columns: Columns that are needed; None for all.
        first: Number of the first row; row groups before it are not read.

    Raises:
        OptionError: If pyarrow is not installed.
        SourceError: If a column is missing, or two have its name, or the rows hold 1 GiB and 100 times the bytes of the file.
        StorageError: If it cannot be read.
    """
    with storage.open(url) as stream:
        file = open_parquet(stream, url, storage)
        check_columns(file.schema_arrow.names, columns, url)
        dtypes = number_dtypes(file.schema_arrow)
        limit_bytes = limit_of_rows(stream.seek(0, 2))
        groups = range(file.metadata.num_row_groups)
        size = 0
        _check_size(least_bytes(file.metadata, groups, columns), limit_bytes, url)
        for group in groups:
            num_rows = file.metadata.row_group(group).num_rows
            if first >= num_rows:
                first -= num_rows
                continue
            for batch in _batches(stream, file.metadata, group, columns, url, storage):
                size += batch.nbytes
                _check_size(size, limit_bytes, url)
                for cells in rows_of(batch.slice(first), url):
                    yield cells, dtypes
                first = max(0, first - batch.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetCounts:
    """What the metadata of a Parquet file store of its rows.

    Args:
        group_rows: Number of rows of each row group.
        binary_bytes: Bytes of all values, by column, of columns of bytes, and of those in which Hugging Face wrote images or sounds.
        text_bytes: The same of columns of text.
    """

    group_rows: Sequence[int]
    binary_bytes: Mapping[str, int]
    text_bytes: Mapping[str, int]


def count_parquet(url: str, storage: Storage, columns: Collection[str]) -> ParquetCounts:
    """Read the numbers of rows, and the bytes of some columns; columns whose metadata do not tell them are left out.

    Raises:
        OptionError: If pyarrow is not installed.
        StorageError: If the file cannot be read.
    """
    binary_bytes: dict[str, int] = {}
    text_bytes: dict[str, int] = {}
    with storage.open(url) as stream, open_parquet(stream, url, storage) as file:
        groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
        for number in range(file.metadata.num_columns):
            leaf = file.schema.column(number)
            name = leaf.path.removesuffix(".bytes")
            kind = leaf.physical_type, leaf.converted_type, leaf.max_repetition_level
            found = {_BINARY: binary_bytes, _TEXT: text_bytes}.get(kind)
            if found is None or name not in columns:
                continue
            chunks = [group.column(number) for group in groups]
            if all(_tells_bytes(chunk, is_nested=name != leaf.path) for chunk in chunks):
                found[name] = sum(chunk.total_uncompressed_size for chunk in chunks)
    rows = [int(group.num_rows) for group in groups]
    return ParquetCounts(group_rows=rows, binary_bytes=binary_bytes, text_bytes=text_bytes)


def _tells_bytes(chunk: Any, *, is_nested: bool) -> bool:
    """Return whether the length of a chunk is about that of its values."""
    if "DELTA_BYTE_ARRAY" in chunk.encodings:  # beginnings that are equal are left out
        return False
    if is_nested:  # where bytes are missing, a path beside them names a file
        counts = chunk.statistics
        if counts is None or not counts.has_null_count or counts.null_count:
            return False
    # Values that are repeated are places in a dictionary; writers stop to fill it when it is large.
    dictionary_bytes = (
        chunk.data_page_offset - chunk.dictionary_page_offset if chunk.has_dictionary_page else 0
    )
    return bool(2 * dictionary_bytes <= chunk.total_compressed_size)


def open_parquet(
    stream: Any, url: str, storage: Storage, metadata: Any = None, **reading: Any
) -> Any:
    """Return the `pyarrow.parquet.ParquetFile` of a stream.

    Args:
        stream: The open file.
        url: Its URL, for messages.
        storage: Its storage.
        metadata: The metadata of the file, if they have been read already.
        reading: Further options of ``ParquetFile``.

    Raises:
        OptionError: If pyarrow is not installed.
    """
    _, parquet = import_parquet()
    with storage.translate_errors(url):
        return parquet.ParquetFile(stream, metadata=metadata, **reading)


def _batches(
    stream: Any,
    metadata: Any,
    group: int,
    columns: Sequence[str] | None,
    url: str,
    storage: Storage,
) -> Iterator[Any]:
    """Yield the rows of a row group, some at a time."""
    chunks = column_chunks(metadata, group, columns)
    # Arrow holds the bytes of all row groups that it has read ahead, and without a buffer those of whole columns.
    is_small = sum(chunk.total_compressed_size for chunk in chunks) <= _GROUP_BYTES
    buffer_bytes = min(_BUFFER_BYTES, _GROUP_BYTES // max(1, len(chunks)))
    reading = {"pre_buffer": True} if is_small else {"buffer_size": buffer_bytes}
    file = open_parquet(stream, url, storage, metadata, **({"pre_buffer": False} | reading))
    batches = file.iter_batches(
        batch_size=_batch_rows(chunks, metadata.row_group(group).num_rows),
        row_groups=[group],
        columns=None if columns is None else [*columns],
        use_threads=False,
    )
    while True:
        with storage.translate_errors(url):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def read_row_group(
    stream: Any, metadata: Any, group: int, columns: Sequence[str], url: str, storage: Storage
) -> Any:
    """Return columns of a row group, as a `pyarrow.Table`.

    Args:
        stream: The open file.
        metadata: Its metadata.
        group: Number of the row group.
        columns: Columns that are read.
        url: URL of the file, for messages.
        storage: Its storage.

    Raises:
        SourceError: If the rows hold 1 GiB and 100 times the bytes of the file.
        StorageError: If it cannot be read.
    """
    pa, _ = import_parquet()
    limit_bytes, size, batches = limit_of_rows(stream.seek(0, 2)), 0, []
    _check_size(least_bytes(metadata, [group], columns), limit_bytes, url)
    for batch in _batches(stream, metadata, group, columns, url, storage):
        size += batch.nbytes
        _check_size(size, limit_bytes, url)
        batches.append(batch)
    return pa.Table.from_batches(batches)


def _batch_rows(chunks: Sequence[Any], num_rows: int) -> int:
    """Return how many rows are read together, so that they are small, whatever their dictionaries hold."""
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    # A value of bytes is no longer than all of its column; numbers have a width of their own.
    longest = sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if "BYTE_ARRAY" in chunk.physical_type
        and (chunk.has_dictionary_page or "DELTA_BYTE_ARRAY" in chunk.encodings)
    )
    by_mean = _BATCH_BYTES * max(1, num_rows) // max(1, size)
    by_worst = _WORST_BYTES // max(1, longest)
    return int(max(1, min(_BATCH_ROWS, by_mean, by_worst)))


def check_columns(names: Sequence[str], columns: Iterable[str] | None, url: str) -> None:
    """Refuse columns that a table lacks, or has twice: one would be lost.

    Args:
        names: Columns of the table.
        columns: Columns that are needed; None for all.
        url: URL of the table, for messages.

    Raises:
        SourceError: If it lacks one, and names those that there are, or has two of one name.
    """
    counts = Counter(names)
    wrong = next(
        (name for name in (names if columns is None else columns) if counts[name] != 1), None
    )
    if wrong is not None:
        listed = f"no column {wrong!r}; there are: {', '.join(map(repr, names))}"
        message = f"two columns are named {wrong!r}; rename one" if counts[wrong] else listed
        raise SourceError(message, shard=f"{url}, row 1")


def _check_size(size: int, limit_bytes: int, url: str) -> None:
    if size > limit_bytes:
        raise SourceError(
            f"its rows hold {size >> 20} MiB or more, the limit for a file of its length is {limit_bytes >> 20} MiB (1 GiB, and 100 times "
            "the file): a small file that grows so much may be made to fill memory and disks; if it is yours, write it as several files",
            shard=url,
        )


def rows_of(table: Any, url: str) -> list[dict[str, Any]]:
    """Return the rows of a ``pyarrow`` table or batch.

    Args:
        table: The table.
        url: URL of its file, for messages.

    Raises:
        SourceError: If tensors are in lists or structs, or have no shape: they would become flat lists.
    """
    names = table.schema.names
    columns = [
        _cells(field, table.column(number), url) for number, field in enumerate(table.schema)
    ]
    return [dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True)]


def number_dtypes(schema: Any) -> dict[str, np.dtype[Any]]:
    """Return column -> dtype of the columns of an Arrow schema that hold numbers, or lists of them."""
    import pyarrow as pa  # noqa: PLC0415  (an extra; whoever has a schema has it)

    found: dict[str, np.dtype[Any]] = {}
    for column in schema:
        kind = column.type
        while hasattr(kind, "value_type"):
            kind = kind.value_type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            # `kind.to_pandas_dtype()` of pyarrow 15 imports pandas.
            found[column.name] = pa.array([], kind).to_numpy(zero_copy_only=False).dtype
    return found


def _cells(field: Any, column: Any, url: str) -> Iterable[Any]:
    name, metadata = _extension(field)
    try:
        if name == "arrow.fixed_shape_tensor":
            return _each(column, lambda cell: cell.to_numpy())
        if name in _RAY_TENSORS:
            shape = [int(length) for length in json.loads(metadata)]
            return _each(column, lambda cell: _numbers(_stored(cell)).reshape(shape))
        if name == _RAY_VARIABLE:
            return _each(column, lambda cell: _variable(_stored(cell)))
    except (ValueError, TypeError, NotImplementedError) as error:  # ArrowInvalid is a ValueError
        raise SourceError(
            f"the tensors of column {field.name!r} ({name}) cannot be read: {error}; write them as nested lists",
            shard=url,
        ) from error
    if name.endswith("_shape_tensor") or _holds_tensors(field.type):
        raise SourceError(
            f"column {field.name!r} holds tensors in {field.type}, whose shapes would be lost; write them as nested lists, or as a "
            "column of their own",
            shard=url,
        )
    return column.to_pylist()  # type: ignore[no-any-return]


def _extension(field: Any) -> tuple[str, bytes]:
    """Return name and metadata of an extension type, whether its package is imported or not; empty if there is none."""
    name = getattr(field.type, "extension_name", None)
    if name is not None:
        serialize = getattr(field.type, "__arrow_ext_serialize__", bytes)  # Arrow's own have none
        return str(name), serialize()
    metadata = field.metadata or {}
    return metadata.get(_NAME, b"").decode(), metadata.get(_METADATA, b"")


def _each(column: Any, convert: Callable[[Any], Any]) -> list[Any]:
    """Return the converted values of a column; those that are missing become None."""
    return [convert(cell) if cell.is_valid else None for cell in column]


def _stored(cell: Any) -> Any:
    """Return the value that an extension type stores; the same whether its package is imported or not."""
    return getattr(cell, "value", cell)


def _numbers(cell: Any) -> np.ndarray[Any, Any]:
    """Return the flat numbers of a list."""
    return np.asarray(cell.values.to_numpy(zero_copy_only=False))


def _variable(cell: Any) -> np.ndarray[Any, Any]:
    return _numbers(cell["data"]).reshape(cell["shape"].as_py())


def _holds_tensors(kind: Any) -> bool:
    """Return whether lists or structs hold tensors."""
    inner = [kind.field(number) for number in range(kind.num_fields)]
    return any("tensor" in _extension(field)[0] or _holds_tensors(field.type) for field in inner)
