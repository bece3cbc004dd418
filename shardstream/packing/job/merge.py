"""Run the parts of a job, and publish the dataset when all are done."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from shardstream.errors import (
    NotFoundError,
    OptionError,
    ShardError,
    StorageError,
    UnfinishedError,
    plural,
)
from shardstream.format import (
    CLASSES_NAME,
    MANIFEST_NAME,
    Manifest,
    decode_classes,
    encode_manifest_files,
    parse_columns,
)
from shardstream.packing.job.destination import ShardNames, is_deletable, remove_shard, shard_of
from shardstream.packing.job.journal import Journal, read_journal
from shardstream.packing.job.key_hashes import (
    KeyHashes,
    decode_hashes,
    place_of,
    refuse_repeated_keys,
)
from shardstream.packing.job.part_job import (
    PUBLISHED,
    PartCounts,
    PartJob,
    PartResult,
    PartWork,
    files_and_sizes,
    locked,
    run_parts,
)
from shardstream.packing.job.report import (
    PackReport,
    ProgressFunction,
    SplitReport,
    logged,
)
from shardstream.packing.shards.column_builder import check_summaries
from shardstream.packing.shards.manifest_files import (
    read_old_manifest,
    remove_old_pages,
    write_manifest_files,
)
from shardstream.packing.sources.class_numbering import warn_of_siblings
from shardstream.storage import (
    FileInfo,
    OutputFolder,
    Storage,
    final_name,
    is_journal,
    is_part_record,
    join_url,
    journal_name,
    open_output_folder,
    part_record_name,
)
from shardstream.tasks import Executor, LocalExecutor, Parts, RetryCount

_THREADS = 16  # that read records
_RECORDS = 256  # that are in memory with the hashes of their keys: 107 kB for 10,000 keys
_NAMED = 8  # missing parts that a message names


class SplitJob(NamedTuple):
    """The job of one dataset: of a split, or of the only one."""

    split: str
    """Name of the split; "" without splits."""
    job: PartJob
    works: Iterable[PartWork]
    """Work of each part, in order."""


def run_jobs(
    jobs: Sequence[SplitJob],
    *,
    executor: Executor | None,
    overwrite: bool,
    progress: ProgressFunction | None,
    samples: int | None,
    skips: bool = False,
) -> PackReport:
    """Claim the destinations, run all parts, and publish the datasets; with `Parts` nothing is published.

    Args:
        jobs: The jobs; one for each dataset.
        executor: Where the parts run; by default in this process.
        overwrite: Replace existing datasets, or unfinished ones of other jobs.
        progress: Called after each part.
        samples: Samples of the source, for ``progress``.
        skips: Go on after an earlier run that skipped records.

    Raises:
        OptionError: If another dataset or job is in a folder, an earlier run skipped records, or ``overwrite`` is used with `Parts`.
        StorageError: If a folder cannot be reached, or another job takes it over.
    """
    begin_s = time.monotonic()
    is_part = isinstance(executor, Parts)
    if is_part and overwrite:
        raise OptionError(
            "overwrite cannot be used for one part: a part that starts late would delete what the others wrote; "
            "delete the old dataset first, or write elsewhere"
        )
    first = jobs[0].job
    logs = logged(f"{first.kind} {first.names.folder}", progress)
    counts = PartCounts(logs, samples, RetryCount(executor), skips=skips)
    splits: list[SplitReport] = []
    unfinished = 0
    for split, job, works in jobs:
        counts.begin(split, job.names.folder)
        unfinished += run_parts(
            job, works, executor or LocalExecutor(), counts.add, overwrite=overwrite
        )
        splits.append(counts.split)
    warnings: list[str] = []
    if not is_part:
        urls = [job.names.folder for _, job, _ in jobs]
        for merged in _publish_all(urls, jobs[0].job.storage_options):
            warnings += merged.warnings
    return PackReport(
        source=jobs[0].job.title,
        splits=tuple(splits),
        seconds=time.monotonic() - begin_s,
        skipped=tuple(counts.skipped),
        fields=dict(counts.fields),
        unfinished=unfinished,
        warnings=tuple(warnings),
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
        OptionError: If there is no such job in the folder.
        ShardError: If the record of a part is damaged.
        StorageError: If a shard is missing or was replaced, or the folder cannot be reached.
    """
    begin_s = time.monotonic()
    url = ShardNames.parse(dest).folder
    splits = _find_splits(url, storage_options)
    if not splits:
        _refuse_published_splits(url, storage_options)
    _check_all_begun(url, splits, storage_options)
    urls = splits or [url]
    merged = _publish_all(urls, storage_options)
    return PackReport(
        source="finished parts",
        splits=tuple(
            replace(split, name=split.url.rpartition("/")[2] if len(urls) > 1 else "")
            for one in merged
            for split in one.splits
        ),
        seconds=time.monotonic() - begin_s,
        skipped=tuple(skip for one in merged for skip in one.skipped),
        fields=dict(sum((Counter(one.fields) for one in merged), Counter())),
        warnings=tuple(warning for one in merged for warning in one.warnings),
    )


def _find_splits(url: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    """Return the folders right under one that hold the splits of an unfinished job; none if it holds a dataset or a job itself."""
    files = open_output_folder(url, storage_options, None).list_files()
    if MANIFEST_NAME in files or any(map(is_journal, files)):  # not a README or .DS_Store
        return []
    storage = Storage(storage_options)
    splits = []
    with suppress(NotFoundError):
        for name in filter(None, storage.list_folder(url)[1]):
            one = join_url(url, name)
            folder = open_output_folder(one, storage_options, None)
            journal = read_journal(folder, folder.list_files())
            if journal is not None and journal.task.options.get("split_name") == name:
                splits.append(one)
    return splits


def _refuse_published_splits(url: str, storage_options: Mapping[str, Any] | None) -> None:
    """Refuse a folder without files: its splits are published, or there is no job."""
    if open_output_folder(url, storage_options, None).list_files():
        return
    storage = Storage(storage_options)
    with suppress(NotFoundError):
        for name in filter(None, storage.list_folder(url)[1]):
            if storage.exists(join_url(join_url(url, name), MANIFEST_NAME)):
                raise OptionError(
                    f"nothing to merge: the splits are published already, the first in {name}",
                    shard=url,
                )
    raise _no_job_error(url, {}, None)  # before a lock would create the folder


def _check_all_begun(
    parent: str, urls: Sequence[str], storage_options: Mapping[str, Any] | None
) -> None:
    """Check that all splits of a job were begun.

    Raises:
        UnfinishedError: If one was not.
    """
    storage = Storage(storage_options)
    for url in urls:
        folder = open_output_folder(url, storage_options, None)
        journal = read_journal(folder, folder.list_files())
        for name in journal.task.options.get("split_names", ()) if journal is not None else ():
            other = join_url(parent, name)
            if other not in urls and not storage.exists(join_url(other, MANIFEST_NAME)):
                raise UnfinishedError(
                    f"no part of the split {name} has been run; run the parts again (finished shards are kept), then merge",
                    shard=other,
                )


def _num_parts(options: Mapping[str, Any], url: str) -> int:
    if not options["parts"]:
        raise UnfinishedError(
            "the job was stopped before the number of its parts was known, and cannot be resumed; run it again with overwrite=True",
            shard=url,
        )
    return int(options["parts"])


class _Publication(NamedTuple):
    """A dataset whose parts are all done, and checked."""

    folder: OutputFolder
    files: Mapping[str, FileInfo]
    journal: Journal
    manifest: Manifest
    report: PackReport
    is_published: bool = False

    def write_manifest(self) -> None:
        """Write the small files and the manifest, and delete stale shards.

        Raises:
            StorageError: If another run has taken the folder over; then the manifest does not stay.
        """
        folder, files, journal, manifest = self[:4]
        if self.is_published:
            return
        options = journal.task.options
        classes = options["extras"].get(CLASSES_NAME)
        if classes is not None:
            folder.write(CLASSES_NAME, str(classes).encode())
        stale = journal.stale - {shard.url for shard in manifest.shards}
        for name in sorted(filter(is_deletable, stale)):
            remove_shard(folder, name, files)
        if options.get("columns") is None:
            for shard in manifest.shards:
                if shard.columns_url in files:  # those of an earlier dataset
                    folder.remove(shard.columns_url)
        journal.check_owner()
        manifest_files = encode_manifest_files(manifest)
        write_manifest_files(folder, manifest_files)
        if _is_taken_over(folder, journal.run):  # the other run has not seen the manifest
            self._remove_manifest()
            journal.check_owner()
        remove_old_pages(folder, files, manifest_files)

    def unpublish(self) -> None:
        """Delete the manifest that was written."""
        if not self.is_published:
            self._remove_manifest()

    def _remove_manifest(self) -> None:
        with suppress(StorageError):
            written = encode_manifest_files(self.manifest)[MANIFEST_NAME]
            if self.folder.read(MANIFEST_NAME) == written:
                self.folder.remove(MANIFEST_NAME)

    def tidy(self) -> None:
        """Delete the records and the journal, which goes last: until then it says that the dataset is published."""
        folder, journal = self.folder, self.journal
        options = {**journal.task.options, PUBLISHED: _sha256(folder.read(MANIFEST_NAME))}
        if not self.is_published:
            journal.task = replace(journal.task, options=options)
            with suppress(StorageError):  # another `merge` of this job has written or deleted it
                journal.begin(1)
        template = str(options["template"])
        names = ShardNames(folder=folder.url, template=template)
        for name in self.files:
            final = final_name(name) or ""
            # Half-written files of killed processes: no part is left that could write one.
            is_half = bool(template) and names.is_ours(shard_of(final))
            is_record = is_part_record(name) or is_part_record(final)
            if is_record or is_half:
                folder.remove(name)
        folder.remove(journal_name(0))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _publish_all(
    urls: Sequence[str], storage_options: Mapping[str, Any] | None
) -> list[PackReport]:
    """Publish the datasets of some folders, all or none: no manifest is written before all are checked (see `merge`).

    If it is killed in between, all journals and records are there, and it can be done again.
    """
    folders = [open_output_folder(url, storage_options, None) for url in urls]
    with ExitStack() as stack:
        for folder in folders:
            stack.enter_context(locked(folder))
        found = [_checked(folder) for folder in folders]
        written: list[_Publication] = []
        try:
            for one in found:
                written.append(
                    one
                )  # its manifest may be there although an error says that it is not
                one.write_manifest()
        except BaseException:
            for one in written:
                one.unpublish()
            raise
        for one in found:
            one.tidy()
    for one in found:
        classes = one.journal.task.options["extras"].get(CLASSES_NAME)
        if classes is not None:
            names = decode_classes(str(classes).encode(), url=CLASSES_NAME)
            warn_of_siblings(names, [one.folder.url], Storage(storage_options))
    return [one.report for one in found]


def _checked(folder: OutputFolder) -> _Publication:
    """Read the records of a job, and check what they say of the dataset.

    Raises:
        OptionError: If there is no job, or the dataset would lack something that was asked for.
        SourceError: If a key comes twice.
        StorageError: If a shard is missing.
        UnfinishedError: If parts are missing.
    """
    begin_s, url = time.monotonic(), folder.url
    files = folder.list_files()
    journal = read_journal(folder, files)
    options = {} if journal is None else journal.task.options
    if journal is None or "parts" not in options:
        raise _no_job_error(url, files, journal)
    journal.finished.clear()
    if PUBLISHED in options and options[PUBLISHED] == _published_now(folder, files):
        shards = tuple(read_old_manifest(folder).shards)
        manifest = Manifest(shards=shards, name=str(options["name"]), fields={})
        return _Publication(
            folder, files, journal, manifest, _report_of(url, manifest, begin_s), True
        )
    with KeyHashes() as keys:
        results = _read_records(folder, files, journal.run, _num_parts(options, url), keys)
        shards = tuple(shard for result in results for shard in result.shards)
        for result in results:
            _check_in_place(folder, files, result)
        refuse_repeated_keys(keys, shards, folder)
    fields = sum((Counter(result.fields) for result in results), Counter[str]())
    if not shards:
        raise OptionError(
            "no sample is left: all were filtered out, so there is no dataset to publish",
            shard=url,
        )
    missing = sorted(set(options.get("fields") or ()) - fields.keys())
    if missing and options["job"] == "reshard":
        raise OptionError(
            f"no sample has the field {', '.join(missing)}, which was to be kept; nothing is published, correct fields= (--fields)",
            shard=url,
        )
    found = [warning for result in results for warning in result.warnings]
    warnings = (*found, *_check_columns(options, results))
    manifest = Manifest(shards=shards, name=str(options["name"]), fields=dict(fields))
    report = replace(
        _report_of(url, manifest, begin_s),
        skipped=tuple(skip for result in results for skip in result.skipped),
        warnings=warnings,
    )
    return _Publication(folder, files, journal, manifest, report)


def _published_now(folder: OutputFolder, files: Mapping[str, FileInfo]) -> str:
    return _sha256(folder.read(MANIFEST_NAME)) if MANIFEST_NAME in files else ""


def _report_of(url: str, manifest: Manifest, begin_s: float) -> PackReport:
    split = SplitReport(
        name="",
        url=url,
        samples=manifest.nsamples,
        shards=len(manifest.shards),
        total_bytes=manifest.total_bytes,
    )
    return PackReport(
        source="finished parts",
        splits=(split,),
        seconds=time.monotonic() - begin_s,
        fields=dict(manifest.fields),
    )


def _is_taken_over(folder: OutputFolder, run: str) -> bool:
    """Return whether the journal is that of another run; without one, another `merge` of this job has ended first."""
    try:
        return bool(json.loads(folder.read(journal_name(0)))["run"] != run)
    except NotFoundError:
        return False


def _read_records(
    folder: OutputFolder, files: Mapping[str, FileInfo], run: str, parts: int, keys: KeyHashes
) -> list[PartResult]:
    """Return the results of all parts, in order, without the hashes of their keys, which go to ``keys``.

    Raises:
        ShardError: If a record is damaged.
        UnfinishedError: If some are missing.
    """

    def read(number: int) -> tuple[int, PartResult] | None:
        name = part_record_name(number)
        if name not in files:
            return None
        try:
            document = json.loads(folder.read(name))
            if document["run"] != run:
                return None
            return int(document["of"]), PartResult.decode(document)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ShardError(
                f"the record of a part cannot be read ({type(error).__name__}: {error})",
                remedy="run the parts again (finished shards are kept), then merge",
                shard=join_url(folder.url, name),
            ) from error

    results: list[PartResult] = []
    missing: list[int] = []
    of = set[int]()
    num_shards = 0
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-merge") as pool:
        for first in range(0, parts, _RECORDS):
            numbers = range(first, min(first + _RECORDS, parts))
            for number, record in zip(numbers, pool.map(read, numbers), strict=True):
                if record is None:
                    missing.append(number)
                    continue
                count, result = record
                of.add(count)
                _add_keys(keys, result, num_shards)
                num_shards += len(result.shards)
                results.append(replace(result, key_hashes=""))
    if missing:
        raise UnfinishedError(_missing_text(missing, parts, of), shard=folder.url)
    return results


def _add_keys(keys: KeyHashes, result: PartResult, first: int) -> None:
    """Add the keys of a part; ``first`` is the number of its first shard in the dataset."""
    hashes = decode_hashes(result.key_hashes)
    if not len(hashes):
        return
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


def _check_columns(options: Mapping[str, Any], results: Sequence[PartResult]) -> list[str]:
    """Return warnings of columns that some samples lack (see `check_summaries`)."""
    if options.get("columns") is None:
        return []
    summaries = [summary for result in results for summary in result.columns]
    nsamples = sum(result.nsamples for result in results)
    return check_summaries(
        parse_columns(options["columns"]) if options["columns"] else (), summaries, nsamples
    )


def _check_in_place(
    folder: OutputFolder, files: Mapping[str, FileInfo], result: PartResult
) -> None:
    for shard in result.shards:
        for name, size in files_and_sizes(shard):
            found = files.get(name)
            if found is None or found.size_or_none != size:
                raise StorageError(
                    f"the file is {'missing' if found is None else 'another one'} although its part is done; "
                    "run the parts again, then merge",
                    shard=ShardNames(folder=folder.url, template="").url(name),
                )


def _no_job_error(url: str, files: Mapping[str, FileInfo], journal: Journal | None) -> OptionError:
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
