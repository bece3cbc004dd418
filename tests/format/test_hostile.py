"""Test hostile tars: each is refused or skipped, in bounded memory and time."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard

from shardstream.errors import IndexMismatchError, ManifestError, SampleError, ShardError
from shardstream.format import (
    END_OF_ARCHIVE,
    ForwardReader,
    Manifest,
    check_extent,
    decode_index,
    decode_manifest,
    encode_member,
    iter_groups,
    iter_members,
    iter_samples,
    open_decompressed,
    read_sample,
)
from tests.attack import survived
from tests.limits import set_limits
from tests.strategies import base_256, make_header, octal, padded

SHARD = "s3://b/train-0007.tar"
MiB = 1 << 20
GiB = 1 << 30


def members(data: bytes) -> list[str]:
    found = iter_members(lambda at, size: data[at : at + size], end=len(data), shard=SHARD)
    return [name for name, *_ in found]


def samples(data: bytes, name: str) -> Iterator[object]:
    with open_decompressed(io.BytesIO(data), shard=name) as inner:
        yield from iter_samples(ForwardReader(inner), shard=name)


def zeros_packed(size: int, head: bytes = b"", *, wbits: int = 31) -> bytes:
    """Deflate ``head`` and many zeros without holding them, by repeating one compressed piece."""
    piece = 32 * MiB
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(bytes(piece)) + packer.flush(zlib.Z_FULL_FLUSH)
    body = first + again * (size // piece) + packer.flush()
    if wbits < 0:
        return body
    # The checksum at the end is wrong, but is never reached.
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + body + bytes(8)


# --- names


EVIL_NAMES = ["../../etc/cron.d/x.txt", "/etc/passwd.txt", "a/../../b.txt", "./../c.txt", "-rf.txt", "a\x1b[31mb.txt"]  # fmt: skip


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_names_are_text_and_touch_no_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = b"".join(bytes(piece) for piece in encode_member(name, b"evil")) + END_OF_ARCHIVE
    ((_, sample),) = iter_samples(lambda at, size: data[at : at + size], end=len(data), shard=SHARD)
    assert sample["__key__"] == name[: -len(".txt")]
    assert sample["txt"] == b"evil"
    assert not list(tmp_path.rglob("*"))


def test_links_and_devices_are_not_samples() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo("a.txt")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    assert members(buffer.getvalue()) == []


@pytest.mark.parametrize("name", [b"\xff\xfe.txt", b"a\nb.txt", b"\xc0\xaf.txt", b"a\x1bc.txt"])
def test_errors_escape_control_characters_in_names(name: bytes) -> None:
    data = make_header(name, size=octal(99999))
    with pytest.raises(ShardError, match="is cut") as raised:
        members(data)
    assert str(raised.value).replace("\n", "").isprintable()


# --- sizes


@pytest.mark.parametrize("size", [1 << 59, GiB, (1 << 60) - 1])
@pytest.mark.parametrize("end_known", [True, False])
def test_size_past_the_end_allocates_nothing(size: int, *, end_known: bool) -> None:
    data = make_header(size=base_256(size)) + b"few"

    def attack() -> object:
        read = ForwardReader(io.BytesIO(data))
        return list(iter_samples(read, end=len(data) if end_known else None, shard=SHARD))

    outcome = survived(attack, memory_bytes=64 * MiB)
    assert outcome.startswith("ShardError: ")
    assert "is cut" in outcome or "over 2147483648 bytes" in outcome


def test_size_past_the_end_of_an_indexed_sample_allocates_nothing() -> None:
    data = make_header(size=octal(8**11 - 1)) + b"few"
    outcome = survived(lambda: read_sample(data, 0, 0, 1024, SHARD), memory_bytes=64 * MiB)
    assert "the tar is cut: 3 of 8589934591 bytes" in outcome


def test_extended_headers_are_limited_together() -> None:
    text = padded(b"12 comment=x" + b"y" * 900_000)
    head = make_header(kind=b"K", size=octal(len(text)))
    outcome = survived(lambda: members((head + text) * 40), memory_bytes=128 * MiB)
    assert "over 4194304 bytes of extended headers" in outcome


def test_endless_name_is_refused() -> None:
    text = b"n" * 200_000 + b".x\0"
    data = make_header(kind=b"L", size=octal(len(text))) + padded(text) + make_header()
    with pytest.raises(ShardError, match=r"the invalid name 'nnn.*200002 characters"):
        members(data)


# --- large counts


def test_millions_of_tiny_members_use_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(
        monkeypatch, iter_groups, KEYS_KEPT=10_000
    )  # memory must not grow with the number of members

    def attack() -> int:
        many = ((f"{n:0250d}.x", n * 512, n * 512 + 512, 0) for n in range(400_000))
        return sum(1 for _ in iter_groups(many))  # the keys alone are 100 MB

    assert survived(attack, memory_bytes=48 * MiB) == "400000"


def test_repeated_key_is_detected_among_a_million_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_limits(monkeypatch, iter_groups, KEYS_KEPT=4)
    for between in (1, 2, 3):
        names = [*(f"{n}" for n in range(20 + between)), "19"]
        many = [(f"{name}.x", n * 512, n * 512 + 512, 0) for n, name in enumerate(names)]
        with pytest.raises(SampleError, match="returns after"):
            list(iter_groups(many))


def test_sample_with_endless_fields_is_refused() -> None:
    many = ((f"a.{n}", n * 512, n * 512 + 512, 0) for n in range(1 << 20))
    with pytest.raises(SampleError, match="a sample of over 65536 fields"):
        list(iter_groups(many))


# --- decompression bombs


def test_member_that_unpacks_to_more_than_memory_is_refused() -> None:
    bomb = zeros_packed(64 * GiB, make_header(b"a.x", size=base_256(60 * GiB)))
    assert len(bomb) < 100 * MiB
    outcome = survived(lambda: list(samples(bomb, "a.tar.gz")), memory_bytes=256 * MiB)
    assert "a sample of over 2147483648 bytes in a stream of unknown length" in outcome


def test_size_limit_counts_all_fields_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, iter_groups, STREAMED_SAMPLE_LIMIT_BYTES=100_000)
    tar = b"".join(bytes(p) for n in range(300) for p in encode_member(f"a.{n}", b"1"))
    with pytest.raises(ShardError, match="over 100000 bytes in a stream of unknown length"):
        list(samples(gzip.compress(tar), "a.tar.gz"))
    apart = b"".join(bytes(p) for n in range(300) for p in encode_member(f"{n}.x", b"1"))
    apart += END_OF_ARCHIVE
    assert len(list(samples(gzip.compress(apart), "a.tar.gz"))) == 300


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.zst"])
def test_decompression_bomb_of_empty_samples_is_refused(
    suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, ForwardReader, INFLATED_FREE_BYTES=1 * MiB)
    set_limits(monkeypatch, ForwardReader, INFLATED_RATIO_LIMIT=20)
    tar = b"".join(bytes(p) for n in range(20_000) for p in encode_member(f"{n}.x", b""))
    packed = gzip.compress(tar) if suffix == ".tar.gz" else zstandard.compress(tar)
    with pytest.raises(ShardError, match=r"a decompression bomb\?"):
        list(samples(packed, f"a{suffix}"))


def test_highly_compressible_labels_are_accepted() -> None:
    tar = b"".join(bytes(p) for n in range(8_000) for p in encode_member(f"{n:06d}.cls", b"1"))
    packed = zstandard.compress(tar + END_OF_ARCHIVE, 19)
    assert len(tar) / len(packed) > 200
    assert len(list(samples(packed, "a.tar.zst"))) == 8_000


def test_window_of_zstd_larger_than_memory_is_refused() -> None:
    # magic, a frame header with a window of 2^41 bytes, then an empty last block
    frame = bytes.fromhex("28b52ffd") + bytes([0x00, (31 << 3)]) + b"\x01\x00\x00"
    outcome = survived(lambda: list(samples(frame, "a.tar.zst")), memory_bytes=256 * MiB)
    assert "damaged or cut" in outcome


def test_archive_after_the_end_blocks_is_not_read() -> None:
    one = b"".join(bytes(p) for p in encode_member("a.x", b"1")) + END_OF_ARCHIVE
    assert members(one + one.replace(b"a.x", b"b.x")) == ["a.x"]


# --- index and manifest


@pytest.mark.parametrize(
    "numbers",
    [
        [0, 1 << 63],
        [0, (1 << 64) - 512],
        [512, 0],
        [0, 512, 512],
        [0, 100],
        [1 << 62, (1 << 63) - 512],
    ],
)
def test_index_with_absurd_offsets_is_refused(numbers: list[int]) -> None:
    data = struct.pack(f"<{len(numbers)}Q", *numbers)

    def read() -> None:
        offsets = decode_index(data, url="a.tar.idx")
        check_extent(offsets, filesize=10_000, nsamples=None, url="a.tar.idx")

    with pytest.raises(IndexMismatchError, match="shardstream index"):
        read()


def test_index_into_the_middle_of_a_member_is_refused() -> None:
    inner = b"".join(bytes(p) for p in encode_member("evil.x", b"1"))
    data = b"".join(bytes(p) for p in encode_member("a.x", bytes(512) + b"x" * 512 + inner))
    for start, end in ((512, 1024), (1024, 1536), (0, 1024), (512, 2560)):
        with pytest.raises(ShardError):
            read_sample(data, 0, start, end, SHARD)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"__kind__": "wids-shard-index-v1", "name": ' + "[" * 900 + "]" * 900 + "}",
        '{"__kind__": ' + "[" * 900 + "]" * 900 + "}",
        '{"__kind__": "wids-shard-index-v1", "shardlist": [' + "[" * 900 + "]" * 900 + "]}",
        '{"__kind__": "wids-shard-index-v1", "shardlist": [{"url": "a", "nsamples": ' + "9" * 5000 + "}]}",
        '{"__kind__": "wids-shard-index-v1", "shardlist": [], "fields": {"x": "\\u001b[31m"}}',
        '{"__kind__": "wids-shard-index-v1", "shardlist": ['
        + ", ".join(['{"url": "a", "nsamples": 1152921504606846975}'] * 9)
        + "]}",
        '{"__kind__": "wids-shard-index-v1", "shardlist": [{"url": "a", "nsamples": -1}]}',
        '{"__kind__": "wids-shard-index-v1", "shardlist": [{"url": "a", "nsamples": NaN}]}',
        '{"__kind__": "wids-shard-index-v1", "shardlist": [{"url": "\\ud800.tar"}]}',
        '{"__kind__": "wids-shard-index-v1", "shardlist": [{"url": "a\\u0000.tar"}]}',
    ],
    ids=range(11),
)  # fmt: skip
def test_malicious_manifest_is_refused(text: str) -> None:
    with pytest.raises(ManifestError, match="shardstream index") as raised:
        decode_manifest(text.encode(), url="s3://b/index.json")
    assert len(str(raised.value)) < 1000


def test_counts_of_a_manifest_never_overflow() -> None:
    shards = [{"url": f"{n}", "nsamples": 10**12} for n in range(1000)]
    text = json.dumps({"__kind__": "wids-shard-index-v1", "shardlist": shards})
    manifest = decode_manifest(text.encode(), url="s3://b/index.json")
    assert isinstance(manifest, Manifest)
    assert manifest.nsamples == 10**15 < np.iinfo(np.int64).max
