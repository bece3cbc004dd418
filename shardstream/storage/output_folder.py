"""Publish, read, list and delete the files of a folder that a dataset is written to.

`LocalFolder` calls the operating system directly; `RemoteFolder` goes through `Storage`, with its clients and retries.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from shardstream.errors import ChangedError, NotFoundError
from shardstream.storage.conditional_write import read_with_version, replace_if
from shardstream.storage.error_messages import translate_errors
from shardstream.storage.local_files import folder_pages
from shardstream.storage.publish import (
    LocalFile,
    PendingFile,
    locked_error,
    open_pending,
    release_lock,
    remove_all,
    sync_folder,
    try_lock,
)
from shardstream.storage.store import FileInfo, Storage
from shardstream.storage.urls import join_url

_LOCK_TIMEOUT_S, _LOCK_POLL_S = 1.0, 0.01  # a file that is replaced locks the folder for a moment


class OutputFolder(Protocol):
    """A folder that one writer fills; all methods raise `StorageError` when the store fails."""

    url: str
    check_owner: Callable[[], None]
    """Raises if another writer has taken the folder over; set by the one that claims it. On S3, a file that is there is replaced only after it was called."""

    def lock(self) -> None:
        """Lock out other writers until `unlock`, where the folder's file system can do that."""

    def unlock(self) -> None:
        """Release the lock; a second call does nothing."""

    def list_files(self) -> dict[str, FileInfo]:
        """Return the files directly in the folder by name; none if the folder is missing."""

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes | None:
        """Read a small file, or the bytes ``start`` to ``end`` of any; None if it is missing."""

    def write(self, name: str, data: bytes) -> None:
        """Publish a small file, whole or not at all; it never survives a crash without the files that were committed before."""

    def replace(self, name: str, data: bytes, *, old: bytes | None) -> None:
        """Publish a small file if ``old`` is still there (see `replace_if`)."""

    def remove(self, *names: str) -> None:
        """Delete files, in any order; a missing one is no error."""

    def open(self, name: str) -> PendingFile:
        """Open a new file that appears when it is committed."""

    def commit(self, *files: PendingFile) -> None:
        """Publish files that `open` has returned, in any order; a crash may undo this until the next `write`, `replace` or `sync`."""

    def sync(self) -> None:
        """Make sure that no crash undoes a `commit`, also of another process."""


def open_output_folder(
    url: str, storage_options: Mapping[str, Any] | None, filesystem: Any = None
) -> OutputFolder:
    """Open a folder for writing: by system calls if it is on this machine, else through fsspec.

    Raises:
        OptionError: If a storage option is wrong or the protocol unknown.
    """
    if url.startswith("/") and not storage_options and filesystem is None:
        return LocalFolder(url, url)  # a plain path needs no file system to be looked up
    return output_folder_in(Storage(storage_options, filesystem), url)


def output_folder_in(storage: Storage, url: str) -> OutputFolder:
    """Open a folder of a storage for writing (see `open_output_folder`)."""
    path = storage.local_path(url)
    return RemoteFolder(storage, url) if path is None else LocalFolder(path, url)


def commit_all(folder: OutputFolder, files: Mapping[str, bytes]) -> None:
    """Write small files, flush them to the disk, and publish them (see `OutputFolder.commit`).

    Raises:
        StorageError: If one cannot be written; earlier ones may be published.
    """
    pending: list[PendingFile] = []
    try:
        for name, data in files.items():
            file = folder.open(name)
            pending.append(file)
            file.write(data)
            file.end()
        folder.commit(*pending)
    finally:
        for file in pending:
            file.discard()


def no_owner() -> None:
    """Do nothing: the folder is not claimed."""


class LocalFolder:
    """A folder of this machine; its system calls are not retried.

    Args:
        path: Absolute path.
        url: The same folder as the user named it, for messages.
    """

    def __init__(self, path: str, url: str) -> None:
        self.url = url
        self.check_owner: Callable[[], None] = no_owner
        self._path = Path(path)
        self._unlock: weakref.finalize[..., LocalFolder] | None = None
        self._renamed = self._flushed = object()

    def lock(self) -> None:
        """Create the folder and lock it until `unlock` or the end of this process (see `try_lock`); a new one is removed if it is empty then.

        Raises:
            StorageError: If another pack or writer holds the lock, or the folder cannot be created.
        """
        is_new = not self._path.exists()
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while (token := try_lock(str(self._path), self.url)) is None:
            if time.monotonic() > deadline:
                raise locked_error(self.url)
            time.sleep(_LOCK_POLL_S)
        # Also when this object is garbage-collected: a writer that was never closed must not lock forever.
        self._unlock = weakref.finalize(self, release_lock, token, self._path if is_new else None)

    def unlock(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._unlock is not None:
            self._unlock()

    def list_files(self) -> dict[str, FileInfo]:
        """Return the files directly in the folder by name; none if the folder is missing."""
        files: dict[str, FileInfo] = {}
        with translate_errors(self.url), suppress(FileNotFoundError):
            for some, _ in folder_pages(str(self._path)):
                for path, size, _ in some:
                    files[os.path.basename(path)] = FileInfo(url=path, size_or_none=size)
        return dict(sorted(files.items()))

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes | None:
        """Read a small file, or the bytes ``start`` to ``end`` of any; None if it is missing."""
        path = self._path / name
        with translate_errors(str(path)):
            try:
                with open(path, "rb") as file:
                    file.seek(start)
                    return file.read(-1 if end is None else end - start)
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        """Publish a small file, whole or not at all; the names of committed files are flushed before."""
        file = self.open(name)
        try:
            file.write(data)
            file.end()
            if self._flushed is not self._renamed:
                self.sync()
            file.commit()
        finally:
            file.discard()

    def replace(self, name: str, data: bytes, *, old: bytes | None) -> None:  # noqa: ARG002
        """Publish a small file; the lock has kept other writers of this machine away from the old one."""
        self.write(name, data)

    def remove(self, *names: str) -> None:
        """Delete files, and flush their folder once; a missing one is no error."""
        is_changed = False
        for name in names:
            path = self._path / name
            with translate_errors(str(path)), suppress(FileNotFoundError):
                os.unlink(path)
                is_changed = True
        if is_changed:
            with translate_errors(self.url):
                sync_folder(self._path)

    def open(self, name: str) -> PendingFile:
        """Open a new file that appears when it is committed."""
        return LocalFile(self._path / name)

    def commit(self, *files: PendingFile) -> None:
        """Flush and rename files; their folder is flushed later, once for several files."""
        for file in files:
            assert isinstance(file, LocalFile)  # noqa: S101  (`open` returns no other)
            file.rename()
            self._renamed = object()

    def sync(self) -> None:
        """Flush the names of the committed files to the disk."""
        renamed = self._renamed  # another thread may rename a file meanwhile
        with translate_errors(self.url):
            sync_folder(self._path)
        self._flushed = renamed


class RemoteFolder:
    """A folder of any other file system, through a `Storage`."""

    def __init__(self, storage: Storage, url: str) -> None:
        self.url = url
        self.check_owner: Callable[[], None] = no_owner
        self._storage = storage
        self._is_new = False  # not known before a listing

    def lock(self) -> None:
        """Do nothing: writers detect each other by the journal."""

    def unlock(self) -> None:
        """Do nothing."""

    def list_files(self) -> dict[str, FileInfo]:
        """Return the files directly in the folder by name; none if the folder is missing."""
        files: list[FileInfo] = []
        with suppress(NotFoundError):
            files, _ = self._storage.list_folder(self.url)
        self._is_new = not files
        return {file.url.rsplit("/", 1)[-1]: file for file in files}

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes | None:
        """Read a small file, or the bytes ``start`` to ``end`` of any; None if it is missing."""
        url = join_url(self.url, name)
        try:
            if (start, end) == (0, None):
                return self._storage.read_bounded(url)
            return self._storage.read(url, start, end)
        except NotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Publish a small file, whole or not at all."""
        commit_all(self, {name: data})

    def replace(self, name: str, data: bytes, *, old: bytes | None) -> None:
        """Publish a small file if ``old`` is still there (see `replace_if`)."""
        url = join_url(self.url, name)
        found, token = (None, None) if old is None else read_with_version(self._storage, url)
        if found != old:
            raise ChangedError("the file was replaced meanwhile", shard=url)
        replace_if(self._storage, url, data, token)

    def remove(self, *names: str) -> None:
        """Delete files, several at the same time; a missing one is no error."""
        remove_all(self._storage, [join_url(self.url, name) for name in names])

    def open(self, name: str) -> PendingFile:
        """Open a new file that appears when it is committed; unfinished uploads of it are dropped.

        Where the folder had no files, no upload of a killed writer is searched: its journal would be there.
        """
        url = join_url(self.url, name)
        owner = None if self.check_owner is no_owner else self.check_owner
        return open_pending(self._storage, url, is_only_writer=not self._is_new, check_owner=owner)

    def commit(self, *files: PendingFile) -> None:
        """Publish files at the same time: each waits for the server."""
        with ThreadPoolExecutor(len(files), thread_name_prefix="shardstream-commit") as pool:
            for done in [pool.submit(file.commit) for file in files]:
                done.result()

    def sync(self) -> None:
        """Do nothing: a published file stays."""
