"""Functions for one sample or one shard: `decode_sample`, `read_shard`, `write_shard`."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

import shardstream as ss
from tests.servers import S3Server, new_bucket

SAMPLES = [
    {"__key__": f"{n:03}", "cls": n, "json": {"n": n}, "npy": np.full(3, n)} for n in range(5)
]


def test_shard_is_written_with_an_index_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    assert ss.packing.write_shard(path, SAMPLES) == 5
    assert len(ss.ShardDataset(path, read=ss.ReadOptions(index="require"))) == 5
    decoded = [ss.decode_sample(sample) for sample in ss.catalog.read_shard(path)]
    assert [(one["__key__"], one["cls"], one["json"]["n"]) for one in decoded] == [
        (f"{n:03}", n, n) for n in range(5)
    ]
    packed = tmp_path / "b.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with packed.open("rb") as stream:
        assert [one["cls"] for one in ss.catalog.read_shard(stream)] == [
            b"%d" % n for n in range(5)
        ]


def test_remote_shard_is_written_and_read(s3: S3Server) -> None:
    with new_bucket(s3) as bucket:
        url, options = f"s3://{bucket}/a.tar", s3.storage_options
        assert ss.packing.write_shard(url, SAMPLES, storage_options=options) == 5
        assert len(list(ss.catalog.read_shard(url, storage_options=options))) == 5


def test_bad_input_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ss.errors.OptionError, match="ends in .tar"):
        ss.packing.write_shard(tmp_path / "a.zip", SAMPLES)
    with pytest.raises(ss.errors.SampleError, match="no samples"):
        ss.packing.write_shard(tmp_path / "a.tar", [])
    with pytest.raises(ss.errors.SampleError, match="__key__"):
        ss.packing.write_shard(tmp_path / "a.tar", [{"cls": 1}])
    with pytest.raises(ss.errors.SampleError, match="in the shard already"):
        ss.packing.write_shard(tmp_path / "a.tar", SAMPLES * 2)
    assert not list(tmp_path.iterdir())
    cut = tmp_path / "cut.tar"
    ss.packing.write_shard(cut, SAMPLES)
    cut.write_bytes(cut.read_bytes()[:1800])
    with pytest.raises(ss.errors.ShardError, match="cut"):
        list(ss.catalog.read_shard(cut))
    with pytest.raises(ss.errors.NotFoundError, match="not found"):
        list(ss.catalog.read_shard(tmp_path / "none.tar"))


def test_sample_is_decoded_as_in_a_dataset() -> None:
    assert ss.decode_sample({"cls": b"3", "x.cls": b"4"}, only="cls") == {"cls": 3, "x.cls": b"4"}
    assert ss.decode_sample({"x": b"3"}, fields={"x": int}) == {"x": 3}
    with pytest.raises(ss.errors.DecodeError, match="field 'cls'"):
        ss.decode_sample({"cls": b"x"})
    with pytest.raises(ss.errors.OptionError, match="one image name"):
        ss.decode_sample({}, "rgb8", "l8")
