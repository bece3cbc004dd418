"""Read S3 over http and https by signed GETs whose bodies are received straight into the memory that is returned, and send parts of uploads.

A process has no threads of this client, and may fork at any time.
"""

from __future__ import annotations

import http
import os
import socket
import ssl
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple, Unpack

import numpy as np

from shardstream.errors import StorageError
from shardstream.storage.http_connection import (
    ResponseHead,
    connect,
    end_receive,
    is_open,
    receive_body,
    receive_chunks,
    receive_error,
    receive_head,
)
from shardstream.storage.response import (
    FileFacts,
    HttpStatusError,
    RangeResponse,
    RequestOptions,
    check_head,
    max_response_bytes,
    ranges_ignored_error,
)
from shardstream.storage.s3_config import S3Settings
from shardstream.storage.s3_request import S3Requests, Server, Upload, tls_context
from shardstream.storage.transfer import Transfer

_CONCURRENT_REQUESTS = 8
_SMALL_TIMEOUT_S = 5.0  # without a byte


class _Exchange(NamedTuple):
    """A request that was sent."""

    server: Server
    connection: socket.socket
    path: str
    start: int
    end: int | None


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

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        transfer: Transfer,
        **options: Unpack[RequestOptions],
    ) -> RangeResponse:
        """Request the bytes ``start`` to ``end`` once, or twice if the bucket is in another region; the bytes before a cut are kept."""
        response = self._requests.send(
            path, lambda: self._read(path, start, end, transfer, **options)
        )
        # A body in chunks, the last of which a proxy may write after a cut.
        if end is None and response.size is None:
            response = replace(response, size=self._size(path, transfer))
        return response

    def put(self, upload: Upload, body: bytes, transfer: Transfer) -> str:
        """Send an object or a part of one, once, or twice if the bucket is in another region; return its ETag.

        Args:
            upload: Names it.
            body: Its bytes.
            transfer: Its limit holds for the whole request.
        """
        return self._requests.send(upload.path, lambda: self._put(upload, body, transfer))

    def read_small_files(self, paths: Sequence[str], max_bytes: int) -> list[bytes | None]:
        """Read files of at most ``max_bytes`` bytes, each once; None from the first one on that did not arrive.

        Several requests are sent before the first response is awaited. No threads are used: each would leave a malloc arena to the
        workers that are forked later, and their range reads would fragment it (10 MB per thread).
        """
        found: list[bytes | None] = []
        timeout_s = min(_SMALL_TIMEOUT_S, self._settings.read_timeout_s)
        waiting: deque[_Exchange] = deque()
        unsent = iter(paths)
        try:
            for path in islice(unsent, _CONCURRENT_REQUESTS):
                waiting.append(self._send(path, 0, None, timeout_s))
            while waiting:
                # One byte more, if the file has more.
                response = self._receive(
                    waiting.popleft(), Transfer(timeout_s), max_bytes=max_bytes + 1
                )
                if response.error is not None or len(response.data) > max_bytes:
                    break
                found.append(bytes(response.data))
                for path in islice(unsent, 1):
                    waiting.append(self._send(path, 0, None, timeout_s))
        except Exception:  # noqa: BLE001, S110  (the caller reads it with retries, which report the error)
            pass
        finally:
            for exchange in waiting:
                exchange.connection.close()
        return found + [None] * (len(paths) - len(found))

    def _read(
        self,
        path: str,
        start: int,
        end: int | None,
        transfer: Transfer,
        **options: Unpack[RequestOptions],
    ) -> RangeResponse:
        exchange = self._send(path, start, end, transfer.left_s)
        return self._receive(exchange, transfer, **options)

    def _size(self, path: str, transfer: Transfer) -> int | None:
        """Return the length of a file, which the response to a range has, in chunks or not."""
        try:
            return self._read(path, 0, 1, transfer).size
        except HttpStatusError as error:
            if error.status != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            return 0

    def _put(self, upload: Upload, body: bytes, transfer: Transfer) -> str:
        server, request = self._requests.put(upload)
        connection, is_reusable = self._idle_connection(server) or self._connect(server), False
        try:
            with transfer.cancelled.ending(partial(end_receive, connection)):
                connection.settimeout(transfer.left_s)
                # A server may refuse a part, or name the region of its bucket, before the whole body has arrived, and close.
                with suppress(ConnectionError, ssl.SSLEOFError):
                    connection.sendall(request)
                    connection.sendall(body)
                head = receive_head(connection, transfer)
                if head.status != http.HTTPStatus.OK:
                    raise receive_error(connection, head, transfer)
            is_reusable = head.length == 0 and not head.rest and not head.closes
        finally:
            if is_reusable:
                self._idle.by_server[server].append(connection)
            else:
                connection.close()
        return head.headers.get("etag", "")

    def _send(self, path: str, start: int, end: int | None, timeout_s: float) -> _Exchange:
        """Send a request over an open connection, or a new one."""
        server, request = self._requests.get(path, start, end)
        connection = self._idle_connection(server) or self._connect(server)
        try:
            connection.settimeout(timeout_s)
            connection.sendall(request)
        except BaseException:
            connection.close()
            raise
        return _Exchange(server, connection, path, start, end)

    def _receive(
        self, exchange: _Exchange, transfer: Transfer, **options: Unpack[RequestOptions]
    ) -> RangeResponse:
        """Receive the response, and keep its connection if that is at the end of it."""
        connection, is_reusable = exchange.connection, False
        try:
            with transfer.cancelled.ending(partial(end_receive, connection)):
                head = receive_head(connection, transfer)
                if head.status not in (200, 206):
                    raise receive_error(connection, head, transfer)
                receive = _receive_chunked if head.is_chunked else _receive_sized
                response, is_at_end = receive(exchange, head, transfer, **options)
            is_reusable = is_at_end and not head.closes
        finally:
            if is_reusable:
                self._idle.by_server[exchange.server].append(connection)
            else:
                connection.close()
        return response

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
    exchange: _Exchange,
    head: ResponseHead,
    transfer: Transfer,
    **options: Unpack[RequestOptions],
) -> tuple[RangeResponse, bool]:
    """Receive a body of a known length; return it, and whether the connection is at its end.

    Raises:
        StorageError: If the server sends other bytes than the requested ones.
    """
    facts = _check(exchange, head)
    if head.length is None:
        raise StorageError(
            "the server sends no length of the file",
            remedy="serve it with one that sends Content-Length",
            shard=exchange.path,
        )
    if exchange.end is not None and head.length > exchange.end - exchange.start:
        raise ranges_ignored_error(exchange.path, exchange.start)
    limit = max_response_bytes(exchange.start, exchange.end, options.get("max_bytes"))
    wanted = int(min(head.length, limit))
    body = np.empty(wanted, np.uint8).data  # not filled with zeros first
    got, error = receive_body(exchange.connection, head.rest, body, transfer)
    response = RangeResponse(data=body[:got], size=facts.size, version=facts.version, error=error)
    return response, got == head.length >= len(head.rest)


def _receive_chunked(
    exchange: _Exchange,
    head: ResponseHead,
    transfer: Transfer,
    **options: Unpack[RequestOptions],
) -> tuple[RangeResponse, bool]:
    """Receive a body in chunks, as `_receive_sized`."""
    facts = _check(exchange, head)
    limit = max_response_bytes(exchange.start, exchange.end, options.get("max_bytes"))
    data, is_whole, error = receive_chunks(exchange.connection, head.rest, limit, transfer)
    if exchange.end is not None and len(data) > limit:
        raise ranges_ignored_error(exchange.path, exchange.start)
    return RangeResponse(data=data, size=facts.size, version=facts.version, error=error), is_whole


def _check(exchange: _Exchange, head: ResponseHead) -> FileFacts:
    return check_head(exchange.path, exchange.start, exchange.end, head.status, head.headers)
