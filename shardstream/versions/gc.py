"""Remove versions of a dataset that nobody needs, and the files that only they need.

First an ``index.json`` without these versions is published, then the files are deleted, the manifests of the versions last: a run that was killed
is completed by the next one. A file that no version lists may be one that a writer is about to publish, so it is deleted only if it is a day
older than the newest file, both by the clock of the store.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from shardstream.errors import ManifestError, NotFoundError, OptionError, StorageError, get_logger
from shardstream.format import (
    COLUMNS_SUFFIX,
    INDEX_SUFFIX,
    MANIFEST_NAME,
    VERSIONS_FOLDER,
    BinaryManifest,
    DatasetVersion,
    decode_manifest,
    is_numbers_name,
    is_records_name,
    is_replaced_name,
    ranges_of,
    version_name,
)
from shardstream.storage import (
    FileInfo,
    Storage,
    Urls,
    dataset_of_change,
    final_name,
    is_tar,
    join_url,
    publish_bytes,
    remove,
    remove_all,
)
from shardstream.versions.history import read_current, read_kept
from shardstream.versions.publish_version import (
    AnyManifest,
    all_shards,
    dataset_folder,
    publish_version,
)

_log = get_logger(__name__)

_DAY_S = 24 * 3600.0
_MANIFEST = re.compile(rf"{VERSIONS_FOLDER}/(\d{{6,18}})\.json")
_FILE = re.compile(rf"(?:shards|keys)-[0-9a-f]{{16}}\.npy|{VERSIONS_FOLDER}/gc-[0-9a-f]{{12}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """Result of `gc`.

    Args:
        removed: Numbers of the versions that were removed, or would be.
        kept: Numbers of those that can be read afterwards, with the current one.
        files: Files that were deleted, or would be, relative to the folder of the dataset.
        total_bytes: Their bytes.
    """

    removed: Sequence[int]
    kept: Sequence[int]
    files: Sequence[str]
    total_bytes: int


def gc(
    url: Urls,
    keep: int = 5,
    *,
    keep_days: float = 0,
    states: Iterable[Mapping[str, Any]] = (),
    dry_run: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> GcReport:
    """Remove old versions of a dataset, and the files that only they need.

    The latest versions and those with a tag stay; and of each compaction since the oldest of them the version before it, because states of a loader
    move through it. States of removed versions cannot continue, and trainings that read one of them fail. Files that no version
    lists, such as those of a writer that was killed, are deleted when they are a day older than the newest file. Files of
    others stay.

    Args:
        url: Folder of the dataset.
        keep: Number of the latest versions to keep, with the current one.
        keep_days: Also keep the versions that were the current one at any time in so many days, by the clock of the store.
        states: States of loaders whose versions are kept, too, such as those of ``ss.loader.read_states("s3://bucket/run/")``. A state of a mix or join has
            a version of each dataset; all of them that this dataset has are kept.
        dry_run: Report what would be removed, and change nothing.
        storage_options: For fsspec.

    Raises:
        OptionError: If ``keep`` is under 1, ``keep_days`` negative, or a state names no version.
        ManifestError: If the manifest of a version that stays is missing or damaged: its files are not known then.
        ChangedError: If other writers publish versions again and again.
        StorageError: If a file cannot be read or deleted.
    """
    if keep < 1:
        raise OptionError(f"keep= must be 1 or more, not {keep}: the current version always stays")
    if not keep_days >= 0:
        raise OptionError(f"keep_days= must be 0 or more, not {keep_days}")
    folder, storage = dataset_folder(url), Storage(storage_options)
    in_states = _versions_in(states)

    def change(manifest: AnyManifest) -> AnyManifest | None:
        version = manifest.dataset_version
        needed = in_states.union(_current_since(version, keep_days, now, times))
        kept = ranges_of(_choose_kept(version, keep, needed))
        if kept == version.kept:
            return None
        return replace(manifest, dataset_version=replace(version, kept=kept))

    before, times, now = read_current(folder, storage), dict[str, float](), time.time()
    with nullcontext() if dry_run else _probe(folder, storage) as probe:
        if keep_days:
            times = _times(_list(join_url(folder, VERSIONS_FOLDER), storage, folder))
            now = times.get(probe or "", now)
        after = (change(before) or before) if dry_run else publish_version(folder, storage, change)
        listed = _list(folder, storage)
        now = min(now, max(_times(listed).values(), default=0.0))
        if probe is not None:
            now = listed.pop(probe).modified or 0.0
        after, needed = _needed(after, folder, storage)
        current, kept = after.dataset_version, after.dataset_version.kept_numbers
        batches = _unneeded(listed, current, needed, now, folder, storage)
        if not dry_run:
            for names in batches:
                remove_all(storage, [listed[name].url for name in names])
            if any(batches) and _keeps_deleted(folder, storage):
                _log.warning(
                    "%s: the bucket has versioning, so the bytes of deleted files stay; delete their old versions there, for example by a lifecycle rule",
                    folder,
                )
    files = [name for names in batches for name in names]
    return GcReport(
        removed=sorted({*before.dataset_version.kept_numbers} - {*kept, current.number}),
        kept=[*kept, current.number],
        files=files,
        total_bytes=sum(listed[name].size_or_none or 0 for name in files),
    )


def _keeps_deleted(folder: str, storage: Storage) -> bool:
    """Return whether the bucket of a folder keeps deleted objects; False if that is unknown."""
    filesystem, path = storage.resolve(folder)
    # Not S3, or without the permission to ask, or not reached.
    with suppress(AttributeError, StorageError), storage.translate_errors(folder):
        return bool(filesystem.is_bucket_versioned(filesystem.split_path(path)[0]))
    return False


def _versions_in(states: Iterable[Mapping[str, Any]]) -> set[int]:
    """Return the versions that states of loaders need: those whose samples they have, and those whose deletions."""
    found: set[int] = set()
    for state in states:
        if not isinstance(state.get("versions"), list | tuple):
            raise OptionError(
                "a state names no version of its dataset; give states of loaders, such as those of ss.loader.read_states"
            )
        numbers = [*state["versions"], *(state.get("deletions") or ())]
        found.update(one for one in numbers if type(one) is int)
    return found


def _current_since(
    version: DatasetVersion, days: float, now: float, times: Mapping[str, float]
) -> list[int]:
    """Return the earlier versions that were the current one in some days, and all after them.

    The manifest of a version is written when the next one takes its place: by the clock of the store, while versions have times of their writers'.
    """
    numbers = version.kept_numbers
    ages = [now - times.get(version_name(one), now) for one in numbers if days]
    first = next((at for at, age in enumerate(ages) if age <= days * _DAY_S), len(numbers))
    return numbers[first:]


def _list(folder: str, storage: Storage, dataset: str | None = None) -> dict[str, FileInfo]:
    """Return all files under a folder of a dataset, by default its own, by their names relative to that of the dataset."""
    start = len(join_url(dataset or folder, "x")) - 1
    return {file.url[start:]: file for file in storage.find(folder)}


def _times(files: Mapping[str, FileInfo]) -> dict[str, float]:
    """Return when files were written, by the clock of the store."""
    return {name: one.modified for name, one in files.items() if one.modified is not None}


@contextmanager
def _probe(folder: str, storage: Storage) -> Iterator[str]:
    """Write a file whose time is now by the clock of the store; yield its name."""
    name = f"{VERSIONS_FOLDER}/gc-{uuid.uuid4().hex[:12]}"
    publish_bytes(storage, join_url(folder, name), b"")
    try:
        yield name
    finally:
        remove(storage, join_url(folder, name))


def _choose_kept(version: DatasetVersion, keep: int, needed: set[int]) -> set[int]:
    """Return the numbers of the earlier versions to keep."""
    numbers = version.kept_numbers
    chosen = {*numbers[max(0, len(numbers) - keep + 1) :], *version.tags.values()}
    chosen |= needed.intersection(numbers)
    chosen -= {version.number}
    # A state needs the compactions after a version, also where the version is gone.
    if since := chosen | needed:
        chosen |= {*version.compacted_since(min(since))}.intersection(numbers)
    return chosen


class VersionFiles:
    """The files of some versions of a dataset, relative to its folder."""

    def __init__(self) -> None:
        self._names = {MANIFEST_NAME}
        self._folders: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._names or str(name).partition("/")[0] in self._folders

    def add(self, manifest: AnyManifest, folder: str, storage: Storage) -> None:
        """Add the files that the manifest of a version names; of replaced fields that were not compacted, their whole folders."""
        version = manifest.dataset_version
        names = [version_name(version.number), version.deleted or ""]
        names += [one.name for one in version.keys]
        if isinstance(manifest, BinaryManifest):
            names += [one.records for one in manifest.files]
        self._names.update(names)
        self._add_shards(manifest, folder, storage)
        for replaced in version.replaced:
            self._names.update((replaced.url, replaced.numbers or ""))
            if is_replaced_name(replaced.url):
                url = join_url(folder, replaced.url)
                found = decode_manifest(storage.read_bounded(url), url=url)
                self._add_shards(found, folder, storage)
            else:
                self._folders.add(replaced.change)

    def _add_shards(self, manifest: AnyManifest, folder: str, storage: Storage) -> None:
        for one in all_shards(manifest, folder, storage):
            names = one.url, one.index_url, one.columns_url, one.members_url
            self._names.update(name.removeprefix("./") for name in names)


def files_of_versions(
    folder: str, storage: Storage, manifest: AnyManifest | None = None
) -> VersionFiles:
    """Return the files of all versions of a dataset that can be read.

    Args:
        folder: Folder of the dataset.
        storage: Where it is.
        manifest: The manifest of the current version, if it was read.

    Raises:
        ManifestError: If the manifest of a version is missing or damaged.
    """
    manifest = manifest or read_current(folder, storage)
    found, current = VersionFiles(), manifest.dataset_version
    found.add(manifest, folder, storage)
    for number in current.kept_numbers:
        found.add(read_kept(folder, current, number, storage), folder, storage)
    return found


def _needed(
    manifest: AnyManifest, folder: str, storage: Storage
) -> tuple[AnyManifest, VersionFiles]:
    """Return the files of all versions that can be read, and the current manifest, from which another `gc` may have removed some meanwhile."""
    try:
        return manifest, files_of_versions(folder, storage, manifest)
    except ManifestError:
        now = read_current(folder, storage)
        if now.dataset_version.kept == manifest.dataset_version.kept:
            raise
    return _needed(now, folder, storage)


def _unneeded(
    listed: Mapping[str, FileInfo],
    current: DatasetVersion,
    needed: VersionFiles,
    now: float,
    folder: str,
    storage: Storage,
) -> list[list[str]]:
    """Return the files to delete: the manifests of removed versions last, and before them those by which the others are known."""
    manifests = [name for name in listed if _is_removed(name, current)]
    removed = VersionFiles()
    for name in manifests:
        url = join_url(folder, name)
        try:
            removed.add(decode_manifest(storage.read_bounded(url), url=url), folder, storage)
        except NotFoundError:  # another `gc` has deleted it, and its files before
            continue
        except ManifestError as error:
            _log.warning("files of a removed version may stay: %s", error)
    used: dict[str, float] = {}  # folder of a change -> when its newest file was written
    for name, file in listed.items():
        change = name.partition("/")[0]
        used[change] = max(used.get(change, 0.0), now if file.modified is None else file.modified)

    def is_unneeded(name: str, file: FileInfo) -> bool:
        change, is_inside, _ = name.partition("/")
        if name in needed or name in manifests:
            return False
        if is_inside and dataset_of_change(join_url(folder, change)) is not None:
            return name in removed or now - used[change] > _DAY_S
        if name in removed:
            suffixes = INDEX_SUFFIX, COLUMNS_SUFFIX, ".npy"
            return is_tar(name) or is_replaced_name(name) or name.endswith(suffixes)
        is_old = file.modified is not None and now - file.modified > _DAY_S
        return is_old and _is_of_killed_writer(name)

    unneeded = [name for name, file in listed.items() if is_unneeded(name, file)]
    lists = {name for name in unneeded if is_records_name(name) or is_replaced_name(name)}
    return [[name for name in unneeded if name not in lists], sorted(lists), manifests]


def _is_removed(name: str, current: DatasetVersion) -> bool:
    """Return whether a file is the manifest of an earlier version that cannot be read."""
    match = _MANIFEST.fullmatch(name)
    return match is not None and int(match[1]) < current.number and not current.has(int(match[1]))


def _is_of_killed_writer(name: str) -> bool:
    """Return whether a file that no version lists may only be one of a writer that was killed.

    >>> [_is_of_killed_writer(name) for name in ("keys-0123456789abcdef.npy", "index.json.part-0123456789ab", "a.npy")]
    [True, True, False]
    """
    final = final_name(name)
    if final is not None:
        return (
            final == MANIFEST_NAME
            or _MANIFEST.fullmatch(final) is not None
            or _is_of_killed_writer(final)
        )
    return is_numbers_name(name) or is_replaced_name(name) or _FILE.fullmatch(name) is not None
