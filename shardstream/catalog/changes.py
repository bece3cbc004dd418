"""What later versions change in the samples of a dataset: fields that were replaced, and samples that are left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from shardstream.errors import OptionError
from shardstream.format import ReplacedFields
from shardstream.samples import Join, JoinPart, Numbers, Samples
from shardstream.storage import LocatedShards


def with_replaced(
    samples: Samples,
    replaced: Sequence[ReplacedFields],
    open_dataset: Callable[[str], Samples],
    read_numbers: Callable[[str, int], Numbers],
    fields: Collection[str],
) -> Samples:
    """Return samples with the fields that were replaced.

    Args:
        samples: All samples of the dataset, deleted ones, too.
        replaced: What replaced them, in order.
        open_dataset: URL of a manifest, relative to the dataset, to its samples.
        read_numbers: URL of a file of numbers, relative to the dataset, and their count, to the numbers.
        fields: The fields that are needed; none for all.

    Raises:
        OptionError: If the samples of a replacement are not as many as the manifest says.
        ManifestError: If a file of numbers is damaged.
        StorageError: If a replacement cannot be read.
    """
    parts: list[JoinPart] = []
    for one in replaced:
        if fields and not {*fields}.intersection(one.fields):
            continue
        found = open_dataset(one.url)
        if len(found) != one.nsamples:
            raise OptionError(
                f"the replaced fields are of {len(found)} samples, not of {one.nsamples} as the manifest of the dataset says; restore them",
                shard=found.url_of(0),
            )
        parts.append(
            JoinPart(
                samples=found,
                some=None if one.numbers is None else read_numbers(one.numbers, len(found)),
                fields={name: name for name in one.fields},
                defaults={},
                replaces=True,
                is_strict=True,
            )
        )
    return Join(samples, parts) if parts else samples


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
