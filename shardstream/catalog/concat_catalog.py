"""Join several catalogs to one, for the samples of a mix."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from shardstream.catalog.base import Catalog, Extents, IndexChunk, Numbers
from shardstream.format import Buffer
from shardstream.storage import AdaptiveLimit, ReceiveBuffer, Storage


class ConcatCatalog(Catalog):
    """Samples of several datasets, one after the other; numbers past the end start again (a later pass).

    Args:
        parts: Catalogs to join, at least one.
    """

    def __init__(self, parts: Sequence[Catalog]) -> None:
        self.parts = tuple(parts)
        self.firsts: Numbers = np.concatenate(([0], np.cumsum([len(part) for part in parts])))
        self._first_shards = np.concatenate(
            ([0], np.cumsum([part.num_shards for part in parts]))
        ).tolist()
        self.can_coalesce: bool = all(part.can_coalesce for part in parts)
        self.threads: int = max(part.threads for part in parts)
        self.max_prefetch_samples: int = max(part.max_prefetch_samples for part in parts)
        ratios = [part.max_read_ratio for part in parts if part.max_read_ratio is not None]
        self.max_read_ratio: float | None = min(ratios, default=None)
        self.is_local = all(part.is_local for part in parts)
        self.timeout_s = max(part.timeout_s for part in parts)

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @property
    def storage(self) -> Storage:
        """The storage of the first part."""
        return self.parts[0].storage

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return int(self._first_shards[-1])

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tars."""
        return sum(part.total_bytes for part in self.parts)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with any of the datasets."""
        return hashlib.sha256(
            " ".join(part.fingerprint for part in self.parts).encode()
        ).hexdigest()[:16]

    @cached_property
    def checksums(self) -> list[str | None]:
        """Checksums of each dataset."""
        return [one for part in self.parts for one in part.checksums]

    def part_of(self, numbers: Numbers) -> Numbers:
        """Return the number of the part of each sample."""
        return np.searchsorted(self.firsts, numbers % len(self), side="right") - 1

    def extents(self, numbers: Numbers | Sequence[int]) -> Extents:
        """Return the byte ranges of samples, in the order given."""
        wanted = np.asarray(numbers, dtype=np.int64)
        within, parts = wanted % len(self), self.part_of(wanted)
        columns = Extents(*(np.empty_like(within) for _ in range(3)))
        for part in np.unique(parts).tolist():
            mine = parts == part
            shards, starts, ends = self.parts[part].extents(within[mine] - self.firsts[part])
            columns.shards[mine] = shards + self._first_shards[part]
            columns.starts[mine], columns.ends[mine] = starts, ends
        return columns

    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return the shard of each sample, shape (n,)."""
        within, parts = numbers % len(self), self.part_of(numbers)
        found = np.empty_like(within)
        for part in np.unique(parts).tolist():
            mine = parts == part
            shards = self.parts[part].find_shards(within[mine] - self.firsts[part])
            found[mine] = shards + self._first_shards[part]
        return found

    def index_chunks(self, numbers: Numbers) -> list[IndexChunk]:
        """Return the parts of indexes that `extents` needs for some samples."""
        within, parts = numbers % len(self), self.part_of(numbers)
        return [
            IndexChunk(chunk.shard + self._first_shards[part], chunk.number)
            for part in np.unique(parts).tolist()
            for chunk in self.parts[part].index_chunks(within[parts == part] - self.firsts[part])
        ]

    def load_index(self, chunk: IndexChunk) -> None:
        """Read a part of an index."""
        part, within = self._within(chunk.shard)
        part.load_index(IndexChunk(within, chunk.number))

    def url_of(self, shard: int) -> str:
        """Return the URL of a shard."""
        part, within = self._within(shard)
        return part.url_of(within)

    def map_shard(self, shard: int) -> Buffer:
        """Map a local shard to memory, as `ShardCatalog.map_shard`."""
        part, within = self._within(shard)
        return part.map_shard(within)

    def check_unchanged(self, shards: Iterable[int]) -> None:
        """Check that local shards are unchanged, as `ShardCatalog.check_unchanged`."""
        for shard in shards:
            part, within = self._within(shard)
            part.check_unchanged([within])

    def check_manifests(self) -> None:
        """Check that remote manifests still list their shards, as `ShardCatalog.check_manifests`."""
        for part in self.parts:
            part.check_manifests()

    def fetch(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None = None
    ) -> bytes | memoryview:
        """Read some bytes of a shard, as `ShardCatalog.fetch`."""
        part, within = self._within(shard)
        return part.fetch(within, start, end, concurrency)

    def fetch_into(
        self,
        buffer: ReceiveBuffer,
        shard: int,
        start: int,
        end: int,
        concurrency: AdaptiveLimit | None = None,
    ) -> None:
        """Read some bytes of a shard into memory."""
        part, within = self._within(shard)
        part.fetch_into(buffer, within, start, end, concurrency)

    def _within(self, shard: int) -> tuple[Catalog, int]:
        """Return the part that contains a shard, and the shard's number in it."""
        part = int(np.searchsorted(self._first_shards, shard, side="right")) - 1
        return self.parts[part], shard - self._first_shards[part]
