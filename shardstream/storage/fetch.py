"""Bytes of many samples, ahead of their use: few large range reads, several in flight, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol

from shardstream.errors import StorageError
from shardstream.format.tar import Buffer
from shardstream.storage.catalog import Catalog, Extents, Numbers, map_file
from shardstream.storage.joined import JoinedCatalog
from shardstream.storage.retry import fetch

_RANGE_BYTES = (
    4 << 20
)  # of one request: large enough to hide latency, small enough to spread over connections
GAP_BYTES = 256 << 10
"""Read through a gap of that size rather than pay another round trip."""

_THREADS = 8
_MAPS_KEPT = 512
_STALL_S = 120.0


Place = tuple[Buffer, int, int, int, str]
"""Where a sample can be read now: the arguments of `format.group.read_sample`."""


class Fetcher(Protocol):
    """Hands out the places of samples, waiting for their bytes if need be."""

    def places(self, numbers: Numbers) -> Iterator[Place]:
        """Yield the place of each sample, in the order given."""

    def close(self) -> None:
        """Give back threads, maps and bytes."""


def open_fetcher(
    catalog: Catalog | JoinedCatalog,
    upcoming: Iterable[Numbers],
    *,
    prefetch_bytes: int,
    gap_bytes: int = GAP_BYTES,
) -> Fetcher:
    """Open what fits the data: memory maps if all of it is on this machine, else range reads ahead.

    Args:
        catalog: The dataset.
        upcoming: Sample numbers that will be asked for, in groups that are read together, in order of first need.
        prefetch_bytes: How much to hold ahead of use.
        gap_bytes: Gaps between samples that are read through.
    """
    if all(
        catalog.storage_of(number).local_path(shard.url)
        for number, shard in enumerate(catalog.shards)
    ):
        return LocalFetcher(catalog)
    return RangeFetcher(catalog, iter(upcoming), prefetch_bytes=prefetch_bytes, gap_bytes=gap_bytes)


class LocalFetcher:
    """Local tars, mapped to memory: the page cache is the read-ahead."""

    def __init__(self, catalog: Catalog | JoinedCatalog) -> None:
        self._catalog = catalog
        self._maps: OrderedDict[int, tuple[Buffer, str]] = OrderedDict()

    def places(self, numbers: Numbers) -> Iterator[Place]:
        """Yield the place of each sample."""
        shards, starts, ends = self._catalog.extents(numbers)
        for shard, start, end in zip(shards.tolist(), starts.tolist(), ends.tolist(), strict=True):
            tar, url = self._maps.get(shard) or self._map(shard)
            yield tar, 0, start, end, url

    def close(self) -> None:
        """Forget the maps."""
        self._maps.clear()

    def _map(self, shard: int) -> tuple[Buffer, str]:
        url = self._catalog.shards[shard].url
        tar = map_file(self._catalog.storage_of(shard).local_path(url) or url, url)
        if len(self._maps) >= _MAPS_KEPT:
            self._maps.popitem(last=False)
        self._maps[shard] = tar, url
        return tar, url


class _Range:
    """One request for consecutive samples of a shard."""

    __slots__ = ("data", "end", "future", "left", "shard", "start", "url")

    def __init__(self, shard: int, start: int, end: int) -> None:
        self.shard, self.start, self.end = shard, start, end
        self.left = 1
        self.data = b""
        self.url = ""
        self.future: Future[bytes] | None = None


def coalesce(extents: Extents, gap_bytes: int = GAP_BYTES) -> list[tuple[_Range, list[int]]]:
    """Join samples that are near each other in a shard to ranges of at most 4 MiB, or one larger sample.

    Returns:
        Each range with the positions, in ``extents``, of its samples.
    """
    order = sorted(
        range(len(extents.shards)),
        key=list(zip(*(e.tolist() for e in extents), strict=True)).__getitem__,
    )
    shards, starts, ends = (column.tolist() for column in extents)
    ranges: list[tuple[_Range, list[int]]] = []
    for i in order:
        if ranges:
            last, members = ranges[-1]
            near = shards[i] == last.shard and starts[i] - last.end <= gap_bytes
            if near and ends[i] - last.start <= _RANGE_BYTES:
                last.end = max(last.end, ends[i])
                last.left += 1
                members.append(i)
                continue
        ranges.append((_Range(shards[i], starts[i], ends[i]), [i]))
    return ranges


class RangeFetcher:
    """Remote tars, by range reads ahead of use."""

    def __init__(
        self,
        catalog: Catalog | JoinedCatalog,
        upcoming: Iterator[Numbers],
        *,
        prefetch_bytes: int,
        gap_bytes: int = GAP_BYTES,
    ) -> None:
        self._catalog = catalog
        self._upcoming = upcoming
        self._budget = prefetch_bytes
        self._gap_bytes = gap_bytes
        self._held: dict[int, tuple[_Range, int, int]] = {}
        self._held_bytes = 0
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-fetch")

    def places(self, numbers: Numbers) -> Iterator[Place]:
        """Yield the place of each sample, once its bytes have come."""
        for number in numbers.tolist():
            while self._held_bytes < self._budget and self._request_next():
                pass
            while number not in self._held:
                if not self._request_next():
                    self._request(numbers)
            span, start, end = self._held.pop(number)
            self._wait(span)
            span.left -= 1
            if span.left == 0:
                self._held_bytes -= span.end - span.start
            yield span.data, span.start, start, end, span.url

    def close(self) -> None:
        """Drop what is held; requests in flight end by themselves."""
        self._held.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _request_next(self) -> bool:
        numbers = next(self._upcoming, None)
        if numbers is None:
            return False
        self._request(numbers)
        return True

    def _request(self, numbers: Numbers) -> None:
        # Indexes that are not in memory come side by side, not one after the other.
        list(self._pool.map(self._catalog.offsets, self._catalog.shards_of(numbers)))
        extents = self._catalog.extents(numbers)
        starts, ends, names = extents.starts.tolist(), extents.ends.tolist(), numbers.tolist()
        for span, members in coalesce(extents, self._gap_bytes):
            span.url = self._catalog.shards[span.shard].url
            span.future = self._pool.submit(
                fetch, self._catalog.storage_of(span.shard), span.url, span.start, span.end
            )
            self._held_bytes += span.end - span.start
            self._held.update((names[i], (span, starts[i], ends[i])) for i in members)

    def _forget(self, span: _Range) -> None:
        """Let what a failed request was for be asked for again."""
        self._held = {number: entry for number, entry in self._held.items() if entry[0] is not span}
        self._held_bytes -= span.end - span.start

    def _wait(self, span: _Range) -> None:
        if span.future is None:
            return
        try:
            span.data = span.future.result(timeout=_STALL_S)
        except StorageError:
            self._forget(span)
            raise
        except FutureTimeoutError as error:
            self._forget(span)
            raise StorageError(
                f"no answer for {span.end - span.start} bytes in {_STALL_S:.0f} s; check the server and the network",
                shard=span.url,
                offset=span.start,
            ) from error
        span.future = None
