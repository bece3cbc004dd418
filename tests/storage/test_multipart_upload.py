"""Test that multipart uploads to S3 are atomic, checked and retried, and leave nothing unfinished."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import s3fs
from botocore.exceptions import ClientError

from shardstream.errors import AccessDeniedError, StorageError
from shardstream.packing import ShardWriter
from shardstream.storage import (
    PART_BYTES,
    S3Object,
    S3Upload,
    Storage,
    may_be_md5,
    open_pending,
    publish,
    publish_bytes,
    remove_all,
)
from tests.proxy import spoiling
from tests.raw_server import Request, raw_server, response
from tests.servers import S3Server, ShapedS3

ROOT = Path(__file__).parents[2]
DATA = random.Random(0).randbytes(2 * PART_BYTES + PART_BYTES // 2)  # two and a half parts


@pytest.fixture
def uploads(s3: S3Server, bucket: str) -> Iterator[Callable[[], list[str]]]:
    """Return a function that lists the keys of unfinished uploads."""
    client = s3.client()
    name = bucket.removeprefix("s3://")
    yield lambda: [
        upload["Key"] for upload in client.list_multipart_uploads(Bucket=name).get("Uploads", ())
    ]
    client.close()


def write_in_pieces(stream: Any, data: bytes, piece_bytes: int) -> None:
    for at in range(0, len(data), piece_bytes):
        stream.write(data[at : at + piece_bytes])


@pytest.fixture
def storage(s3: S3Server) -> Storage:
    return Storage(s3.storage_options)


@pytest.mark.parametrize(
    ("size", "parts"),
    [(1, 1), (PART_BYTES, 1), (PART_BYTES + 1, 2), (3 * PART_BYTES, 3)],
)
def test_parts_are_joined_to_the_file(
    size: int, parts: int, storage: Storage, bucket: str, uploads: Callable[[], list[str]]
) -> None:
    data = (DATA * 2)[:size]
    with publish(storage, f"{bucket}/a/x.tar") as stream:
        write_in_pieces(stream, data, 1_000_003)
        assert not storage.exists(f"{bucket}/a/x.tar")
    assert storage.read(f"{bucket}/a/x.tar") == data
    assert uploads() == []
    filesystem, path = storage.resolve(f"{bucket}/a/x.tar")
    info = filesystem.info(path)
    assert info["ContentType"] == "application/x-tar"
    assert ("-" in info["ETag"]) == (parts > 1)


def test_buffer_can_be_reused_after_write(storage: Storage, bucket: str) -> None:
    buffer = bytearray(3 << 20)
    pending = open_pending(storage, f"{bucket}/x")
    for i in range(5):
        buffer[:] = bytes([i]) * len(buffer)
        pending.write(memoryview(buffer))
    pending.commit()
    pending.discard()
    expected = b"".join(bytes([i]) * len(buffer) for i in range(5))
    assert storage.read(f"{bucket}/x") == expected


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_aborted_upload_leaves_nothing(
    error: type[BaseException], storage: Storage, bucket: str, uploads: Callable[[], list[str]]
) -> None:
    def write() -> None:
        with publish(storage, f"{bucket}/x.tar") as stream:
            stream.write(DATA)
            raise error

    with pytest.raises(error):
        write()
    assert uploads() == []
    assert not storage.exists(f"{bucket}/x.tar")
    assert not [t for t in threading.enumerate() if t.name.startswith("shardstream-part")]


def test_publishing_a_file_does_not_abort_the_upload_of_another_writer(
    storage: Storage, bucket: str, uploads: Callable[[], list[str]]
) -> None:
    with publish(storage, f"{bucket}/x") as first:
        first.write(DATA)
        while not uploads():
            time.sleep(0.01)
        with publish(storage, f"{bucket}/x") as second:
            second.write(DATA[::-1])
        assert storage.read(f"{bucket}/x") == DATA[::-1]
    assert storage.read(f"{bucket}/x") == DATA
    assert uploads() == []


def test_memory_is_bounded_for_files_of_any_size(storage: Storage, bucket: str) -> None:
    piece = bytes(1 << 20)
    publish_bytes(storage, f"{bucket}/warm", b"")
    tracemalloc.start()
    try:
        with publish(storage, f"{bucket}/x") as stream:
            for _ in range(120):
                stream.write(bytearray(piece))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Five parts of 8 MiB, the client's copies of four, and a copy of one while it is joined.
    assert peak < 100 << 20
    assert storage.info(f"{bucket}/x").size == 120 << 20


# --- faults


@pytest.mark.slow
def test_throttled_requests_are_retried(
    shaped_s3: ShapedS3, bucket: str, storage: Storage, uploads: Callable[[], list[str]]
) -> None:
    shaped_s3.control("/set?profile=chaos&slow=0.3&reset=0&trunc=0&stall=0&seed=5")
    chaotic = Storage(shaped_s3.chaos.storage_options)
    for number in range(3):
        with publish(chaotic, f"{bucket}/{number}.tar") as stream:
            write_in_pieces(stream, DATA, 1 << 20)
        assert storage.read(f"{bucket}/{number}.tar") == DATA
    assert '"slow":' in shaped_s3.control("/stats")
    assert uploads() == []


def test_server_that_stays_busy_is_an_error_and_its_upload_is_aborted_later(
    shaped_s3: ShapedS3,
    bucket: str,
    storage: Storage,
    uploads: Callable[[], list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    impatient = {"config_kwargs": {"retries": {"max_attempts": 0}}, "retry_timeout_s": 0.5}
    chaotic = Storage(shaped_s3.chaos.storage_options | impatient)
    shaped_s3.control("/set?profile=chaos&slow=0&reset=0&trunc=0&stall=0")
    pending = open_pending(chaotic, f"{bucket}/x.tar")
    pending.write(DATA)
    while not uploads():
        time.sleep(0.01)
    shaped_s3.control("/set?profile=chaos&slow=1")
    with pytest.raises(StorageError, match=r"x\.tar"):
        pending.commit()
    with caplog.at_level(logging.WARNING, logger="shardstream"):
        pending.discard()
    assert "an unfinished upload is left on the server" in caplog.text
    assert uploads() == ["x.tar"]
    for name, alone, left in (("x.tar", False, 1), ("x.ta", True, 1), ("x.tar", True, 0)):
        pending = open_pending(storage, f"{bucket}/{name}", is_only_writer=alone)
        pending.write(DATA)
        pending.commit()
        pending.discard()
        assert uploads() == ["x.tar"] * left


@pytest.mark.parametrize("data", [DATA[:1000], DATA], ids=["one request", "parts"])
def test_bytes_that_change_in_transit_are_refused_and_sent_again(
    data: bytes, s3: S3Server, bucket: str, storage: Storage
) -> None:
    def flip(request: str, number: int) -> str:
        return "flip" if request.startswith("PUT") and number == 0 else ""

    if s3.kind == "moto":
        pytest.skip("moto checks nothing")
    with spoiling(s3.endpoint, flip) as proxy:
        spoilt = Storage(replace(s3, endpoint=proxy.endpoint).storage_options)
        publish_bytes(spoilt, f"{bucket}/x", data)
    assert storage.read(f"{bucket}/x") == data
    puts = [request for request in proxy.requests if request.startswith("PUT")]
    assert len(puts) == 2 * len(set(puts)) > 0


@pytest.mark.parametrize("data", [DATA[:1000], DATA], ids=["one request", "parts"])
def test_damage_on_a_server_that_checks_nothing_is_found_by_its_etag(
    data: bytes, moto: S3Server
) -> None:
    plain = Storage(moto.storage_options)
    with spoiling(
        moto.endpoint, lambda request, _: "flip" if request.startswith("PUT") else ""
    ) as proxy:
        spoilt = Storage(replace(moto, endpoint=proxy.endpoint).storage_options)
        with pytest.raises(StorageError, match="other bytes arrived than were sent"):
            publish_bytes(spoilt, "s3://bucket/x", data)
    publish_bytes(plain, "s3://bucket/y", data)


class OtherETags(s3fs.S3FileSystem):  # type: ignore[misc]
    """A server whose ETags look like MD5s but are not."""

    async def _call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
        answer = await super()._call_s3(method, *arguments, **options)
        if method in ("put_object", "complete_multipart_upload", "head_object"):
            answer["ETag"] = '"' + "0" * 32 + '"'
        return answer


@pytest.mark.parametrize("data", [DATA[:1000], DATA], ids=["one request", "parts"])
def test_bytes_are_read_back_if_an_etag_is_another_digest(data: bytes, moto: S3Server) -> None:
    storage = Storage(filesystem=OtherETags(**moto.storage_options))
    publish_bytes(storage, "s3://bucket/z", data)
    assert storage.read("s3://bucket/z") == data


@pytest.mark.parametrize("data", [DATA[:1000], DATA], ids=["one request", "parts"])
def test_response_with_the_right_etag_needs_no_further_request(data: bytes, moto: S3Server) -> None:
    with spoiling(moto.endpoint, lambda *_: "") as proxy:
        watched = Storage(replace(moto, endpoint=proxy.endpoint).storage_options)
        publish_bytes(watched, "s3://bucket/x", data)
    methods = [request.split()[0] for request in proxy.requests]
    assert sorted(methods) == (["PUT"] if len(data) == 1000 else ["POST"] * 2 + ["PUT"] * 3)


def test_last_part_is_sent_when_a_file_ends(
    storage: Storage, s3: S3Server, bucket: str, uploads: Callable[[], list[str]]
) -> None:
    def arrived() -> list[int]:
        name = bucket.removeprefix("s3://")
        with closing(s3.client()) as client:
            return [
                part["Size"]
                for upload in client.list_multipart_uploads(Bucket=name).get("Uploads", ())
                for part in client.list_parts(
                    Bucket=name, Key="x", UploadId=upload["UploadId"]
                ).get("Parts", ())
            ]

    pending = open_pending(storage, f"{bucket}/x")
    try:
        pending.write(DATA)
        pending.end()
        until = time.monotonic() + 300
        while len(arrived()) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        assert arrived() == [PART_BYTES, PART_BYTES, len(DATA) - 2 * PART_BYTES]
        assert not storage.exists(f"{bucket}/x")
        pending.commit()
    finally:
        pending.discard()
    assert storage.read(f"{bucket}/x") == DATA
    assert uploads() == []


@pytest.mark.parametrize("protocol", ["http", "https"])
def test_answer_before_the_end_of_a_part_is_read(
    protocol: str, request: pytest.FixtureRequest
) -> None:
    """Two parts are told the region of their bucket at the same time, and then refused, while their bytes are on the way."""
    both = threading.Barrier(2)

    def answer(request: Request) -> bytes:
        if request.method == "POST":
            return response(200, b"<Result><UploadId>one</UploadId></Result>")
        if request.method == "DELETE":
            return response(204)
        if "/eu-x/" in request.headers["authorization"]:
            return response(403)
        both.wait(timeout=300)
        return response(301, x_amz_bucket_region="eu-x")

    certificate = request.getfixturevalue("certificate") if protocol == "https" else None
    with raw_server(answer, certificate) as server:
        options = {"key": "some", "secret": "thing", "endpoint_url": server.url}
        storage = Storage(options | {"client_kwargs": {"verify": False}})
        with pytest.raises(AccessDeniedError, match="access refused"):
            publish_bytes(storage, "s3://bucket/x", DATA[: 2 * PART_BYTES])
    parts = [one.headers["authorization"] for one in server.requests if one.method == "PUT"]
    assert sorted(one.split("/")[2] for one in parts) == ["eu-x"] * 2 + ["us-east-1"] * 2


def test_full_shard_is_uploaded_before_its_publication(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[S3Upload] = []
    were_ended: list[bool] = []
    listed: list[S3Object] = []
    really_end, really_finish = S3Upload.end, S3Upload.finish

    def end(self: S3Upload) -> None:
        ended.append(self)
        really_end(self)

    def finish(self: S3Upload) -> None:
        were_ended.append(self in ended)
        really_finish(self)

    def abort_all(self: S3Object) -> None:
        listed.append(self)

    monkeypatch.setattr(S3Upload, "end", end)
    monkeypatch.setattr(S3Upload, "finish", finish)
    monkeypatch.setattr(S3Object, "abort_all", abort_all)
    with ShardWriter(bucket, max_samples=1, storage_options=s3.storage_options) as writer:
        for _ in range(2):
            writer.write({"bin": DATA})
    assert were_ended == [True] * 5  # two shards, their indexes, index.json
    assert not listed  # no writer was killed here: the folder was empty


@pytest.mark.parametrize(
    ("etag", "found", "num_parts", "is_md5"),
    [
        ("0" * 32, {}, 1, True),
        ("0" * 32, {"ServerSideEncryption": "AES256"}, 1, True),
        ("0" * 32, {"ServerSideEncryption": "aws:kms"}, 1, False),
        ("0" * 32, {"SSECustomerAlgorithm": "AES256"}, 1, False),
        ("0" * 32 + "-3", {}, 3, True),
        ("0" * 32 + "-2", {}, 3, False),
        ("0" * 32, {}, 3, False),
        ("", {}, 1, False),
        ("0x8DC5", {}, 1, False),
    ],
)
def test_comparable_etags_are_recognised(
    etag: str, found: dict[str, str], num_parts: int, is_md5: bool
) -> None:
    assert may_be_md5(etag, found, num_parts) == is_md5


@pytest.mark.parametrize("lost", ["POST", "PUT", "DELETE"])
def test_lost_response_is_retried_safely(
    lost: str, s3: S3Server, bucket: str, storage: Storage, uploads: Callable[[], list[str]]
) -> None:
    def lose(request: str, number: int) -> str:
        hit = request.startswith(lost) and "uploadId" in request and number == 0
        return "lose" if hit else ""

    with spoiling(s3.endpoint, lose) as proxy:
        losing = Storage(replace(s3, endpoint=proxy.endpoint).storage_options)
        pending = open_pending(losing, f"{bucket}/x")
        pending.write(DATA)
        if lost != "DELETE":
            pending.commit()
            assert storage.read(f"{bucket}/x") == DATA
        pending.discard()
    assert any(request.startswith(lost) for request in proxy.requests)
    assert uploads() == []
    assert storage.exists(f"{bucket}/x") == (lost != "DELETE")


class Dropping(s3fs.S3FileSystem):  # type: ignore[misc]
    """A server on which another writer aborts an upload before its parts are joined."""

    async def _call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "complete_multipart_upload" and options["Key"] == "x":
            options.pop("MultipartUpload")
            await super()._call_s3("abort_multipart_upload", *arguments, **options)
            raise FileNotFoundError("NoSuchUpload")
        return await super()._call_s3(method, *arguments, **options)


def test_missing_upload_is_an_error_even_if_an_old_file_has_equal_length(
    bucket: str, s3: S3Server
) -> None:
    storage = Storage(filesystem=Dropping(**s3.storage_options))
    storage.resolve(bucket)[0].pipe_file(f"{bucket}/x", bytes(len(DATA)))
    with pytest.raises(StorageError, match="other bytes arrived than were sent"):
        publish_bytes(storage, f"{bucket}/x", DATA)


def test_upload_survives_a_server_restart(
    s3: S3Server, bucket: str, storage: Storage, uploads: Callable[[], list[str]]
) -> None:
    with spoiling(s3.endpoint, lambda *_: "") as proxy:
        restarting = Storage(replace(s3, endpoint=proxy.endpoint).storage_options)
        pending = open_pending(restarting, f"{bucket}/x")
        pending.write(DATA[: PART_BYTES + 1])
        proxy.close()
        back = threading.Timer(1.5, proxy.reopen)
        back.start()
        pending.write(DATA[PART_BYTES + 1 :])
        pending.commit()
        pending.discard()
        back.join()
    assert storage.read(f"{bucket}/x") == DATA
    assert uploads() == []


def test_server_that_reads_no_bytes_times_out(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(S3Object, "response_timeout_s", 0.3)
    monkeypatch.setattr(S3Object, "abort_timeout_s", 0.1)
    stalled = threading.Event()

    def stall(request: str, _: int) -> str:
        if request.startswith("PUT"):
            stalled.wait(60)
        return ""

    with spoiling(s3.endpoint, stall) as proxy:
        options = replace(s3, endpoint=proxy.endpoint).storage_options
        slow = Storage(options | {"retry_timeout_s": 1})
        with pytest.raises(StorageError, match="did not answer in time"):
            publish_bytes(slow, f"{bucket}/x", DATA)
        stalled.set()


# --- killed


KILLED = """
import os, sys
from shardstream.packing import ShardWriter
with ShardWriter(sys.argv[1], max_bytes="20MB") as writer:
    for i in range(60):
        writer.write({"bin": os.urandom(1_000_000)})
        if i == 35:
            print("half", flush=True)
            sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("s3_env")
def test_next_writer_aborts_the_uploads_of_a_killed_one(
    bucket: str, storage: Storage, uploads: Callable[[], list[str]], tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, f"{bucket}/train/"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        while not storage.exists(f"{bucket}/train/000000.tar.idx"):  # sent after its shard
            time.sleep(0.01)
        while uploads() != ["train/000001.tar"]:  # the next one is being uploaded
            time.sleep(0.01)
        writer.send_signal(signal.SIGKILL)
    assert not list(tmp_path.iterdir())  # no temporary files on the disk
    assert uploads() == ["train/000001.tar"]
    with ShardWriter(f"{bucket}/train/", max_bytes="20MB", overwrite=True) as again:
        for _ in range(30):
            again.write({"bin": bytes(1_000_000)})
    assert uploads() == []
    names = [file.url.rsplit("/", 1)[-1] for file in storage.find(f"{bucket}/train")]
    assert names == ["000000.tar", "000000.tar.idx", "000001.tar", "000001.tar.idx", "index.json"]
    for shard in again.manifest.shards:
        data = storage.read(f"{bucket}/train/{shard.url}")
        assert hashlib.sha256(data).hexdigest() == shard.sha256


def test_error_of_an_upload_that_another_writer_has_dropped_says_so(
    s3: S3Server, storage: Storage, bucket: str, uploads: Callable[[], list[str]]
) -> None:
    if s3.kind == "moto":
        pytest.skip("moto ends with a traceback where an upload is gone")
    first, second = (open_pending(storage, f"{bucket}/x", is_only_writer=True) for _ in range(2))
    try:
        first.write(DATA)
        while not uploads():
            time.sleep(0.01)
        second.write(DATA)
        second.commit()
        first.write(DATA[:PART_BYTES])  # one more part
        with pytest.raises(StorageError, match="another writer of this file has dropped"):
            first.commit()
    finally:
        first.discard()
        second.discard()
    assert storage.read(f"{bucket}/x") == DATA


# --- a folder that another writer may take over


class Comparing(s3fs.S3FileSystem):  # type: ignore[misc]
    """A server that compares in its own way, also when parts are joined, which Ceph 16 does not."""

    kind = ""

    async def _call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
        condition = options.pop("IfMatch", options.pop("IfNoneMatch", None))
        if condition is not None and self.kind == "unsupported":
            raise OSError(38, "no") from client_error("NotImplemented")
        if condition is not None:
            place = {name: options[name] for name in ("Bucket", "Key")}
            try:
                etag = (await self._call_s3("head_object", **place))["ETag"]
            except FileNotFoundError:
                if condition != "*":
                    raise FileNotFoundError from client_error("NoSuchKey")
            else:
                accepted = [etag] if self.kind == "quotes" else [etag, etag.strip('"')]
                if condition not in accepted:
                    raise OSError(22, "no") from client_error("PreconditionFailed")
        answer = await super()._call_s3(method, *arguments, **options)
        if self.kind == "digests" and method != "upload_part" and "ETag" in answer:
            answer["ETag"] = f'"{answer["ETag"][1:-1]}-KMS"'
        return answer


def client_error(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}}, "PutObject")


def replace_as_owner(
    storage: Storage, url: str, data: bytes, check_owner: Callable[[], None]
) -> None:
    pending = open_pending(storage, url, check_owner=check_owner)
    try:
        pending.write(data)
        pending.commit()
    finally:
        pending.discard()


class Owner:
    """The owner of a folder, which another writer takes over right after a check."""

    def __init__(self, storage: Storage, url: str, checks: int, others: bytes | None) -> None:
        self.storage, self.url, self.checks, self.others = storage, url, checks, others

    def __call__(self) -> None:
        self.checks -= 1
        if self.checks < 0:
            raise StorageError("another writer")
        if self.checks == 0 and self.others is None:
            remove_all(self.storage, [self.url])
        elif self.checks == 0 and self.others is not None:
            publish_bytes(self.storage, self.url, self.others)


SIZES = pytest.mark.parametrize("data", [DATA[:1000], DATA], ids=["one request", "parts"])


@SIZES
@pytest.mark.parametrize(
    "kind",
    [
        "",
        "unsupported",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("quotes", "digests")),
    ],
)
def test_only_the_owner_of_a_folder_replaces_a_file(
    kind: str, data: bytes, bucket: str, s3: S3Server, uploads: Callable[[], list[str]]
) -> None:
    filesystem = Comparing(skip_instance_cache=True, **s3.storage_options)
    filesystem.kind = kind
    storage, url = Storage(filesystem=filesystem), f"{bucket}/x"
    replace_as_owner(storage, url, data[::-1], Owner(storage, url, 0, b""))
    replace_as_owner(storage, url, data, lambda: None)
    assert storage.read(url) == data
    replace_as_owner(storage, url, data, Owner(storage, url, 0, b""))  # it is there
    if kind != "unsupported":
        with pytest.raises(StorageError, match="another writer"):
            replace_as_owner(storage, url, data[::-1], Owner(storage, url, 0, b""))
        assert storage.read(url) == data
    assert uploads() == []


@SIZES
@pytest.mark.parametrize("checks", [1, 2])
def test_file_that_the_next_writer_has_deleted_is_not_written_again(
    checks: int, data: bytes, bucket: str, s3: S3Server
) -> None:
    storage = Storage(filesystem=Comparing(skip_instance_cache=True, **s3.storage_options))
    url = f"{bucket}/x"
    publish_bytes(storage, url, b"earlier")
    with pytest.raises(StorageError, match="another writer"):
        replace_as_owner(storage, url, data, Owner(storage, url, checks, None))
    assert not storage.exists(url)


@SIZES
@pytest.mark.parametrize(
    ("checks", "is_equal", "is_kept"),
    [(1, False, True), (2, False, True), (2, True, True), (1, True, False)],
)
def test_file_of_a_writer_that_takes_the_folder_over_is_kept(
    checks: int, is_equal: bool, is_kept: bool, data: bytes, bucket: str, s3: S3Server
) -> None:
    """If it has published the earlier bytes right between a look-up and a request, it may lose them, but not to other bytes of a shard."""
    storage = Storage(filesystem=Comparing(skip_instance_cache=True, **s3.storage_options))
    url, earlier = f"{bucket}/x", b"earlier"
    publish_bytes(storage, url, earlier)
    others = earlier if is_equal else data[::-1]
    with pytest.raises(StorageError, match="another writer"):
        replace_as_owner(storage, url, data, Owner(storage, url, checks, others))
    found = storage.read(url)
    assert found == others if is_kept else len(found) == 16


@SIZES
def test_own_file_of_a_lost_response_is_not_sent_again(
    data: bytes, bucket: str, s3: S3Server
) -> None:
    def lose(request: str, number: int) -> str:
        is_last = request.startswith("PUT" if len(data) == 1000 else "POST")
        return "lose" if is_last and number == 0 and "?uploads" not in request else ""

    with spoiling(s3.endpoint, lose) as proxy:
        losing = Storage(replace(s3, endpoint=proxy.endpoint).storage_options)
        replace_as_owner(losing, f"{bucket}/x", data, Owner(losing, "", 0, b""))
        assert losing.read(f"{bucket}/x") == data
    assert len(proxy.requests) > len(set(proxy.requests))
