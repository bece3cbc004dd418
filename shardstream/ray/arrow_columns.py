"""Build Arrow tables from samples: a column for the key, and one for each field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from ray.data.extensions import ArrowTensorArray, ArrowVariableShapedTensorArray

from shardstream.errors import SampleError
from shardstream.format import JoinedFields, Sample

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
