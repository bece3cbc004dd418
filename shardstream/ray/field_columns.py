"""Encode the columns of a Ray block to field bytes, and read these row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from ray.data.extensions import ArrowTensorArray, ArrowVariableShapedTensorArray

from shardstream.errors import SampleError
from shardstream.format import BLOCK_BYTES, INT_FIELDS, TEXT_FIELDS, member_bytes, member_name
from shardstream.packing import encode_field, has_encoder
from shardstream.ray.arrow_columns import KEY

Sizes = npt.NDArray[np.int64]

_ARRAY_FIELDS = ("npy", "npz", "safetensors")
_PLAIN_KEY = "k"  # a valid key, to check the names of fields
_RUNNING_KEY_BYTES = 8
_SHORT_NAME_BYTES = 100  # shorter names of ASCII need one header block
_BIG_FILE_BYTES = 8**11  # files of this size need more


class BadRow(NamedTuple):
    """A row that cannot be written."""

    row: int
    """Its number in the block."""
    key: str | None
    error: SampleError


class EncodedBlock(NamedTuple):
    """A block whose columns are field bytes."""

    table: pa.Table | None
    """Columns of bytes, and of the keys if there are some; None if the block has this form already."""
    sizes: Sizes
    """Bytes of each row in a tar, shape (n,)."""
    bad: BadRow | None
    """The first row that cannot be written."""


def key_column(names: Sequence[str]) -> str | None:
    """Return the column that holds the keys: ``__key__``, else ``key``.

    >>> key_column(["key", "__key__"]), key_column(["jpg", "key"]), key_column(["jpg"])
    ('__key__', 'key', None)
    """
    return next((name for name in (KEY, "key") if name in names), None)


def field_names(names: Sequence[str]) -> list[str]:
    """Return the columns that are fields; names like ``__this__`` and the column of the keys are left out.

    >>> field_names(["__url__", "key", "jpg"])
    ['jpg']
    """
    key = key_column(names)
    return [
        name
        for name in names
        if name != key and not (name.startswith("__") and name.endswith("__"))
    ]


def encode_block(table: pa.Table) -> EncodedBlock:
    """Encode the columns of a block by their names (see `encode_field`).

    Args:
        table: Rows of a Ray dataset. Null is a missing field.
    """
    names, fields = key_column(table.column_names), field_names(table.column_names)
    keys, bad = (None, []) if names is None else _key_texts(table.column(names))
    columns: dict[str, pa.ChunkedArray] = {}
    for name in fields:
        column, found = _encode_column(name, table.column(name))
        columns[name] = column
        bad += found
    if bad:
        row, _, error = min(bad, key=lambda one: one.row)
        key = keys[row].as_py() if keys is not None else None
        return EncodedBlock(None, np.empty(0, np.int64), BadRow(row, key, error))
    sizes = _tar_sizes(table.num_rows, keys, columns)
    is_same = all(columns[name] is table.column(name) for name in fields)
    if is_same and (names is None or pa.types.is_string(table.schema.field(names).type)):
        return EncodedBlock(None, sizes, None)
    with_keys = columns if keys is None else {KEY: keys, **columns}
    return EncodedBlock(pa.table(with_keys), sizes, None)


def iter_fields(table: pa.Table) -> Iterator[tuple[str | None, dict[str, memoryview]]]:
    """Yield key and fields of each row, without copying them.

    Args:
        table: Encoded columns.
    """
    name_of_key, names = key_column(table.column_names), field_names(table.column_names)
    for batch in table.to_batches():
        keys = [None] * batch.num_rows
        if name_of_key is not None:
            keys = batch.column(name_of_key).to_pylist()
        columns = [(name, *_views(batch.column(name))) for name in names]
        for row, key in enumerate(keys):
            yield (
                key,
                {
                    name: data[ends[row] : ends[row + 1]]
                    for name, data, ends, is_there in columns
                    if is_there is None or is_there[row]
                },
            )


def _views(column: pa.Array) -> tuple[memoryview, list[int], list[bool] | None]:
    """Return the bytes of a binary column, where each value ends in them, and which values are there."""
    if pa.types.is_null(column.type):
        return memoryview(b""), [0] * (len(column) + 1), [False] * len(column)
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    is_large = pa.types.is_large_binary(column.type)
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int64 if is_large else np.int32)
    is_there = column.is_valid().to_pylist() if column.null_count else None
    return (
        memoryview(b"" if data is None else data),
        ends[column.offset : column.offset + len(column) + 1].tolist(),
        is_there,
    )


def _key_texts(column: pa.ChunkedArray) -> tuple[pa.Array | None, list[BadRow]]:
    """Return the keys of a block, or the first that is no text."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)) and column.null_count < len(
        column
    ):
        what = SampleError(
            f"the key is text, but the column holds {column.type}", remedy="use str(key)"
        )
        return None, [BadRow(0, None, what)]
    keys = column.cast(pa.string()).combine_chunks()
    keys = (
        keys
        if isinstance(keys, pa.Array)
        else pa.concat_arrays(keys.chunks or [pa.array([], pa.string())])
    )
    if not keys.null_count:
        return keys, []
    row = pc.index(keys.is_null(), True).as_py()
    what = SampleError(
        "the row has no key", remedy="give each row its own, or drop the column of the keys"
    )
    return keys, [BadRow(row, None, what)]


def _encode_column(name: str, column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, list[BadRow]]:
    """Return a column as bytes, or the first row that cannot be encoded."""
    try:
        member_name(_PLAIN_KEY, name)
    except SampleError as error:
        return column, [BadRow(0, None, SampleError(error.what, remedy=error.remedy, field=name))]
    kind, suffix = column.type, name.rpartition(".")[2].lower()
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if _is_bytes(kind) or pa.types.is_null(kind):
        return column, []
    if suffix in TEXT_FIELDS and pa.types.is_string(kind):
        return column.cast(pa.binary()), []
    if suffix in TEXT_FIELDS and pa.types.is_large_string(kind):
        return column.cast(pa.large_binary()), []
    if suffix in INT_FIELDS and pa.types.is_integer(kind):
        return column.cast(pa.string()).cast(pa.binary()), []
    return _encode_values(name, column)


def _encode_values(name: str, column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, list[BadRow]]:
    """Encode the values of a column one by one."""
    chunks, row = [], 0
    for chunk in column.chunks:
        encoded: list[bytes | None] = []
        for value in _values(chunk, name):
            try:
                encoded.append(None if value is None else _encode_value(name, value))
            except SampleError as error:
                return column, [BadRow(row, None, error)]
            row += 1
        chunks.append(pa.array(encoded, pa.large_binary()))
    return pa.chunked_array(chunks, pa.large_binary()), []


def _encode_value(name: str, value: object) -> bytes:
    if isinstance(value, bytes) or has_encoder(name):
        return encode_field(name, value)
    raise SampleError(
        f"the name of this column does not say how to write {type(value).__name__}",
        remedy=f"rename it, for example to '{name}.cls' (whole numbers), '{name}.txt' (text), '{name}.npy' (arrays) or '{name}.json', "
        "or convert it to bytes",
        field=name,
    )


def _values(chunk: pa.Array, name: str) -> Iterator[Any]:
    """Yield the values of a column; numbers keep their dtype, whatever else is in the block."""
    kind = chunk.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        dtype = np.dtype(kind.to_pandas_dtype())
        present = iter(chunk.drop_null().to_numpy(zero_copy_only=False).astype(dtype))
        yield from (next(present) if there else None for there in chunk.is_valid().to_pylist())
        return
    if (
        isinstance(chunk, ArrowTensorArray | ArrowVariableShapedTensorArray)
        and not chunk.null_count
    ):
        yield from chunk.to_numpy(zero_copy_only=False)
        return
    if isinstance(kind, pa.FixedShapeTensorType):
        yield from (scalar.to_numpy() if scalar.is_valid else None for scalar in chunk)
        return
    is_array = name.rpartition(".")[2].lower() in _ARRAY_FIELDS
    for scalar in chunk:
        yield _typed(scalar) if is_array else scalar.as_py()


def _typed(scalar: Any) -> Any:
    """Return a value with its lists of numbers, also in lists and structs, as arrays of their dtype."""
    if scalar.is_valid and pa.types.is_struct(scalar.type):
        return {name: _typed(scalar[name]) for name in scalar}
    is_whole = scalar.is_valid and _is_list(scalar.type)
    array = _to_array(scalar.values) if is_whole else None
    return scalar.as_py() if array is None else array


def _to_array(values: pa.Array) -> npt.NDArray[Any] | None:
    """Return numbers, or lists of them of one length, as an array; None for others."""
    if values.null_count:
        return None
    kind = values.type
    if not _is_list(kind):
        is_plain = (
            pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        )
        return values.to_numpy(zero_copy_only=False) if is_plain else None
    lengths = pc.unique(pc.list_value_length(values)).to_pylist() or [0]
    array = _to_array(values.flatten())
    if array is None or len(lengths) > 1:
        return None
    return array.reshape(len(values), lengths[0], *array.shape[1:])


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _tar_sizes(num_rows: int, keys: pa.Array | None, columns: dict[str, pa.ChunkedArray]) -> Sizes:
    """Return how many bytes the fields of each row take in a tar."""
    sizes = np.zeros(num_rows, np.int64)
    key_bytes = np.full(num_rows, _RUNNING_KEY_BYTES)
    is_ascii = np.ones(num_rows, bool)
    if keys is not None:
        key_bytes = pc.binary_length(keys).to_numpy(zero_copy_only=False)
        is_ascii = key_bytes == pc.utf8_length(keys).to_numpy(zero_copy_only=False)
    for name, column in columns.items():
        if column.null_count == num_rows:
            continue
        there = column.is_valid().to_numpy()
        lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy().astype(np.int64)
        blocks = 1 + -(-lengths // BLOCK_BYTES)
        sizes += np.where(there, blocks * BLOCK_BYTES, 0)
        is_short = key_bytes + 1 + len(name) < _SHORT_NAME_BYTES
        is_plain = is_ascii & is_short & (lengths < _BIG_FILE_BYTES) & name.isascii()
        for row in np.flatnonzero(there & ~is_plain).tolist():  # these need a header of their own
            key = "0" * _RUNNING_KEY_BYTES if keys is None else keys[row].as_py()
            exact = member_bytes(f"{key}.{name}", int(lengths[row]))
            sizes[row] += exact - int(blocks[row]) * BLOCK_BYTES
    return sizes
