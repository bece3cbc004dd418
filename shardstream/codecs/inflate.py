"""Inflate gzip fields, and limit the size of what is unpacked."""

from __future__ import annotations

import gzip
import io

INFLATED_LIMIT_BYTES = 1 << 30
_PIECE_BYTES = 1 << 18


def decode_gzip(data: bytes) -> bytes:
    """Inflate a ``.gz`` field; contents over 1 GiB are refused."""
    pieces: list[bytes] = []
    size = 0
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        while piece := stream.read(_PIECE_BYTES):
            pieces.append(piece)
            size += len(piece)
            check_inflated(size)
    return b"".join(pieces)


def check_inflated(size: int, limit_bytes: int | None = None) -> None:
    """Raise ValueError if contents are over a limit, by default 1 GiB."""
    limit = INFLATED_LIMIT_BYTES if limit_bytes is None else limit_bytes
    if size > limit:
        raise ValueError(f"it unpacks to {size} bytes or more, the limit is {limit}")
