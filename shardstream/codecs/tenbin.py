"""Arrays in WebDataset's tensor format, for fields ``ten`` and ``tb``.

Format: chunks of magic ``~TenBin~``, length (int64) and bytes padded to 64, with little-endian numbers. Each array is two chunks:
its header (int64s: NumPy's short name of the type, a text, number of dimensions, dimensions) and its numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_MAGIC = b"~TenBin~"
_ALIGN = 64
_TYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
_MAX_DIMENSIONS = 9

Array = np.ndarray[Any, Any]


def encode_buffer(l: Sequence[Array], infos: Sequence[str] | None = None) -> bytes:
    """Encode arrays, each with a text of up to 8 characters.

    Raises:
        ValueError: If an array has a type or shape that the format lacks.
    """
    texts = [""] * len(l) if infos is None else infos
    pieces: list[bytes] = []
    for given, text in zip(l, texts, strict=True):
        array = np.asarray(given, given.dtype.newbyteorder("<"))
        for chunk in (_encode_header(array, text), array.tobytes()):
            pieces += _MAGIC, struct.pack("<q", len(chunk)), chunk, bytes(-len(chunk) % _ALIGN)
    return b"".join(pieces)


def decode_buffer(buf: bytes, infos: bool = False) -> Any:
    """Decode arrays; with ``infos`` a pair of them and their texts.

    Raises:
        ValueError: If the bytes are damaged.
    """
    chunks = list(_chunks(buf))
    if len(chunks) % 2:
        raise ValueError("an array has a header and no numbers")
    arrays, texts = [], []
    for header, data in zip(chunks[::2], chunks[1::2], strict=True):
        shape, dtype, text = _decode_header(header)
        size = math.prod(shape)
        if size * dtype.itemsize > len(data):
            raise ValueError(
                f"an array of shape {shape}, {dtype}, does not fit in {len(data)} bytes"
            )
        arrays.append(np.frombuffer(data, dtype, count=size).reshape(shape).copy())
        texts.append(text)
    return (arrays, texts) if infos else arrays


def _encode_header(array: Array, text: str) -> bytes:
    name = array.dtype.str[1:]
    if name not in _TYPES or array.ndim > _MAX_DIMENSIONS:
        raise ValueError(
            f"an array of {array.dtype} with {array.ndim} dimensions cannot be stored; use npy"
        )
    return struct.pack(
        f"<8s8sq{array.ndim}q", name.encode(), text.encode("ascii"), array.ndim, *array.shape
    )


def _decode_header(data: bytes) -> tuple[tuple[int, ...], np.dtype[Any], str]:
    if len(data) < 24 or len(data) % 8:
        raise ValueError(f"the header of an array has {len(data)} bytes")
    name, text, ndim, *shape = struct.unpack(f"<8s8sq{len(data) // 8 - 3}q", data)
    short = name.rstrip(b"\0").decode("ascii", "replace")
    if (
        short not in _TYPES
        or not 0 <= ndim <= min(_MAX_DIMENSIONS, len(shape))
        or min(shape, default=0) < 0
    ):
        raise ValueError(f"the header of an array has the type {short!r} and the shape {shape}")
    return tuple(shape[:ndim]), np.dtype(f"<{short}"), text.rstrip(b"\0").decode("ascii", "replace")


def _chunks(data: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        if data[position : position + 8] != _MAGIC or position + 16 > len(data):
            raise ValueError(f"no chunk begins at byte {position}")
        (size,) = struct.unpack_from("<q", data, position + 8)
        position += 16
        if not 0 <= size <= len(data) - position:
            raise ValueError(f"a chunk of {size} bytes does not fit")
        yield data[position : position + size]
        position += size + -size % _ALIGN
