from __future__ import annotations

import gzip
import io
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis.strategies import binary, integers, lists, sampled_from, tuples

from shardstream.errors import ShardError
from shardstream.format import ForwardReader, iter_samples, open_decompressed
from tests.small_tars import samples, tar_bytes


class OnlyForward(io.RawIOBase):
    """An endless stream of zeros in short reads that records the largest requested read."""

    def __init__(self, length: int) -> None:
        self.left = length
        self.largest = 0

    def read(self, size: int = -1, /) -> bytes:
        self.largest = max(self.largest, size)
        size = min(size, self.left, 100_000)
        self.left -= size
        return bytes(size)

    def seekable(self) -> bool:
        return False


class NoSeek(io.BytesIO):
    def seekable(self) -> bool:
        return False


@given(
    data=binary(max_size=300),
    jumps=lists(tuples(integers(0, 60), integers(0, 90)), max_size=12),
    chunk_bytes=integers(1, 70),
    stream=sampled_from([io.BytesIO, NoSeek]),
)
def test_reads_are_slices_of_the_stream(
    data: bytes, jumps: list[tuple[int, int]], chunk_bytes: int, stream: type[io.BytesIO]
) -> None:
    read = ForwardReader(stream(data), chunk_bytes=chunk_bytes)
    offset = 0
    for jump, size in jumps:
        offset += jump
        assert read(offset, size) == data[offset : offset + size]
        assert read(offset, 1) == data[offset : offset + 1]


def test_reading_backwards_is_refused() -> None:
    read = ForwardReader(io.BytesIO(b"0123456789"))
    read(5, 1)
    with pytest.raises(ValueError, match="cannot go back from byte 5 to 4"):
        read(4, 1)


def test_long_skip_and_huge_size_use_bounded_memory() -> None:
    stream = OnlyForward(200_000_000)
    read = ForwardReader(stream, chunk_bytes=1 << 16)
    tracemalloc.start()
    assert read(199_999_000, 10) == bytes(10)
    assert read(199_999_990, 1 << 60) == bytes(10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert stream.largest <= 1 << 16


def test_long_skips_use_seek_on_seekable_streams() -> None:
    class Counting(io.BytesIO):
        taken = 0

        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            self.taken += len(data)
            return data

    stream = Counting(bytes(1_000_000) + b"end")
    read = ForwardReader(stream, chunk_bytes=1000)
    assert (read(0, 4), read(1_000_000, 3)) == (bytes(4), b"end")
    assert stream.taken <= 2000


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz", ".tar.zst"])
def test_samples_of_a_compressed_tar(suffix: str) -> None:
    tar = tar_bytes(samples(0, 3))
    data = {".tar": tar, ".tar.zst": zstandard.compress(tar)}.get(suffix) or gzip.compress(tar)
    with open_decompressed(io.BytesIO(data), shard=f"a{suffix}") as stream:
        found = [sample for _, sample in iter_samples(ForwardReader(stream), shard="a")]
    assert [(sample["__key__"], sample["cls"]) for sample in found] == [
        ("0000", b"0"),
        ("0001", b"1"),
        ("0002", b"2"),
    ]


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.zst"])
def test_damaged_compression_names_the_shard(suffix: str) -> None:
    with (
        open_decompressed(io.BytesIO(b"neither gzip nor zstd"), shard=f"a{suffix}") as stream,
        pytest.raises(ShardError, match=rf"damaged or cut .* \[in a{suffix}\]"),
    ):
        stream.read(100)


def test_cut_gzip_is_an_error() -> None:
    data = gzip.compress(tar_bytes(samples(0, 3)))[:-20]
    with (
        open_decompressed(io.BytesIO(data), shard="a.tar.gz") as stream,
        pytest.raises(ShardError, match="cut"),
    ):
        list(iter(lambda: stream.read(1 << 20), b""))
