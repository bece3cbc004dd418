"""Read small files on S3 with a few signed GETs, without an S3 client.

Opening a dataset reads its manifest first. Importing s3fs and setting it up for that takes 0.3 s, so the first read is a plain
GET that botocore signs (0.03 s). It is tried once. The clients, with their retries and messages, handle every other case.
"""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from urllib.parse import SplitResult

from shardstream.storage.s3_config import S3Settings
from shardstream.storage.s3_request import (
    are_plain,
    request_signer,
    request_target,
    server_url,
)

_CONCURRENT_REQUESTS = 8
_TIMEOUT_S = 5.0  # without a byte
_TIMEOUTS = 6  # of these, for all responses: a server may send a byte now and then


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
    deadline = time.monotonic() + _TIMEOUTS * timeout_s
    with ExitStack() as stack:
        connections = [
            stack.enter_context(closing(_connect(settings, url, timeout_s)))
            for _ in paths[:_CONCURRENT_REQUESTS]
        ]

        def send(number: int) -> None:
            target = request_target(url, paths[number])
            headers = sign(f"{url.scheme}://{url.netloc}{target}")
            connections[number % len(connections)].request("GET", target, headers=headers)

        for number in range(len(connections)):
            send(number)
        for number in range(len(paths)):
            response = connections[number % len(connections)].getresponse()
            data = _read_body(response, max_bytes, deadline)
            if data is None:
                return
            found.append(data)
            if number + len(connections) < len(paths):
                send(number + len(connections))


def _connect(
    settings: S3Settings, url: SplitResult, timeout_s: float
) -> http.client.HTTPConnection:
    if url.scheme == "http":
        return http.client.HTTPConnection(url.netloc, timeout=timeout_s)
    trusted = settings.verify if isinstance(settings.verify, str) else None
    context = ssl.create_default_context(cafile=trusted)
    return http.client.HTTPSConnection(url.netloc, timeout=timeout_s, context=context)


def _read_body(response: http.client.HTTPResponse, max_bytes: int, deadline: float) -> bytes | None:
    size = int(response.headers["Content-Length"])
    if response.status != http.client.OK or not 0 <= size <= max_bytes:
        return None
    body = bytearray()
    while len(body) < size and (piece := response.read1(size - len(body))):
        body += piece
        if time.monotonic() > deadline:
            return None
    response.read()  # read1 does not note the end, after which the connection can be used again
    return bytes(body) if len(body) == size else None
