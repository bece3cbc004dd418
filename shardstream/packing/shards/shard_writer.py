"""Write samples to the shards of a dataset; publish each shard when it is full, the manifest last."""

from __future__ import annotations

import os
import sys
import time
import uuid
import warnings
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Self

from shardstream.errors import OptionError, SampleError, StorageError, get_logger, parse_bytes
from shardstream.format import ColumnSources, Manifest, mask_fields
from shardstream.packing.encode import MASK_ALONE, encode_sample
from shardstream.packing.job.append import Addition, check_append, read_base
from shardstream.packing.job.claim import claim_destination
from shardstream.packing.job.folder_state import (
    WRITER_TASK,
    Journal,
    ManifestFiles,
    ShardNames,
    shard_of,
)
from shardstream.packing.job.key_hashes import (
    Hashes,
    KeyHashes,
    NewKeys,
    Places,
    refuse_repeated_keys,
)
from shardstream.packing.shards.column_builder import check_summaries, checked_columns
from shardstream.packing.shards.part_writer import PartWriter, WriterOptions
from shardstream.storage import (
    MaskBytes,
    Storage,
    join_url,
    masks_in,
    open_output_folder,
    parent_url,
)
from shardstream.versions import close_writer, open_writer

_log = get_logger(__name__)

DEFAULT_MAX_BYTES = "256MB"
DEFAULT_MAX_SAMPLES = 10_000


class ShardWriter:
    """Writes samples to the shards of a new dataset; use it as a context manager.

    A new shard starts when the next sample would exceed a limit; a sample larger than ``max_bytes`` gets a shard of its own.
    Finished shards are uploaded in the background. When the block ends without an error, ``index.json`` is written last. When it
    ends with an error, or the process is killed, the dataset is not published: the unfinished shard is dropped, finished ones stay,
    and a small file (``.shardstream-pack-000000.json``) makes readers refuse the folder; before the first shard, the folder stays
    as it was. A writer with ``overwrite=True`` then replaces these files (`pack` resumes instead). Of two writers or packs in
    one folder, one fails.

        with ShardWriter("s3://bucket/train/{shard:06d}.tar") as writer:
            writer.write({"__key__": "0001", "jpg": image, "cls": 3})

    Args:
        url: Pattern with ``{shard}``, or a folder: then the shards are ``000000.tar`` and so on.
        max_bytes: Maximum size of a tar, its end included: a number or "256MB" (10^6), "256MiB" (2^20).
        max_samples: Maximum samples of a shard.
        name: Name of the dataset, kept in the manifest.
        columns: Also write ``NAME.tar.cols.parquet`` with the key of each sample and these values (see `index`).
        append: Add the shards to the dataset that is there, as a new version, with its columns. They are in a folder of their own; if the writer
            is killed, the dataset stays as it was. Any number of writers may append at the same time.
        publish_s: With ``append``: call `publish` from `write`, at most once in so many seconds. Readers that follow the dataset (``version=Follow()``
            of `ShardDataset`) wait for the writer from its opening on, otherwise from the first `publish` on.
        check_keys: With ``append``: compare the keys with those of the dataset (see `pack`).
        overwrite: Replace an existing dataset, or shards of these names that a killed writer left. Its ``index.json`` is
            removed before the first new shard appears, shards that were not written again at the end.
        storage_options: ``storage_options`` of fsspec, e.g. ``{"endpoint_url": …}``.
        filesystem: An fsspec file system to use instead of looking one up by protocol.

    Raises:
        OptionError: If an argument is wrong, or a dataset is there and neither ``overwrite`` nor ``append`` is set, or none with ``append``.
        StorageError: If the folder cannot be reached, or another pack or `ShardWriter` writes there.
    """

    def __init__(  # noqa: PLR0913  (public door)
        self,
        url: str | os.PathLike[str],
        *,
        max_bytes: int | str = DEFAULT_MAX_BYTES,
        max_samples: int = DEFAULT_MAX_SAMPLES,
        name: str = "",
        columns: ColumnSources | None = None,
        append: bool = False,
        publish_s: float | None = None,
        check_keys: bool = True,
        overwrite: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any = None,
    ) -> None:
        self._limits = WriterOptions(
            max_samples=max_samples,
            max_bytes=parse_bytes(max_bytes),
            name=name,
            columns=None if columns is None else checked_columns(columns, takes_functions=True),
        )
        names = ShardNames.parse(url)
        self._append_to: Storage | None = None
        self._key_prefix = ""
        self._publish_s, self._checks_keys = publish_s, check_keys
        self._published_s = time.monotonic()
        self._added: Addition | None = None
        self._is_listed = False  # as a writer that goes on
        if append or publish_s is not None or not check_keys:
            has_defaults = check_keys and publish_s is None
            check_append(
                is_append=append, is_new=overwrite or bool(name), has_defaults=has_defaults
            )
            names = self._append(names, Storage(storage_options, filesystem))
        self._folder = open_output_folder(names.folder, storage_options, filesystem)
        self._is_open = True
        self._manifest: Manifest | None = None
        self._folder.lock()
        try:
            journal = Journal(folder=self._folder, task=WRITER_TASK, run=uuid.uuid4().hex)
            self._claim = claim_destination(journal, names, overwrite=overwrite).take()
        except BaseException:
            self._folder.unlock()
            raise
        self._folder.check_owner = self._claim.check_owner
        self._part = PartWriter(
            self._folder,
            self._limits,
            name=names.name,
            replaces=self._claim.replaces,
            add_keys=self._add_keys,
        )
        self._keys: KeyHashes | NewKeys | None = None
        if publish_s is not None:
            self._open_for_readers()

    @property
    def folder(self) -> str:
        """URL of the folder that the dataset goes to."""
        return self._folder.url

    @property
    def nsamples(self) -> int:
        """Samples written so far."""
        return self._part.nsamples

    @property
    def size_bytes(self) -> int:
        """Bytes of the tars so far, without their ends."""
        return self._part.size_bytes

    @property
    def manifest(self) -> Manifest:
        """The dataset, once it is published; with ``append`` the new shards, by their names in its folder.

        Raises:
            OptionError: Before that.
        """
        if self._manifest is None:
            raise OptionError(
                "the manifest is known after the writer was closed without an error; call close() first"
            )
        return self._manifest

    def write(self, sample: Mapping[str, object]) -> None:
        """Encode a sample (see `encode_field`) and append it.

        ``__key__`` is its key, by default its running number ("00000000", with ``append`` after digits of the writer); other names like ``__this__`` are left out. Keys
        must differ: those of one shard are compared at once, those of the dataset by `close`.

        Raises:
            SampleError: If it cannot be encoded, or would not read back equal; then nothing of it is written.
            StorageError: If this or an earlier shard cannot be written.
        """
        key = sample.get("__key__", f"{self._key_prefix}{self._part.nsamples:08d}")
        if not isinstance(key, str):
            raise SampleError(f"__key__ is text, not {type(key).__name__} ({key!r}); use str(key)")
        try:
            fields = encode_sample(sample)
        except SampleError as error:
            raise SampleError(str(error), key=key) from error
        if not self._part.nsamples and MaskBytes in map(type, fields.values()):
            self._warn_of_masks(fields)
        self._part.write(key, fields)
        if self._publish_s is not None and time.monotonic() > self._published_s + self._publish_s:
            self.publish()

    @staticmethod
    def _warn_of_masks(fields: Mapping[str, bytes]) -> None:
        if alone := masks_in(fields) - mask_fields(fields):
            warnings.warn(f"{', '.join(sorted(alone))}: {MASK_ALONE}", UserWarning, stacklevel=3)

    def publish(self) -> None:
        """Publish the samples written so far as a version of the dataset that is appended to, and go on.

        The shard that is being written ends there. Each publication is a version, and `gc` removes old ones. Readers that follow the dataset wait
        for this writer until it is closed; if it fails, or is killed, until `close_writers`.

        Raises:
            OptionError: Without ``append``, or if fields or columns differ from those of the dataset.
            SourceError: If a key comes twice, or is in the dataset; then the samples since the last publication are not published.
            StorageError: If a shard or the manifest cannot be written.
        """
        if self._append_to is None:
            raise OptionError(
                "publish needs append=True: a new dataset is published when it is complete"
            )
        self._part.end()
        self._part.drain()
        self._claim.check_owner()
        self._publish_appended(self._append_to, is_last=False)
        self._is_listed = True
        self._published_s = time.monotonic()

    def drain(self) -> None:
        """Wait until the shards that are full so far are published.

        Raises:
            StorageError: If one cannot be published.
        """
        self._part.drain()

    def close(self) -> None:
        """Publish the last shard, then the manifest; a second call does nothing.

        Raises:
            SampleError: If no sample was written, unless readers wait for the writer (``publish_s``).
            SourceError: If two samples have one key; then the dataset is not published.
            OptionError: If fields or columns of appended samples differ from those of the dataset.
            StorageError: If a shard or the manifest cannot be written, or the temporary folder of the keys (16 bytes each, from 500,000 on) is
                full; then the dataset is not published.
        """
        if not self._is_open:
            return
        try:
            if not self._part.nsamples and self._is_listed and self._append_to is not None:
                close_writer(self._dataset, self._append_to, self._token)
                self._remove_journal()
                return
            if not self._part.nsamples:
                raise SampleError(
                    "no samples were written, so there is no dataset to publish; write at least one",
                    shard=self.folder,
                )
            self._part.end(is_whole=self._append_to is None)
            self._part.drain()
            if self._limits.columns is not None:
                for warning in check_summaries(
                    self._limits.columns, self._part.columns, self._part.nsamples, self.folder
                ):
                    _log.warning("%s: %s", self.folder, warning)
            self._claim.check_owner()
            self._check_in_place()
            if self._append_to is None:
                if isinstance(self._keys, KeyHashes):
                    refuse_repeated_keys(self._keys, self._part.shards, self._folder)
                self._publish()
            else:
                self._publish_appended(self._append_to, is_last=True)
            self._remove_journal()
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop the unfinished shard and publish no manifest; finished shards stay. After `close` it does nothing."""
        is_first, self._is_open = self._is_open, False
        self._part.close()
        if self._keys is not None:
            self._keys.close()
        if is_first:
            self._claim.release()
        self._folder.unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *rest: object) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def _add_keys(self, hashes: Hashes, places: Places) -> None:
        if self._keys is None:
            self._keys = KeyHashes() if self._append_to is None else NewKeys()
        self._keys.add(hashes, places)

    def _check_in_place(self) -> None:
        """Compare the folder with the files that were written: sizes, and the ETags of S3 servers; `compact` and `gc` may have removed listed ones."""
        look_up = self._folder.list_files().get
        listed = 0 if self._added is None else len(self._added.shards)
        name = self._part.result().changed_file(look_up, self._part.etags, listed)
        if name is not None:
            raise StorageError(
                "the shard or its index was replaced or deleted while others were written, by another pack or "
                "ShardWriter or by hand; nothing is published, run this again",
                shard=join_url(self._folder.url, shard_of(name)),
            )

    def _publish(self) -> None:
        """Delete replaced shards and write ``index.json``; if that fails, it is not there."""
        manifest = Manifest(
            shards=tuple(self._part.shards), name=self._limits.name, fields=dict(self._part.fields)
        )
        before = self._claim
        files = ManifestFiles(self._folder, manifest, before.files)
        if before.files:
            has_columns = self._limits.columns is not None
            files.remove_replaced(before.names, before.journal.stale, has_columns=has_columns)
        try:
            files.write()
            if before.files:
                files.remove_older()
        except BaseException:
            with suppress(StorageError):
                files.remove()
            raise
        self._manifest = manifest

    def _publish_appended(self, storage: Storage, *, is_last: bool) -> None:
        """Publish the next version of the dataset, with the shards that it does not list."""
        part, before, keys = self._part, self._added, self._keys
        if len(() if before is None else before.shards) == len(part.shards):
            if is_last or not self._is_listed:
                (close_writer if is_last else open_writer)(self._dataset, storage, self._token)
            return
        assert isinstance(keys, NewKeys)  # noqa: S101  (there are shards)
        refuse_repeated_keys(keys.hashes, part.shards, self._folder)
        added = Addition(
            folder=self._folder.url,
            shards=tuple(part.shards),
            fields=dict(part.fields),
            classes={},
            keys=keys if self._checks_keys else None,
            before=before,
            token="" if is_last and not self._is_listed else self._token,
            is_last=is_last,
        )
        added.publish(storage)
        self._added = replace(added, keys=None, before=None)
        self._manifest = Manifest(shards=added.relative, fields=added.fields)
        if self._checks_keys:  # later ones are compared with those of the dataset
            keys.close()
            self._keys = None

    def _append(self, names: ShardNames, storage: Storage) -> ShardNames:
        """Append to the dataset that is there; return the names of the new shards."""
        self._append_to, self._token = storage, uuid.uuid4().hex[:16]
        base = read_base(names.folder, storage)
        self._dataset = base.url
        self._limits = base.limits_for(self._limits)
        self._key_prefix = f"{self._token[:8]}-"
        return replace(names, folder=base.folder_for(self._token))

    def _open_for_readers(self) -> None:
        """Let readers that follow the dataset wait for this writer."""
        try:
            self.publish()
        except BaseException:
            self.abort()
            raise

    def _remove_journal(self) -> None:
        """Delete the journal of the published dataset; readers ignore it if that fails."""
        try:
            self._claim.journal.remove()
        except StorageError as error:
            _log.warning("%s: published, but its journal is still there: %s", self.folder, error)


def write_shard(
    url: str | os.PathLike[str],
    samples: Iterable[Mapping[str, Any]],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Write samples to one tar and its index ``NAME.tar.idx``; both appear when they are complete.

    For many shards use `ShardWriter`, which also writes a manifest.

    Args:
        url: The tar; its name ends in ".tar".
        samples: Dicts with ``__key__`` and fields, which are encoded as by `ShardWriter`.
        storage_options: As in `ShardDataset`.

    Returns:
        The number of samples.

    Raises:
        OptionError: If the name does not end in ".tar".
        SampleError: If a sample cannot be written, or there is none; then no file is written.
        StorageError: If a file cannot be written.
    """
    name = os.fspath(url)
    if not name.endswith(".tar"):
        raise OptionError(f"the name of a shard ends in .tar, not as {name!r}")
    folder = open_output_folder(parent_url(name), storage_options)
    limits = WriterOptions(max_samples=sys.maxsize, max_bytes=sys.maxsize)
    with closing(
        PartWriter(
            folder,
            limits,
            name=lambda _: name.rpartition("/")[2],
            replaces=True,
        )
    ) as writer:
        for sample in samples:
            if not isinstance(sample.get("__key__"), str):
                raise SampleError("a sample needs a text '__key__'", shard=name)
            writer.write(sample["__key__"], encode_sample(sample))
        if not writer.nsamples:
            raise SampleError("there are no samples: an empty shard would be skipped in silence")
        writer.end()
        writer.drain()
    folder.sync()
    return writer.nsamples
