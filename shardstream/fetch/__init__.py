"""Samples by number, read ahead of their use.

fetcher      open what fits the data: memory maps of local shards, or range reads
readahead    ask the system to load pages of local shards that will be used soon
remote       plan range requests ahead of use, within a budget of bytes
coalesce     join samples that are near each other to one range
in_flight    send range requests side by side; hedge the late ones
"""

from shardstream.fetch.coalesce import coalesce
from shardstream.fetch.fetcher import (
    Fetcher,
    LocalFetcher,
    MappedSamples,
    open_batch_fetcher,
    open_fetcher,
)
from shardstream.fetch.readahead import Readahead
from shardstream.fetch.remote import RangeFetcher

__all__ = [
    "Fetcher",
    "LocalFetcher",
    "MappedSamples",
    "RangeFetcher",
    "Readahead",
    "coalesce",
    "open_batch_fetcher",
    "open_fetcher",
]
