"""Publish files atomically, lock a folder of this machine, and mark the folder of a dataset that is not finished.

No unfinished file is ever visible under its final name. A pack or `ShardWriter` creates the journal before it changes anything else, and
deletes it after ``index.json`` is published: a folder with a journal and without ``index.json`` may lack shards, even if it has tars.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from shardstream.errors import StorageError, UnfinishedError, get_logger
from shardstream.format import MANIFEST_NAME
from shardstream.storage.error_messages import translate_errors
from shardstream.storage.multipart_upload import S3Upload, takes_parts
from shardstream.storage.store import Storage
from shardstream.storage.urls import parent_url

_log = get_logger(__name__)

# Stores on which a PUT is atomic.
_ATOMIC = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "memory", "hf"})
_PART = re.compile(r"\.part-[0-9a-f]{12}\Z")  # the suffix that `part_of` appends


class PendingFile(ABC):
    """A file that is written and not visible yet: `commit` publishes it, `discard` drops it.

    One thread may write and another one commit, one after the other.

    Args:
        place: The place of the unfinished file, for messages about a full disk.
        stream: Takes the bytes in order; it cannot seek, because they may have been sent already.
    """

    def __init__(self, place: str, stream: BinaryIO) -> None:
        self._place = place
        self.stream = stream
        self.etag: str | None = None
        """ETag of the file after `commit`, if an S3 server returned one."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            StorageError: If the disk is full, or the bytes cannot be sent.
        """
        with translate_errors(self._place):
            self.stream.write(data)

    def end(self) -> None:  # noqa: B027  (optional)
        """End writing, so that `commit`, which may come later and from another thread, has less to do.

        A local file is flushed to the disk; to S3 the last part is sent.

        Raises:
            StorageError: If the disk fails, or earlier bytes could not be sent.
        """

    @abstractmethod
    def commit(self) -> None:
        """Publish the file.

        Raises:
            StorageError: If that fails; an older file stays as it was.
        """

    def discard(self) -> None:
        """Drop the unfinished file; does nothing after `commit` or a second time."""
        with suppress(OSError):  # the disk is full: the buffer cannot be flushed, and is not needed
            self.stream.close()


def open_pending(
    storage: Storage,
    url: str,
    *,
    is_only_writer: bool = False,
    check_owner: Callable[[], None] | None = None,
) -> PendingFile:
    """Open a file for writing that becomes visible at ``url`` when it is committed.

    On a local disk it is written under a temporary name in the same folder, flushed and renamed, and the folder is flushed, too. To S3
    it is sent in parts while it is written (see `S3Upload`). For other file systems it is spooled to a temporary file and sent, and its
    length on the server is checked.

    Args:
        storage: The storage to write to.
        url: The file.
        is_only_writer: Whether no other process writes this file. Unfinished uploads of it, left by a killed writer, are then aborted.
        check_owner: Raises if another writer has taken the folder over, whose files must not be replaced; called where the store can prevent that.

    Raises:
        StorageError: If it cannot be opened.
    """
    path = storage.local_path(url)
    if path is not None:
        return LocalFile(Path(path))
    if takes_parts(storage.resolve(url)[0]):
        return _S3File(
            url, S3Upload(storage, url, is_only_writer=is_only_writer, check_owner=check_owner)
        )
    return _RemoteFile(storage, url)


@contextmanager
def publish(storage: Storage, url: str) -> Iterator[BinaryIO]:
    """Open a file for writing that becomes visible at ``url`` when the block ends without an error (see `open_pending`).

    Raises:
        StorageError: If it cannot be written; an older file stays as it was.
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


def is_part(name: str) -> bool:
    """Return whether a file is an unfinished one that a killed writer left.

    >>> [is_part(name) for name in ("a.tar.part-0123456789ab", "a.tar.part-aa", "a.part-1.jpg")]
    [True, False, False]
    """
    return _PART.search(name) is not None


def part_of(name: str) -> str:
    """Return a new temporary name for a file."""
    return f"{name}.part-{uuid.uuid4().hex[:12]}"


def final_name(name: str) -> str | None:
    """Return the final name of an unfinished file; None for any other file.

    >>> final_name("000001.tar.part-0123456789ab"), final_name("000001.tar")
    ('000001.tar', None)
    """
    return _PART.sub("", name) if is_part(name) else None


def remove(storage: Storage, url: str) -> None:
    """Delete a file, if it exists."""
    filesystem, path = storage.resolve(url)
    local = storage.local_path(url)
    with storage.translate_errors(url):
        try:
            filesystem.rm_file(path)
        except FileNotFoundError:
            return
        if local is not None:
            sync_folder(Path(local).parent)


def remove_all(storage: Storage, urls: Iterable[str]) -> None:
    """Delete files, several at the same time: each waits for the server; a missing one is no error."""
    with ThreadPoolExecutor(16, thread_name_prefix="shardstream-remove") as pool:
        for done in [pool.submit(remove, storage, url) for url in urls]:
            done.result()


class LocalFile(PendingFile):
    """A file of this machine: written in the same folder under a temporary name, flushed to the disk and renamed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(part_of(path.name))
        with translate_errors(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                stream = self._part.open("xb")
            except BaseException:  # also a signal between creating and opening the file
                self._part.unlink(missing_ok=True)
                raise
        super().__init__(str(path), stream)

    def end(self) -> None:
        """Flush the bytes to the disk; a second call does nothing."""
        if self.stream.closed:
            return
        with translate_errors(self._place):
            self.stream.flush()
            os.fsync(self.stream.fileno())
            self.stream.close()

    def rename(self) -> None:
        """Flush the file and give it its name, which a crash may undo until the folder is flushed."""
        self.end()
        with translate_errors(self._place):
            self._part.replace(self._path)

    def commit(self) -> None:
        """Flush the file to the disk, rename it and flush its folder."""
        self.rename()
        with translate_errors(self._place):
            sync_folder(self._path.parent)

    def discard(self) -> None:
        """Delete the temporary file, if it was not committed."""
        with suppress(OSError):  # as above
            self.stream.close()
        self._part.unlink(missing_ok=True)


class _S3File(PendingFile):
    def __init__(self, url: str, upload: S3Upload) -> None:
        self._upload = upload
        super().__init__(url, cast("BinaryIO", upload))

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
            spool = tempfile.TemporaryFile()  # noqa: SIM115  (`discard` closes it; a killed process leaves nothing)
        super().__init__(f"{folder} (where it waits to be sent to {url})", cast("BinaryIO", spool))

    def commit(self) -> None:
        with translate_errors(self._place):
            self.stream.flush()
            size = os.fstat(self.stream.fileno()).st_size
        filesystem, path = self._storage.resolve(self._url)
        with self._storage.translate_errors(self._url):
            # Clients of fsspec send a file by its path; this is one of a file without a name.
            self.stream.seek(0)  # macOS opens it at the offset where it is
            _send(filesystem, Path(f"/dev/fd/{self.stream.fileno()}"), path)
        sent = self._storage.info(self._url).size
        if sent != size:
            raise StorageError(f"{sent} of {size} bytes arrived; pack it again", shard=self._url)


def sync_folder(folder: Path) -> None:
    """Flush the names of a folder to the disk, so that after a crash no later file exists without this one (POSIX fsync)."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # mounts that cannot sync folders
            raise
    finally:
        os.close(handle)


def _send(filesystem: Any, source: Path, path: str) -> None:
    protocols = filesystem.protocol
    atomic = _ATOMIC.intersection((protocols,) if isinstance(protocols, str) else protocols)
    if "memory" in atomic:  # its put_file shows the file while it grows
        filesystem.pipe_file(path, source.read_bytes())
        return
    if atomic:
        filesystem.put_file(str(source), path)
        return
    part = part_of(path)
    try:
        if "/" in path:
            filesystem.makedirs(parent_url(path), exist_ok=True)
        filesystem.put_file(str(source), part)
        filesystem.mv(part, path)
    except BaseException:
        if filesystem.exists(part):
            filesystem.rm_file(part)
        raise


# Locks of this process: a token of each -> the folder's device and inode (None for a moment's lock), and the open handle.
_held: dict[object, tuple[tuple[int, int] | None, int]] = {}


def try_lock(path: str, url: str, *, for_a_moment: bool = False) -> object | None:
    """Create a folder and lock it until `release_lock` or the end of this process (flock(2)); no file is created.

    A file system without such locks (some NFS) is used without.

    Args:
        path: Absolute path of the folder.
        url: The same folder as the user named it, for messages.
        for_a_moment: Whether one file is replaced; a lock that this process has for longer is then shared.

    Returns:
        A token of the lock; None if another process holds it, or a thread for a moment.

    Raises:
        StorageError: If this process holds it for longer, or the folder cannot be created.
    """
    with translate_errors(url):
        os.makedirs(path, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # `release_lock` of another process has removed it
            return None
    status, token, is_there = os.fstat(handle), object(), True
    folder = (status.st_dev, status.st_ino)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.stat(path), status)
    except FileNotFoundError:
        is_there = False
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            _log.info("%s: the folder cannot be locked: %s", url, error)
        else:
            os.close(handle)
            if folder not in dict(_held.values()):
                return None
            if for_a_moment:
                return _share_lock(folder)
            raise StorageError(
                "a pack or ShardWriter of this process has this folder open; call the writer's close() or abort(), or write elsewhere",
                shard=url,
            ) from None
    if not is_there:  # removed before it was locked
        os.close(handle)
        return None
    _held[token] = None if for_a_moment else folder, handle
    return token


def _share_lock(folder: tuple[int, int]) -> object | None:
    """Return another token of a lock of this process; None if it is released at this moment."""
    token = object()
    for owner, (locked, handle) in list(_held.items()):
        if locked == folder:
            with suppress(OSError):
                _held[token] = folder, os.dup(handle)
                if owner in _held:  # its handle was open, and `release_lock` has seen the new token
                    return token
            release_lock(token)
    return None


def release_lock(token: object, new: Path | None = None) -> None:
    """Release a lock, also for forked children: they share the opened file, which holds the lock (flock(2)).

    It ends with its last token. A second call does nothing, nor does one in a child for a lock of its parent.

    Args:
        token: Of `try_lock`.
        new: The folder, if it was created for the lock: it is removed if it is empty.
    """
    folder, handle = _held.pop(token, (None, None))
    if handle is None:
        return
    if folder not in dict(_held.values()):
        if new is not None:
            with suppress(OSError):  # it has files
                new.rmdir()
        with suppress(OSError):  # the file system may have no locks
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def locked_error(url: str) -> StorageError:
    """Return the error of a folder that a writer of another process has locked."""
    return StorageError(
        "another pack or ShardWriter writes here; wait until it ends, or write elsewhere", shard=url
    )


def _close_inherited() -> None:
    """Close the handles in a forked child without unlocking, so that the locks end with their own process."""
    for _, handle in _held.values():
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited)


_START, _END = ".shardstream-pack-", ".json"
JOURNAL_NAME = f"{_START}000000{_END}"
"""Name of the journal."""


def part_record_name(part: int | str) -> str:
    """Return the name of the file that records a finished part of a job, by its number or name.

    >>> part_record_name(7), part_record_name("a.tar")
    ('.shardstream-pack-part-000007.json', '.shardstream-pack-part-a.tar.json')
    """
    return f"{_START}part-{f'{part:06d}' if isinstance(part, int) else part}{_END}"


def is_part_record(name: str) -> bool:
    """Return whether a file records a finished part of a job, by its name.

    >>> is_part_record(part_record_name(7)), is_part_record(JOURNAL_NAME)
    (True, False)
    """
    return name.startswith(f"{_START}part-") and name.endswith(_END)


def is_journal(name: str) -> bool:
    """Return whether a file is part of a journal, by its name.

    >>> is_journal(".shardstream-pack-000000.json")
    True
    """
    return name.startswith(_START) and name.endswith(_END)


def check_finished(folder: str, names: Collection[str]) -> None:
    """Refuse a folder in which a dataset is being written, or whose writer was stopped.

    Args:
        folder: URL of the folder.
        names: Names of the files directly in it.

    Raises:
        UnfinishedError: If there is no ``index.json``, but a journal or a half-written tar.
    """
    if MANIFEST_NAME in names:
        return
    journal = min(filter(is_journal, names), default=None)
    if any(map(is_part_record, names)):
        raise UnfinishedError(
            f"the dataset is not finished: it is written in parts, and there is no {MANIFEST_NAME}; run the parts that are missing or the "
            "same command again, and where parts were used, 'shardstream merge' when all are done",
            shard=folder,
        )
    if journal is not None:
        raise UnfinishedError(
            f"the dataset is not finished: a pack or ShardWriter is writing here or was stopped ({journal} without {MANIFEST_NAME}), "
            "so shards may be missing; wait for it or run the same command again (a ShardWriter with overwrite=True), or, if all shards "
            f"are there, delete {journal} and run 'shardstream index', or name the tars to read one by one",
            shard=folder,
        )
    part = min(filter(_is_half_a_tar, names), default=None)
    if part is not None:
        raise UnfinishedError(
            f"the dataset is not finished: {part} is a half-written tar and there is no {MANIFEST_NAME}, so shards may be missing; "
            "wait for its writer or run it again, or name the tars to read one by one",
            shard=folder,
        )


def _is_half_a_tar(name: str) -> bool:
    return (final_name(name) or "").lower().endswith(".tar")
