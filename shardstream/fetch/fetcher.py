"""The samples that are wanted now, wherever their bytes are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from shardstream.catalog import Catalog, Extents, Numbers
from shardstream.fetch.coalesce import coalesce
from shardstream.fetch.in_flight import RequestPool
from shardstream.fetch.readahead import Readahead
from shardstream.fetch.remote import RangeFetcher
from shardstream.format import (
    Columns,
    Found,
    Samples,
    ShardSlice,
    as_rows,
    find_samples,
    from_rows,
    is_worth_vectorizing,
    read_one,
    read_samples,
    restore_order,
)

# Of samples from which on it pays to look at many before any is copied; and so few that they say nothing about the next.
_LARGE_BYTES, _FEW = 16 << 10, 256


class Fetcher(Protocol):
    """Hands out samples, waiting for their bytes if need be."""

    def samples(self, numbers: Numbers) -> Samples:
        """Return for each number its sample, or what is wrong with it."""

    def find(self, numbers: Numbers) -> MappedSamples | None:
        """Return samples whose bytes are there to be copied when they are wanted; None where `samples` does better."""

    def stats(self) -> dict[str, float]:
        """Return what it has cost so far: ``read_bytes``, ``requests``, ``throttled`` and ``wait_s``."""

    def close(self) -> None:
        """Give back threads, maps and bytes."""


def open_fetcher(
    catalog: Catalog,
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
        return LocalFetcher(catalog, Readahead(catalog, iter(upcoming), prefetch_bytes))
    return RangeFetcher(catalog, iter(upcoming), prefetch_bytes=prefetch_bytes, hedges=hedge)


def open_batch_fetcher(catalog: Catalog) -> Fetcher:
    """Open a reader of batches that nobody announces, safe among threads.

    Args:
        catalog: The dataset.
    """
    if catalog.is_local:
        return LocalFetcher(catalog, Readahead(catalog, iter(()), 0))
    return BatchFetcher(catalog)


class BatchFetcher:
    """Reads batches of remote samples by range requests, and nothing ahead; safe among threads.

    Args:
        catalog: The dataset.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._pool = RequestPool(catalog, hedges=False)

    def samples(self, numbers: Numbers) -> Samples:
        """Return for each number its sample, or what is wrong with it.

        Raises:
            StorageError: If bytes are out of reach.
            IndexMismatchError: If they are not those of the manifest.
        """
        extents = self._catalog.extents(numbers)
        rows: dict[int, object] = {}
        for in_flight in [self._pool.submit(span) for span in coalesce(extents)]:
            span, data = in_flight.span, self._pool.wait_for_range(in_flight)
            starts, ends = extents.starts[span.places], extents.ends[span.places]
            url = self._catalog.url_of(span.shard)
            shard_slice = ShardSlice(span.shard, url, data, span.start, starts, ends)
            found = as_rows(read_samples([shard_slice]))
            rows.update(zip(span.places.tolist(), found, strict=True))
        return from_rows([rows[place] for place in range(len(numbers))])

    def find(self, numbers: Numbers) -> None:
        """Return nothing: `samples` copies no more than was asked for."""

    def stats(self) -> dict[str, float]:
        """Return what it has cost so far."""
        return self._pool.stats()

    def close(self) -> None:
        """Send no more requests; those in flight end by themselves."""
        self._pool.close()


class MappedSamples:
    """Samples found in mapped shards, copied when they are taken.

    Args:
        catalog: The dataset.
        shards: Of each sample, shape (n,).
        found: The samples.
    """

    def __init__(self, catalog: Catalog, shards: Numbers, found: Found) -> None:
        self._catalog, self._shards, self._found = catalog, shards, found

    def __getitem__(self, taken: slice) -> Columns:
        """Copy some of them.

        Raises:
            ChangedError: If a shard was overwritten since the dataset was opened.
        """
        columns = self._found[taken]
        self._catalog.check_unchanged(set(self._shards[taken].tolist()))
        return columns


class LocalFetcher:
    """Local tars, mapped to memory.

    Args:
        catalog: The dataset.
        readahead: Has pages read before they are needed.
    """

    def __init__(self, catalog: Catalog, readahead: Readahead) -> None:
        self._catalog, self._readahead = catalog, readahead
        self._read_bytes = 0
        mean_bytes = catalog.total_bytes / max(1, len(catalog))
        self._is_lazy = mean_bytes >= _LARGE_BYTES

    def samples(self, numbers: Numbers) -> Samples:
        """Return for each number its sample, or what is wrong with it."""
        if not len(numbers):
            return []
        extents = self._catalog.extents(numbers)
        found = self._read(*extents)
        self._catalog.check_unchanged(set(extents.shards.tolist()))
        self._record_read(extents)
        return found

    def find(self, numbers: Numbers) -> MappedSamples | None:
        """Return samples whose bytes are there to be copied when they are wanted; None where `samples` does better.

        Photos are looked at by the window: in a batch there are too few of each shard to be read side by side.
        """
        if not self._is_lazy or not len(numbers):
            return None
        extents = self._catalog.extents(numbers)
        by_shard = np.argsort(extents.shards, kind="stable")
        found = find_samples(self._shard_slices(extents, by_shard))
        if found is None:  # the next ones will hardly be other ones
            self._is_lazy = len(numbers) < _FEW
            return None
        self._record_read(extents)
        return MappedSamples(self._catalog, extents.shards, found.restore_order(by_shard))

    def _record_read(self, extents: Extents) -> None:
        nbytes = int((extents.ends - extents.starts).sum())
        self._read_bytes += nbytes
        self._readahead.record_read(nbytes)

    def _read(self, shards: Numbers, starts: Numbers, ends: Numbers) -> Samples:
        if not is_worth_vectorizing(len(shards), len(set(shards.tolist()))):
            places = zip(shards.tolist(), starts.tolist(), ends.tolist(), strict=True)
            return [
                read_one(self._catalog.map_shard(n), 0, a, b, self._catalog.url_of(n))
                for n, a, b in places
            ]
        by_shard = np.argsort(shards, kind="stable")
        shard_slices = self._shard_slices(Extents(shards, starts, ends), by_shard)
        return restore_order(read_samples(shard_slices), by_shard)

    def _shard_slices(self, extents: Extents, by_shard: Numbers) -> list[ShardSlice]:
        shards, starts, ends = (column[by_shard] for column in extents)
        runs = np.flatnonzero(np.diff(shards, prepend=-1)).tolist()
        shard_slices = []
        for first, last in itertools.pairwise([*runs, len(shards)]):
            shard = int(shards[first])
            url, tar = self._catalog.url_of(shard), self._catalog.map_shard(shard)
            shard_slices.append(
                ShardSlice(shard, url, tar, 0, starts[first:last], ends[first:last])
            )
        return shard_slices

    def stats(self) -> dict[str, float]:
        """Return what it has cost so far."""
        return {"read_bytes": self._read_bytes}

    def close(self) -> None:
        """Nothing is to be given back: maps are the catalog's."""
