"""Encode records in order, in this process or in others with a bounded number in flight."""

from __future__ import annotations

import errno
import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image

from shardstream.errors import NotFoundError, SampleError, SourceError, StorageError
from shardstream.format import is_image_field
from shardstream.packing.encode import encode_field
from shardstream.packing.images import ImageOptions, decode_error, reencode
from shardstream.packing.sources.source import FileRef, Record, named
from shardstream.storage import Storage, broken_link
from shardstream.tasks import ProcessPool

T = TypeVar("T")

_CHUNK_RECORDS = 32
_RECORD_CHUNK_BYTES = 16 << 20
_READ_THREADS = 16  # for remote files, where each read waits
REMOTE_FILE_LIMIT_BYTES = 2 << 30
"""Limit of a remote file that becomes a field, whatever a hostile server sends."""
_OF_ONE_FILE = frozenset(
    {
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EACCES,
        errno.EPERM,
        errno.EINVAL,
    }
)


class Encoded(NamedTuple):
    """A sample whose fields are bytes, or the error of its record."""

    key: str
    fields: Mapping[str, bytes]
    where: str
    error: SourceError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEncoder:
    """Opens files and encodes values; picklable.

    Args:
        storage: Storage of the files.
        images: Changes to images.
        reads_remote: Whether files may not be on this machine.
    """

    storage: Storage
    images: ImageOptions
    reads_remote: bool = True

    def encode(self, records: Sequence[Record]) -> list[Encoded]:
        """Encode records in order; the error of a record becomes its `Encoded.error`.

        Raises:
            StorageError: If files cannot be reached, for a reason that may affect other records.
        """
        ahead = self._read_ahead(records) if self.reads_remote else {}
        samples: list[Encoded] = []
        for record in records:
            error, fields = record.error, dict[str, bytes]()
            if error is None:
                try:
                    fields = self._encode_fields(record, ahead)
                except (SampleError, SourceError, NotFoundError) as unfit:
                    error = named(unfit, record.where)
            samples.append(Encoded(record.key, fields, record.where, error))
        return samples

    def only_copies(self, records: Sequence[Record]) -> bool:
        """Return whether the work is only to read local files: sending them between processes takes longer."""
        return (
            self.images.changes_nothing
            and not self.images.check
            and all(
                self.storage.local_path(value.url) is not None
                if isinstance(value, FileRef)
                else isinstance(value, bytes | str | int)
                for record in records
                for value in record.fields.values()
            )
        )

    def _encode_fields(
        self, record: Record, ahead: Mapping[str, bytes | StorageError]
    ) -> dict[str, bytes]:
        fields: dict[str, bytes] = {}
        images, masks = self.images, frozenset[str]()
        if not images.changes_nothing:  # else no pixels are touched
            images = images.for_fields(record.fields)
            masks = images.select_masks(record.fields)
        for field, value in record.fields.items():
            name, data = self._encode_field(
                field, value, record.where, ahead, images, is_mask=field in masks
            )
            if name in fields:
                raise SourceError(f"two images would both become the field {name!r}; leave one out")
            fields[name] = data
        return fields

    def _encode_field(
        self,
        field: str,
        value: object,
        where: str,
        ahead: Mapping[str, bytes | StorageError],
        images: ImageOptions,
        *,
        is_mask: bool,
    ) -> tuple[str, bytes]:
        if isinstance(value, FileRef):
            read = ahead.get(value.url)
            read = self._read(value.url) if read is None else read
            if isinstance(read, NotFoundError):
                raise _missing(read, value.url, where)
            if isinstance(read, StorageError):
                raise SourceError(str(read)) from read
            where, value = value.url, read
        data = encode_field(field, value)
        if not is_image_field(field):
            return field, data
        if not data:
            raise SourceError("the image is empty: it has no bytes", shard=where)
        name, encoded = reencode(data, field, images, where=where, is_mask=is_mask)
        cause = decode_error(data) if images.check and encoded is data else None
        if cause is not None:
            raise SourceError(
                f"the image cannot be decoded ({cause}); fix it, or skip such files with on_error='skip' (--skip-errors)",
                shard=where,
            )
        return name, encoded

    def _read_ahead(self, records: Sequence[Record]) -> dict[str, bytes | StorageError]:
        """Read remote files concurrently."""
        urls = {
            value.url: None
            for record in records
            for value in record.fields.values()
            if isinstance(value, FileRef) and self.storage.local_path(value.url) is None
        }
        if not urls:
            return {}
        with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="shardstream-read") as pool:
            return dict(zip(urls, pool.map(self._read, urls), strict=True))

    def _read(self, url: str) -> bytes | StorageError:
        """Return the bytes of a file, or an error that is one of this file alone."""
        is_local = self.storage.local_path(url) is not None
        try:
            return (
                self.storage.read(url)
                if is_local
                else self.storage.read_bounded(url, REMOTE_FILE_LIMIT_BYTES)
            )
        except StorageError as error:
            if not isinstance(error, NotFoundError) and not _is_of_one_file(error, url, is_local):
                raise
            return error


def _is_of_one_file(error: StorageError, url: str, is_local: bool) -> bool:
    """Return whether an error says nothing about other files: a name that no file can have, or a link to the web that fails."""
    if (
        not is_local
    ):  # each link has a server of its own; with the bucket of one no file could be read
        return url.startswith(("http://", "https://"))
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno in _OF_ONE_FILE
    return cause is None or isinstance(cause, ValueError)  # a FIFO; a NUL in the name


def _missing(error: NotFoundError, url: str, where: str) -> NotFoundError | SourceError:
    """Return an error with the likely reason why a file is missing."""
    if (link := broken_link(url)) is not None:
        return SourceError(link, shard=url)
    if "\\" in url:
        return SourceError("not found; write paths with / instead of \\", shard=url)
    if url != where:
        return SourceError(
            "not found; paths in a table are relative to its own folder: name another with root= (--root)",
            shard=url,
        )
    return error


class EncoderPool(AbstractContextManager["EncoderPool"]):
    """Encodes records in order, in this process or in others, which start when they are first needed; use it as a context manager.

    Args:
        encoder: Encodes them.
        processes: Number of processes; 1: this one.
    """

    def __init__(self, encoder: RecordEncoder, processes: int) -> None:
        self.processes = processes
        self._encoder = encoder
        self._pool: ProcessPool | None = None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """End the processes; kill them after an error."""
        if self._pool is not None:
            self._pool.__exit__(kind, *rest)

    def encode(
        self, labelled: Iterable[tuple[T, Record]], chunk_records: int = _CHUNK_RECORDS
    ) -> Generator[tuple[T, Encoded], None, None]:
        """Encode records in order, each with its label; in this process if there is nothing to encode.

        Args:
            labelled: The records, which are read ahead.
            chunk_records: Maximum records that a process gets at once.

        Raises:
            SourceError: If a process dies.
            StorageError: If files cannot be reached.
        """
        chunks = chunked(labelled, chunk_records)
        first = next(chunks, ([], []))
        chunks = itertools.chain([first], chunks)
        if self.processes > 1 and not self._encoder.only_copies(first[1]):
            yield from self._encode_ahead(chunks)
            return
        for labels, records in chunks:
            yield from zip(labels, self._encoder.encode(records), strict=True)

    def _encode_ahead(
        self, chunks: Iterable[tuple[list[T], list[Record]]]
    ) -> Iterator[tuple[T, Encoded]]:
        """Encode chunks in processes, with a bounded number in flight."""
        # Not tasks of `tasks`: samples are not JSON, and are needed in order.
        pool = self._pool = self._pool or ProcessPool(self.processes, _begin, (self._encoder,))
        in_flight: deque[tuple[list[T], Future[list[Encoded]]]] = deque()
        try:
            for labels, records in chunks:
                in_flight.append((labels, pool.submit(_encode_here, records)))
                if len(in_flight) > 2 * self.processes:
                    yield from _labelled(*in_flight.popleft())
            for one in in_flight:
                yield from _labelled(*one)
        except BrokenProcessPool as error:
            raise SourceError(f"a process that encodes died: {pool.why_broken()}") from error


def chunked(
    labelled: Iterable[tuple[T, Record]], max_records: int = _CHUNK_RECORDS
) -> Iterator[tuple[list[T], list[Record]]]:
    """Yield labels and records in lists, bounded by number and by bytes."""
    labels, records, size = list[T](), list[Record](), 0
    for label, record in labelled:
        labels.append(label)
        records.append(record)
        size += sum(map(value_bytes, record.fields.values()))
        if len(records) >= max_records or size >= _RECORD_CHUNK_BYTES:
            yield labels, records
            labels, records, size = [], [], 0
    if records:
        yield labels, records


def value_bytes(value: object) -> int:
    """Return how many bytes a value takes: as a field, of files, bytes and whole numbers; in memory, of pixels; 0 if it is unknown."""
    if isinstance(value, FileRef):
        return value.size
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Image.Image):
        return value.width * value.height * len(value.getbands())
    if isinstance(value, int):
        return len(b"%d" % value)
    return len(value) if isinstance(value, bytes | str) else 0


def _labelled(labels: Sequence[T], encoded: Future[list[Encoded]]) -> Iterator[tuple[T, Encoded]]:
    return zip(labels, encoded.result(), strict=True)


_here: list[RecordEncoder] = []  # in a process of the pool: its one encoder


def _begin(encoder: RecordEncoder) -> None:
    _here[:] = [encoder]


def _encode_here(records: Sequence[Record]) -> list[Encoded]:
    return _here[0].encode(records)
