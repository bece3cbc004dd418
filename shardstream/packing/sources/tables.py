"""Iterate over the rows of a table: CSV, TSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardstream.codecs import VIDEO_EXTENSIONS, AudioDecoder, audio_decoders, iter_tsv
from shardstream.errors import OptionError, SourceError, get_logger, plural
from shardstream.format import IMAGE_FORMATS
from shardstream.packing.sources.parquet_table import ParquetCounts, count_parquet, iter_parquet
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row.

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
    dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=dict)
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
