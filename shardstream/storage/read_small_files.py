"""Read small files on S3 with a few signed GETs, without an S3 client.

Opening a dataset reads its manifest first. Importing s3fs and setting it up for that takes 0.3 s, so the first read is a plain
GET that botocore signs (0.03 s). It is tried once. The clients, with their retries and messages, handle every other case.
"""

from __future__ import annotations

import http.client
import re
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import getproxies

from shardstream.storage.s3_config import S3Settings

_CONCURRENT_REQUESTS = 8
_REGION = re.compile(r"[a-z0-9-]+")  # it becomes part of a host name
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
        if _is_plain(settings, paths):
            _read_all(settings, paths, max_bytes, found)
    except Exception:  # noqa: BLE001, S110  (a client repeats the request and reports the error)
        pass
    return found + [None] * (len(paths) - len(found))


def _is_plain(settings: S3Settings, paths: Sequence[str]) -> bool:
    """Return whether a GET by path, signed by a fixed rule, is what the clients would send."""
    return not (
        settings.verify is False
        or settings.virtual_hosts
        or settings.requester_pays
        or (settings.credentials is None and not settings.anonymous)
        or (settings.endpoint is None and settings.region.startswith("cn-"))
        or not _REGION.fullmatch(settings.region)
        # servers disagree about empty and dotted parts
        or any(part in ("", ".", "..") for path in paths for part in path.split("/"))
        or getproxies()
    )


def _read_all(
    settings: S3Settings, paths: Sequence[str], max_bytes: int, found: list[bytes | None]
) -> None:
    """Append files to ``found`` until one is missing, too large or late."""
    endpoint = settings.endpoint or f"https://s3.{settings.region}.amazonaws.com"
    url = urlsplit(endpoint)
    is_server = url.scheme in ("http", "https") and url.hostname
    if not is_server or "@" in url.netloc or url.query or url.fragment:
        return
    folder, sign = url.path.rstrip("/"), _signer(settings)
    timeout_s = min(_TIMEOUT_S, settings.read_timeout_s)
    deadline = time.monotonic() + _TIMEOUTS * timeout_s
    with ExitStack() as stack:
        connections = [
            stack.enter_context(closing(_connect(settings, url, timeout_s)))
            for _ in paths[:_CONCURRENT_REQUESTS]
        ]

        def send(number: int) -> None:
            target = f"{folder}/{quote(paths[number], safe='/~')}"
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


def _signer(settings: S3Settings) -> Callable[[str], dict[str, str]]:
    """Return a function that returns the headers of a signed GET of a URL."""
    if settings.anonymous or settings.credentials is None:
        return lambda _: {}
    from botocore.auth import S3SigV4Auth  # noqa: PLC0415  (comes with s3fs, an extra)
    from botocore.awsrequest import AWSRequest  # noqa: PLC0415
    from botocore.credentials import Credentials  # noqa: PLC0415

    found: dict[str, Any] = settings.credentials()
    credentials = Credentials(found["access_key_id"], found["secret_access_key"], found["token"])
    auth = S3SigV4Auth(credentials, "s3", settings.region)

    def sign(url: str) -> dict[str, str]:
        request = AWSRequest("GET", url)
        auth.add_auth(request)
        return dict(request.headers.items())

    return sign


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
