"""Publish whole or not at all: nothing half-written is ever visible under its final name."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from shardstream.errors import ChangedError, NotFoundError, StorageError
from shardstream.storage.error_messages import translate_errors
from shardstream.storage.multipart_upload import S3Upload, put_if, takes_parts
from shardstream.storage.store import Storage, parent_url

# Where a PUT is one act: the object is there whole or not at all.
_ATOMIC = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "memory", "hf"})
_PART = re.compile(r"\.part-[0-9a-f]{12}\Z")  # what `_part_of` appends, and nothing else


class PendingFile(ABC):
    """A file that is being written and not there yet: `commit` makes it appear, `discard` forgets it.

    What is written may come from one thread and be committed by another, one after the other.

    Args:
        place: What is written to meanwhile, for messages: a full disk is full there.
        stream: Where the bytes go, from first to last: what is written may be on its way, so nobody can seek in it.
    """

    def __init__(self, place: str, stream: BinaryIO) -> None:
        self._place = place
        self.stream = stream
        self.etag: str | None = None
        """Of the file after `commit`, where an S3 server tells it."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            StorageError: If there is no room for them.
        """
        with translate_errors(self._place):
            self.stream.write(data)

    def end(self) -> None:  # noqa: B027  (most have nothing to do)
        """Say that nothing more will be written; `commit`, perhaps in another thread and later, then has less to do.

        Raises:
            StorageError: If what was written before could not be sent.
        """

    @abstractmethod
    def commit(self) -> None:
        """Make the file appear, whole.

        Raises:
            StorageError: If that fails; the place is as it was.
        """

    @abstractmethod
    def discard(self) -> None:
        """Forget what was written; after `commit`, or a second time, it does nothing."""


def open_pending(storage: Storage, url: str, *, alone: bool = False) -> PendingFile:
    """Open a file for writing that appears at ``url`` when it is committed, and never otherwise.

    On a local disk it is written beside its final place, flushed to the disk and renamed, and the folder is flushed, too. To S3 it is sent while it is
    written, in parts, several at a time (see `S3Upload`). For other file systems it is spooled to a temporary file, sent, and its
    length checked there.

    Args:
        storage: Where it goes.
        url: Its URL.
        alone: Whether nobody else writes this file now: then unfinished uploads of it, which a killed writer left, are dropped.

    Raises:
        StorageError: If it cannot be opened.
    """
    path = storage.local_path(url)
    if path is not None:
        return LocalFile(Path(path))
    if takes_parts(storage.resolve(url)[0]):
        return _S3File(storage, url, alone=alone)
    return _RemoteFile(storage, url)


@contextmanager
def publish(storage: Storage, url: str) -> Iterator[BinaryIO]:
    """Open a file for writing that appears at ``url`` when the block ends well, and never otherwise (see `open_pending`).

    Raises:
        StorageError: If it cannot be written; the place is as it was.
    """
    pending = open_pending(storage, url)
    try:
        yield pending.stream
        pending.commit()
    finally:
        pending.discard()


def publish_bytes(storage: Storage, url: str, data: bytes) -> None:
    """Publish a small file."""
    with publish(storage, url) as stream, storage.translate_errors(url):
        stream.write(data)


def publish_bytes_over(storage: Storage, url: str, data: bytes, *, old: bytes | None) -> None:
    """Publish a small file if nobody has replaced the one before it.

    S3 servers compare and write in one step; elsewhere whoever writes at the same moment is not noticed.

    Args:
        storage: Where it goes.
        url: Its URL.
        data: Its bytes; no two writers write the same ones.
        old: What is there now, as this writer knows it; None for nothing.

    Raises:
        ChangedError: If something else is there.
        StorageError: If it cannot be written.
    """
    if not takes_parts(storage.resolve(url)[0]):
        publish_bytes(storage, url, data)
        return
    md5 = None if old is None else hashlib.md5(old, usedforsecurity=False).hexdigest()
    try:
        put_if(storage, url, data, {"IfNoneMatch": "*"} if md5 is None else {"IfMatch": md5})
    except (ChangedError, NotFoundError):  # the latter if there is none where there was one
        found = _read_or_none(storage, url)
        if found == data:  # the answer to an earlier attempt was lost
            return
        if found != old:
            raise ChangedError("the file was replaced meanwhile", shard=url) from None
        publish_bytes(storage, url, data)  # the ETags of this server are no MD5s: it encrypts, say
    except StorageError as error:
        if "NotImplemented:" not in str(error):
            raise
        publish_bytes(storage, url, data)


def _read_or_none(storage: Storage, url: str) -> bytes | None:
    try:
        return storage.read(url)
    except NotFoundError:
        return None


def is_part(name: str) -> bool:
    """Tell whether a file is what a killed writer left behind.

    >>> [is_part(name) for name in ("a.tar.part-0123456789ab", "a.tar.part-aa", "a.part-1.jpg")]
    [True, False, False]
    """
    return _PART.search(name) is not None


def _part_of(name: str) -> str:
    """Return a new name to write a file under until it is whole."""
    return f"{name}.part-{uuid.uuid4().hex[:12]}"


def final_name(name: str) -> str | None:
    """Return what a half-written file was to become; None if it is no such file.

    >>> final_name("000001.tar.part-0123456789ab"), final_name("000001.tar")
    ('000001.tar', None)
    """
    return _PART.sub("", name) if is_part(name) else None


def remove(storage: Storage, url: str) -> None:
    """Delete a file; one that is not there is fine."""
    filesystem, path = storage.resolve(url)
    local = storage.local_path(url)
    with storage.translate_errors(url):
        try:
            filesystem.rm_file(path)
        except FileNotFoundError:
            return
        if local is not None:
            sync_folder(Path(local).parent)


class LocalFile(PendingFile):
    """A file of this machine: written beside its final place, flushed to the disk and renamed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(_part_of(path.name))
        with translate_errors(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                stream = self._part.open("xb")
            except BaseException:  # also a signal, between the file's creation and its opening
                self._part.unlink(missing_ok=True)
                raise
        super().__init__(str(path), stream)

    def commit(self) -> None:
        """Flush the file to the disk, rename it and flush its folder."""
        with translate_errors(self._place):
            self.stream.flush()
            os.fchmod(self.stream.fileno(), 0o644)
            os.fsync(self.stream.fileno())
            self.stream.close()
            self._part.replace(self._path)
            sync_folder(self._path.parent)

    def discard(self) -> None:
        """Delete what was written, if it was not committed."""
        _close_unsaved(self.stream)
        self._part.unlink(missing_ok=True)


class _S3File(PendingFile):
    def __init__(self, storage: Storage, url: str, *, alone: bool) -> None:
        self._upload = S3Upload(storage, url, alone=alone)
        super().__init__(url, cast("BinaryIO", self._upload))

    def end(self) -> None:
        self._upload.end()

    def commit(self) -> None:
        self._upload.finish()
        self.etag = self._upload.etag

    def discard(self) -> None:
        self._upload.abort()


class _RemoteFile(PendingFile):
    def __init__(self, storage: Storage, url: str) -> None:
        self._storage, self._url = storage, url
        folder = tempfile.gettempdir()
        with translate_errors(folder):
            handle, name = tempfile.mkstemp(prefix="shardstream-")
        self._spool = Path(name)
        super().__init__(f"{folder} (where it waits to be sent to {url})", os.fdopen(handle, "wb"))

    def commit(self) -> None:
        with translate_errors(self._place):
            self.stream.close()
            size = self._spool.stat().st_size
        filesystem, path = self._storage.resolve(self._url)
        with self._storage.translate_errors(self._url):
            _send(filesystem, self._spool, path)
        sent = self._storage.info(self._url).size
        if sent != size:
            raise StorageError(f"{sent} of {size} bytes arrived; pack it again", shard=self._url)

    def discard(self) -> None:
        _close_unsaved(self.stream)
        self._spool.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk, so that after a crash no later file is there without this one (POSIX fsync)."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # mounts that cannot sync folders
            raise
    finally:
        os.close(handle)


def _close_unsaved(stream: BinaryIO) -> None:
    with suppress(
        OSError
    ):  # the disk is full: what is buffered cannot be flushed, and is not wanted
        stream.close()


def _send(filesystem: Any, source: Path, path: str) -> None:
    protocols = filesystem.protocol
    atomic = _ATOMIC.intersection((protocols,) if isinstance(protocols, str) else protocols)
    if "memory" in atomic:  # its put_file shows the file while it grows
        filesystem.pipe_file(path, source.read_bytes())
        return
    if atomic:
        filesystem.put_file(str(source), path)
        return
    part = _part_of(path)
    try:
        if "/" in path:
            filesystem.makedirs(parent_url(path), exist_ok=True)
        filesystem.put_file(str(source), part)
        filesystem.mv(part, path)
    except BaseException:
        if filesystem.exists(part):
            filesystem.rm_file(part)
        raise
