"""Choose the client of a URL and open it in the process that uses it.

A forked child can neither use nor free the clients of its parent. Both share the epoll instance of the parent's event loop: if the child
frees a connection, its socket is removed from that epoll, and the parent waits forever for a response. fsspec drops its instances in a
child, which frees them. So they are referenced before the fork, and the child keeps the references.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs

from shardstream.errors import OptionError, how_to_install
from shardstream.process import new_lock
from shardstream.storage.error_messages import remove_secrets, safe_cause, translate_errors
from shardstream.storage.fsspec_clients import (
    AzureReader,
    FilesystemReader,
    HttpReader,
    HubReader,
    S3fsReader,
    s3fs_session,
    session_options,
)
from shardstream.storage.response import RangeReader
from shardstream.storage.s3_http_client import S3HttpReader
from shardstream.storage.s3_request import (
    S3Settings,
    cloud_variables,
    complete_s3fs_options,
    parse_s3_options,
    s3fs_only,
    s3fs_only_path,
)
from shardstream.storage.urls import ALIASES, HTTP, check_slashes, is_chain, protocol_of

S3 = ("s3", "s3a")
_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure", "hf": "hf"}
# File systems (module, class) with a reader of their own. They are compared only where their module is imported already: that is slow.
_READERS = (
    ("s3fs", "S3FileSystem", S3fsReader),
    ("adlfs", "AzureBlobFileSystem", AzureReader),
    ("fsspec.implementations.http", "HTTPFileSystem", HttpReader),
    ("huggingface_hub.hf_file_system", "HfFileSystem", HubReader),
)
_UNKNOWN_OPTION = "only s3fs knows one of the storage options, or of the AWS profile"
_SECRET_NAMES = (
    "key", "secret", "token", "password", "credential", "sas", "passphrase", "connection_string", "authorization",
    "signature",
)  # fmt: skip
_MIN_SECRET_CHARACTERS = 4  # shorter values would be found in any message
_opening_lock = new_lock()  # held while a thread drops the clients of a parent
_held: list[Any] = []  # clients of this process, while it is forked
_inherited: list[Any] = []  # clients of the parent of this process


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time limits of requests.

    Args:
        read_timeout_s: Time without a byte after which a request is sent again.
        retry_timeout_s: Time of failing requests without a byte after which an error is raised.

    Raises:
        OptionError: If one is not a positive number.
    """

    read_timeout_s: float = 20.0
    retry_timeout_s: float = 60.0

    @property
    def total_s(self) -> float:
        """Time after which a read without a byte has failed."""
        return self.retry_timeout_s + 2 * self.read_timeout_s

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():  # from storage options: of any type
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise OptionError(f"{name} is a number of seconds over 0, not {value!r}")


_TIMEOUTS = Timeouts()


class Clients:
    """The clients of one `Storage`; picklable, opened again in each process.

    Args:
        options: The storage options of the user.
        filesystem: An fsspec file system to use for every URL.

    Raises:
        OptionError: If an option of shardstream has an invalid value.
    """

    def __init__(self, options: Mapping[str, Any], filesystem: Any) -> None:
        self._options = dict(options)
        self._s3_client = self._options.pop("s3_client", None)
        if self._s3_client not in (None, "s3fs", "http"):
            raise OptionError(f"s3_client is 's3fs' or 'http', not {self._s3_client!r}")
        self.timeouts, given = _TIMEOUTS, options.keys() & asdict(_TIMEOUTS)
        if given:
            self.timeouts = Timeouts(**{name: self._options.pop(name) for name in given})
        read_timeout_s = (options.get("config_kwargs") or {}).get("read_timeout")
        if read_timeout_s is not None:  # of botocore, for which None is no limit
            self.timeouts = replace(self.timeouts, read_timeout_s=read_timeout_s)
        self._filesystem = filesystem
        self._opened: dict[tuple[str, bool], Any] = {}
        self._s3_reader: S3HttpReader | str | None = None
        """The fast reader of S3, or the reason why only s3fs can read; None if it was not needed yet."""
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": {}, "_s3_reader": None}

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that no message may show."""
        found = _secret_values(self._options) | _secret_values(cloud_variables())
        found |= _secret_values({"filesystem": self._filesystem})
        return tuple(sorted(found, key=len, reverse=True))  # one may be part of another

    def filesystem(self, url: str, *, reading: bool) -> tuple[Any, str]:
        """Return the file system of a URL and the path on it.

        Args:
            url: Of any protocol, or a chain.
            reading: Whether `storage.retry` repeats failed requests, so that the client does not.

        Raises:
            OptionError: If the URL starts a command, or its protocol is unknown or not installed.
        """
        if url.startswith("pipe:"):
            raise OptionError(
                "a URL must not start a command (pipe:); use the files' own URL (s3://…), "
                "or mount or download them"
            )
        self._drop_inherited_clients()
        if self._filesystem is not None:
            return self._filesystem, self._filesystem._strip_protocol(url)
        protocol = protocol_of(url)
        if protocol == "file":
            check_slashes(url)
        filesystem = self._opened.get((protocol, reading))
        if filesystem is None or is_chain(url):
            filesystem, path = self._open(url, protocol, reading=reading)
            if not is_chain(url):
                self._opened[protocol, reading] = filesystem
            return filesystem, path
        return filesystem, filesystem._strip_protocol(url)

    def is_s3(self, url: str) -> bool:
        """Return whether a URL is read by an S3 client: no chain of URLs, no file system of the user."""
        return self.store_of(url) == "s3"

    def store_of(self, url: str) -> str | None:
        """Return the kind of object store of a URL ("s3", "gs", "az"); None for any other, and for a file system of the user."""
        if self._filesystem is not None or is_chain(url):
            return None
        protocol = protocol_of(url)
        name = ALIASES.get(protocol, protocol)
        return name if name in ALIASES.values() else None

    def reader(self, url: str) -> tuple[RangeReader, str]:
        """Return the reader of a URL, and the path to request from it.

        Args:
            url: Of any protocol, or a chain.
        """
        found = self.s3_http(url)
        if found is not None:
            return found
        filesystem, path = self.filesystem(url, reading=True)
        for module, name, reader in _READERS:
            kind = getattr(sys.modules.get(module), name, None)
            # A subclass of the general HTTP may read other bytes than the server sends.
            is_kind = kind is not None and isinstance(filesystem, kind)
            if is_kind and (reader is not HttpReader or type(filesystem) is kind):
                return reader(filesystem), path
        return FilesystemReader(filesystem), path

    def s3_http(self, url: str) -> tuple[S3HttpReader, str] | None:
        """Return the fast client of an S3 URL, and the path to request from it; None if another client must be used."""
        self._drop_inherited_clients()
        if not self.is_s3(url) or self._s3_client == "s3fs":
            return None
        path = url.partition("://")[2]
        reader = self._fast_s3_reader()
        reason = reader if isinstance(reader, str) else s3fs_only_path(path)
        if isinstance(reader, S3HttpReader) and reason is None:
            return reader, path
        if self._s3_client == "http":
            raise OptionError(
                f"s3_client='http' cannot read this: {reason}; leave it out", shard=url
            )
        return None

    def has_versions(self, url: str) -> bool:
        """Return whether the reader of a URL returns versions, where the server sends them."""
        return type(self.reader(url)[0]) is not FilesystemReader

    def _drop_inherited_clients(self) -> None:
        if self._pid == os.getpid():
            return
        with _opening_lock:
            if self._pid == os.getpid():  # another thread was first
                return
            # forked: connections and threads stayed with the parent
            _inherited.extend((self._opened, self._filesystem))
            self._opened, self._s3_reader = {}, None
            if getattr(self._filesystem, "async_impl", False):
                self._filesystem = copy.deepcopy(self._filesystem)  # opens it again
            self._pid = os.getpid()

    def _fast_s3_reader(self) -> S3HttpReader | str:
        """Return the fast reader of S3, or the reason why only s3fs can read."""
        found = self._s3_reader  # another thread may detect a fork
        if found is None:
            settings = self._s3_settings()
            reason = _UNKNOWN_OPTION if settings is None else s3fs_only(settings)
            found = (
                S3HttpReader(settings) if settings is not None and reason is None else str(reason)
            )
            self._s3_reader = found  # threads that come here at the same time open one each
        return found

    def _s3_settings(self) -> S3Settings | None:
        with translate_errors("s3://", lambda: self.secrets):
            settings = parse_s3_options(
                self._options, cloud_variables(), self.timeouts.read_timeout_s
            )
        trusted = None if settings is None else settings.verify
        if isinstance(trusted, str) and not os.path.exists(trusted):
            raise OptionError(
                f"the certificate file {trusted!r} does not exist; check AWS_CA_BUNDLE, or verify in client_kwargs"
            )
        return settings

    def _open(self, url: str, protocol: str, *, reading: bool) -> tuple[Any, str]:
        options = self._options
        try:
            if protocol in S3:
                self._s3_settings()  # reports invalid options
                options = complete_s3fs_options(
                    options, cloud_variables(), self.timeouts.read_timeout_s if reading else None
                )
                options["config_kwargs"].setdefault("http_session_cls", s3fs_session())
            elif protocol in HTTP:
                options = self._http_options()
            # fsspec takes any "::" for a chain.
            begin = url if is_chain(url) else url.partition("::")[0]
            filesystem, path = cast("tuple[Any, str]", url_to_fs(begin, **options))
            path = path if begin == url else filesystem._strip_protocol(url)
        except ImportError as error:
            extra = _EXTRAS.get(ALIASES.get(protocol, protocol))
            install = how_to_install(extra) if extra else "install the package it names"
            raise OptionError(
                f"{protocol}:// needs one more package ({error}): {install}", shard=url
            ) from error
        except (ValueError, TypeError) as error:
            message = remove_secrets(str(error), self.secrets)
            raise OptionError(f"cannot open this URL: {message}", shard=url) from safe_cause(
                error, self.secrets
            )
        except Exception:  # some file systems connect at once
            with translate_errors(url, lambda: self.secrets):
                raise
        if protocol in S3 and reading and not is_chain(url):
            filesystem.retries = 1  # its options make it a separate instance
        return filesystem, path

    def _http_options(self) -> dict[str, Any]:
        """Add limits to the options of an ``HTTPFileSystem``, which waits five minutes for a silent server."""
        client = session_options(self.timeouts.read_timeout_s)
        client |= self._options.get("client_kwargs") or {}
        return {**self._options, "client_kwargs": client}


def _secret_values(options: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for name, value in options.items():
        inner = getattr(value, "storage_options", value)  # of a file system, within another or not
        if isinstance(inner, Mapping):
            found |= _secret_values(inner)
        elif isinstance(value, str) and name.lower().endswith(_SECRET_NAMES):
            found.add(value.strip())  # messages show line ends differently
            if name.lower().endswith("connection_string"):
                parts = (part.partition("=") for part in value.split(";"))
                found |= _secret_values({name.strip(): text for name, _, text in parts})
    return {value for value in found if len(value) >= _MIN_SECRET_CHARACTERS}


def _hold_clients() -> None:
    kinds: list[Any] = [AsyncFileSystem]
    for kind in kinds:  # the loop appends to it
        kinds += kind.__subclasses__()
        _held.extend(getattr(kind, "_cache", {}).values())


os.register_at_fork(
    before=_hold_clients,
    after_in_parent=_held.clear,
    after_in_child=lambda: _inherited.extend(_held),
)
