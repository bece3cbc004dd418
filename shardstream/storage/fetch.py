"""The samples that are wanted now, wherever their bytes are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from shardstream.format.many import Samples, Stretch, are_many, in_place, read_one, read_samples
from shardstream.storage.ahead import RangeFetcher
from shardstream.storage.catalog import Numbers
from shardstream.storage.joined import AnyCatalog
from shardstream.storage.pages import PagesAhead


class Fetcher(Protocol):
    """Hands out samples, waiting for their bytes if need be."""

    def samples(self, numbers: Numbers) -> Samples:
        """Return for each number its sample, or what is wrong with it."""

    def stats(self) -> dict[str, float]:
        """Return what it has cost so far: ``read_bytes``, ``requests``, ``throttled`` and ``wait_s``."""

    def close(self) -> None:
        """Give back threads, maps and bytes."""


def open_fetcher(
    catalog: AnyCatalog,
    upcoming: Iterable[Numbers],
    *,
    prefetch_bytes: int,
    hedge: bool = False,
) -> Fetcher:
    """Open what fits the data: memory maps if all of it is on this machine, else range reads ahead.

    Args:
        catalog: The dataset.
        upcoming: Sample numbers that will be asked for, in groups that are read together, in order of first need.
        prefetch_bytes: How much to hold, or have asked for, before it is used.
        hedge: Ask a second time where an answer is late.
    """
    if catalog.is_local:
        return LocalFetcher(catalog, PagesAhead(catalog, iter(upcoming), prefetch_bytes))
    return RangeFetcher(catalog, iter(upcoming), prefetch_bytes=prefetch_bytes, hedges=hedge)


class LocalFetcher:
    """Local tars, mapped to memory.

    Args:
        catalog: The dataset.
        ahead: Has pages read before they are needed.
    """

    def __init__(self, catalog: AnyCatalog, ahead: PagesAhead) -> None:
        self._catalog, self._ahead = catalog, ahead
        self._read_bytes = 0

    def samples(self, numbers: Numbers) -> Samples:
        """Return for each number its sample, or what is wrong with it."""
        if not len(numbers):
            return []
        extents = self._catalog.extents(numbers)
        nbytes = int((extents.ends - extents.starts).sum())
        self._read_bytes += nbytes
        found = self._read(*extents)
        self._ahead.took(nbytes)
        return found

    def _read(self, shards: Numbers, starts: Numbers, ends: Numbers) -> Samples:
        if not are_many(len(shards), len(set(shards.tolist()))):
            places = zip(shards.tolist(), starts.tolist(), ends.tolist(), strict=True)
            return [
                read_one(self._catalog.map_shard(n), 0, a, b, self._catalog.url_of(n))
                for n, a, b in places
            ]
        by_shard = np.argsort(shards, kind="stable")
        stretches = []
        for mine in np.split(by_shard, np.flatnonzero(np.diff(shards[by_shard])) + 1):
            shard = int(shards[mine[0]])
            url, tar = self._catalog.url_of(shard), self._catalog.map_shard(shard)
            stretches.append(Stretch(shard, url, tar, 0, starts[mine], ends[mine]))
        return in_place(read_samples(stretches), by_shard)

    def stats(self) -> dict[str, float]:
        """Return what it has cost so far."""
        return {"read_bytes": self._read_bytes}

    def close(self) -> None:
        """Nothing is to be given back: maps are the catalog's."""
