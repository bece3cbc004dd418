"""Read, list and look up files of any store by URL, with errors that name an action."""

from __future__ import annotations

import copy
import io
import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, starmap
from typing import Any, BinaryIO, Unpack, cast

from fsspec.implementations.local import LocalFileSystem

from shardstream.errors import AccessDeniedError, NotFoundError, StorageError, get_logger
from shardstream.process import new_lock
from shardstream.storage.cache import Cache, time_of, version_of
from shardstream.storage.clients import Clients
from shardstream.storage.error_messages import translate_errors
from shardstream.storage.find_tars import matching_files
from shardstream.storage.fsspec_clients import Page, endless_error, open_listing
from shardstream.storage.local_files import (
    check_regular,
    folder_pages,
    is_there,
    read_range,
    tree_pages,
)
from shardstream.storage.response import (
    RangeRequest,
    RangeResponse,
    RequestOptions,
    Transfer,
    response_version,
)
from shardstream.storage.retry import (
    BUFFER_BYTES,
    RangeStream,
    ReadHints,
    Servers,
    read_remote,
    retry_call,
)
from shardstream.storage.s3_http_client import S3HttpReader
from shardstream.storage.urls import (
    WEB,
    check_parts,
    check_slashes,
    has_glob_signs,
    is_chain,
    simplify_glob,
)

_log = get_logger(__name__)
_VERSIONS_KEPT = 1 << 16
SIDECAR_LIMIT_BYTES = 1 << 30
"""Limit of the files beside a shard: index, member index, columns."""
MAX_LISTED_FILES = 5_000_000
"""Limit of a listing that is held in memory (2 GB); loose files are listed page by page, without a limit."""
MAX_EMPTY_PAGES = 1000
"""Limit of pages without a file, one after the other; one of deleted files may be empty."""
# fsspec expands the first, and knows the next two as protocols.
_NO_PATH = ("~", "file:", "local:", "pipe:")
LISTED_TWICE = (
    "the store lists this file twice, so its samples would be read twice; list it again, and report it to the "
    "operator of the store if it stays so"
)
_pinning = new_lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """A file in a listing.

    Args:
        url: URL with its protocol, as `Storage` accepts it.
        size_or_none: Length in bytes; None if a web server does not send it.
        version: Changes with the bytes, if the file system lists a version.
        modified: When it was written by the clock of the store, in seconds, if a listing has it.
    """

    url: str
    size_or_none: int | None
    version: str | None = None
    modified: float | None = field(default=None, compare=False)

    def is_same_as(self, other: FileInfo) -> bool:
        """Return whether length and version are those of another listing, as far as both have versions of one kind."""
        versions = self.version or "", other.version or ""
        kinds = {version.partition(" ")[0] for version in versions}
        is_same_version = len(kinds) > 1 or versions[0] == versions[1]
        return self.size_or_none == other.size_or_none and is_same_version

    @property
    def size(self) -> int:
        """Length in bytes.

        Raises:
            StorageError: If the server does not send it.
        """
        if self.size_or_none is None:
            raise StorageError(
                "the length of the file is unknown: the server sends no Content-Length",
                remedy="serve the file with one that does, such as nginx, Caddy or an S3 server",
                shard=self.url,
            )
        return self.size_or_none


class Storage:
    """Reads and lists files by URL; picklable, opens its clients again in each process.

    Requests that fail are retried where that can help (see `retry`). Local files are read without a client.

    Args:
        options: ``storage_options`` of fsspec, e.g. ``{"key": …, "secret": …, "endpoint_url": …}``, and additionally
            ``s3_client`` ("http" for plain requests, the default where they know all options, or "s3fs"),
            ``read_timeout_s`` (limit of the time without a byte, 20) and ``retry_timeout_s`` (limit of the time of retries
            without a byte, 60).
        filesystem: An fsspec file system to use for every URL instead of looking one up by protocol.
        cache: Caches chunks of remote files on a local disk.

    Raises:
        OptionError: If ``s3_client`` or a timeout is invalid.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        filesystem: Any = None,
        cache: Cache | None = None,
    ) -> None:
        self.cache = cache
        self._reads_paths = filesystem is None
        self._clients = Clients(options or {}, filesystem)
        self.timeouts = self._clients.timeouts
        """Time limits of requests."""
        self._versions: OrderedDict[str, str] = OrderedDict()

    @cached_property
    def servers(self) -> Servers:
        """Which servers have responded; retries of one that never did end sooner."""
        return Servers()

    def uncached(self, *, max_retry_s: float = math.inf) -> Storage:
        """Return a storage with the same options and without a cache, for reads and writes.

        Args:
            max_retry_s: Upper limit of its ``retry_timeout_s``.
        """
        servers, other = self.servers, copy.copy(self)
        other.cache, other.servers = None, servers  # of both
        retry_s = min(max_retry_s, self.timeouts.retry_timeout_s)
        other.timeouts = replace(self.timeouts, retry_timeout_s=retry_s)
        return other

    @property
    def secrets(self) -> tuple[str, ...]:
        """Values that no message may show."""
        return self._clients.secrets

    def translate_errors(self, url: str) -> AbstractContextManager[None]:
        """Turn errors of a client into a `StorageError` with an action and without secrets."""
        return translate_errors(url, lambda: self.secrets)

    def resolve(self, url: str, *, repeats: bool = True) -> tuple[Any, str]:
        """Return the file system of a URL and the path on it, for writing.

        The pinned version of the file is dropped.

        Args:
            url: The file.
            repeats: Whether the client repeats requests that fail; a file system of the user always does as it likes.

        Raises:
            OptionError: If the URL starts a command, or its protocol is unknown or not installed.
        """
        self._versions.pop(url, None)
        return self._clients.filesystem(url, reading=not repeats)

    def s3_http(self, url: str) -> tuple[S3HttpReader, str] | None:
        """Return the fast client of an S3 URL, and the path to request from it; None if another client must be used."""
        return self._clients.s3_http(url)

    def read_once(
        self,
        url: str,
        start: int = 0,
        end: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> RangeResponse:
        """Send one request; raise the client's own error, which `retry` classifies."""
        reader, path = self._clients.reader(url)
        transfer = Transfer(
            self._clients.timeouts.read_timeout_s,
            on_receive=options.get("on_receive"),
            cancelled=options.get("cancelled"),
        )
        return reader.read(RangeRequest(path, start, end, options.get("max_bytes")), transfer)

    def pin(self, url: str, version: str) -> str:
        """Remember the version of a file that is read by ranges; returns the one that was first seen."""
        with _pinning:
            first = self._versions.setdefault(url, version)
            if len(self._versions) > _VERSIONS_KEPT:
                self._versions.popitem(last=False)
        return first

    def pinned(self, url: str) -> str | None:
        """Return the version of a file that is read by ranges; None if none was seen."""
        return self._versions.get(url)

    def pin_listed(self, file: FileInfo) -> None:
        """Remember the version of a listed file, for all processes that get this storage, where listings and responses have the same."""
        if self._clients.store_of(file.url) in ("s3", "az") or file.url.startswith("http"):
            kind = (file.version or "").partition(" ")[0]
            if kind in ("ETag", "Last-Modified"):
                self.pin(file.url, str(response_version(file.version)))

    def has_versions(self, url: str) -> bool:
        """Return whether a version of a file is pinned, or each response has one, if the server sends it."""
        return url in self._versions or self._clients.has_versions(url)

    def is_s3(self, url: str) -> bool:
        """Return whether a URL is read by an S3 client, which returns lengths and versions with each range."""
        return self._clients.is_s3(url)

    def local_path(self, url: str) -> str | None:
        """Return the absolute path of a file on this machine, None for anything else."""
        if (
            self._reads_paths
            and "://" not in url
            and not url.startswith(_NO_PATH)
            and ("::" not in url or not is_chain(url))
        ):
            # Called for every file; fsspec takes 10 us.
            path = url.rstrip("/") or "/"
            if path.startswith("/"):
                return path
            check_slashes(path)
            return f"{os.getcwd()}/{path.removeprefix('./')}" if path != "." else os.getcwd()
        if self._clients.store_of(url) is not None:  # an object store need not be opened for this
            return None
        filesystem, path = self._clients.filesystem(url, reading=True)
        return path if isinstance(filesystem, LocalFileSystem) else None

    def info(self, url: str) -> FileInfo:
        """Look up one file.

        Raises:
            StorageError: If it is missing or cannot be reached.
        """
        found = self._call_uncached(url, "info")
        if found["type"] == "directory":
            raise StorageError("a folder where a file is expected", shard=url)
        return self._file(url, found)

    def exists(self, url: str) -> bool:
        """Return whether there is a file or folder."""
        if (path := self.local_path(url)) is not None and (found := is_there(path)) is not None:
            return found
        try:
            # exists() of some file systems returns False on any error.
            self._call_uncached(url, "info")
        except NotFoundError:
            return False
        return True

    def list_folder(self, url: str) -> tuple[list[FileInfo], list[str]]:
        """Return the files, sorted by name, and the names of the folders, directly under a folder or prefix.

        On S3 the name of a folder may be empty: that of ``a//b`` under ``a``.

        Raises:
            StorageError: If it is missing or empty, or cannot be reached.
        """
        files: list[FileInfo] = []
        folders: list[str] = []
        for some_files, some_folders in self.folder_pages(url):
            files += some_files
            folders += some_folders
            if len(files) + len(folders) > MAX_LISTED_FILES:
                raise _too_many_files(url)
        return _in_order(files), sorted(folders)

    def folder_pages(self, url: str) -> Iterator[tuple[list[FileInfo], list[str]]]:
        """Yield what `list_folder` returns, some at a time, in any order; all at once where the client cannot do so.

        Raises:
            StorageError: As `list_folder`; after other pages, if the connection is lost.
        """
        local = None if "://" in url else self.local_path(url)
        is_empty = True
        if local is not None:
            try:
                for found, names in folder_pages(local):
                    is_empty = False
                    yield [*starmap(_local_info, found)], names
            except (OSError, ValueError) as error:
                if not is_empty:
                    with self.translate_errors(url):
                        raise
                _log.debug("%s: %s", url, error)  # the error is raised, and explained, below
            else:
                return
        _, path = self._clients.filesystem(url, reading=True)
        for page in self._remote_pages(url, recursive=False):
            is_empty = is_empty and not (page.entries or page.folders)
            yield self._files(url, page.entries), page.folders
        if is_empty:  # a file, or nothing
            yield self._list_at_once(url, path)

    def _list_at_once(self, url: str, path: str) -> tuple[list[FileInfo], list[str]]:
        entries = self._call_uncached(url, "ls", detail=True)
        has_nameless_folder = any(
            e["type"] == "directory" and e["name"] == f"{path}/" for e in entries
        )
        entries = [entry for entry in entries if entry["name"].rstrip("/") != path.rstrip("/")]
        files = self._files(url, [entry for entry in entries if _is_file(entry)])
        folders = [
            entry["name"].rstrip("/").rsplit("/", 1)[-1]
            for entry in entries
            if entry["type"] == "directory"
        ]
        return files, folders + [""] * has_nameless_folder

    def find(self, url: str) -> list[FileInfo]:
        """Return all files under a folder or prefix, however deep, sorted by name."""
        files: list[FileInfo] = []
        for page in self.find_pages(url):
            files += page
            if len(files) > MAX_LISTED_FILES:
                raise _too_many_files(url)
        return _in_order(files)

    def find_pages(self, url: str) -> Iterator[list[FileInfo]]:
        """Yield what `find` returns, some at a time, in any order; all at once where the client cannot do so.

        Raises:
            StorageError: If a folder cannot be read or reached.
        """
        local = None if "://" in url else self.local_path(url)
        if local is not None:
            with self.translate_errors(url):
                for found in tree_pages(local):
                    yield [*starmap(_local_info, found)]
            return
        is_empty = True
        for page in self._remote_pages(url, recursive=True):
            is_empty = is_empty and not page.entries
            yield self._files(url, page.entries)
        if is_empty:  # a file, or nothing
            yield self._files(url, self._call_uncached(url, "find", detail=True).values())

    def _remote_pages(self, url: str, *, recursive: bool) -> Iterator[Page]:
        """Yield the pages of a listing; none if the client only lists all at once."""
        check_parts(url)
        filesystem, path = self._clients.filesystem(url, reading=True)
        listing = open_listing(filesystem, path, url=url, recursive=recursive)
        num_empty = 0
        while listing is not None and not listing.is_complete:
            page = retry_call(self, url, listing.next_page)
            num_empty = 0 if page.entries or page.folders else num_empty + 1
            if num_empty > MAX_EMPTY_PAGES:
                raise endless_error(f"sent {num_empty:,} pages without a file", url)
            yield page

    def is_glob(self, url: str) -> bool:
        """Return whether a URL is a glob; not if there is a file or folder of exactly this name."""
        return has_glob_signs(url) and (url.startswith(WEB) or not self.exists(url))

    def glob(self, pattern: str) -> list[FileInfo]:
        """Return the files that match a pattern, sorted by name.

        Raises:
            OptionError: If it would take too long (see `simplify_glob`).
        """
        if not pattern.startswith(WEB):
            return matching_files(pattern, self)
        pattern = simplify_glob(pattern)
        found = self._call_uncached(pattern, "glob", detail=True).values()
        return self._files(pattern, [entry for entry in found if _is_file(entry)])

    def read(
        self, url: str, start: int = 0, end: int | None = None, **hints: Unpack[ReadHints]
    ) -> bytes:
        """Read a whole file, or the bytes ``start`` to ``end``, as a copy (see `read_view`)."""
        return bytes(self.read_view(url, start, end, **hints))

    def read_bounded(
        self, url: str, limit_bytes: int | None = None, *, expected_bytes: int = 0
    ) -> bytes:
        """Read a whole file of at most so many bytes, whatever a hostile server sends.

        Args:
            url: URL of the file.
            limit_bytes: By default `SIDECAR_LIMIT_BYTES`, or as many as are expected.
            expected_bytes: Length that a sound file may have.

        Raises:
            StorageError: If it is longer, or as `read_view`.
        """
        limit_bytes = limit_bytes or max(SIDECAR_LIMIT_BYTES, expected_bytes)
        data = self.read(url, max_bytes=limit_bytes + 1)
        if len(data) > limit_bytes:
            raise StorageError(
                f"the file has over {limit_bytes:,} bytes, the limit of its kind",
                remedy="check the file and its server",
                shard=url,
            )
        return data

    def read_view(
        self, url: str, start: int = 0, end: int | None = None, **hints: Unpack[ReadHints]
    ) -> bytes | memoryview:
        """Read a whole file, or the bytes ``start`` to ``end``; a remote one with retries, and through the cache, if any.

        All bytes of a remote file are of one version: its ETag must stay the one of the first range that this storage read
        of it in this process, and its length must be the one that the caller passes.

        Args:
            url: URL of the file.
            start: Offset of the first byte.
            end: Offset after the last; None is the end of the file.
            hints: See `ReadHints`.

        Returns:
            The bytes; a view of a client's own memory where that saves a copy.

        Raises:
            NotFoundError: If the file is missing; at once.
            AccessDeniedError: If access is refused; at once.
            ChangedError: If the file is not the one that was indexed, or changes during the read; at once.
            StorageError: If no byte arrives for ``retry_timeout_s`` of the storage options.
        """
        path = self.local_path(url)
        if path is not None:
            with suppress(OSError, ValueError):  # the error is raised, and explained, below
                data = read_range(path, start, end, hints.get("max_bytes"))
                if data is not None:
                    return data
        if self.cache is None or path is not None:
            return read_remote(self, url, start, end, **hints)

        def read(start: int, end: int | None) -> bytes | memoryview:
            # Bytes that are cached under a listed version must be of that version.
            if self.cache is not None and (etag := self.cache.etag(url)) is not None:
                self.pin(url, etag)
            return read_remote(self, url, start, end, **hints)

        return self.cache.read(
            url,
            start,
            end,
            size=hints.get("size"),
            max_bytes=hints.get("max_bytes"),
            read=read,
            look_up=lambda: self.info(url),
        )

    def forget(self, url: str, start: int = 0, end: int | None = None) -> None:
        """Delete these bytes of a file from the cache because they are damaged, so that the source is read again."""
        if self.cache is not None:
            self.cache.forget(url, start, end)

    def _call_uncached(self, url: str, method: str, **arguments: Any) -> Any:
        """Call a method that lists or looks up, without cached listings."""
        filesystem, path = self._clients.filesystem(url, reading=True)

        def call_once() -> Any:
            filesystem.invalidate_cache()
            return getattr(filesystem, method)(path, **arguments)

        try:
            return retry_call(self, url, call_once)
        except AccessDeniedError:
            if method == "info" and self.is_s3(url):
                self.read(url, 0, 1)  # the response to a HEAD has no body with the error code
            raise

    @contextmanager
    def open(self, url: str, *, buffer_bytes: int = BUFFER_BYTES) -> Iterator[BinaryIO]:
        """Open a file for reading; a remote one by range reads like those of `read`, if its length is known.

        Args:
            url: URL of the file.
            buffer_bytes: Least size of a range read.

        Raises:
            StorageError: If it is missing or cannot be reached; for a remote file also during a read.
        """
        path = self.local_path(url)
        size = self._call_uncached(url, "info")["size"] if path is None else None
        if size is not None:
            with io.BufferedReader(RangeStream(self, url, size), buffer_bytes) as stream:
                yield stream
            return
        if path is not None:
            check_regular(path)
        filesystem, path = self._clients.filesystem(url, reading=False)
        with self.translate_errors(url):
            stream = filesystem.open(path, "rb")
        with stream:
            yield cast("BinaryIO", stream)

    def _files(self, url_asked: str, entries: Iterable[Mapping[str, Any]]) -> list[FileInfo]:
        return _in_order(
            self._file(self._url(url_asked, entry["name"]), entry) for entry in entries
        )

    def _file(self, url: str, entry: Mapping[str, Any]) -> FileInfo:
        file = FileInfo(
            url=url,
            size_or_none=entry["size"],
            version=version_of(entry),
            modified=time_of(entry),
        )
        if self.cache is not None and file.size_or_none is not None:
            self.cache.record(file.url, file.size_or_none, file.version)
        return file

    @staticmethod
    def _url(url_asked: str, name: str) -> str:
        """Add the protocol of the requested URL to a listed name, so that it can be opened."""
        if is_chain(url_asked):
            chain, last = url_asked.rsplit("::", 1)
            return f"{chain}::{Storage._url(last, name)}"
        if "://" not in url_asked or "://" in name:
            return name
        return f"{url_asked.split('://', 1)[0]}://{name if url_asked.startswith(('file:', 'local:')) else name.lstrip('/')}"


def _too_many_files(url: str) -> StorageError:
    """Return the error of a listing that would fill the memory, such as one without end."""
    return StorageError(
        f"there are over {MAX_LISTED_FILES:,} files here, the limit of a listing in memory",
        remedy="check the URL; name a folder with fewer files",
        shard=url,
    )


def _in_order(files: Iterable[FileInfo]) -> list[FileInfo]:
    """Return the files of a listing by name.

    Raises:
        StorageError: If one is listed twice: its samples would be read twice.
    """
    found = sorted(files, key=lambda file: file.url)
    for one, other in pairwise(found):
        if one.url == other.url:
            raise StorageError(LISTED_TWICE, shard=one.url)
    return found


def _is_file(entry: Mapping[str, Any]) -> bool:
    """Return True for a file, and for a link, whose type fsspec gives as "other" in a local listing."""
    return entry["type"] == "file" or bool(entry.get("islink") and entry["type"] == "other")


def _local_info(path: str, size: int, status: os.stat_result) -> FileInfo:
    # As `version_of`.
    version = f"mtime {status.st_mtime}" if status.st_mtime else f"created {status.st_ctime}"
    return FileInfo(url=path, size_or_none=size, version=version, modified=status.st_mtime)
