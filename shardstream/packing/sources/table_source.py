"""Read records from the rows of tables: CSV, TSV, JSON lines or Parquet."""

from __future__ import annotations

import copy
import itertools
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from string import Formatter
from typing import Any, Self

import numpy as np

from shardstream.catalog import Classes
from shardstream.errors import OptionError, SourceError, get_logger, plural, redact
from shardstream.format import (
    BLOCK_BYTES,
    INT_FIELDS,
    JSON_FIELDS,
    TEXT_FIELDS,
    canonical_field,
    is_image_name,
    split_member_name,
)
from shardstream.packing.encode import has_encoder, number_array
from shardstream.packing.sources.source import (
    FileRef,
    Numbers,
    Record,
    SequentialSource,
    SourceOptions,
    fingerprint_of,
)
from shardstream.packing.sources.tables import (
    MEDIA,
    ParquetCounts,
    Row,
    count_rows,
    is_value,
    iter_rows,
)
from shardstream.storage import Storage, absolute_url, is_under, join_url, parent_url

_log = get_logger(__name__)

_RUNNING_KEY = "{index:08d}"
_LABEL_FIELD = "cls"
_EXACT_FLOAT = 1 << 53  # floats from here on lack the last digits of whole numbers
_MAX_DIGITS = 100
_ARRAY_FIELD = "npy"


class TableSource(SequentialSource):
    """The rows of one table, or of several with the same columns.

    For an image field, or any other field that is not text, number or JSON, text in the column is the path or URL of a file.
    Bytes become the field unchanged, also in the ``{"bytes": …, "path": …}`` of Hugging Face. By default all columns go into one
    field ``json``, and the key is the row's number.

    Args:
        urls: URLs of the tables.
        storage: Storage of the tables and of the files that they name.
        options: Fields, and how paths are read; the key is a template from ``index`` and the columns, or the name of a column.
        file_column: Without fields: the column whose file becomes the field of its extension; the others go into ``json``.
    """

    def __init__(
        self,
        urls: Sequence[str],
        storage: Storage,
        options: SourceOptions,
        *,
        file_column: str | None = None,
    ) -> None:
        key = options.key
        self._key_column = key if key is not None and "{" not in key else None
        template = "{key}" if self._key_column is not None else key or _RUNNING_KEY
        others = f" and {len(urls) - 1} more" if len(urls) > 1 else ""
        super().__init__(f"rows of {urls[0]}{others}", template, urls, storage)
        try:
            self._key_columns = [name for _, name, _, _ in Formatter().parse(template) if name]
        except ValueError as error:
            raise OptionError(
                f"the key {template!r} is no template: {error}; write each name as {{name}}"
            ) from error
        self._urls = urls
        self._options = options
        self._fields = options.fields
        self._file_column = file_column
        plain = TEXT_FIELDS | INT_FIELDS | JSON_FIELDS
        has_files = any(field.rpartition(".")[2] not in plain for field in self._fields)
        self.may_name_files = has_files or file_column is not None
        # Tables whose beginning was looked at: they are read more than once.
        self._looked_at: set[str] = set()
        for field, column in self._fields.items():
            if field == "__key__":
                raise OptionError(
                    f"the key of a row is no field; name its column by key='{{{column}}}' (--key '{{{column}}}')",
                    field=field,
                )
            if field != field.lower() or not field or "/" in field:
                raise OptionError(
                    f"{field!r} is not a field name; use lower case, e.g. jpg=path", field=field
                )

    @property
    def length(self) -> int | None:
        """Number of rows, if the files store it, as Parquet does."""
        return None if None in self._counts else int(self._starts[-1])

    @property
    def has_sizes(self) -> bool:
        """Whether rows hold no files; those of Parquet are not read only to know their sizes, since it stores their number."""
        return self.length is None and not self.may_name_files

    @property
    def total_bytes(self) -> int | None:
        """About the bytes of all records in a tar, if the lengths of their values are in the metadata of Parquet files; else None."""
        total = 0
        for counts in self._counts:
            if counts is None or not self._fields:
                return None
            num_rows = sum(counts.group_rows)
            for field, column in self._fields.items():
                size = _column_bytes(counts, field.rpartition(".")[2], column)
                if size is None:
                    return None
                header = num_rows * BLOCK_BYTES
                total += header + max(header, size + header // 2)  # half a block is padding
        return total

    @cached_property
    def _counts(self) -> Sequence[ParquetCounts | None]:
        """What each table stores of its rows."""
        return [count_rows(url, self._storage, [*self._fields.values()]) for url in self._urls]

    @cached_property
    def _starts(self) -> Numbers:
        """Numbers of the first row of each row group, and of the row after all, as far as the tables store them."""
        known = itertools.takewhile(lambda counts: counts is not None, self._counts)
        rows = itertools.chain.from_iterable(counts.group_rows for counts in known if counts)
        return np.cumsum([0, *rows], dtype=np.int64)

    def with_class_numbers(self, classes: Classes, where: str) -> Self:
        """Return the same rows, with the names in the column of ``cls`` as numbers.

        Raises:
            OptionError: If no column becomes ``cls``.
        """
        if _LABEL_FIELD not in self._fields:
            raise OptionError(
                f"the names of {where} number the column that becomes 'cls'; name it: fields={{'cls': COLUMN}} (--map cls=COLUMN)",
                shard=self._urls[0],
            )
        changed = copy.copy(self)
        changed.set_classes(classes)
        return changed

    def with_own_class_numbers(self) -> Self:
        """Return the same rows; if the column of ``cls`` holds names alone, numbered in their order, after reading it once.

        Beside other values, such as numbers, they stay as they are: each row without a whole number has an error.

        Raises:
            SourceError: If the table is malformed.
        """
        column = self._fields.get(_LABEL_FIELD)
        if column is None:
            return self
        names: set[str] = set()
        for url in self._urls:
            for row in self._rows(url, [column]):
                cell = row.cells.get(column)
                if isinstance(cell, str) and _parse_number(cell) is None:
                    names.add(cell)
                elif cell is not None:
                    return self
        names.discard("")  # an error of its row
        if not names:
            return self
        return self.with_class_numbers(tuple(sorted(names)), self._urls[0])

    @property
    def fingerprint(self) -> str:
        """Hash of sizes and versions of the tables, and of the folder of the files that they name, which are not checked themselves."""
        files = [self._storage.info(url) for url in self._urls]
        parts = [part for file in files for part in (file.size_or_none, file.version)]
        if self.may_name_files:  # equal tables may name files of other folders
            roots = [self._options.root or parent_url(url) for url in self._urls]
            parts += map(absolute_url, roots)
        return fingerprint_of("table", parts)

    def _begin(self, first: int) -> int:
        """Return the number of the first row of the row group that holds a row, or of the first table without row groups."""
        return int(self._starts[np.searchsorted(self._starts, first, "right") - 1])

    def _read_from(self, first: int) -> Iterator[tuple[int, tuple[str, Row]]]:
        """Yield number, and table and row, from a number on; where a table does not store its length, from its first row on.

        Raises:
            SourceError: If a table is malformed.
            ChangedError: If it was replaced.
        """
        number = 0
        for place, url in enumerate(self._urls):
            counts = self._counts[place]
            rows = None if counts is None else sum(counts.group_rows)
            skipped = 0 if rows is None else min(rows, max(0, first - number))
            number += skipped
            if rows is not None and skipped == rows:
                continue
            self._versions.check([place])
            for row in self._rows(url, self._columns(), skipped):
                yield number, (url, row)
                number += 1
            self._versions.check([place])

    def _rows(self, url: str, columns: Sequence[str] | None, first: int = 0) -> Iterator[Row]:
        header = self._options.header
        rows = iter_rows(url, self._storage, columns=columns, first=first, header=header)
        if url not in self._looked_at and (row := next(rows, None)) is not None:
            if not self._fields and not header:
                _check_names(row, url)
            self._looked_at.add(url)
            if url == self._urls[0]:
                self._warn_of_fields(row)
            yield row
        yield from rows

    def _record(self, number: int, item: tuple[str, Row]) -> Record:
        """Make the record of a row; one that lacks a column, or has a value that does not fit its field, gets an error."""
        url, row = item
        root = self._options.root or parent_url(url)
        try:
            names = self._names(row.checked(), number)
            fields = self._converted(row, root)
            # A local table is trusted as the command line is.
            if self._storage.local_path(url) is None:
                self._check_places(row, fields, root)
        except SourceError as error:
            return Record("", {}, row.where, error)
        prefix = self.number_prefix if self._options.key is None else ""
        return Record(prefix + self._make_key(**names), fields, row.where)

    def _converted(self, row: Row, root: str) -> dict[str, Any]:
        if self._fields:
            return {
                field: self._label(row, column)
                if field == _LABEL_FIELD and self.classes is not None
                else convert_cell(field, row, column, root)
                for field, column in self._fields.items()
            }
        if self._file_column is None:
            return _unmapped(row)
        name = row.get(self._file_column)
        member = split_member_name(name) if isinstance(name, str) else None
        if member is None:
            raise row.error(f"column {self._file_column!r} holds {name!r}, not the name of a file")
        field = canonical_field(member[1].rpartition(".")[2])
        others = {column: cell for column, cell in row.cells.items() if column != self._file_column}
        file = {field: convert_cell(field, row, self._file_column, root)}
        return file | ({"json": others} if others else {})

    def _warn_of_fields(self, row: Row) -> None:
        """Warn of fields that no decoder knows, and of names of images that are packed as text."""
        for field, column in self._fields.items():
            last = field.rpartition(".")[2]
            if not has_encoder(field) and last not in MEDIA and last != "bin":
                _log.warning(
                    "%s: no decoder knows the field %r; name it by the format of its files, e.g. --map %s=%s",
                    row.where,
                    field,
                    _image_field(row.cells.get(column)) or f"{field}.jpg",
                    column,
                )
        if self._fields or self._file_column is not None:
            return
        for column, cell in row.cells.items():
            if (image := _image_field(cell)) is not None:
                _log.warning(
                    "%s: column %r names images, but is packed as text; --map %s=%s packs the images",
                    row.where,
                    column,
                    image,
                    column,
                )

    def _check_places(self, row: Row, fields: Mapping[str, Any], root: str) -> None:
        """Refuse files that this machine could read, but the owner of a remote table need not be allowed to.

        Raises:
            SourceError: If one is not under the root, nor under what the user allows.
        """
        for value in fields.values():
            if not isinstance(value, FileRef) or is_under(value.url, root):
                continue
            if not any(is_under(value.url, prefix) for prefix in self._options.allow):
                raise row.error(
                    f"it names {redact(value.url)}, which is not under {redact(root)}; if you trust the table, name the folder of its files with "
                    f"root= (--root), or allow such names: allow=[{redact(parent_url(value.url))!r}] (--allow)"
                )

    def _label(self, row: Row, column: str) -> int:
        name = row.get(column)
        if name is None or str(name) not in self.labels:
            raise row.error(
                f"column {column!r} holds {name!r}, which is not in the list of {plural(len(self.labels), 'class')}; "
                "add it to classes (--classes)"
            )
        return self.labels[str(name)]

    def _names(self, row: Row, index: int) -> dict[str, Any]:
        """Return the values for the key template.

        Raises:
            SourceError: If a cell that the key needs is empty.
        """
        if self._key_column is not None:
            return {"key": key_of(row.get(self._key_column), row)}
        if self._key == _RUNNING_KEY:
            return {"index": index}
        names = {**row.cells, "index": index}
        for column in self._key_columns:
            if names.get(column, column) in (None, ""):
                raise row.error(f"column {column!r} is empty, but the key {self._key!r} needs it")
        return names

    def _columns(self) -> list[str] | None:
        """Return the columns that are needed; None for all."""
        if not self._fields or (self._key_column is None and self._key != _RUNNING_KEY):
            return None
        keys = [] if self._key_column is None else [self._key_column]
        return list(dict.fromkeys([*self._fields.values(), *keys]))


def _column_bytes(counts: ParquetCounts, extension: str, column: str) -> int | None:
    """Return the bytes of the values that a column gives to a field, without padding; None if the table does not tell them."""
    if extension in INT_FIELDS:
        return 0  # a few digits, which a block holds
    if extension in TEXT_FIELDS | JSON_FIELDS and column in counts.text_bytes:
        return counts.text_bytes[column]
    return counts.binary_bytes.get(column)  # text would name files


def _check_names(row: Row, url: str) -> None:
    """Look at the names of the columns of a table: they may be a row.

    Raises:
        SourceError: If one is the path or URL of a file.
    """
    names = [name for name in row.cells if name and row.is_text]
    values = [name for name in names if is_value(name)]
    if not values or names == [str(number) for number in range(len(names))]:  # of pandas
        return
    found = next((name for name in values if "/" in name), values[0])
    problem = f"the first line may be a row, not the names of the columns: {found!r}"
    if "/" in found:
        raise SourceError(
            f"{problem}; name the columns with header=['path', …] (--header path,caption)",
            shard=url,
        )
    _log.warning("%s: %s; if it is, name the columns with --header path,caption", url, problem)


def _unmapped(row: Row) -> dict[str, Any]:
    """Return all columns as one field ``json``.

    Raises:
        SourceError: If one holds bytes, which JSON cannot hold.
    """
    for column, cell in row.cells.items():
        if isinstance(_unwrapped(cell), bytes):
            raise row.error(
                f"column {column!r} holds bytes, which the field 'json' cannot hold; map it to the field of its format, "
                f"e.g. fields={{'jpg': {column!r}}} (--map jpg={column})"
            )
    return {"json": dict(row.cells)}


def _image_field(cell: object) -> str | None:
    """Return the field of an image that a cell names; None if it names none."""
    value = _unwrapped(cell)
    is_image = isinstance(value, str) and is_image_name(value)
    return canonical_field(str(value).rpartition(".")[2]) if is_image else None


def key_of(cell: object, row: Row) -> str:
    """Return the key in a cell; a number becomes its digits.

    Raises:
        SourceError: If it is empty, or neither text nor a whole number.
    """
    if isinstance(cell, bool) or not isinstance(cell, str | int) or cell == "":
        raise row.error(f"a key is text, not {cell!r}; give each row a key, or filter the row out")
    return str(cell)


def convert_cell(field: str, row: Row, column: str, root: str) -> object:
    """Convert a cell to a value for a field.

    Raises:
        SourceError: If it does not fit.
    """
    value = _unwrapped(row.get(column))
    if value is None:
        raise row.error(f"column {column!r} is empty, but {field!r} needs a value")
    last = field.rpartition(".")[2]
    if not isinstance(value, bytes):
        if last in TEXT_FIELDS:
            value = _text(field, row, column, value)
        elif last in INT_FIELDS:
            value = _whole(field, row, column, value)
        elif last in JSON_FIELDS:
            value = _parsed(value) if row.is_text else value
        else:
            value = _file_or_numbers(field, row, column, value)
    return FileRef(join_url(root, value.url)) if isinstance(value, FileRef) else value


def _unwrapped(value: object) -> object:
    """Return the bytes or the path in a cell that Hugging Face wrote for an image or a sound."""
    if isinstance(value, dict) and "bytes" in value and value.keys() <= {"bytes", "path"}:
        return value["bytes"] if value["bytes"] is not None else value.get("path")
    return value


def _file_or_numbers(field: str, row: Row, column: str, value: object) -> object:
    if isinstance(value, str) and value.strip():
        return FileRef(value)
    if field.rpartition(".")[2] == _ARRAY_FIELD and isinstance(
        value, list | int | float | np.number | np.ndarray
    ):
        return number_array(value, row.dtypes.get(column))
    found = "no text" if value == "" else type(value).__name__
    raise row.error(
        f"column {column!r} holds {found}, but {field!r} takes the path of a file, or bytes"
    )


def _text(field: str, row: Row, column: str, value: object) -> object:
    """Return text and numbers as text; a list for ``jsonl`` stays."""
    if isinstance(value, list | np.ndarray | Mapping | bool):
        if isinstance(value, list) and field.rpartition(".")[2] == "jsonl":
            return value
        raise row.error(
            f"column {column!r} holds {reprlib.repr(value)}, but {field!r} takes text; "
            f"keep the value with json={column}"
        )
    return str(value)


def _whole(field: str, row: Row, column: str, value: object) -> int:
    whole = _exact(value)
    if whole is not None:
        return whole
    raise row.error(
        f"column {column!r} holds {reprlib.repr(value)}, but {field!r} takes a whole number; "
        f"number the names with classes= (--classes), or keep the text with txt={column}"
    )


def _exact(value: object) -> int | None:
    """Return a value as a whole number; None if it is none."""
    try:
        number = _parse_number(value) if isinstance(value, str) else value
        # Neither digits that a float has lost, nor a number of a million digits made of "1e999999".
        is_exact = not isinstance(number, float) or abs(number) < _EXACT_FLOAT
        if is_exact and not (isinstance(number, Decimal) and number.adjusted() > _MAX_DIGITS):
            whole = int(number)  # type: ignore[call-overload]
            if whole == number:
                return int(whole)
    except (ArithmeticError, TypeError, ValueError):
        pass
    return None


def _parse_number(text: str) -> Decimal | None:
    """Return the number of a text such as "3", "0.5" or "nan"; None for others, also for "1_0", which Python takes for 10."""
    try:
        return None if "_" in text else Decimal(text)
    except ArithmeticError:
        return None


def _parsed(value: object) -> object:
    """Parse JSON in a text cell; return other text unchanged."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
