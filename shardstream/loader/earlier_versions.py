"""Make a dataset of the versions of its parts that a state was saved with, to finish the epoch of the state with these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardstream.errors import ManifestError, NotFoundError, OptionError, StateError
from shardstream.pipeline import SamplesSource, Source
from shardstream.samples import DeletedSince, Numbers, Samples, Subset, deleted_since
from shardstream.storage import LocatedShards, Storage, Urls, count_samples, locate_shards

if TYPE_CHECKING:
    from shardstream.loader.dataset import StreamDataset

OnNewVersion = Literal["continue", "error"]
Versions = Iterator[int | None]
"""The version of each `ShardDataset` that a dataset is made of, in order; None for one that has none."""
_FINISH = (
    "finish its epoch with that version (version=), then leave out the state and call set_epoch"
)


def dataset_of_state(dataset: StreamDataset, state: Any) -> StreamDataset:
    """Return a dataset of the versions that a state was saved with, without the samples that were deleted since.

    Args:
        dataset: The dataset of the present versions, which is returned if the state names no others.
        state: Any state.

    Raises:
        StateError: If a version is newer than here, was removed, or ``on_new_version`` is "error".
        StorageError: If the dataset cannot be read.
    """
    if not isinstance(state, Mapping) or _is_of(state, dataset.pipeline.source):
        return dataset
    saved, here = state.get("versions"), list(dataset.versions)
    if not isinstance(saved, list) or len(saved) != len(here) or saved == here:
        return dataset
    problem = (
        f"the state was saved with version {_shown(saved)} of the dataset, here it is {_shown(here)}, and the dataset cannot be made of "
        "the earlier one to finish the epoch"
    )
    try:
        made = dataset._of_versions(iter(saved))
    except (OptionError, NotFoundError, ManifestError) as error:
        raise StateError(f"{problem}: {error}", remedy="start without the state") from error
    if list(made.versions) != saved:  # its samples are of another kind, or were changed
        raise StateError(f"{problem}; make it in this process, of one URL for each version")
    return made


def _is_of(state: Mapping[str, Any], source: Source) -> bool:
    """Return whether a state is of the data of a source, as far as is known: shards of replaced fields may have equal names and lengths."""
    saved = state.get("checksums")
    pairs = zip(saved if isinstance(saved, list) else (), source.checksums, strict=False)
    is_other = any(None not in pair and pair[0] != pair[1] for pair in pairs)
    return state.get("fingerprint") == source.fingerprint and not is_other


def reopen(
    open_version: partial[Any],
    on_new_version: OnNewVersion,
    dataset: StreamDataset,
    versions: Versions,
) -> StreamDataset:
    """Return a dataset of one URL in an earlier version, without the samples that were deleted since.

    Args:
        open_version: Opens it by ``version=``; the argument is its URL.
        on_new_version: As in `ShardDataset`.
        dataset: The present one.
        versions: The next one is that of this dataset.

    Raises:
        StateError: If the version is newer than that of the present one, or ``on_new_version`` is "error".
        OptionError: If the version was removed.
    """
    (here,), number = dataset.versions, next(versions)
    if here is None or number in (here, None):
        return dataset
    if type(number) is not int or number > here:
        raise StateError(
            f"the state was saved with version {number!r}, which is newer than version {here} here; open that one or a later one"
        )
    if on_new_version == "error":
        raise StateError(
            f"the state was saved with version {number}, here it is {here}, and on_new_version is 'error'; {_FINISH}"
        )
    earlier: StreamDataset = open_version(version=number)
    source = earlier.pipeline.source
    if not isinstance(source, SamplesSource):
        return earlier
    deleted = _deleted_between(open_version.args[0], source.samples.storage, number, here)
    if not len(deleted):
        return earlier
    samples = _with_holes(source.samples, deleted)
    return earlier._with_pipeline(
        replace(earlier.pipeline, source=replace(source, samples=samples))
    )


def _deleted_between(urls: Urls, storage: Storage, number: int, until: int) -> Numbers:
    """Return the samples of an earlier version that were deleted until a later one, by their numbers in a dataset of the earlier one."""
    earlier, later = locate_shards(urls, storage, number), locate_shards(urls, storage, until)
    compacted = () if later.version is None else later.version.compacted_since(number)
    removed = [deleted_in(locate_shards(urls, storage, one)) for one in compacted]
    found = deleted_since(deleted_in(later), removed, count_samples(earlier.shards))
    before = deleted_in(earlier)
    found = np.setdiff1d(found, before, assume_unique=True)
    return found - np.searchsorted(before, found)


def deleted_in(located: LocatedShards) -> Numbers:
    """Return the deleted samples of the dataset of one manifest, by their numbers in its shards, ascending."""
    return located.deleted[0][1] if located.deleted else np.empty(0, dtype=np.int64)


def _with_holes(samples: Samples, deleted: Numbers) -> Samples:
    """Return all samples of a dataset, or those that were chosen, of which some were deleted since."""
    if isinstance(samples, Subset):
        return samples.with_inner([DeletedSince(samples.whole, deleted)])
    return DeletedSince(samples, deleted)


def _shown(versions: list[Any]) -> str:
    return str(versions[0] if len(versions) == 1 else versions)
