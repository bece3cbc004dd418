"""Open the samples of a dataset as its version says: with the fields that were replaced, without the samples that were deleted."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from shardstream.catalog.integrity import Verify
from shardstream.catalog.shard_catalog import ShardCatalog
from shardstream.errors import OptionError
from shardstream.samples import Join, JoinPart, Numbers, Samples, WithoutDeleted
from shardstream.storage import (
    FieldPlaces,
    LazyShards,
    LocatedShards,
    Storage,
    folder_of_manifest,
    is_compressed,
    join_url,
    locate_shards,
    read_numbers,
)


def lacks_index(located: LocatedShards, storage: Storage) -> str | None:
    """Return the first shard that can only be read sequentially; None if all can be read by number."""
    if isinstance(located.shards, LazyShards):
        return None
    for shard in located.shards:
        if is_compressed(shard.url):
            return shard.url
        if shard.url not in located.indexed and storage.local_path(shard.url) is None:
            return shard.url
    return None


def open_samples(
    located: LocatedShards,
    storage: Storage,
    verify: Verify | None = None,
    fields: Collection[str] = (),
    places: FieldPlaces | None = None,
) -> Samples:
    """Return the samples of shards by number; for the arguments and errors see `ShardCatalog`.

    Raises:
        OptionError: If the samples of a replacement are not as many as the manifest says.
        ManifestError: If a file of numbers is damaged.
        StorageError: If a replacement cannot be read.
    """
    catalog = ShardCatalog(located, storage, verify, fields, places)
    folder, parts = folder_of_manifest(located.manifest_url or ""), list[JoinPart]()
    for replaced in () if located.version is None else located.version.replaced:
        if fields and not {*fields}.intersection(replaced.fields):
            continue
        url, numbers = join_url(folder, replaced.url), None
        found = ShardCatalog(locate_shards(url, storage), storage, verify)
        if len(found) != replaced.nsamples:
            raise OptionError(
                f"the replaced fields are of {len(found)} samples, not of {replaced.nsamples} as the manifest of the dataset says; restore them",
                shard=found.url_of(0),
            )
        if replaced.numbers is not None:
            url = join_url(folder, replaced.numbers)
            numbers = read_numbers(url, storage, len(found), len(catalog))
        parts.append(
            JoinPart(
                samples=found,
                some=numbers,
                fields={name: name for name in replaced.fields},
                defaults={},
                replaces=True,
                is_strict=True,
            )
        )
    samples: Samples = Join(catalog, parts) if parts else catalog
    if located.deleted:
        firsts = catalog.first_samples([place for place, _ in located.deleted])
        deleted = zip(firsts, located.deleted, strict=True)
        gone = np.concatenate([numbers + first for first, (_, numbers) in deleted])
        samples = WithoutDeleted(samples, gone)
    return samples


def refuse_deleted(located: LocatedShards, what: str) -> None:
    """Refuse a dataset of which samples are left out or fields replaced, where shards are read from start to end.

    Raises:
        OptionError: If it is one.
    """
    is_replaced = located.version is not None and bool(located.version.replaced)
    if located.deleted or is_replaced:
        how = "fields were replaced" if is_replaced else "samples were deleted"
        rewrite = "reshard" if is_replaced else "compact"
        raise OptionError(
            f"{how} in this dataset, and {what} would return the old ones; read it by its index, or run 'shardstream {rewrite}' first",
            shard=located.manifest_url or located.shards[0].url,
        )


def deleted_by_shard(located: LocatedShards) -> dict[int, Numbers]:
    """Return place of a shard -> its deleted samples, by their numbers in it, ascending; of the shards that have some."""
    found: dict[int, Numbers] = {}
    if not located.deleted:
        return found
    firsts = np.cumsum([0, *(shard.nsamples or 0 for shard in located.shards)])
    for place, numbers in located.deleted:
        whole = numbers + firsts[place]
        cuts = np.searchsorted(whole, firsts)
        for one in np.flatnonzero(np.diff(cuts)).tolist():
            found[one] = whole[cuts[one] : cuts[one + 1]] - firsts[one]
    return found
