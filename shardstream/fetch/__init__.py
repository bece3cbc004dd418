"""Read and prefetch samples that are byte ranges of shards."""

from shardstream.fetch.byte_ranges import FAR_READ_RATIO, Extents, IndexChunk, coalesce
from shardstream.fetch.catalog import Catalog
from shardstream.fetch.local import LocalFetcher, Readahead
from shardstream.fetch.remote import RangeFetcher

__all__ = [
    "FAR_READ_RATIO",
    "Catalog",
    "Extents",
    "IndexChunk",
    "LocalFetcher",
    "RangeFetcher",
    "Readahead",
    "coalesce",
]
