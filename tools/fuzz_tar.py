"""Throw damaged and hostile tars at the parser, the grouping and the index: no crash, no hang, one meaning.

    python tools/fuzz_tar.py [--seconds N] [--seed N] [FILE_OR_FOLDER ...]
    python tools/fuzz_tar.py --atheris [libFuzzer options] [CORPUS_FOLDER ...]

Without atheris it mutates its own small tars, and the files given, for some seconds. With it (``pip install atheris``, not on
every Python) libFuzzer looks for inputs that reach new branches. `check` is the target, and a property test runs it, too.
Mutations know where the fields of a header are and mend its checksum, or nearly every input would end there.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import tarfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardstream.errors import ShardStreamError
from shardstream.format.group import Sample, iter_samples, read_sample
from shardstream.format.index import decode_index, encode_index, scan_shard
from shardstream.format.manifest import decode_manifest
from shardstream.format.stream import StreamReader
from shardstream.format.tar import BLOCK_BYTES, ReadAt, iter_members
from shardstream.format.tar_encode import END_OF_ARCHIVE, encode_member

_SHARD = "a.tar"
_LONGEST_BYTES = 64 << 10
_KEPT = 2000  # mutated inputs that are mutated again
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

Member = tuple[str, bytes]


# --- the target


def check(data: bytes) -> str:
    """Read ``data`` in every way there is, and compare.

    Returns:
        What became of it, in a word: "both", "refused", "ours alone", "theirs alone".

    Raises:
        AssertionError: If two ways differ, or reading costs more than its length explains.
        Exception: Any other than ours is a finding.
    """
    mine = _tried(lambda: _members(_Counted(data), len(data)))
    if mine is not None:
        streamed = _members(_Counted(data), None)
        assert streamed == mine, "members differ where the length is unknown"
        _check_samples(data)
    _tried(lambda: decode_index(data[: len(data) & -8], url=_SHARD))
    _tried(lambda: decode_manifest(data, url=_SHARD))
    theirs = _read_with_tarfile(data)
    if mine is None or theirs is None:
        return (
            "refused"
            if theirs is mine is None
            else "theirs alone"
            if mine is None
            else "ours alone"
        )
    assert [member for member in theirs if member[0]] == mine, "tarfile reads something else"
    return "both"


def _check_samples(data: bytes) -> None:
    known = _tried(lambda: list(iter_samples(_Counted(data), end=len(data), shard=_SHARD)))
    forward = StreamReader(io.BytesIO(data), chunk_bytes=700)
    streamed = _tried(lambda: list(iter_samples(forward, shard=_SHARD)))
    assert streamed == known, "samples differ in a stream"
    scan = _tried(lambda: scan_shard(_Counted(data), end=len(data), shard=_SHARD))
    assert (scan is None) == (known is None), "only one of indexing and reading accepts it"
    if scan is None or known is None:
        return
    samples: list[Sample] = [sample for _, sample in known]
    assert scan.keys == [sample["__key__"] for sample in samples]
    assert [group.start for group, _ in known] == scan.offsets[:-1].tolist()
    if not samples:
        return
    offsets = decode_index(encode_index(scan.offsets), url=_SHARD).tolist()
    for sample, (start, end) in zip(samples, pairwise(offsets), strict=True):
        assert read_sample(data, 0, start, end, _SHARD) == sample, "by number it is another"
        assert read_sample(data[start:end], start, start, end, _SHARD) == sample


class _Counted:
    """Reads at offsets, and finds out who reads on and on."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._calls = 3 * len(data) // BLOCK_BYTES + 10
        self._bytes = 3 * len(data) + 10 * BLOCK_BYTES

    def __call__(self, offset: int, size: int) -> bytes:
        assert offset >= 0, "a read before the start"
        assert size >= 0, "a read of less than nothing"
        piece = self._data[offset : offset + size]
        self._calls -= 1
        self._bytes -= len(piece)
        assert self._calls >= 0, "it reads on and on"
        assert self._bytes >= 0, "it reads the same again and again"
        return piece


def _members(read: ReadAt, end: int | None) -> list[Member]:
    return [
        (name, read(body, size))
        for name, _, body, size in iter_members(read, end=end, shard=_SHARD)
    ]


def _tried(function: Callable[[], Any]) -> Any:
    """Call it; None where it refuses by an error of ours."""
    try:
        return function()
    except ShardStreamError:
        return None


class _PosixInfo(tarfile.TarInfo):
    """Python's reader, but for the prefix: old GNU headers keep times there (GNU tar reads them so, too)."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        info = super().frombuf(buf, encoding, errors)
        if buf[257:263] != b"ustar\0" and not info.isdir():
            info.name = buf[:100].split(b"\0", 1)[0].decode(encoding, errors)
        return info


def _read_with_tarfile(data: bytes) -> list[Member] | None:
    """Return the regular files; None where ``tarfile`` refuses, or stops before the end without a word."""
    found: list[Member] = []
    try:
        with tarfile.open(
            fileobj=io.BytesIO(data), mode="r:", encoding="utf-8", tarinfo=_PosixInfo
        ) as tar:
            for info in tar:
                if info.isreg():
                    body = tar.extractfile(info)
                    found.append((info.name, b"" if body is None else body.read()))
            rest = data[tar.offset : tar.offset + BLOCK_BYTES]
    except Exception:  # noqa: BLE001  (it raises what it likes on damaged headers)
        return None
    return None if rest.strip(b"\0") else found


# --- inputs


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
    """Return ``data`` with a few changes, most of which leave the checksums of headers right."""
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        rng.choice(_CHANGES)(blocks, rng)
    return b"".join(blocks)[:_LONGEST_BYTES]


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


# --- runs


def run(corpus: Sequence[bytes], *, seconds: float, seed: int) -> Counter[str]:
    """Mutate for some seconds; stop at the first finding, which is written to a file."""
    rng, kept = random.Random(seed), list(corpus)
    outcomes: Counter[str] = Counter()
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        data = mutate(rng.choice(kept), rng)
        try:
            outcome = check(data)
        except BaseException:
            path = Path(f"finding-{zlib.crc32(data):08x}.tar")
            path.write_bytes(data)
            print(f"a finding: {path} ({len(data)} bytes), seed {seed}, after {outcomes.total()}")
            raise
        outcomes[outcome] += 1
        if outcome == "both" and rng.random() < 0.05:  # a base for further changes
            if len(kept) < _KEPT:
                kept.append(data)
            else:
                kept[rng.randrange(len(corpus), _KEPT)] = data
    return outcomes


def run_atheris(argv: list[str]) -> None:
    """Hand the target to libFuzzer; never returns."""
    import atheris  # noqa: PLC0415  (only where it is asked for)

    def mutated(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        return (
            mutate(data, rng)[:max_size] if rng.random() < 0.8 else atheris.Mutate(data, max_size)
        )

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *argv], check, custom_mutator=mutated)
    atheris.Fuzz()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long; default 60")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; default 0")
    parser.add_argument("--atheris", action="store_true", help="let libFuzzer drive")
    parser.add_argument("corpus", nargs="*", type=Path, help="tars, or folders of them")
    options, rest = parser.parse_known_args()
    if options.atheris:
        run_atheris([*rest, *map(str, options.corpus)])
    files = [p for path in options.corpus for p in (path.rglob("*") if path.is_dir() else [path])]
    corpus = seeds() + [path.read_bytes()[:_LONGEST_BYTES] for path in files if path.is_file()]
    for data in corpus:
        check(data)
    outcomes = run(corpus, seconds=options.seconds, seed=options.seed)
    print(f"{outcomes.total():,} inputs: {dict(outcomes)}")


if __name__ == "__main__":
    main()
