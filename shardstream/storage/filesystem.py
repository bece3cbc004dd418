"""Any fsspec file system, opened in the process that uses it, with errors that say what to do."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from shardstream.errors import MissingError, OptionError, RefusedError, StorageError, redact
from shardstream.storage.inherited import keep_inherited

_S3 = ("s3", "s3a")
# What listings of file systems call that which changes with a file, the best first.
_STAMPS = ("ETag", "etag", "e_tag", "md5Hash", "mtime", "LastModified", "last_modified", "updated")
_INSTALL = {
    "s3": "pip install 'shardstream[s3]'",
    "gs": "pip install gcsfs",
    "abfs": "pip install adlfs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """A file as a listing shows it.

    Args:
        url: With its protocol, as `Storage` takes it back.
        size: Bytes.
        stamp: What changes when the file is written again: an ETag or a time; empty if the file system tells none.
    """

    url: str
    size: int
    stamp: str = ""


class Storage:
    """Reads and lists files by URL; picklable, opens its file systems anew in each process.

    Args:
        options: What fsspec takes as ``storage_options``, e.g. ``{"key": …, "secret": …, "endpoint_url": …}``.
        filesystem: An fsspec file system to use for every URL instead of looking one up by protocol.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, filesystem: Any = None) -> None:
        self._options = dict(options or {})
        self._filesystem = filesystem
        self._opened: dict[str, Any] = {}
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": {}}

    def resolve(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL and the path on it.

        Raises:
            OptionError: If the URL starts a command, or its protocol is unknown or not installed.
        """
        if url.startswith("pipe:"):
            raise OptionError(
                "no URL starts a command here; give the files' own URL (s3://…), "
                "or mount or download what only a command can reach"
            )
        if self._pid != os.getpid():  # forked: connections and threads stayed with the parent
            keep_inherited(self._opened, self._filesystem)
            self._opened, self._pid = {}, os.getpid()
            if getattr(self._filesystem, "async_impl", False):
                self._filesystem = copy.deepcopy(self._filesystem)  # opens it anew
        if self._filesystem is not None:
            return self._filesystem, self._filesystem._strip_protocol(url)
        protocol = url.split("://", 1)[0] if "://" in url else "file"
        filesystem = self._opened.get(protocol)
        if filesystem is None or "::" in url:
            filesystem, path = self._open(url, protocol)
            if "::" not in url:
                self._opened[protocol] = filesystem
            return filesystem, path
        return filesystem, filesystem._strip_protocol(url)

    def _open(self, url: str, protocol: str) -> tuple[Any, str]:
        options = self._options
        if protocol in _S3:
            # Servers that came before the newer checksums (MinIO, Ceph) refuse or drop them.
            checksums = dict.fromkeys(
                ("request_checksum_calculation", "response_checksum_validation"), "when_required"
            )
            options = {"use_listings_cache": False, **options}
            options["config_kwargs"] = checksums | options.get("config_kwargs", {})
        try:
            return cast("tuple[Any, str]", url_to_fs(url, **options))
        except ImportError as error:
            install = _INSTALL.get(protocol, "install the package it names")
            raise OptionError(
                f"{protocol}:// needs one more package ({error}): {install}", shard=url
            ) from error
        except (ValueError, TypeError) as error:
            raise OptionError(f"cannot open this URL: {error}", shard=url) from error

    def local_path(self, url: str) -> str | None:
        """Return the path of a file on this machine, None for anything else."""
        filesystem, path = self.resolve(url)
        return path if isinstance(filesystem, LocalFileSystem) else None

    def info(self, url: str) -> FileInfo:
        """Look up one file.

        Raises:
            StorageError: If it is missing or out of reach.
        """
        filesystem, path = self.resolve(url)
        with explained(url):
            filesystem.invalidate_cache()
            found = filesystem.info(path)
        if found["type"] == "directory":
            raise StorageError("a folder where a file is expected", shard=url)
        return FileInfo(url=url, size=found["size"], stamp=_stamp(found))

    def exists(self, url: str) -> bool:
        """Tell whether there is a file or folder."""
        filesystem, path = self.resolve(url)
        with explained(url):
            filesystem.invalidate_cache()
            return bool(filesystem.exists(path))

    def list_folder(self, url: str) -> tuple[list[FileInfo], list[str]]:
        """Return the files, sorted by name, and the names of the folders, right under a folder or prefix.

        Raises:
            StorageError: If it is missing, empty or out of reach.
        """
        filesystem, path = self.resolve(url)
        with explained(url):
            filesystem.invalidate_cache()
            entries = filesystem.ls(path, detail=True)
        entries = [entry for entry in entries if entry["name"].rstrip("/") != path.rstrip("/")]
        files = [
            self._file(url, filesystem, entry["name"], entry)
            for entry in entries
            if entry["type"] == "file"
        ]
        folders = [
            entry["name"].rstrip("/").rsplit("/", 1)[-1]
            for entry in entries
            if entry["type"] == "directory"
        ]
        return sorted(files, key=lambda file: file.url), sorted(folders)

    def find(self, url: str) -> list[FileInfo]:
        """Return all files under a folder or prefix, however deep, sorted by name."""
        filesystem, path = self.resolve(url)
        with explained(url):
            filesystem.invalidate_cache()
            found = filesystem.find(path, detail=True)
        files = [self._file(url, filesystem, name, entry) for name, entry in found.items()]
        return sorted(files, key=lambda file: file.url)

    def glob(self, pattern: str) -> list[FileInfo]:
        """Return the files that match a pattern, sorted by name."""
        filesystem, path = self.resolve(pattern)
        with explained(pattern):
            filesystem.invalidate_cache()
            found = filesystem.glob(path, detail=True)
        files = [
            self._file(pattern, filesystem, name, entry)
            for name, entry in found.items()
            if entry["type"] == "file"
        ]
        return sorted(files, key=lambda file: file.url)

    def read(self, url: str, start: int = 0, end: int | None = None) -> bytes:
        """Read a whole file, or the bytes ``start`` to ``end`` of it.

        Raises:
            StorageError: If it is missing, out of reach, or shorter than asked for.
        """
        filesystem, path = self.resolve(url)
        with explained(url):
            # start=0, end=None is a plain GET: a range on an empty object would be refused
            data = (
                filesystem.cat_file(path)
                if (start, end) == (0, None)
                else filesystem.cat_file(path, start=start, end=end)
            )
        data = bytes(data)
        if end is not None and len(data) < end - start:
            raise StorageError(
                f"got {len(data)} of {end - start} bytes: the file is shorter than its index says, or the answer was cut",
                shard=url,
                offset=start,
            )
        return data

    @contextmanager
    def open(self, url: str) -> Iterator[BinaryIO]:
        """Open a file for reading from the start to the end."""
        filesystem, path = self.resolve(url)
        with explained(url):
            stream = filesystem.open(path, "rb")
        with stream:
            yield cast("BinaryIO", stream)

    @staticmethod
    def _file(asked: str, filesystem: Any, name: str, entry: Mapping[str, Any]) -> FileInfo:
        url = Storage._url(asked, filesystem, name)
        return FileInfo(url=url, size=entry["size"], stamp=_stamp(entry))

    @staticmethod
    def _url(asked: str, filesystem: Any, name: str) -> str:
        """Give a listed name the protocol that its folder was asked with, so it can be opened again."""
        if "::" in asked:
            chain, last = asked.rsplit("::", 1)
            return f"{chain}::{Storage._url(last, filesystem, name)}"
        if "://" not in asked or "://" in name:
            return name
        return f"{asked.split('://', 1)[0]}://{name.lstrip('/') if not asked.startswith('file:') else name}"


def _stamp(entry: Mapping[str, Any]) -> str:
    return next((str(entry[name]) for name in _STAMPS if entry.get(name)), "")


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn what a file system raises into a `StorageError` that says what to do."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise _explain(error, url) from error
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        raise OptionError(
            f"the file system does not know one of the storage options: {error}", shard=url
        ) from error
    except Exception as error:
        # Clients have trees of their own (botocore's comes from Exception); only theirs is translated.
        if type(error).__module__.split(".")[0] in _CLIENTS:
            raise _explain(error, url) from error
        raise


_CLIENTS = (
    "botocore",
    "aiobotocore",
    "s3fs",
    "aiohttp",
    "gcsfs",
    "adlfs",
    "azure",
    "google",
    "obstore",
    "fsspec",
)
_REMEDIES: tuple[tuple[type[StorageError], tuple[str, ...], str], ...] = (
    (MissingError, ("FileNotFoundError", "NoSuchBucket", "NoSuchKey"),
     "nothing is there; check the URL, and that it was written"),
    (RefusedError, ("NoCredentials", "CredentialRetrieval", "PartialCredentials", "ProfileNotFound"),
     "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, or pass storage_options"),
    (RefusedError, ("PermissionError", "Forbidden", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
     "access refused; check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and the bucket's policy"),
    (StorageError, ("EndpointConnectionError", "ConnectionError", "ConnectorError", "ConnectTimeout", "NameResolution"),
     "the server cannot be reached; check AWS_ENDPOINT_URL and the network"),
    (StorageError, ("No space left", "Disk quota exceeded", "File too large"),
     "the disk is full; free some space, or write elsewhere"),
    (StorageError, ("Timeout",),
     "the server did not answer in time; try again, or raise the client's timeout in storage_options"),
)  # fmt: skip


def _explain(error: BaseException, url: str) -> StorageError:
    """Find the first thing in an error's chain that we know a remedy for."""
    names: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(names) < 10:
        names.append(" ".join(kind.__name__ for kind in type(cause).__mro__))
        cause = cause.__cause__ or cause.__context__
    text = " ".join(names) + f" {error}"
    detail = f"{type(error).__name__}: {error}"
    for kind, signs, remedy in _REMEDIES:
        if any(sign in text for sign in signs):
            return kind(f"{remedy} ({redact(detail)})", shard=url)
    return StorageError(redact(detail), shard=url)


def join_url(folder: str, name: str) -> str:
    """Append a relative name to the URL of a folder; an absolute name stays as it is.

    >>> join_url("s3://b/train/", "a.tar"), join_url("x", "s3://b/a.tar")
    ('s3://b/train/a.tar', 's3://b/a.tar')
    """
    if "://" in name or name.startswith("/"):
        return name
    return f"{folder.rstrip('/')}/{name}"


def parent_url(url: str) -> str:
    """Return the URL of the folder that a file is in.

    >>> parent_url("s3://b/train/a.tar"), parent_url("a.tar")
    ('s3://b/train', '.')
    """
    folder, slash, _ = url.rpartition("/")
    return folder if slash else "."


def is_known_protocol(name: str) -> bool:
    """Tell whether fsspec has a file system of that name."""
    return name in fsspec.available_protocols()
