"""Samples -> the shards of a dataset: the next one is begun when one is full, each is published whole, the manifest last."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from shardstream.errors import NotFoundError, OptionError, SampleError, StorageError
from shardstream.format.index import INDEX_SUFFIX
from shardstream.format.manifest import MANIFEST_NAME, Manifest, ShardInfo, encode_manifest
from shardstream.format.tar_writer import END_OF_ARCHIVE
from shardstream.packing.destination import Destination, claim_destination
from shardstream.packing.encode import encode_sample
from shardstream.packing.folder_lock import FolderLock
from shardstream.packing.journal import WRITER_TASK, FinishedShard, Journal, Task
from shardstream.packing.shard_names import ShardNames
from shardstream.packing.shard_upload import ShardUploader
from shardstream.packing.tar_shard import TarShard, sample_pieces
from shardstream.process_memory import keep_freed_memory
from shardstream.storage.atomic_write import PendingFile, open_pending, publish_bytes, remove
from shardstream.storage.byte_sizes import parse_bytes
from shardstream.storage.store import Storage

_log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = "256MB"
DEFAULT_MAX_SAMPLES = 10_000


class ShardWriter:
    """Writes samples to the shards of a new dataset; use it as a context manager.

    A shard is begun when the next sample would pass a limit; a sample larger than ``max_bytes`` gets a shard of its own.
    Finished shards are sent in the background. When the block ends well, ``index.json`` is written, last; when it ends with
    an error there is none, so the dataset is not published: the shard at hand is dropped, finished ones stay, and so does a small
    file by which readers refuse the folder (``.shardstream-pack-000000.json``); before the first shard, the place stays as it was. So it is when the process is killed; run again with
    ``overwrite=True``, the writer replaces what is left. (`pack` goes on instead.) Of two writers, or packs, at one place one fails.

        with ShardWriter("s3://bucket/train/{shard:06d}.tar") as writer:
            writer.write({"__key__": "0001", "jpg": image, "cls": 3})

    Args:
        url: Pattern with ``{shard}``, or a folder: then the shards are ``000000.tar`` and so on.
        max_bytes: Size of a tar, ends included: a number or "256MB" (10^6), "256MiB" (2^20).
        max_samples: Samples of a shard.
        name: Of the dataset, for people.
        overwrite: Replace a dataset that is there, or shards of these names that a killed writer left. Its ``index.json`` is
            removed before the first shard is there, its shards that were not written again last.
        storage_options: What fsspec takes, e.g. ``{"endpoint_url": …}``.
        filesystem: An fsspec file system to use instead of looking one up.

    Raises:
        OptionError: If an argument makes no sense, or a dataset is there and ``overwrite`` is not set.
        StorageError: If the place is out of reach, or another pack or `ShardWriter` writes there.
    """

    def __init__(  # noqa: PLR0913  (public door)
        self,
        url: str | os.PathLike[str],
        *,
        max_bytes: int | str = DEFAULT_MAX_BYTES,
        max_samples: int = DEFAULT_MAX_SAMPLES,
        name: str = "",
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any = None,
    ) -> None:
        if max_samples < 1:
            raise OptionError(f"max_samples must be 1 or more, not {max_samples}")
        self._names = ShardNames.parse(url)
        self._max_bytes = parse_bytes(max_bytes)
        self._max_samples = max_samples
        self._name = name
        self._storage = Storage(storage_options, filesystem)
        self._fields: dict[str, int] = {}
        self._shard: TarShard | None = None
        self._pending: PendingFile | None = None
        self._begun = 0
        self._error: BaseException | None = None
        self._manifest: Manifest | None = None
        self._is_open = True
        self.nsamples = 0
        """Samples written so far."""
        self.size_bytes = 0
        """Bytes of the tars so far, without their ends."""
        self._lock = FolderLock(self._storage, self.folder)
        try:
            self._destination = self._take_destination(overwrite=overwrite)
        except BaseException:
            self._lock.close()
            raise
        self._uploader = ShardUploader(
            self._storage,
            self._names,
            replaces=self._destination.replaces,
            check_owner=self._prepare_first_change,
        )
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="shardstream-hash")
        keep_freed_memory()
        self._count_finished(self._destination.finished)

    @property
    def folder(self) -> str:
        """URL of the folder that the dataset goes to."""
        return self._names.folder

    @property
    def manifest(self) -> Manifest:
        """The dataset, once it is published.

        Raises:
            OptionError: Before that.
        """
        if self._manifest is None:
            raise OptionError(
                "the manifest is known when the writer has been closed, without error"
            )
        return self._manifest

    def write(self, sample: Mapping[str, object]) -> None:
        """Encode a sample (see `encode_field`) and append it.

        ``__key__`` names it, else its running number does ("00000000"); other names like ``__this__`` are left out. Keys
        must differ within a shard, and should in the dataset.

        Raises:
            SampleError: If it cannot be encoded, or would not read back as it is; then nothing of it is written.
            StorageError: If this or an earlier shard cannot be written.
        """
        key = sample.get("__key__", f"{self.nsamples:08d}")
        if not isinstance(key, str):
            raise SampleError(f"__key__ is text, not {type(key).__name__} ({key!r}); use str(key)")
        try:
            fields = encode_sample(sample)
        except SampleError as error:
            raise SampleError(str(error), key=key) from error
        self.write_encoded(key, fields)

    def write_encoded(self, key: str, fields: Mapping[str, bytes | memoryview]) -> None:
        """Append a sample whose fields are bytes already.

        Raises:
            SampleError: If it would not read back as it is; then nothing of it is written.
            StorageError: If this or an earlier shard cannot be written.
        """
        self._check_usable()
        pieces = sample_pieces(key, fields)
        size = sum(map(len, pieces))
        try:
            self._uploader.check()
            if self._shard is not None and self._is_full(self._shard, size):
                self._upload_shard()
            if self._shard is None:
                self._begin_shard()
            self._current.add_pieces(key, fields, pieces)
        except SampleError:  # nothing of it was written: the shard is as it was
            raise
        except BaseException as error:  # what is missing now must not be missed later
            self._error = error
            raise
        self.nsamples += 1
        self.size_bytes += size

    def close(self) -> None:
        """Publish what is left, then the manifest; a second time it does nothing.

        Raises:
            SampleError: If no sample was written.
            StorageError: If a shard or the manifest cannot be written; then the dataset is not published.
        """
        if not self._is_open:
            return
        try:
            self._check_usable()
            if not self.nsamples:
                raise SampleError(
                    "no samples were written, so there is no dataset to publish", shard=self.folder
                )
            self._upload_rest()
            self._publish_manifest()
            self._remove_journal()
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop the shard at hand and publish no manifest; finished shards stay. After `close` it does nothing."""
        is_first, self._is_open = self._is_open, False
        if self._pending is not None:
            self._pending.discard()
            self._pending = self._shard = None
        self._hashing.shutdown(wait=True, cancel_futures=True)
        self._uploader.stop()
        if is_first and not self._is_changed:
            with suppress(StorageError):  # what went wrong before is what matters
                self._release_destination()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def _claim_destination(self, *, overwrite: bool) -> tuple[Task, Destination]:
        """Make sure that the place may be written to, and say for what."""
        return WRITER_TASK, claim_destination(self._storage, self._names, overwrite=overwrite)

    def _take_destination(self, *, overwrite: bool) -> Destination:
        """Take the place: from here on, it is marked, and without a manifest unfinished."""
        task, destination = self._claim_destination(overwrite=overwrite)
        self._is_changed = False
        self._journal = Journal(
            storage=self._storage,
            folder=self.folder,
            task=task,
            stale=destination.stale,
            finished=list(destination.finished),
            head=destination.journal_head,
        )
        self._journal.begin(destination.journal_files)
        destination.remove_parts()
        return destination

    def _prepare_first_change(self) -> None:
        """Make sure that the place is still ours; before the first shard appears, unpublish what it replaces."""
        self._journal.check_owner()
        if self._is_changed:
            return
        self._is_changed = True
        if self._destination.has_manifest:
            self._destination.unpublish()
            self._journal.check_owner()  # who has taken the place meanwhile may have counted on it

    def _release_destination(self) -> None:
        """Delete the journal, where the place is as it was before: free, or with the manifest of its dataset."""
        if self._destination.has_manifest:
            self._storage.read(self._names.url(MANIFEST_NAME))  # raises if another run removed it
        if self._destination.has_manifest or self._destination.is_free:
            self._journal.remove()

    def _upload_callback(
        self,
        info: ShardInfo,  # noqa: ARG002
        fields: Mapping[str, int],  # noqa: ARG002
    ) -> Callable[[], None] | None:
        """Return what the sending thread is to do when the shard at hand is there."""
        return None

    def _count_finished(self, finished: Iterable[FinishedShard]) -> None:
        """Count shards of an earlier run as sent."""
        for one in finished:
            self._begun += 1
            self._count_fields(one.fields)
            self._uploader.sent.append(one.info)
            self.nsamples += one.info.nsamples or 0
            self.size_bytes += (one.info.filesize or 0) - len(END_OF_ARCHIVE)

    @property
    def _current(self) -> TarShard:
        assert self._shard is not None  # noqa: S101  (for the type checker)
        return self._shard

    def _check_usable(self) -> None:
        if not self._is_open:
            raise OptionError("the writer is closed; open another one")
        if self._error is not None:
            raise self._error

    def _is_full(self, shard: TarShard, size: int) -> bool:
        after = shard.size_bytes + size + len(END_OF_ARCHIVE)
        return shard.nsamples >= self._max_samples or after > self._max_bytes

    def _begin_shard(self) -> None:
        name = self._names.name(self._begun)
        self._pending = open_pending(self._storage, self._names.url(name), alone=True)
        self._shard = TarShard(self._pending, url=name, hashing=self._hashing)
        self._begun += 1

    def _upload_shard(self) -> None:
        """Finish the shard at hand and hand it to the thread that sends."""
        shard, pending = self._shard, self._pending
        if shard is None or pending is None:
            return
        info = shard.finish()
        pending.end()
        self._count_fields(shard.fields)
        self._shard = self._pending = None
        self._uploader.send(pending, info, shard.offsets, self._upload_callback(info, shard.fields))

    def _count_fields(self, fields: Mapping[str, int]) -> None:
        for field, count in fields.items():
            self._fields[field] = self._fields.get(field, 0) + count

    def _upload_rest(self) -> None:
        """Send what is left, and make sure that all shards are there; stale ones are deleted."""
        self._upload_shard()
        self._uploader.drain()
        self._prepare_first_change()
        self._uploader.check_in_place()
        for name in sorted(self._destination.stale - {info.url for info in self._uploader.sent}):
            remove(self._storage, self._names.url(name))
            remove(self._storage, self._names.url(name + INDEX_SUFFIX))

    def _publish_manifest(self) -> None:
        manifest = Manifest(shards=tuple(self._uploader.sent), name=self._name, fields=self._fields)
        self._journal.check_owner()
        data = encode_manifest(manifest)
        try:
            publish_bytes(self._storage, self._names.url(MANIFEST_NAME), data)
            self._journal.check_owner()  # who takes the place now knows nothing of the manifest
        except BaseException:  # it may be there all the same
            with suppress(StorageError):
                self._unpublish(data)
            raise
        self._manifest = manifest

    def _unpublish(self, manifest: bytes) -> None:
        """Delete a manifest of ours, if it is there."""
        url = self._names.url(MANIFEST_NAME)
        with suppress(NotFoundError):
            if self._storage.read(url) == manifest:
                remove(self._storage, url)

    def _remove_journal(self) -> None:
        """Delete the journal of what is published: if that fails, readers do not mind it."""
        try:
            self._journal.remove()
        except StorageError as error:
            _log.warning("%s: published, but its journal is still there: %s", self.folder, error)
