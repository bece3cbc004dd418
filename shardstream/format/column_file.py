"""Encode and decode ``NAME.tar.cols.parquet``: the key and chosen values of each sample of a shard, in the order of the shard.

The file is Parquet; pandas, Polars and DuckDB read it as well. The metadata of its schema name the shard that it was made of,
so that a file that is left next to another shard is noticed (docs/formats.md).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from shardstream.errors import (
    IndexMismatchError,
    ManifestError,
    OptionError,
    SampleError,
    describe_error,
    plural,
)
from shardstream.format.parquet import import_parquet, limit_of_rows, read_parquet
from shardstream.format.shard_info import ShardInfo

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

KEY_COLUMN = "__key__"
"""Name of the column of keys."""
_METADATA = b"shardstream"
_VERSION = 1
_REMEDY = "run 'shardstream index --columns' again"


ColumnFunction = Callable[[dict[str, Any]], Any]
"""Sample, a dict of its fields as bytes and its key, to a value."""
ColumnSources = str | Sequence[str] | Mapping[str, str | ColumnFunction]
"""Columns as a user names them (see `parse_columns`)."""


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


class _ParquetFile(Protocol):
    metadata: Any
    schema_arrow: Any


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


def _open_file(data: bytes, url: str) -> tuple[_ParquetFile, Mapping[str, Any]]:
    """Return a file of columns, and what its metadata say of the shard.

    Raises:
        ManifestError: If it is not such a file.
    """
    pa, parquet = import_parquet()
    try:
        file: _ParquetFile = parquet.ParquetFile(io.BytesIO(data))
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
