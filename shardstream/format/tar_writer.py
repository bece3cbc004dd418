"""Write tar members: ustar headers and padded bodies, with pax headers where ustar is too small."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, cast

from shardstream.format.tar_reader import BLOCK_BYTES

END_OF_ARCHIVE = bytes(2 * BLOCK_BYTES)
_USTAR_SIZE_LIMIT = 8**11
_ZEROS = tuple(map(bytes, range(BLOCK_BYTES)))


def encode_member(name: str, data: bytes | memoryview) -> tuple[bytes, bytes | memoryview, bytes]:
    """Return header, body and padding of a member: owner 0, time 0, mode 0644, so equal input gives equal bytes.

    A name or size that ustar cannot hold is written to a preceding pax header.

    >>> b"".join(encode_member("a.txt", b"hi"))[:5]
    b'a.txt'
    """
    pieces = encode_members(name, {"": data})
    return cast("tuple[bytes, bytes | memoryview, bytes]", tuple(pieces))


def member_bytes(name: str, size: int) -> int:
    """Return how many bytes header, body and padding of a member take.

    >>> member_bytes("a.txt", 2)
    1024
    """
    start = name.encode("utf-8", "surrogateescape")
    is_plain = start.isascii() and _after_start(len(start), "", size) is not None
    header_bytes = BLOCK_BYTES if is_plain else len(_pax_header(start, size))
    return header_bytes + (size + BLOCK_BYTES - 1 & -BLOCK_BYTES)


def encode_members(name: str, bodies: Mapping[str, bytes | memoryview]) -> list[bytes | memoryview]:
    """Return header, body and padding of members whose names have one start, in the order given (see `encode_member`).

    Names are not checked here (see `member_name`).

    Args:
        name: Start of the names: of a sample its key and a dot.
        bodies: End of each name -> body.

    >>> b"".join(encode_members("a.", {"txt": b"hi", "cls": b"7"}))[1024:1029]
    b'a.cls'
    """
    start = name.encode("utf-8", "surrogateescape")
    start_bytes = len(start)
    is_ascii = start.isascii()
    start_sum = zlib.adler32(start) & 0xFFFF  # less 1, and of a name that ustar can hold
    pieces: list[bytes | memoryview] = []
    for end, data in bodies.items():
        size = len(data)
        rest = _after_start(start_bytes, end, size)
        if rest is None or not is_ascii:
            header = _pax_header(start + end.encode("utf-8", "surrogateescape"), size)
        else:
            before, after, total = rest
            header = b"%b%b%06o%b" % (start, before, start_sum + total, after)
        pieces += header, data, _ZEROS[-size % BLOCK_BYTES]
    return pieces


class _Rest(NamedTuple):
    """A header without the start of its name."""

    before: bytes
    """The bytes before the checksum."""
    after: bytes
    """The bytes after it."""
    total: int
    """Added to the low half of the Adler-32 of the start, which is 1 + the sum of its bytes, it is the checksum."""


# Small samples have fields of few sizes, and keys of one length.
@lru_cache(maxsize=1024)
def _after_start(start_bytes: int, end: str, size: int) -> _Rest | None:
    """Return the rest of a member's header; None if ustar cannot hold its name or size."""
    if start_bytes + len(end) >= 100 or not end.isascii() or size >= _USTAR_SIZE_LIMIT:
        return None
    return _rest(start_bytes, end.encode(), size, b"0")


def _rest(start_bytes: int, end: bytes, size: int, kind: bytes) -> _Rest:
    name = end.ljust(100 - start_bytes, b"\0")
    before = b"%b0000644\0000000000\0000000000\000%011o\00000000000000\0" % (name, size)
    after = b"\0 " + kind + bytes(100) + b"ustar\00000" + bytes(247)
    # The checksum's own field counts as eight spaces.
    return _Rest(before, after, sum(before) + sum(after[2:]) + 8 * ord(" ") - 1)


def _pax_header(name: bytes, size: int) -> bytes:
    records = _pax_record(b"path", name)
    if size >= _USTAR_SIZE_LIMIT:
        records += _pax_record(b"size", b"%d" % size)
    short = name.decode("ascii", "replace").replace("\ufffd", "_").encode()[-99:]
    ustar_size = size if size < _USTAR_SIZE_LIMIT else 0
    return b"".join(
        (
            _plain_header(b"././@PaxHeader", len(records), b"x"),
            records,
            bytes(-len(records) % BLOCK_BYTES),
            _plain_header(short, ustar_size, b"0"),
        )
    )


def _plain_header(name: bytes, size: int, kind: bytes) -> bytes:
    before, after, total = _rest(0, name, size, kind)
    return b"%b%06o%b" % (before, total + 1, after)


def _pax_record(keyword: bytes, value: bytes) -> bytes:
    rest = len(keyword) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))  # again, because the length's own digits may have grown
    return b"%d %b=%b\n" % (length, keyword, value)
