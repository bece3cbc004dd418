"""One small file of an S3 server, read by the standard library alone.

Who opens a data set looks at its manifest, for which s3fs would take half a second to be imported and set up. So the first look is
a plain signed GET. Whatever is not quite plain, or goes wrong, is left to the real clients, with their retries and their words.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import re
import ssl
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit
from urllib.request import getproxies

from shardstream.storage.s3_settings import S3Settings

_MOST_BYTES = 64 << 20
_TIMEOUT_S = 5.0
_REGION = re.compile(r"[a-z0-9-]+")  # it becomes a part of a host's name
_EMPTY_SHA256 = hashlib.sha256().hexdigest()


def glance(settings: S3Settings, path: str) -> bytes | None:
    """Read a file of an S3 server, "bucket/key"; None where that takes more than one plain request."""
    endpoint = settings.endpoint or f"https://s3.{settings.region}.amazonaws.com"
    if (
        settings.verify is False
        or settings.virtual_hosts
        or settings.requester_pays
        or (settings.credentials is None and not settings.anonymous)
        or (settings.endpoint is None and settings.region.startswith("cn-"))
        or not _REGION.fullmatch(settings.region)
        or any(
            part in ("", ".", "..") for part in path.split("/")
        )  # servers differ in what they make of these
        or getproxies()
    ):
        return None
    try:
        return _get(endpoint, path, settings)
    except Exception:  # noqa: BLE001  (the real clients will meet it again, and say what it is)
        return None


def _get(endpoint: str, path: str, settings: S3Settings) -> bytes | None:
    server = urlsplit(endpoint)
    is_plain = server.scheme in ("http", "https") and server.hostname
    if not is_plain or "@" in server.netloc or server.query or server.fragment:
        return None
    target = f"{server.path.rstrip('/')}/{quote(path, safe='/~')}"
    headers = {"host": server.netloc}
    if not settings.anonymous and settings.credentials is not None:
        headers |= sign(
            target,
            host=server.netloc,
            region=settings.region,
            credentials=settings.credentials(),
            now=datetime.now(UTC),
        )
    connection = _connect(server.scheme, server.netloc, settings)
    try:
        connection.request("GET", target, headers=headers)
        answer = connection.getresponse()
        size = int(answer.headers["Content-Length"])
        if answer.status != http.client.OK or not 0 <= size <= _MOST_BYTES:
            return None
        data = answer.read(size)
        return data if len(data) == size else None
    finally:
        connection.close()


def _connect(scheme: str, host: str, settings: S3Settings) -> http.client.HTTPConnection:
    limit_s = min(_TIMEOUT_S, settings.stall_s)
    if scheme != "https":
        return http.client.HTTPConnection(host, timeout=limit_s)
    trusted = settings.verify if isinstance(settings.verify, str) else None
    context = ssl.create_default_context(cafile=trusted)
    return http.client.HTTPSConnection(host, timeout=limit_s, context=context)


def sign(
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
