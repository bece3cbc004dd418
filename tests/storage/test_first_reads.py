"""Test that the first read of a manifest needs no S3 client, and that clients handle all other cases."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import StorageError
from shardstream.storage import Storage, publish_bytes, remove
from tests.raw_server import Request, raw_server
from tests.servers import S3Server

MOST = 1 << 20

SAY = """
import sys
import shardstream as ss
for url in sys.argv[1:]:
    dataset = ss.ShardDataset(url, read=ss.ReadOptions(index="require"))
    print(len(dataset), *sorted({"s3fs"} & {*sys.modules}))
print(sum(1 for _ in dataset), "s3fs" in sys.modules)
"""


def look(
    url: str, *more: str, say: str = SAY, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Open a dataset in a new process."""
    return subprocess.run(
        [sys.executable, "-c", say, url, *more],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def packed(bucket: str, s3_env: None) -> str:
    with ss.ShardWriter(f"{bucket}/a b/", max_samples=5) as writer:
        for number in range(12):
            writer.write({"__key__": f"{number}", "txt": "x"})
    return f"{bucket}/a b"


def test_dataset_opens_without_a_storage_client(packed: str) -> None:
    done = look(packed, f"{packed}/")
    assert done.stdout.split("\n")[:3] == ["12", "12", "12 False"], done.stderr


@pytest.mark.slow
def test_client_reads_a_folder_without_index_or_manifest(packed: str) -> None:
    storage = Storage()
    remove(storage, f"{packed}/000002.tar.idx")  # as after a stopped run of 'shardstream index'
    assert "no index; run 'shardstream index'" in look(packed).stderr
    remove(storage, f"{packed}/index.json")
    assert "no index; run 'shardstream index'" in look(packed).stderr
    publish_bytes(storage, f"{packed}/index.json", b"[]")
    assert "ManifestError" in look(packed).stderr


@pytest.mark.slow
@pytest.mark.usefixtures("ceph")
def test_client_reports_a_denied_access(packed: str) -> None:
    done = look(packed, AWS_SECRET_ACCESS_KEY="not-the-secret")  # noqa: S106  (it is none)
    assert "AccessDeniedError" in done.stderr
    assert "SignatureDoesNotMatch" in done.stderr
    assert "not-the-secret" not in done.stderr


def open_storage(endpoint: str, **options: Any) -> Storage:
    return Storage({"key": "some", "secret": "thing", "endpoint_url": endpoint, **options})


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n0123456789",
        b"HTTP/1.1 200 OK\r\n\r\n0123456789",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0123456789",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
        b"",
    ],
)
def test_response_that_is_not_the_file_is_an_error(answer: bytes) -> None:
    with raw_server(lambda _: answer) as server, pytest.raises(StorageError):
        open_storage(server.url, retry_timeout_s=0.1).read("s3://b/key", max_bytes=MOST)


WITH_CACHE = """
import sys
import shardstream as ss
dataset = ss.ShardDataset(sys.argv[1], read=ss.ReadOptions(cache_dir=sys.argv[2], cache_bytes="100MB"))
catalog = dataset.pipeline.source.samples
print(*[catalog.storage.cache.etag(shard.url) is not None for shard in catalog.shards])
"""


@pytest.mark.slow
def test_cache_records_all_versions_at_once(packed: str, tmp_path: Path) -> None:
    """Otherwise each worker would look up each file, and would not notice a file that was replaced."""
    done = look(packed, str(tmp_path), say=WITH_CACHE)
    assert done.stdout.split() == ["True"] * 3, done.stderr


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
def test_server_that_sends_slowly_or_nothing_times_out(begin: bytes, piece: bytes) -> None:
    """Each byte arrives within the timeout; all of them would take hours."""

    def drip(_: Request) -> Iterator[bytes]:
        yield begin
        while True:
            time.sleep(0.01)
            yield piece

    with raw_server(drip) as server:
        storage = open_storage(server.url, read_timeout_s=0.1, retry_timeout_s=0.1)
        with pytest.raises(StorageError):
            storage.read("s3://b/key", max_bytes=MOST)


NAMES = [
    "plain",
    "a b",
    "~tilde+plus",
    "ümlaut",
    "percent%41",
    "q?x=1&y#z",
    "a,b;c=d:e@f!$'()*",
    "x\\y",
]


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_any_name_are_signed_correctly(name: str, bucket: str, s3: S3Server) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket.removeprefix("s3://"), Key=name, Body=b"12")
    client.close()
    storage = Storage(s3.storage_options)
    assert storage.read(f"{bucket}/{name}", max_bytes=MOST) == b"12"


@pytest.mark.slow
def test_home_folder_and_profile_are_not_required(tmp_path: Path, packed: str) -> None:
    done = look(packed, HOME=str(tmp_path))
    assert done.stdout.startswith("12\n"), done.stderr


@pytest.mark.slow
def test_index_that_does_not_match_is_reported_when_it_is_read(packed: str) -> None:
    publish_bytes(Storage(), f"{packed}/000001.tar.idx", b"12345678" * 6)
    done = look(packed)
    assert done.stdout.startswith("12\n")
    assert "IndexMismatchError" in done.stderr


@pytest.mark.parametrize("name", ["", "index.json"])
def test_an_index_that_is_missing_in_between_is_an_error_that_names_it(
    bucket: str, s3_env: None, name: str
) -> None:
    with ss.ShardWriter(f"{bucket}/gap", max_samples=5) as writer:
        for number in range(15):
            writer.write({"__key__": f"{number:02d}", "txt": str(number)})
    remove(Storage(), f"{bucket}/gap/000001.tar.idx")
    with pytest.raises(StorageError, match=r"000001\.tar\.idx"):
        list(ss.ShardDataset(f"{bucket}/gap/{name}"))
