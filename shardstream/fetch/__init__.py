"""Read and prefetch samples that are byte ranges of shards."""

from shardstream.fetch.catalog import Catalog as Catalog
from shardstream.fetch.catalog import LocalFetcher as LocalFetcher
from shardstream.fetch.catalog import Readahead as Readahead
from shardstream.fetch.range_requests import FAR_READ_RATIO as FAR_READ_RATIO
from shardstream.fetch.range_requests import DaemonThreads as DaemonThreads
from shardstream.fetch.range_requests import Extents as Extents
from shardstream.fetch.range_requests import IndexChunk as IndexChunk
from shardstream.fetch.range_requests import coalesce as coalesce
from shardstream.fetch.remote import RangeFetcher as RangeFetcher
