"""Which client serves a URL, opened in the process that uses it."""

from __future__ import annotations

import copy
import importlib.util
import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from fsspec.core import url_to_fs

from shardstream.errors import OptionError
from shardstream.process_memory import pause_gc_for_import
from shardstream.storage import fork_safety
from shardstream.storage.aws_environment import aws_variables
from shardstream.storage.error_messages import remove_secrets, safe_cause, translate_errors
from shardstream.storage.fsspec_reader import FilesystemReader
from shardstream.storage.http_reader import HttpReader
from shardstream.storage.read_small_files import read_small_files
from shardstream.storage.response import RangeReader, RangeResponse
from shardstream.storage.s3_config import S3Settings, complete_s3fs_options, parse_s3_options

if TYPE_CHECKING:
    from shardstream.storage.s3_obstore import ObstoreReader

_log = logging.getLogger(__name__)
S3 = ("s3", "s3a")
_HTTP = ("http", "https")
_HTTP_ANSWER_S = 300.0  # aiohttp's own limit of a whole answer
_INSTALL = {
    "s3": "pip install 'shardstream[s3]'",
    "s3a": "pip install 'shardstream[s3]'",
    "gs": "pip install gcsfs",
    "abfs": "pip install adlfs",
}
_SMALL_READS_BYTES = 64 << 20  # who looks at a few samples reads less
# What obstore says where s3fs can help: another region (which s3fs finds), a chunked answer, a certificate that signed itself
# (webpki takes none that may sign others for a server's own; OpenSSL does).
_S3FS_CAN_HELP = (
    "PermanentRedirect",
    "redirect without LOCATION",
    "AuthorizationHeaderMalformed",
    "Content-Length Header missing",
    "InvalidCertificate",
)
_FORKED = "this process was forked from one that had used obstore, whose threads stayed there"
_SPAWN = "or start workers with multiprocessing_context='spawn'"
_UNKNOWN_OPTION = "one of the storage options, or of the AWS profile, is for s3fs alone"
_SECRET_NAMES = (
    "key", "secret", "token", "password", "credential", "sas", "passphrase", "connection_string", "authorization",
)  # fmt: skip
_MIN_SECRET_CHARACTERS = 4  # characters: less would be found in any message
_client_choice_lock = fork_safety.new_lock()  # one thread at a time, whether obstore reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long a server is waited for.

    Args:
        read_timeout_s: Without a byte, before a request is given up and sent again.
        retry_timeout_s: Of failing requests without a byte, before that is an error.

    Raises:
        OptionError: If one is no positive number.
    """

    read_timeout_s: float = 20.0
    retry_timeout_s: float = 60.0

    @property
    def total_s(self) -> float:
        """Within which a read that brings nothing has failed."""
        return self.retry_timeout_s + 2 * self.read_timeout_s

    def __post_init__(self) -> None:
        for name, value in (
            ("read_timeout_s", self.read_timeout_s),
            ("retry_timeout_s", self.retry_timeout_s),
        ):
            told: object = value  # from storage options: of any type
            if not isinstance(told, int | float) or not 0 < told < math.inf:
                raise OptionError(f"{name} is a number of seconds over 0, not {value!r}")


class Clients:
    """The clients of one `Storage`; picklable, opened anew in each process.

    Args:
        options: As the user gave them.
        filesystem: An fsspec file system to use for every URL.

    Raises:
        OptionError: If an option of ours makes no sense.
    """

    def __init__(self, options: Mapping[str, Any], filesystem: Any) -> None:
        self._options = dict(options)
        self._s3_client = self._options.pop("s3_client", None)
        if self._s3_client not in (None, "s3fs", "obstore"):
            raise OptionError(f"s3_client is 's3fs' or 'obstore', not {self._s3_client!r}")
        given = {
            name: self._options.pop(name)
            for name in ("read_timeout_s", "retry_timeout_s")
            if name in options
        }
        self.timeouts = Timeouts(**given)
        self._filesystem = filesystem
        self._opened: dict[tuple[str, bool], Any] = {}
        self._obstore: ObstoreReader | str | None = None
        self._read_bytes = 0
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": {}, "_obstore": None, "_read_bytes": 0}

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that no message may show."""
        found = _secret_values(self._options) | _secret_values(aws_variables())
        found |= _secret_values({"filesystem": self._filesystem})
        return tuple(sorted(found, key=len, reverse=True))  # one may be part of another

    def filesystem(self, url: str, *, reading: bool) -> tuple[Any, str]:
        """Return the file system of a URL and the path on it.

        Args:
            url: Of any protocol, or a chain.
            reading: Requests will be retried by `storage.retry`, so the client need not.

        Raises:
            OptionError: If the URL starts a command, or its protocol is unknown or not installed.
        """
        if url.startswith("pipe:"):
            raise OptionError(
                "no URL starts a command here; give the files' own URL (s3://…), "
                "or mount or download what only a command can reach"
            )
        self._drop_inherited_clients()
        if self._filesystem is not None:
            return self._filesystem, self._filesystem._strip_protocol(url)
        protocol = protocol_of(url)
        filesystem = self._opened.get((protocol, reading))
        if filesystem is None or "::" in url:
            filesystem, path = self._open(url, protocol, reading=reading)
            if "::" not in url:
                self._opened[protocol, reading] = filesystem
            return filesystem, path
        return filesystem, filesystem._strip_protocol(url)

    def is_s3(self, url: str) -> bool:
        """Tell whether a URL is read by an S3 client of ours: no chain, no file system of the user's."""
        return self._filesystem is None and protocol_of(url) in S3 and "::" not in url

    def reader(self, url: str, *, whole: bool) -> tuple[RangeReader, str]:
        """Return what reads a URL, and the path to ask it for.

        Args:
            url: Of any protocol, or a chain.
            whole: The file will be read from its start to its end, as small ones are.
        """
        self._drop_inherited_clients()
        if self.is_s3(url):
            path = url.partition("://")[2]
            reader = self._obstore_reader_or_none(path, whole=whole)
            if reader is not None:
                return reader, path
        filesystem, path = self.filesystem(url, reading=True)
        s3fs = sys.modules.get("s3fs")
        if s3fs is not None and isinstance(filesystem, s3fs.S3FileSystem):
            from shardstream.storage.s3_s3fs import S3fsReader  # noqa: PLC0415

            return S3fsReader(filesystem, self.timeouts.read_timeout_s), path
        if _is_http(filesystem):
            return HttpReader(filesystem, self.timeouts.read_timeout_s), path
        return FilesystemReader(filesystem, self.timeouts.read_timeout_s), path

    def read(
        self,
        url: str,
        start: int,
        end: int | None,
        *,
        keep_partial: bool,
        max_bytes: int | None = None,
    ) -> RangeResponse:
        """Ask once for bytes of a file, and raise what the client raises."""
        reader, path = self.reader(url, whole=(start, end) == (0, None))
        try:
            response = reader.read(path, start, end, keep_partial=keep_partial, max_bytes=max_bytes)
        except Exception as error:
            if not self._switch_to_s3fs(error):
                raise
            reader, path = self.reader(url, whole=False)
            response = reader.read(path, start, end, keep_partial=keep_partial, max_bytes=max_bytes)
        self._read_bytes += len(response.data)
        return response

    def read_small_files(self, urls: Sequence[str], max_bytes: int) -> list[bytes | None]:
        """Return files of ``max_bytes`` bytes of one server, if this process has set up no client yet and can do without; None says nothing."""
        is_first = "s3fs" not in sys.modules and not fork_safety.has_obstore_threads()
        settings = None
        if is_first and self._s3_client is None and all(map(self.is_s3, urls)):
            settings = self._settings()
        if settings is None:
            return [None] * len(urls)
        return read_small_files(settings, [url.partition("://")[2] for url in urls], max_bytes)

    def _switch_to_s3fs(self, error: Exception) -> bool:
        """Go on with s3fs if that can do what obstore cannot: follow a bucket to its region, read answers without a length, trust more certificates."""
        known = next((sign for sign in _S3FS_CAN_HELP if sign in str(error)), None)
        if known is None or self._s3_client is not None or not _is_installed("s3fs"):
            return False
        with _client_choice_lock:
            if not isinstance(self._obstore, str):  # else another thread has found out
                _log.info("reading S3 with s3fs, not obstore: %s", known)
                self._obstore = known
        return True

    def _drop_inherited_clients(self) -> None:
        if self._pid == os.getpid():
            return
        with _client_choice_lock:
            if self._pid == os.getpid():  # another thread was first
                return
            # forked: connections and threads stayed with the parent
            fork_safety.keep_inherited(self._opened, self._obstore, self._filesystem)
            self._opened, self._obstore = {}, None
            if getattr(self._filesystem, "async_impl", False):
                self._filesystem = copy.deepcopy(self._filesystem)  # opens it anew
            self._pid = os.getpid()

    def _obstore_reader_or_none(self, path: str, *, whole: bool) -> ObstoreReader | None:
        if self._s3_client == "s3fs" or not _is_installed("obstore"):
            if self._s3_client == "obstore":
                raise OptionError("s3_client='obstore' needs one more package: pip install obstore")
            return None
        forced = self._s3_client == "obstore" or not _is_installed("s3fs")
        if not forced and self._reads_little(whole=whole):
            return None
        from shardstream.storage.s3_obstore import ObstoreReader, can_name  # noqa: PLC0415

        found = self._obstore  # in a forked child another thread may just be taking it away
        if found is None:
            settings = self._settings()
            if fork_safety.has_lost_obstore_threads():
                _log.info("reading S3 with s3fs: %s", _FORKED)
                found = _FORKED
            else:
                found = _UNKNOWN_OPTION if settings is None else ObstoreReader(settings)
            with _client_choice_lock:  # another thread may have decided meanwhile, and given it up
                found = self._obstore = self._obstore or found
        why = found if can_name(path) else "obstore cannot ask for a key of that name"
        if isinstance(why, ObstoreReader):
            return why
        if forced:
            raise OptionError(
                f"obstore cannot read this: {why}; {self._remedy(why)}", shard=f"s3://{path}"
            )
        return None

    def _remedy(self, why: str) -> str:
        """Return how S3 can be read where obstore cannot."""
        remedies = []
        if self._s3_client == "obstore":
            remedies.append("leave s3_client='obstore' out, so that s3fs reads it")
        if not _is_installed("s3fs"):
            remedies.append("install s3fs")
        together = " and ".join(remedies)
        return f"{together}, {_SPAWN}" if why == _FORKED else together

    def _reads_little(self, *, whole: bool) -> bool:
        """Tell whether this may be a process that reads little and then forks workers, for whom obstore's threads would be lost."""
        if multiprocessing.parent_process() is not None:
            return False
        return whole or not (
            fork_safety.has_obstore_threads() or self._read_bytes >= _SMALL_READS_BYTES
        )

    def _settings(self) -> S3Settings | None:
        with translate_errors("s3://", lambda: self.secrets):
            settings = parse_s3_options(
                self._options, aws_variables(), self.timeouts.read_timeout_s
            )
        trusted = None if settings is None else settings.verify
        if isinstance(trusted, str) and not os.path.exists(trusted):
            raise OptionError(
                f"no certificates are in {trusted!r}: it does not exist; check AWS_CA_BUNDLE, or verify in client_kwargs"
            )
        return settings

    def _open(self, url: str, protocol: str, *, reading: bool) -> tuple[Any, str]:
        options = self._options
        try:
            if protocol in S3:
                if not _is_installed("s3fs") and _is_installed("obstore"):
                    return self._open_obstore(reading=reading), url.partition("://")[2].rstrip("/")
                self._settings()  # says what is wrong with them
                options = complete_s3fs_options(
                    options, aws_variables(), self.timeouts.read_timeout_s if reading else None
                )
            elif protocol in _HTTP:
                options = self._http_options()
            with pause_gc_for_import():
                filesystem, path = cast("tuple[Any, str]", url_to_fs(url, **options))
        except ImportError as error:
            install = _INSTALL.get(protocol, "install the package it names")
            raise OptionError(
                f"{protocol}:// needs one more package ({error}): {install}", shard=url
            ) from error
        except (ValueError, TypeError) as error:
            told = remove_secrets(str(error), self.secrets)
            raise OptionError(f"cannot open this URL: {told}", shard=url) from safe_cause(
                error, self.secrets
            )
        except Exception:  # some file systems connect at once
            with translate_errors(url, lambda: self.secrets):
                raise
        if protocol in S3 and reading and "::" not in url:
            filesystem.retries = 1  # its options make it an instance of its own
        return filesystem, path

    def _http_options(self) -> dict[str, Any]:
        """Complete the options of an ``HTTPFileSystem``, which waits for five minutes for a server that says nothing."""
        import aiohttp  # noqa: PLC0415  (fsspec needs it for HTTP alone)

        read_timeout_s = self.timeouts.read_timeout_s
        timeouts = aiohttp.ClientTimeout(
            total=_HTTP_ANSWER_S, sock_connect=min(10.0, read_timeout_s), sock_read=read_timeout_s
        )
        client = {"timeout": timeouts, **(self._options.get("client_kwargs") or {})}
        return {**self._options, "client_kwargs": client}

    def _open_obstore(self, *, reading: bool) -> Any:
        from shardstream.storage.obstore_filesystem import ObstoreFilesystem  # noqa: PLC0415
        from shardstream.storage.s3_obstore import store_arguments  # noqa: PLC0415

        if fork_safety.has_lost_obstore_threads():
            raise OptionError(f"{_FORKED}; {self._remedy(_FORKED)}")
        settings = self._settings()
        if settings is None:
            raise OptionError(f"{_UNKNOWN_OPTION}; {self._remedy(_UNKNOWN_OPTION)}")
        fork_safety.note_obstore_started()
        return ObstoreFilesystem(store_arguments(settings, retries=not reading))


def _is_http(filesystem: Any) -> bool:
    """Tell whether a file system is fsspec's own for HTTP: its module needs aiohttp, and is slow to import."""
    http = sys.modules.get("fsspec.implementations.http")
    return http is not None and type(filesystem) is http.HTTPFileSystem


def protocol_of(url: str) -> str:
    """Return the protocol of a URL, "file" for a path."""
    return url.split("://", 1)[0] if "://" in url else "file"


@cache  # asked at each read
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _secret_values(options: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for name, value in options.items():
        inner = getattr(value, "storage_options", value)  # of a file system, within another or not
        if isinstance(inner, Mapping):
            found |= _secret_values(inner)
        elif isinstance(value, str) and name.lower().endswith(_SECRET_NAMES):
            found.add(value.strip())  # a message shows a line's end in its own way
    return {value for value in found if len(value) >= _MIN_SECRET_CHARACTERS}
