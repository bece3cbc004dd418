"""Several catalogs as one: the samples of a mix by number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import islice

import numpy as np

from shardstream.format.group import Sample
from shardstream.format.index import Offsets
from shardstream.format.manifest import ShardInfo, fingerprint
from shardstream.format.many import Stretch
from shardstream.storage.catalog import Catalog, Extents, Numbers
from shardstream.storage.filesystem import Storage


class JoinedCatalog:
    """Sample numbers of several datasets, one after the other; numbers past the end start again (a later pass).

    Args:
        parts: At least one.
    """

    def __init__(self, parts: Sequence[Catalog | JoinedCatalog]) -> None:
        self.parts = tuple(parts)
        self.firsts: Numbers = np.concatenate(([0], np.cumsum([len(part) for part in parts])))
        self._first_shards = np.concatenate(
            ([0], np.cumsum([len(part.shards) for part in parts]))
        ).tolist()
        self.shards: tuple[ShardInfo, ...] = tuple(shard for part in parts for shard in part.shards)

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all tars."""
        return sum(part.total_bytes for part in self.parts)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with any of the datasets."""
        return fingerprint(self.shards)

    def part_of(self, numbers: Numbers) -> Numbers:
        """Return which dataset each sample is of."""
        return np.searchsorted(self.firsts, numbers % len(self), side="right") - 1

    def extents(self, numbers: Numbers) -> Extents:
        """Return where samples are, in the order given."""
        within = numbers % len(self)
        parts = self.part_of(numbers)
        columns = Extents(*(np.empty_like(within) for _ in range(3)))
        for part in np.unique(parts).tolist():
            mine = parts == part
            shards, starts, ends = self.parts[part].extents(within[mine] - self.firsts[part])
            columns.shards[mine] = shards + self._first_shards[part]
            columns.starts[mine], columns.ends[mine] = starts, ends
        return columns

    def shards_of(self, numbers: Numbers) -> list[int]:
        """Return which shards some samples are in, each once."""
        within, parts = numbers % len(self), self.part_of(numbers)
        return [
            shard + self._first_shards[part]
            for part in np.unique(parts).tolist()
            for shard in self.parts[part].shards_of(within[parts == part] - self.firsts[part])
        ]

    def offsets(self, shard: int) -> Offsets:
        """Return the index of a shard, shape (n + 1,)."""
        part = int(np.searchsorted(self._first_shards, shard, side="right")) - 1
        return self.parts[part].offsets(shard - self._first_shards[part])

    def parse(self, stretches: Sequence[Stretch]) -> list[Sample | Exception]:
        """Return the samples of some stretches, one after the other, or what is wrong with them."""
        found: list[list[Sample | Exception]] = [[] for _ in stretches]
        shards = np.array([stretch.shard for stretch in stretches])
        parts = np.searchsorted(self._first_shards, shards, side="right") - 1
        for part in np.unique(parts).tolist():
            mine = np.flatnonzero(parts == part).tolist()
            first = self._first_shards[part]
            own = [stretches[i]._replace(shard=stretches[i].shard - first) for i in mine]
            samples = iter(self.parts[part].parse(own))
            for i in mine:
                found[i] = list(islice(samples, len(stretches[i].starts)))
        return [sample for each in found for sample in each]

    def storage_of(self, shard: int) -> Storage:
        """Return where a shard is stored."""
        part = int(np.searchsorted(self._first_shards, shard, side="right")) - 1
        return self.parts[part].storage_of(shard - self._first_shards[part])
