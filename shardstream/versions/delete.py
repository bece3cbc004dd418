"""Delete samples: readers leave them out from the next opening on; their bytes stay until the shards are compacted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from shardstream.catalog import Keys, Where, find_where, open_samples, samples_with_keys
from shardstream.errors import ChangedError, OptionError, plural
from shardstream.format import DatasetVersion
from shardstream.samples import Choice, Numbers, Samples, select_subset
from shardstream.storage import (
    LazyShards,
    LocatedShards,
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

_NAMED = 5  # unknown keys that a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteReport:
    """Result of `delete`.

    Args:
        deleted: Number of samples that were deleted, or would be.
        version: Number of the version without them; the current one if nothing was deleted, or ``dry_run`` was set.
        unknown: Keys that no sample has, in the order given; those of deleted samples are among them.
    """

    deleted: int
    version: int
    unknown: Sequence[str] = ()


def delete(  # noqa: PLR0913  (the public door)
    url: Urls,
    *,
    keys: Keys | None = None,
    where: Where | None = None,
    numbers: Choice | None = None,
    version: int | None = None,
    missing: Literal["error", "ignore"] = "error",
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> DeleteReport:
    """Delete samples of a dataset, as a new version.

    Bytes are not written again: tools that read tars on their own still see the samples, until `compact` has written the touched shards
    without them, and `gc` has removed the earlier versions.

    Args:
        url: Folder of the dataset.
        keys: Keys of samples, or a ``.txt`` file with a key on each line; all samples with one of them are deleted. They are read from the columns that
            ``index`` and ``pack`` write with ``columns=``, or else from the shards.
        where: A condition on columns, as in `ShardDataset`; with keys or numbers, samples that fulfil both are deleted.
        numbers: Numbers of samples in the current version, as ``subset=`` in `ShardDataset`.
        version: The version in which ``numbers`` were found: an error if it is not the current one any more. It is needed once samples were deleted, as
            others have other numbers since.
        missing: Whether keys that no sample has are an error, or left out and reported.
        dry_run: Report what would be deleted, and change nothing.
        storage_options: For fsspec.

    Raises:
        OptionError: If there are no such samples, or all would be deleted; if a shard has no index.
        ChangedError: If another writer has published a version meanwhile, or since ``version``, so that ``numbers`` may be those of other samples.
        StorageError: If the dataset cannot be read or written.
    """
    _check_options(keys, where, numbers, missing)
    if version is not None and numbers is None:
        raise OptionError("version= is that of numbers=; keys and conditions need none")
    folder, storage = dataset_folder(url), Storage(storage_options)
    report: DeleteReport | None = None

    def change(manifest: AnyManifest) -> AnyManifest | None:
        nonlocal report
        before = manifest.dataset_version
        if numbers is not None:
            _check_numbers(version if report is None else report.version, before, folder)
        located = locate_shards(folder, storage, before.number)
        _check_indexed(located)
        samples = open_samples(located, storage)
        chosen, unknown = _choose(samples, keys, where, numbers)
        if unknown and missing == "error":
            raise _unknown_error(unknown)
        if len(chosen) == len(samples):
            raise OptionError("all samples would be deleted; delete the folder instead")
        report = DeleteReport(deleted=len(chosen), version=before.number, unknown=unknown)
        if dry_run or not len(chosen):
            return None
        stored = [one.numbers for one in samples.find_stored(chosen) if not one.is_joined]
        gone = np.concatenate([*stored, *(numbers for _, numbers in located.deleted)])
        name, data = encode_numbers("deleted", np.sort(gone))
        publish_bytes(storage, join_url(folder, name), data)
        return next_version(manifest, "delete", deleted=name, ndeleted=len(gone))

    after = publish_version(folder, storage, change)
    assert report is not None  # noqa: S101
    return replace(report, version=after.dataset_version.number)


def _check_numbers(found_in: int | None, current: DatasetVersion, folder: str) -> None:
    """Refuse numbers of samples that are, or may be, those of another version than the current one."""
    if found_in is None and current.has_other_numbers:
        raise OptionError(
            "samples were deleted, and others have other numbers since; say in which version numbers= were found: version= (--version), of the current "
            f"one {current.number}",
            shard=folder,
        )
    if found_in not in (None, current.number):
        raise ChangedError(
            f"another writer has published version {current.number} meanwhile, in which the numbers may be those of other samples; choose them again",
            shard=folder,
        )


def _choose(
    samples: Samples, keys: Keys | None, where: Where | None, numbers: Choice | None
) -> tuple[Numbers, Sequence[str]]:
    """Return the numbers of the samples to delete, and unknown keys."""
    chosen, unknown = np.arange(len(samples)), list[str]()
    if keys is not None:
        chosen, unknown = samples_with_keys(samples, keys)
    if numbers is not None:
        chosen = select_subset(samples, numbers).numbers
    if where is not None:
        chosen = np.intersect1d(chosen, find_where(samples, where))
        if not len(chosen):
            raise OptionError(f"where={str(where)!r} chooses no sample to delete")
    return chosen, unknown


def _check_options(
    keys: Keys | None, where: Where | None, numbers: Choice | None, missing: object
) -> None:
    if keys is not None and numbers is not None:
        raise OptionError("pass keys= or numbers=, not both")
    if keys is None and where is None and numbers is None:
        raise OptionError("choose the samples to delete by keys=, where= or numbers=")
    if missing not in ("error", "ignore"):
        raise OptionError(f"missing= is 'error' or 'ignore', not {missing!r}")


def _check_indexed(located: LocatedShards) -> None:
    """Refuse shards without an index: versions are read by number only."""
    if isinstance(located.shards, LazyShards):
        return
    bare = next((one.url for one in located.shards if one.url not in located.indexed), None)
    if bare is not None:
        raise OptionError(
            "this shard has no index, which versions of a dataset need; run 'shardstream index' on the folder",
            shard=bare,
        )


def _unknown_error(unknown: Sequence[str]) -> OptionError:
    named = ", ".join(map(repr, unknown[:_NAMED]))
    more = f" and {len(unknown) - _NAMED:,} more" if len(unknown) > _NAMED else ""
    return OptionError(
        f"no sample has {plural(len(unknown), 'key')} of the list: {named}{more}; correct it, or leave them out with missing='ignore' "
        "(--missing ignore)"
    )
