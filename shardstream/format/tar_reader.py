"""512-byte headers <-> members, with offsets.

Formats: POSIX.1-2017 "pax" section (ustar and pax) and the GNU tar manual, "Basic Tar Format". Python's ``tarfile`` spends
35 us on a member; almost every member of a shard is a plain file with a short name, so that case is read with a few slices
and everything else goes the long way round.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Iterator

from shardstream.errors import ShardError
from shardstream.format.pax import (
    SIZE_LIMIT_BYTES,
    extend,
    extended_name,
    extended_size,
    records_of,
)
from shardstream.format.tar_diagnostics import TarNotes

BLOCK_BYTES = 512
_ZERO_BLOCK = bytes(BLOCK_BYTES)
_HEADER_TEXT_LIMIT_BYTES = 1 << 20  # of one pax header or long name; real ones take hundreds
_HEADERS_LIMIT_BYTES = 4 << 20  # of all extended headers before one member
_ADLER_BASE = 65521
_RECORD_BYTES = 20 * BLOCK_BYTES  # tars are written in such units, the last one padded
_TAIL_CHUNK_BYTES = 1 << 20
_FILE, _FOLDER, _CONTINUATION = b"0", b"5", b"M"

ReadAt = Callable[[int, int], bytes]
"""``read(offset, size)``: bytes of the tar from an absolute offset; fewer only where the tar ends."""

Buffer = bytes | mmap.mmap | memoryview
"""A slice of a tar."""

Member = tuple[str, int, int, int]
"""Name, offset of its first header (a pax header before it included), offset of its bytes, their size."""

_Entry = tuple[bytes, Member, int]
"""Typeflag, "0" for every kind of regular file; the member; the offset behind it."""


def iter_members(
    read: ReadAt,
    *,
    start: int = 0,
    end: int | None = None,
    shard: str = "",
    notes: TarNotes | None = None,
) -> Iterator[Member]:
    """Yield the regular files of a tar, or of a slice of one that begins and ends between members.

    Directories, links, devices and pax globals are passed over. Reading ends at the two zero blocks, or at ``end``.

    Args:
        read: The tar's bytes by absolute offset.
        start: Offset of the first header.
        end: Offset behind the last byte; None where it is not known, as in a stream.
        shard: URL for messages.
        notes: Filled on the way.

    Raises:
        ShardError: At a wrong checksum, a header that makes no sense, or a header or body that is cut.
    """
    notes = TarNotes() if notes is None else notes
    position = start
    while end is None or position < end:
        block = read(position, BLOCK_BYTES)
        if not block and end is None:
            break
        if block == _ZERO_BLOCK:
            _check_end(read, position, end, shard)
            notes.has_end = True
            break
        kind, member, position = _plain_entry(block, position, shard) or _read_entry(
            read, position, block, shard
        )
        if end is not None and position > end:
            raise _cut_body(member, end, shard)
        if kind != _FILE:
            notes.omit(kind, member[0], member[1])
        elif not member[0]:
            raise ShardError(
                "a file without a name",
                remedy="write the shard again",
                shard=shard,
                offset=member[1],
            )
        else:
            yield member
    notes.stop = position


def iter_whole(
    read: ReadAt, *, start: int = 0, end: int | None, shard: str, notes: TarNotes
) -> Iterator[Member]:
    """Yield the regular files of a tar to its last one, and check how it ends.

    Bytes that are no header, in the record that the end-of-archive blocks are in, are noted: AIX tar leaves some there.

    Args:
        read: The tar's bytes by absolute offset; called for growing offsets only.
        start: Offset of the first header that is wanted.
        end: Offset behind the tar's last byte; None where it is not known, as in a compressed tar.
        shard: URL for messages.
        notes: Filled on the way.

    Raises:
        ShardError: As in `iter_members`; if the tar is empty; if its length is not known and the end-of-archive blocks are
            missing; if another archive or other data follow.
    """
    yield from iter_members(read, start=start, end=end, shard=shard, notes=notes)
    if notes.has_end:
        _check_tail(read, notes, shard)
    elif notes.stop == 0:
        raise empty_tar(shard)
    elif end is None or notes.stop > end:
        raise ShardError(
            f"the tar is cut: the blocks that end an archive are missing at byte {notes.stop}",
            remedy="fetch or write the shard again",
            shard=shard,
            offset=notes.stop,
        )


def _check_tail(read: ReadAt, notes: TarNotes, shard: str) -> None:
    position = notes.stop + BLOCK_BYTES
    record_end = (position // _RECORD_BYTES + 1) * _RECORD_BYTES
    while chunk := read(position, _TAIL_CHUNK_BYTES):
        rest = chunk.lstrip(b"\0")
        for at in range(len(chunk) - len(rest) & -BLOCK_BYTES, len(chunk), BLOCK_BYTES):
            block, offset = chunk[at : at + BLOCK_BYTES], position + at
            if not block.strip(b"\0"):
                continue
            if offset >= record_end or _is_header(block):
                raise ShardError(
                    "there are data behind the end of the archive, which every reader would lose (tars joined by 'cat'?)",
                    remedy="extract all parts with 'tar --ignore-zeros' and pack them again",
                    shard=shard,
                    offset=offset,
                )
            notes.leftover = offset if notes.leftover is None else notes.leftover
        position += len(chunk)


known_sums: dict[bytes, int] = {}
"""Checksum field of a header -> low half of the Adler-32 that a header with it has, for fields seen."""


def is_plain_header(block: bytes) -> bool:
    """Tell whether a header is what nearly every one of a shard looks like, with the right checksum.

    Typeflag "0", no ustar prefix, a size of at most eleven octal digits (some tars put a twelfth where its end should be).
    """
    return (
        len(block) == BLOCK_BYTES
        and block[156] == 48
        and block[345] == 0
        and block[135] < 33
        and _is_sound(block)
    )


def _is_sound(block: bytes) -> bool:
    """Compare the header's sum with its checksum field.

    The low half of Adler-32 is 1 + the sum of all bytes modulo 65521, at memory speed: 0.1 us where ``sum`` takes 3 us.
    The field itself counts as eight blanks in the sum; what that makes of each field seen is kept.
    """
    field = block[148:156]
    expected = known_sums.get(field)
    if expected is None:
        stored = _octal(field)
        if stored is None:
            return False
        expected = (stored - 8 * 32 + sum(field) + 1) % _ADLER_BASE
        if len(known_sums) < 1 << 16:
            known_sums[field] = expected
    return zlib.adler32(block) & 0xFFFF == expected


def _is_header(block: bytes) -> bool:
    """Tell whether a block of 512 bytes has the checksum of a header."""
    return _is_sound(block) or _signed_sum_is(block, _octal(block[148:156]))


def _octal(field: bytes) -> int | None:
    text = field.split(b"\0", 1)[0].strip()
    try:
        return int(text or b"0", 8)
    except ValueError:
        return None


def _number(field: bytes) -> int | None:
    """Read a numeric field: octal text, or GNU's base-256 where the top bit of the first byte is set."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    if field[0] == 0xFF:
        return int.from_bytes(field[1:], "big") - (1 << 8 * (len(field) - 1))
    return _octal(field)


def _signed_sum_is(block: bytes, stored: int | None) -> bool:
    """Some old tars summed signed bytes."""
    rest = block[:148] + block[156:]
    return stored == 8 * 32 + sum(byte - 256 if byte > 127 else byte for byte in rest)


def _plain_entry(block: bytes, position: int, shard: str) -> _Entry | None:
    """Read the entry of a header that nearly every member of a shard has; None if it is another."""
    if not is_plain_header(block):
        return None
    try:
        name = block[: block.index(0, 0, 101)].decode()
        size = int(block[124:135], 8)
    except ValueError:
        return None
    if size < 0:
        raise ShardError("a member has a negative size", shard=shard, offset=position)
    body = position + BLOCK_BYTES
    return _FILE, (name, position, body, size), body + (size + 511 & -512)


def _read_entry(read: ReadAt, start: int, block: bytes, shard: str) -> _Entry:
    """Read one entry with the headers that belong to it."""
    position = start
    extended: dict[str, str] = {}
    while True:
        size = _check_header(block, position, shard)
        kind = block[156:157]
        body = position + BLOCK_BYTES
        if kind not in b"xgLKX" or kind == b"":
            break
        text = _read_header_text(read, body, size, position, shard)
        extend(extended, records_of(kind, text, position, shard), position, shard)
        position = body + (size + 511 & -512)
        if kind == b"g" and not extended:
            return kind, ("", start, body, size), position
        if position - start > _HEADERS_LIMIT_BYTES:
            raise ShardError(
                f"over {_HEADERS_LIMIT_BYTES} bytes of extended headers before one member",
                shard=shard,
                offset=start,
            )
        block = read(position, BLOCK_BYTES)
    if "size" in extended:
        size = extended_size(extended["size"], start, shard)
    _refuse_partial(kind, extended, start, shard)
    if kind == b"\0" and block[:100].split(b"\0", 1)[0][-1:] == b"/":
        kind = _FOLDER
    name = extended.get("path", _ustar_name(block))
    if kind in b"123456":
        # Links, devices and folders have no body, whatever their size says (as in tarfile).
        return kind, (name, start, body, 0), body
    if "path" in extended:
        name = extended_name(name, start, shard)
    kind = _FILE if kind in b"0\x007" else kind
    return kind, (name, start, body, size), body + (size + 511 & -512)


def _refuse_partial(kind: bytes, extended: dict[str, str], start: int, shard: str) -> None:
    """Refuse members whose bytes in the tar are not those of the file."""
    if kind == b"S" or any(record.startswith("GNU.sparse.") for record in extended):
        raise ShardError(
            "a sparse member would come out condensed",
            remedy="pack it without sparseness (GNU tar: leave out --sparse)",
            shard=shard,
            offset=start,
        )
    if kind == _CONTINUATION:
        raise ShardError(
            "the rest of a file that begins in another volume",
            remedy="join the volumes, or write the tar in one (GNU tar: leave out --multi-volume)",
            shard=shard,
            offset=start,
        )


def _check_header(block: bytes, position: int, shard: str) -> int:
    """Return the size that a header gives, after its length, checksum and size made sense."""
    if len(block) < BLOCK_BYTES:
        what = "the tar is" if position else "no tar file, or one that is"
        raise ShardError(
            f"{what} cut inside a header ({len(block)} of 512 bytes)",
            remedy="fetch or write the shard again",
            shard=shard,
            offset=position,
        )
    if not _is_header(block):
        what = "no tar file" if position == 0 else "no tar header (its checksum is wrong)"
        raise ShardError(
            what,
            remedy="the shard is damaged or not a tar, fetch or write it again",
            shard=shard,
            offset=position,
        )
    size = _number(block[124:136])
    if size is None or not 0 <= size < SIZE_LIMIT_BYTES:
        raise ShardError(
            f"a header gives a size of {block[124:136]!r}", shard=shard, offset=position
        )
    return size


def _ustar_name(block: bytes) -> str:
    name = block[:100].split(b"\0", 1)[0]
    # Old GNU headers ("ustar  ") keep times where POSIX has the prefix.
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


def _read_header_text(read: ReadAt, body: int, size: int, position: int, shard: str) -> bytes:
    if size > _HEADER_TEXT_LIMIT_BYTES:
        raise ShardError(
            f"an extended header of {size} bytes is over the limit of {_HEADER_TEXT_LIMIT_BYTES}",
            shard=shard,
            offset=position,
        )
    text = read(body, size + 511 & -512)
    if len(text) < size:
        raise ShardError("the tar is cut inside an extended header", shard=shard, offset=position)
    if text[size:].strip(b"\0"):
        # Readers that take whole blocks would see more of it.
        raise ShardError(
            "an extended header goes on behind its size",
            remedy="write the shard again",
            shard=shard,
            offset=position,
        )
    return text[:size]


def _check_end(read: ReadAt, position: int, end: int | None, shard: str) -> None:
    """Refuse a lone zero block with more behind it: every reader would stop there and lose the rest."""
    following = position + BLOCK_BYTES
    if end is not None and following >= end:
        return
    block = read(following, BLOCK_BYTES)
    if block.strip(b"\0"):
        raise ShardError(
            "a lone zero block: readers stop here and lose what follows",
            shard=shard,
            offset=position,
        )


def empty_tar(shard: str) -> ShardError:
    """Return the error for a file of no bytes."""
    return ShardError(
        "the file is empty: no tar", remedy="fetch or write it again", shard=shard, offset=0
    )


def _cut_body(member: Member, end: int, shard: str) -> ShardError:
    name, start, body, size = member
    return ShardError(
        f"the tar is cut: {name or 'an entry'} needs the bytes {body} to {body + size}, but it ends at {end}",
        remedy="fetch or write the shard again",
        shard=shard,
        offset=start,
    )
