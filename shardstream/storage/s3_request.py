"""Plain GETs of S3: which servers and names they fit, and their signature, by botocore's signer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import getproxies

from shardstream.storage.response_head import range_header
from shardstream.storage.s3_config import S3Settings

_REGION = re.compile(r"[a-z0-9-]+")  # it becomes part of a host name

Signer = Callable[[str], dict[str, str]]
"""URL of an object -> headers of a GET of any range of it."""


def server_url(settings: S3Settings) -> SplitResult | None:
    """Return the URL of the server, if a GET by path that is signed by a fixed rule is what the clients would send."""
    if (
        settings.verify is False
        or settings.virtual_hosts
        or settings.requester_pays
        or (settings.credentials is None and not settings.anonymous)
        or (settings.endpoint is None and settings.region.startswith("cn-"))
        or not _REGION.fullmatch(settings.region)
        or getproxies()
    ):
        return None
    url = urlsplit(settings.endpoint or f"https://s3.{settings.region}.amazonaws.com")
    is_server = url.scheme in ("http", "https") and url.hostname
    if not is_server or "@" in url.netloc or url.query or url.fragment:
        return None
    return url


def are_plain(paths: Iterable[str]) -> bool:
    """Return whether no path has an empty or dotted part, about which servers disagree."""
    return not any(part in ("", ".", "..") for path in paths for part in path.split("/"))


def request_target(server: SplitResult, path: str) -> str:
    """Return the target of a GET of a path, "bucket/key"."""
    return f"{server.path.rstrip('/')}/{quote(path, safe='/~')}"


def signed_get(
    server: SplitResult, sign: Signer, path: str, start: int = 0, end: int | None = None
) -> bytes:
    """Return the request of a range of an object."""
    default_port = {"http": ":80", "https": ":443"}[server.scheme]
    host = server.netloc.removesuffix(default_port)  # as it is signed
    target = request_target(server, path)
    headers = {"Host": host, **sign(f"{server.scheme}://{host}{target}")}
    headers |= range_header(start, end)
    lines = [f"GET {target} HTTP/1.1", *(f"{name}: {headers[name]}" for name in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def request_signer(settings: S3Settings) -> Signer:
    """Return a function that signs requests, with the credentials of that moment."""
    found = settings.credentials
    if settings.anonymous or found is None:
        return lambda _: {}
    from botocore.auth import S3SigV4Auth  # noqa: PLC0415  (comes with s3fs, an extra)
    from botocore.awsrequest import AWSRequest  # noqa: PLC0415
    from botocore.credentials import Credentials  # noqa: PLC0415

    def sign(url: str) -> dict[str, str]:
        known: dict[str, Any] = found()
        credentials = Credentials(
            known["access_key_id"], known["secret_access_key"], known["token"]
        )
        request = AWSRequest("GET", url)
        S3SigV4Auth(credentials, "s3", settings.region).add_auth(request)
        return dict(request.headers.items())

    return sign
