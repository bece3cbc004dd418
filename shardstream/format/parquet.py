"""Read Parquet in bounded memory: a file of 36 kB can hold 22 GB, as each row refers to one long text in a dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shardstream.errors import OptionError, how_to_install

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET_BASE_BYTES, PARQUET_RATIO = 1 << 30, 100
"""Rows may take so many bytes in memory, and so many times the bytes of their file."""
_NEEDS_PYARROW = f"Parquet, for tables and columns of samples, needs one more package: {how_to_install('parquet')}"
_TEXT = "BYTE_ARRAY"
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12, _TEXT: 4}


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
