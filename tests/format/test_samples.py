from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

from shardstream.errors import IndexMismatchError, SampleError, ShardError
from shardstream.format import (
    END_OF_ARCHIVE,
    Group,
    ReadAt,
    encode_member,
    iter_groups,
    iter_members,
    iter_samples,
    member_name,
    read_sample,
)
from tests.strategies import Archive, Entry, archives, make_archive, raw_samples

SHARD = "s3://b/train-0007.tar"


def reader(data: bytes) -> ReadAt:
    return lambda offset, size: data[offset : offset + size]


def write_shard(samples: list[dict[str, Any]]) -> bytes:
    return b"".join(
        bytes(piece)
        for sample in samples
        for field, value in sample.items()
        if field != "__key__"
        for piece in encode_member(member_name(sample["__key__"], field), value)
    ) + (END_OF_ARCHIVE)


def tar_of(*names: str) -> bytes:
    return b"".join(bytes(p) for name in names for p in encode_member(name, name.encode()))


def read_samples(data: bytes, *, end_known: bool = True) -> list[dict[str, Any]]:
    end = len(data) if end_known else None
    return [sample for _, sample in iter_samples(reader(data), end=end, shard=SHARD)]


def read_with_webdataset(data: bytes) -> list[dict[str, Any]]:
    source = {"url": SHARD, "stream": io.BytesIO(data)}
    return list(group_by_keys(tar_file_expander([source])))


def without_dot_files(data: bytes) -> bytes:
    """Omit files whose name begins with a dot, the only difference from WebDataset."""
    buffer = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8") as source,
        tarfile.open(fileobj=buffer, mode="w", encoding="utf-8") as target,
    ):
        for info in source:
            if not info.name.rsplit("/", 1)[-1].startswith("."):
                target.addfile(info, source.extractfile(info) if info.isreg() else None)
    return buffer.getvalue()


crowded_names = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "", "", "d/", "v1.0/", "__m__/", "./"]),
    st.sampled_from(["a", "b", "c", "__a__", "é", ".h", ""]),
    st.sampled_from([".x", ".X", ".y", ".y.z", ".", "", "..x", ".__key__"]),
).filter(lambda name: name.strip("/.") != "" and not name.endswith("/"))
crowded_tars = st.lists(crowded_names.map(lambda name: Entry(name=name, data=name.encode())), max_size=9)  # fmt: skip


@settings(max_examples=60)
@given(archive=crowded_tars.map(lambda put: make_archive(put, form="gnu")) | archives())
def test_samples_match_webdataset_except_dot_files(archive: Archive) -> None:
    expected: list[dict[str, Any]] | None
    try:
        expected = read_with_webdataset(without_dot_files(archive.data))
    except ValueError:  # a field twice
        expected = None
    else:
        keys = [sample["__key__"] for sample in expected]
        if len(set(keys)) < len(keys):  # a repeated key, which only shardstream refuses
            expected = None
    if expected is None:
        with pytest.raises(SampleError, match=r"field twice|returns after"):
            read_samples(archive.data)
    else:
        assert read_samples(archive.data) == expected
        assert read_samples(archive.data, end_known=False) == expected


@settings(max_examples=60)
@given(samples=raw_samples())
def test_samples_round_trip(samples: list[dict[str, Any]]) -> None:
    data = write_shard(samples)
    expected = [sample | {"__url__": SHARD} for sample in samples]
    assert read_samples(data) == expected == read_with_webdataset(data)


@settings(max_examples=60)
@given(samples=raw_samples())
def test_each_sample_can_be_read_alone_by_its_offsets(samples: list[dict[str, Any]]) -> None:
    data = write_shard(samples)
    groups = [group for group, _ in iter_samples(reader(data), end=len(data), shard=SHARD)]
    for group, sample in zip(groups, samples, strict=True):
        assert read_sample(data, 0, group.start, group.end, SHARD) == sample | {"__url__": SHARD}  # fmt: skip
        rest = iter_samples(reader(data), start=group.start, end=len(data), shard=SHARD)
        assert next(rest)[0] == group


@pytest.mark.filterwarnings("ignore:.*a.tar:pytest.PytestUnraisableExceptionWarning")
def test_webdataset_reads_written_shards(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"v1.0/{number:03d}", "jpg": bytes([number]), "seg.png": b"2" * 700}
        for number in range(20)
    ] + [{"__key__": "n" * 150, "txt": "é".encode()}]
    path = tmp_path / "a.tar"
    path.write_bytes(write_shard(samples))
    found = wds.WebDataset(str(path), shardshuffle=False)
    assert [without_bookkeeping(sample) for sample in found] == samples


@pytest.mark.parametrize("long", [False, True])
def test_shards_of_webdataset_are_read(tmp_path: Path, *, long: bool) -> None:
    samples: list[dict[str, Any]] = [
        {"__key__": ("k" * 120 if long else "v1.0/x") + f"{number:03d}", "cls": number, "jpg": b"2"}
        for number in range(20)
    ]
    with wds.TarWriter(str(tmp_path / "a.tar")) as writer:
        for sample in samples:
            writer.write(sample)
    expected = [sample | {"cls": b"%d" % sample["cls"], "__url__": SHARD} for sample in samples]
    assert read_samples((tmp_path / "a.tar").read_bytes()) == expected


def test_shards_of_webdatasets_shard_writer_are_read(tmp_path: Path) -> None:
    with wds.ShardWriter(str(tmp_path / "%03d.tar"), maxcount=3, verbose=0) as writer:
        for number in range(7):
            writer.write({"__key__": f"{number}", "txt": f"{number}"})
    shards = sorted(tmp_path.iterdir())
    found = [[sample["txt"] for sample in read_samples(path.read_bytes())] for path in shards]
    assert found == [[b"0", b"1", b"2"], [b"3", b"4", b"5"], [b"6"]]


def test_members_without_a_field_are_skipped() -> None:
    data = tar_of(
        "README", "a.x", "NOTES", "a.y", ".DS_Store", "__index__/i.json", "b.x", "LICENSE"
    )
    assert [list(sample) for sample in read_samples(data)] == [
        ["__key__", "__url__", "x", "y"],
        ["__key__", "__url__", "x"],
    ]
    assert [(group.key, group.start) for group in iter_groups(iter_members(reader(data), end=len(data)))] == [
        ("a", 1024),
        ("b", 6 * 1024),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "message", "offset"),
    [
        (
            ["a.x", "b.x", "a.y"],
            r"key returns after .*one after another.*train-0007.*sample 'a'",
            2048,
        ),
        (["a.x", "a.X"], r"field twice .*sample 'a', field 'x'", 1024),
        (["a.x", "b.x", "b.x"], r"field twice .*sample 'b', field 'x'", 2048),
        (["a.__key__"], r"field '__key__'", 0),
        (["a.x", "a.__URL__"], r"field '__url__'", 1024),
    ],
)
def test_tars_that_would_lose_samples_are_refused(
    names: list[str], message: str, offset: int
) -> None:
    with pytest.raises(SampleError, match=message) as raised:
        read_samples(tar_of(*names))
    assert (raised.value.shard, raised.value.offset) == (SHARD, offset)


@pytest.mark.parametrize(
    ("start", "end", "error", "message"),
    [
        (0, 4096, IndexMismatchError, r"two samples, 'a' and 'b'.*'shardstream index'"),
        (0, 1024, None, ""),
        (4096, 4096, IndexMismatchError, "no sample"),
        (3072, 4096, IndexMismatchError, "no sample"),  # only README
        (512, 2048, ShardError, "checksum is wrong"),
        (0, 700, IndexMismatchError, "a.x continues after its end"),
        (4096, 9999, ShardError, "the tar is cut: 0 of 5903 bytes"),
    ],
)
def test_extent_that_is_not_one_sample_is_refused(
    start: int, end: int, error: type[Exception] | None, message: str
) -> None:
    data = tar_of("a.x", "a.y", "b.x", "README")
    if error is None:
        assert set(read_sample(data, 0, start, end, SHARD)) == {"__key__", "__url__", "x"}
        return
    with pytest.raises(error, match=message) as raised:
        read_sample(data, 0, start, end, SHARD)
    assert getattr(raised.value, "shard", None) == SHARD


def test_truncated_body_in_a_stream_is_refused() -> None:
    data = tar_of("a.x", "b.x")[: 1024 + 512 + 1]
    samples = iter_samples(reader(data), shard=SHARD)
    with pytest.raises(ShardError, match=r"is cut: 1 of 3 bytes of b\.x; .*at byte 1024"):
        list(samples)


def test_group_holds_only_offsets() -> None:
    data = tar_of("a.x", "a.y")
    groups = list(iter_groups(iter_members(reader(data), end=len(data)), shard=SHARD))
    assert groups == [Group("a", 0, 2048, {"x": (512, 3), "y": (1536, 3)})]


def without_bookkeeping(sample: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in sample.items() if k not in ("__url__", "__local_path__")}
