"""Fetch samples without some of their large members, by the text indexes of members (``NAME.idx``)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from shardstream.errors import IndexMismatchError, NotFoundError
from shardstream.format import BLOCK_BYTES, Offsets, ShardInfo, decode_member_index, encode_member
from shardstream.process import new_lock
from shardstream.samples import Numbers
from shardstream.storage import FieldPlace, FieldPlaces, FileVersion, Storage

MIN_MEAN_BYTES = 512 << 10
"""Mean size of samples from which leaving out fields saves requests or time."""
_MIN_CUT_BYTES = 256 << 10  # smaller members are read along: a second request costs as much
_NAME_BYTES, _OCTAL_LIMIT = 100, 8**11  # of a ustar header
_KEPT = 256  # shards, of few samples each
_lock = new_lock()

ReadRange = Callable[[int, int], bytes | memoryview]
"""Start, end -> bytes of a tar."""

Member = tuple[str, int, int, str]
"""Field, offset and size of its bytes, and name of a member."""

_Piece = tuple[int, int] | bytes
"""Start and end of bytes of a tar, or other bytes in their place."""


class Layout(NamedTuple):
    """What is fetched of the samples of a shard: each begins at its offset in the tar, and may be shorter."""

    url: str
    """URL of the index of members."""
    starts: Numbers
    """Offset of each sample, shape (n,)."""
    lengths: Numbers
    """Bytes of each sample, shape (n,)."""
    pieces: list[list[_Piece]]
    members: list[list[Member]]

    def ends_of(self, starts: Numbers) -> Numbers:
        """Return the ends of the samples at some offsets, shape (n,)."""
        ends: Numbers = starts + self.lengths[np.searchsorted(self.starts, starts)]
        return ends

    def read(self, start: int, end: int, read_range: ReadRange) -> bytes | memoryview:
        """Return the samples in a range; bytes between them are zeros.

        Args:
            start: Offset of the first sample.
            end: Offset after the last, by `ends_of`.
            read_range: Reads bytes of the tar, by one request.

        Raises:
            IndexMismatchError: If the tar has other members than the index.
        """
        data, runs = bytearray(end - start), list[_Run]()
        samples = range(*np.searchsorted(self.starts, [start, end]).tolist())
        for sample in samples:
            at = int(self.starts[sample]) - start
            for piece in self.pieces[sample]:
                if isinstance(piece, bytes):
                    data[at : at + len(piece)] = piece
                elif runs and (runs[-1].end, runs[-1].shift) == (piece[0], at - piece[0]):
                    runs[-1] = runs[-1]._replace(end=piece[1])
                else:
                    runs.append(_Run(*piece, at - piece[0]))
                at += _length(piece)
        if runs == [(start, end, -start)]:
            return read_range(start, end)
        for run in runs:
            found = read_range(run.start, run.end)
            self._check(run, found, samples)
            data[run.start + run.shift : run.end + run.shift] = found
        return memoryview(data)

    def _check(self, run: _Run, data: bytes | memoryview, samples: range) -> None:
        """Compare the headers of members with the index: bytes that are put together of an old index could be those of other members."""
        for sample in samples:
            for field, body, size, name in self.members[sample]:
                header = body - BLOCK_BYTES - run.start
                if header < 0 or body > run.end:
                    continue
                block = bytes(data[header : header + BLOCK_BYTES])
                if not _is_header_of(block, field, size, name):
                    raise _mismatch(self.url)


class _Run(NamedTuple):
    """Bytes of a tar that are read by one request, and what is added to an offset to get the place in the result."""

    start: int
    end: int
    shift: int


class MemberIndexes:
    """Samples whose members are left out if they are large and not wanted; picklable without the indexes that were read, thread-safe.

    Args:
        storage: Storage of the shards.
        fields: Names of the wanted fields; none for all.
        places: Encodes the places of large members that take their place in the samples; None for fields that are always read.
    """

    def __init__(
        self, storage: Storage, fields: Collection[str] = (), places: FieldPlaces | None = None
    ) -> None:
        self._storage = storage
        self._fields = frozenset(fields)
        self._places = places
        self._kept: OrderedDict[str, Layout] = OrderedDict()  # by URL of the index

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict()}

    def load(
        self,
        shard: ShardInfo,
        offsets: Callable[[], Offsets],
        version: Callable[[], FileVersion | None],
    ) -> Layout:
        """Return what is fetched of the samples of a shard.

        Args:
            shard: The shard.
            offsets: Returns its index.
            version: Returns the version of a local shard, as `FieldPlace` needs it.

        Raises:
            IndexMismatchError: If the index of members is invalid, or does not match the other one.
            StorageError: If it cannot be read.
        """
        url = shard.members_url
        with _lock:
            if url in self._kept:
                self._kept.move_to_end(url)
                return self._kept[url]
        layout = self._read_layout(shard, offsets().tolist(), version())
        with _lock:
            self._kept[url] = layout
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return layout

    def _read_layout(
        self, shard: ShardInfo, offsets: list[int], version: FileVersion | None
    ) -> Layout:
        url = shard.members_url
        try:
            samples = decode_member_index(self._storage.read_bounded(url), url=url)
        except NotFoundError:
            if self._places is not None:
                raise
            samples = [[] for _ in offsets[1:]]  # of this shard all is fetched
        if len(samples) != len(offsets) - 1:
            raise _mismatch(url)
        pieces = [
            self._pieces(members, start, end, shard, version)
            for members, (start, end) in zip(samples, pairwise(offsets), strict=True)
        ]
        lengths = np.array([sum(map(_length, one)) for one in pieces], dtype=np.int64)
        return Layout(url, np.array(offsets[:-1], dtype=np.int64), lengths, pieces, samples)

    def _pieces(
        self,
        members: Sequence[Member],
        start: int,
        end: int,
        shard: ShardInfo,
        version: FileVersion | None,
    ) -> list[_Piece]:
        """Return what is fetched of a sample at ``start`` to ``end`` of a tar; all of it if no member would be left."""
        pieces: list[_Piece] = []
        before = kept = start
        for field, body, size, name in members:
            after = body + -(-size // BLOCK_BYTES) * BLOCK_BYTES
            if body < before + BLOCK_BYTES or after > end:
                raise _mismatch(shard.members_url)
            is_wanted = not self._fields or field.lower() in self._fields
            has_place = is_wanted and self._places is not None and field.lower() in self._places
            if size >= _MIN_CUT_BYTES and (has_place or not is_wanted):
                pieces += [(kept, before)] if before > kept else []
                if has_place and self._places is not None:
                    place = FieldPlace(before, body, size, shard.filesize or 0, version)
                    data = self._places.encode(place)
                    pieces.append(b"".join(encode_member(name, data)))
                kept = after
            before = after
        pieces += [(kept, end)] if end > kept else []
        return pieces or [(start, end)]


def _is_header_of(block: bytes, field: str, size: int, name: str) -> bool:
    """Return whether a ustar header may be that of a member: a long name, or a size over 8 GiB, is in a header before it."""
    stored = block[124:136]
    if stored[:1] == b"\x80":  # base 256
        found = int.from_bytes(stored[1:], "big")
    else:
        digits = stored.strip(b" \0")
        found = int(digits, 8) if digits and not digits.strip(b"01234567") else -1
    if size < _OCTAL_LIMIT and found != size:
        return False
    raw = name.encode("utf-8", "surrogateescape")
    if len(raw) >= _NAME_BYTES or not raw.isascii():
        return True
    return block[:_NAME_BYTES].rstrip(b"\0").lower().endswith(f".{field}".lower().encode())


def _length(piece: _Piece) -> int:
    return len(piece) if isinstance(piece, bytes) else piece[1] - piece[0]


def _mismatch(url: str) -> IndexMismatchError:
    return IndexMismatchError(
        "the index of members does not match the index of samples",
        remedy="run 'shardstream index --members' again",
        shard=url,
    )
