"""Finished shards on their way: sent by one thread, while the next one is written."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from shardstream.errors import NotFoundError, StorageError
from shardstream.format.index import INDEX_SUFFIX, OFFSET_BYTES, Offsets, encode_index
from shardstream.format.manifest import ShardInfo
from shardstream.packing.shard_names import ShardNames
from shardstream.storage.atomic_write import PendingFile, publish_bytes, remove
from shardstream.storage.store import FileInfo, Storage

_log = logging.getLogger(__name__)

# Finished shards that wait to be sent: on a disk, or as up to 72 MiB on their way to S3.
_IN_FLIGHT = 2


class _Upload(NamedTuple):
    future: Future[ShardInfo]
    pending: PendingFile


class ShardUploader:
    """Publishes shards with their indexes, in order, in a thread of its own; an error comes out at the next call.

    Args:
        storage: Where they go.
        names: What they are called there.
        replaces: Whether shards of these names may be there already.
        check_owner: Called before each is published; raises if the place belongs to another writer by now.
    """

    def __init__(
        self,
        storage: Storage,
        names: ShardNames,
        *,
        replaces: bool,
        check_owner: Callable[[], None],
    ) -> None:
        self.sent: list[ShardInfo] = []
        """Shards that are there, in order."""
        self._storage = storage
        self._names = names
        self._replaces = replaces
        self._check_owner = check_owner
        self._etags: dict[str, str] = {}
        self._has_failed = False
        self._uploads: deque[_Upload] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardstream-send")

    def send(
        self,
        pending: PendingFile,
        info: ShardInfo,
        offsets: Offsets,
        on_uploaded: Callable[[], None] | None = None,
    ) -> None:
        """Hand over a finished shard; waits while two others are on their way.

        Args:
            pending: Its bytes.
            info: What is known of it.
            offsets: Its index.
            on_uploaded: Called in the thread when both are there.

        Raises:
            StorageError: If an earlier one could not be published.
        """
        try:
            while len(self._uploads) >= _IN_FLIGHT:
                self._take_oldest()
        except BaseException:
            pending.discard()
            raise
        future = self._thread.submit(self._publish, pending, info, offsets, on_uploaded)
        self._uploads.append(_Upload(future, pending))

    def check(self) -> None:
        """Raise the error of a shard that could not be published, if there is one by now.

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
        """Compare what is there now with what was sent, by sizes, and by ETags where an S3 server told them.

        Raises:
            StorageError: If a shard or its index is missing, or is another one.
        """
        files = {file.url.rsplit("/", 1)[-1]: file for file in self._listed()}
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
                    "the shard or its index was replaced or deleted while others were written: another pack or ShardWriter "
                    "writes here, or somebody changed it; nothing is published, run this again",
                    shard=self._names.url(info.url),
                )

    def _listed(self) -> list[FileInfo]:
        try:
            return self._storage.list_folder(self._names.folder)[0]
        except NotFoundError:  # all were deleted
            return []

    def stop(self) -> None:
        """Forget shards that have not been begun, wait for the one that has, end the thread. May be called again."""
        for upload in self._uploads:
            if upload.future.cancel():
                upload.pending.discard()
        self._uploads.clear()
        self._thread.shutdown(wait=True)

    def _take_oldest(self) -> None:
        self.sent.append(self._uploads.popleft().future.result())

    def _publish(
        self,
        pending: PendingFile,
        info: ShardInfo,
        offsets: Offsets,
        on_uploaded: Callable[[], None] | None,
    ) -> ShardInfo:
        if self._has_failed:  # no shard is there without those before it
            pending.discard()
            raise StorageError("an earlier shard could not be published", shard=info.url)
        try:
            self._publish_both(pending, self._names.url(info.url + INDEX_SUFFIX), offsets)
            if pending.etag is not None:
                self._etags[info.url] = pending.etag
            if on_uploaded is not None:
                on_uploaded()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            pending.discard()
        _log.info("published %s: %s samples", self._names.url(info.url), info.nsamples)
        return info

    def _publish_both(self, pending: PendingFile, index_url: str, offsets: Offsets) -> None:
        self._check_owner()
        if self._replaces:  # the old index must not stand beside the new shard
            remove(self._storage, index_url)
        pending.commit()
        publish_bytes(self._storage, index_url, encode_index(offsets))
