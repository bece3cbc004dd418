"""Read and prefetch samples by number.

fetcher      choose memory maps of local shards, or range reads
readahead    ask the kernel to load pages of local shards before use
remote       prefetch by range requests within a byte budget
coalesce     merge neighbouring samples into one range
join_fetcher  read several catalogs, and join their samples
in_flight    send concurrent range requests; hedge slow ones
shared_blocks   memory of large samples that a worker shares with the main process
"""

from shardstream.fetch.coalesce import coalesce
from shardstream.fetch.fetcher import (
    Fetcher,
    LocalFetcher,
    MappedSamples,
    open_batch_fetcher,
    open_fetcher,
)
from shardstream.fetch.in_flight import share_requests
from shardstream.fetch.readahead import Readahead
from shardstream.fetch.remote import RangeFetcher
from shardstream.fetch.shared_blocks import MIN_LARGE_BYTES, SharedBlocks, SharedBytes

__all__ = [
    "MIN_LARGE_BYTES",
    "Fetcher",
    "LocalFetcher",
    "MappedSamples",
    "RangeFetcher",
    "Readahead",
    "SharedBlocks",
    "SharedBytes",
    "coalesce",
    "open_batch_fetcher",
    "open_fetcher",
    "share_requests",
]
