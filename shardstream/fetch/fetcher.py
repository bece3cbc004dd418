"""Fetch samples by number from local or remote shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import numpy as np

from shardstream.catalog import Catalog, Extents, JoinCatalog, Numbers, TableCatalog
from shardstream.fetch.coalesce import coalesce
from shardstream.fetch.in_flight import RequestPool
from shardstream.fetch.join_fetcher import JoinFetcher, TableFetcher
from shardstream.fetch.readahead import Readahead
from shardstream.fetch.remote import RangeFetcher
from shardstream.fetch.shared_blocks import LARGE_BYTES, SharedBlocks
from shardstream.format import (
    Columns,
    JoinedFields,
    LazyColumns,
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
from shardstream.process_memory import keep_freed_memory

# Number of samples too small to judge whether finding many before copying any is faster.
_MIN_SAMPLES_TO_JUDGE = 256
_MIN_PREFETCH_BYTES = 1 << 20  # of each part of a join


class Fetcher(Protocol):
    """Return samples, after waiting for their bytes if necessary."""

    def samples(self, numbers: Numbers) -> Samples:
        """Return the sample of each number, or its error."""

    def find(self, numbers: Numbers) -> MappedSamples | None:
        """Return samples whose bytes are copied at access; None if `samples` is faster."""

    def locate(self, numbers: Numbers) -> MappedSamples | None:
        """Return samples whose bytes are copied at access; None unless they are local and of one form."""

    def stats(self) -> dict[str, float]:
        """Return the statistics so far: ``read_bytes``, ``requests``, ``throttled`` and ``wait_s``."""

    def close(self) -> None:
        """Release threads, maps and buffers."""


def open_fetcher(
    catalog: Catalog,
    upcoming: Iterable[Numbers],
    *,
    prefetch_bytes: int,
    hedge: bool = False,
    num_workers: int = 1,
    blocks: SharedBlocks | None = None,
) -> Fetcher:
    """Open a fetcher: memory maps if all shards are local, else prefetching range reads.

    Args:
        catalog: The dataset.
        upcoming: Sample numbers that will be requested, in groups that are read together, in order of first use.
        prefetch_bytes: Maximum of bytes in flight or prefetched.
        hedge: Send a second request when a response is slow.
        num_workers: Processes that read at the same time on this machine.
        blocks: Shared memory for large samples, whose fields become `SharedBytes`; None for ``bytes``.
    """
    if isinstance(catalog, JoinCatalog):
        return JoinFetcher(
            catalog,
            upcoming,
            lambda part, groups, share: open_fetcher(
                part,
                groups,
                prefetch_bytes=max(_MIN_PREFETCH_BYTES, int(prefetch_bytes * share)),
                hedge=hedge,
                num_workers=num_workers,
            ),
        )
    if isinstance(catalog, TableCatalog):
        return TableFetcher(catalog)
    if catalog.total_bytes < LARGE_BYTES * len(catalog):
        blocks = None
    if catalog.is_local:
        keep_freed_memory()  # of the samples that are parsed or copied together
        return LocalFetcher(catalog, Readahead(catalog, iter(upcoming), prefetch_bytes), blocks)
    return RangeFetcher(
        catalog,
        iter(upcoming),
        prefetch_bytes=prefetch_bytes,
        hedges=hedge,
        num_workers=num_workers,
        blocks=blocks,
    )


def open_batch_fetcher(catalog: Catalog) -> Fetcher:
    """Open a thread-safe reader for batches that are not known in advance.

    Args:
        catalog: The dataset.
    """
    if isinstance(catalog, JoinCatalog):
        return JoinFetcher(catalog, (), lambda part, _groups, _share: open_batch_fetcher(part))
    if isinstance(catalog, TableCatalog):
        return TableFetcher(catalog)
    if catalog.is_local:
        return LocalFetcher(catalog, Readahead(catalog, iter(()), 0))
    return BatchFetcher(catalog)


class BatchFetcher:
    """Read batches of remote samples by range requests without prefetching; thread-safe.

    Args:
        catalog: The dataset.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._pool = RequestPool(catalog, hedges=False)

    def samples(self, numbers: Numbers) -> Samples:
        """Return the sample of each number, or its error.

        Raises:
            StorageError: If bytes cannot be read.
            IndexMismatchError: If they do not match the manifest.
        """
        extents = self._catalog.extents(numbers)
        rows: dict[int, object] = {}
        for in_flight in [
            self._pool.submit(span) for span in coalesce(extents, self._catalog.max_read_ratio)
        ]:
            span = in_flight.span
            data = cast("bytes | memoryview", self._pool.wait_for_range(in_flight))  # not in blocks
            starts, ends = extents.starts[span.places], extents.ends[span.places]
            url = self._catalog.url_of(span.shard)
            shard_slice = ShardSlice(span.shard, url, data, span.start, starts, ends)
            found = as_rows(read_samples([shard_slice]))
            rows.update(zip(span.places.tolist(), found, strict=True))
        return from_rows([rows[place] for place in range(len(numbers))])

    def find(self, numbers: Numbers) -> None:
        """Return None: `samples` copies only the requested samples."""

    def locate(self, numbers: Numbers) -> None:
        """Return None: the samples are remote."""

    def stats(self) -> dict[str, float]:
        """Return what it has cost so far."""
        return self._pool.stats()

    def close(self) -> None:
        """Send no more requests, without waiting for those in flight."""
        self._pool.close()


class MappedSamples:
    """Samples found in mapped shards, copied at access.

    Args:
        catalog: The dataset.
        shards: Shard of each sample, shape (n,).
        found: Offsets of the samples' fields.
        blocks: As in `open_fetcher`.
    """

    def __init__(
        self,
        catalog: Catalog,
        shards: Numbers,
        found: LazyColumns,
        blocks: SharedBlocks | None = None,
    ) -> None:
        self._catalog, self._shards, self._found = catalog, shards, found
        self._blocks = blocks

    def __getitem__(self, taken: slice) -> Columns:
        """Copy a slice of the samples.

        Raises:
            ChangedError: If a shard was overwritten since the dataset was opened.
        """
        hold = None if self._blocks is None else self._blocks.hold
        # A copy of pages past the end of a file that was cut kills the process (SIGBUS).
        self._check(taken)
        columns = self._found.copy(taken, hold)
        self._check(taken)  # it may have been overwritten meanwhile
        return columns

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that all samples have."""
        return self._found.fields

    def select(self, fields: Sequence[str]) -> MappedSamples:
        """Return the samples with some of their fields only; the bytes of the others are not read."""
        return MappedSamples(self._catalog, self._shards, self._found.select(fields), self._blocks)

    def sizes(self, fields: Sequence[str] | None = None) -> Numbers:
        """Return the bytes of each sample's fields, shape (n,); of all fields by default."""
        return self._found.sizes(fields)

    def join(self, taken: slice, fields: Sequence[str] | None = None) -> JoinedFields:
        """Copy fields of a slice of the samples to one buffer each.

        Raises:
            ChangedError: If a shard was overwritten since the dataset was opened.
        """
        self._check(taken)
        joined = self._found.join(taken, fields)
        self._check(taken)
        return joined

    def _check(self, taken: slice) -> None:
        self._catalog.check_unchanged(set(self._shards[taken].tolist()))


class LocalFetcher:
    """Read samples from local tars that are mapped to memory.

    Args:
        catalog: The dataset.
        readahead: Loads pages before they are needed.
        blocks: As in `open_fetcher`.
    """

    def __init__(
        self, catalog: Catalog, readahead: Readahead, blocks: SharedBlocks | None = None
    ) -> None:
        self._catalog, self._readahead, self._blocks = catalog, readahead, blocks
        self._read_bytes = 0
        self._is_lazy = catalog.total_bytes >= LARGE_BYTES * max(1, len(catalog))

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
        """Return samples whose bytes are copied at access; None if `samples` is faster.

        Large samples are found for a whole window at once: one batch has too few of each shard to vectorise.
        """
        if not self._is_lazy or not len(numbers):
            return None
        found = self.locate(numbers)
        if found is None:  # the next samples will probably not fit either
            self._is_lazy = len(numbers) < _MIN_SAMPLES_TO_JUDGE
        return found

    def locate(self, numbers: Numbers) -> MappedSamples | None:
        """Return samples whose bytes are copied at access; None unless all have the form of the first."""
        if not len(numbers):
            return None
        extents = self._catalog.extents(numbers)
        by_shard = np.argsort(extents.shards, kind="stable")
        found = find_samples(self._shard_slices(extents, by_shard))
        if found is None:
            return None
        self._record_read(extents)
        found = found.restore_order(by_shard)
        return MappedSamples(self._catalog, extents.shards, found, self._blocks)

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
        """Release nothing: the catalog owns the maps."""
