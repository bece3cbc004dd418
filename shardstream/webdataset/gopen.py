"""Open URLs for reading and writing, through shardstream's storage; commands are refused."""

from __future__ import annotations

import copy
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, Self

from shardstream.errors import (
    ChangedError,
    OptionError,
    ShardStreamError,
    StorageError,
    plural,
    redact,
)
from shardstream.format import MANIFEST_NAME
from shardstream.storage import (
    FileInfo,
    Storage,
    dataset_of_change,
    is_tar,
    join_url,
    open_cache,
    open_pending,
    parent_url,
    read_manifest,
)
from shardstream.webdataset import utils
from shardstream.webdataset.handlers import UnsafeError

gopen_schemes: dict[str, Callable[..., Any]] = {}
"""Protocol -> function ``(url, mode, bufsize, **kw)`` of the caller; others are opened by shardstream's storage."""

_storages: dict[str, Storage] = {}
_STORAGES_KEPT = 100
_OPTIONS = ["cache_bytes", "cache_dir", "storage_options"]
_versions: dict[str, tuple[str, frozenset[str] | None]] = {}  # by folder, in this process


def open_storage(
    storage_options: Mapping[str, Any] | None = None,
    cache_dir: str | None = None,
    cache_bytes: int | None = None,
) -> Storage:
    """Return the storage of this process with these options; its clients are shared."""
    name = repr((sorted((storage_options or {}).items(), key=str), cache_dir, cache_bytes))
    if name not in _storages:
        if len(_storages) >= _STORAGES_KEPT:
            _storages.clear()
        _storages[name] = Storage(storage_options, cache=open_cache(cache_dir, cache_bytes))
    return _storages[name]


def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **kw: Any) -> Any:
    """Open a URL or path as a binary stream.

    Reads are retried and checked for their length; a file that is written becomes visible when it is closed without an
    exception. ``-`` is standard input or output.

    Args:
        url: The file.
        mode: "rb" or "wb".
        bufsize: Passed to functions of `gopen_schemes`.
        kw: Passed to functions of `gopen_schemes`; ``storage_options`` is the dict of `ShardDataset`, ``cache_dir`` and
            ``cache_bytes`` select a cache for reading.

    Raises:
        UnsafeError: If the URL is a command (``pipe:``).
        OptionError: If an argument is invalid, or the protocol is unknown.
        StorageError: If the file cannot be opened.
    """
    if mode not in ("rb", "wb"):
        raise OptionError(f"mode must be 'rb' or 'wb', not {mode!r}")
    if url == "-":
        return sys.stdin.buffer if mode == "rb" else sys.stdout.buffer
    url = rewrite_url(url)
    refuse_commands(url)
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme in gopen_schemes:
        return gopen_schemes[scheme](url, mode, bufsize, **kw)
    if scheme in ("", "file") and is_secure():
        raise UnsafeError(
            "gopen: unsafe_gopen is False, cannot open local files; unset WDS_SECURE and enforce_security to read them"
        )
    if unknown := kw.keys() - _OPTIONS:
        raise OptionError(f"gopen does not take {sorted(unknown)}; its options are {_OPTIONS}")
    storage = open_storage(**kw)
    if mode == "wb":
        return UrlWriter(storage, url)
    _warn_of_versions(url, storage)
    return _open_for_reading(storage, url)


def is_secure() -> bool:
    """Return whether local files and rewriting are refused, too."""
    return utils.enforce_security or utils.variable("WDS_SECURE") not in (None, "", "0")


def refuse_commands(url: str) -> None:
    """Refuse a URL that would start a command.

    Raises:
        UnsafeError: If it does.
    """
    if not url.startswith("pipe:"):
        return
    if is_secure():
        raise UnsafeError(
            "gopen_pipe: unsafe_gopen is False, cannot open pipe URLs; name the file itself"
        )
    raise UnsafeError(
        "a 'pipe:' URL runs a shell command, which shardstream never does; name the file itself: s3://, gs://, az://, hf://, "
        "https:// and local paths are read directly, or register a function: wds.gopen_schemes['NAME'] = function, for NAME://"
    )


def rewrite_url(url: str) -> str:
    """Replace the beginning of a URL by the rules ``pattern=new;…`` of GOPEN_REWRITE; the first that changes it counts.

    Raises:
        UnsafeError: If there are rules and `is_secure`.
        OptionError: If a rule has no "=".
    """
    rules = utils.variable("GOPEN_REWRITE")
    if rules is None:
        return url
    if is_secure():
        raise UnsafeError(
            "rewrite_url: unsafe_gopen is False, cannot rewrite URLs using environment variables; unset GOPEN_REWRITE"
        )
    for rule in filter(None, rules.split(";")):
        old, equals, new = rule.partition("=")
        if not equals:
            raise OptionError(
                f"GOPEN_REWRITE has a rule {rule!r} without '='; write old=new;old=new"
            )
        replaced = re.sub(f"^{old}", new, url)
        if replaced != url:
            return replaced
    return url


def _warn_of_versions(url: str, storage: Storage) -> None:
    """Warn, once for each folder, if a tar has samples or fields that are not those of its dataset any more."""
    folder = parent_url(url)
    if not is_tar(url) or "?" in url:  # the signature of one file is not one of the manifest
        return
    if folder not in _versions:
        _versions[folder] = _find_versions(folder, storage)
    reason, listed = _versions[folder]
    if listed is not None and url not in listed:
        reason = "this tar is not one of its current version, and may have deleted samples"
    if reason:
        _versions[folder] = "", None
        warnings.warn(
            f"{redact(url)}: the dataset was changed: {reason}. Tars that are read one by one are as they were: name the folder, with exact=True, or read the tars "
            "that index.json lists after 'shardstream compact'",
            stacklevel=2,
        )


def _find_versions(folder: str, storage: Storage) -> tuple[str, frozenset[str] | None]:
    """Return what was changed in the dataset that has the tars in a folder, and the URLs of all its tars if some were written again."""
    dataset = dataset_of_change(folder) or folder
    url = join_url(dataset, MANIFEST_NAME)
    try:
        manifest, _ = read_manifest(FileInfo(url=url, size_or_none=None), storage)
    except (ShardStreamError, OSError):  # the tars may be read all the same
        return "", None
    version = manifest.dataset_version
    reasons = [f"{plural(version.ndeleted, 'sample')} deleted"] if version.ndeleted else []
    reasons += ["fields replaced"] if version.replaced else []
    urls = (join_url(dataset, one.url) for one in manifest.shards if version.renumbered)
    return " and ".join(reasons), frozenset(urls) if version.renumbered else None


def _open_for_reading(storage: Storage, url: str) -> BinaryIO:
    path = storage.local_path(url)
    if path is not None:
        with storage.translate_errors(url):
            return open(path, "rb")
    # The copy has no pinned versions: a file that is opened again may have been replaced in between.
    return io.BufferedReader(_UrlReader(copy.copy(storage), url))


class UrlError(StorageError, OSError):
    """A file that cannot be read; also an ``OSError``, as WebDataset raises."""


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        if isinstance(error, OSError | ChangedError):
            raise
        raise UrlError(
            error.what, remedy=error.remedy, shard=error.shard, offset=error.offset
        ) from error


class _UrlReader(io.RawIOBase):
    """Stream of a remote file that closes its client with itself."""

    def __init__(self, storage: Storage, url: str) -> None:
        self._stack = ExitStack()
        with _as_os_error():
            self._stream = self._stack.enter_context(storage.open(url))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._stream.seekable()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def readinto(self, buffer: Any, /) -> int:
        with _as_os_error():
            data = self._stream.read(len(memoryview(buffer)))
        memoryview(buffer)[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stack.close()
        super().close()


class UrlWriter:
    """A file that becomes visible when it is closed; an exception in its ``with`` block discards it.

    Args:
        storage: Where it is written.
        url: The file.
    """

    def __init__(self, storage: Storage, url: str) -> None:
        self._pending = open_pending(storage, url)
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes."""
        self._pending.write(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: bytes are sent when the file is closed, or earlier."""

    def close(self) -> None:
        """Publish the file."""
        if self.closed:
            return
        self.closed = True
        try:
            self._pending.commit()
        finally:
            self._pending.discard()

    def discard(self) -> None:
        """Drop what was written."""
        if not self.closed:
            self.closed = True
            self._pending.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *args: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()
