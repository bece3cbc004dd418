"""Changes of a dataset on an S3 server."""

from __future__ import annotations

import pytest
import s3fs
from botocore.exceptions import EndpointConnectionError

import shardstream as ss
from shardstream.packing import CompactReport
from tests.small_datasets import numbered

pytest.importorskip("pyarrow")
N = 60


@pytest.mark.usefixtures("s3_env")
def test_delete_compact_and_gc(bucket: str) -> None:
    url = numbered(f"{bucket}/data", N, 10, columns=["cls"])
    gone = [0, 5, *range(20, 30), 59]
    left = [number for number in range(N) if number not in gone]
    assert ss.delete(url, numbers=gone).version == 2
    ss.versions.tag(url, "first", 1)
    assert ss.compact(url).removed == 1
    for version, expected in ((1, [*range(N)]), (2, left), (None, left)):
        dataset = ss.ShardDataset(url, version=version)
        assert [int(sample["cls"]) for sample in dataset] == expected
    report = ss.versions.gc(url, keep=1, dry_run=False)
    assert (report.removed, report.kept) == ([], [1, 2, 3])
    ss.versions.untag(url, "first")
    report = ss.versions.gc(url, keep=1, dry_run=False)
    assert (report.removed, report.kept) == ([1, 2], [3])
    assert any(name == "000000.tar" for name in report.files)
    assert [int(sample["cls"]) for sample in ss.ShardDataset(url)] == left
    assert ss.verify(url).problems == ()


@pytest.mark.usefixtures("s3_env")
@pytest.mark.filterwarnings("ignore:.*no conditional writes")  # Ceph 16, in such a bucket
@pytest.mark.parametrize("versioned", [False, True, None])
def test_gc_warns_that_a_bucket_keeps_deleted_bytes(
    bucket: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    versioned: bool | None,
) -> None:
    url = numbered(f"{bucket}/data", N, 10)
    ss.delete(url, numbers=[0])
    ss.compact(url)
    if versioned is None:  # the client cannot ask

        def fail(*_: object) -> bool:
            raise EndpointConnectionError(endpoint_url="")

        monkeypatch.setattr(s3fs.S3FileSystem, "is_bucket_versioned", fail)
    if versioned:
        s3fs.S3FileSystem(skip_instance_cache=True).make_bucket_versioned(bucket[5:])
    assert "000000.tar" in ss.versions.gc(url, keep=1, dry_run=False).files
    assert ("the bytes of deleted files stay" in caplog.text) is bool(versioned)


@pytest.mark.usefixtures("s3_env")
def test_a_compaction_that_comes_second_leaves_no_records(bucket: str) -> None:
    url = numbered(f"{bucket}/data", N, 10)
    ss.delete(url, numbers=[3, 33])
    others: list[CompactReport] = []

    def compact_too(_: object) -> None:
        if not others:
            others.append(ss.compact(url))

    second = ss.compact(url, threads=1, progress=compact_too)
    assert ([other.samples for other in others], second.samples) == ([2], 0)
    assert ss.verify(url).problems == ()
