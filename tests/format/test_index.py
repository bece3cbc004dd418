from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.errors import IndexMismatchError, SampleError, ShardError
from shardstream.format import (
    END_OF_ARCHIVE,
    ReadAt,
    check_extent,
    decode_index,
    encode_index,
    encode_member,
    iter_samples,
    member_name,
    num_samples,
    scan_shard,
)
from tests.strategies import Archive, archives, raw_samples

URL = "s3://b/train-0007.tar.idx"


def reader(data: bytes) -> ReadAt:
    return lambda offset, size: data[offset : offset + size]


offset_lists = (
    st.lists(st.integers(0, 1 << 40), min_size=1, max_size=20, unique=True)
    .map(sorted)
    .map(lambda blocks: np.array(blocks, dtype=np.int64) * 512)
)


@given(offsets=offset_lists)
def test_index_reads_back_as_written(offsets: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    data = encode_index(offsets)
    assert decode_index(data, url=URL).tolist() == offsets.tolist()
    assert num_samples(len(data)) == len(offsets) - 1


@given(offsets=offset_lists)
def test_layout_matches_megatron_energon(offsets: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    # Energon's TarIndexWriter: struct "Q" for the offset of each sample, and for the end of the last
    numbers = struct.unpack(f"<{len(offsets)}Q", encode_index(offsets))
    assert list(numbers) == offsets.tolist()


@settings(max_examples=60)
@given(samples=raw_samples())
def test_scan_finds_each_sample(samples: list[dict[str, Any]]) -> None:
    members = [
        encode_member(member_name(sample["__key__"], field), value)
        for sample in samples
        for field, value in sample.items()
        if field != "__key__"
    ]
    data = b"".join(bytes(piece) for member in members for piece in member) + END_OF_ARCHIVE
    scan = scan_shard(reader(data), end=len(data), shard="a.tar")
    assert scan.keys == [sample["__key__"] for sample in samples]
    names = [field for sample in samples for field in sample if field != "__key__"]
    assert scan.fields == {name: names.count(name) for name in names}
    assert scan.offsets.dtype == np.int64
    assert scan.offsets.tolist()[-1] == len(data) - len(END_OF_ARCHIVE)


@settings(max_examples=60)
@given(archive=archives())
def test_scan_of_any_tar_gives_an_index_that_fits_it(archive: Archive) -> None:
    data = archive.data
    try:
        scan = scan_shard(reader(data), end=len(data), shard="a.tar")
    except SampleError:
        return
    offsets = decode_index(encode_index(scan.offsets), url=URL)
    check_extent(offsets, filesize=len(data), nsamples=len(scan.keys), url=URL)
    groups = [group for group, _ in iter_samples(reader(data), end=len(data), shard="a.tar")]
    assert [group.key for group in groups] == scan.keys
    assert [group.start for group in groups] == offsets[:-1].tolist()


def test_empty_tar_has_an_index_of_one_number() -> None:
    scan = scan_shard(reader(END_OF_ARCHIVE), end=len(END_OF_ARCHIVE), shard="a.tar")
    assert encode_index(scan.offsets) == bytes(8)
    assert decode_index(bytes(8), url=URL).tolist() == [0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "an index of 0 bytes is cut"),
        (bytes(7), "an index of 7 bytes is cut"),
        (bytes(12), "an index of 12 bytes is cut"),
        (bytes(16), "growing multiples of 512"),
        (struct.pack("<3Q", 0, 1024, 512), "growing multiples of 512"),
        (struct.pack("<2Q", 0, 513), "growing multiples of 512"),
        (struct.pack("<2Q", 0, 1 << 63), "growing multiples of 512"),
        (b"v1.2 2\njpg 512 3", "growing multiples of 512"),  # a wds2idx, as DALI takes it
    ],
)
def test_invalid_index_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(IndexMismatchError, match=f"{message}.*'shardstream index'.*0007.tar.idx"):
        decode_index(data, url=URL)


@given(data=st.binary(max_size=64))
def test_garbage_is_an_index_or_refused(data: bytes) -> None:
    try:
        offsets = decode_index(data, url=URL)
    except IndexMismatchError:
        return
    assert encode_index(offsets) == data


@pytest.mark.parametrize(
    ("filesize", "nsamples", "message"),
    [
        (5000, 2, None),
        (3072, 2, None),
        (3072, None, None),
        (3071, 2, "ends at byte 3072, but the tar ends at 3071"),
        (5000, 3, "has 2 samples, the manifest says 3"),
    ],
)
def test_index_is_checked_against_its_tar(
    filesize: int, nsamples: int | None, message: str | None
) -> None:
    offsets = np.array([0, 1024, 3072])
    if message is None:
        check_extent(offsets, filesize=filesize, nsamples=nsamples, url=URL)
        return
    with pytest.raises(IndexMismatchError, match=message):
        check_extent(offsets, filesize=filesize, nsamples=nsamples, url=URL)


@pytest.mark.parametrize(("size", "count"), [(0, 0), (8, 0), (16, 1), (80_008, 10_000)])
def test_samples_are_counted_by_the_size_of_the_index(size: int, count: int) -> None:
    assert num_samples(size) == count


def test_scan_of_a_cut_tar_fails() -> None:
    data = b"".join(map(bytes, encode_member("a.x", b"1" * 600)))
    with pytest.raises(ShardError, match=r"is cut.*in s3://b/a\.tar, at byte 0"):
        scan_shard(reader(data[:1000]), end=1000, shard="s3://b/a.tar")
