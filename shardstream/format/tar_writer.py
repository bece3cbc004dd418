"""Write tar members: ustar headers and padded bodies, with pax headers where ustar is too small."""

from __future__ import annotations

import zlib

from shardstream.format.tar_reader import BLOCK_BYTES

END_OF_ARCHIVE = bytes(2 * BLOCK_BYTES)
_USTAR_SIZE_LIMIT = 8**11


def encode_member(name: str, data: bytes | memoryview) -> tuple[bytes, bytes | memoryview, bytes]:
    """Return header, body and padding of a member: owner 0, time 0, mode 0644, so equal input gives equal bytes.

    A name or size that ustar cannot hold is written to a preceding pax header.

    >>> b"".join(encode_member("a.txt", b"hi"))[:5]
    b'a.txt'
    """
    size = len(data)
    return _member_header(name, size), data, bytes(-size % BLOCK_BYTES)


def member_bytes(name: str, size: int) -> int:
    """Return how many bytes header, body and padding of a member take.

    >>> member_bytes("a.txt", 2)
    1024
    """
    return len(_member_header(name, size)) + (size + BLOCK_BYTES - 1 & -BLOCK_BYTES)


def _member_header(name: str, size: int) -> bytes:
    raw = name.encode("utf-8", "surrogateescape")
    if len(raw) < 100 and name.isascii() and size < _USTAR_SIZE_LIMIT:
        return _header(raw, size, b"0")
    return _pax_header(raw, size)


def _header(name: bytes, size: int, kind: bytes) -> bytes:
    head = b"%b%b0000644\0000000000\0000000000\000%011o\00000000000000\0" % (
        name,
        bytes(100 - len(name)),
        size,
    )
    tail = b"%bustar\00000%b" % (kind + bytes(100), bytes(247))
    # 256: the checksum field counts as eight spaces; Adler-32 starts at 1
    checksum = (zlib.adler32(tail, zlib.adler32(head)) & 0xFFFF) - 1 + 256
    return b"%b%06o\0 %b" % (head, checksum, tail)


def _pax_header(name: bytes, size: int) -> bytes:
    records = _pax_record(b"path", name)
    if size >= _USTAR_SIZE_LIMIT:
        records += _pax_record(b"size", b"%d" % size)
    short = name.decode("ascii", "replace").replace("\ufffd", "_").encode()[-99:]
    ustar_size = size if size < _USTAR_SIZE_LIMIT else 0
    return b"".join(
        (
            _header(b"././@PaxHeader", len(records), b"x"),
            records,
            bytes(-len(records) % BLOCK_BYTES),
            _header(short, ustar_size, b"0"),
        )
    )


def _pax_record(keyword: bytes, value: bytes) -> bytes:
    rest = len(keyword) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))  # again, because the length's own digits may have grown
    return b"%d %b=%b\n" % (length, keyword, value)
