"""Test that slow, endless and lying servers cost a bounded time and memory, with each client."""

from __future__ import annotations

import itertools
import os
import re
import select
import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import StorageError
from shardstream.storage import Cancellation, Storage
from tests.attack import survived
from tests.limits import set_limits
from tests.raw_server import Answer, RawServer, Request, file_response, raw_server, response

MEMORY_BYTES = 1 << 30
HEAD = response(206, Content_Range="bytes 0-99999/100000", Content_Length="100000", ETag='"a"')
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
S3 = {"key": "some", "secret": "thing"}
CLIENTS = ("http", "https", "s3fs", "web")


def open_file(client: str, server: RawServer) -> tuple[Storage, str]:
    options: dict[str, Any] = {"read_timeout_s": 0.8, "retry_timeout_s": 0.3}
    if client == "web":
        return Storage(options), f"{server.url}/folder/a.tar"
    if client == "https":
        client, options = "http", options | {"client_kwargs": {"verify": False}}
    options |= S3 | {"endpoint_url": server.url, "s3_client": client}
    return Storage(options), "s3://bucket/folder/a.tar"


def slowly(data: Iterable[bytes]) -> Iterator[bytes]:
    for one in data:
        time.sleep(0.02)
        yield one


def slow_body(_: Request) -> Iterator[bytes]:
    yield HEAD
    yield from slowly([b"x"] * 100_000)


def slow_headers(_: Request) -> Iterator[bytes]:
    yield b"HTTP/1.1 206 Some\r\n"
    yield from slowly([b"a: b\r\n"] * 100_000)


def continues(_: Request) -> Iterator[bytes]:
    yield from itertools.repeat(CONTINUE)


def continues_slowly(_: Request) -> Iterator[bytes]:
    yield from slowly(itertools.repeat(CONTINUE))


def long_error(_: Request) -> Iterator[bytes]:
    yield response(500, Content_Length="50000000000")
    yield from itertools.repeat(bytes(1 << 20))


def slow_error(_: Request) -> Iterator[bytes]:
    yield response(500, Content_Length="50000000000")
    yield from slowly(itertools.repeat(b"x"))


def endless_page(_: Request) -> Iterator[bytes]:
    """A folder of a web server, or a listing of S3, without end."""
    yield b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html><ListBucketResult>"
    yield from itertools.repeat(b"<a href='x.tar'>x.tar</a>" * 40_000)


def byte_by_byte(request: Request) -> bytes:
    start, _ = request.range or (0, None)
    sent = f"bytes {start}-99999/100000"
    length = str(100_000 - start)
    return response(206, b"x", Content_Range=sent, Content_Length=length, ETag='"a"')


@pytest.mark.parametrize(
    "client",
    [one if one != "s3fs" else pytest.param(one, marks=pytest.mark.slow) for one in CLIENTS],
)
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (slow_body, "did not answer in time"),
        (slow_headers, "did not answer in time"),
        pytest.param(
            continues,
            "did not answer in time|no end of the response's headers",
            marks=pytest.mark.slow,
        ),
        (long_error, "the server failed"),
        (slow_error, "the server failed"),
        (byte_by_byte, "the connection broke off"),
    ],
)
def test_read_ends(
    answer: Answer, message: str, client: str, request: pytest.FixtureRequest
) -> None:
    certificate = request.getfixturevalue("certificate") if client == "https" else None
    with raw_server(answer, certificate) as server:
        storage, url = open_file(client, server)
        outcome = survived(lambda: storage.read(url, 0, 100_000), memory_bytes=MEMORY_BYTES)
    assert re.match(f"StorageError: .*({message})", outcome)


def test_bytes_after_a_response_over_tls_do_not_answer_the_next_request(
    certificate: tuple[Path, Path],
) -> None:
    head = b"HTTP/1.1 206 Some\r\nContent-Range: bytes 2-5/9\r\nContent-Length: 4\r\n\r\n"

    def answer(_: Request) -> Iterator[bytes]:
        yield head
        yield b"good" + head + b"evil"  # one record
        server.ended.wait(0.2)  # open

    with raw_server(answer, certificate) as server:
        storage, url = open_file("https", server)
        assert [storage.read(url, 2, 6) for _ in range(3)] == [b"good"] * 3


def test_cancelled_read_over_tls_returns_no_encrypted_bytes(certificate: tuple[Path, Path]) -> None:
    data = b"x" * (16 << 20)
    with raw_server(lambda request: file_response(request, data), certificate) as server:
        storage, url = open_file("https", server)
        for _ in range(2):
            cancelled = Cancellation()
            timers = itertools.chain([threading.Timer(0.02, cancelled.set)], itertools.repeat(None))

            def begin(timers: Iterator[threading.Timer | None] = timers) -> None:
                if timer := next(timers):
                    timer.start()

            with suppress(StorageError):  # or it was faster
                found = storage.read_view(url, 0, len(data), on_receive=begin, cancelled=cancelled)
                assert found == data


@contextmanager
def damaging(server: RawServer, place: int) -> Iterator[RawServer]:
    """Pass the bytes of a server on; a byte of its first connection is damaged."""
    host, _, port = server.url.rpartition("/")[2].partition(":")
    places = itertools.chain([place], itertools.repeat(-1))

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            place = next(places)
            with socket.create_connection((host, int(port))) as upstream:
                ready = [self.request, upstream]
                with suppress(OSError):
                    while True:
                        for one in select.select(ready, [], [])[0]:
                            data = bytearray(one.recv(1 << 16))
                            if one is upstream:
                                if 0 <= place < len(data):
                                    data[place] ^= 1
                                place -= len(data)
                            if not data:
                                return
                            (self.request if one is upstream else upstream).sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as running:
        running.daemon_threads = True
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield RawServer(f"https://127.0.0.1:{running.server_address[1]}")
        finally:
            running.shutdown()
            thread.join()


@pytest.mark.parametrize("place", [700_000, 2_000_000])
def test_damaged_record_of_tls_is_received_again(
    place: int, certificate: tuple[Path, Path]
) -> None:
    data = os.urandom(2 << 20)
    with (
        raw_server(lambda request: file_response(request, data), certificate) as server,
        damaging(server, place) as relay,
    ):
        storage, url = open_file("https", relay)
        assert storage.read(url, 0, len(data)) == data
        assert len(server.requests) > 1


@pytest.mark.parametrize(
    ("answer", "client", "names"),
    [
        (slow_headers, "s3", "{0..3}.tar"),
        (continues_slowly, "s3", ""),
        (endless_page, "s3", "{0..3}.tar"),
        (slow_headers, "web", ""),
        (continues_slowly, "web", "*.tar"),
        (endless_page, "web", "*.tar"),
    ],
)
def test_dataset_that_cannot_be_opened_is_an_error(answer: Answer, client: str, names: str) -> None:
    """Whether its manifest, its listing or a look-up does not end."""
    with raw_server(answer) as server:
        options: dict[str, Any] = {"read_timeout_s": 0.2, "retry_timeout_s": 0.1}
        options |= S3 | {"endpoint_url": server.url} if client == "s3" else {}
        folder = "s3://bucket/folder" if client == "s3" else f"{server.url}/folder"
        outcome = survived(
            lambda: ss.ShardDataset(f"{folder}/{names}", storage_options=options),
            memory_bytes=MEMORY_BYTES,
        )
    assert re.match("StorageError: .*(did not answer in time|is too long for a listing)", outcome)


def page(request: Request, token: str, *, keys: int = 2) -> bytes:
    """Return a page of a listing that is not complete, whose names are new ones."""
    names = [f"<Key>folder/{request.number:06d}_{n:06d}.tar</Key>" for n in range(keys)]
    files = "".join(f"<Contents>{name}<Size>10240</Size></Contents>" for name in names)
    more = "<IsTruncated>true</IsTruncated>"
    if token:
        more += f"<NextContinuationToken>{token}</NextContinuationToken>"
    return response(200, f"<ListBucketResult>{more}{files}</ListBucketResult>".encode())


@pytest.mark.parametrize(
    ("token", "keys", "message", "most"),
    [
        ("", 2, "the server sends no token for the next page", 2),
        ("same", 2, "the server repeats a page", 4),
        ("{number}", 0, "the server sent 6 pages without a file", 12),
    ],
)
def test_listing_that_does_not_go_on_is_an_error(
    token: str, keys: int, message: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, Storage, MAX_EMPTY_PAGES=5)

    def answer(request: Request) -> bytes:
        return page(request, token.format(number=request.number), keys=keys)

    with raw_server(answer) as server:
        storage, _ = open_file("s3fs", server)
        for find in (storage.list_folder, storage.find):
            with pytest.raises(StorageError, match=message):
                find("s3://bucket/folder")
    assert len(server.requests) <= most


def test_listing_without_end_is_read_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, Storage, MAX_LISTED_FILES=20)

    def answer(request: Request) -> bytes:
        return page(request, str(request.number))

    with raw_server(answer) as server:
        storage, _ = open_file("s3fs", server)
        for find in (storage.list_folder, storage.find, lambda url: storage.glob(f"{url}/*.tar")):
            with pytest.raises(StorageError, match="over 20 files here, the limit of a listing"):
                find("s3://bucket/folder")
    assert len(server.requests) <= 40
