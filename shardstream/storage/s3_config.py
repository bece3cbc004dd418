"""Translate storage options and AWS variables to settings of both S3 clients.

Options have the form of s3fs. Plain requests are sent only if all options are known here, so that both clients send the same credentials
to the same server. `cloud_variables` is the only place of this room that reads the environment.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardstream.errors import OptionError

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
        read_timeout_s: Limit of the time without a byte.
    """

    region: str
    endpoint: str | None = None
    credentials: Credentials | None = None
    anonymous: bool = False
    virtual_hosts: bool = False
    requester_pays: bool = False
    verify: bool | str = True
    connect_s: float = 10.0
    read_timeout_s: float = 20.0


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
    read_s = float(config.get("read_timeout") or read_timeout_s)
    return S3Settings(
        region=region,
        endpoint=endpoint,
        credentials=_credentials(options, variables),
        anonymous=bool(options.get("anon")),
        virtual_hosts=style == "virtual" or (style == "auto" and not endpoint),
        requester_pays=bool(options.get("requester_pays")),
        verify=client.get("verify", _trusted_file(variables) or True),
        connect_s=float(config.get("connect_timeout") or min(10.0, read_s)),
        read_timeout_s=read_s,
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
