"""Test that tars can be read by other tools, and contain no part of a refused sample."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.errors import SampleError
from shardstream.format import ShardInfo, scan_shard
from shardstream.packing import TarShard, sample_pieces

Samples = dict[str, dict[str, bytes]]

_PART = st.text(
    st.characters(exclude_characters="/.\0", exclude_categories=["Cs"]), min_size=1, max_size=60
).filter(lambda part: not part.startswith("_"))
_KEYS = st.lists(_PART, min_size=1, max_size=4).map("/".join)
_FIELDS = st.text(st.sampled_from("abc.1_é"), min_size=1, max_size=12).filter(
    lambda field: field == field.lower()
)


def add(shard: TarShard, key: str, fields: dict[str, bytes]) -> None:
    shard.add(key, fields, sample_pieces(key, fields))


def write(samples: Samples) -> tuple[bytes, TarShard, ShardInfo]:
    out = io.BytesIO()
    shard = TarShard(out, url="a.tar")
    for key, fields in samples.items():
        add(shard, key, fields)
    info = shard.finish()
    return out.getvalue(), shard, info


@given(
    st.dictionaries(
        _KEYS,
        st.dictionaries(_FIELDS, st.binary(max_size=1100), min_size=1, max_size=4),
        max_size=5,
    )
)
def test_tarfile_and_shardstream_read_the_shard(samples: Samples) -> None:
    data, shard, info = write(samples)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = []
        for member in tar:
            stream = tar.extractfile(member)
            assert stream is not None
            found.append((member.name, stream.read()))
            assert (member.mtime, member.uid, member.gid, member.mode) == (0, 0, 0, 0o644)
    assert found == [
        (f"{key}.{field}", body)
        for key, fields in samples.items()
        for field, body in fields.items()
    ]
    scan = scan_shard(lambda at, size: data[at : at + size], end=len(data), shard="a.tar")
    assert scan.keys == list(samples)
    assert scan.fields == shard.fields
    assert scan.offsets.tolist() == shard.offsets.tolist()
    assert info == ShardInfo(
        url="a.tar",
        nsamples=len(samples),
        filesize=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def test_gnu_tar_lists_the_shard(tmp_path: Path) -> None:
    tar = shutil.which("tar")
    assert tar is not None
    long_key = "long/" + "k" * 200
    (tmp_path / "a.tar").write_bytes(
        write({"0001": {"txt": b"hi"}, long_key: {"bin": bytes(700)}})[0]
    )
    done = subprocess.run(
        [tar, "-tvf", tmp_path / "a.tar"], capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in done.stdout.splitlines()] == [
        "0001.txt",
        f"{long_key}.bin",
    ]
    assert done.stderr == ""


@pytest.mark.filterwarnings("ignore")
def test_webdataset_reads_the_shard(tmp_path: Path) -> None:
    import webdataset  # noqa: PLC0415  (slow to import)

    samples = {f"{i:04d}": {"txt": b"%d" % i, "seg.png": bytes(i * 100)} for i in range(20)}
    (tmp_path / "a.tar").write_bytes(write(samples)[0])
    dataset = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False, empty_check=False)
    found = {
        sample["__key__"]: {"txt": sample["txt"], "seg.png": sample["seg.png"]}
        for sample in dataset
    }
    assert found == samples


@pytest.mark.parametrize(
    ("key", "fields", "message"),
    [
        ("a.b", {"txt": b""}, r"'a\.b' would be read as another key; use 'a_b'"),
        ("", {"txt": b""}, "needs a name"),
        ("a/", {"txt": b""}, "needs a name"),
        ("../a", {"txt": b""}, "relative path"),
        ("/a", {"txt": b""}, "relative path"),
        ("a\0b", {"txt": b""}, "NUL"),
        ("__a__/b", {"txt": b""}, "readers skip"),
        ("__a", {"txt": b"", "b__": b""}, "readers skip"),
        ("a", {"JPG": b""}, "write 'jpg'"),
        ("a", {"txt": b"", "Cls": b""}, "write 'cls'"),
        ("a", {"x/y": b""}, "key|slash"),
        ("a", {"txt": b"", "x/y": b""}, "key|slash"),
        ("a", {"__key__": b""}, "reserved"),
        ("a", {"": b""}, "rename it"),
        ("a", {}, "without fields"),
        ("0001", {"txt": b"again"}, "in the shard already"),
    ],
)
def test_sample_that_does_not_round_trip_is_refused_completely(
    key: str, fields: dict[str, bytes], message: str
) -> None:
    out = io.BytesIO()
    shard = TarShard(out, url="a.tar")
    add(shard, "0001", {"txt": b"first"})
    with pytest.raises(SampleError, match=message):
        add(shard, key, fields)
    add(shard, "0002", {"txt": b"last"})
    shard.finish()
    assert out.getvalue() == write({"0001": {"txt": b"first"}, "0002": {"txt": b"last"}})[0]


def test_large_bodies_are_written_without_a_copy() -> None:
    large = bytes(9 << 20)
    data, _, info = write({"a": {"bin": large, "txt": b"x"}})
    assert info.sha256 == hashlib.sha256(data).hexdigest()
    assert data.count(b"ustar") == 2


def test_bytes_of_a_shard_are_pinned() -> None:
    data, _, _ = write({"0001": {"txt": b"hello", "cls": b"3"}, "é": {"json": b"{}"}})
    assert (
        hashlib.sha256(data).hexdigest()
        == "1e46426a1d14243a2e6be998a23ba3238f9a850a2edc8e77ac5ef3eca6161ae9"
    )


def test_cached_fields_are_checked_for_every_key() -> None:
    sample_pieces("a", {"txt": b"", "cls": b""})
    with pytest.raises(SampleError, match="another key"):
        sample_pieces("a.b", {"txt": b"", "cls": b""})
