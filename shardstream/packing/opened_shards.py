"""Open shards that are read by number, with an identity that changes when they do."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from shardstream.catalog import ShardCatalog, lacks_index
from shardstream.errors import OptionError, plural
from shardstream.packing.sources.source import fingerprint_of
from shardstream.storage import LocatedShards, Storage, Urls, locate_shards, parent_url


class OpenedShards(NamedTuple):
    """Shards that have been opened."""

    located: LocatedShards
    catalog: ShardCatalog
    identity: str
    """Changes with the shards: their names, counts and sizes, and their checksums, else their times or ETags."""

    @property
    def title(self) -> str:
        """Number of shards, and the folder of the first, for reports."""
        catalog = self.catalog
        return f"{plural(catalog.num_shards, 'shard')} of {parent_url(catalog.url_of(0))}"


def open_shards(source: Urls, options: Mapping[str, Any] | None) -> OpenedShards:
    """Open shards by their indexes.

    Args:
        source: Shards as for `ShardDataset`.
        options: ``storage_options`` of fsspec.

    Raises:
        OptionError: If a shard has no index, or there are no samples.
        StorageError: If they cannot be reached.
    """
    storage = Storage(options)
    located = locate_shards(source, storage)
    bare = lacks_index(located, storage)
    if bare is not None:
        raise OptionError(
            "this shard cannot be read by number; run 'shardstream index' on plain tars, and 'shardstream pack' on compressed ones",
            shard=bare,
        )
    catalog = ShardCatalog(located, storage)
    if not len(catalog):
        raise OptionError("the source has no samples", shard=catalog.url_of(0))
    (content,) = catalog.checksums
    if content is None:  # names and sizes alone would not show that a tar was replaced
        with ThreadPoolExecutor(catalog.threads, thread_name_prefix="shardstream-look") as pool:
            files = pool.map(lambda shard: storage.info(shard.url), catalog.shards)
            content = fingerprint_of("versions", *(str(file.version) for file in files))
    return OpenedShards(located, catalog, f"{catalog.fingerprint}-{content}")
