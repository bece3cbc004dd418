"""Encode and decode ``NAME.tar.cols.parquet``: the key and chosen values of each sample of a shard, in the order of the shard.

The file is Parquet; pandas, Polars and DuckDB read it as well. The metadata of its schema name the shard that it was made of,
so that a file that is left next to another shard is noticed (docs/formats.md).

Any Parquet is read in bounded memory: a file of 36 kB can hold 22 GB, as each row refers to one long text in a dictionary.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from shardstream.errors import (
    IndexMismatchError,
    ManifestError,
    OptionError,
    SampleError,
    describe_error,
    how_to_install,
    plural,
)
from shardstream.format.shard import ShardInfo

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

PARQUET_BASE_BYTES, PARQUET_RATIO = 1 << 30, 100
"""Rows may take so many bytes in memory, and so many times the bytes of their file."""
_NEEDS_PYARROW = f"Parquet, for tables and columns of samples, needs one more package: {how_to_install('parquet')}"
_TEXT = "BYTE_ARRAY"
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12, _TEXT: 4}
KEY_COLUMN = "__key__"
"""Name of the column of keys."""
_METADATA = b"shardstream"
_VERSION = 1
_REMEDY = "run 'shardstream index --columns' again"


ColumnFunction = Callable[[dict[str, Any]], Any]
"""Sample, a dict of its fields as bytes and its key, to a value."""
ColumnSources = str | Sequence[str] | Mapping[str, str | ColumnFunction]
"""Columns as a user names them (see `parse_columns`)."""


def import_parquet() -> tuple[Any, Any]:
    """Return the modules ``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        OptionError: If pyarrow is not installed.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415  (an extra)
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise OptionError(_NEEDS_PYARROW) from error
    return pa, parquet


def limit_of_rows(file_bytes: int) -> int:
    """Return the bytes that the rows of a file of this length may take in memory."""
    return PARQUET_BASE_BYTES + PARQUET_RATIO * file_bytes


def read_parquet(
    file: Any,
    columns: Sequence[str] | None,
    *,
    url: str,
    limit_bytes: int,
    row_groups: Sequence[int] | None = None,
    metadata: Any = None,
) -> pa.Table:
    """Return columns of a Parquet file; the text of its dictionaries is repeated only when the sum of its lengths is known.

    Args:
        file: A file that reads and seeks, or a `pyarrow.BufferReader`.
        columns: Columns to read; None for all.
        url: URL of the file, for the message.
        limit_bytes: Limit of the table in memory.
        row_groups: Numbers of the row groups to read; None for all.
        metadata: The metadata of the file, if they have been read already.

    Raises:
        OptionError: If it takes more.
        pyarrow.ArrowInvalid: If the file is damaged.
        OSError: If the file is damaged.
    """
    pa, parquet = import_parquet()
    plain = parquet.ParquetFile(file, metadata=metadata)
    schema, metadata = plain.schema_arrow, plain.metadata
    groups = [*range(metadata.num_row_groups)] if row_groups is None else [*row_groups]
    _check(least_bytes(metadata, groups, columns), limit_bytes, url)
    leaves = [plain.schema.column(number) for number in range(len(plain.schema))]
    texts = [leaf.path for leaf in leaves if leaf.physical_type == _TEXT]
    coded = parquet.ParquetFile(file, metadata=metadata, read_dictionary=texts)
    names = schema.names if columns is None else [*columns]
    # Arrow does not repeat the text of a dictionary in the layouts of views.
    views = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}
    found = [schema.field(name) for name in names]
    found = [one.with_type(views.get(str(one.type), one.type)) for one in found]
    target = pa.schema(found, schema.metadata)
    size, batches = 0, []
    for batch in coded.iter_batches(row_groups=groups, columns=names):
        size += sum(map(_decoded_bytes, batch.columns))
        _check(size, limit_bytes, url)
        cells = [batch.column(field.name).cast(field.type) for field in target]
        batches.append(pa.RecordBatch.from_arrays(cells, schema=target))
    return pa.Table.from_batches(batches, schema=target)


def _check(size: int, limit_bytes: int, url: str) -> None:
    if size > limit_bytes:
        raise OptionError(
            f"the rows take {size >> 20} MiB or more in memory, the limit is {limit_bytes >> 20} MiB; "
            "write the table with shorter values, or in smaller row groups",
            shard=url,
        )


def column_chunks(metadata: Any, group: int, columns: Sequence[str] | None) -> list[Any]:
    """Return the metadata of the chunks of some columns, and of their nested ones, in a row group; None for all columns."""
    chunks = map(metadata.row_group(group).column, range(metadata.num_columns))
    if columns is None:
        return [*chunks]
    wanted = tuple(f"{column}." for column in columns)  # a nested one is COLUMN.list.element
    return [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(wanted)]


def least_bytes(metadata: Any, groups: Iterable[int], columns: Sequence[str] | None) -> int:
    """Return the bytes of all values in some row groups, with those of text as their places in a dictionary, or of their pages if these have more."""
    return sum(
        max(chunk.num_values * _WIDTHS.get(chunk.physical_type, 1), chunk.total_uncompressed_size)
        for group in groups
        for chunk in column_chunks(metadata, group, columns)
    )


def _decoded_bytes(array: Any) -> int:
    """Return the bytes that an array takes with its dictionaries written out."""
    import pyarrow as pa  # noqa: PLC0415  (an extra)
    import pyarrow.compute as pc  # noqa: PLC0415

    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = pc.binary_length(array.dictionary).take(array.indices)
        return int(array.indices.nbytes + (pc.sum(lengths).as_py() or 0))
    if pa.types.is_map(kind):
        return _decoded_bytes(array.keys) + _decoded_bytes(array.items)
    if pa.types.is_nested(kind) and not pa.types.is_union(kind):
        parts = array.flatten()
        return sum(map(_decoded_bytes, parts if isinstance(parts, list) else [parts]))
    return int(array.nbytes)


@dataclass(frozen=True, slots=True)
class Column:
    """A column to make.

    Args:
        name: Its name in the file.
        source: A field such as ``cls``, a value in a field of JSON such as ``json.size.width``, a property of the files of a field such as
            ``npy.len``, or the name of a function, with ``()``.
        function: The function, where it is known.
    """

    name: str
    source: str
    function: ColumnFunction | None = field(default=None, compare=False, repr=False)

    @property
    def spec(self) -> str:
        """The column as a user names it."""
        return f"{self.name}={self.source}"

    @property
    def is_computed(self) -> bool:
        """Whether its values are results of a function."""
        return self.source.endswith("()")


def parse_columns(columns: ColumnSources) -> tuple[Column, ...]:
    """Return the columns that a user names.

    >>> [*parse_columns("cls,n=npy.len,high=json.size.height")]
    [Column(name='cls', source='cls'), Column(name='n', source='npy.len'), Column(name='high', source='json.size.height')]

    Args:
        columns: Sources, or ``name=source``, as a list or separated by commas; or a mapping of names to sources or functions. Without a
            name, the last part of the source is the name. ``__key__`` is a column always, and may be named.

    Raises:
        OptionError: If there is none, or two have one name.
    """
    if isinstance(columns, Mapping):
        found = [_named_column(*item) for item in columns.items()]
    else:
        listed = columns.split(",") if isinstance(columns, str) else columns
        found = [_parse_column(text.strip()) for text in listed]
    if not found or any(not one.name or not one.source for one in found):
        raise OptionError(
            "columns= (--columns) takes fields, values in JSON fields, and lengths, e.g. cls,json.width,n=npy.len"
        )
    found = [one for one in found if one.source != KEY_COLUMN]
    sources: dict[str, str] = {}
    for one in found:
        name, source = one.name, one.source
        if name != KEY_COLUMN and is_reserved_column(name):
            raise OptionError(
                f"the name {name!r} is reserved; name the column otherwise, by NAME={source}"
            )
        if name == KEY_COLUMN or sources.setdefault(name, source) != source:
            raise OptionError(
                f"two columns are named {name!r}: {sources.get(name, 'the keys')} and {source}; "
                f"name one by NAME={source}"
            )
    return tuple(dict.fromkeys(found))


def is_reserved_column(name: str) -> bool:
    """Return whether a name is in double underscores, as that of the column of keys.

    >>> is_reserved_column("__number__"), is_reserved_column("__x")
    (True, False)
    """
    return name.startswith("__") and name.endswith("__")


def _named_column(name: str, source: str | ColumnFunction) -> Column:
    if isinstance(source, str):
        return Column(name, source)
    if not callable(source):
        raise OptionError(
            f"the column {name!r} is made of {source!r}; give the name of a field, or a function of a sample"
        )
    known = getattr(source, "__qualname__", type(source).__qualname__)
    return Column(name, f"{known}()", source)


def _parse_column(text: str) -> Column:
    name, equals, source = text.partition("=")
    return Column(name, source) if equals else Column(text.rpartition(".")[2], text)


def key_array(keys: Sequence[str], url: str) -> pa.Array:
    """Return the keys of samples as a column.

    Args:
        keys: The keys.
        url: The samples' shard or folder, for the message.

    Raises:
        OptionError: If pyarrow is not installed.
        SampleError: If a key is not UTF-8.
    """
    pa, _ = import_parquet()
    try:
        return pa.array(keys, pa.string())
    except UnicodeEncodeError as error:
        raise SampleError(
            "a key that is not UTF-8 cannot be in a column; write the samples again with other keys",
            shard=url,
            key=str(error.object),
        ) from error


def encode_column_file(
    keys: Sequence[str], values: Mapping[Column, Sequence[Any]], shard: ShardInfo
) -> bytes:
    """Return the file of a shard; equal values give equal bytes with the same pyarrow.

    Args:
        keys: Keys of the samples.
        values: The values of each column: bool, int, float, str or None, of one type in a column (int and float may be mixed).
        shard: The shard.

    Raises:
        OptionError: If pyarrow is not installed, or values are of several types.
        SampleError: If a key is not UTF-8.
    """
    pa, _ = import_parquet()
    arrays = {KEY_COLUMN: key_array(keys, shard.url)}
    for column, listed in values.items():
        try:
            arrays[column.name] = pa.array(listed)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise OptionError(
                f"the values of the column {column.name} ({column.source}) do not fit one type: {error}",
                shard=shard.url,
            ) from error
    return _write(pa.table(arrays), {column.name: column.source for column in values}, shard)


def filter_column_file(
    data: bytes, shard: ShardInfo, is_kept: npt.NDArray[np.bool_], new: ShardInfo
) -> bytes:
    """Return the file of a shard that has some samples of another one.

    Args:
        data: The file of the other shard.
        shard: The other shard.
        is_kept: Whether the new one has a sample, shape (n,).
        new: The new shard.

    Raises:
        ManifestError, IndexMismatchError: As `decode_column_file`.
        OptionError: If pyarrow is not installed.
    """
    table = decode_column_file(data, shard, None).filter(is_kept)
    return _write(table, _open_file(data, shard.columns_url)[1]["columns"], new)


def _write(table: pa.Table, columns: Mapping[str, str], shard: ShardInfo) -> bytes:
    """Return the file of a shard with some columns (name -> source)."""
    _, parquet = import_parquet()
    identity = {
        "version": _VERSION,
        "columns": dict(columns),
        "nsamples": table.num_rows,
        "filesize": shard.filesize,
        "sha256": shard.sha256,
    }
    sink = io.BytesIO()
    described = table.replace_schema_metadata({_METADATA: orjson.dumps(identity)})
    parquet.write_table(described, sink, compression="zstd")
    return sink.getvalue()


def decode_column_file(data: bytes, shard: ShardInfo, names: Sequence[str] | None) -> pa.Table:
    """Return the columns of a shard, one row for each sample.

    Args:
        data: The file.
        shard: The shard, as its manifest describes it.
        names: Columns to read; None for all.

    Raises:
        ManifestError: If it is not such a file.
        IndexMismatchError: If it was made of another shard.
        OptionError: If it lacks a column, or pyarrow is not installed.
    """
    pa, _ = import_parquet()
    url = shard.columns_url
    file, identity = _open_file(data, url)
    made_of = (identity["nsamples"], identity["filesize"], identity["sha256"])
    _check_shard(made_of, file.metadata.num_rows, shard)
    missing = [name for name in names or () if name not in file.schema_arrow.names]
    if missing:
        raise OptionError(
            f"there is no column {missing[0]!r}, but {', '.join(file.schema_arrow.names)}; "
            f"add it with 'shardstream index --columns'",
            shard=url,
        )
    try:
        limit = limit_of_rows(len(data))
        table = read_parquet(pa.BufferReader(data), names, url=url, limit_bytes=limit)
    except (pa.ArrowInvalid, OSError) as error:
        raise ManifestError(
            f"a damaged file of columns: {error}", remedy=_REMEDY, shard=url
        ) from error
    return table.replace_schema_metadata(None)


def columns_in_file(data: bytes, *, url: str) -> tuple[Column, ...]:
    """Return the columns of a file but that of the keys.

    Raises:
        ManifestError: If it is not such a file.
        OptionError: If pyarrow is not installed.
    """
    return tuple(Column(*item) for item in _open_file(data, url)[1]["columns"].items())


def _open_file(data: bytes, url: str) -> tuple[Any, Mapping[str, Any]]:
    """Return a file of columns, and what its metadata say of the shard.

    Raises:
        ManifestError: If it is not such a file.
    """
    pa, parquet = import_parquet()
    try:
        file = parquet.ParquetFile(io.BytesIO(data))
        identity = orjson.loads((file.schema_arrow.metadata or {})[_METADATA])
        names = file.schema_arrow.names
        is_ours = identity["version"] == _VERSION and names[:1] == [KEY_COLUMN]
        is_ours &= {"nsamples", "filesize", "sha256"} <= identity.keys()
        is_ours &= {*identity["columns"]} <= {*names}
    except (
        pa.ArrowInvalid,
        pa.ArrowTypeError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise ManifestError(
            f"not a file of columns: {describe_error(error)}", remedy=_REMEDY, shard=url
        ) from error
    if not is_ours:
        raise ManifestError("not a file of columns of this version", remedy=_REMEDY, shard=url)
    return file, identity


def _check_shard(made_of: tuple[Any, Any, Any], nrows: int, shard: ShardInfo) -> None:
    """Check that a file of columns was made of a shard.

    Raises:
        IndexMismatchError: If it was not.
    """
    known = (shard.nsamples, shard.filesize, shard.sha256)
    if made_of[2] is not None and shard.sha256 is None:
        raise IndexMismatchError(
            "no checksum of the shard is known, to compare with that of the shard that the columns were made of",
            remedy="run 'shardstream index --columns' on the folder",
            shard=shard.columns_url,
        )
    is_other = any(
        None not in (one, other) and one != other for one, other in zip(made_of, known, strict=True)
    )
    if is_other or nrows != made_of[0]:
        raise IndexMismatchError(
            f"the columns were made of another shard, with {plural(nrows, 'sample')} in {made_of[1]} bytes",
            remedy=_REMEDY,
            shard=shard.columns_url,
        )
