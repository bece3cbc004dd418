"""Columns of Arrow -> values of fields."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from shardstream.errors import SourceError
from shardstream.packing import rows_of

if TYPE_CHECKING:
    import pyarrow as pa


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
