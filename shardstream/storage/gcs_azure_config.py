"""Translate storage options of gcsfs and adlfs to settings of obstore's stores.

Only options whose meaning is the same in obstore are translated. With any other option, gcsfs or adlfs reads. Settings
without an option come from the environment: application default credentials of Google, ``AZURE_STORAGE_…`` variables, the identity
of the machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

# Without effect on reading.
_IGNORED = frozenset(
    {
        "asynchronous",
        "cache_timeout",
        "listings_expiry_time",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    }
)
_GCS_IGNORED = _IGNORED | {
    "access",
    "block_size",
    "check_connection",
    "consistency",
    "default_location",
    "project",
    "secure_serialize",
}
_AZURE_IGNORED = _IGNORED | {
    "assume_container_exists",
    "blocksize",
    "default_cache_type",
    "default_fill_cache",
    "max_concurrency",
    "socket_timeout",
}
# obstore reads these by itself and would combine them with credentials of the options.
_GCS_CREDENTIALS = (
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SKIP_SIGNATURE",
)
_AZURE_CREDENTIALS = (
    "AZURE_SKIP_SIGNATURE",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
)
_AZURE_NAMES = {
    "account_name": "account_name",
    "account_key": "account_key",
    "sas_token": "sas_key",
    "tenant_id": "tenant_id",
    "client_id": "client_id",
    "client_secret": "client_secret",
}
_CONNECTION_NAMES = {
    "accountname": "account_name",
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudSettings:
    """The settings of an obstore store for Google Cloud Storage or Azure.

    Args:
        config: obstore's own configuration.
        read_timeout_s: Limit of the time without a byte.
        connect_s: Limit of the time to connect.
    """

    config: Mapping[str, Any]
    read_timeout_s: float
    connect_s: float = 10.0

    @property
    def endpoint(self) -> str | None:
        """The URL of the server; None is the cloud's own."""
        found: str | None = self.config.get("base_url") or self.config.get("endpoint")
        return found

    @property
    def is_gcs_emulator(self) -> bool:
        """Whether the server stands in for Google's: most emulators have its JSON API only, and obstore uses the XML API."""
        endpoint: str | None = self.config.get("base_url")
        host = urlsplit(endpoint).hostname if endpoint else None
        return endpoint is not None and not (host or "").endswith(".googleapis.com")


def parse_gcs_options(
    options: Mapping[str, Any], variables: Mapping[str, str], read_timeout_s: float
) -> CloudSettings | None:
    """Translate the options of a `gcsfs.GCSFileSystem`; None if only gcsfs knows one of them.

    Args:
        options: ``token`` ("anon", "google_default", the path or content of a JSON key), ``endpoint_url`` and options that do not
            change what is read.
        variables: The environment: ``STORAGE_EMULATOR_HOST``, and ``GOOGLE_…``, which obstore reads.
        read_timeout_s: Limit of the time without a byte.
    """
    if not (_GCS_IGNORED | {"token", "endpoint_url"}).issuperset(options):
        return None
    token, endpoint = options.get("token"), options.get("endpoint_url")
    emulator = variables.get("STORAGE_EMULATOR_HOST")
    if not endpoint and emulator:
        endpoint = emulator if "://" in emulator else f"http://{emulator}"
        token = token or "anon"  # as Google's own clients do
    config: dict[str, Any] = {"base_url": endpoint.rstrip("/")} if endpoint else {}
    if token in (None, "google_default"):
        return CloudSettings(config=config, read_timeout_s=read_timeout_s)
    credentials = _gcs_credentials(token)
    if credentials is None or any(name in variables for name in _GCS_CREDENTIALS):
        return None
    return CloudSettings(config=config | credentials, read_timeout_s=read_timeout_s)


def _gcs_credentials(token: object) -> dict[str, Any] | None:
    """Return obstore's configuration for a token of gcsfs; None if there is none."""
    if token == "anon":  # noqa: S105
        return {"skip_signature": True}
    if isinstance(token, str) and os.path.isfile(token):
        try:
            with open(token, encoding="utf-8") as stream:
                kind = json.load(stream).get("type")
        except (OSError, ValueError, AttributeError):
            return None
        names = {"service_account": "service_account", "authorized_user": "application_credentials"}
        return {names[kind]: token} if kind in names else None
    if isinstance(token, Mapping) and token.get("type") == "service_account":
        return {"service_account_key": json.dumps(dict(token))}
    return None


def parse_azure_options(
    options: Mapping[str, Any], variables: Mapping[str, str], read_timeout_s: float
) -> CloudSettings | None:
    """Translate the options of an `adlfs.AzureBlobFileSystem`; None if only adlfs knows one of them.

    Args:
        options: ``account_name``, ``account_key``, ``sas_token``, ``connection_string``, ``account_host``, ``anon``, ``tenant_id``,
            ``client_id``, ``client_secret`` and options that do not change what is read.
        variables: The environment: ``AZURE_STORAGE_CONNECTION_STRING``, and other ``AZURE_…``, which obstore reads.
        read_timeout_s: Limit of the time without a byte.
    """
    known = {*_AZURE_NAMES, "connection_string", "account_host", "anon"}
    if not (_AZURE_IGNORED | known).issuperset(options):
        return None
    config: dict[str, Any] = {
        name: options[option] for option, name in _AZURE_NAMES.items() if options.get(option)
    }
    if host := options.get("account_host"):
        config["endpoint"] = f"https://{host}"
    given = options.get("connection_string")
    # As in adlfs, a connection string overrides all other options.
    text = given or (None if config else variables.get("AZURE_STORAGE_CONNECTION_STRING"))
    if text:
        connection = parse_connection_string(text)
        if connection is None:
            return None
        name = config.get("account_name") or (urlsplit(connection["endpoint"]).hostname or "")
        config = {"account_name": name.partition(".")[0]} | connection
    has_credentials = bool(config.keys() & {"account_key", "sas_key", "client_secret"})
    if options.get("anon") and not has_credentials:
        config["skip_signature"] = has_credentials = True
    if has_credentials and any(name in variables for name in _AZURE_CREDENTIALS):
        return None
    if "sas_key" in config:
        config["sas_key"] = config["sas_key"].lstrip("?")
    return CloudSettings(config=config, read_timeout_s=read_timeout_s)


def parse_connection_string(text: str) -> dict[str, str] | None:
    """Parse the connection string of an Azure storage account into obstore's configuration.

    >>> parse_connection_string("AccountName=a;AccountKey=k==;EndpointSuffix=core.windows.net;")
    {'account_name': 'a', 'account_key': 'k==', 'endpoint': 'https://a.blob.core.windows.net'}

    Returns:
        The configuration; None if the string names no server.
    """
    parts = (part.partition("=") for part in text.split(";") if part.strip())
    values = {name.strip().lower(): value.strip() for name, _, value in parts}
    config = {
        _CONNECTION_NAMES[name]: values[name] for name in _CONNECTION_NAMES if values.get(name)
    }
    if "endpoint" not in config and "account_name" in config:
        suffix = values.get("endpointsuffix", "core.windows.net")
        scheme = values.get("defaultendpointsprotocol", "https")
        config["endpoint"] = f"{scheme}://{config['account_name']}.blob.{suffix}"
    return config if "endpoint" in config else None
