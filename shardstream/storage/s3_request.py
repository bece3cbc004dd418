"""Settings of S3, by storage options and AWS variables, and signed requests: the server of a bucket, and the signature, by botocore's signer.

Options have the form of s3fs. Plain requests are sent only if all options are known here, so that both clients send the same credentials
to the same server. `cloud_variables` is the only place of this room that reads the environment.

Only requests that the client of s3fs would send to the same server, with the same signature, are made here; `s3fs_only` says for which
settings that is unknown.
"""

from __future__ import annotations

import importlib.util
import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from shardstream.errors import OptionError
from shardstream.storage.response import HttpStatusError, RangeRequest

# Without effect on reading ranges.
_IDLE = frozenset(
    {
        "asynchronous",
        "cache_regions",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "fixed_upload_size",
        "listings_expiry_time",
        "max_concurrency",
        "skip_instance_cache",
        "use_listings_cache",
    }
)
_KNOWN = _IDLE | {
    "anon",
    "client_kwargs",
    "config_kwargs",
    "endpoint_url",
    "key",
    "profile",
    "requester_pays",
    "secret",
    "token",
}
_KNOWN_CLIENT = frozenset({"endpoint_url", "region_name", "verify"})
_KNOWN_CONFIG = frozenset(
    {
        "connect_timeout",
        "max_pool_connections",
        "read_timeout",
        "request_checksum_calculation",
        "response_checksum_validation",
        "retries",
        "s3",
    }
)
# Entries of a profile in ~/.aws/config that change the server in ways that only botocore knows.
_PROFILE_DETAILS = frozenset(
    {"ca_bundle", "s3", "services", "use_dualstack_endpoint", "use_fips_endpoint"}
)
_DETAILS = ("AWS_USE_DUALSTACK_ENDPOINT", "AWS_USE_FIPS_ENDPOINT")

Credentials = Callable[[], dict[str, Any]]
_T = TypeVar("_T")
_PORTS = {"http": 80, "https": 443}
# It becomes part of a host name. The hosts of isolated partitions (iso) have other names.
_AWS_REGION = re.compile(r"(?!.*-iso)[a-z]{2}(-[a-z]+)+-\d{1,2}", re.ASCII)
_REGION = re.compile(r"[a-z0-9-]{1,32}", re.ASCII)
# Names with dots are not covered by the certificate of AWS's virtual hosts.
_HOST_LABEL = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", re.ASCII)
_IP_ADDRESS = re.compile(r":|\.\d+$", re.ASCII)
_DIRECTORY_BUCKET = "--x-s3"  # S3 Express: requests of a session (CreateSession)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """An S3 server and how to send requests to it.

    Args:
        region: Region of the signature.
        endpoint: URL of the server; None is AWS.
        credentials: Returns the credentials of this moment; None if there are none, because botocore is not installed.
        anonymous: Do not sign requests.
        virtual_hosts: Put the bucket into the host name, where it fits there.
        requester_pays: Send the header by which the reader pays.
        verify: False accepts any certificate; a string is the path of a certificate to trust.
        connect_s: Limit of the time to connect.
    """

    region: str
    endpoint: str | None = None
    credentials: Credentials | None = None
    anonymous: bool = False
    virtual_hosts: bool = False
    requester_pays: bool = False
    verify: bool | str = True
    connect_s: float = 10.0


def cloud_variables() -> Mapping[str, str]:
    """Return the environment variables of clouds (``AWS_…``, ``AZURE_…``, ``GOOGLE_…``), and that of certificates, that are not empty."""
    return {
        name: value
        for name, value in os.environ.items()
        if value and name.startswith(("AWS_", "AZURE_", "GOOGLE_", "SSL_CERT_FILE"))
    }


def _trusted_file(variables: Mapping[str, str]) -> str | None:
    """Return the file of the certificates to trust."""
    return variables.get("AWS_CA_BUNDLE") or variables.get("SSL_CERT_FILE")


def parse_s3_options(
    options: Mapping[str, Any], variables: Mapping[str, str], read_timeout_s: float
) -> S3Settings | None:
    """Parse the storage options of s3fs; None if only s3fs knows one of them.

    Args:
        options: Arguments of `s3fs.S3FileSystem`.
        variables: The AWS_… variables.
        read_timeout_s: Limit of the time without a byte.

    Raises:
        OptionError: If the endpoint is no URL, or a value has a control character, which would end a line of the request.
        Exception: An error of botocore, if a profile does not exist.
    """
    client = options.get("client_kwargs") or {}
    config = options.get("config_kwargs") or {}
    style = (config.get("s3") or {}).get("addressing_style", "auto")
    if not (
        _KNOWN.issuperset(options)
        and _KNOWN_CLIENT.issuperset(client)
        and _KNOWN_CONFIG.issuperset(config)
        and {"addressing_style"}.issuperset(config.get("s3") or {})
        and not any(variables.get(name, "").lower() == "true" for name in _DETAILS)
    ):
        return None
    profile = _profile(options, variables)
    if _PROFILE_DETAILS.intersection(profile):
        return None
    endpoint = find_endpoint(options, variables) or profile.get("endpoint_url")
    region = find_region(options, variables) or profile.get("region") or "us-east-1"
    _check_printable(region=region, endpoint=endpoint)
    if endpoint and not endpoint.lower().startswith(("http://", "https://")):
        raise OptionError(
            f"the endpoint of S3 is a URL, not {endpoint!r}; begin AWS_ENDPOINT_URL, or endpoint_url, "
            "with http:// or https://"
        )
    return S3Settings(
        region=region,
        endpoint=endpoint,
        credentials=_credentials(options, variables),
        anonymous=bool(options.get("anon")),
        virtual_hosts=style == "virtual" or (style == "auto" and not endpoint),
        requester_pays=bool(options.get("requester_pays")),
        verify=client.get("verify", _trusted_file(variables) or True),
        connect_s=float(config.get("connect_timeout") or min(10.0, read_timeout_s)),
    )


def complete_s3fs_options(
    options: Mapping[str, Any], variables: Mapping[str, str], read_timeout_s: float | None
) -> dict[str, Any]:
    """Complete the options of an `s3fs.S3FileSystem`.

    Args:
        options: The options of the user, which take precedence.
        variables: The AWS_… variables.
        read_timeout_s: Limit of the time without a byte, for a file system whose requests `retry` repeats; None for one that
            retries by itself.
    """
    # Older servers (MinIO, Ceph) refuse or drop the newer checksums.
    config: dict[str, Any] = dict.fromkeys(
        ("request_checksum_calculation", "response_checksum_validation"), "when_required"
    )
    if read_timeout_s is not None:
        config |= {
            "connect_timeout": min(10.0, read_timeout_s),
            "read_timeout": read_timeout_s,
            "max_pool_connections": 64,
            "retries": {"total_max_attempts": 1},
        }
    complete = {"use_listings_cache": False, **options}
    complete["config_kwargs"] = config | dict(options.get("config_kwargs") or {})
    client = dict(options.get("client_kwargs") or {})
    # botocore reads neither.
    if region := variables.get("AWS_REGION"):
        client.setdefault("region_name", region)
    if "SSL_CERT_FILE" in variables and "ca_bundle" not in _profile(options, variables):
        client.setdefault("verify", _trusted_file(variables))
    return complete | ({"client_kwargs": client} if client else {})


def find_region(options: Mapping[str, Any], variables: Mapping[str, str]) -> str | None:
    """Return the region that options or variables name."""
    given: str | None = (options.get("client_kwargs") or {}).get("region_name")
    return given or variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION")


def find_endpoint(options: Mapping[str, Any], variables: Mapping[str, str]) -> str | None:
    """Return the server that options or variables name."""
    given: str | None = options.get("endpoint_url") or (options.get("client_kwargs") or {}).get(
        "endpoint_url"
    )
    if given or variables.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return given
    return variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL")


def _profile(options: Mapping[str, Any], variables: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the entries of the user's profile; none without a profile, or without botocore, which reads it."""
    named = options.get("profile") or variables.get("AWS_PROFILE")
    if importlib.util.find_spec("botocore") is None or not (named or _has_profiles(variables)):
        return {}
    found: Mapping[str, Any] = _session(options).get_scoped_config()
    if variables.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return {name: value for name, value in found.items() if name != "endpoint_url"}
    return found


def _has_profiles(variables: Mapping[str, str]) -> bool:
    """Return whether a file of profiles exists; importing botocore to find out takes 0.1 s."""
    places = (
        variables.get("AWS_CONFIG_FILE", "~/.aws/config"),
        variables.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    )
    # The rules of botocore: an unknown home has no profiles.
    return any(os.path.isfile(os.path.expanduser(os.path.expandvars(place))) for place in places)


def _session(options: Mapping[str, Any]) -> Any:
    import botocore.session  # noqa: PLC0415  (comes with s3fs, which is an extra)

    return botocore.session.Session(profile=options.get("profile"))


def _credentials(options: Mapping[str, Any], variables: Mapping[str, str]) -> Credentials | None:
    key, secret, token = (options.get(name) for name in ("key", "secret", "token"))
    if not (key and secret) and not options.get("profile"):
        key, secret = (
            variables.get(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
        )
        token = variables.get("AWS_SESSION_TOKEN")
    if key and secret:
        _check_printable(access_key_id=key, secret_access_key=secret, token=token)
        fixed = {"access_key_id": key, "secret_access_key": secret, "token": token}
        return lambda: fixed
    if importlib.util.find_spec("botocore") is None:
        return None
    return _FromBotocore(_session(options))


def _check_printable(**values: str | None) -> None:
    for name, value in values.items():
        if value is not None and not value.isprintable():
            raise OptionError(
                f"the {name} of S3 has a control character, such as a line end; remove it from the AWS variable "
                "or the storage options"
            )


class _FromBotocore:
    """Credentials of profiles, single sign-on, roles, containers and instances, found and renewed by botocore."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __call__(self) -> dict[str, Any]:
        from botocore.exceptions import NoCredentialsError  # noqa: PLC0415

        found = self._session.get_credentials()
        if found is None:
            raise NoCredentialsError
        frozen = found.get_frozen_credentials()
        credentials = {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
        }
        _check_printable(**credentials)
        return credentials


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

    def get(self, request: RangeRequest) -> tuple[Server, bytes]:
        """Return the server of an object, and the bytes that ask for a range of it, with the credentials of this moment.

        Raises:
            Exception: An error of botocore, if there are no credentials.
        """
        return self._request("GET", request.path, "", {}, request.header)

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
