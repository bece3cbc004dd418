"""The source of tables that a dataset reads in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from shardstream.catalog import choose_samples
from shardstream.errors import OptionError
from shardstream.pipeline import SamplesSource, check_fields, refuse_options
from shardstream.storage import Storage, Urls

TABLE_SUFFIXES = (".parquet", ".mds", ".mds.zstd", ".mds.gz", ".mds.bz2")
"""Ends of the names of files that are read in place."""


def table_source(
    urls: Urls,
    storage: Storage,
    fields: Sequence[str] | Mapping[str, str] | None,
    of_shards: object,
    choice: Mapping[str, Any],
    ordered: partial[SamplesSource],
) -> SamplesSource:
    """Return the source of tables that are read in place.

    Raises:
        OptionError: If an option is for shards; or as `open_table`.
    """
    from shardstream.tables import open_table  # noqa: PLC0415  (0.1 s, for tables only)

    if of_shards:
        raise OptionError("version= and follow= are for shards, not for tables; pack them first")
    reason = "on tables that are read in place"
    read = ordered.keywords["reading"]
    no_index = ["index"] if read.index == "ignore" else []  # row groups are read by number
    refuse_options(read, ["lazy", "verify", *no_index], reason)
    if fields is not None and not isinstance(fields, Mapping):
        check_fields(fields, None, "the table", alternatives=False)
    samples = open_table(urls, storage, fields)
    if choice["where"] is not None and not samples.column_names():
        raise OptionError(
            "where= compares columns, of which MDS has none; use .select(), which reads all samples, or pack them with columns="
        )
    samples = choose_samples(samples, choice["subset"], choice["where"])
    return ordered(samples=samples).drawn(choice["weights"])
