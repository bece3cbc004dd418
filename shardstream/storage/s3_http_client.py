"""Read S3 over http and https by signed GETs whose bodies are received straight into the memory that is returned, and send parts of uploads.

A process has no threads of this client, and may fork at any time. A client library copies each body once or twice more, and reads headers
without a limit on their time.
"""

from __future__ import annotations

import http
import os
import re
import select
import socket
import ssl
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from shardstream.errors import StorageError
from shardstream.storage.response import (
    HttpStatusError,
    RangeRequest,
    RangeResponse,
    Transfer,
    ranges_ignored_error,
)
from shardstream.storage.s3_request import S3Requests, S3Settings, Server, Upload, tls_context

# Limit of a response's headers, of the trailers of its body, and of an error's body.
_HEAD_BYTES = 64 << 10
_LINE_BYTES = 4 << 10  # limit of the line before a chunk
_RECEIVE_BYTES = 16 << 10
# A thread is woken when so many bytes of a body have arrived (SO_RCVLOWAT, socket(7)) or after this time, not for each packet.
_WAKE_BYTES, _WAKE_AFTER_S = 256 << 10, 1.0
_RECORDS_BYTES = 1 << 20  # received over TLS before the time is compared with its limits
_END = b"\r\n\r\n"
_STATUS_LINE = re.compile(r"(HTTP/1\.[01]) ([1-5]\d\d)(?![^ ])", re.ASCII)
_LENGTH = re.compile(r"\d{1,18}", re.ASCII)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(;.*)?")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_REGION = re.compile(r"<Region>([^<]{1,100})</Region>")


class _Exchange:
    """An open connection for one request and its response."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.is_at_end = connection, False


class _IdleConnections:
    """Open connections at the end of a response, by server; closed when no reader has them any more."""

    def __init__(self) -> None:
        self.by_server: defaultdict[Server, list[socket.socket]] = defaultdict(list)
        # Not in `__del__`: where an error refers to a reader, its connections could be collected first, with a warning.
        weakref.finalize(self, _close_all, self.by_server)


# By process, because a child must not use those of its parent, and the certificate to trust.
_idle_of_process: weakref.WeakValueDictionary[tuple[int, str], _IdleConnections] = (
    weakref.WeakValueDictionary()
)


class S3HttpReader:
    """Reads ranges, and sends parts of uploads, over connections that are kept open; thread-safe.

    Args:
        settings: Server and credentials, for which `s3fs_only` has no objection.
    """

    def __init__(self, settings: S3Settings) -> None:
        # One for the readers of a process, so that its connections are as many as its requests, not as its datasets.
        self._idle = _idle_of_process.setdefault(
            (os.getpid(), str(settings.verify)), _IdleConnections()
        )
        self._settings, self._requests = settings, S3Requests(settings)
        self._tls: ssl.SSLContext | None = None

    def read(self, request: RangeRequest, transfer: Transfer) -> RangeResponse:
        """Send a request once, or twice if the bucket is in another region; the bytes before a cut are kept."""
        response = self._requests.send(request.path, lambda: self._read(request, transfer))
        # A body in chunks, the last of which a proxy may write after a cut.
        if request.end is None and response.size is None:
            response = replace(response, size=self._size(request.path, transfer))
        return response

    def put(self, upload: Upload, body: bytes, transfer: Transfer) -> str:
        """Send an object or a part of one, once, or twice if the bucket is in another region; return its ETag.

        Args:
            upload: Names it.
            body: Its bytes.
            transfer: Its limit holds for the whole request.
        """
        return self._requests.send(upload.path, lambda: self._put(upload, body, transfer))

    def _read(self, request: RangeRequest, transfer: Transfer) -> RangeResponse:
        server, sent = self._requests.get(request)
        with self._exchange(server, transfer) as exchange:
            connection = exchange.connection
            connection.sendall(sent)
            head = receive_head(connection, transfer)
            if head.status not in (200, 206):
                raise receive_error(connection, head, transfer)
            receive = _receive_chunked if head.is_chunked else _receive_sized
            response, is_at_end = receive(connection, request, head, transfer)
            exchange.is_at_end = is_at_end and not head.closes
        return response

    def _size(self, path: str, transfer: Transfer) -> int | None:
        """Return the length of a file, which the response to a range has, in chunks or not."""
        try:
            return self._read(RangeRequest(path, 0, 1), transfer).size
        except HttpStatusError as error:
            if error.status != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            return 0

    def _put(self, upload: Upload, body: bytes, transfer: Transfer) -> str:
        server, request = self._requests.put(upload)
        with self._exchange(server, transfer) as exchange:
            connection = exchange.connection
            # A server may refuse a part, or name the region of its bucket, before the whole body has arrived, and close.
            with suppress(ConnectionError, ssl.SSLEOFError):
                connection.sendall(request)
                connection.sendall(body)
            head = receive_head(connection, transfer)
            if head.status != http.HTTPStatus.OK:
                raise receive_error(connection, head, transfer)
            exchange.is_at_end = head.length == 0 and not head.rest and not head.closes
        return head.headers.get("etag", "")

    @contextmanager
    def _exchange(self, server: Server, transfer: Transfer) -> Iterator[_Exchange]:
        """Use an open connection, or a new one, until the response is not needed any more; keep it if it is at the end of that."""
        exchange = _Exchange(self._idle_connection(server) or self._connect(server))
        connection = exchange.connection
        try:
            with transfer.cancelled.ending(partial(end_receive, connection)):
                connection.settimeout(transfer.left_s)
                yield exchange
        finally:
            if exchange.is_at_end:
                self._idle.by_server[server].append(connection)
            else:
                connection.close()

    def _idle_connection(self, server: Server) -> socket.socket | None:
        """Return an open connection that the server has not closed; None if there is none."""
        idle = self._idle.by_server[server]
        while idle:
            try:
                connection = idle.pop()  # atomic, as is `append`
            except IndexError:  # another thread was first
                return None
            if is_open(connection):
                return connection
            connection.close()
        return None

    def _connect(self, server: Server) -> socket.socket:
        if server.is_tls and self._tls is None:
            self._tls = tls_context(self._settings.verify)
        context = self._tls if server.is_tls else None
        return connect(server.host, server.port, context, self._settings.connect_s)


def _close_all(idle: Mapping[Server, list[socket.socket]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.close()


def _receive_sized(
    connection: socket.socket, request: RangeRequest, head: ResponseHead, transfer: Transfer
) -> tuple[RangeResponse, bool]:
    """Receive a body of a known length; return it, and whether the connection is at its end.

    Raises:
        StorageError: If the server sends other bytes than the requested ones.
    """
    facts = request.check_head(head.status, head.headers)
    if head.length is None:
        raise StorageError(
            "the server sends no length of the file",
            remedy="serve it with one that sends Content-Length",
            shard=request.path,
        )
    if request.end is not None and head.length > request.limit_bytes:
        raise ranges_ignored_error(request.path, request.start)
    wanted = int(min(head.length, request.limit_bytes))
    body = np.empty(wanted, np.uint8).data  # not filled with zeros first
    got, error = receive_body(connection, head.rest, body, transfer)
    response = RangeResponse(data=body[:got], size=facts.size, version=facts.version, error=error)
    return response, got == head.length >= len(head.rest)


def _receive_chunked(
    connection: socket.socket, request: RangeRequest, head: ResponseHead, transfer: Transfer
) -> tuple[RangeResponse, bool]:
    """Receive a body in chunks, as `_receive_sized`."""
    facts = request.check_head(head.status, head.headers)
    data, is_whole, error = receive_chunks(connection, head.rest, request.limit_bytes, transfer)
    if request.end is not None and len(data) > request.limit_bytes:
        raise ranges_ignored_error(request.path, request.start)
    return RangeResponse(data=data, size=facts.size, version=facts.version, error=error), is_whole


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

    @property
    def is_chunked(self) -> bool:
        """Whether the body is sent in chunks, after the last of which it is known to be whole."""
        return self.headers.get("transfer-encoding", "").lower() == "chunked"


def connect(
    host: str, port: int, context: ssl.SSLContext | None, timeout_s: float
) -> socket.socket:
    """Connect to a server, over TLS if there is a context.

    Raises:
        OSError: If that takes longer, or the certificate is not trusted or of another host.
    """
    connection = socket.create_connection((host, port), timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return (
            connection if context is None else context.wrap_socket(connection, server_hostname=host)
        )
    except BaseException:
        connection.close()
        raise


def is_open(connection: socket.socket) -> bool:
    """Return whether a connection that is at the end of a response can be used again: the server has neither closed it nor sent more."""
    # More that was decrypted with the response.
    if isinstance(connection, ssl.SSLSocket) and connection.pending():
        return False
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)


def end_receive(connection: socket.socket) -> None:
    """End what another thread receives: a close would not wake it."""
    with suppress(OSError):  # it has ended already
        # That of an `SSLSocket` would drop its keys first: the other thread would receive encrypted bytes as data.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


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


def receive_body(
    connection: socket.socket, rest: bytes, body: memoryview, transfer: Transfer
) -> tuple[int, Exception | None]:
    """Fill ``body``, whose first bytes came with the headers; return how many bytes arrived, and why no more."""
    size = len(body)
    got = min(len(rest), size)
    body[:got] = rest[:got]
    try:
        while got < size and (more := _receive_some(connection, body[got:], transfer)):
            got += more
            transfer.receive(more)
    except TimeoutError:
        return got, transfer.late()
    except OSError as broken:
        return got, broken
    if got < size:
        return got, ConnectionResetError(f"the connection ended after {got} of {size} bytes")
    return got, None


def _receive_some(connection: socket.socket, body: memoryview, transfer: Transfer) -> int:
    """Receive the next bytes of a body; return how many, 0 if the connection has ended.

    Raises:
        TimeoutError: If none arrives in time.
    """
    # OpenSSL may hold the beginning of a record, which does not count.
    if len(body) > _WAKE_BYTES + _RECEIVE_BYTES:
        _set_wake(connection, _WAKE_BYTES)
        connection.settimeout(min(transfer.left_s / 2, _WAKE_AFTER_S))
        try:
            return _receive_present(connection, body)
        except TimeoutError:  # fewer bytes: a slow connection
            pass
        finally:
            _set_wake(connection, 1)
    connection.settimeout(transfer.left_s)
    return _receive_present(connection, body)


def _receive_present(connection: socket.socket, body: memoryview) -> int:
    """Wait for bytes, and receive those that are there."""
    if not isinstance(connection, ssl.SSLSocket):
        return connection.recv_into(body)
    piece = body[:_RECORDS_BYTES]
    got = connection.recv_into(piece)  # one record, of at most 16 KiB
    connection.settimeout(0)
    with suppress(OSError):  # no whole record is there, or the next receive fails, too
        while 0 < got < len(piece) and (more := connection.recv_into(piece[got:])):
            got += more
    return got


def _set_wake(connection: socket.socket, nbytes: int) -> None:
    with suppress(OSError):  # a sandbox that does not know it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)


def receive_chunks(
    connection: socket.socket, rest: bytes, limit: float, transfer: Transfer
) -> tuple[bytes, bool, Exception | None]:
    """Receive a body in chunks, up to ``limit`` bytes or a few more.

    Returns:
        The bytes, whether the last chunk and the trailers have arrived, and why the bytes end early.

    Raises:
        OSError: If the body is malformed.
    """
    source, parts = _ChunkSource(connection, rest, transfer), list[bytes]()
    size, is_whole = 0, False
    try:
        while not is_whole and size <= limit:
            left = source.chunk_size()
            is_whole = not left
            while left and size <= limit:
                parts.append(source.take(left))
                left -= len(parts[-1])
                size += len(parts[-1])
                transfer.receive(len(parts[-1]))
            source.end_chunk(is_last=is_whole)
    except TimeoutError:
        return b"".join(parts), False, transfer.late()
    except _MalformedError:  # its bytes may be no bytes of the file
        raise
    except OSError as broken:
        return b"".join(parts), False, broken
    return b"".join(parts), is_whole and not source.data, None


class _MalformedError(OSError):
    """A body whose chunks are no chunks."""


class _ChunkSource:
    """The lines and bytes of a body in chunks (RFC 9112, 7.1)."""

    def __init__(self, connection: socket.socket, data: bytes, transfer: Transfer) -> None:
        self._connection, self.data, self._transfer = connection, data, transfer

    def chunk_size(self) -> int:
        found = _CHUNK.fullmatch(self._line())
        if found is None:
            raise _MalformedError("a chunk of the response does not begin with its length")
        return int(found[1], 16)

    def end_chunk(self, *, is_last: bool) -> None:
        """Receive the end of a chunk, after the last one with the trailers, which are ignored."""
        received = 0
        while line := self._line():
            received += len(line)
            if not is_last or received > _HEAD_BYTES:
                raise _MalformedError("a chunk of the response is longer than its length")

    def take(self, size: int) -> bytes:
        if not self.data:
            self._receive(min(size, _WAKE_BYTES))
        found, self.data = self.data[:size], self.data[size:]
        return found

    def _line(self) -> bytes:
        while b"\r\n" not in self.data:
            if len(self.data) > _LINE_BYTES:
                raise _MalformedError("a line between the chunks of the response has no end")
            self._receive(_RECEIVE_BYTES)
        line, _, self.data = self.data.partition(b"\r\n")
        return line

    def _receive(self, size: int) -> None:
        self._connection.settimeout(self._transfer.left_s)
        more = self._connection.recv(size)
        if not more:
            raise ConnectionResetError("the connection ended before the last chunk")
        self.data += more


def receive_error(
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
    text = body.decode("utf-8", "replace")
    code, region = _CODE.search(text), _REGION.search(text)
    return HttpStatusError(
        head.status,
        f"{head.text[4:]}: {text}",
        code=code and code[1],
        region=head.headers.get("x-amz-bucket-region") or (region and region[1]),
    )
