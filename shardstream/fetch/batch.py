"""Read batches of remote samples that are not known in advance."""

from __future__ import annotations

from shardstream.fetch.byte_ranges import ByteRanges
from shardstream.fetch.coalesce import coalesce
from shardstream.fetch.in_flight import RequestPool
from shardstream.format import Rows, ShardSlice, as_rows, from_rows, read_samples
from shardstream.samples import Fetcher, Numbers


class BatchFetcher(Fetcher):
    """Read batches of remote samples by range requests without prefetching; thread-safe.

    Args:
        catalog: The dataset.
        max_read_ratio: As `ByteRanges.max_read_ratio`.
    """

    def __init__(self, catalog: ByteRanges, max_read_ratio: float | None = None) -> None:
        self._catalog, self._max_read_ratio = catalog, max_read_ratio
        self._pool = RequestPool(catalog, hedges=False)

    def samples(self, numbers: Numbers) -> Rows:
        """Return the sample of each number, or its error.

        Raises:
            StorageError: If bytes cannot be read.
            IndexMismatchError: If they do not match the manifest.
        """
        extents = self._catalog.extents(numbers % max(1, len(self._catalog)))
        rows: dict[int, object] = {}
        for in_flight in [
            self._pool.submit(span) for span in coalesce(extents, self._max_read_ratio)
        ]:
            span = in_flight.span
            data = self._pool.wait_for_range(in_flight)
            starts, ends = extents.starts[span.places], extents.ends[span.places]
            url = self._catalog.url_of(span.shard)
            shard_slice = ShardSlice(span.shard, url, data, span.start, starts, ends)
            found = as_rows(read_samples([shard_slice]))
            rows.update(zip(span.places.tolist(), found, strict=True))
        return from_rows([rows[place] for place in range(len(numbers))])

    def stats(self) -> dict[str, float]:
        """Return what it has cost so far."""
        return self._pool.stats()

    def close(self) -> None:
        """Send no more requests, without waiting for those in flight."""
        self._pool.close()
