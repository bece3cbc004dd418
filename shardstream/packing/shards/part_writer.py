"""Write samples to tars, and publish each in the background while the next one is written; equal input gives equal bytes."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from shardstream.errors import OptionError, SampleError, get_logger, plural
from shardstream.format import (
    CLASSES_NAME,
    END_OF_ARCHIVE,
    INDEX_SUFFIX,
    OFFSET_BYTES,
    Column,
    Offsets,
    ShardInfo,
    ShardTotals,
    encode_index,
    encode_members,
    member_name,
)
from shardstream.packing.job.key_hashes import Hashes, Places, hash_keys, place_of
from shardstream.packing.job.parallel_encode import Encoded
from shardstream.packing.shards.column_builder import ColumnBuilder, ColumnSummary
from shardstream.packing.sources.source import named
from shardstream.process import keep_freed_memory
from shardstream.storage import FileInfo, OutputFolder, PendingFile

_BUFFER_BYTES = 1 << 20
_MAX_UNHASHED_BUFFERS = 4

Pieces = list[bytes | memoryview]
"""Headers, bodies and paddings of a sample, in the order of the tar."""
_log = get_logger(__name__)

# Finished shards that wait to be published: on a disk, or as up to 72 MiB that are being sent to S3.
_IN_FLIGHT = 2


class Writable(Protocol):
    """A stream that takes the bytes of a tar."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append bytes, all of them."""


_plain_fields: set[str] = set()
_is_plain_key = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]*").fullmatch


def sample_pieces(key: str, fields: Mapping[str, bytes | memoryview]) -> Pieces:
    """Return the bytes of one sample: for each field, in the order given, header, body and padding.

    >>> sum(map(len, sample_pieces("0001", {"cls": b"7"})))
    1024

    Raises:
        SampleError: If the sample has no field, or would read back under another key or field.
    """
    if not fields:
        raise SampleError("a sample without fields would be lost; give it one", key=key)
    # Whether a name is fine depends on the key alone for fields that were, and have no "__".
    is_checked = _is_plain_key(key) is not None
    for name in fields:
        if is_checked and name in _plain_fields:
            continue
        member_name(key, name)
        if "__" not in name and len(_plain_fields) < 1024:  # fields may come from a hostile source
            _plain_fields.add(name)
            is_checked = True
    return encode_members(f"{key}.", fields)


def check_class(key: str, data: bytes, num_classes: int) -> None:
    """Refuse a class number without a name.

    Raises:
        SampleError: If it has none.
    """
    if data.strip().isdigit() and int(data) >= num_classes:
        raise SampleError(
            f"class {int(data)} has no name: {CLASSES_NAME} of the dataset has {plural(num_classes, 'name')}; correct the number, or add the name "
            "there, or by classes= (--classes) of pack",
            key=key,
            field="cls",
        )


class TarShard:
    """A tar that is being written.

    Args:
        stream: Stream for the tar, from its current position.
        url: URL of the shard, for messages and for the manifest.
        hashing: A pool of one thread that hashes during writing; None hashes in the calling thread.
        columns: Columns of the samples to collect.
    """

    def __init__(
        self,
        stream: Writable,
        *,
        url: str,
        hashing: Executor | None = None,
        columns: Sequence[Column] | None = None,
    ) -> None:
        self._stream = stream
        self._url = url
        self._digest = hashlib.sha256()
        self._hashing = hashing
        self._hashed: deque[Future[None]] = deque()
        self._buffer: Pieces = []
        self._buffered_bytes = 0
        self._starts: list[int] = []
        self._keys: dict[str, None] = {}  # in order
        self.columns = None if columns is None else ColumnBuilder(columns, url)
        """The values of its columns so far; None without columns."""
        self.fields: dict[str, int] = {}
        """Number of samples that have each field."""
        self.nsamples = 0
        """Samples so far."""
        self.size_bytes = 0
        """Bytes so far, without the end of the archive."""

    @property
    def offsets(self) -> Offsets:
        """The index, shape (n + 1,)."""
        return np.array([*self._starts, self.size_bytes], dtype=np.int64)

    def add(self, key: str, fields: Mapping[str, bytes | memoryview], pieces: Pieces) -> None:
        """Append one sample, whose bytes `sample_pieces` has returned; its fields stay in the order given.

        Raises:
            SampleError: If its key is in the shard, or a value does not fit its column; then nothing of it is written.
        """
        if key in self._keys:
            raise SampleError(
                "this key is in the shard already; give each sample its own",
                shard=self._url,
                key=key,
            )
        if self.columns is not None:
            self.columns.add(key, fields)
        self._keys[key] = None
        self._starts.append(self.size_bytes)
        self.nsamples += 1
        for name in fields:
            self.fields[name] = self.fields.get(name, 0) + 1
        size = sum(map(len, pieces))
        self.size_bytes += size
        self._buffered_bytes += size
        self._buffer += pieces
        if self._buffered_bytes >= _BUFFER_BYTES:
            self._flush()

    def finish(self) -> ShardInfo:
        """Write the end of the archive, and return the shard's entry for the manifest."""
        data = b"".join([*self._buffer, END_OF_ARCHIVE])
        self._stream.write(data)
        for done in self._hashed:
            done.result()
        self._digest.update(data)  # here, so that no thread is started for a small shard
        return ShardInfo(
            url=self._url,
            nsamples=self.nsamples,
            filesize=self.size_bytes + len(END_OF_ARCHIVE),
            sha256=self._digest.hexdigest(),
        )

    @property
    def keys(self) -> list[str]:
        """The keys, in order."""
        return [*self._keys]

    def _flush(self) -> None:
        # Joined: the hashing thread then takes the GIL once per buffer, which saves more than the copy costs.
        data = b"".join(self._buffer)
        self._buffer, self._buffered_bytes = [], 0
        if self._hashing is None:
            self._digest.update(data)
        else:
            if len(self._hashed) == _MAX_UNHASHED_BUFFERS:
                self._hashed.popleft().result()
            self._hashed.append(self._hashing.submit(self._digest.update, data))
        self._stream.write(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """Limits of a shard, columns and name of the dataset (see `ShardWriter`), and number of the classes of one that is appended to, if they have names."""

    max_samples: int
    max_bytes: int
    name: str = ""
    columns: tuple[Column, ...] | None = None
    num_classes: int | None = None

    def __post_init__(self) -> None:
        if self.max_samples < 1:
            raise OptionError(f"max_samples must be 1 or more, not {self.max_samples}")


class PartWriter:
    """Writes the shards of a part of a dataset, all in one process and in order.

    A full shard is flushed and published in a thread while the next one is written, its tar not after its index. An error
    is raised by the next call, and by all later ones.

    Args:
        folder: Folder of the dataset; its ``check_owner`` is called before each shard is published.
        limits: Maximum samples and bytes of a shard, and its columns.
        name: Returns the name of a shard by its number in the part, from 0.
        replaces: Whether shards of these names may exist already.
        add_keys: Gets hashes and places of the keys of each shard (see `KeyHashes.add`), before it is published.
    """

    def __init__(
        self,
        folder: OutputFolder,
        limits: WriterOptions,
        *,
        name: Callable[[int], str],
        replaces: bool = False,
        add_keys: Callable[[Hashes, Places], object] | None = None,
    ) -> None:
        self.nsamples = 0
        """Samples so far."""
        self.size_bytes = 0
        """Bytes of the tars so far, without their ends."""
        self.shards: list[ShardInfo] = []
        """The published shards, in order; all of them after `end` and `drain`."""
        self.fields = Counter[str]()
        """Number of samples that have each field, in the finished shards."""
        self.columns: list[ColumnSummary] = []
        """Number and type of the values of columns, for each finished shard."""
        self.column_bytes: list[int] = []
        """Sizes of the files of columns, for each finished shard."""
        self.skipped: list[Skip] = []
        """Records that were skipped, in order."""
        self.etags: dict[str, str] = {}
        """ETags of the tars, on S3 servers that have sent one."""
        self._folder, self._limits, self._name = folder, limits, name
        self._replaces, self._add_keys = replaces, add_keys
        self._shard: TarShard | None = None
        self._pending: PendingFile | None = None
        self._begun = 0
        self._in_flight: deque[Future[ShardInfo]] = deque()
        self._is_open = True
        self._error: BaseException | None = None
        # No thread is started before it is needed: a process may write thousands of small parts.
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="shardstream-hash")
        self._publishing = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="shardstream-publish")
        keep_freed_memory()

    def write(self, key: str, fields: Mapping[str, bytes | memoryview]) -> None:
        """Append a sample; begin another shard where it exceeds a limit.

        Raises:
            SampleError: If it would not read back equal, or its key is in the shard; then nothing of it is written.
            StorageError: If this or an earlier shard cannot be written.
        """
        self._check_usable()
        if self._limits.num_classes is not None:
            check_class(key, bytes(fields.get("cls", b"")), self._limits.num_classes)
        pieces = sample_pieces(key, fields)
        size = sum(map(len, pieces))
        try:
            if self._in_flight and self._in_flight[0].done():
                self.drain(len(self._in_flight) - 1)
            shard = self._shard
            if shard is not None and (
                shard.nsamples >= self._limits.max_samples
                or shard.size_bytes + size + len(END_OF_ARCHIVE) > self._limits.max_bytes
            ):
                self._end_shard()
            if self._shard is None:
                name = self._name(self._begun)
                self._pending = self._folder.open(name)
                self._shard = TarShard(
                    self._pending, url=name, hashing=self._hashing, columns=self._limits.columns
                )
                self._begun += 1
            self._shard.add(key, fields, pieces)
        except SampleError:  # nothing of it was written: the shard is as it was
            raise
        except BaseException as error:  # a shard is missing: later calls must fail, too
            self._error = error
            raise
        self.nsamples += 1
        self.size_bytes += size

    def add(self, sample: Encoded, *, skips: bool) -> int:
        """Append the sample of a record; return its bytes, 0 if the record is skipped.

        Raises:
            SourceError: If the record cannot be packed, unless ``skips``.
            StorageError: As `write`.
        """
        error, before = sample.error, self.size_bytes
        if error is None:
            try:
                self.write(sample.key, sample.fields)
            except SampleError as unfit:
                error = named(unfit, sample.where)
        if error is not None:
            if not skips:
                raise error
            self.skipped.append(Skip(sample.where, str(error)))
        return self.size_bytes - before

    def end(self, *, is_whole: bool = False) -> None:
        """Hand the last shard over without waiting until it is published.

        Args:
            is_whole: Whether there are no others in the dataset: the keys of a single shard are not added, since they differ.

        Raises:
            StorageError: If this or an earlier shard cannot be written.
        """
        self._check_usable()
        try:
            self._end_shard(adds_keys=not (is_whole and self._begun == 1))
        except BaseException as error:
            self._error = error
            raise

    def drain(self, most: int = 0) -> None:
        """Wait until at most ``most`` of the shards that are full so far are not published.

        Raises:
            StorageError: If one cannot be published.
        """
        while len(self._in_flight) > most:
            # One that has failed stays there: later calls must fail, too.
            self.shards.append(self._in_flight[0].result())
            self._in_flight.popleft()

    def result(self, written: PartResult | None = None) -> PartResult:
        """Return the shards that are published so far, with what the writer does not count."""
        return replace(
            written or PartResult(),
            shards=tuple(self.shards),
            fields=dict(self.fields),
            columns=tuple(self.columns),
            column_bytes=tuple(self.column_bytes),
            skipped=tuple(self.skipped),
        )

    def close(self) -> None:
        """Drop the unfinished shard, wait until the finished ones are published, and end the threads; a second call does nothing."""
        self._is_open = False
        if self._pending is not None:
            self._pending.discard()
            self._pending = self._shard = None
        self._hashing.shutdown(wait=True, cancel_futures=True)
        self._publishing.shutdown(wait=True)

    def _check_usable(self) -> None:
        if not self._is_open:
            raise OptionError("the writer is closed; open another one")
        if self._error is not None:
            raise self._error

    def _end_shard(self, *, adds_keys: bool = True) -> None:
        """Finish the current shard, if there is one, and hand it over to be published; wait while two others are in flight."""
        shard, pending = self._shard, self._pending
        if shard is None or pending is None:
            return
        if shard.nsamples:
            if adds_keys and self._add_keys is not None:
                self._add_keys(hash_keys(shard.keys), place_of(self._begun - 1, shard.nsamples))
            info = shard.finish()
            others = {info.url + INDEX_SUFFIX: encode_index(shard.offsets)}
            if shard.columns is not None:
                data = shard.columns.encode(shard.keys, info)
                others[info.columns_url] = data
                self.columns.append(shard.columns.summary)
                self.column_bytes.append(len(data))
            self.fields.update(shard.fields)
            self.drain(_IN_FLIGHT - 1)
            before = self._in_flight[-1] if self._in_flight else None
            self._in_flight.append(
                self._publishing.submit(self._publish, pending, info, others, before)
            )
        else:  # its first sample was refused
            pending.discard()
        self._shard = self._pending = None

    def _publish(
        self,
        tar: PendingFile,
        info: ShardInfo,
        others: Mapping[str, bytes],
        before: Future[ShardInfo] | None,
    ) -> ShardInfo:
        """Flush a shard and the files next to it; publish them once the shard before is published."""
        files = [tar]
        try:
            tar.end()
            for name, data in others.items():
                file = self._folder.open(name)
                files.append(file)
                file.write(data)
                file.end()
            if before is not None:
                before.result()  # if it has failed, it must not be missing before this one
            self._folder.check_owner()
            if self._replaces:
                # An old index is never next to the new shard, nor the new one next to the old shard.
                self._folder.remove(info.url + INDEX_SUFFIX)
                self._folder.commit(tar)
                self._folder.sync()
                self._folder.commit(*files[1:])
            else:
                self._folder.commit(*files)
        finally:
            for file in files:
                file.discard()
        if tar.etag is not None:
            self.etags[info.url] = tar.etag
        _log.info("published %s/%s: %s samples", self._folder.url, info.url, info.nsamples)
        return info


class Skip(NamedTuple):
    """A skipped record."""

    where: str
    """Its file or row."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult(ShardTotals):
    """Shards that a part has published.

    Args:
        shards: Their entries in the manifest, in order.
        fields: Number of samples that have each field.
        left_out: Samples of the source that were filtered out.
        warnings: Findings that may be mistakes.
        skipped: Records that were skipped, in order.
        key_hashes: Hashes of all keys, in order (see `encode_hashes`), if they may repeat.
        columns: Number and type of the values of columns, for each shard; none without columns.
        column_bytes: Sizes of the files of columns, for each shard; none without columns.
    """

    shards: tuple[ShardInfo, ...] = ()
    fields: Mapping[str, int] = field(default_factory=dict)
    left_out: int = 0
    warnings: tuple[str, ...] = ()
    skipped: tuple[Skip, ...] = ()
    key_hashes: str = ""
    columns: tuple[ColumnSummary, ...] = ()
    column_bytes: tuple[int, ...] = ()

    def changed_file(
        self,
        look_up: Callable[[str], FileInfo | None],
        etags: Mapping[str, str] = MappingProxyType({}),
        first: int = 0,
    ) -> str | None:
        """Return the name of the first file of the shards that is missing or another one; None if all are in place.

        Args:
            look_up: Returns a file of the folder by its name; None if it is missing.
            etags: Name -> ETag of a file, if it is known.
            first: The first of the shards that are looked up.
        """
        shards, sizes_of_columns = self.shards[first:], self.column_bytes[first:]
        for shard, column_bytes in itertools.zip_longest(shards, sizes_of_columns):
            index_bytes = OFFSET_BYTES * ((shard.nsamples or 0) + 1)
            sizes = {shard.url: shard.filesize, shard.url + INDEX_SUFFIX: index_bytes}
            if column_bytes is not None:
                sizes[shard.columns_url] = column_bytes
            for name, size in sizes.items():
                found, etag = look_up(name), etags.get(name, "")
                if found is None or found.size_or_none != size:
                    return name
                if etag not in (found.version or etag):
                    return name
        return None

    @classmethod
    def decode(cls, document: Mapping[str, Any]) -> PartResult:
        """Read the result from its fields, as JSON values."""
        return cls(
            shards=tuple(ShardInfo(**one) for one in document["shards"]),
            fields=dict(document["fields"]),
            left_out=int(document["left_out"]),
            warnings=tuple(document["warnings"]),
            skipped=tuple(itertools.starmap(Skip, document["skipped"])),
            key_hashes=str(document["key_hashes"]),
            columns=tuple(document["columns"]),
            column_bytes=tuple(document["column_bytes"]),
        )
