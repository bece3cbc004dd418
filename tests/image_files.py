"""Write image files that Pillow can read but not write."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))  # fmt: skip


def png_of(pixels: Array, *, interlaced: bool = False, bits: int = 0) -> bytes:
    """Return a PNG of any depth and number of channels; each row has the filter "sub", which depends on the pixel size."""
    pixels = pixels if pixels.ndim == 3 else pixels[:, :, None]
    bits = bits or pixels.dtype.itemsize * 8
    step = max(1, pixels.shape[2] * bits // 8)
    passes = [pixels[y::dy, x::dx] for x, y, dx, dy in ADAM7] if interlaced else [pixels]

    def row_of(row: Array) -> bytes:
        if bits < 8:
            digits = "".join(f"{number:0{bits}b}" for number in row.ravel())
            plain = int(digits.ljust(-len(digits) // 8 * -8, "0"), 2).to_bytes(-(-len(digits) // 8))
        else:
            plain = row.astype(row.dtype.newbyteorder(">")).tobytes()
        before = bytes(step) + plain
        return b"\x01" + bytes((a - b) & 255 for a, b in zip(plain, before, strict=False))

    data = b"".join(row_of(row) for part in passes if part.size for row in part)
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[pixels.shape[2]]
    head = struct.pack(
        ">IIBBBBB", pixels.shape[1], pixels.shape[0], bits, kind, 0, 0, int(interlaced)
    )
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(data)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def tiff_of(pixels: Array, order: str, *, photometric: int | None = None) -> bytes:
    """Return an uncompressed TIFF of any number type, in a byte order ("<" or ">")."""
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    plain = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    kind = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    photometric = (2 if channels >= 3 else 1) if photometric is None else photometric
    tags: list[tuple[int, int, tuple[int, ...]]] = [
        (256, 3, (pixels.shape[1],)),
        (257, 3, (pixels.shape[0],)),
        (258, 3, (pixels.dtype.itemsize * 8,) * channels),
        (259, 3, (1,)),
        (262, 3, (photometric,)),
        (273, 4, (8,)),
        (277, 3, (channels,)),
        (278, 3, (pixels.shape[0],)),
        (279, 4, (len(plain),)),
        *([(338, 3, (2,))] if channels == 4 and photometric == 2 else []),
        (339, 3, (kind,) * channels),
    ]
    plain += bytes(len(plain) % 2)
    place, later, entries = 8 + len(plain) + 2 + 12 * len(tags) + 4, b"", b""
    for tag, form, values in tags:
        packed = struct.pack(order + {3: "H", 4: "I"}[form] * len(values), *values)
        if len(packed) > 4:
            packed, later = struct.pack(order + "I", place + len(later)), later + packed
        entries += struct.pack(order + "HHI", tag, form, len(values)) + packed.ljust(4, b"\0")
    head = {"<": b"II", ">": b"MM"}[order] + struct.pack(order + "HI", 42, 8 + len(plain))
    return head + plain + struct.pack(order + "H", len(tags)) + entries + bytes(4) + later


def netpbm_of(magic: str, pixels: Array, maximum: int) -> bytes:
    head = f"{magic}\n{pixels.shape[1]} {pixels.shape[0]}\n{maximum}\n".encode()
    if magic in ("P2", "P3"):
        return head + " ".join(map(str, pixels.ravel().tolist())).encode() + b"\n"
    return head + pixels.astype(">u2" if maximum > 255 else "u1").tobytes()
