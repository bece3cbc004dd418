"""Parse tar headers to members with offsets.

Formats: POSIX.1-2017 "pax" section (ustar and pax) and the GNU tar manual, "Basic Tar Format". Python's ``tarfile`` takes
35 us per member. Almost every member of a shard is a plain file with a short name, so that case has a fast path of a few
slices, and all other entries take the general path.

If extended headers (pax, and the long names of GNU tar) contradict each other, some readers take the first and some the last. Ambiguous
headers are refused, so that all readers see the same files in a shard.

A reader by number has only the bytes of one sample, and the target of a link may be in another one. So no reader follows links, and all
readers report links that would have been fields.
"""

from __future__ import annotations

import mmap
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from shardstream.errors import ShardError, ShardWarning, redact, shown
from shardstream.format.names import is_meta_name, split_member_name

_HARD_LINK, _SYMBOLIC_LINK = b"1", b"2"
_NO_DATA = frozenset((b"5", b"g", b"D", b"N", b"V"))
"""Directories, global headers, and GNU's lists of directories, old long names and volume labels."""
_MAX_NAMES = 100  # of symbolic links that are kept, to bound memory
BLOCK_BYTES = 512
_ZERO_BLOCK = bytes(BLOCK_BYTES)
_AGAIN = "fetch or write the shard again"
# Of one pax header or long name; real ones have hundreds of bytes.
_HEADER_TEXT_LIMIT_BYTES = 1 << 20
_HEADERS_LIMIT_BYTES = 4 << 20  # of all extended headers before one member
_ADLER_BASE = 65521
RECORD_BYTES = 20 * BLOCK_BYTES  # tars are written in units of this size, the last one padded
_TAIL_CHUNK_BYTES = 1 << 20
_SIZE_LIMIT_BYTES = 1 << 60  # of one member: sums of offsets stay below 2**63
_NAME_LIMIT = 1 << 16  # characters; Linux accepts paths of 4,096 bytes
_FILE, _FOLDER, _CONTINUATION = b"0", b"5", b"M"
_COMPRESSED = (
    (b"\x1f\x8b", "gzip", ".gz"),
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst"),
    (b"BZh", "bzip2", ""),
    (b"\xfd7zXZ", "xz", ""),
)

ReadAt = Callable[[int, int], bytes]
"""``read(offset, size)``: bytes of the tar from an absolute offset; fewer only at the end of the tar."""

Buffer = bytes | mmap.mmap | memoryview
"""A slice of a tar."""


class Finding(NamedTuple):
    """A problem of a tar that can still be read."""

    what: str
    remedy: str
    offset: int
    """Byte offset in the tar."""
    is_loss: bool = False
    """Whether fields or samples are certainly missing."""

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


@dataclass(slots=True)
class TarDiagnostics:
    """Notes of one pass over a tar, filled by `iter_members` and `iter_whole`; complete after the pass."""

    has_end: bool = False
    """Whether the zero blocks that end an archive were found."""
    stop: int = 0
    """Offset of these blocks, or of the end of the tar without them."""
    leftover: int | None = None
    """Offset of the first block with a non-zero byte after the end, if it is in the padding of the last record."""
    zeros: int = 0
    """Bytes of zeros after the last record."""
    hard_links: int = 0
    symbolic_links: int = 0
    other_entries: int = 0
    samples: int = 0
    """Number of samples that these entries belong to."""
    _first_omitted: tuple[str, int] = ("", 0)
    _key: str | None = None
    _names: list[tuple[str, str]] = field(default_factory=list)
    """Key and field of the first symbolic links."""

    def count_omitted(self, kind: bytes, name: str, offset: int) -> None:
        """Count an entry without bytes of its own, if its name is that of a field.

        Args:
            kind: Typeflag of the entry.
            name: Name of the entry.
            offset: Offset of its first header.
        """
        parts = split_member_name(name)
        if kind in _NO_DATA or parts is None or is_meta_name(name):
            return
        if not self.samples:
            self._first_omitted = name, offset
        if parts[0] != self._key:
            self.samples += 1
            self._key = parts[0]
        if kind == _HARD_LINK:
            self.hard_links += 1
        elif kind == _SYMBOLIC_LINK:
            self.symbolic_links += 1
            if len(self._names) < _MAX_NAMES:
                self._names.append(parts)
        else:
            self.other_entries += 1

    def has_links_of_samples(self, keys: Collection[str], fields: Collection[str]) -> bool:
        """Return True if omitted entries belong to samples, and are not just a few links such as ``releases/v1.0 -> v1.0.3``.

        Args:
            keys: Keys of the samples of the tar.
            fields: Fields of these samples.
        """
        if self.samples and not keys:
            return True
        if self.hard_links or self.other_entries or self.symbolic_links > len(self._names):
            return True
        known = frozenset(keys) if self._names else ()
        return any(key in known or name in fields for key, name in self._names)

    def findings(self) -> list[Finding]:
        """Return the findings, the most severe first."""
        found = [self._omitted()] if self.samples else []
        doubts = (
            (
                not self.has_end,
                "the blocks that end an archive are missing",
                "it may have been cut between two samples: compare it with its source",
                self.stop,
            ),
            (
                self.leftover is not None,
                "the last record holds bytes after the end of the archive",
                "AIX tar leaves such bytes; if another tool wrote it, compare it with its source",
                self.leftover or 0,
            ),
            (
                self.zeros > 0,
                f"{self.zeros} zeros follow the last record of the archive",
                "a download that stopped leaves them in place of samples, 'tar -b' after the last one: compare it with its source",
                self.stop,
            ),
        )
        return found + [
            Finding(what, remedy, at) for is_found, what, remedy, at in doubts if is_found
        ]

    def warn(self, shard: str) -> None:
        """Warn of all findings, as `ShardWarning`."""
        for finding in self.findings():
            warnings.warn(shown(f"{redact(shard)}: {finding}"), ShardWarning, stacklevel=2)

    def warn_of_links(self, shard: str) -> None:
        """Warn of counted entries after one sample was read.

        The text is the same for all samples of a shard, so that Python shows it once.
        """
        if self.samples:
            warnings.warn(
                shown(
                    f"{redact(shard)}: links and other entries without data are not read, so samples lack fields or are "
                    "missing; 'shardstream verify' counts them"
                ),
                ShardWarning,
                stacklevel=2,
            )

    def _omitted(self) -> Finding:
        counts = {
            "hard links": self.hard_links,
            "symbolic links": self.symbolic_links,
            "devices or entries of unknown type": self.other_entries,
        }
        kinds = ", ".join(f"{kind}: {count}" for kind, count in counts.items() if count)
        name, offset = self._first_omitted
        return Finding(
            f"entries without data are not read ({kinds}; first: {name!r}), samples that lack fields or are missing: {self.samples}",
            "write the tar again with files in their place (GNU tar: --dereference --hard-dereference)",
            offset,
            is_loss=True,
        )


class SlicedBuffer(Protocol):
    """A buffer whose slices are bytes, or can be made ``bytes``."""

    def __len__(self) -> int: ...

    def __getitem__(self, taken: slice, /) -> Any: ...


Member = tuple[str, int, int, int]
"""Name, offset of its first header (including a pax header before it), offset of its bytes, their size."""

_Entry = tuple[bytes, Member, int]
"""Typeflag, "0" for every kind of regular file; the member; the offset after it."""


def iter_members(
    read: ReadAt,
    *,
    start: int = 0,
    end: int | None = None,
    shard: str = "",
    diagnostics: TarDiagnostics | None = None,
) -> Iterator[Member]:
    """Yield the regular files of a tar, or of a slice of one that begins and ends between members.

    Directories, links, devices and pax globals are skipped. Reading ends at the two zero blocks, or at ``end``.

    Args:
        read: The tar's bytes by absolute offset.
        start: Offset of the first header.
        end: Offset after the last byte; None if unknown, as in a stream.
        shard: URL for messages.
        diagnostics: Filled during the pass.

    Raises:
        ShardError: At a wrong checksum, an invalid header, or a truncated header or body.
    """
    diagnostics = TarDiagnostics() if diagnostics is None else diagnostics
    position = start
    while end is None or position < end:
        block = read(position, BLOCK_BYTES)
        if not block and end is None:
            break
        if block == _ZERO_BLOCK:
            _check_end(read, position, end, shard)
            diagnostics.has_end = True
            break
        kind, member, position = _plain_entry(block, position, shard) or _read_entry(
            read, position, block, shard
        )
        if end is not None and position > end:
            raise _cut_body(member, end, shard)
        if kind != _FILE:
            diagnostics.count_omitted(kind, member[0], member[1])
        elif not member[0]:
            raise _damaged("a file without a name", shard, member[1])
        else:
            yield member
    diagnostics.stop = position


def iter_whole(
    read: ReadAt, *, start: int = 0, end: int | None, shard: str, diagnostics: TarDiagnostics
) -> Iterator[Member]:
    """Yield the regular files of a whole tar, and check its end.

    Bytes other than a header in the record of the end-of-archive blocks are only noted, because AIX tar leaves some there.

    Args:
        read: The tar's bytes by absolute offset; called for growing offsets only.
        start: Offset of the first wanted header.
        end: Offset after the tar's last byte; None if unknown, as in a compressed tar.
        shard: URL for messages.
        diagnostics: Filled during the pass.

    Raises:
        ShardError: As in `iter_members`; if the tar is empty; if its length is unknown and the end-of-archive blocks are
            missing; if another archive or other data follow.
    """
    yield from iter_members(read, start=start, end=end, shard=shard, diagnostics=diagnostics)
    if diagnostics.has_end:
        _check_tail(read, diagnostics, shard)
    elif diagnostics.stop == 0:
        raise empty_tar(shard)
    elif end is None or diagnostics.stop > end:
        raise _damaged(
            f"the tar is cut: the blocks that end an archive are missing at byte {diagnostics.stop}",
            shard,
            diagnostics.stop,
        )


def _check_tail(read: ReadAt, diagnostics: TarDiagnostics, shard: str) -> None:
    position = diagnostics.stop + BLOCK_BYTES
    record_end = (position // RECORD_BYTES + 1) * RECORD_BYTES
    while chunk := read(position, _TAIL_CHUNK_BYTES):
        rest = chunk.lstrip(b"\0")
        for at in range(len(chunk) - len(rest) & -BLOCK_BYTES, len(chunk), BLOCK_BYTES):
            block, offset = chunk[at : at + BLOCK_BYTES], position + at
            if not block.strip(b"\0"):
                continue
            if offset >= record_end or _is_header(block):
                raise _damaged(
                    "there are data after the end of the archive, which readers ignore (tars joined by 'cat'?)",
                    shard,
                    offset,
                    "extract all parts with 'tar --ignore-zeros' and pack them again",
                )
            diagnostics.leftover = offset if diagnostics.leftover is None else diagnostics.leftover
        position += len(chunk)
    diagnostics.zeros = max(0, position - record_end)


known_sums: dict[bytes, int] = {}
"""Cache: checksum field of a header -> low half of the Adler-32 of a valid header with that field."""


def is_plain_header(block: bytes) -> bool:
    """Return True for a header of the usual form with a correct checksum.

    Typeflag "0", no ustar prefix, a size of at most eleven octal digits (some tars put a twelfth in place of the terminator).
    """
    return (
        len(block) == BLOCK_BYTES
        and block[156] == 48
        and block[345] == 0
        and block[135] < 33
        and _is_sound(block)
    )


def _is_sound(block: bytes) -> bool:
    """Return True if the header's sum equals its checksum field.

    The low half of Adler-32 is 1 + the sum of all bytes modulo 65521, at memory speed: 0.1 us where ``sum`` takes 3 us.
    The field itself counts as eight spaces in the sum; the expected value of each field is cached.
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
    """Return True if a block of 512 bytes has the checksum of a header."""
    return _is_sound(block) or _signed_sum_is(block, _octal(block[148:156]))


def _octal(field: bytes) -> int | None:
    text = field.split(b"\0", 1)[0].strip()
    try:
        return int(text or b"0", 8)
    except ValueError:
        return None


def _number(field: bytes) -> int | None:
    """Parse a numeric field: octal text, or GNU's base-256 if the top bit of the first byte is set."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    if field[0] == 0xFF:
        return int.from_bytes(field[1:], "big") - (1 << 8 * (len(field) - 1))
    return _octal(field)


def _signed_sum_is(block: bytes, stored: int | None) -> bool:
    """Return True if the sum of signed bytes, as some old tars computed it, equals the checksum."""
    rest = block[:148] + block[156:]
    return stored == 8 * 32 + sum(byte - 256 if byte > 127 else byte for byte in rest)


def _plain_entry(block: bytes, position: int, shard: str) -> _Entry | None:
    """Parse the entry of a header of the usual form; None for other forms."""
    if not is_plain_header(block):
        return None
    try:
        name = block[: block.index(0, 0, 101)].decode()
        size = int(block[124:135], 8)
    except ValueError:
        return None
    if size < 0:
        raise _damaged("a member has a negative size", shard, position)
    body = position + BLOCK_BYTES
    return _FILE, (name, position, body, size), body + (size + 511 & -512)


def _read_entry(read: ReadAt, start: int, block: bytes, shard: str) -> _Entry:
    """Read one entry with its extended headers."""
    position = start
    extended: dict[str, str] = {}
    while True:
        size = _check_header(block, position, shard)
        kind = block[156:157]
        body = position + BLOCK_BYTES
        if kind not in b"xgLKX" or kind == b"":
            break
        text = _read_header_text(read, body, size, position, shard)
        _extend(extended, _records_of(kind, text, position, shard), position, shard)
        position = body + (size + 511 & -512)
        if kind == b"g" and not extended:
            return kind, ("", start, body, size), position
        if position - start > _HEADERS_LIMIT_BYTES:
            raise _damaged(
                f"over {_HEADERS_LIMIT_BYTES} bytes of extended headers before one member",
                shard,
                start,
            )
        block = read(position, BLOCK_BYTES)
    if "size" in extended:
        size = _extended_size(extended["size"], start, shard)
    _refuse_partial(kind, extended, start, shard)
    if kind == b"\0" and block[:100].split(b"\0", 1)[0][-1:] == b"/":
        kind = _FOLDER
    name = extended.get("path", _ustar_name(block))
    if kind in b"123456":
        # Links, devices and folders have no body, whatever their size field holds (as in tarfile).
        return kind, (name, start, body, 0), body
    if "path" in extended:
        name = _extended_name(name, start, shard)
    kind = _FILE if kind in b"0\x007" else kind
    return kind, (name, start, body, size), body + (size + 511 & -512)


def _refuse_partial(kind: bytes, extended: dict[str, str], start: int, shard: str) -> None:
    """Refuse members whose bytes in the tar differ from those of the file."""
    if kind == b"S" or any(record.startswith("GNU.sparse.") for record in extended):
        raise _damaged(
            "a sparse member would be read without its holes",
            shard,
            start,
            "pack it as a plain file (GNU tar: leave out --sparse)",
        )
    if kind == _CONTINUATION:
        raise _damaged(
            "a member continues a file of another volume",
            shard,
            start,
            "join the volumes, or write one tar (GNU tar: leave out --multi-volume)",
        )


def _refuse_compressed(head: bytes, shard: str) -> None:
    """Refuse the first bytes of a compressed tar that is named as a plain one."""
    name, suffix = next(
        (found for magic, *found in _COMPRESSED if head.startswith(magic)), (None, None)
    )
    if name is not None:
        raise ShardError(
            f"the tar is compressed with {name}, but is not named so",
            remedy=f"rename it to NAME.tar{suffix}, which is read from start to end, or unpack it"
            if suffix
            else "unpack it, or compress it with gzip or zstd",
            shard=shard,
            offset=0,
        )


def _check_header(block: bytes, position: int, shard: str) -> int:
    """Check the length, checksum and size of a header; return the size."""
    if position == 0:
        _refuse_compressed(bytes(block[:6]), shard)
    if len(block) < BLOCK_BYTES:
        what = "the tar is" if position else "not a tar file, or"
        raise _damaged(f"{what} cut inside a header ({len(block)} of 512 bytes)", shard, position)
    if not _is_header(block):
        what = "not a tar file" if position == 0 else "not a tar header (its checksum is wrong)"
        raise _damaged(
            what, shard, position, "the shard is damaged or not a tar: fetch or write it again"
        )
    size = _number(block[124:136])
    if size is None or not 0 <= size < _SIZE_LIMIT_BYTES:
        raise _damaged(f"a header gives a size of {block[124:136]!r}", shard, position)
    return size


def _ustar_name(block: bytes) -> str:
    name = block[:100].split(b"\0", 1)[0]
    # Old GNU headers ("ustar  ") hold times in place of the POSIX prefix.
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "surrogateescape")


def _read_header_text(read: ReadAt, body: int, size: int, position: int, shard: str) -> bytes:
    if size > _HEADER_TEXT_LIMIT_BYTES:
        raise _damaged(
            f"an extended header of {size} bytes is over the limit of {_HEADER_TEXT_LIMIT_BYTES}",
            shard,
            position,
        )
    text = read(body, size + 511 & -512)
    if len(text) < size:
        raise _damaged("the tar is cut inside an extended header", shard, position)
    if text[size:].strip(b"\0"):
        # Readers that parse whole blocks would find more records.
        raise _damaged("an extended header has data after its size", shard, position)
    return text[:size]


def _check_end(read: ReadAt, position: int, end: int | None, shard: str) -> None:
    """Refuse a single zero block with data after it: readers would stop there and ignore the rest."""
    following = position + BLOCK_BYTES
    if end is not None and following >= end:
        return
    block = read(following, BLOCK_BYTES)
    if block.strip(b"\0"):
        raise _damaged(
            "a single zero block before the end: readers stop here and ignore the rest",
            shard,
            position,
        )


def _damaged(what: str, shard: str, offset: int, remedy: str = _AGAIN) -> ShardError:
    return ShardError(what, remedy=remedy, shard=shard, offset=offset)


def empty_tar(shard: str) -> ShardError:
    """Return the error for an empty file."""
    return _damaged("the file is empty: not a tar", shard, 0)


def _cut_body(member: Member, end: int, shard: str) -> ShardError:
    name, start, body, size = member
    return _damaged(
        f"the tar is cut: {name or 'an entry'} needs the bytes {body} to {body + size}, but it ends at {end}",
        shard,
        start,
    )


def _records_of(kind: bytes, text: bytes, position: int, shard: str) -> dict[str, str]:
    """Return the records of an extended header for the member after it."""
    if kind == b"K":  # the target of a link
        return {}
    if kind == b"L":
        return {"path": text.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")}
    records = _pax_records(text, position, shard)
    if kind == b"g":
        _refuse_for_all(records, position, shard)
        return {}
    return records


def _pax_records(text: bytes, position: int, shard: str) -> dict[str, str]:
    """Parse records ``LENGTH KEYWORD=VALUE`` with a line feed; the length counts the whole record."""
    records: dict[str, str] = {}
    at = 0
    while at < len(text) and text[at] != 0:
        blank = text.find(b" ", at, at + 20)
        length = int(text[at:blank]) if blank > 0 and text[at:blank].isdigit() else 0
        record = text[blank + 1 : at + length]
        if length <= 0 or at + length > len(text) or record[-1:] != b"\n" or record.find(b"=") < 1:
            raise _damaged("a pax header has a malformed record", shard, position)
        keyword, value = record[:-1].split(b"=", 1)
        records[keyword.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at += length
    return records


def _refuse_for_all(records: dict[str, str], position: int, shard: str) -> None:
    """Refuse a global header that sets the name or size of all members after it: readers interpret it differently."""
    for keyword in records:
        if keyword in ("path", "size") or keyword.startswith("GNU.sparse."):
            raise _damaged(f"a global pax header gives all members a {keyword!r}", shard, position)


def _extend(known: dict[str, str], more: dict[str, str], position: int, shard: str) -> None:
    """Add the records of another header; refuse a second, different name or size."""
    for keyword in ("path", "size"):
        if keyword in more and known.get(keyword, more[keyword]) != more[keyword]:
            raise _damaged(
                f"two extended headers of one member give it different values of {keyword!r}",
                shard,
                position,
            )
    known |= more


def _extended_name(name: str, position: int, shard: str) -> str:
    """Return the name of a file in an extended header, if all readers interpret it equally."""
    if not name or "\0" in name or name.endswith("/") or len(name) > _NAME_LIMIT:
        raise _damaged(
            f"an extended header gives a file the invalid name {name[:80]!r} ({len(name)} characters)",
            shard,
            position,
        )
    return name


def _extended_size(text: str, position: int, shard: str) -> int:
    """Return the size in a pax header; leading zeros are padding."""
    digits = text.lstrip("0") or text[-1:]
    if not (
        digits.isascii()
        and digits.isdigit()
        and len(digits) < 20
        and int(digits) < _SIZE_LIMIT_BYTES
    ):
        raise _damaged(f"a pax header gives the invalid size {text[:40]!r}", shard, position)
    return int(digits)
