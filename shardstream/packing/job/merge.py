"""Publish the dataset of a job in parts, when all of its parts are done."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shardstream.errors import NotFoundError, OptionError, UnfinishedError
from shardstream.format import MANIFEST_NAME
from shardstream.packing.job.claim import restore_journal
from shardstream.packing.job.destination import ShardNames
from shardstream.packing.job.journal import Journal, Task, read_journal
from shardstream.packing.job.publish import Ready, no_job_error, publish
from shardstream.packing.job.report import PackReport, combine_reports
from shardstream.storage import Storage, is_journal, join_url, open_output_folder


def merge(
    dest: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> PackReport:
    """Publish the dataset of a job whose parts are all done: write ``index.json``, and delete the records of the parts.

    Args:
        dest: Folder of the job, or its pattern. Splits in the folders under it are published together.
        storage_options: ``storage_options`` of fsspec.

    Raises:
        UnfinishedError: If parts are missing; names them. Then no split is published.
        OptionError: If there is no such job in the folder.
        ShardError: If the record of a part is damaged.
        StorageError: If a shard is missing or was replaced, or the folder cannot be reached.
    """
    begin_s = time.monotonic()
    url = ShardNames.parse(dest).folder
    splits = _find_splits(url, storage_options)
    if not splits:
        _refuse_published_splits(url, storage_options)
    ready = [Ready(open_output_folder(one, storage_options, None)) for one in splits or [url]]
    merged = publish(ready, storage_options)
    report = combine_reports("finished parts", merged, seconds=time.monotonic() - begin_s)
    if not splits:
        return report
    named = (replace(split, name=split.url.rpartition("/")[2]) for split in report.splits)
    return replace(report, splits=tuple(named))


def _find_splits(url: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    """Return the folders right under one that hold the splits of an unfinished job, in their order; none if it holds a dataset or a job itself.

    Raises:
        UnfinishedError: If a split was not begun.
    """
    files = open_output_folder(url, storage_options, None).list_files()
    if MANIFEST_NAME in files or any(map(is_journal, files)):  # not a README or .DS_Store
        return []
    found: dict[str, Journal] = {}
    for name in _folders_in(url, Storage(storage_options)):
        folder = open_output_folder(join_url(url, name), storage_options, None)
        journal = read_journal(folder, folder.list_files())
        if journal is not None and journal.task.options.get("split_name") == name:
            found[name] = journal
    names: dict[str, None] = {}
    for journal in found.values():
        for name in journal.task.options["split_names"]:
            if name not in found and name not in names:
                _restore(join_url(url, name), name, journal, storage_options)
            names[name] = None
    return [join_url(url, name) for name in names]


def _restore(
    url: str, name: str, other: Journal, storage_options: Mapping[str, Any] | None
) -> None:
    """Write the journal of a split again that is published.

    Raises:
        UnfinishedError: If it was not begun.
    """
    task = Task(source=other.task.source, options={**other.task.options, "split_name": name})
    folder = open_output_folder(url, storage_options, None)
    if restore_journal(folder, task, other.run) is None:
        raise UnfinishedError(
            f"no part of the split {name} has been run; run the parts again (finished shards are kept), then merge",
            shard=url,
        )


def _folders_in(url: str, storage: Storage) -> list[str]:
    """Return the names of the folders right under one; none if it is missing."""
    with suppress(NotFoundError):
        return list(filter(None, storage.list_folder(url)[1]))
    return []


def _refuse_published_splits(url: str, storage_options: Mapping[str, Any] | None) -> None:
    """Refuse a folder without files: its splits are published, or there is no job."""
    if open_output_folder(url, storage_options, None).list_files():
        return
    storage = Storage(storage_options)
    for name in _folders_in(url, storage):
        if storage.exists(join_url(join_url(url, name), MANIFEST_NAME)):
            raise OptionError(
                f"nothing to merge: the splits are published already, the first in {name}",
                shard=url,
            )
    raise no_job_error(url, {}, None)  # before a lock would create the folder
