"""Read small files on S3 with a few signed GETs, without an S3 client.

Opening a dataset reads its manifest first. Importing s3fs and setting it up for that takes 0.3 s, so the first read is a plain
GET that botocore signs (0.03 s). It is tried once. The clients, with their retries and messages, handle every other case.
"""

from __future__ import annotations

import http
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from urllib.parse import SplitResult

from shardstream.storage.s3_config import S3Settings
from shardstream.storage.s3_http_client import ResponseHead, receive_head
from shardstream.storage.s3_request import are_plain, request_signer, server_url, signed_get
from shardstream.storage.transfer import Transfer

_CONCURRENT_REQUESTS = 8
_TIMEOUT_S = 5.0  # without a byte
_RECEIVE_BYTES = 1 << 16


def read_small_files(
    settings: S3Settings, paths: Sequence[str], max_bytes: int
) -> list[bytes | None]:
    """Read files of at most ``max_bytes`` bytes from one S3 server.

    Several requests are sent before the first response is awaited. No threads are used: each would leave a malloc arena to the
    workers that are forked later, and their range reads would fragment it (10 MB per thread).

    Args:
        settings: The server and its credentials.
        paths: The files, as "bucket/key".
        max_bytes: The largest file to read.

    Returns:
        The files in order; None from the first one on that a plain GET did not return.
    """
    found: list[bytes | None] = []
    try:
        url = server_url(settings)
        if url is not None and are_plain(paths):
            _read_all(settings, url, paths, max_bytes, found)
    except Exception:  # noqa: BLE001, S110  (a client repeats the request and reports the error)
        pass
    return found + [None] * (len(paths) - len(found))


def _read_all(
    settings: S3Settings,
    url: SplitResult,
    paths: Sequence[str],
    max_bytes: int,
    found: list[bytes | None],
) -> None:
    """Append files to ``found`` until one is missing, too large or late."""
    sign = request_signer(settings)
    timeout_s = min(_TIMEOUT_S, settings.read_timeout_s)
    with ExitStack() as stack:
        waiting: deque[socket.socket] = deque()  # for a response, in the order of the files

        def send(path: str, connection: socket.socket | None = None) -> None:
            if connection is None:
                connection = stack.enter_context(_connect(settings, url, timeout_s))
            connection.sendall(signed_get(url, sign, path))
            waiting.append(connection)

        unsent = iter(paths)
        for path in islice(unsent, _CONCURRENT_REQUESTS):
            send(path)
        while waiting:
            connection, transfer = waiting.popleft(), Transfer(timeout_s)
            head = receive_head(connection, transfer)
            data = _receive_body(connection, head, transfer, max_bytes)
            if data is None:
                return
            found.append(data)
            if head.closes:
                connection.close()
            for path in islice(unsent, 1):
                send(path, None if head.closes else connection)


def _connect(settings: S3Settings, url: SplitResult, timeout_s: float) -> socket.socket:
    host = str(url.hostname)
    if url.scheme == "http":
        return socket.create_connection((host, url.port or 80), timeout_s)
    trusted = settings.verify if isinstance(settings.verify, str) else None
    context = ssl.create_default_context(cafile=trusted)
    connection = socket.create_connection((host, url.port or 443), timeout_s)
    try:
        return context.wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise


def _receive_body(
    connection: socket.socket, head: ResponseHead, transfer: Transfer, max_bytes: int
) -> bytes | None:
    """Receive a file after the head of the response; None if the response is another one.

    Raises:
        OSError: If it does not arrive whole, and in time.
    """
    size = head.length
    if head.status != http.HTTPStatus.OK or size is None or size > max_bytes:
        return None
    body = bytearray(head.rest)
    while len(body) < size:
        connection.settimeout(transfer.left_s)
        piece = connection.recv(_RECEIVE_BYTES)
        if not piece:
            return None
        body += piece
        transfer.receive(len(piece))
    return bytes(body) if len(body) == size else None
