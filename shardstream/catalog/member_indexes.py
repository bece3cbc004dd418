"""Fetch samples without some of their large members, by the text indexes of members (``NAME.idx``)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from shardstream.catalog.base import Numbers
from shardstream.errors import IndexMismatchError
from shardstream.format import BLOCK_BYTES, Offsets, ShardInfo, decode_member_index, encode_member
from shardstream.storage import FieldPlace, FieldPlaces, Storage, new_lock

MIN_MEAN_BYTES = 512 << 10
"""Mean size of samples from which leaving out fields saves requests or time."""
_MIN_CUT_BYTES = 256 << 10  # smaller members are read along: a second request costs as much
_KEPT = 256  # shards, of few samples each
_lock = new_lock()

ReadRange = Callable[[int, int], bytes | memoryview]
"""Start, end -> bytes of a tar."""

Members = Sequence[tuple[str, int, int, str]]
"""Field, offset and size of its bytes, and name of each member of a sample."""

_Piece = tuple[int, int] | bytes
"""Start and end of bytes of a tar, or other bytes in their place."""


class Layout(NamedTuple):
    """What is fetched of the samples of a shard: each begins at its offset in the tar, and may be shorter."""

    starts: Numbers
    """Offset of each sample, shape (n,)."""
    lengths: Numbers
    """Bytes of each sample, shape (n,)."""
    pieces: list[list[_Piece]]

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
        """
        data, runs = bytearray(end - start), list[_Run]()
        for sample in range(*np.searchsorted(self.starts, [start, end]).tolist()):
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
            data[run.start + run.shift : run.end + run.shift] = read_range(run.start, run.end)
        return memoryview(data)


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
        self, shard: ShardInfo, offsets: Callable[[], Offsets], mtime_ns: Callable[[], int]
    ) -> Layout:
        """Return what is fetched of the samples of a shard.

        Args:
            shard: The shard.
            offsets: Returns its index.
            mtime_ns: Returns the modification time of a local shard, as `FieldPlace` needs it.

        Raises:
            IndexMismatchError: If the index of members is invalid, or does not match the other one.
            StorageError: If it cannot be read.
        """
        url = shard.members_url
        with _lock:
            if url in self._kept:
                self._kept.move_to_end(url)
                return self._kept[url]
        layout = self._read_layout(shard, offsets().tolist(), mtime_ns())
        with _lock:
            self._kept[url] = layout
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return layout

    def _read_layout(self, shard: ShardInfo, offsets: list[int], mtime_ns: int) -> Layout:
        url = shard.members_url
        samples = decode_member_index(self._storage.read(url), url=url)
        if len(samples) != len(offsets) - 1:
            raise _mismatch(url)
        pieces = [
            self._pieces(members, start, end, shard, mtime_ns)
            for members, (start, end) in zip(samples, pairwise(offsets), strict=True)
        ]
        lengths = np.array([sum(map(_length, one)) for one in pieces], dtype=np.int64)
        return Layout(np.array(offsets[:-1], dtype=np.int64), lengths, pieces)

    def _pieces(
        self, members: Members, start: int, end: int, shard: ShardInfo, mtime_ns: int
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
                    place = FieldPlace(before, body, size, shard.filesize or 0, mtime_ns)
                    data = self._places.encode(place)
                    pieces.append(b"".join(encode_member(name, data)))
                kept = after
            before = after
        pieces += [(kept, end)] if end > kept else []
        return pieces or [(start, end)]


def _length(piece: _Piece) -> int:
    return len(piece) if isinstance(piece, bytes) else piece[1] - piece[0]


def _mismatch(url: str) -> IndexMismatchError:
    return IndexMismatchError(
        "the index of members does not match the index of samples",
        remedy="run 'shardstream index --members' again",
        shard=url,
    )
