"""Publish the datasets of a job: check the records of its parts, write ``index.json``, and delete records and journal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from itertools import starmap
from typing import Any, NamedTuple, cast

from shardstream.errors import (
    NotFoundError,
    OptionError,
    SourceError,
    StorageError,
    UnfinishedError,
    plural,
)
from shardstream.format import (
    CLASSES_NAME,
    MANIFEST_NAME,
    Manifest,
    ShardInfo,
    parse_columns,
)
from shardstream.packing.job.append import Addition, find_appended
from shardstream.packing.job.claim import locked, remove_job_files, restore_journal
from shardstream.packing.job.folder_state import (
    Journal,
    ManifestFiles,
    Published,
    ShardNames,
    Task,
    published_sha256,
    read_journal,
    read_old_manifest,
)
from shardstream.packing.job.key_hashes import (
    KeyHashes,
    KeyList,
    NewKeys,
    decode_hashes,
    place_of,
    refuse_repeated_keys,
)
from shardstream.packing.job.parts import combine_results, read_record
from shardstream.packing.job.report import PackReport, SplitReport, combine_reports
from shardstream.packing.shards.column_builder import check_summaries
from shardstream.packing.shards.part_writer import PartResult, Skip
from shardstream.packing.sources.class_numbering import warn_of_siblings
from shardstream.storage import (
    JOURNAL_NAME,
    FileInfo,
    OutputFolder,
    Storage,
    dataset_of_change,
    is_journal,
    is_part_record,
    join_url,
    open_output_folder,
    part_record_name,
)

_THREADS = 16  # that read records
_RECORDS = 256  # that are in memory with the hashes of their keys: 107 kB for 10,000 keys
_NAMED = 8  # missing parts that a message names


class Ready(NamedTuple):
    """A dataset to publish."""

    folder: OutputFolder
    run: str | None = None
    """Identity of its job; None: any."""
    parts: int = 0
    """Number of its parts; 0: that in the journal."""
    appends: bool = False
    """Whether its shards are appended to the dataset in the folder above."""


def publish(
    ready: Sequence[Ready], storage_options: Mapping[str, Any] | None, title: str
) -> PackReport:
    """Lock the folders of datasets whose parts are all done, and publish them (see `publish_locked`)."""
    with ExitStack() as stack:
        for one in ready:
            stack.enter_context(locked(one.folder))
        return publish_locked(ready, storage_options, title)


def publish_locked(
    ready: Sequence[Ready], storage_options: Mapping[str, Any] | None, title: str
) -> PackReport:
    """Publish datasets together: no manifest is written before all are checked, and an error removes those that are.

    Before the first manifest, each journal gets the hash of its own, and that of the first dataset those of all. A run that is killed
    in between is completed by the same command, or by `merge`: until the last manifest is written, which is that of the first dataset,
    all records are there, and until all others are tidied up, the journal of the first.

    Args:
        ready: The datasets.
        storage_options: ``storage_options`` of fsspec.
        title: Description of the source, for the report.

    Returns:
        The report of all parts.

    Raises:
        OptionError: If there is no job, or the dataset would lack something that was asked for.
        SourceError: If a key comes twice, or there are no samples.
        ShardError: If a record is damaged.
        StorageError: If a shard is missing, or another run has taken a folder over.
        UnfinishedError: If parts are missing.
    """
    storage = Storage(storage_options)
    if ready[0].appends:  # such a job has one folder
        return replace(_publish_appended(ready[0], storage), source=title)
    found = list(map(_checked, ready))
    new = [one for one in found if not one.is_published]
    found[0].journal.others = dict(map(_Publication.announcement, found[1:]))
    for one in new:
        one.journal.write()
    try:
        for one in new:
            one.write_files()
        for one in reversed(new):
            if not one.manifest.is_there():  # another process of the job may have written it
                one.manifest.write()
    except BaseException as error:
        for one in new:
            one.unpublish(error)
        raise
    for one in reversed(found):
        one.tidy()
    return combine_reports(title, [one.report(storage) for one in found])


class _Publication(NamedTuple):
    """A dataset whose parts are all done, and checked."""

    files: Mapping[str, FileInfo]
    """The files there before."""
    journal: Journal
    """The journal of its job; what it says of the dataset is written before the manifest."""
    manifest: ManifestFiles
    is_published: bool
    """Whether the manifest was there before."""

    @property
    def names(self) -> ShardNames:
        """Names of its shards."""
        return ShardNames(folder="", template=str(self.journal.task.options["template"]))

    def announcement(self) -> tuple[str, Published]:
        """Return the name of its split, and the dataset."""
        return str(self.journal.task.options["split_name"]), cast(Published, self.journal.published)

    def write_files(self) -> None:
        """Write the small files next to the manifest, and delete the shards of an earlier dataset."""
        folder, options = self.journal.folder, self.journal.task.options
        folder.check_owner()
        for name, text in options["extras"].items():
            folder.write(name, str(text).encode())
        has_columns = options.get("columns") is not None
        self.manifest.remove_replaced(self.names, self.journal.stale, has_columns=has_columns)

    def unpublish(self, error: BaseException) -> None:
        """Delete the manifest if this process has written it, also if an error said that it has not, unless another process of the job has ended meanwhile."""
        folder, shards = self.journal.folder, tuple(self.manifest.manifest.shards)
        try:
            is_ended = folder.read(JOURNAL_NAME) is None
            if not is_ended or PartResult(shards=shards).changed_file(folder.list_files().get):
                self.manifest.remove()
        except StorageError:
            error.add_note(
                f"{self.journal.folder.url} is published already and is kept; run the same pack again to publish the other splits"
            )

    def tidy(self) -> None:
        """Delete the records of an earlier manifest, those of the parts, and the journal.

        Raises:
            StorageError: If the manifest is gone: another process of the job could not publish another split.
        """
        folder, options = self.journal.folder, self.journal.task.options
        if not (self.is_published or self.manifest.is_there()):
            raise StorageError(
                "another process of this job has failed and removed index.json meanwhile; run this again",
                shard=folder.url,
            )
        self.manifest.remove_older()
        remove_job_files(folder, self.files, self.names, options["extras"])

    def report(self, storage: Storage) -> PackReport:
        """Return the report of the dataset; warn if another split numbers its classes differently."""
        manifest, published = self.manifest.manifest, self.journal.published
        url, classes = self.journal.folder.url, self.journal.task.options["extras"]
        if CLASSES_NAME in classes:
            warn_of_siblings(tuple(json.loads(classes[CLASSES_NAME])), url, storage)
        split = SplitReport(
            name=str(self.journal.task.options.get("split_name", "")),
            url=url,
            samples=manifest.nsamples,
            shards=len(manifest.shards),
            total_bytes=manifest.total_bytes,
        )
        return PackReport(
            source="",
            splits=(split,),
            skipped=() if published is None else tuple(starmap(Skip, published.skipped)),
            fields=dict(manifest.fields),
            warnings=() if published is None else published.warnings,
        )


def _publish_appended(ready: Ready, storage: Storage) -> PackReport:
    """Check the records of a job whose shards are appended to a dataset, and publish its next version (see `publish_locked`)."""
    folder, files = ready.folder, ready.folder.list_files()
    journal = read_journal(folder, files)
    if journal is None or "append" not in journal.task.options:
        raise no_job_error(folder.url, files, journal)
    options, append = journal.task.options, journal.task.options["append"]
    shards: Sequence[ShardInfo] = ()
    fields: Mapping[str, int] = {}
    if journal.published is not None:  # or about to be
        shards = find_appended(folder.url, storage)
    if not shards:
        with closing(NewKeys()) as keys:
            result = _checked_result(ready, journal, files, keys.hashes, keys.ordered)
            shards, fields = result.shards, result.fields
            journal.published = _published(options, result, folder.url, sha256="")
            journal.write()
            Addition(
                folder=folder.url,
                shards=shards,
                fields=fields,
                classes=append["classes"],
                keys=keys if append["checks_keys"] else None,
            ).publish(storage)
    added = ManifestFiles(folder, Manifest(shards=shards, fields=fields), ())
    published = _Publication(files, journal, added, is_published=True)
    remove_job_files(folder, files, published.names, ())
    report = published.report(storage)
    url = str(dataset_of_change(folder.url))
    return replace(report, splits=(replace(report.splits[0], url=url),))


def _checked(ready: Ready) -> _Publication:
    """Read the records of a job, and check what they say of the dataset (see `publish_locked`)."""
    folder, url = ready.folder, ready.folder.url
    files = folder.list_files()
    journal = read_journal(folder, files)
    if ready.run is not None and (journal is None or journal.run != ready.run):
        Journal(folder=folder, task=Task(source=None, options={}), run=ready.run).check_owner()
    if journal is None or journal.is_of_writer:
        raise no_job_error(url, files, journal)
    published, options = journal.published, journal.task.options
    if published is not None and published.sha256 == published_sha256(folder, files):
        old = ManifestFiles(folder, read_old_manifest(folder), files)
        return _Publication(files, journal, old, is_published=True)
    with closing(KeyHashes()) as keys:
        result = _checked_result(ready, journal, files, keys)
    manifest = Manifest(shards=result.shards, name=str(options["name"]), fields=result.fields)
    folder.check_owner = journal.check_owner
    new = ManifestFiles(folder, manifest, files)
    journal.published = _published(options, result, url, new.sha256)
    return _Publication(files, journal, new, is_published=False)


def _num_parts(ready: Ready, journal: Journal, files: Collection[str]) -> int:
    """Return the number of parts of a job, as its run, its journal and its records say.

    Raises:
        StorageError: If they differ: samples would be left out.
        UnfinishedError: If it is not known yet.
    """
    parts = ready.parts or journal.parts
    if not parts:
        raise UnfinishedError(
            "the job was stopped before the number of its parts was known; run the same command again",
            shard=journal.folder.url,
        )
    # A run that was killed while it took the folder over has left records of the other job.
    further = set(filter(is_part_record, files)) - set(map(part_record_name, range(parts)))
    if journal.parts not in (0, parts) or (
        further and any(read_record(journal.folder, name, journal.run) for name in further)
    ):
        begun = "more" if journal.parts in (0, parts) else journal.parts
        if not journal.parts:
            journal.parts = parts
            journal.write()  # else the next run would take its parts and the further ones for one job
        raise StorageError(
            f"this run has {plural(parts, 'part')}, but the job was begun with {begun}: the source has changed, and what "
            "identifies it has not; nothing is published, start again in another folder, or delete this one",
            shard=journal.folder.url,
        )
    return parts


def _checked_result(
    ready: Ready,
    journal: Journal,
    files: Mapping[str, FileInfo],
    keys: KeyHashes,
    ordered: KeyList | None = None,
) -> PartResult:
    """Return the results of all parts as one, whose shards are in place, with keys that differ and the fields that were to be kept; ``keys`` and ``ordered`` as in `_read_records`."""
    folder, options = journal.folder, journal.task.options
    journal.parts = _num_parts(ready, journal, files)
    result = _read_records(files, journal, keys, ordered)
    name = result.changed_file(files.get)
    if name is not None:
        raise StorageError(
            f"the file is {'another one' if name in files else 'missing'} although its part is done; "
            "run the parts again, then merge",
            shard=join_url(folder.url, name),
        )
    refuse_repeated_keys(keys, result.shards, folder)
    if not result.shards and result.skipped:
        raise SourceError(
            f"no sample is left for {folder.url}: {len(result.skipped)} were skipped, the first: {result.skipped[0].reason}"
        )
    if not result.shards:
        raise OptionError(
            "no sample is left: all were filtered out, so there is no dataset to publish",
            shard=folder.url,
        )
    missing = sorted(set(options.get("fields") or ()) - result.fields.keys())
    if missing and options["job"] == "reshard":
        raise OptionError(
            f"no sample has the field {', '.join(missing)}, which was to be kept; nothing is published, correct fields= (--fields)",
            shard=folder.url,
        )
    return result


def _read_records(
    files: Mapping[str, FileInfo], journal: Journal, keys: KeyHashes, ordered: KeyList | None
) -> PartResult:
    """Return the results of all parts as one, in their order, without the hashes of their keys, which go to ``keys`` and ``ordered``."""
    folder, parts = journal.folder, journal.parts

    def read(number: int) -> tuple[int, PartResult] | None:
        name = part_record_name(number)
        return read_record(folder, name, journal.run) if name in files else None

    results: list[PartResult] = []
    num_shards = 0
    missing: list[int] = []
    of = set[int]()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-merge") as pool:
        for first in range(0, parts, _RECORDS):
            numbers = range(first, min(first + _RECORDS, parts))
            for number, record in zip(numbers, pool.map(read, numbers), strict=True):
                if record is None:
                    missing.append(number)
                    continue
                count, result = record
                of.add(count)
                if result.key_hashes:
                    _add_keys(keys, result, num_shards)
                if ordered is not None:
                    ordered.add(decode_hashes(result.key_hashes))
                num_shards += len(result.shards)
                results.append(replace(result, key_hashes=""))
    if missing:
        raise UnfinishedError(_missing_text(missing, parts, of), shard=folder.url)
    return combine_results(results)


def _add_keys(keys: KeyHashes, result: PartResult, first: int) -> None:
    """Add the keys of a part; ``first`` is the number of its first shard in the dataset."""
    hashes = decode_hashes(result.key_hashes)
    for number, shard in enumerate(result.shards, first):
        count = shard.nsamples or 0
        keys.add(hashes[:count], place_of(number, count))
        hashes = hashes[count:]


def _missing_text(missing: Sequence[int], parts: int, of: set[int]) -> str:
    """Describe missing parts; by the numbers that `Parts` has, where all records name the same count.

    >>> _missing_text([1, 4, 5], 6, {3})
    '3 of 6 tasks are not done: those of part 2/3, 3/3; run these parts again (finished shards are kept), then merge'
    """
    if len(of) == 1 and (count := next(iter(of))):
        named = [f"{one + 1}/{count}" for one in sorted({number % count for number in missing})]
        which = "those of part " + _listed(named)
    else:
        which = "number " + _listed([str(number) for number in missing])
    return (
        f"{len(missing)} of {plural(parts, 'task')} are not done: {which}; "
        "run these parts again (finished shards are kept), then merge"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _published(
    options: Mapping[str, Any], result: PartResult, folder: str, sha256: str
) -> Published:
    """Return what a journal says of the dataset in a folder; columns that some samples lack are warnings or errors (see `check_summaries`)."""
    warnings, split = [*result.warnings], options.get("split_name")
    if options.get("columns") is not None:
        wanted = parse_columns(options["columns"]) if options["columns"] else ()
        found = check_summaries(wanted, result.columns, result.nsamples, folder)
        warnings += [f"split {split}: {one}" if split else one for one in found]
    return Published(
        sha256=sha256,
        skipped=result.skipped,
        warnings=tuple(warnings),
    )


def no_job_error(url: str, files: Mapping[str, FileInfo], journal: Journal | None) -> OptionError:
    """Return the error of a folder without a job in parts."""
    if journal is not None:
        return OptionError(
            "the unfinished dataset here is not a job in parts; run its own command again",
            shard=url,
        )
    if MANIFEST_NAME in files:
        return OptionError("nothing to merge: the dataset is published already", shard=url)
    return OptionError(
        "nothing to merge: no part of a job has been run here; check the URL", shard=url
    )


def merge(
    dest: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> PackReport:
    """Publish the dataset of a job whose parts are all done: write ``index.json``, and delete the records of the parts.

    Args:
        dest: Folder of the job, or its pattern. Splits in the folders under it are published together.
        storage_options: ``storage_options`` of fsspec.

    Raises:
        UnfinishedError: If parts are missing; names them. Then no split is published.
        OptionError: If there is no such job in the folder, or one of its splits only.
        ShardError: If the record of a part is damaged.
        StorageError: If a shard is missing or was replaced, or the folder cannot be reached.
    """
    begin_s = time.monotonic()
    url = ShardNames.parse(dest).folder
    splits = _find_splits(url, storage_options)
    if not splits:
        _refuse_published_splits(url, storage_options)
    ready = [Ready(open_output_folder(one, storage_options)) for one in splits or [url]]
    if dataset_of_change(url) is not None:
        ready = [ready[0]._replace(appends=True)]
    report = publish(ready, storage_options, "finished parts")
    return replace(report, seconds=time.monotonic() - begin_s)


def _find_splits(url: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    """Return the folders right under one that hold the splits of an unfinished job, in their order; none if it holds a dataset or a job itself.

    Raises:
        OptionError: If it is the folder of one of several splits.
        UnfinishedError: If a split was not begun, or replaced.
    """
    dest = open_output_folder(url, storage_options)
    files = dest.list_files()
    if MANIFEST_NAME in files or any(map(is_journal, files)):  # not a README or .DS_Store
        own = read_journal(dest, files)
        if own is not None and own.task.options.get("split_name"):
            raise OptionError(
                f"this is one of the splits {', '.join(own.task.options['split_names'])}, which are published together; merge the folder above",
                shard=url,
            )
        return []
    found: dict[str, Journal] = {}
    for name in _folders_in(url, Storage(storage_options)):
        folder = open_output_folder(join_url(url, name), storage_options)
        journal = read_journal(folder, folder.list_files())
        if journal is not None and journal.task.options.get("split_name") == name:
            found[name] = journal
    names: dict[str, None] = {}
    for journal in found.values():
        splits = [*map(str, journal.task.options["split_names"])]
        for name in splits:
            if name not in found and name not in names:
                first = found.get(splits[0], journal)
                _restore(join_url(url, name), name, first, storage_options)
            names[name] = None
    return [join_url(url, name) for name in names]


def _restore(
    url: str, name: str, first: Journal, storage_options: Mapping[str, Any] | None
) -> None:
    """Write the journal of a split again that is published with the first.

    Raises:
        UnfinishedError: If it was not begun, or replaced.
    """
    task = Task(source=first.task.source, options={**first.task.options, "split_name": name})
    folder = open_output_folder(url, storage_options)
    if restore_journal(Journal(folder=folder, task=task, run=first.run), first) is None:
        found = f"no part of the split {name} has been run;"
        if MANIFEST_NAME in folder.list_files():
            found = f"another dataset has replaced the split {name}; move it away,"
        raise UnfinishedError(
            f"{found} run the parts again (finished shards are kept), then merge", shard=url
        )


def _folders_in(url: str, storage: Storage) -> list[str]:
    """Return the names of the folders right under one; none if it is missing."""
    with suppress(NotFoundError):
        return list(filter(None, storage.list_folder(url)[1]))
    return []


def _refuse_published_splits(url: str, storage_options: Mapping[str, Any] | None) -> None:
    """Refuse a folder without files: its splits are published, or there is no job."""
    if open_output_folder(url, storage_options).list_files():
        return
    storage = Storage(storage_options)
    for name in _folders_in(url, storage):
        if storage.exists(join_url(join_url(url, name), MANIFEST_NAME)):
            raise OptionError(
                f"nothing to merge: the splits are published already, the first in {name}",
                shard=url,
            )
    raise no_job_error(url, {}, None)  # before a lock would create the folder
