from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardstream.errors import ShardError, ShardStreamError
from shardstream.format import (
    END_OF_ARCHIVE,
    ReadAt,
    encode_member,
    iter_members,
    iter_samples,
    scan_shard,
)
from tests.strategies import (
    BLOCK_BYTES,
    TAR_FORMATS,
    Archive,
    Entry,
    TarFormat,
    archives,
    base_256,
    make_archive,
    make_header,
    member_names,
    octal,
    padded,
    read_with_tarfile,
    with_checksum,
)

SHARD = "s3://b/train-0007.tar"
EIGHT_GIB = 8**11
GNU_TAR = shutil.which("tar")
needs_gnu_tar = pytest.mark.skipif(GNU_TAR is None, reason="no tar command here")


def reader(data: bytes) -> ReadAt:
    return lambda offset, size: data[offset : offset + size]


def read_members(data: bytes, *, end_known: bool = True) -> list[tuple[str, bytes]]:
    end = len(data) if end_known else None
    members = iter_members(reader(data), end=end, shard=SHARD)
    return [(name, data[body : body + size]) for name, _, body, size in members]


def write_tar(members: list[tuple[str, bytes]]) -> bytes:
    pieces = [piece for name, data in members for piece in encode_member(name, data)]
    return b"".join(map(bytes, pieces)) + END_OF_ARCHIVE


# --- tars of other writers


@settings(max_examples=60)
@given(archive=archives(), end_known=st.booleans())
def test_members_match_those_of_tarfile(archive: Archive, *, end_known: bool) -> None:
    assert read_members(archive.data, end_known=end_known) == read_with_tarfile(archive.data)


@pytest.mark.parametrize("form", TAR_FORMATS)
@pytest.mark.parametrize("length", [1, 99, 100, 101, 155, 156, 254, 255, 256, 257, 4000])
def test_names_of_any_length_are_read(form: TarFormat, length: int) -> None:
    name = ("d" * 60 + "/" + "n" * 90 + "/" + "m" * 4000)[:length].rstrip("/") + "x"
    archive = make_archive([Entry(name=name, data=b"1"), Entry(name="b.x")], form=form)
    kept = [(entry.name, entry.data) for entry in archive.entries]
    assert read_members(archive.data) == kept
    assert form == "ustar" or len(kept) == 2


@settings(max_examples=60)
@given(archive=archives())
def test_each_member_can_be_read_by_its_offset(archive: Archive) -> None:
    data = archive.data
    for name, start, body, size in iter_members(reader(data), end=len(data)):
        end = body + len(padded(bytes(size)))
        again = list(iter_members(reader(data), start=start, end=end))
        assert again == [(name, start, body, size)]


@given(size=st.integers(1, 2000), zeros=st.integers(0, 40))
def test_pax_size_overrides_the_header(size: int, zeros: int) -> None:
    digits = b"0" * zeros + b"%d" % size
    records = next(r for n in range(80) if len(r := b"%d size=%s\n" % (n, digits)) == n)
    data = (
        make_header(b"././@PaxHeader", size=octal(len(records)), kind=b"x")
        + padded(records)
        + make_header(b"a.x", size=octal(0))
        + padded(b"1" * size)
        + make_header(b"b.x")
        + END_OF_ARCHIVE
    )
    assert read_members(data) == [("a.x", b"1" * size), ("b.x", b"")] == read_with_tarfile(data)


@pytest.mark.parametrize(
    "size_field",
    [
        b"00000000005\0",
        b"00000000005 ",
        b"          5 ",
        b"     5 \0",
        b"5\0",
        b"5",
        b"000000000005",  # twelve digits, as star writes
        base_256(5),
    ],
    ids=repr,
)
def test_all_size_encodings_are_read(size_field: bytes) -> None:
    data = make_header(size=size_field) + padded(b"12345") + make_header(b"b.x") + END_OF_ARCHIVE
    assert read_members(data) == [("a.txt", b"12345"), ("b.x", b"")] == read_with_tarfile(data)


@pytest.mark.parametrize(
    ("header", "names"),
    [
        (make_header(b"n" * 100), ["n" * 100]),
        (make_header(b"a.x", prefix=b"v1/w"), ["v1/w/a.x"]),
        (make_header(b"n" * 100, prefix=b"p" * 155), ["p" * 155 + "/" + "n" * 100]),
        # GNU stores times where POSIX has the prefix; tarfile reads them as a folder
        (make_header(b"a.x", prefix=b"14700000000", magic=b"ustar  \0"), ["a.x"]),
        (make_header(b"a.x", magic=b""), ["a.x"]),
        (make_header(b"a.x", kind=b"\0"), ["a.x"]),
        (make_header(b"a.x", kind=b"7"), ["a.x"]),
        (make_header(b"folder/", kind=b"\0"), []),
        (make_header(b"folder", kind=b"5", size=octal(4096)), []),  # has a size, but no body
        (make_header(b"\xff\xfe.x"), ["\udcff\udcfe.x"]),
        (make_header("é.x".encode()), ["é.x"]),
        (make_header(b"label", kind=b"V"), []),
        (make_header(b"unknown", kind=b"Z"), []),
    ],
    ids=range(13),
)
def test_old_and_unusual_headers_are_read(header: bytes, names: list[str]) -> None:
    data = header + make_header(b"z.x") + END_OF_ARCHIVE
    assert [name for name, _ in read_members(data)] == [*names, "z.x"]


def test_signed_byte_checksum_is_accepted() -> None:
    block = make_header("é.x".encode())
    signed = int(block[148:154], 8) - 2 * 256  # two bytes over 127
    data = block[:148] + b"%06o\0 " % signed + block[156:] + END_OF_ARCHIVE
    assert read_members(data) == [("é.x", b"")] == read_with_tarfile(data)


@needs_gnu_tar
@pytest.mark.parametrize(
    ("form", "longest"), [("v7", 99), ("ustar", 180), ("oldgnu", 400), ("gnu", 400), ("pax", 400)]
)
def test_archives_of_gnu_tar_are_read(form: str, longest: int, tmp_path: Path) -> None:
    names = ["a.x", "é b.x", "d/e.x", "n" * 97 + ".x"]
    names += [f"{'m' * 80}/{'p' * (length - 83)}.x" for length in (101, 180) if length <= longest]
    names += ["/".join(["q" * 99] * 4)] if longest >= 400 else []
    for name in names:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 9)
    (tmp_path / "in" / "link").symlink_to("a.x")
    (tmp_path / "in" / "hard").hardlink_to(tmp_path / "in" / "a.x")
    run_tar("--create", f"--format={form}", "--file", "out.tar", "-C", "in", *names, "link", "hard",
            cwd=tmp_path)  # fmt: skip
    data = (tmp_path / "out.tar").read_bytes()
    assert read_members(data) == [(name, name.encode() * 9) for name in names]


@needs_gnu_tar
def test_incremental_archive_of_gnu_tar_keeps_its_names(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.x").write_bytes(b"1")
    run_tar("--create", "--format=gnu", "--listed-incremental=seen", "--file", "out.tar", "in",
            cwd=tmp_path)  # fmt: skip
    assert read_members((tmp_path / "out.tar").read_bytes()) == [("in/a.x", b"1")]


@needs_gnu_tar
@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=pax", "--sparse-version=0.0"],
        ["--format=pax", "--sparse-version=0.1"],
        ["--format=pax", "--sparse-version=1.0"],
    ],
    ids=" ".join,
)
def test_sparse_member_is_refused(options: list[str], tmp_path: Path) -> None:
    with (tmp_path / "a.x").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    run_tar("--create", "--sparse", *options, "--file", "out.tar", "a.x", cwd=tmp_path)
    with pytest.raises(ShardError, match=r"sparse.*leave out --sparse.*train-0007"):
        read_members((tmp_path / "out.tar").read_bytes())


# --- written tars in other readers


written_members = st.lists(
    st.tuples(member_names(), st.binary(max_size=1100)),
    max_size=6,
    unique_by=lambda member: member[0],
)


@given(members=written_members)
def test_tarfile_reads_written_tars(members: list[tuple[str, bytes]]) -> None:
    data = write_tar(members)
    assert read_with_tarfile(data) == members
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8") as tar:
        for info in tar:
            assert (info.mtime, info.uid, info.gid, info.mode) == (0, 0, 0, 0o644)
            assert (info.uname, info.gname, info.type) == ("", "", tarfile.REGTYPE)


@given(members=written_members)
def test_written_tars_round_trip_and_are_deterministic(
    members: list[tuple[str, bytes]],
) -> None:
    data = write_tar(members)
    assert read_members(data) == members
    assert data == write_tar([(name, memoryview(body)[:].tobytes()) for name, body in members])
    assert len(data) % BLOCK_BYTES == 0


@pytest.mark.parametrize("length", [*range(80, 110), *range(975, 1010)])
def test_pax_records_count_their_own_length(length: int) -> None:
    name = "é" + "n" * length
    assert read_with_tarfile(write_tar([(name, b"1")])) == [(name, b"1")]


@pytest.mark.parametrize("name", ["\udcff.x", "n" * 200 + "\udc80.x"])
def test_non_utf8_name_keeps_its_bytes(name: str) -> None:
    data = write_tar([(name, b"1")])
    assert read_members(data) == [(name, b"1")] == read_with_tarfile(data)


class Zeros(bytes):
    """A tar of eight GiB that is generated while it is read."""

    def __len__(self) -> int:
        return EIGHT_GIB


def test_member_over_eight_gib_gets_a_pax_size() -> None:
    header, _, padding = encode_member("a.bin", Zeros())
    assert padding == b""
    with tarfile.open(fileobj=io.BytesIO(header + bytes(512)), mode="r|") as tar:
        assert next(iter(tar)).size == EIGHT_GIB
    members = iter_members(reader(header), end=len(header) + EIGHT_GIB)
    assert next(members) == ("a.bin", 0, len(header), EIGHT_GIB)


@needs_gnu_tar
def test_gnu_tar_lists_and_extracts_written_tars(tmp_path: Path) -> None:
    names = ["a.x", "d/é.x", "b c.x", "n" * 99, "n" * 100, "q" * 200 + "/" + "r" * 200]
    members = [(name, name.encode() * 7) for name in names]
    (tmp_path / "a.tar").write_bytes(write_tar(members))
    listing = run_tar("--list", "--verbose", "--numeric-owner", "--utc", "--quoting-style=literal",
                      "--file", "a.tar", cwd=tmp_path)  # fmt: skip
    for line, (name, body) in zip(listing.splitlines(), members, strict=True):
        mode, owner, size, date, _, shown = line.split(maxsplit=5)
        assert (mode, owner, size) == ("-rw-r--r--", "0/0", str(len(body)))
        assert (date, shown) == ("1970-01-01", name)
    run_tar("--extract", "--no-same-owner", "--file", "a.tar", cwd=tmp_path)
    assert all((tmp_path / name).read_bytes() == body for name, body in members)


def test_bytes_of_a_shard_are_pinned() -> None:
    data = write_tar([("0001.jpg", b"\xff\xd8"), ("0001.cls", b"3"), ("é/" + "n" * 120, b"")])
    assert len(data) == 9 * BLOCK_BYTES
    assert (
        hashlib.sha256(data).hexdigest()
        == "243afe29aa99ff1edc3133383e57eded3f73e722f0c722058d1eb083fae91eb4"
    )


# --- damage


SMALL = write_tar([("a.x", b"1" * 600), ("a.y", b""), ("é" * 60 + ".x", b"23"), ("b.x", b"4")])
SMALL_MEMBERS = read_members(SMALL)
BOUNDARIES = [
    *(start for _, start, _, _ in iter_members(reader(SMALL), end=len(SMALL))),
    len(SMALL) - 2 * BLOCK_BYTES,
]


PADDINGS = [
    (body + size, body + len(padded(bytes(size))))
    for _, _, body, size in iter_members(reader(SMALL), end=len(SMALL))
]


@pytest.mark.parametrize("end_known", [True, False])
def test_truncation_is_detected_at_every_byte(*, end_known: bool) -> None:
    for cut in range(len(SMALL) + 1):
        data = SMALL[:cut]
        found: list[bytes] = []
        error = failure(partial(collect_fields, data, len(data) if end_known else None, found))
        if error is None:
            # At these offsets every reader sees a valid end: between members, or in the zeros at the end.
            in_padding = not end_known and any(start <= cut < end for start, end in PADDINGS)
            in_last_zeros = cut >= BOUNDARIES[-1] + BLOCK_BYTES
            assert cut in BOUNDARIES or in_padding or in_last_zeros, cut
            count = sum(offset <= cut for offset in BOUNDARIES[1:]) + in_padding
            assert found == [body for _, body in SMALL_MEMBERS][:count]
        else:
            assert error.shard == SHARD
            assert error.offset is not None
            assert error.offset < cut + BLOCK_BYTES  # of the header that is missing
            assert f"in {SHARD}, at byte {error.offset}" in str(error)


def collect_members(data: bytes, found: list[tuple[str, bytes]]) -> None:
    found += read_members(data)


def collect_fields(data: bytes, end: int | None, found: list[bytes]) -> None:
    for group, sample in iter_samples(reader(data), end=end, shard=SHARD):
        found += [sample[field] for field in group.fields]


def test_every_bit_flip_in_a_header_is_detected_or_harmless() -> None:
    headers = [
        offset
        for start, (_, after) in zip(BOUNDARIES, pairwise([*BOUNDARIES, len(SMALL)]), strict=False)
        for offset in range(start, after, BLOCK_BYTES)
        if SMALL[offset + 257 : offset + 262] == b"ustar"
    ]
    assert len(headers) == 5  # four members, one of them with a pax header in front
    for position in (byte for offset in headers for byte in range(offset, offset + BLOCK_BYTES)):
        for bit in range(8):
            flipped = bytearray(SMALL)
            flipped[position] ^= 1 << bit
            found: list[tuple[str, bytes]] = []
            error = failure(partial(collect_members, bytes(flipped), found))
            in_checksum = 148 <= position % BLOCK_BYTES < 156
            if error is None:
                assert found == SMALL_MEMBERS
                assert in_checksum  # for example a blank instead of a NUL
            else:
                assert error.offset == position - position % BLOCK_BYTES


PAX_TOO_LONG = make_header(b"x", size=octal((1 << 20) + 1), kind=b"x")


@pytest.mark.parametrize(
    ("data", "message", "offset"),
    [
        (b"x" * 1024, r"not a tar file; .*fetch or write it again", 0),
        (b"PK\x03\x04" + bytes(1020), r"not a tar file", 0),
        (make_header() + b"x" * 512, r"checksum is wrong", 512),
        (make_header(size=base_256(-1)) + bytes(512), r"gives a size of b'\\xff", 0),
        (make_header(size=base_256(1 << 80)) + bytes(512), r"gives a size of", 0),
        (make_header(size=octal(EIGHT_GIB - 1)), r"is cut: .* it ends at 512", 0),
        (make_header(size=base_256(1 << 50)), r"is cut", 0),
        (make_header(size=b"-0000000001\0"), r"size", 0),
        (make_header(size=b"zz"), r"gives a size of b'zz", 0),
        (make_header(b"n" * 100, size=b"zz"), r"gives a size of b'zz", 0),
        (make_header() + bytes(512) + make_header(), r"single zero block", 512),
        (make_header() + bytes(512) + b"x", r"single zero block", 512),
        (make_header() + bytes(100), r"cut inside a header \(100 of 512", 512),
        (PAX_TOO_LONG + bytes(2 << 20), r"over the limit", 0),
        (make_header(kind=b"x", size=octal(600)) + bytes(100), r"cut inside an extended header", 0),
        (make_header(kind=b"L", size=octal(600)) + bytes(100), r"cut inside an extended header", 0),
        (make_header(kind=b"x") * 3, r"cut inside a header", 1536),
        (make_header(kind=b"x") + END_OF_ARCHIVE, r"checksum is wrong", 512),
    ],
    ids=range(18),
)
def test_invalid_headers_are_refused(data: bytes, message: str, offset: int) -> None:
    with pytest.raises(ShardError, match=message) as raised:
        read_members(data)
    assert (raised.value.shard, raised.value.offset) == (SHARD, offset)


@pytest.mark.parametrize(
    "records",
    [
        b"x",
        b"99 path=a\n",
        b"0 path=a\n",
        b"-5 path=a\n",
        b"10 path=ab",
        b"9 path ab\n",
        b"12 path=ab\n",
        b"9" * 40 + b" path=a\n",
        b"10 size=-1\n",
        b"11 size=0x1\n",
        b"31 size=99999999999999999999999\n",
        "12 size=²\n".encode(),
    ],
    ids=repr,
)
def test_invalid_pax_header_is_refused(records: bytes) -> None:
    data = make_header(kind=b"x", size=octal(len(records))) + padded(records) + make_header()
    with pytest.raises(
        ShardError, match=r"a pax header (has a malformed record|gives the invalid size)"
    ) as raised:
        read_members(data + END_OF_ARCHIVE)
    assert raised.value.offset == 0


@pytest.mark.parametrize("kind", [b"x", b"L", b"K"])
def test_endless_extended_headers_are_refused(kind: bytes) -> None:
    requested_bytes = 0

    def endless(offset: int, size: int) -> bytes:
        nonlocal requested_bytes
        requested_bytes += size
        assert requested_bytes < 1 << 26, "read on and on"
        block = make_header(kind=kind, size=octal(512)) if offset % 1024 == 0 else bytes(512)
        return block[:size]

    with pytest.raises(ShardError, match="extended headers before one member"):
        next(iter_members(endless, shard=SHARD))


def test_empty_stream_has_no_members() -> None:
    assert read_members(b"") == read_members(b"", end_known=False) == []


def all_readers(data: bytes) -> Iterator[Callable[[], object]]:
    for end in (len(data), None):
        yield lambda end=end: list(iter_members(reader(data), end=end, shard=SHARD))  # type: ignore[misc]
        yield lambda end=end: list(iter_samples(reader(data), end=end, shard=SHARD))  # type: ignore[misc]
        yield lambda end=end: scan_shard(reader(data), end=end, shard=SHARD)  # type: ignore[misc]


def failure(function: Callable[[], object]) -> ShardStreamError | None:
    """Return the shardstream error that a call raises; other errors propagate."""
    try:
        function()
    except ShardStreamError as error:
        return error
    return None


header_blocks = st.builds(
    make_header,
    st.binary(max_size=100),
    size=st.binary(max_size=12)
    | st.integers(0, 3000).map(octal)
    | st.integers(-(1 << 80), 1 << 85).map(base_256),
    kind=st.sampled_from([bytes([byte]) for byte in b"0123457xgLKXSVDMN\0\xff"]),
    prefix=st.binary(max_size=155),
    magic=st.sampled_from([b"ustar\x0000", b"ustar  \0", b""]),
)
hostile = st.lists(
    header_blocks
    | st.binary(min_size=512, max_size=512).map(with_checksum)
    | st.just(bytes(512))
    | st.binary(max_size=600).map(padded)
    | st.sampled_from([b"18 GNU.sparse.a=1\n", b"11 size=512\n", b"12 path=a.x\n"]).map(padded),
    max_size=8,
).map(b"".join)


@settings(max_examples=300)
@given(data=st.binary(max_size=2000) | hostile)
@example(data=make_header(size=base_256(1 << 62)))
def test_random_bytes_raise_only_shardstream_errors(data: bytes) -> None:
    for read in all_readers(data):
        error = failure(read)
        assert error is None or error.shard == SHARD


@settings(max_examples=60)
@given(
    archive=archives(),
    edits=st.lists(st.tuples(st.integers(0, 8000), st.integers(0, 255)), max_size=4),
)
def test_damage_raises_only_shardstream_errors(
    archive: Archive, edits: list[tuple[int, int]]
) -> None:
    data = bytearray(archive.data)
    for position, value in edits:
        data[position % len(data)] = value
    for read in all_readers(bytes(data)):
        error = failure(read)
        assert error is None or error.shard == SHARD


def run_tar(*arguments: str, cwd: Path) -> str:
    assert GNU_TAR is not None
    done = subprocess.run(
        [GNU_TAR, *arguments], cwd=cwd, check=True, capture_output=True, text=True, encoding="utf-8"
    )
    return done.stdout
