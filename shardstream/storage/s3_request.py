"""Signed requests of S3 objects: the server of a bucket, and the signature, by botocore's signer.

Only requests that the client of s3fs would send to the same server, with the same signature, are made here; `s3fs_only` says for which
settings that is unknown.
"""

from __future__ import annotations

import importlib.util
import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from shardstream.storage.response import HttpStatusError, range_header
from shardstream.storage.s3_config import S3Settings

_T = TypeVar("_T")
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


class Upload(NamedTuple):
    """An object, or a part of one, that is sent in one request, without its bytes."""

    path: str
    """Path of the object."""
    size: int
    """Bytes."""
    md5: str
    """MD5 of them in base64."""
    query: str = ""
    """Names the part, for example "?partNumber=1&uploadId=2"."""
    headers: Mapping[str, str] = {}
    """Further headers, such as a condition."""


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
    """Makes the requests of one S3 service.

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
        return self._request("GET", path, "", {}, range_header(start, end))

    def put(self, upload: Upload) -> tuple[Server, bytes]:
        """Return the server of an object, and the head of the request that sends it, or a part of it (see `get`).

        The MD5 is signed, and the server compares it with the body, so the body is not signed.
        """
        unsigned = {"Content-Length": str(upload.size)}
        signed = {"Content-MD5": upload.md5, **upload.headers}
        return self._request("PUT", upload.path, upload.query, signed, unsigned)

    def _request(
        self,
        method: str,
        path: str,
        query: str,
        signed: Mapping[str, str],
        unsigned: Mapping[str, str],
    ) -> tuple[Server, bytes]:
        name, _, key = path.partition("/")
        bucket = self._bucket(name)
        target = f"{bucket.path}/{quote(key, safe='/~')}{query}"
        headers = {"Host": bucket.server.authority}
        headers |= self._sign(method, bucket.url + target, bucket.region, signed)
        headers |= unsigned
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {headers[name]}" for name in headers)]
        return bucket.server, "\r\n".join([*lines, "", ""]).encode("latin-1")

    def send(self, path: str, request: Callable[[], _T]) -> _T:
        """Send a request of an object, once more if its answer names another region than the request.

        The second one goes to the same endpoint, or to AWS's host of that region, whatever host a redirect names.
        """
        name = path.partition("/")[0]
        # Of this request: other threads may learn the region meanwhile.
        asked = self._bucket(name).region
        try:
            return request()
        except HttpStatusError as error:
            rule = _AWS_REGION if self._settings.endpoint is None else _REGION
            if error.region in (None, asked) or not rule.fullmatch(error.region):
                raise
            self._locate(name, error.region)
        return request()

    def _bucket(self, name: str) -> _Bucket:
        return self._buckets.get(name) or self._locate(name, self._settings.region)

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


def _signer(settings: S3Settings) -> Callable[[str, str, str, Mapping[str, str]], dict[str, str]]:
    """Return a function that signs a method, a URL and headers in a region, with the credentials of that moment; the body is not signed."""
    paid = {"x-amz-request-payer": "requester"} if settings.requester_pays else {}
    found = settings.credentials
    if settings.anonymous or found is None:
        return lambda _method, _url, _region, signed: paid | dict(signed)
    from botocore.auth import S3SigV4Auth  # noqa: PLC0415  (comes with s3fs, an extra)
    from botocore.awsrequest import AWSRequest  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415
    from botocore.credentials import Credentials  # noqa: PLC0415

    bodies_unsigned = Config(s3={"payload_signing_enabled": False})

    def sign(method: str, url: str, region: str, signed: Mapping[str, str]) -> dict[str, str]:
        known: dict[str, Any] = found()
        credentials = Credentials(
            known["access_key_id"], known["secret_access_key"], known["token"]
        )
        request = AWSRequest(method, url, headers=paid | dict(signed))
        if method == "PUT":
            request.context["client_config"] = bodies_unsigned
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
