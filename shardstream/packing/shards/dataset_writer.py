"""Write the shards and the manifest of a pack in separate steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from shardstream.errors import NotFoundError, OptionError, SampleError, StorageError, get_logger
from shardstream.format import (
    COLUMNS_SUFFIX,
    END_OF_ARCHIVE,
    INDEX_SUFFIX,
    MANIFEST_NAME,
    Manifest,
    encode_index,
    encode_manifest_files,
)
from shardstream.packing.job.destination import ShardNames, claim_destination, remove_shard
from shardstream.packing.job.journal import WRITER_TASK, FinishedShard, Journal, NumberedSkip, Task
from shardstream.packing.job.key_hashes import (
    KeyHashes,
    decode_hashes,
    encode_hashes,
    hash_keys,
    place_of,
    refuse_repeated_keys,
)
from shardstream.packing.shards.column_builder import ColumnSummary, check_summaries
from shardstream.packing.shards.manifest_files import remove_old_pages, write_manifest_files
from shardstream.packing.shards.part_writer import WriterOptions
from shardstream.packing.shards.shard_upload import ShardUploader
from shardstream.packing.shards.tar_shard import TarShard, sample_pieces
from shardstream.process_memory import keep_freed_memory
from shardstream.storage import OutputFolder, PendingFile

_log = get_logger(__name__)


class DatasetWriter:
    """Writes encoded samples; publishes shards, indexes and manifest in separate steps, for `ShardWriter` and `pack`.

    The journal is written first and deleted last. While it exists and ``index.json`` does not, readers refuse the folder.

    Args:
        folder: Where the dataset goes; it is locked until `abort`.
        names: Names of the shards.
        task: Written to the journal. A pack is resumed after the finished shards of an earlier run of the same task.
        options: Limits and names.

    Raises:
        OptionError: If another dataset is there and may not be replaced.
        StorageError: If the folder cannot be reached, or another writer writes there.
    """

    def __init__(
        self, folder: OutputFolder, names: ShardNames, *, task: Task, options: WriterOptions
    ) -> None:
        self.folder = folder.url
        self.is_open = True
        self.nsamples = self.size_bytes = self.position = 0
        self._folder, self._names, self._options = folder, names, options
        self._is_resumable = task != WRITER_TASK
        self._skipped: list[NumberedSkip] = []
        self._fields, self._summaries, self._keys = (
            Counter[str](),
            list[ColumnSummary](),
            KeyHashes(),
        )
        self._shard: TarShard | None = None
        self._pending: PendingFile | None = None
        self._error: BaseException | None = None
        self._manifest: Manifest | None = None
        self._published: bytes | None = None  # its index.json
        self._is_changed = False
        folder.lock()
        try:
            self._destination = claim_destination(
                folder, names, task=task, overwrite=options.overwrite, extras=options.extras
            )
            self.kept = self._destination.finished
            self._journal = Journal(
                folder=folder,
                task=task,
                stale=self._destination.stale,
                finished=list(self.kept),
                head=self._destination.journal_head,
            )
            self._journal.begin(self._destination.journal_files)
            if self._destination.files:
                self._destination.remove_parts()
        except BaseException:
            folder.unlock()
            raise
        self._uploader = ShardUploader(
            folder,
            replaces=self._destination.replaces,
            check_owner=self._prepare_first_change,
        )
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="shardstream-hash")
        keep_freed_memory()
        self._begun = len(self.kept)
        if self.kept:
            self._count_kept(self.kept)

    @property
    def num_finished(self) -> int:
        """Number of published shards."""
        return len(self._uploader.sent)

    @property
    def manifest(self) -> Manifest:
        """The dataset, once it is published."""
        if self._manifest is None:
            raise OptionError(
                "the manifest is known after the writer was closed without an error; call close() first"
            )
        return self._manifest

    def write(
        self, key: str, fields: Mapping[str, bytes | memoryview], *, position: int = 0
    ) -> None:
        """Append a sample.

        Args:
            key: Its key.
            fields: Its fields, encoded.
            position: Number of the source's record that follows it, for the journal.
        """
        self._check_usable()
        pieces = sample_pieces(key, fields)
        size = sum(map(len, pieces))
        try:
            self._uploader.check()
            shard = self._shard
            if shard is not None and (
                shard.nsamples >= self._options.max_samples
                or shard.size_bytes + size + len(END_OF_ARCHIVE) > self._options.max_bytes
            ):
                self._upload_shard()
            (self._shard or self._begin_shard()).add(key, fields, pieces)
        except SampleError:  # nothing of it was written: the shard is as it was
            raise
        except BaseException as error:  # a shard is missing: later calls must fail, too
            self._error = error
            raise
        self.nsamples += 1
        self.size_bytes += size
        self.position = position

    def skip(self, skipped: NumberedSkip) -> None:
        """Record a skipped record of the source."""
        self._skipped.append(skipped)

    def drain(self) -> None:
        """Wait until all finished shards are published."""
        self._uploader.drain()

    def finish(self) -> None:
        """Publish the last shard, check that all are in place, and delete those of an earlier dataset."""
        self._check_usable()
        if not self.nsamples:
            raise SampleError(
                "no samples were written, so there is no dataset to publish; write at least one",
                shard=self.folder,
            )
        self._upload_shard()
        if self._options.columns is not None:
            check_summaries(self._options.columns, self._summaries, self.nsamples)
        self._uploader.drain()
        self._prepare_first_change()
        self._uploader.check_in_place()
        refuse_repeated_keys(self._keys, self._uploader.sent, self._folder)
        if self._destination.stale:
            self._remove_stale()

    def publish(self) -> None:
        """Write ``index.json``; if that fails, it is not there."""
        manifest = Manifest(
            shards=tuple(self._uploader.sent), name=self._options.name, fields=dict(self._fields)
        )
        self._journal.check_owner()
        files = encode_manifest_files(manifest)
        try:
            write_manifest_files(self._folder, files)
            # A run that took the folder in between has not seen the manifest, so it must not stay.
            self._journal.check_owner()
        except BaseException:  # the write may have succeeded anyway
            with suppress(StorageError):
                self._remove_manifest(files[MANIFEST_NAME])
            raise
        self._manifest, self._published = manifest, files[MANIFEST_NAME]
        remove_old_pages(self._folder, self._destination.files, files)

    def unpublish(self) -> None:
        """Delete ``index.json`` again, if this writer published it; shards and journal stay."""
        if self._published is not None:
            self._remove_manifest(self._published)
            self._manifest = self._published = None

    def remove_journal(self) -> None:
        """Delete the journal of the published dataset; readers ignore it if that fails."""
        try:
            self._journal.remove()
        except StorageError as error:
            _log.warning("%s: published, but its journal is still there: %s", self.folder, error)

    def abort(self) -> None:
        """Drop the unfinished shard, stop the threads and unlock the folder; a second call does nothing."""
        is_first, self.is_open = self.is_open, False
        if self._pending is not None:
            self._pending.discard()
            self._pending = self._shard = None
        self._hashing.shutdown(wait=True, cancel_futures=True)
        self._uploader.stop()
        self._keys.close()
        if is_first and not self._is_changed:
            with suppress(StorageError):  # the earlier error is the one to report
                self._release_destination()
        self._folder.unlock()

    def _check_usable(self) -> None:
        if not self.is_open:
            raise OptionError("the writer is closed; open another one")
        if self._error is not None:
            raise self._error

    def _begin_shard(self) -> TarShard:
        name = self._names.name(self._begun)
        self._pending = self._folder.open(name)
        self._shard = TarShard(
            self._pending, url=name, hashing=self._hashing, columns=self._options.columns
        )
        self._begun += 1
        return self._shard

    def _upload_shard(self) -> None:
        """Finish the current shard, if there is one, and hand it to the uploading thread."""
        shard, pending = self._shard, self._pending
        if shard is None or pending is None:
            return
        info = shard.finish()
        columns = shard.column_file(info)
        self._summaries.append(shard.column_summary)
        self._fields.update(shard.fields)
        hashes = hash_keys(shard.keys if self._options.compares_keys else [])
        self._keys.add(hashes, place_of(self._begun - 1, len(hashes)))
        self._shard = self._pending = None
        on_uploaded = None
        if self._is_resumable:
            # Only skips before this position: the record that filled the shard is not written yet.
            skipped = tuple(one for one in self._skipped if one.number < self.position)
            self._skipped = self._skipped[len(skipped) :]
            finished = FinishedShard(
                info=info,
                fields=dict(shard.fields),
                position=self.position,
                skipped=skipped,
                columns=shard.column_summary,
                key_hashes=encode_hashes(hashes),
            )
            on_uploaded = partial(self._journal.add, finished)
        files = {info.url + INDEX_SUFFIX: encode_index(shard.offsets)}
        if columns is not None:
            files[info.columns_url] = columns
        self._uploader.send(pending, info, files, on_uploaded)

    def _prepare_first_change(self) -> None:
        """Check that the folder is still ours; before the first shard appears, unpublish the dataset it replaces."""
        self._journal.check_owner()
        if self._is_changed:
            return
        self._is_changed = True
        if self._destination.has_manifest:
            self._destination.unpublish()
            # A run that took the folder in between may rely on the manifest that is gone now.
            self._journal.check_owner()

    def _release_destination(self) -> None:
        """Delete the journal where the folder is as before: free, or with the manifest of its dataset."""
        if self._destination.has_manifest:
            self._folder.read(MANIFEST_NAME)  # raises if another run removed it
        if self._destination.has_manifest or self._destination.is_free:
            self._journal.remove()

    def _count_kept(self, finished: Iterable[FinishedShard]) -> None:
        """Count the shards of an earlier run as published."""
        for number, one in enumerate(finished):
            hashes = decode_hashes(one.key_hashes)
            self._keys.add(hashes, place_of(number, len(hashes)))
            self._summaries.append(one.columns)
            self._fields.update(one.fields)
            self._uploader.sent.append(one.info)
            self.nsamples += one.info.nsamples or 0
            self.size_bytes += (one.info.filesize or 0) - len(END_OF_ARCHIVE)
            self.position = one.position

    def _remove_stale(self) -> None:
        """Delete shards of the earlier dataset that were not written again, and columns of those that were written without."""
        files, written = self._destination.files, {info.url for info in self._uploader.sent}
        for name in sorted(self._destination.stale - written):
            remove_shard(self._folder, name, files)
        if self._options.columns is None:
            for name in sorted(written):
                if name + COLUMNS_SUFFIX in files:
                    self._folder.remove(name + COLUMNS_SUFFIX)

    def _remove_manifest(self, manifest: bytes) -> None:
        """Delete ``index.json`` if it is ours."""
        with suppress(NotFoundError):
            if self._folder.read(MANIFEST_NAME) == manifest:
                self._folder.remove(MANIFEST_NAME)
