"""Upload finished shards in a thread while the next shard is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from shardstream.errors import StorageError, get_logger
from shardstream.format import INDEX_SUFFIX, OFFSET_BYTES, ShardInfo
from shardstream.storage import OutputFolder, PendingFile, join_url

_log = get_logger(__name__)

# Finished shards that wait to be published: on a disk, or as up to 72 MiB that are being sent to S3.
_IN_FLIGHT = 2


class ShardFiles:
    """A finished shard and the files next to it, which are published together.

    Args:
        folder: Folder of the dataset.
        tar: The shard.
        others: Name -> bytes of its index, and of the other files next to it.
    """

    def __init__(self, folder: OutputFolder, tar: PendingFile, others: Mapping[str, bytes]) -> None:
        self._folder = folder
        self._pending = [tar]
        self._others = others

    def end(self) -> None:
        """Write the small files, and flush all of them to the disk.

        Raises:
            StorageError: If the disk fails.
        """
        self._pending[0].end()
        for name, data in self._others.items():
            file = self._folder.open(name)
            self._pending.append(file)
            file.write(data)
            file.end()

    def commit(self, *, replaces: str | None = None) -> str | None:
        """Publish them; return the ETag of the shard, if an S3 server returned one.

        Args:
            replaces: Name of an index that may exist. It is never next to the new shard, nor the new one next to the old shard.

        Raises:
            StorageError: If that fails.
        """
        tar, *others = self._pending
        if replaces is None:
            self._folder.commit(tar, *others)
        else:
            self._folder.remove(replaces)
            self._folder.commit(tar)
            self._folder.sync()
            self._folder.commit(*others)
        return tar.etag

    def discard(self) -> None:
        """Drop those that are not published."""
        for file in self._pending:
            file.discard()


class _Upload(NamedTuple):
    future: Future[ShardInfo]
    files: ShardFiles


class ShardUploader:
    """Publishes shards with their indexes in threads of its own, in order; an error is raised by the next call.

    Args:
        folder: Folder of the dataset.
        replaces: Whether shards of these names may exist already.
        check_owner: Called before each is published; raises if another writer has taken the folder over.
    """

    def __init__(
        self, folder: OutputFolder, *, replaces: bool, check_owner: Callable[[], None]
    ) -> None:
        self.sent: list[ShardInfo] = []
        """Shards that are published, in order."""
        self._folder = folder
        self._replaces = replaces
        self._check_owner = check_owner
        self._etags: dict[str, str] = {}
        self._has_failed = False
        self._uploads: deque[_Upload] = deque()
        # The disk flushes several files at once. One thread publishes: the journal lists shards in order, and no shard may be
        # published before an earlier one.
        self._flushing = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="shardstream-flush")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardstream-send")

    def send(
        self,
        pending: PendingFile,
        info: ShardInfo,
        files: Mapping[str, bytes],
        on_uploaded: Callable[[], None] | None = None,
    ) -> None:
        """Queue a finished shard for upload; wait while two others are in flight.

        Args:
            pending: Its bytes.
            info: Its entry in the manifest.
            files: Name -> bytes of its index, and of the other files next to it.
            on_uploaded: Called in the thread when tar and files are published.

        Raises:
            StorageError: If an earlier one could not be published.
        """
        try:
            while len(self._uploads) >= _IN_FLIGHT:
                self._take_oldest()
        except BaseException:
            pending.discard()
            raise
        shard = ShardFiles(self._folder, pending, files)
        ended = self._flushing.submit(shard.end)
        future = self._thread.submit(self._publish, shard, ended, info, on_uploaded)
        self._uploads.append(_Upload(future, shard))

    def check(self) -> None:
        """Raise the error of a shard that could not be published, if there is one.

        Raises:
            StorageError: That error.
        """
        if self._uploads and self._uploads[0].future.done():
            self._take_oldest()

    def drain(self) -> None:
        """Wait until all are published.

        Raises:
            StorageError: If one could not be published.
        """
        while self._uploads:
            self._take_oldest()

    def check_in_place(self) -> None:
        """Compare the folder with the sent files: sizes, and the ETags of S3 servers.

        Raises:
            StorageError: If a shard or its index is missing, or is another one.
        """
        files = self._folder.list_files()
        for info in self.sent:
            tar, index = files.get(info.url), files.get(info.url + INDEX_SUFFIX)
            index_bytes = OFFSET_BYTES * ((info.nsamples or 0) + 1)
            etag = self._etags.get(info.url, "")
            if (
                tar is None
                or index is None
                or (tar.size_or_none, index.size_or_none) != (info.filesize, index_bytes)
                or etag not in (tar.version or etag)
            ):
                raise StorageError(
                    "the shard or its index was replaced or deleted while others were written, by another pack or "
                    "ShardWriter or by hand; nothing is published, run this again",
                    shard=join_url(self._folder.url, info.url),
                )

    def stop(self) -> None:
        """Drop waiting shards, wait for the one in flight, end the thread; a second call does nothing."""
        waiting = [upload for upload in self._uploads if upload.future.cancel()]
        self._flushing.shutdown(wait=True)
        for upload in waiting:
            upload.files.discard()
        self._uploads.clear()
        self._thread.shutdown(wait=True)

    def _take_oldest(self) -> None:
        self.sent.append(self._uploads.popleft().future.result())

    def _publish(
        self,
        files: ShardFiles,
        ended: Future[None],
        info: ShardInfo,
        on_uploaded: Callable[[], None] | None,
    ) -> ShardInfo:
        try:
            ended.result()
            self._check_earlier(info)
            self._check_owner()
            etag = files.commit(replaces=info.url + INDEX_SUFFIX if self._replaces else None)
            if etag is not None:
                self._etags[info.url] = etag
            if on_uploaded is not None:
                on_uploaded()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            files.discard()
        _log.info("published %s/%s: %s samples", self._folder.url, info.url, info.nsamples)
        return info

    def _check_earlier(self, info: ShardInfo) -> None:
        """Raise if an earlier shard could not be published: it must not be missing before this one."""
        if self._has_failed:
            raise StorageError("an earlier shard could not be published", shard=info.url)
