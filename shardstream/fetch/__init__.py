"""Read and prefetch samples that are byte ranges of shards."""

from shardstream.fetch.byte_ranges import FAR_READ_RATIO, Extents, IndexChunk
from shardstream.fetch.catalog import Catalog
from shardstream.fetch.coalesce import coalesce
from shardstream.fetch.in_flight import share_requests
from shardstream.fetch.local import LocalFetcher, Readahead
from shardstream.fetch.remote import RangeFetcher
from shardstream.fetch.shared_blocks import MIN_LARGE_BYTES, SharedBlocks, SharedBytes

__all__ = [
    "FAR_READ_RATIO",
    "MIN_LARGE_BYTES",
    "Catalog",
    "Extents",
    "IndexChunk",
    "LocalFetcher",
    "RangeFetcher",
    "Readahead",
    "SharedBlocks",
    "SharedBytes",
    "coalesce",
    "share_requests",
]
