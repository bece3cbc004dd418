"""Test the fast reader of S3 against responses that a server should not send; test_clients.py tests its contract."""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from shardstream.errors import ChangedError, OptionError, StorageError
from shardstream.storage import Storage
from tests.raw_server import Request, file_response, raw_server, response

OK = b'HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 2-5/10\r\nContent-Length: 4\r\nETag: "e"\r\n'


@contextmanager
def server(
    *responses: bytes, piece: int = 1 << 20, pause_s: float = 0
) -> Iterator[tuple[str, list[int]]]:
    """Run a server that sends these bytes, one after the other for each connection; yields its URL and the requests of each connection.

    Args:
        responses: Status, headers and bodies.
        piece: Bytes that are sent together.
        pause_s: Seconds after each of them.
    """
    counts: list[int] = []
    ended = threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            number = len(counts)
            counts.append(0)
            for answer in responses:
                while (line := self.rfile.readline()) not in (b"\r\n", b""):
                    pass
                if not line:
                    return
                counts[number] += 1
                for first in range(0, len(answer), piece):
                    self.wfile.write(answer[first : first + piece])
                    ended.wait(pause_s)
                if b"lose" in answer.partition(b"\r\n\r\n")[0] or not answer:
                    return

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}", counts
        finally:
            ended.set()
            running.shutdown()
            thread.join()


def open_storage(endpoint: str) -> Storage:
    options = {"endpoint_url": endpoint, "key": "some", "secret": "thing", "s3_client": "http"}
    return Storage(options | {"read_timeout_s": 0.5, "retry_timeout_s": 0.3})


@pytest.mark.parametrize(
    ("responses", "requests"),
    [
        ([OK + b"\r\nabcd"] * 3, [3]),
        ([OK + b"Connection: close\r\n\r\nabcd"], [1, 1, 1]),
        ([OK.replace(b"1.1", b"1.0") + b"Connection: Close\r\n\r\nabcd"], [1, 1, 1]),
        ([OK + b"\r\nabcdHTTP/1.1 206 more"], [1, 1, 1]),  # nobody asked for more
    ],
)
def test_connection_is_kept_only_where_it_is_at_the_end_of_a_response(
    responses: list[bytes], requests: list[int]
) -> None:
    with server(*responses) as (endpoint, counts):
        storage = open_storage(endpoint)
        assert [storage.read("s3://b/a", 2, 6) for _ in range(3)] == [b"abcd"] * 3
    assert counts == requests


def test_answer_after_early_hints_is_read() -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
    with server(*[hints + OK + b"\r\nabcd"] * 2) as (endpoint, counts):
        storage = open_storage(endpoint)
        assert [storage.read("s3://b/a", 2, 6) for _ in range(2)] == [b"abcd"] * 2
    assert counts == [2]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (OK.replace(b"2-5", b"0-3") + b"\r\nabcd", "other bytes than the requested ones"),
        (OK.replace(b": 4", b": 8") + b"\r\nabcdefgh", "the server ignored the requested range"),
        (OK.replace(b"Length: 4", b"Type: x") + b"\r\nabcd", "sends no length"),
        (OK + b"Content-Length: 5\r\n\r\nabcde", "two different lengths"),
        (OK.replace(b": 4", b": \xb2") + b"\r\nabcd", "sends no length"),
        (OK.replace(b": 4", b": +4") + b"\r\nabcd", "sends no length"),
        (OK.replace(b"206", b"\xb206") + b"\r\nabcd", "not a response of HTTP/1.1"),
        (OK.replace(b"206", b"2060") + b"\r\nabcd", "not a response of HTTP/1.1"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "not a response of HTTP/1.1"),
        (b"HTTP/1.1 206 OK\r\n" + b"a: b\r\n" * 20_000, "no end of the response's headers"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 5000, "no end of the response's headers"),
        (b"", "the connection broke off"),
        (b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", "307"),
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", "access refused"),
        (b"HTTP/1.1 403 Forbidden\r\nTransfer-Encoding: chunked\r\n\r\n30\r\n<Error><Code>RequestTimeTooSkewed</Code></Error>",
         "the clock of this machine is wrong"),
    ],
)  # fmt: skip
def test_response_without_the_range_is_an_error(answer: bytes, message: str) -> None:
    with (
        server(answer) as (endpoint, _),
        pytest.raises(StorageError, match=message),
    ):
        open_storage(endpoint).read("s3://b/a", 2, 6)


LARGE = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-599999/600000\r\nContent-Length: 600000\r\n\r\n"


def test_slow_body_is_received_within_the_timeout() -> None:
    """Its 600 kB arrive 50 kB at a time, each in time; the thread asks to be woken for more."""
    body = bytes(range(250)) * 2400
    with server(LARGE + body, piece=50_000, pause_s=0.15) as (endpoint, counts):
        assert open_storage(endpoint).read("s3://b/a", 0, 600_000) == body
    assert counts == [1]


def test_body_that_does_not_come_is_an_error() -> None:
    with (
        server(LARGE + bytes(100_000), piece=len(LARGE), pause_s=60) as (endpoint, _),
        pytest.raises(StorageError, match="the server did not answer in time"),
    ):
        open_storage(endpoint).read("s3://b/a", 0, 600_000)


CHUNKED = OK.replace(b"Content-Length: 4", b"Transfer-Encoding: chunked") + b"\r\n"


@pytest.mark.parametrize(
    "chunks",
    [
        b"4\r\nabcd\r\n0\r\n\r\n",
        b"1;name=value\r\na\r\n03 \r\nbcd\r\n0\r\nTrailer: x\r\nOther: y\r\n\r\n",
    ],
)
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_body_in_chunks_is_read(chunks: bytes, piece: int) -> None:
    with server(*[CHUNKED + chunks] * 2, piece=piece) as (endpoint, counts):
        storage = open_storage(endpoint)
        assert [storage.read("s3://b/a", 2, 6) for _ in range(2)] == [b"abcd"] * 2
    assert counts == [2]


def in_chunks(request: Request, data: bytes) -> bytes:
    """Answer in chunks, so that only the answer to a range has the length of the file."""
    if request.range is None:
        return response(200, chunked(data), Transfer_Encoding="chunked")
    start, end = request.range
    if start >= len(data):
        return response(416)
    body = data[start:end]
    sent = f"bytes {start}-{start + len(body) - 1}/{len(data)}"
    return response(206, chunked(body), Transfer_Encoding="chunked", Content_Range=sent)


def chunked(data: bytes) -> bytes:
    return b"".join(b"1\r\n%c\r\n" % byte for byte in data) + b"0\r\n\r\n"


@pytest.mark.parametrize("data", [b"abcdef", b""])
def test_file_in_chunks_is_read_whole(data: bytes) -> None:
    with raw_server(lambda request: in_chunks(request, data)) as running:
        storage = open_storage(running.url)
        assert storage.read("s3://b/a", size=len(data)) == data
        assert storage.read("s3://b/a", max_bytes=3) == data[:3]
        with pytest.raises(ChangedError, match="the manifest or an earlier response says 5"):
            storage.read("s3://b/a", size=5)


def test_file_that_a_proxy_cut_and_ended_is_read_to_its_end() -> None:
    def cut(request: Request) -> bytes:
        return in_chunks(request, b"abcdef" if request.range else b"abc")

    with raw_server(cut) as running:
        assert open_storage(running.url).read("s3://b/a") == b"abcdef"


def test_length_of_a_version_in_chunks_is_that_of_the_version() -> None:
    """Its response has no length: s3fs looks it up."""

    def answer(request: Request) -> bytes:
        if request.method == "HEAD":
            is_asked = "versionId=one" in request.target
            return file_response(request, b"abc" if is_asked else b"abcdef")
        return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"abc")

    with raw_server(answer) as running:
        options = {"endpoint_url": running.url, "key": "some", "secret": "thing"}
        storage = Storage(options | {"version_aware": True, "retry_timeout_s": 0.3})
        assert storage.read("s3://b/a?versionId=one") == b"abc"


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (b"4\r\nab", "for bytes=4-5"),  # the rest is requested, and comes wrong
        (b"3\r\nabc\r\n0\r\n\r\n", "for bytes=5-5"),
        (b"5\r\nabcde\r\n0\r\n\r\n", "ignored the requested range"),
        (b"3\r\nabcd\r\n0\r\n\r\n", "longer than its length"),
        (b"-4\r\nabcd\r\n0\r\n\r\n", "does not begin with its length"),
        (b"1" * 9000, "has no end"),
        (b"0\r\n" + b"a: b\r\n" * 20_000, "longer than its length"),
    ],
)
def test_chunks_that_are_wrong_are_an_error(chunks: bytes, message: str) -> None:
    with (
        server(
            b"HTTP/1.1 206 Some\r\nConnection: close"
            + CHUNKED[len(OK.partition(b"\r\n")[0]) :]
            + chunks
        ) as (endpoint, _),
        pytest.raises(StorageError, match=message),
    ):
        open_storage(endpoint).read("s3://b/a", 2, 6)


@pytest.mark.parametrize(
    ("options", "path", "reason"),
    [
        ({"endpoint_url": "http://127.0.0.1:9"}, "s3://b//a", "servers disagree"),
        ({"endpoint_url": "http://me:x@127.0.0.1:9"}, "s3://b/a", "no plain URL of a server"),
        ({"client_kwargs": {"region_name": "us-isob-east-1"}}, "s3://b/a", "the region 'us-isob"),
        ({}, "s3://b--use1-az4--x-s3/a", "a directory bucket"),
        ({"version_aware": True}, "s3://b/a", "only s3fs knows one of the storage options"),
    ],
)
def test_reader_that_cannot_be_used_is_named(
    options: dict[str, object], path: str, reason: str
) -> None:
    storage = Storage({"key": "some", "secret": "thing", "s3_client": "http", **options})
    with pytest.raises(OptionError, match=f"s3_client='http' cannot read this: .*{reason}"):
        storage.read(path, 0, 1)


@pytest.mark.parametrize(
    ("endpoint", "style", "bucket", "target", "host"),
    [
        ("{url}", "auto", "bucket", "/bucket/a%20b/~c", "127.0.0.1"),
        ("{url}/some/base/", "auto", "bucket", "/some/base/bucket/a%20b/~c", "127.0.0.1"),
        ("{url}", "virtual", "bucket", "/bucket/a%20b/~c", "127.0.0.1"),
        ("{local}", "virtual", "bucket", "/a%20b/~c", "bucket.localhost"),
        ("{local}/base", "virtual", "bucket", "/base/a%20b/~c", "bucket.localhost"),
        ("{local}", "virtual", "my_bucket", "/my_bucket/a%20b/~c", "localhost"),
    ],
)
def test_bucket_is_in_the_path_or_in_the_host(
    endpoint: str,
    style: str,
    bucket: str,
    target: str,
    host: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really_connect = socket.create_connection
    monkeypatch.setattr(  # no name server knows the host
        socket, "create_connection", lambda address, _: really_connect(("127.0.0.1", address[1]))
    )
    with raw_server(lambda request: file_response(request, b"0123456789")) as running:
        local = running.url.replace("127.0.0.1", "localhost")
        storage = Storage(
            {
                "key": "some",
                "secret": "thing",
                "endpoint_url": endpoint.format(url=running.url, local=local),
                "config_kwargs": {"s3": {"addressing_style": style}},
                "s3_client": "http",
            }
        )
        assert storage.read(f"s3://{bucket}/a b/~c", 2, 5) == b"234"
    request = running.requests[0]
    assert request.target == target
    assert request.headers["host"].partition(":")[0] == host


@pytest.mark.parametrize(
    ("region", "bucket", "host"),
    [
        ("us-east-1", "bucket", "bucket.s3.us-east-1.amazonaws.com"),
        ("eu-west-3", "my.bucket", "s3.eu-west-3.amazonaws.com"),
        ("cn-north-1", "bucket", "bucket.s3.cn-north-1.amazonaws.com.cn"),
        ("us-gov-west-1", "My_bucket", "s3.us-gov-west-1.amazonaws.com"),
    ],
)
def test_hosts_of_aws(region: str, bucket: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_hosts(monkeypatch, bucket, client_kwargs={"region_name": region}) == [(host, 443)]


@pytest.mark.parametrize(
    "region", ["elsewhere.example/x", "x@elsewhere.example", "e--x", "us-east"]
)
def test_region_that_is_none_of_aws_names_no_host(
    region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError, match="the hosts of the region"):
        asked_hosts(monkeypatch, "bucket", client_kwargs={"region_name": region})


@pytest.mark.parametrize(
    ("variables", "is_plain"),
    [
        ({"HTTPS_PROXY": "http://127.0.0.1:9"}, False),
        ({"ALL_PROXY": "http://127.0.0.1:9"}, False),
        ({"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "amazonaws.com"}, True),
        ({"HTTP_PROXY": "http://127.0.0.1:9"}, True),
    ],
)
def test_proxy_is_left_to_s3fs(
    variables: dict[str, str], is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if is_plain:
        assert asked_hosts(monkeypatch, "bucket")
    else:
        with pytest.raises(OptionError, match="a proxy is between"):
            asked_hosts(monkeypatch, "bucket")


def asked_hosts(
    monkeypatch: pytest.MonkeyPatch, bucket: str, **options: Any
) -> list[tuple[str, int]]:
    """Return the addresses that a read of AWS connects to; no connection succeeds."""
    asked: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], *_: object) -> None:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setattr(socket, "create_connection", connect)
    options |= {"key": "some", "secret": "thing", "s3_client": "http", "retry_timeout_s": 0.01}
    with pytest.raises(StorageError, match="cannot be reached"):
        Storage(options).read(f"s3://{bucket}/key", 0, 1)
    return asked


def test_reader_pays_only_if_asked_for() -> None:
    with raw_server(lambda request: file_response(request, b"0123456789")) as running:
        for pays in (True, False):
            options = {"key": "some", "secret": "thing", "requester_pays": pays}
            storage = Storage(options | {"endpoint_url": running.url, "s3_client": "http"})
            storage.read("s3://bucket/a", 0, 1)
    paying, own = [request.headers for request in running.requests]
    assert paying["x-amz-request-payer"] == "requester"
    assert (
        "x-amz-request-payer;" in paying["authorization"]
        or ";x-amz-request-payer" in paying["authorization"]
    )
    assert "x-amz-request-payer" not in own


ROTATING = """
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
number = int(path.read_text() or 0) + 1 if path.exists() else 1
path.write_text(str(number))
end = "2020-01-01T00:00:00Z"
print(json.dumps({"Version": 1, "AccessKeyId": f"key{number}", "SecretAccessKey": "thing",
                  "SessionToken": f"token{number}", "Expiration": end if number > 1 else "%s"}))
"""


def test_credentials_that_expire_are_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile names a program; its first credentials are valid for a while, and are asked for again when they are about to expire."""
    soon = datetime.now(UTC) + timedelta(seconds=5)  # botocore renews them minutes before
    (tmp_path / "program.py").write_text(
        ROTATING.replace("2020-01-01T00:00:00Z", soon.isoformat()) % soon.isoformat()
    )
    command = f"{sys.executable} {tmp_path}/program.py {tmp_path}/count"
    (tmp_path / "config").write_text(f"[profile lab]\ncredential_process = {command}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with raw_server(lambda request: file_response(request, b"0123456789")) as running:
        storage = Storage({"profile": "lab", "endpoint_url": running.url, "s3_client": "http"})
        for _ in range(3):
            storage.read("s3://bucket/a", 0, 1)
    tokens = [request.headers["x-amz-security-token"] for request in running.requests]
    assert len({*tokens}) == 3
    for request, token in zip(running.requests, tokens, strict=True):
        assert f"Credential={token.replace('token', 'key')}/" in request.headers["authorization"]
