"""Read and prefetch samples that are byte ranges of shards.

byte_ranges  samples in byte ranges of shards, as fetchers need them
coalesce     merge neighbouring samples into one range
local        copy samples of local shards, which are mapped to memory, and ask the kernel for their pages before
remote       prefetch by range requests within a byte budget
batch        range requests without prefetching
in_flight    send concurrent range requests; hedge slow ones
shared_blocks   memory of large samples that a worker shares with the main process
catalog      the base class of catalogs: chooses one of these fetchers
"""

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
