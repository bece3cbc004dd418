"""Delete samples: readers leave them out from the next opening on; their bytes stay until the shards are compacted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardstream.catalog import Keys, Where, choose_samples, open_samples
from shardstream.errors import ChangedError, OptionError
from shardstream.format import FIRST_VERSION
from shardstream.samples import Choice, Numbers, Samples, Subset, WithoutDeleted
from shardstream.storage import (
    Storage,
    Urls,
    encode_numbers,
    join_url,
    locate_shards,
    publish_bytes,
)
from shardstream.versions.publish_version import (
    AnyManifest,
    dataset_folder,
    next_version,
    publish_version,
)


def delete(
    url: Urls,
    *,
    keys: Keys | None = None,
    where: Where | None = None,
    numbers: Choice | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Delete samples of a dataset, as a new version; return how many.

    Args:
        url: Folder of the dataset.
        keys: Their keys, or a ``.txt`` file with a key on each line; needs the columns that ``index`` and ``pack`` write with ``columns=``.
        where: A condition on columns, as in `ShardDataset`.
        numbers: Their numbers in the current version, as ``subset=`` in `ShardDataset`.
        storage_options: For fsspec.

    Raises:
        OptionError: If there are no such samples, or all would be deleted.
        StorageError: If the dataset cannot be read or written.
    """
    folder, storage = dataset_folder(url), Storage(storage_options)
    count = 0

    def change(manifest: AnyManifest) -> AnyManifest:
        nonlocal count
        located = locate_shards(folder, storage)
        if (located.version or FIRST_VERSION) != manifest.dataset_version:
            raise ChangedError("another writer has published a version meanwhile", shard=folder)
        samples = open_samples(located, storage)
        chosen = choose_samples(samples, keys if numbers is None else numbers, where)
        assert isinstance(chosen, Subset)  # noqa: S101
        gone = _whole_numbers(samples, chosen.numbers)
        count = len(chosen)
        name, data = encode_numbers("deleted", gone)
        publish_bytes(storage, join_url(folder, name), data)
        return next_version(manifest, "delete", deleted=name, ndeleted=len(gone))

    publish_version(folder, storage, change)
    return count


def _whole_numbers(samples: Samples, numbers: Numbers) -> Numbers:
    """Return the numbers in the shards of all deleted samples, ascending."""
    if len(numbers) == len(samples):
        raise OptionError("all samples would be deleted; delete the folder instead")
    if not isinstance(samples, WithoutDeleted):
        return np.sort(numbers)
    return np.sort(np.concatenate((samples.deleted, samples.numbers_in(0, numbers))))
