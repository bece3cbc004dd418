"""Convert tables of Arrow to rows of Python values; tensors become arrays of their shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from shardstream.errors import SourceError

_RAY_TENSORS = frozenset({"ray.data.arrow_tensor", "ray.data.arrow_tensor_v2"})
_RAY_VARIABLE = "ray.data.arrow_variable_shaped_tensor"
_NAME, _METADATA = b"ARROW:extension:name", b"ARROW:extension:metadata"


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
    from pyarrow import types  # noqa: PLC0415  (an extra; whoever has a schema has it)

    found: dict[str, np.dtype[Any]] = {}
    for column in schema:
        kind = column.type
        while hasattr(kind, "value_type"):
            kind = kind.value_type
        if types.is_integer(kind) or types.is_floating(kind):
            found[column.name] = np.dtype(kind.to_pandas_dtype())
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
