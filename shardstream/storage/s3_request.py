"""Signed GETs of S3 objects: the server of a bucket, and the signature, by botocore's signer.

Only requests that the client of s3fs would send to the same server, with the same signature, are made here; `s3fs_only` says for which
settings that is unknown.
"""

from __future__ import annotations

import importlib.util
import re
import ssl
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from shardstream.storage.http_status import HttpStatusError
from shardstream.storage.response_head import range_header
from shardstream.storage.s3_config import S3Settings

_PORTS = {"http": 80, "https": 443}
# It becomes part of a host name. The hosts of isolated partitions (iso) have other names.
_AWS_REGION = re.compile(r"(?!.*-iso)[a-z]{2}(-[a-z]+)+-\d{1,2}", re.ASCII)
_REGION = re.compile(r"[a-z0-9-]{1,32}", re.ASCII)
# Names with dots are not covered by the certificate of AWS's virtual hosts.
_HOST_LABEL = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", re.ASCII)
_IP_ADDRESS = re.compile(r":|\.\d+$", re.ASCII)
_DIRECTORY_BUCKET = "--x-s3"  # S3 Express: requests of a session (CreateSession)


class Server(NamedTuple):
    """The address of a server, and its name in the Host header."""

    is_tls: bool
    host: str
    port: int
    authority: str


def s3fs_only(settings: S3Settings) -> str | None:
    """Return why only s3fs knows the server of these settings; None if it is known here, too."""
    if importlib.util.find_spec("botocore") is None:
        return "botocore, which signs requests, is not installed"
    if settings.endpoint is None and not _AWS_REGION.fullmatch(settings.region):
        return f"the hosts of the region {settings.region!r} are known to s3fs only"
    url = _service_url(settings, settings.region)
    if url.scheme not in _PORTS or not url.hostname or "@" in url.netloc:
        return "the endpoint is no plain URL of a server"
    if url.query or url.fragment:
        return "the endpoint has a query"
    proxies = getproxies()
    if (proxies.get(url.scheme) or proxies.get("all")) and not proxy_bypass(url.hostname):
        return "a proxy is between, to which only s3fs connects"
    return None


def s3fs_only_path(path: str) -> str | None:
    """Return why only s3fs can request a path, "bucket/key"; None if it can be requested here, too."""
    bucket = path.partition("/")[0]
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "servers disagree about a key of that name"
    if ":" in bucket or bucket.endswith(_DIRECTORY_BUCKET):
        return "an access point or a directory bucket"
    return None


class _Bucket(NamedTuple):
    """Where the objects of a bucket are."""

    server: Server
    url: str
    """Without a path."""
    path: str
    region: str


class S3Requests:
    """Makes the GETs of one S3 service.

    Args:
        settings: Its server and credentials, for which `s3fs_only` has no objection.
    """

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._buckets: dict[str, _Bucket] = {}
        self._sign = _signer(settings)

    def get(self, path: str, start: int, end: int | None) -> tuple[Server, bytes]:
        """Return the server of an object, and the request of a range of it, with the credentials of this moment.

        Raises:
            Exception: An error of botocore, if there are no credentials.
        """
        name, _, key = path.partition("/")
        bucket = self._buckets.get(name) or self._locate(name, self._settings.region)
        target = f"{bucket.path}/{quote(key, safe='/~')}"
        headers = {"Host": bucket.server.authority}
        headers |= self._sign(bucket.url + target, bucket.region)
        headers |= range_header(start, end)
        lines = [f"GET {target} HTTP/1.1", *(f"{name}: {headers[name]}" for name in headers)]
        return bucket.server, "\r\n".join([*lines, "", ""]).encode("latin-1")

    def learn_region(self, path: str, error: HttpStatusError) -> bool:
        """Remember the region of a bucket that an error names; return False if it names none, or the one that was asked.

        The next request goes to the same endpoint, or to AWS's host of that region, whatever host a redirect names.
        """
        name, region = path.partition("/")[0], error.region
        rule = _AWS_REGION if self._settings.endpoint is None else _REGION
        if region is None or not rule.fullmatch(region) or region == self._buckets[name].region:
            return False
        self._locate(name, region)
        return True

    def _locate(self, name: str, region: str) -> _Bucket:
        url = _service_url(self._settings, region)
        host, path = str(url.hostname), url.path.rstrip("/")
        if (
            self._settings.virtual_hosts
            and _HOST_LABEL.fullmatch(name)
            and not _IP_ADDRESS.search(host)
        ):
            host = f"{name}.{host}"
        else:
            path += f"/{quote(name, safe='~')}"
        server = _server(url, host)
        bucket = _Bucket(server, f"{url.scheme}://{server.authority}", path, region)
        self._buckets[name] = bucket
        return bucket


def _signer(settings: S3Settings) -> Callable[[str, str], dict[str, str]]:
    """Return a function that makes the headers of a GET of a URL in a region, with the credentials of that moment."""
    paid = {"x-amz-request-payer": "requester"} if settings.requester_pays else {}
    found = settings.credentials
    if settings.anonymous or found is None:
        return lambda *_: paid
    from botocore.auth import S3SigV4Auth  # noqa: PLC0415  (comes with s3fs, an extra)
    from botocore.awsrequest import AWSRequest  # noqa: PLC0415
    from botocore.credentials import Credentials  # noqa: PLC0415

    def sign(url: str, region: str) -> dict[str, str]:
        known: dict[str, Any] = found()
        credentials = Credentials(
            known["access_key_id"], known["secret_access_key"], known["token"]
        )
        request = AWSRequest("GET", url, headers=paid)
        S3SigV4Auth(credentials, "s3", region).add_auth(request)
        return dict(request.headers.items())

    return sign


def _service_url(settings: S3Settings, region: str) -> SplitResult:
    domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return urlsplit(settings.endpoint or f"https://s3.{region}.{domain}")


def _server(url: SplitResult, host: str) -> Server:
    default = _PORTS[url.scheme]
    port = url.port or default
    name = f"[{host}]" if ":" in host else host
    authority = name if port == default else f"{name}:{port}"
    return Server(url.scheme == "https", host, port, authority)


def tls_context(verify: bool | str) -> ssl.SSLContext:
    """Return what certificates are accepted: those that s3fs accepts, and those of the system.

    Args:
        verify: False accepts any; a string is the file of the certificates to trust.
    """
    context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    if verify is False:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    elif verify is True:
        from botocore.httpsession import get_cert_path  # noqa: PLC0415  (comes with s3fs, an extra)

        context.load_verify_locations(get_cert_path(True))  # a container may have none of its own
    return context
