"""Match the samples of two catalogs by the keys in their columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from shardstream.catalog.base import Catalog, Numbers
from shardstream.catalog.sample_columns import read_all_columns
from shardstream.catalog.shard_catalog import ShardCatalog
from shardstream.catalog.subset_catalog import SubsetCatalog
from shardstream.catalog.table_catalog import TableCatalog
from shardstream.errors import OptionError
from shardstream.format import KEY_COLUMN, import_parquet

if TYPE_CHECKING:
    import pyarrow as pa


def read_column(catalog: Catalog, name: str) -> pa.Array | None:
    """Return a column of all samples, in order; None if the shards have no columns.

    Raises:
        OptionError: If some shards have no columns or lack this one, or pyarrow is not installed.
        IndexMismatchError: If columns were made of another shard.
        StorageError: If they cannot be read.
    """
    if isinstance(catalog, TableCatalog) and name == KEY_COLUMN:
        return catalog.keys
    if isinstance(catalog, SubsetCatalog):
        column = read_column(catalog.whole, name)
        return None if column is None else column.take(catalog.numbers)
    if not isinstance(catalog, ShardCatalog) or not len(catalog):
        return None
    if not catalog.storage.exists(catalog.shards[0].columns_url):
        return None
    import_parquet()
    return read_all_columns(catalog, [name])[name].combine_chunks()


def match_keys(keys: pa.Array, theirs: pa.Array, url: str) -> Numbers:
    """Return for each key the number of the sample of another dataset that has it; -1 for none.

    Args:
        keys: Keys to look up.
        theirs: Keys of the samples of the other dataset.
        url: A shard of it, for the message.

    Raises:
        OptionError: If several of its samples have one of the keys.
    """
    import pyarrow.compute as pc  # noqa: PLC0415  (an extra)

    numbers = pc.index_in(keys, value_set=theirs).fill_null(-1).to_numpy().astype(np.int64)
    wanted = np.flatnonzero(np.asarray(pc.is_in(theirs, value_set=keys)))
    repeated = np.setdiff1d(wanted, numbers)
    if len(repeated):
        raise OptionError(
            f"several samples have the key {theirs[int(repeated[0])].as_py()!r}, so that it cannot be joined; choose one "
            "with subset=",
            shard=url,
        )
    return cast("Numbers", numbers)
