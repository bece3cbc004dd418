"""Small tars as different tools write them, and mutations that reach deep code of a tar reader, for ``fuzz_tar.py``.

Mutations change fields of headers and repair the checksum, because nearly every other input would be refused at once.
"""

from __future__ import annotations

import io
import random
import tarfile

from shardstream.format import BLOCK_BYTES, END_OF_ARCHIVE, encode_member

LONGEST_BYTES = 64 << 10

_KINDS = b"0000\0\x0012345678xxxggLLKSXVMNDA"
_SIZES = (b"00000000000\0", b"00000001000\0", b"77777777777\0", b"000000000005", b"-0000000001\0",
          b"\x80" + bytes(9) + b"\x02\0", b"\xff" * 12, b"\x80" + b"\xff" * 11, b"0o17\0", b"1_0\0", b" 12 \0")  # fmt: skip
_RECORDS = (("path", "b.x"), ("path", "d/" * 120 + "long.x"), ("path", ""), ("path", "a\0b.x"), ("path", "e/"),
            ("path", "/etc/passwd.x"), ("path", "../up.x"), ("size", "5"), ("size", "1024"), ("size", "-1"),
            ("size", "99999999999999999999"), ("size", ""), ("GNU.sparse.major", "1"), ("GNU.sparse.size", "9"),
            ("comment", "x" * 600), ("hdrcharset", "BINARY"), ("", "x"), ("mtime", "1.5"))  # fmt: skip
_WORDS = (
    b"ustar\x0000",
    b"ustar  \0",
    b"a.x",
    b"../",
    b"/",
    b"\0",
    b"__key__",
    b".__url__",
    b"=",
    b"\n",
    b"\xff",
)


def seeds() -> list[bytes]:
    """Return small tars as different tools write them."""
    made = [b"".join(map(bytes, _ours())) + END_OF_ARCHIVE, END_OF_ARCHIVE]
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        for records in ({}, {"comment": "all"}):
            if records and form != tarfile.PAX_FORMAT:
                continue
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w", format=form, pax_headers=records) as tar:
                for info, body in _theirs():
                    tar.addfile(info, io.BytesIO(body))
            made.append(buffer.getvalue()[: (1 << 14) - 512])
    return [*made, made[0] + made[0]]


def _ours() -> list[bytes | memoryview]:
    members = [
        ("a.x", b"1"),
        ("a.y", b"2" * 600),
        ("d/b.x", b""),
        ("é" * 70 + ".x", b"3"),
        ("README", b"no"),
    ]
    return [piece for name, body in members for piece in encode_member(name, body)]


def _theirs() -> list[tuple[tarfile.TarInfo, bytes]]:
    made: list[tuple[tarfile.TarInfo, bytes]] = []
    for name, kind in (("a.x", b"0"), ("a.y", b"0"), ("d", b"5"), ("l.x", b"2"), ("h.x", b"1"),
                       ("n" * 60 + "/" + "m" * 90 + ".x", b"0"), ("v.x", b"\0")):  # fmt: skip
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "a.x" if kind in b"12" else ""
        body = name.encode() if info.isreg() else b""
        info.size = len(body)
        made.append((info, body))
    return made


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return ``data`` with a few changes, most of which keep the checksums of headers valid."""
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        rng.choice(_CHANGES)(blocks, rng)
    return b"".join(blocks)[:LONGEST_BYTES]


Blocks = list[bytes]


def _change_header(blocks: Blocks, rng: random.Random) -> None:
    at = _a_header(blocks, rng)
    if at is None:
        return
    block = bytearray(blocks[at])
    start, end = rng.choice(
        (
            (0, 100),
            (100, 108),
            (124, 136),
            (124, 136),
            (156, 157),
            (156, 157),
            (257, 265),
            (345, 500),
        )
    )
    if (start, end) == (124, 136):
        value = rng.choice(_SIZES) if rng.random() < 0.6 else b"%011o\0" % rng.randrange(3000)
    elif start == 156:
        value = bytes([rng.choice(_KINDS)])
    else:
        value = rng.choice(_WORDS) * rng.choice((1, 1, 30, 160))
    offset = start if rng.random() < 0.7 else rng.randrange(start, end)
    block[offset:end] = value[: end - offset].ljust(end - offset, rng.choice((b"\0", b"\0", b"x")))
    blocks[at] = _summed(bytes(block))


def _insert_pax(blocks: Blocks, rng: random.Random) -> None:
    text = b"".join(_record(*rng.choice(_RECORDS)) for _ in range(rng.choice((1, 1, 2, 3))))
    if rng.random() < 0.2:
        text = bytes(rng.choice(text) if rng.random() < 0.03 else byte for byte in text)
    kind = rng.choice((b"x", b"x", b"x", b"g", b"X"))
    at = _a_header(blocks, rng) or 0
    blocks[at:at] = _entry(b"././@PaxHeader", text, kind)


def _insert_long_name(blocks: Blocks, rng: random.Random) -> None:
    name = rng.choice((b"n" * 130 + b".x\0", b"a.x", b"", b"d/" * 80 + b"\0", b"\0x", b"\xff.y\0"))
    at = _a_header(blocks, rng) or 0
    blocks[at:at] = _entry(b"././@LongLink", name, rng.choice((b"L", b"L", b"K")))


def _move(blocks: Blocks, rng: random.Random) -> None:
    if not blocks:
        return
    first, count, to = (
        rng.randrange(len(blocks)),
        rng.choice((1, 1, 2, 4)),
        rng.randrange(len(blocks) + 1),
    )
    piece = blocks[first : first + count]
    if rng.random() < 0.6:
        del blocks[first : first + count]
    if rng.random() < 0.6:
        blocks[to:to] = piece


def _insert_zeros(blocks: Blocks, rng: random.Random) -> None:
    blocks.insert(rng.randrange(len(blocks) + 1), bytes(BLOCK_BYTES))


def _cut(blocks: Blocks, rng: random.Random) -> None:
    if blocks:
        del blocks[rng.randrange(len(blocks)) :]
        blocks.append(bytes(rng.choice((0, 1, 100, 511))))


def _flip(blocks: Blocks, rng: random.Random) -> None:
    if not blocks:
        return
    at = rng.randrange(len(blocks))
    block = bytearray(blocks[at])
    for _ in range(min(len(block), rng.choice((1, 1, 4)))):
        block[rng.randrange(len(block))] = rng.randrange(256)
    blocks[at] = _summed(bytes(block)) if b"ustar" in block and rng.random() < 0.8 else bytes(block)


_CHANGES = (_change_header, _change_header, _change_header, _insert_pax, _insert_pax, _insert_long_name,
            _move, _insert_zeros, _cut, _flip)  # fmt: skip


def _a_header(blocks: Blocks, rng: random.Random) -> int | None:
    found = [
        at for at, block in enumerate(blocks) if len(block) == BLOCK_BYTES and _is_header(block)
    ]
    return rng.choice(found) if found else None


def _is_header(block: bytes) -> bool:
    return block[257:262] == b"ustar" or (block[148:156].strip(b" \0").isdigit() and block[0] > 0)


def _summed(block: bytes) -> bytes:
    if len(block) < BLOCK_BYTES:
        return block
    blank = block[:148] + b" " * 8 + block[156:]
    return block[:148] + b"%06o\0 " % sum(blank) + block[156:]


def _entry(name: bytes, text: bytes, kind: bytes) -> list[bytes]:
    block = bytearray(encode_member("x", b"")[0])
    block[:100], block[156:157] = name.ljust(100, b"\0"), kind
    block[124:136] = b"%011o\0" % len(text)
    text += bytes(-len(text) % BLOCK_BYTES)
    return [
        _summed(bytes(block)),
        *(text[i : i + BLOCK_BYTES] for i in range(0, len(text), BLOCK_BYTES)),
    ]


def _record(keyword: str, value: str) -> bytes:
    rest = f" {keyword}={value}\n".encode()
    length = next(n for n in range(len(rest), len(rest) + 9) if len(rest) + len(str(n)) == n)
    return str(length).encode() + rest
