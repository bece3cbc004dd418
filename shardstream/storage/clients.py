"""Choose the client of a URL and open it in the process that uses it."""

from __future__ import annotations

import copy
import importlib.util
import math
import multiprocessing
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Unpack, cast

import fsspec
from fsspec.core import url_to_fs

from shardstream.errors import OptionError, get_logger, how_to_install
from shardstream.storage import fork_safety
from shardstream.storage.error_messages import remove_secrets, safe_cause, translate_errors
from shardstream.storage.fsspec_readers import (
    FilesystemReader,
    HttpReader,
    HubReader,
    S3fsReader,
)
from shardstream.storage.gcs_azure_config import (
    CloudSettings,
    parse_azure_options,
    parse_connection_string,
    parse_gcs_options,
)
from shardstream.storage.read_small_files import read_small_files
from shardstream.storage.response import RangeReader, RangeResponse, RequestOptions
from shardstream.storage.s3_config import (
    S3Settings,
    cloud_variables,
    complete_s3fs_options,
    parse_s3_options,
)
from shardstream.storage.s3_http_client import S3HttpReader
from shardstream.storage.s3_request import are_plain, server_url
from shardstream.storage.transfer import Transfer

if TYPE_CHECKING:
    from shardstream.storage.obstore_client import ObstoreReader

_log = get_logger(__name__)
S3 = ("s3", "s3a")
# Protocols that obstore can serve: its kind of store, and the fsspec package that serves every option.
_KINDS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az"}
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
_HTTP = ("http", "https")
_UNCHAINED = {*_KINDS, *_HTTP, "file", "local"}  # they open no other URL
_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure", "hf": "hf"}
# Errors after which s3fs can read: another region (s3fs finds it), a chunked response, a self-signed certificate
# (webpki refuses one that may sign others as the server's own; OpenSSL accepts it). No client follows a redirect.
_S3FS_CAN_HELP = (
    "PermanentRedirect",
    "redirect without LOCATION",
    "AuthorizationHeaderMalformed",
    "Content-Length Header missing",
    "InvalidCertificate",
)
_FORKED = "this process was forked from one that had used obstore, and obstore's threads do not survive a fork"
_FOLLOWS_REDIRECTS = "it follows redirects, and would send the session token to another server"
_NOT_PLAIN = "it needs an endpoint_url with http://, and none of the storage options that only other clients know"
_EMULATOR = "an emulator of Google Cloud Storage may lack the XML API, which obstore uses"
_SPAWN = "or start workers with multiprocessing_context='spawn'"
_UNKNOWN_OPTION = "only {package} knows one of the storage options{profile}"
_SECRET_NAMES = (
    "key", "secret", "token", "password", "credential", "sas", "passphrase", "connection_string", "authorization",
)  # fmt: skip
_MIN_SECRET_CHARACTERS = 4  # shorter values would be found in any message
_client_choice_lock = fork_safety.new_lock()  # held while a thread decides whether obstore reads

_PROTOCOL = re.compile(r"(?:s3a?|gs|gcs|az|abfss?|hf|https?|s?ftp|memory):", re.IGNORECASE)


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
        for name, value in (
            ("read_timeout_s", self.read_timeout_s),
            ("retry_timeout_s", self.retry_timeout_s),
        ):
            given: object = value  # from storage options: of any type
            if not isinstance(given, int | float) or not 0 < given < math.inf:
                raise OptionError(f"{name} is a number of seconds over 0, not {value!r}")


class Clients:
    """The clients of one `Storage`; picklable, opened again in each process.

    Args:
        options: The storage options of the user.
        filesystem: An fsspec file system to use for every URL.

    Raises:
        OptionError: If an option of shardstream has an invalid value.
    """

    small_reads_bytes = 64 << 20
    """A main process that has read less than this starts no obstore threads, because workers may be forked from it."""

    def __init__(self, options: Mapping[str, Any], filesystem: Any) -> None:
        self._options = dict(options)
        self._s3_client = self._options.pop("s3_client", None)
        if self._s3_client not in (None, "s3fs", "obstore", "http"):
            raise OptionError(f"s3_client is 's3fs', 'obstore' or 'http', not {self._s3_client!r}")
        given = {
            name: self._options.pop(name)
            for name in ("read_timeout_s", "retry_timeout_s")
            if name in options
        }
        self.timeouts = Timeouts(**given)
        self._filesystem = filesystem
        self._opened: dict[tuple[str, bool], Any] = {}
        self._obstore: dict[str, ObstoreReader | str] = {}
        """By kind: the reader, or the reason why there is none."""
        self._http: S3HttpReader | str | None = None
        """The reader of S3 over plain HTTP, or the reason why there is none; None if it was not needed yet."""
        self._read_bytes = 0
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": {}, "_obstore": {}, "_http": None, "_read_bytes": 0}

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
        return self.kind_of(url) == "s3"

    def kind_of(self, url: str) -> str | None:
        """Return the kind of object store ("s3", "gs", "az") that obstore may read a URL from; None for any other."""
        if self._filesystem is not None or is_chain(url):
            return None
        return _KINDS.get(protocol_of(url))

    def reader(self, url: str, *, reads_whole_file: bool) -> tuple[RangeReader, str]:
        """Return the reader of a URL, and the path to request from it.

        Args:
            url: Of any protocol, or a chain.
            reads_whole_file: The whole file will be read, as small files are.
        """
        self._drop_inherited_clients()
        kind = self.kind_of(url)
        if kind is not None:
            path = url.partition("://")[2]
            reader: RangeReader | None = None
            if kind == "s3" and self._s3_client in (None, "http"):
                reader = self._http_reader_or_none(path)
            if reader is None:
                reader = self._obstore_reader_or_none(kind, path, reads_whole_file=reads_whole_file)
            if reader is not None:
                return reader, path
        filesystem, path = self.filesystem(url, reading=True)
        s3fs = sys.modules.get("s3fs")
        if s3fs is not None and isinstance(filesystem, s3fs.S3FileSystem):
            return S3fsReader(filesystem), path
        if _is_http(filesystem):
            return HttpReader(filesystem), path
        hub = sys.modules.get("huggingface_hub.hf_file_system")
        if hub is not None and isinstance(filesystem, hub.HfFileSystem):
            return HubReader(filesystem), path
        return FilesystemReader(filesystem), path

    def read(
        self,
        url: str,
        start: int,
        end: int | None,
        **options: Unpack[RequestOptions],
    ) -> RangeResponse:
        """Request bytes of a file once, as `RangeReader.read`; errors of the client are not translated."""

        def read(*, reads_whole_file: bool) -> RangeResponse:
            reader, path = self.reader(url, reads_whole_file=reads_whole_file)
            transfer = Transfer(
                self.timeouts.read_timeout_s,
                on_receive=options.get("on_receive"),
                cancelled=options.get("cancelled"),
            )
            return reader.read(path, start, end, transfer, **options)

        try:
            response = read(reads_whole_file=(start, end) == (0, None))
        except Exception as error:
            if not self.is_s3(url) or not self._switch_to_s3fs(error):
                raise
            response = read(reads_whole_file=False)
        self._read_bytes += response.nbytes
        return response

    def has_versions(self, url: str) -> bool:
        """Return whether the reader of a URL returns versions, where the server sends them."""
        return type(self.reader(url, reads_whole_file=False)[0]) is not FilesystemReader

    def read_small_files(self, urls: Sequence[str], max_bytes: int) -> list[bytes | None]:
        """Read small files of one S3 server, if this process has no client yet; None for a file means that a client must read it."""
        is_first = "s3fs" not in sys.modules and not fork_safety.has_obstore_threads()
        settings = None
        if is_first and self._s3_client is None and all(map(self.is_s3, urls)):
            settings = self._s3_settings()
        if settings is None:
            return [None] * len(urls)
        return read_small_files(settings, [url.partition("://")[2] for url in urls], max_bytes)

    def _switch_to_s3fs(self, error: Exception) -> bool:
        """Continue with s3fs after an error that it can avoid: the region of a bucket, a response without length, a certificate."""
        known = next((sign for sign in _S3FS_CAN_HELP if sign in str(error)), None)
        if known is None or self._s3_client is not None or not _is_installed("s3fs"):
            return False
        with _client_choice_lock:
            if not isinstance(self._obstore.get("s3"), str):  # else another thread was first
                _log.info("reading S3 with s3fs: %s", known)
                self._obstore["s3"] = known
        return True

    def _drop_inherited_clients(self) -> None:
        if self._pid == os.getpid():
            return
        with _client_choice_lock:
            if self._pid == os.getpid():  # another thread was first
                return
            # forked: connections and threads stayed with the parent
            fork_safety.keep_inherited(self._opened, self._obstore, self._http, self._filesystem)
            self._opened, self._obstore, self._http = {}, {}, None
            if getattr(self._filesystem, "async_impl", False):
                self._filesystem = copy.deepcopy(self._filesystem)  # opens it again
            self._pid = os.getpid()

    def _http_reader_or_none(self, path: str) -> S3HttpReader | None:
        """Return the reader of S3 over plain HTTP; None if another client must read."""
        found = self._http
        if found is None:
            settings = self._s3_settings() if _is_installed("botocore") else None
            server = None if settings is None else server_url(settings)
            if settings is not None and server is not None and server.scheme == "http":
                found = S3HttpReader(settings, server)
            else:
                found = _NOT_PLAIN
            self._http = found  # threads that come here at the same time open one each
        if isinstance(found, S3HttpReader) and not are_plain([path]):
            found = "it cannot request a key of that name"
        if isinstance(found, S3HttpReader):
            # another thread may have switched to s3fs
            return None if isinstance(self._obstore.get("s3"), str) else found
        if self._s3_client == "http":
            raise OptionError(
                f"s3_client='http' cannot read this: {found}; leave it out", shard=f"s3://{path}"
            )
        return None

    def _obstore_reader_or_none(
        self, kind: str, path: str, *, reads_whole_file: bool
    ) -> ObstoreReader | None:
        client = self._s3_client if kind == "s3" else None
        if client == "s3fs" or not _is_installed("obstore"):
            if client == "obstore":
                raise OptionError("s3_client='obstore' needs one more package: pip install obstore")
            return None
        is_only_client = client == "obstore" or not _is_installed(_PACKAGES[kind])
        if not is_only_client and self._may_fork_later(reads_whole_file=reads_whole_file):
            return None
        from shardstream.storage.obstore_client import ObstoreReader, can_name  # noqa: PLC0415

        # A local name: in a forked child another thread may empty the table at the same time.
        readers = self._obstore
        found = readers.get(kind)
        if found is None:
            settings = self._settings(kind)
            if fork_safety.has_lost_obstore_threads():
                _log.info("reading %s:// with %s: %s", kind, _PACKAGES[kind], _FORKED)
                found = _FORKED
            elif settings is None or self._leaks_token(settings):
                found = _refusal(kind, settings)
            elif (
                isinstance(settings, CloudSettings)
                and settings.is_gcs_emulator
                and not is_only_client
            ):
                found = _EMULATOR
            else:
                found = ObstoreReader(kind, settings)
            with _client_choice_lock:  # another thread may have decided, and switched to s3fs
                found = readers.setdefault(kind, found)
        reason_or_reader = found if can_name(path) else "obstore cannot request a key of that name"
        if isinstance(reason_or_reader, ObstoreReader):
            return reason_or_reader
        if is_only_client:
            raise OptionError(
                f"obstore cannot read this: {reason_or_reader}; {self._remedy(kind, reason_or_reader)}",
                shard=f"{kind}://{path}",
            )
        return None

    def _remedy(self, kind: str, reason: str) -> str:
        """Return how an object store can be read where obstore cannot read it."""
        remedies, package = [], _PACKAGES[kind]
        if kind == "s3" and self._s3_client == "obstore":
            remedies.append("leave s3_client='obstore' out, so that s3fs reads it")
        if not _is_installed(package):
            remedies.append(f"install {package}")
        remedy_text = " and ".join(remedies)
        return f"{remedy_text}, {_SPAWN}" if reason == _FORKED else remedy_text

    def _may_fork_later(self, *, reads_whole_file: bool) -> bool:
        """Return whether this process may read little and then fork workers, which would lose obstore's threads."""
        if multiprocessing.parent_process() is not None:
            return False
        return reads_whole_file or not (
            fork_safety.has_obstore_threads() or self._read_bytes >= self.small_reads_bytes
        )

    def _settings(self, kind: str) -> S3Settings | CloudSettings | None:
        """Return the settings of obstore's store; None if it does not know one of the options."""
        if kind == "s3":
            return self._s3_settings()
        parse = parse_gcs_options if kind == "gs" else parse_azure_options
        return parse(self._options, cloud_variables(), self.timeouts.read_timeout_s)

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

    def _leaks_token(self, settings: S3Settings | CloudSettings) -> bool:
        """Return whether obstore may send a session token elsewhere: it follows redirects to other ports. Those of AWS lead to AWS."""
        if not isinstance(settings, S3Settings) or settings.anonymous or settings.endpoint is None:
            return False
        with translate_errors("s3://", lambda: self.secrets):
            return settings.credentials is not None and settings.credentials()["token"] is not None

    def _open(self, url: str, protocol: str, *, reading: bool) -> tuple[Any, str]:
        options, kind = self._options, self.kind_of(url)
        if kind is not None and not _is_installed(_PACKAGES[kind]) and _is_installed("obstore"):
            filesystem = self._open_obstore(kind, reading=reading)
            return filesystem, url.partition("://")[2].rstrip("/")
        try:
            if protocol in S3:
                self._s3_settings()  # reports invalid options
                options = complete_s3fs_options(
                    options, cloud_variables(), self.timeouts.read_timeout_s if reading else None
                )
                from shardstream.storage.s3fs_session import (  # noqa: PLC0415  (s3fs is an extra)
                    SessionWithoutRedirects,
                )

                options["config_kwargs"].setdefault("http_session_cls", SessionWithoutRedirects)
            elif protocol in _HTTP:
                options = self._http_options()
            begin = (
                url if is_chain(url) else url.partition("::")[0]
            )  # fsspec takes any "::" for a chain
            filesystem, path = cast("tuple[Any, str]", url_to_fs(begin, **options))
            path = path if begin == url else filesystem._strip_protocol(url)
        except ImportError as error:
            extra = _EXTRAS.get(_KINDS.get(protocol, protocol))
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
        # fsspec needs aiohttp for HTTP alone
        from shardstream.storage.aiohttp_limits import session_options  # noqa: PLC0415

        client = session_options(self.timeouts.read_timeout_s)
        client |= self._options.get("client_kwargs") or {}
        return {**self._options, "client_kwargs": client}

    def _open_obstore(self, kind: str, *, reading: bool) -> Any:
        from shardstream.storage.obstore_client import open_filesystem  # noqa: PLC0415

        if fork_safety.has_lost_obstore_threads():
            raise OptionError(f"{_FORKED}; {self._remedy(kind, _FORKED)}")
        settings = self._settings(kind)
        if settings is None or self._leaks_token(settings):
            reason = _refusal(kind, settings)
            raise OptionError(f"{reason}; {self._remedy(kind, reason)}")
        fork_safety.note_obstore_started()
        return open_filesystem(kind, settings, retries=not reading)


def _refusal(kind: str, settings: S3Settings | CloudSettings | None) -> str:
    if settings is not None:
        return _FOLLOWS_REDIRECTS
    profile = ", or of the AWS profile" if kind == "s3" else ""
    return _UNKNOWN_OPTION.format(package=_PACKAGES[kind], profile=profile)


def _is_http(filesystem: Any) -> bool:
    """Return whether a file system is fsspec's own for HTTP: its module needs aiohttp, and is slow to import."""
    http = sys.modules.get("fsspec.implementations.http")
    return http is not None and type(filesystem) is http.HTTPFileSystem


def check_slashes(path: str) -> None:
    """Refuse ``s3:/bucket``, which would be a folder of this machine named ``s3:``.

    Raises:
        OptionError: If a path begins like that.
    """
    if match := _PROTOCOL.match(path):
        raise OptionError(
            f"{path} is a path of this machine, not a URL: a URL begins with {match[0]}//; "
            f"for a folder of that name, write ./{path}"
        )


def protocol_of(url: str) -> str:
    """Return the protocol of a URL, "file" for a path."""
    return url.split("://", 1)[0] if "://" in url else "file"


def with_one_protocol(url: str) -> str:
    """Return a URL with the first of the names of its protocol.

    >>> with_one_protocol("s3a://b/a.tar")
    's3://b/a.tar'
    """
    name, sign, path = url.partition("://")
    return f"{_KINDS.get(name, name)}{sign}{path}"


def is_chain(url: str) -> bool:
    """Return whether a URL is a chain of fsspec; paths and keys of objects may hold ``::``, too.

    >>> [is_chain(url) for url in ("simplecache::s3://b/a", "zip://a::b.zip", "/data/a::b", "s3://b/::/a")]
    [True, True, False, False]
    """
    head, sign, _ = url.partition("::")
    if not sign:
        return False
    return protocol_of(head) not in _UNCHAINED if "://" in head else is_known_protocol(head)


def is_known_protocol(name: str) -> bool:
    """Return whether fsspec has a file system of that name."""
    return name in fsspec.available_protocols()


@cache  # called at each read
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _secret_values(options: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for name, value in options.items():
        inner = getattr(value, "storage_options", value)  # of a file system, within another or not
        if isinstance(inner, Mapping):
            found |= _secret_values(inner)
        elif isinstance(value, str) and name.lower().endswith(_SECRET_NAMES):
            found.add(value.strip())  # messages show line ends differently
            if name.lower().endswith("connection_string"):
                found |= _secret_values(parse_connection_string(value) or {})
    return {value for value in found if len(value) >= _MIN_SECRET_CHARACTERS}
