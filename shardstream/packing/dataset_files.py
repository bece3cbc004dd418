"""Check the files of a dataset that are not shards: those of its versions, and those that no version lists."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

from shardstream.errors import ManifestError
from shardstream.format import FIRST_VERSION, MANIFEST_NAME, is_records_name, is_replaced_name
from shardstream.packing.shards.shard_scan import Problem, noted
from shardstream.storage import (
    LazyShards,
    LocatedShards,
    Storage,
    absolute_url,
    dataset_of_change,
    folder_of_manifest,
    is_journal,
    is_part,
    is_tar,
    join_url,
    locate_shards,
    parent_url,
)
from shardstream.versions import files_of_versions


def problems_of_versions(
    located: LocatedShards, storage: Storage, find_problems: Callable[[str], Sequence[Problem]]
) -> list[Problem]:
    """Check the files of all versions of a dataset but their shards, and the datasets that have replaced fields of this one.

    Args:
        located: The shards of a version.
        storage: Their storage.
        find_problems: Returns the problems of another dataset.
    """
    problems: list[Problem] = []
    version = located.version
    if located.manifest_url is None or version is None:
        return problems
    folder = folder_of_manifest(located.manifest_url)
    for number in version.kept_numbers:
        with noted(problems, folder):
            locate_shards(folder, storage, number)
    for url in dict.fromkeys(join_url(folder, one.url) for one in version.replaced):
        with noted(problems, url):
            problems += find_problems(url)
    return problems


def find_stray_files(located: LocatedShards, storage: Storage) -> Iterator[Problem]:
    """List files of the folder that do not belong to the dataset."""
    url = located.manifest_url or ""
    if not url or is_replaced_name(url.rpartition("/")[2]):  # in the folder of the whole dataset
        return
    folder = absolute_url(folder_of_manifest(url))  # as files are listed
    has_versions = located.version not in (None, FIRST_VERSION)
    known: Container[str]
    if has_versions:
        try:
            known = files_of_versions(folder, storage)
        except ManifestError:  # `problems_of_versions` has it
            return
    else:
        names = {shard.url.rsplit("/", 1)[-1] for shard in located.shards}
        if isinstance(located.shards, LazyShards):
            names.update(one.records for one in located.shards.manifest.files)
        known = names
    files = storage.find(folder) if has_versions else storage.list_folder(folder)[0]
    start = len(join_url(folder, "x")) - 1
    for file in files:
        what, remedy = _describe_stray(file.url, start, known, has_versions=has_versions)
        if what:
            yield Problem(shard=file.url, what=what, remedy=remedy, severity="warning")


def _describe_stray(
    url: str, start: int, known: Container[str], *, has_versions: bool
) -> tuple[str, str]:
    """Return what is wrong with a file of a dataset, and what to do; two empty texts if nothing is.

    Args:
        url: The file.
        start: Where its name relative to the dataset begins.
        known: The names of the files that belong to it.
        has_versions: Whether these are those of several versions.
    """
    name = url[start:]
    remedy = "delete it when no writer is running"
    if is_part(name):
        return "a half-written file of a killed writer", remedy
    if has_versions and name not in known and dataset_of_change(parent_url(url)) is not None:
        return (
            "no version lists it: its writer is running, or was stopped",
            "'shardstream gc' deletes it when it is a day old",
        )
    if is_journal(name):
        return (
            "the journal of a pack or ShardWriter that is running, or was stopped after it had published",
            remedy,
        )
    if is_records_name(name) and name not in known:
        what = f"records of a manifest that {MANIFEST_NAME} does not name, left by a killed writer"
        return what, remedy
    if is_tar(name) and "/" not in name and name not in known:
        what = f"not in {MANIFEST_NAME}, so readers of the folder do not see it"
        if has_versions:
            return what, "delete it"
        return what, "run 'shardstream index' on the folder to include it, or delete it"
    return "", ""
