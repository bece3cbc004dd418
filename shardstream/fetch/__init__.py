"""Read and prefetch samples that are byte ranges of shards."""

from shardstream.fetch.byte_ranges import FAR_READ_RATIO as FAR_READ_RATIO
from shardstream.fetch.byte_ranges import Extents as Extents
from shardstream.fetch.byte_ranges import IndexChunk as IndexChunk
from shardstream.fetch.byte_ranges import coalesce as coalesce
from shardstream.fetch.catalog import Catalog as Catalog
from shardstream.fetch.local import LocalFetcher as LocalFetcher
from shardstream.fetch.local import Readahead as Readahead
from shardstream.fetch.remote import RangeFetcher as RangeFetcher
