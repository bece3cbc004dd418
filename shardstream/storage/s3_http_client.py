"""Read S3 over plain HTTP: signed GETs whose bodies are received straight into the memory that is returned.

A client library copies each body once or twice more, and obstore starts threads in each process. This reader knows only what a
GET of an object needs: a response with a length. After any other response s3fs or obstore reads (see `clients`). Over TLS
it would take Python's lock for each 16 KiB, so there obstore reads.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import SplitResult

import numpy as np

from shardstream.storage.http_status import HttpStatusError
from shardstream.storage.response import (
    RangeResponse,
    ReceiveBuffer,
    max_response_bytes,
)
from shardstream.storage.response_head import (
    FileFacts,
    check_head,
    range_header,
    ranges_ignored_error,
)
from shardstream.storage.s3_config import S3Settings
from shardstream.storage.s3_request import request_signer, request_target

_HEAD_BYTES = 64 << 10  # limit of a response's headers, and of an error's body
_RECEIVE_BYTES = 16 << 10
# A thread is woken when so many bytes of a body have arrived (SO_RCVLOWAT, socket(7)) or after this time, not for each packet.
_WAKE_BYTES, _WAKE_AFTER_S = 256 << 10, 1.0
_END = b"\r\n\r\n"


class _Head(NamedTuple):
    """Status line and headers of a response."""

    status: int
    text: str
    """Status and reason."""
    headers: dict[str, str]
    """By name in lower case."""
    rest: bytes
    """First bytes of the body, which came with the headers."""

    @property
    def length(self) -> int | None:
        """Length of the body; None if the server does not send it."""
        value = self.headers.get("content-length", "")
        return int(value) if value.isdigit() and "transfer-encoding" not in self.headers else None


class S3HttpReader:
    """Reads ranges over connections that are kept open; thread-safe.

    Args:
        settings: Server and credentials.
        server: Its URL, with the scheme "http".
    """

    def __init__(self, settings: S3Settings, server: SplitResult) -> None:
        self._idle: list[socket.socket] = []
        self._server, self._settings = server, settings
        self._host = server.netloc.removesuffix(":80")  # as it is signed
        self._sign = request_signer(settings)

    def __del__(self) -> None:
        for connection in self._idle:
            connection.close()

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        *,
        keep_partial: bool = False,  # noqa: ARG002  (the bytes before a cut are always kept)
        max_bytes: int | None = None,
        into: ReceiveBuffer | None = None,
    ) -> RangeResponse:
        """Request the bytes ``start`` to ``end`` once."""
        request = self._request(path, start, end)
        connection = self._idle_connection() or self._connect()
        is_reusable = False
        try:
            connection.sendall(request)
            head = _receive_head(connection)
            length, facts = _check_head(connection, head, path, start, end)
            wanted = int(min(length, max_response_bytes(start, end, max_bytes)))
            body = np.empty(0 if into else wanted, np.uint8).data  # not filled with zeros first
            got, error = _receive_body(connection, head.rest, into or ReceiveBuffer([body]), wanted)
            is_at_end = got == length >= len(head.rest)
            is_reusable = is_at_end and head.headers.get("connection", "").lower() != "close"
        finally:
            if is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
        return RangeResponse(
            data=body[:got],
            received=got if into else 0,
            size=facts.size,
            version=facts.version,
            error=error,
        )

    def _request(self, path: str, start: int, end: int | None) -> bytes:
        target = request_target(self._server, path)
        headers = {"Host": self._host, **self._sign(f"http://{self._host}{target}")}
        headers |= range_header(start, end)
        lines = [f"GET {target} HTTP/1.1", *(f"{name}: {headers[name]}" for name in headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _idle_connection(self) -> socket.socket | None:
        """Return an open connection that the server has not closed; None if there is none."""
        while self._idle:
            try:
                connection = self._idle.pop()  # atomic, as is `append`
            except IndexError:  # another thread was first
                return None
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            if not poll.poll(0):
                return connection
            connection.close()
        return None

    def _connect(self) -> socket.socket:
        address = str(self._server.hostname), self._server.port or 80
        connection = socket.create_connection(address, self._settings.connect_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self._settings.read_timeout_s)
        return connection


def _receive_head(connection: socket.socket) -> _Head:
    """Receive status and headers of the answer, after any that only announce it (100 Continue, 103 Early Hints).

    Raises:
        OSError: If the connection ends before, or they are not those of an HTTP response.
    """
    data, received = b"", 0
    while True:
        while (size := data.find(_END)) < 0:
            more = connection.recv(_RECEIVE_BYTES)
            if not more:
                raise ConnectionResetError("the server closed the connection without a response")
            data += more
            received += len(more)
            if received > _HEAD_BYTES:
                raise OSError(f"no end of the response's headers in {_HEAD_BYTES} bytes")
        head = _parse_head(data[:size], data[size + len(_END) :])
        if head.status >= 200 or head.status == 101:
            return head
        data = head.rest


def _parse_head(data: bytes, rest: bytes) -> _Head:
    first, *lines = data.decode("latin-1").split("\r\n")
    version, _, text = first.partition(" ")
    if not version.startswith("HTTP/1.") or not text[:3].isdigit():
        raise OSError(f"not a response of HTTP/1.1: {first[:80]!r}")
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if version == "HTTP/1.0":
        headers["connection"] = "close"
    return _Head(int(text[:3]), text, headers, rest)


def _check_head(
    connection: socket.socket, head: _Head, path: str, start: int, end: int | None
) -> tuple[int, FileFacts]:
    """Return the length of the body of a response that has the requested range, and what it says about the file.

    Raises:
        OSError: The server's error.
        StorageError: If the server sends other bytes.
    """
    if head.status not in (200, 206):
        raise _status_error(connection, head)
    facts = check_head(path, start, end, head.status, head.headers)
    if head.length is None:
        raise OSError("Content-Length Header missing")
    if end is not None and head.length > end - start:
        raise ranges_ignored_error(path, start)
    return head.length, facts


def _receive_body(
    connection: socket.socket, rest: bytes, body: ReceiveBuffer, size: int
) -> tuple[int, Exception | None]:
    """Receive ``size`` bytes, the first of which came with the headers; return how many arrived, and why no more."""
    got = min(len(rest), size)
    body.fill(rest[:got])
    try:
        while got < size and (more := _receive_some(connection, body, size - got)):
            body.advance(more)
            got += more
    except OSError as broken:
        return got, broken
    if got < size:
        return got, ConnectionResetError(f"the connection ended after {got} of {size} bytes")
    return got, None


def _receive_some(connection: socket.socket, body: ReceiveBuffer, size: int) -> int:
    """Receive the next bytes of a body; return how many, 0 if the connection has ended.

    Raises:
        TimeoutError: If none arrives in time.
    """
    if size > _WAKE_BYTES:
        timeout_s = connection.gettimeout() or _WAKE_AFTER_S
        _set_wake(connection, _WAKE_BYTES, min(timeout_s, _WAKE_AFTER_S))
        try:
            return connection.recvmsg_into(body.next_pieces(size))[0]
        except TimeoutError:  # fewer bytes: a slow connection
            pass
        finally:
            _set_wake(connection, 1, timeout_s)
    return connection.recvmsg_into(body.next_pieces(size))[0]


def _set_wake(connection: socket.socket, nbytes: int, timeout_s: float) -> None:
    connection.settimeout(timeout_s)
    with suppress(OSError):  # a sandbox that does not know it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)


def _status_error(connection: socket.socket, head: _Head) -> HttpStatusError:
    """Return the error of a response, with the server's code and message."""
    body = head.rest
    is_sent = head.length != 0 and (head.length or "transfer-encoding" in head.headers)
    # The length may be missing, and a chunked body need not be decoded to find its code.
    while (
        is_sent
        and b"</Error>" not in body
        and len(body) < min(head.length or _HEAD_BYTES, _HEAD_BYTES)
    ):
        more = connection.recv(_RECEIVE_BYTES)
        if not more:
            break
        body += more
    return HttpStatusError(head.status, f"{head.text[4:]}: {body.decode('utf-8', 'replace')}")
