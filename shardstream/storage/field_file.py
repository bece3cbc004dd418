"""A field of a sample whose bytes are read where they are used: parts of a long video, of a point cloud; and one that stays a mask.

An image may be a mask by the photo beside it (`mask_fields`). Steps that leave the photo out, or rename one of both, mark its value
(`keep_masks`), because later steps see only the names that are left.
"""

from __future__ import annotations

import io
import secrets
import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from shardstream.errors import ChangedError, ShardError, redact, shown
from shardstream.format import (
    Sample,
    iter_members,
    split_member_name,
    unsure_masks,
)
from shardstream.storage.local_files import FileVersion, stat_version
from shardstream.storage.retry import RangeFile
from shardstream.storage.store import Storage

_BLOCK_BYTES, _KEPT_BYTES = 1 << 20, 32 << 20  # of each file
_MARKER_BYTES = 16
_PLACE = struct.Struct("<8Q")


_NO_VERSION = FileVersion(0, 0, 0, 0)


class FieldPlace(NamedTuple):
    """Where the bytes of a field are in a shard."""

    header: int
    """Offset of its first header, or of bytes that are skipped before it."""
    start: int
    """Offset of its first byte."""
    size: int
    filesize: int
    """Length of the shard; 0 if unknown."""
    version: FileVersion | None
    """Version of a local shard when the dataset was opened; None for a remote one."""


class FieldPlaces:
    """Encodes places as bytes that take the place of fields; no field of a shard can be mistaken for them.

    Args:
        fields: Names of the fields.
    """

    def __init__(self, fields: Iterable[str]) -> None:
        self._fields = frozenset(fields)
        # Drawn anew for each dataset, so that no shard can contain it.
        self._marker = secrets.token_bytes(_MARKER_BYTES)

    def __contains__(self, field: str) -> bool:
        return field in self._fields

    def encode(self, place: FieldPlace) -> bytes:
        """Return the bytes for a place."""
        return self._marker + _PLACE.pack(*place[:-1], *(place.version or _NO_VERSION))

    def decode(self, data: bytes) -> FieldPlace | None:
        """Return the place that bytes stand for; None if they are those of the field."""
        if len(data) != _MARKER_BYTES + _PLACE.size or not data.startswith(self._marker):
            return None
        header, start, size, filesize, *numbers = _PLACE.unpack_from(data, _MARKER_BYTES)
        version = FileVersion(*numbers)
        return FieldPlace(
            header, start, size, filesize, None if version == _NO_VERSION else version
        )


class FieldFile:
    """The bytes of a field, as a file: ``len(file)``, ``file[:100]``, ``file.read()``, ``file.open()``.

    ``lazy=`` of a dataset puts it in the place of the bytes. It reads ranges of the shard when they are used, in the process that uses
    them, in blocks of 1 MiB, those that follow each other in one request, and keeps up to 32 MiB. Picklable, without these blocks; for one thread at a time. Errors are those of the storage: not those of
    a bad sample. A replaced shard is noticed, but for one of equal layout on a store that sends no versions.

    Args:
        data: The bytes, if they are known.
    """

    def __init__(self, data: bytes = b"") -> None:
        self._data: bytes | None = data
        self._size = len(data)
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self.failure: Exception | None = None
        """The last error of a read, until it is set to None: libraries that read an open file may hide it."""
        self._block_bytes = _BLOCK_BYTES
        self.is_mask = False
        """Whether it is a mask, whatever its name is (see `keep_masks`)."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block; setting it to less forgets what was read, and reads less around small parts."""
        return self._block_bytes

    @block_bytes.setter
    def block_bytes(self, size: int) -> None:
        if size != self._block_bytes:
            self._block_bytes = size
            self._blocks.clear()

    @classmethod
    def in_shard(cls, storage: Storage, url: str, key: str, field: str, place: FieldPlace) -> Self:
        """Return the file of a field in a shard.

        Args:
            storage: Storage of the shard.
            url: URL of the shard.
            key: Key of the sample, to detect that the shard was replaced.
            field: Name of the field, for the same.
            place: Where it is.
        """
        file = cls()
        file._data, file._size = None, place.size
        file._storage, file._url, file._place = storage, url, place
        file._key, file._field = key, field
        return file

    _storage: Storage
    _url: str
    _key: str
    _field: str
    _place: FieldPlace

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        """Return a part of the bytes; of steps only 1 is possible.

        Raises:
            StorageError: If it cannot be read.
            ChangedError: If the shard was replaced since the dataset was opened.
            TypeError: If it is no slice.
            ValueError: If the slice has another step.
        """
        if not isinstance(part, slice):
            raise TypeError("a FieldFile is read by slices: file[:100], or whole: file.read()")
        start, end, step = part.indices(self._size)
        if step != 1:
            raise ValueError("bytes of a FieldFile are read with step 1")
        if self._data is not None:
            return self._data[start:end]
        size = self._block_bytes
        blocks = range(start // size, -(-end // size)) if end > start else range(0)
        if len(blocks) * size > _KEPT_BYTES:
            self._load(range(1))  # checks the shard
            return self._fetch(self._place.start + start, self._place.start + end)
        data = b"".join(self._load(blocks))
        first = blocks.start * size
        return data[start - first : end - first]

    def __repr__(self) -> str:
        where = "memory" if self._data is not None else shown(redact(self._url))
        return f"FieldFile({self._size} bytes in {where})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_blocks": OrderedDict(), "failure": None}

    def read(self) -> bytes:
        """Return all bytes.

        Raises:
            StorageError: If they cannot be read.
            ChangedError: If the shard was replaced since the dataset was opened.
        """
        return self[:]

    def __bytes__(self) -> bytes:
        return self.read()

    def open(self) -> io.BufferedReader:
        """Return a binary file that reads and seeks, for libraries that take one."""
        return io.BufferedReader(_RawFieldFile(self), min(self._block_bytes, 1 << 16))

    def _load(self, blocks: range) -> list[bytes]:
        """Return blocks that follow each other, those that are missing by one request."""
        missing, size, place = (
            [n for n in blocks if n not in self._blocks],
            self._block_bytes,
            self._place,
        )
        if missing:
            first, last = missing[0], missing[-1]
            if first and not self._blocks:
                self._load(range(1))
            begin = place.start + first * size if first else place.header
            data = self._fetch(
                begin, min(place.start + (last + 1) * size, place.start + place.size)
            )
            if not first:
                self._check_name(data)
                data = data[place.start - place.header :]
            for n in range(first, last + 1):
                self._blocks[n] = data[(n - first) * size : (n - first + 1) * size]
        found = [self._blocks[n] for n in blocks]
        for n in blocks:
            self._blocks.move_to_end(n)
        while len(self._blocks) * size > _KEPT_BYTES:
            self._blocks.popitem(last=False)
        return found

    def _fetch(self, start: int, end: int) -> bytes:
        try:
            data = self._storage.read(self._url, start, end, size=self._place.filesize or None)
            self._check_local()
        except Exception as error:
            self.failure = error
            raise
        return data

    def _check_local(self) -> None:
        before, path = self._place.version, self._storage.local_path(self._url)
        if before is None or path is None:
            return
        now = stat_version(path)
        if now is not None and now.differs_from(before):  # one that was deleted was read before
            raise self._changed()

    def _check_name(self, headers: bytes) -> None:
        """Check that the member is there that the index names."""
        place = self._place
        try:
            for name, _, body, size in iter_members(
                lambda at, length: headers[at - place.header : at - place.header + length],
                start=place.header,
                shard=self._url,
            ):
                if body >= place.start:
                    if (body, size) != (place.start, place.size):
                        break
                    if split_member_name(name) != (self._key, self._field):
                        break
                    return
        except ShardError:
            pass
        self.failure = self._changed()
        raise self.failure

    def _changed(self) -> ChangedError:
        return ChangedError(
            f"the shard was replaced since the dataset was opened or indexed: {self._key}.{self._field} is no longer at this place",
            remedy="run 'shardstream index --members' again, and open the dataset again",
            shard=self._url,
            offset=self._place.start,
        )


class _RawFieldFile(RangeFile):
    """Reads a `FieldFile`, each read within one block."""

    def __init__(self, file: FieldFile) -> None:
        super().__init__(len(file))
        self._file = file

    def _read_range(self, start: int, end: int) -> bytes:
        return self._file[start:end]


class MaskBytes(bytes):
    """Bytes of an image that is a mask, whatever its field is called."""


def is_mask(value: object) -> bool:
    """Return whether a value is a mask by `keep_masks`."""
    return type(value) is MaskBytes or (isinstance(value, FieldFile) and value.is_mask)


def masks_in(sample: Mapping[str, Any], *absent: str) -> set[str]:
    """Return fields that are masks, but would not be by their names beside other fields.

    Args:
        sample: Values, or columns, by field.
        absent: Its other fields, which were not read.
    """
    unsure = unsure_masks((*sample, *absent))
    found = set(unsure.by_photo)
    for name in unsure.pictures:
        if is_mask(sample.get(name)):
            found.add(name)
    return found


def lost_masks(before: Mapping[str, Any], after: Mapping[str, Any], *absent: str) -> list[str]:
    """Return fields that are no masks by their names after a step, but have the name or the value of a mask before it.

    Args:
        before: Values, or columns, by field.
        after: The same after the step.
        absent: As of `masks_in`.
    """
    names = masks_in(before, *absent)
    if not names:  # as in most datasets
        return []
    values = [before[name] for name in names if name in before]
    pictures = unsure_masks((*after,)).pictures
    return [name for name in pictures if name in names or any(after[name] is one for one in values)]


def keep_masks(before: Mapping[str, Any], after: Sample, *absent: str) -> Sample:
    """Mark the masks that a step takes from their photo, in the sample after it, which is returned; arguments as of `lost_masks`."""
    for name in lost_masks(before, after, *absent):
        value = after[name]
        if type(value) is bytes:
            after[name] = MaskBytes(value)
        elif isinstance(value, FieldFile):
            value.is_mask = True
    return after
