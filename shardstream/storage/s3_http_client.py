"""Read S3 over plain HTTP: signed GETs whose bodies are received straight into the memory that is returned.

A client library copies each body once or twice more, and obstore starts threads in each process. This reader knows only what a
GET of an object needs: a response with a length. After any other response s3fs or obstore reads (see `clients`). Over TLS
it would take Python's lock for each 16 KiB, so there obstore reads.
"""

from __future__ import annotations

import re
import select
import socket
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Unpack
from urllib.parse import SplitResult

import numpy as np

from shardstream.storage.http_status import HttpStatusError
from shardstream.storage.response import (
    RangeResponse,
    ReceiveBuffer,
    RequestOptions,
    max_response_bytes,
)
from shardstream.storage.response_head import (
    FileFacts,
    check_head,
    ranges_ignored_error,
)
from shardstream.storage.s3_config import S3Settings
from shardstream.storage.s3_request import request_signer, signed_get
from shardstream.storage.transfer import Transfer

_HEAD_BYTES = 64 << 10  # limit of a response's headers, and of an error's body
_RECEIVE_BYTES = 16 << 10
# A thread is woken when so many bytes of a body have arrived (SO_RCVLOWAT, socket(7)) or after this time, not for each packet.
_WAKE_BYTES, _WAKE_AFTER_S = 256 << 10, 1.0
_END = b"\r\n\r\n"
_STATUS_LINE = re.compile(r"(HTTP/1\.[01]) ([1-5]\d\d)(?![^ ])", re.ASCII)
_LENGTH = re.compile(r"\d{1,18}", re.ASCII)


class ResponseHead(NamedTuple):
    """Status line and headers of a response."""

    status: int
    text: str
    """Status and reason."""
    headers: dict[str, str]
    """By name in lower case."""
    rest: bytes
    """First bytes of the body, which came with the headers."""

    @property
    def closes(self) -> bool:
        """Whether the server closes the connection after the body."""
        return self.headers.get("connection", "").lower() == "close"

    @property
    def length(self) -> int | None:
        """Length of the body; None if the server does not send it."""
        value = self.headers.get("content-length", "")
        is_sent = _LENGTH.fullmatch(value) and "transfer-encoding" not in self.headers
        return int(value) if is_sent else None


class S3HttpReader:
    """Reads ranges over connections that are kept open; thread-safe.

    Args:
        settings: Server and credentials.
        server: Its URL, with the scheme "http".
    """

    def __init__(self, settings: S3Settings, server: SplitResult) -> None:
        self._idle: list[socket.socket] = []
        self._server, self._settings = server, settings
        self._sign = request_signer(settings)

    def __del__(self) -> None:
        for connection in self._idle:
            connection.close()

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        transfer: Transfer,
        **options: Unpack[RequestOptions],
    ) -> RangeResponse:
        """Request the bytes ``start`` to ``end`` once; the bytes before a cut are always kept."""
        request = signed_get(self._server, self._sign, path, start, end)
        connection = self._idle_connection() or self._connect()
        into = options.get("into")
        is_reusable = False
        try:
            with transfer.cancelled.ending(partial(_end, connection)):
                connection.sendall(request)
                head = receive_head(connection, transfer)
                length, facts = _check_head(connection, head, transfer, (path, start, end))
                limit = max_response_bytes(start, end, options.get("max_bytes"))
                wanted = int(min(length, limit))
                body = np.empty(0 if into else wanted, np.uint8).data  # not filled with zeros first
                buffer = into or ReceiveBuffer([body])
                got, error = _receive_body(connection, head.rest, buffer, wanted, transfer)
            is_at_end = got == length >= len(head.rest)
            is_reusable = is_at_end and not head.closes
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
        return connection


def _end(connection: socket.socket) -> None:
    """End what another thread receives: a close would not wake it."""
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)


def receive_head(connection: socket.socket, transfer: Transfer) -> ResponseHead:
    """Receive status and headers of the answer, after any that only announce it (100 Continue, 103 Early Hints).

    Raises:
        TimeoutError: If they have not arrived whole in time.
        OSError: If the connection ends before, or they are not those of an HTTP response.
    """
    data, received = b"", 0
    while True:
        while (size := data.find(_END)) < 0:
            connection.settimeout(transfer.left_s)
            more = connection.recv(_RECEIVE_BYTES)
            if not more:
                raise ConnectionResetError("the server closed the connection without a response")
            data += more
            received += len(more)
            if received > _HEAD_BYTES:
                raise OSError(f"no end of the response's headers in {_HEAD_BYTES} bytes")
        head = _parse_head(data[:size], data[size + len(_END) :])
        if head.status >= 200 or head.status == 101:
            transfer.begin_body()
            return head
        data = head.rest


def _parse_head(data: bytes, rest: bytes) -> ResponseHead:
    first, *lines = data.decode("latin-1").split("\r\n")
    found = _STATUS_LINE.match(first)
    if found is None:
        raise OSError(f"not a response of HTTP/1.1: {first[:80]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        value = value.strip()
        if headers.setdefault(name.lower(), value) != value and name.lower() == "content-length":
            raise OSError("two different lengths of one response")
    if found[1] == "HTTP/1.0":
        headers["connection"] = "close"
    return ResponseHead(int(found[2]), f"{found[2]}{first[found.end() :]}", headers, rest)


def _check_head(
    connection: socket.socket,
    head: ResponseHead,
    transfer: Transfer,
    asked: tuple[str, int, int | None],
) -> tuple[int, FileFacts]:
    """Return the length of the body of a response that has the requested range, and what it says about the file.

    Raises:
        OSError: The server's error.
        StorageError: If the server sends other bytes.
    """
    if head.status not in (200, 206):
        raise _status_error(connection, head, transfer)
    path, start, end = asked
    facts = check_head(path, start, end, head.status, head.headers)
    if head.length is None:
        raise OSError("Content-Length Header missing")
    if end is not None and head.length > end - start:
        raise ranges_ignored_error(path, start)
    return head.length, facts


def _receive_body(
    connection: socket.socket, rest: bytes, body: ReceiveBuffer, size: int, transfer: Transfer
) -> tuple[int, Exception | None]:
    """Receive ``size`` bytes, the first of which came with the headers; return how many arrived, and why no more."""
    got = min(len(rest), size)
    body.fill(rest[:got])
    try:
        while got < size and (more := _receive_some(connection, body, size - got, transfer)):
            body.advance(more)
            got += more
            transfer.receive(more)
    except TimeoutError:
        return got, transfer.late()
    except OSError as broken:
        return got, broken
    if got < size:
        return got, ConnectionResetError(f"the connection ended after {got} of {size} bytes")
    return got, None


def _receive_some(
    connection: socket.socket, body: ReceiveBuffer, size: int, transfer: Transfer
) -> int:
    """Receive the next bytes of a body; return how many, 0 if the connection has ended.

    Raises:
        TimeoutError: If none arrives in time.
    """
    if size > _WAKE_BYTES:
        _set_wake(connection, _WAKE_BYTES)
        connection.settimeout(min(transfer.left_s / 2, _WAKE_AFTER_S))
        try:
            return connection.recvmsg_into(body.next_pieces(size))[0]
        except TimeoutError:  # fewer bytes: a slow connection
            pass
        finally:
            _set_wake(connection, 1)
    connection.settimeout(transfer.left_s)
    return connection.recvmsg_into(body.next_pieces(size))[0]


def _set_wake(connection: socket.socket, nbytes: int) -> None:
    with suppress(OSError):  # a sandbox that does not know it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)


def _status_error(
    connection: socket.socket, head: ResponseHead, transfer: Transfer
) -> HttpStatusError:
    """Return the error of a response, with the server's code and message, or as much of it as arrives in time."""
    body = head.rest
    is_sent = head.length != 0 and (head.length or "transfer-encoding" in head.headers)
    # The length may be missing, and a chunked body need not be decoded to find its code.
    while (
        is_sent
        and b"</Error>" not in body
        and len(body) < min(head.length or _HEAD_BYTES, _HEAD_BYTES)
    ):
        try:
            connection.settimeout(transfer.left_s)
            more = connection.recv(_RECEIVE_BYTES)
        except OSError:
            break
        if not more:
            break
        body += more
    return HttpStatusError(head.status, f"{head.text[4:]}: {body.decode('utf-8', 'replace')}")
