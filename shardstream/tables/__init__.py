"""Samples of tables, read in place: rows of Parquet files and samples of MDS shards by number, without packing."""

from shardstream.tables.open_table import open_table as open_table
from shardstream.tables.open_table import table_source as table_source
