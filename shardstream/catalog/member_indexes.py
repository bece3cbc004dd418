"""Narrow the byte ranges of samples to the members that are wanted, by the text indexes of members (``NAME.idx``)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from shardstream.catalog.base import Extents, Numbers
from shardstream.errors import IndexMismatchError
from shardstream.format import BLOCK_BYTES, ShardInfo, decode_member_index
from shardstream.storage import Storage, new_lock

MIN_MEAN_BYTES = 512 << 10
"""Mean size of samples from which narrowing saves requests or time: gaps of up to 256 KiB are read along."""
_KEPT = 256  # shards, of few samples each
_lock = new_lock()

_Spans = tuple[Numbers, Numbers, Numbers]


class MemberIndexes:
    """Ranges of the wanted members of each sample; picklable without the indexes that were read, and thread-safe.

    Args:
        fields: Names of the wanted fields.
        storage: Storage of the shards.
    """

    def __init__(self, fields: Collection[str], storage: Storage) -> None:
        self._fields = frozenset(fields)
        self._storage = storage
        self._kept: OrderedDict[str, _Spans] = OrderedDict()  # by URL of the index

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict()}

    def load(self, shard: ShardInfo) -> _Spans:
        """Return the starts of the samples of a shard, and the starts and ends of their wanted members.

        Raises:
            IndexMismatchError: If the index is invalid.
            StorageError: If it cannot be read.
        """
        url = shard.members_url
        with _lock:
            if url in self._kept:
                self._kept.move_to_end(url)
                return self._kept[url]
        spans = _spans(decode_member_index(self._storage.read(url), url=url), self._fields)
        with _lock:
            self._kept[url] = spans
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return spans

    def narrow(self, extents: Extents, shards: Sequence[ShardInfo]) -> Extents:
        """Return the ranges of the wanted members of samples; a sample that has none keeps its range.

        Args:
            extents: Ranges of samples.
            shards: The shards that they number.

        Raises:
            IndexMismatchError: If an index does not match its shard.
            StorageError: If one cannot be read.
        """
        starts, ends = extents.starts.copy(), extents.ends.copy()
        for shard in np.unique(extents.shards).tolist():
            mine = np.flatnonzero(extents.shards == shard)
            bodies, first, last = self.load(shards[shard])
            places = np.searchsorted(bodies, extents.starts[mine])
            is_inside = places < len(bodies)
            found = np.minimum(places, len(bodies) - 1)
            is_inside &= bodies[found] < extents.ends[mine]
            # The first member begins at the sample's first header, which may be an extended one.
            begin = np.maximum(first[found], extents.starts[mine])
            end = last[found]
            if not is_inside.all() or (end > extents.ends[mine]).any():
                raise IndexMismatchError(
                    "the index of members does not match the index of samples",
                    remedy="run 'shardstream index --members' again",
                    shard=shards[shard].members_url,
                )
            has_any = end > 0
            starts[mine[has_any]], ends[mine[has_any]] = begin[has_any], end[has_any]
        return Extents(extents.shards, starts, ends)


def _spans(samples: Sequence[Sequence[tuple[str, int, int]]], fields: frozenset[str]) -> _Spans:
    """Return for each sample the offset of its first body, and start and end of its wanted members; 0 and 0 if it has none."""
    spans = np.zeros((3, len(samples)), dtype=np.int64)
    for number, members in enumerate(samples):
        before = start = end = 0
        for field, body, size in members:
            after = body + -(-size // BLOCK_BYTES) * BLOCK_BYTES
            if field.lower() in fields:
                start, end = (before if end == 0 else start), after
            before = after
        spans[:, number] = members[0][1], start, end
    return spans[0], spans[1], spans[2]
