"""Test the reader of S3 over plain HTTP against responses that a server should not send; test_clients.py tests its contract."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardstream.errors import OptionError, StorageError
from shardstream.storage import Storage

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
            for response in responses:
                while (line := self.rfile.readline()) not in (b"\r\n", b""):
                    pass
                if not line:
                    return
                counts[number] += 1
                for first in range(0, len(response), piece):
                    self.wfile.write(response[first : first + piece])
                    ended.wait(pause_s)
                if b"lose" in response.partition(b"\r\n\r\n")[0] or not response:
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
    ("response", "message"),
    [
        (OK.replace(b"2-5", b"0-3") + b"\r\nabcd", "other bytes than the requested ones"),
        (OK.replace(b": 4", b": 8") + b"\r\nabcdefgh", "the server ignored the requested range"),
        (OK.replace(b"Length: 4", b"Type: x") + b"\r\nabcd", "Content-Length Header missing"),
        (OK + b"Content-Length: 5\r\n\r\nabcde", "two different lengths"),
        (OK.replace(b": 4", b": \xb2") + b"\r\nabcd", "Content-Length Header missing"),
        (OK.replace(b": 4", b": +4") + b"\r\nabcd", "Content-Length Header missing"),
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
def test_response_without_the_range_is_an_error(response: bytes, message: str) -> None:
    with (
        server(response) as (endpoint, _),
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


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"endpoint_url": "https://127.0.0.1:9"}, "s3://b/a"),
        ({"endpoint_url": "http://127.0.0.1:9", "requester_pays": True}, "s3://b/a"),
        ({"endpoint_url": "http://127.0.0.1:9"}, "s3://b//a"),
    ],
)
def test_reader_that_cannot_be_used_is_named(options: dict[str, object], path: str) -> None:
    storage = Storage({"key": "some", "secret": "thing", "s3_client": "http", **options})
    with pytest.raises(OptionError, match="s3_client='http' cannot read this"):
        storage.read(path, 0, 1)
