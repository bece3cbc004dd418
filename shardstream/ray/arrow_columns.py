"""Samples -> Arrow tables, and Arrow columns -> field bytes, which are read row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from ray.data.extensions import ArrowTensorArray, ArrowVariableShapedTensorArray

from shardstream.errors import SampleError
from shardstream.format import (
    BLOCK_BYTES,
    INT_FIELDS,
    TEXT_FIELDS,
    JoinedFields,
    Sample,
    member_bytes,
    member_name,
)
from shardstream.packing import encode_field, has_encoder

KEY, URL = "__key__", "__url__"
_BINARY_LIMIT_BYTES = (1 << 31) - 1  # offsets of Arrow's binary type are int32
_NUMBERS = "biuf"
_Array = np.ndarray[Any, np.dtype[Any]]


def raw_schema(columns: Iterable[str]) -> pa.Schema:
    """Return the schema of undecoded samples: keys and URLs are strings, fields are binary."""
    return pa.schema([(name, _raw_type(name)) for name in columns])


def joined_table(joined: JoinedFields, columns: Sequence[str]) -> pa.Table:
    """Return undecoded samples as a table, without copying their bytes.

    Args:
        joined: Samples with the same fields.
        columns: Columns of the table; a field that the samples lack is null.
    """
    text = {KEY: joined.keys, URL: joined.urls}
    arrays = []
    for name in columns:
        if name in text:
            arrays.append(pa.array(text[name], pa.string()))
        elif name in joined.fields:
            arrays.append(_binary_array(*joined.fields[name]))
        else:
            arrays.append(pa.nulls(len(joined.keys), pa.binary()))
    return pa.Table.from_arrays(arrays, schema=raw_schema(columns))


def rows_table(
    rows: Sequence[Sample], columns: Sequence[str] | None, schema: pa.Schema | None = None
) -> pa.Table:
    """Return samples as a table; the type of each column follows from its values.

    Text is string, bytes are binary, whole numbers int64, fractions double, truth values bool; arrays, tensors and PIL images
    are Ray tensors (of variable shape if they differ); lists and dicts are Arrow lists and structs. A missing value is null.

    Args:
        rows: Samples.
        columns: Columns of the table; None takes all fields of these samples, and the key.
        schema: Types of the columns, if they are known.

    Raises:
        SampleError: If the values of a column do not fit one Arrow type; names the column, and a shard and key.
    """
    names = columns if columns is not None else column_names(rows)
    arrays = []
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            if schema is not None:
                arrays.append(pa.array(values, schema.field(name).type))
            else:
                arrays.append(_column(values))
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            raise _column_error(name, rows, error) from error
    return pa.Table.from_arrays(arrays, names=list(names))


def column_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all columns of some samples, in order of their first use; ``__url__`` is left out."""
    names = dict.fromkeys(name for fields in dict.fromkeys(map(tuple, rows)) for name in fields)
    names.pop(URL, None)
    return list(names)


def value_bytes(value: Any) -> int:
    """Estimate the bytes of a value in Arrow.

    >>> value_bytes(b"abc"), value_bytes(np.zeros((2, 3))), value_bytes({"a": [1, 2]}), value_bytes(None)
    (3, 48, 16, 8)
    """
    if isinstance(value, bytes | str):
        return len(value)
    nbytes = getattr(value, "nbytes", None)  # of arrays and tensors
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(value, Mapping):
        return sum(map(value_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(value_bytes, value))
    if hasattr(value, "getbands"):  # a PIL image
        return int(value.width * value.height * len(value.getbands()))
    return 8


def _raw_type(name: str) -> pa.DataType:
    return pa.string() if name in (KEY, URL) else pa.binary()


def _binary_array(data: bytes, offsets: _Array) -> pa.Array:
    if len(data) > _BINARY_LIMIT_BYTES:
        raise SampleError(f"{len(data)} bytes in one block, the limit of Arrow is 2 GiB")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _column(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values} - {type(None)}
    if kinds and all(issubclass(kind, str) for kind in kinds):
        return pa.array(values, pa.string())
    if kinds and kinds <= {bytes, bytearray, memoryview}:
        return pa.array(values, pa.binary())
    if any(map(_is_array_type, kinds)):
        return _tensor_column(values)
    if len(kinds) > 1 and any(issubclass(kind, np.generic) for kind in kinds):
        values = [value.item() if isinstance(value, np.generic) else value for value in values]
    return pa.array(values)


def _is_array_type(kind: type) -> bool:
    """Return True for arrays, tensors and PIL images, without importing torch or Pillow."""
    return (
        issubclass(kind, np.ndarray)
        or hasattr(kind, "__array_interface__")
        or hasattr(kind, "untyped_storage")
    )


def _tensor_column(values: list[Any]) -> pa.Array:
    """Return arrays, tensors and images as Ray tensors; None becomes null."""
    arrays = [None if value is None else _to_numpy(value) for value in values]
    present = [array for array in arrays if array is not None]
    dtypes = {array.dtype for array in present}
    if any(dtype.kind not in _NUMBERS for dtype in dtypes):
        return pa.array([None if array is None else array.tolist() for array in arrays])
    if len({array.ndim for array in present}) > 1:
        raise ValueError(f"arrays of {sorted({array.ndim for array in present})} dimensions")
    if len(dtypes) > 1:
        common = np.result_type(*dtypes)
        present = [array.astype(common) for array in present]
    column = _build_tensors(present)
    if len(present) == len(values):
        return column
    counted = iter(range(len(present)))
    places = pa.array([None if array is None else next(counted) for array in arrays], pa.int64())
    if not isinstance(column, pa.ExtensionArray):
        return column.take(places)
    storage = column.storage.take(places)
    return pa.ExtensionArray.from_storage(column.type, storage)


def _build_tensors(arrays: list[_Array]) -> pa.Array:
    if not arrays[0].ndim:
        return pa.array(np.stack(arrays))
    if len({array.shape for array in arrays}) == 1:
        return ArrowTensorArray.from_numpy(np.stack(arrays))
    return ArrowVariableShapedTensorArray.from_numpy(arrays)


def _to_numpy(value: Any) -> _Array:
    if hasattr(value, "untyped_storage"):  # a tensor, perhaps with gradients or on a GPU
        return np.asarray(value.detach().cpu().numpy())
    return np.asarray(value)


def _column_error(name: str, rows: Sequence[Sample], error: Exception) -> SampleError:
    sample = next((row for row in rows if row.get(name) is not None), rows[0])
    kinds = sorted({type(row[name]).__name__ for row in rows if row.get(name) is not None})
    what = (
        f"a column of {', '.join(kinds)} does not fit one Arrow type ({str(error).splitlines()[0]})"
    )
    if isinstance(error, UnicodeEncodeError):
        what = "text that is not valid UTF-8 does not fit Arrow's string type"
    return SampleError(
        what,
        remedy="convert it with .map(), decode it to an array, or leave it out with fields=",
        shard=sample.get(URL),
        key=sample.get(KEY),
        field=name,
    )


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


class EncodedRows(NamedTuple):
    """Rows whose columns are field bytes."""

    is_changed: bool
    """Whether the block that they came from has another form."""
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


def encode_block(table: pa.Table) -> tuple[pa.Table | None, EncodedRows]:
    """Encode the columns of a block by their names (see `encode_field`).

    Args:
        table: Rows of a Ray dataset. Null is a missing field.

    Returns:
        Columns of bytes, and of the keys if there are some; None if the block has this form already. And what the driver gets to know.
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
        return None, EncodedRows(False, np.empty(0, np.int64), BadRow(row, key, error))
    sizes = _tar_sizes(table.num_rows, keys, columns)
    is_same = all(columns[name] is table.column(name) for name in fields)
    if is_same and (names is None or pa.types.is_string(table.schema.field(names).type)):
        return None, EncodedRows(False, sizes, None)
    with_keys = columns if keys is None else {KEY: keys, **columns}
    return pa.table(with_keys), EncodedRows(True, sizes, None)


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
        present = iter(chunk.drop_null().to_numpy(zero_copy_only=False))
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
