"""Test that the first read of a manifest needs no S3 client, and that clients handle all other cases."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import shardstream as ss
from shardstream.storage import (
    S3Settings,
    Storage,
    locate_shards,
    publish_bytes,
    read_small_files,
    remove,
)
from tests.limits import set_limits
from tests.raw_server import file_response, raw_server
from tests.servers import S3Server

MOST = 1 << 20

SAY = """
import sys
import shardstream as ss
for url in sys.argv[1:]:
    dataset = ss.ShardDataset(url, index="require")
    print(len(dataset), *sorted({"s3fs", "obstore"} & {*sys.modules}))
    print(len(dataset.pipeline.source.catalog._kept))
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
    assert done.stdout.split("\n")[:5] == ["12", "3", "12", "3", "12 False"], done.stderr


@pytest.mark.slow
def test_client_reads_a_folder_without_index_or_manifest(packed: str) -> None:
    storage = Storage()
    remove(storage, f"{packed}/000002.tar.idx")  # as after a stopped run of 'shardstream index'
    assert "no index; run 'shardstream index'" in look(packed).stderr
    remove(storage, f"{packed}/index.json")
    assert "no index; run 'shardstream index'" in look(packed).stderr
    publish_bytes(storage, f"{packed}/index.json", b"[]")
    assert "ManifestError" in look(packed).stderr


@pytest.mark.usefixtures("ceph")
def test_client_reports_a_denied_access(packed: str) -> None:
    done = look(packed, AWS_SECRET_ACCESS_KEY="not-the-secret")  # noqa: S106  (it is none)
    assert "AccessDeniedError" in done.stderr
    assert "SignatureDoesNotMatch" in done.stderr
    assert "not-the-secret" not in done.stderr


@pytest.fixture
def settings(s3: S3Server) -> S3Settings:
    keys = {"access_key_id": s3.access_key, "secret_access_key": s3.secret_key, "token": None}
    return S3Settings(region=s3.region, endpoint=s3.endpoint, credentials=lambda: keys)


@pytest.mark.usefixtures("s3_env")
def test_unusual_settings_and_keys_use_the_storage_client(
    bucket: str, settings: S3Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{bucket.removeprefix('s3://')}/file"
    publish_bytes(Storage(), f"{bucket}/file", b"12")
    assert read_small_files(settings, [path], MOST) == [b"12"]
    assert read_small_files(settings, [path] * 20, MOST) == [b"12"] * 20
    missing = f"{path}-none"
    assert read_small_files(settings, [path, missing, path], MOST) == [b"12", None, None]
    for change in (
        {"verify": False},
        {"virtual_hosts": True},
        {"requester_pays": True},
        {"credentials": None},
        {"anonymous": True},  # the server refuses this request
    ):
        assert read_small_files(replace(settings, **change), [path], MOST) == [None]
    for odd in (f"{path}/../file", f"{path}//", "./x"):
        assert read_small_files(settings, [odd], MOST) == [None]
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert read_small_files(settings, [path], MOST) == [None]
    monkeypatch.delenv("HTTP_PROXY")
    assert read_small_files(settings, [path], 2) == [b"12"]
    assert read_small_files(settings, [path], 1) == [None]


def test_files_are_read_from_a_server_that_closes_each_connection(settings: S3Settings) -> None:
    """More than are requested at the same time."""
    paths = [f"bucket/{number}" for number in range(20)]
    with raw_server(lambda request: file_response(request, request.target.encode())) as server:
        found = read_small_files(replace(settings, endpoint=server.url), paths, MOST)
    assert found == [f"/{path}".encode() for path in paths]


@pytest.mark.parametrize(
    ("endpoint", "region"),
    [
        ("http://user:hunter2@127.0.0.1:9", "us-east-1"),
        ("127.0.0.1:9", "us-east-1"),
        ("127.0.0.1", "us-east-1"),
        ("http://:9", "us-east-1"),
        ("ftp://127.0.0.1:9", "us-east-1"),
        ("http://127.0.0.1:9/?x=1", "us-east-1"),
        ("http://127.0.0.1:9/#x", "us-east-1"),
        (None, "elsewhere.example/x"),
        (None, "x@elsewhere.example"),
        (None, "us-east-1\r\nX: y"),
    ],
)
def test_no_request_is_sent_to_an_unusual_endpoint(
    endpoint: str | None, region: str, settings: S3Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def connect(address: tuple[str, int], *_: object) -> None:
        asked.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    assert read_small_files(
        replace(settings, endpoint=endpoint, region=region), ["b/key"], MOST
    ) == [None]
    assert asked == []


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 10\r\n\r\n",
    ],
)
def test_response_of_another_length_is_none(head: bytes, settings: S3Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection = server.accept()[0]
            with connection:
                connection.recv(1 << 16)
                connection.sendall(head + b"0123456789")

        thread = threading.Thread(target=answer)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert read_small_files(replace(settings, endpoint=endpoint), ["b/key"], MOST) == [None]
        thread.join()


WITH_CACHE = """
import sys
import shardstream as ss
dataset = ss.ShardDataset(sys.argv[1], cache_dir=sys.argv[2], cache_bytes="100MB")
catalog = dataset.pipeline.source.catalog
print(*[catalog.storage.cache.etag(shard.url) is not None for shard in catalog.shards])
"""


def test_cache_records_all_versions_at_once(packed: str, tmp_path: Path) -> None:
    """Otherwise each worker would look up each file, and would not notice a file that was replaced."""
    done = look(packed, str(tmp_path), say=WITH_CACHE)
    assert done.stdout.split() == ["True"] * 3, done.stderr


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_server_that_sends_nothing_times_out(silent: str, settings: S3Settings) -> None:
    assert read_small_files(
        replace(settings, endpoint=silent, read_timeout_s=0.1), ["b/key"], MOST
    ) == [None]


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
def test_server_that_sends_slowly_times_out(
    begin: bytes, piece: bytes, settings: S3Settings
) -> None:
    """Each byte arrives within the timeout; all of them would take hours."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection = server.accept()[0]
            with connection, suppress(OSError):
                connection.sendall(begin)
                while not ended.wait(0.01):
                    connection.sendall(piece)

        thread = threading.Thread(target=drip)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        slow = replace(settings, endpoint=endpoint, read_timeout_s=0.1)
        assert read_small_files(slow, ["b/key"], MOST) == [None]
        ended.set()
        thread.join()


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
def test_keys_of_any_name_are_signed_correctly(
    name: str, bucket: str, s3: S3Server, settings: S3Settings
) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket.removeprefix("s3://"), Key=name, Body=b"12")
    client.close()
    path = f"{bucket.removeprefix('s3://')}/{name}"
    assert read_small_files(settings, [path], MOST) == [b"12"]


@pytest.mark.slow
def test_home_folder_and_profile_are_not_required(tmp_path: Path, packed: str) -> None:
    done = look(packed, HOME=str(tmp_path))
    assert done.stdout.startswith("12\n"), done.stderr


@pytest.mark.slow
def test_index_that_does_not_match_is_reported_when_it_is_read(packed: str) -> None:
    publish_bytes(Storage(), f"{packed}/000001.tar.idx", b"12345678" * 6)
    done = look(packed)
    assert done.stdout.startswith("12\n2\n")
    assert "IndexMismatchError" in done.stderr


@pytest.mark.parametrize("limit", ["INDEXES", "INDEXES_BYTES"])
def test_many_or_large_indexes_are_read_by_the_workers(
    limit: str, packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, locate_shards, **{limit: 2})
    seen: list[str] = []

    def read_small_files(storage: Storage, urls: Sequence[str], *, max_bytes: int) -> list[bytes]:
        seen.extend(urls)
        return [storage.read(url, max_bytes=max_bytes) for url in urls]

    monkeypatch.setattr(Storage, "read_small_files", read_small_files)
    assert len(ss.ShardDataset(packed)) == 12
    assert [url.rpartition("/")[2] for url in seen] == ["index.json", "000002.tar.idx"]
