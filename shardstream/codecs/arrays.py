"""Decode NumPy's files of arrays, npy and npz (pickles are refused), and arrays in WebDataset's tensor format, for fields ``ten`` and ``tb``.

The tensor format: chunks of magic ``~TenBin~``, length (int64) and bytes padded to 64, with little-endian numbers. Each array is two chunks:
its header (int64s: NumPy's short name of the type, a text, number of dimensions, dimensions) and its numbers.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from shardstream.codecs.plain_values import check_inflated
from shardstream.format import FIELDS_LIMIT

_LAYOUTS_KEPT = 1000
_NUMBERS, _MAX_NUMBER_BYTES = "biuf", 8  # the types of numbers that torch has, too
_SMALL_BYTES = 1 << 14  # arrays that cost less to copy than to make
_SIZE = rb"(?:0|[1-9]\d{0,14})"
# What NumPy writes for an array of numbers: parsing it as Python takes 20 times as long.
_PLAIN_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|](?:b1|[iu][1248]|f[248]))', 'fortran_order': (False|True), "
    rb"'shape': \((|%(size)b,|(?:%(size)b, )+%(size)b)\), \} *\n" % {b"size": _SIZE},
    re.DOTALL,
)
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the methods that numpy writes


class NpyLayout(NamedTuple):
    """Header of a ``.npy`` file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    size: int


_layouts: dict[bytes, NpyLayout] = {}
"""Cache of parsed headers: parsing one takes as long as the rest of the decoding."""


def decode_npy(data: bytes) -> np.ndarray[Any, Any]:
    """Decode a ``.npy`` file to an array of the stored shape and dtype; object arrays (pickles) are refused.

    Format: NumPy enhancement proposal 1.
    """
    end = 10 + int.from_bytes(data[8:10], "little")
    layout = _layouts.get(data[:end])
    if layout is None:
        layout, end = read_npy_layout(data)
    used, found = layout.size * layout.dtype.itemsize, len(data) - end
    if used > found:
        raise ValueError(
            f"an array of shape {layout.shape}, {layout.dtype}, does not fit in {found} bytes"
        )
    if used < found:  # np.save to a file that has an array already
        raise ValueError(
            f"an array of {used} bytes, and {found - used} bytes after it, which would not be read; store each array as a field, or all as npz"
        )
    flat = np.ndarray(layout.size, layout.dtype, data, end)
    return flat.reshape(layout.shape, order=layout.order).copy(order="K")


def read_npy_layout(data: bytes) -> tuple[NpyLayout, int]:
    """Parse a header; return the layout and the offset of the header's end."""
    plain = _PLAIN_HEADER.match(data)
    if plain is not None and plain.end() == 10 + int.from_bytes(data[8:10], "little"):
        shape = tuple(map(int, filter(None, plain[3].split(b","))))
        order: Literal["C", "F"] = "F" if plain[2] == b"True" else "C"
        layout = NpyLayout(shape, np.dtype(plain[1].decode()), order, math.prod(shape))
        return _kept(data, plain.end(), layout)
    stream = io.BytesIO(data)
    version = npy_format.read_magic(stream)
    is_first = version == (1, 0)
    read = npy_format.read_array_header_1_0 if is_first else npy_format.read_array_header_2_0
    try:
        shape, is_fortran, dtype = read(stream)
    except (MemoryError, RecursionError) as error:  # raised by Python's parser for deep nesting
        raise ValueError("the header of the array is nested too deeply") from error
    if dtype.hasobject:
        raise ValueError("an array of objects is a pickle, which could run code")
    if min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape} has a negative length")
    layout = NpyLayout(shape, dtype, "F" if is_fortran else "C", math.prod(shape))
    if layout.size and not dtype.itemsize:
        # The data does not bound the number of items: a field of 128 bytes could request unlimited work.
        raise ValueError(f"an array of shape {shape} with items of 0 bytes ({dtype})")
    end = stream.tell()
    return _kept(data, end, layout) if is_first else (layout, end)


def _kept(data: bytes, end: int, layout: NpyLayout) -> tuple[NpyLayout, int]:
    if len(_layouts) < _LAYOUTS_KEPT:
        _layouts[data[:end]] = layout
    return layout, end


def decode_npy_column(files: list[bytes]) -> list[np.ndarray[Any, Any]] | np.ndarray[Any, Any]:
    """Decode ``.npy`` files as `decode_npy`; small ones of one shape and type of numbers to one array, shape (n, ...).

    That takes a tenth of the time: no array, and no copy, for each file. Large arrays would be copied once more.
    """
    first = files[0]
    end = 10 + int.from_bytes(first[8:10], "little")
    layout = _layouts.get(first[:end])
    if layout is None:
        layout, end = read_npy_layout(first)
    used = layout.size * layout.dtype.itemsize
    if (
        layout.order != "C"
        or layout.dtype.kind not in _NUMBERS
        or layout.dtype.itemsize > _MAX_NUMBER_BYTES
        or not 0 < used <= _SMALL_BYTES
        or used != len(first) - end
        or any(len(file) != len(first) for file in files)
    ):
        return list(map(decode_npy, files))
    rows = np.frombuffer(b"".join(files), np.uint8).reshape(len(files), len(first))
    if (rows[:, :end] != rows[0, :end]).any():
        return list(map(decode_npy, files))
    return rows[:, end : end + used].copy().view(layout.dtype).reshape(len(files), *layout.shape)


def decode_npz(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Decode a ``.npz`` file to its arrays by name; pickles, contents over 1 GiB and over 65,536 arrays are refused."""
    return dict(iter_npz(data))


def iter_npz(
    data: bytes, *, limit_bytes: int | None = None
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the arrays of a ``.npz`` file with their names, one in memory at a time; contents over the limit (1 GiB) are refused before."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if len(entries) > FIELDS_LIMIT:
            raise ValueError(f"{len(entries)} arrays, the limit is {FIELDS_LIMIT}")
        check_inflated(sum(entry.file_size for entry in entries), limit_bytes)
        for entry in entries:
            yield entry.filename.removesuffix(".npy"), decode_npy(_read_entry(archive, entry))


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Read at most the declared size of an entry; ``archive.read`` would first inflate all of it."""
    if entry.compress_type not in _PACKED:
        raise ValueError(f"{entry.filename!r} has a compression method that numpy does not use")
    with archive.open(entry) as stream:
        return stream.read(entry.file_size)


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
