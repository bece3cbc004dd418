"""Small files of an S3 server, read by the standard library alone.

Who opens a data set looks at its manifest, for which s3fs would take half a second to be imported and set up. So the first look is
a plain signed GET, and the next at a few small indexes. Whatever is not quite plain, or goes wrong, is left to the real clients,
with their retries and their words.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import io
import math
import re
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies

from shardstream.storage.s3_config import S3Settings

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_CONCURRENT_REQUESTS = 8
_TIMEOUT_S = 5.0  # without a byte
_TIMEOUTS = 6  # of these, all answers take: a server may send a byte now and then
_REGION = re.compile(r"[a-z0-9-]+")  # it becomes a part of a host's name
_EMPTY_SHA256 = hashlib.sha256().hexdigest()


def read_small_files(
    settings: S3Settings, paths: Sequence[str], max_bytes: int
) -> list[bytes | None]:
    """Read files of ``max_bytes`` bytes of an S3 server, "bucket/key"; None where that takes more than one plain request, and for all behind such a one.

    Several are asked for before the first answer is waited for, without threads: each would leave an arena of malloc to the workers
    that are forked later, in which their range reads lie apart (10 MB each).
    """
    endpoint = settings.endpoint or f"https://s3.{settings.region}.amazonaws.com"
    if (
        settings.verify is False
        or settings.virtual_hosts
        or settings.requester_pays
        or (settings.credentials is None and not settings.anonymous)
        or (settings.endpoint is None and settings.region.startswith("cn-"))
        or not _REGION.fullmatch(settings.region)
        or any(
            part in ("", ".", "..") for path in paths for part in path.split("/")
        )  # servers differ in what they make of these
        or getproxies()
    ):
        return [None] * len(paths)
    found: list[bytes | None] = []
    try:
        with closing(_Server(endpoint, settings)) as server:
            found.extend(takewhile(lambda data: data is not None, server.get(paths, max_bytes)))
    except Exception:  # noqa: BLE001, S110  (the real clients will meet it again, and say what it is)
        pass
    return found + [None] * (len(paths) - len(found))


class _Server:
    """Some connections to a server.

    Args:
        endpoint: Its URL.
        settings: How to talk to it.

    Raises:
        ValueError: If that is no plain URL.
    """

    def __init__(self, endpoint: str, settings: S3Settings) -> None:
        url = urlsplit(endpoint)
        is_plain = url.scheme in ("http", "https") and url.hostname
        if not is_plain or "@" in url.netloc or url.query or url.fragment:
            raise ValueError("no plain URL")
        self._host, self._folder, self._settings = url.netloc, url.path.rstrip("/"), settings
        self._tls: ssl.SSLContext | None = None
        if url.scheme == "https":
            trusted = settings.verify if isinstance(settings.verify, str) else None
            self._tls = ssl.create_default_context(cafile=trusted)
        self._limit_s = min(_TIMEOUT_S, settings.read_timeout_s)
        self._deadline = time.monotonic() + _TIMEOUTS * self._limit_s
        self._connections: list[http.client.HTTPConnection] = []

    def get(self, paths: Sequence[str], max_bytes: int) -> Iterator[bytes | None]:
        """Yield the files, in order; None for what is no plain answer."""
        self._connections = [self._connect() for _ in paths[:_CONCURRENT_REQUESTS]]
        for path, connection in zip(paths, self._connections, strict=False):
            self._ask(path, connection)
        for number in range(len(paths)):
            connection = self._connections[number % _CONCURRENT_REQUESTS]
            yield _read_body(connection, max_bytes)
            if number + _CONCURRENT_REQUESTS < len(paths):
                self._ask(paths[number + _CONCURRENT_REQUESTS], connection)

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        connection = (
            http.client.HTTPConnection(self._host, timeout=self._limit_s)
            if self._tls is None
            else http.client.HTTPSConnection(self._host, timeout=self._limit_s, context=self._tls)
        )
        connection.response_class = self._response  # type: ignore[assignment]  # it is only called
        return connection

    def _response(self, sock: socket.socket, **options: Any) -> http.client.HTTPResponse:
        """Return what reads an answer until the deadline, its head included."""
        answer = http.client.HTTPResponse(sock, **options)
        answer.fp.close()
        answer.fp = io.BufferedReader(_DeadlineReader(sock, self._deadline))
        return answer

    def _ask(self, path: str, connection: http.client.HTTPConnection) -> None:
        settings, target = self._settings, f"{self._folder}/{quote(path, safe='/~')}"
        headers = {"host": self._host}
        if not settings.anonymous and settings.credentials is not None:
            headers |= sign_request(
                target,
                host=self._host,
                region=settings.region,
                credentials=settings.credentials(),
                now=datetime.now(UTC),
            )
        connection.request("GET", target, headers=headers)


class _DeadlineReader(io.RawIOBase):
    """The bytes of a socket that come before a deadline; each read has the socket's own limit, too."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._socket, self._deadline, self._limit_s = sock, deadline, sock.gettimeout() or math.inf
        self._file = sock.makefile(
            "rb", buffering=0
        )  # keeps a socket open that is closed meanwhile

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(min(left_s, self._limit_s))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_body(connection: http.client.HTTPConnection, max_bytes: int) -> bytes | None:
    answer = connection.getresponse()
    size = int(answer.headers["Content-Length"])
    if answer.status != http.client.OK or not 0 <= size <= max_bytes:
        return None
    data = answer.read(size)
    return data if len(data) == size else None


def sign_request(
    target: str, *, host: str, region: str, credentials: dict[str, str | None], now: datetime
) -> dict[str, str]:
    """Return the headers that sign a GET of an S3 server, by AWS Signature Version 4.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html

    Args:
        target: Path on the server, quoted.
        host: With the port, if it is not the usual one.
        region: To sign for.
        credentials: ``access_key_id``, ``secret_access_key`` and ``token``.
        now: In UTC.
    """
    at = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": host, "x-amz-content-sha256": _EMPTY_SHA256, "x-amz-date": at}
    if credentials["token"]:
        headers["x-amz-security-token"] = credentials["token"]
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = f"GET\n{target}\n\n{lines}\n{names}\n{_EMPTY_SHA256}"
    scope = f"{at[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{at}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{credentials['secret_access_key']}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.digest(key, part.encode(), "sha256")
    authorization = (
        f"AWS4-HMAC-SHA256 Credential={credentials['access_key_id']}/{scope}, "
        f"SignedHeaders={names}, Signature={key.hex()}"
    )
    return headers | {"Authorization": authorization}
