"""Run a job whose parts write shards in any process and order, and publish the dataset when all parts are done.

A job is cut into parts by its source and options alone, so that every process computes the same parts. The first process claims the
destination with a journal that holds the job; each finished part leaves a record, a small JSON file in the same folder. `merge` reads
the records, publishes ``index.json`` and deletes them. A part that has a record and whose shards are in place is not run again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from shardstream.errors import NotFoundError, OptionError, StorageError
from shardstream.format import (
    INDEX_SUFFIX,
    MANIFEST_NAME,
    OFFSET_BYTES,
    ShardInfo,
)
from shardstream.packing.job.destination import ShardNames, claim_destination
from shardstream.packing.job.journal import Journal, Task, read_journal
from shardstream.packing.job.report import (
    Progress,
    ProgressFunction,
    Skip,
    SplitReport,
    skipped_before_error,
)
from shardstream.packing.shards.column_builder import ColumnSummary
from shardstream.storage import (
    FileInfo,
    OutputFolder,
    Storage,
    absolute_url,
    journal_name,
    open_output_folder,
    part_record_name,
)
from shardstream.tasks import JSON, Executor, Parts, RetryCount
from shardstream.tasks import Task as ShardTask

if TYPE_CHECKING:
    from collections.abc import Iterator

PUBLISHED = "published"  # option in the journal of a published job: the sha256 of its index.json
_LOCK_TIMEOUT_S = 10.0  # a process that claims the folder or merges it holds the lock for less
_LOCK_POLL_S = 0.05


class PartWork(Protocol):
    """The work of one part; picklable, and the same whenever it is run."""

    def write(self, folder: OutputFolder, check_owner: Callable[[], None]) -> PartResult:
        """Write the shards of the part.

        Args:
            folder: Folder of the dataset.
            check_owner: Raises if another job has taken the folder over; to be called before each shard is published.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """Shards that a part has published.

    Args:
        shards: Their entries in the manifest, in order.
        fields: Number of samples that have each field.
        left_out: Samples of the source that were filtered out.
        warnings: Findings that may be mistakes.
        skipped: Records that were skipped, in order.
        key_hashes: Hashes of all keys, in order (see `encode_hashes`), if they may repeat.
        columns: Number and type of the values of columns, for each shard; none without columns.
    """

    shards: tuple[ShardInfo, ...]
    fields: Mapping[str, int] = field(default_factory=dict)
    left_out: int = 0
    warnings: tuple[str, ...] = ()
    skipped: tuple[Skip, ...] = ()
    key_hashes: str = ""
    columns: tuple[ColumnSummary, ...] = ()

    @property
    def nsamples(self) -> int:
        """Samples in the shards."""
        return sum(shard.nsamples or 0 for shard in self.shards)

    @property
    def total_bytes(self) -> int:
        """Bytes of the shards."""
        return sum(shard.filesize or 0 for shard in self.shards)

    def encode(self) -> dict[str, JSON]:
        """Return the result as JSON values."""
        shards: list[JSON] = [
            [shard.url, shard.nsamples, shard.filesize, shard.sha256] for shard in self.shards
        ]
        document: dict[str, JSON] = {"shards": shards, "fields": {**self.fields}}
        document |= {"left_out": self.left_out, "warnings": [*self.warnings]}
        document |= {"skipped": [[*one] for one in self.skipped], "keys": self.key_hashes}
        columns: list[JSON] = [
            {name: [*one] for name, one in some.items()} for some in self.columns
        ]
        return document | {"columns": columns}

    @classmethod
    def decode(cls, document: Mapping[str, Any]) -> PartResult:
        """Read what `encode` has returned."""
        shards = tuple(
            ShardInfo(url=str(url), nsamples=int(nsamples), filesize=int(size), sha256=str(sha256))
            for url, nsamples, size, sha256 in document["shards"]
        )
        fields = {str(name): int(count) for name, count in document["fields"].items()}
        return cls(
            shards=shards,
            fields=fields,
            left_out=int(document["left_out"]),
            warnings=tuple(map(str, document["warnings"])),
            skipped=tuple(Skip(str(where), str(reason)) for where, reason in document["skipped"]),
            key_hashes=str(document["keys"]),
            columns=tuple(
                {str(name): (int(count), str(kind)) for name, (count, kind) in some.items()}
                for some in document["columns"]
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartJob:
    """A job and its destination; equal in all processes that run a part of it.

    Args:
        kind: Verb of the job, e.g. "reshard".
        title: Description of the source, for reports.
        names: Folder and names of the shards.
        source: Text that changes with the source.
        options: All options that decide the bytes, as JSON values.
        parts: Number of parts.
        name: Name of the dataset.
        extras: Small text files that are published with the manifest, by name.
        storage_options: ``storage_options`` of the destination; not part of the identity.
    """

    kind: str
    title: str
    names: ShardNames
    source: str
    options: Mapping[str, Any]
    parts: int
    name: str = ""
    extras: Mapping[str, str] = field(default_factory=dict)
    storage_options: Mapping[str, Any] | None = None

    @property
    def task(self) -> Task:
        """Source and options, for the journal; `merge` needs no more."""
        options = {"job": self.kind, **self.options, "template": self.names.template}
        return Task(
            source=self.source,
            options=options
            | {"parts": self.parts, "name": self.name, "extras": dict(sorted(self.extras.items()))},
        )

    @property
    def run(self) -> str:
        """Identity of the job, 32 hex digits: equal for all its processes."""
        text = json.dumps([self.task.source, dict(self.task.options)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def open_folder(self) -> OutputFolder:
        """Open the folder of the dataset."""
        return open_output_folder(self.names.folder, self.storage_options, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTask:
    """The task of one part: runs it, unless its record says that it is done.

    Args:
        folder: URL of the folder of the dataset.
        storage_options: ``storage_options`` of the folder.
        run_id: Identity of the job.
        number: Number of the part, from 0.
        work: Its work.
        of: Number of parts in the terms of `Parts`, for messages; 0 with other executors.
    """

    folder: str
    storage_options: Mapping[str, Any] | None
    run_id: str
    number: int
    work: PartWork
    of: int = 0

    @property
    def name(self) -> str:
        """Number of the part, and the folder."""
        return f"part {self.number} of {self.folder}"

    def run(self) -> Mapping[str, JSON]:
        """Write the shards and the record; a second run changes nothing."""
        folder = open_output_folder(self.folder, self.storage_options, None)
        document = self._finished_before(folder)
        if document is not None:
            return document | {"kept": True}
        journal = Journal(folder=folder, task=Task(source=None, options={}), run=self.run_id)
        journal.check_owner()
        result = self.work.write(folder, journal.check_owner)
        journal.check_owner()
        document = {"run": self.run_id, "part": self.number, "of": self.of, **result.encode()}
        record, data = part_record_name(self.number), json.dumps(document).encode()
        folder.write(record, data)
        try:
            journal.check_owner()
        except (
            StorageError
        ):  # another writer took the folder in between: the record is none of its files
            if folder.read(record) == data:
                folder.remove(record)
            raise
        return document | {"kept": False}

    def _finished_before(self, folder: OutputFolder) -> dict[str, JSON] | None:
        """Return the record of an earlier run of this part whose shards are in place."""
        try:
            data = folder.read(part_record_name(self.number))
        except NotFoundError:
            return None
        try:
            document = json.loads(data)
            if document["run"] != self.run_id:
                return None
            result = PartResult.decode(document)
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
        storage = Storage(self.storage_options)
        names = ShardNames(folder=self.folder, template="")
        for shard in result.shards:
            for name, size in files_and_sizes(shard):
                try:
                    if storage.info(names.url(name)).size != size:
                        return None
                except NotFoundError:
                    return None
        return cast("dict[str, JSON]", document)


class PartCounts:
    """Counts the results of parts, for the progress and the report."""

    def __init__(
        self,
        progress: ProgressFunction | None,
        total: int | None,
        retries: RetryCount,
        *,
        skips: bool,
    ) -> None:
        self.split = SplitReport(name="", url="", samples=0, shards=0, total_bytes=0)
        """The parts of the current split that were run here."""
        self.fields = Counter[str]()
        self.skipped: list[Skip] = []
        self._progress, self._update = progress, Progress(0, 0, 0, total)
        self._retries, self._skips = retries, skips

    def begin(self, split: str, url: str) -> None:
        """Begin the next split."""
        self.split = SplitReport(name=split, url=url, samples=0, shards=0, total_bytes=0)

    def add(self, task: ShardTask, document: Mapping[str, JSON]) -> None:  # noqa: ARG002
        """Count the result of a part.

        Raises:
            OptionError: If records were skipped in an earlier run, and this one does not skip.
        """
        result, split, update = PartResult.decode(document), self.split, self._update
        if result.skipped and not self._skips:
            raise skipped_before_error(len(result.skipped), result.skipped[0], split.url)
        kept = bool(document["kept"])
        self.split = replace(
            split,
            samples=split.samples + result.nsamples,
            shards=split.shards + len(result.shards),
            total_bytes=split.total_bytes + result.total_bytes,
            kept=split.kept + len(result.shards) * kept,
        )
        self.fields.update(result.fields)
        self.skipped += result.skipped
        self._update = Progress(
            update.samples + result.nsamples,
            update.skipped + result.left_out + len(result.skipped),
            update.size_bytes + result.total_bytes,
            update.total,
            update.kept + result.nsamples * kept,
            update.shards + len(result.shards),
            update.failures + len(result.skipped),
            self._retries.count,
        )
        if self._progress is not None:
            self._progress(self._update)


def run_parts(
    job: PartJob,
    works: Iterable[PartWork],
    executor: Executor,
    done: Callable[[ShardTask, Mapping[str, JSON]], None],
    *,
    overwrite: bool = False,
) -> int:
    """Claim the destination, and run the parts that the executor runs; return the number of parts without a record.

    Args:
        job: The job.
        works: Work of each part, in order.
        executor: Where they run.
        done: Called with the record of each part.
        overwrite: Replace an existing dataset, or an unfinished one of another job.

    Raises:
        OptionError: If another dataset or job is in the folder.
        StorageError: If the folder cannot be reached, or another job takes it over.
    """
    claim(job, overwrite=overwrite)
    tasks = (
        PartTask(
            folder=absolute_url(job.names.folder),
            storage_options=job.storage_options,
            run_id=job.run,
            number=number,
            work=work,
            of=executor.of if isinstance(executor, Parts) else 0,
        )
        for number, work in enumerate(works)
    )
    executor.run(tasks, done)
    return len(missing_parts(job.open_folder().list_files(), job.parts))


def claim(job: PartJob, *, overwrite: bool) -> None:
    """Take the destination for a job, or join the processes that run it already.

    Raises:
        OptionError: If another dataset or job is there and ``overwrite`` is not set.
        StorageError: If the folder cannot be reached, or another writer takes it at the same time.
    """
    folder = job.open_folder()
    try:
        if _wait_for_lock(folder, unless=partial(_is_claimed, folder, job)):
            _claim_locked(job, folder, overwrite=overwrite)
    finally:
        folder.unlock()


def _is_claimed(folder: OutputFolder, job: PartJob) -> bool:
    """Return whether a process of the job has claimed the folder, without a listing.

    Hundreds of tasks that start together do not wait for each other's listings so, which take a second each in a large folder.
    """
    try:
        if not _has_job(folder, (journal_name(0),), job):
            return False
    except StorageError:  # there is no journal
        return False
    try:
        folder.read(MANIFEST_NAME, 0, 1)
    except NotFoundError:
        return True
    return False  # the one of the dataset to replace, which is deleted under the lock


def _claim_locked(job: PartJob, folder: OutputFolder, *, overwrite: bool) -> None:
    files = folder.list_files()
    if _has_job(folder, files, job):
        if MANIFEST_NAME in files and missing_parts(files, job.parts):
            # Of the dataset to replace: the claim was stopped halfway.
            folder.remove(MANIFEST_NAME)
        return
    destination = claim_destination(
        folder, job.names, task=job.task, overwrite=overwrite, extras=frozenset(job.extras)
    )
    journal = Journal(
        folder=folder,
        task=job.task,
        stale=destination.stale,
        run=job.run,
        head=destination.journal_head,
    )
    journal.begin(destination.journal_files)
    if destination.files:
        destination.remove_parts()
    if destination.has_manifest:
        destination.unpublish()
        journal.check_owner()


def set_parts(job: PartJob, parts: int) -> None:
    """Record the number of parts of a claimed job, if it was not known at the claim.

    Args:
        job: The job, as it was claimed.
        parts: Its parts; all have a record.

    Raises:
        StorageError: If another job has taken the folder over.
    """
    folder = job.open_folder()
    with locked(folder):
        journal = read_journal(folder, folder.list_files())
        if journal is None or journal.run != job.run:
            Journal(folder=folder, task=job.task, run=job.run).check_owner()
            return
        journal.task = replace(journal.task, options={**journal.task.options, "parts": parts})
        journal.begin(1)


def missing_parts(files: Mapping[str, FileInfo], parts: int) -> list[int]:
    """Return the numbers of the parts that have no record among some files."""
    return [number for number in range(parts) if part_record_name(number) not in files]


def files_and_sizes(shard: ShardInfo) -> tuple[tuple[str, int], ...]:
    """Return names and sizes of a shard and its index."""
    index_bytes = OFFSET_BYTES * ((shard.nsamples or 0) + 1)
    return (shard.url, shard.filesize or 0), (shard.url + INDEX_SUFFIX, index_bytes)


def _has_job(folder: OutputFolder, files: Collection[str], job: PartJob) -> bool:
    """Return whether processes of the same job have claimed the folder."""
    if journal_name(0) not in files:
        return False
    with suppress(OptionError):  # an invalid journal: `claim_destination` decides
        journal = read_journal(folder, files)
        # A job that is published is over: what is left of it is deleted by `merge`.
        is_over = journal is not None and PUBLISHED in journal.task.options
        return journal is not None and journal.run == job.run and not is_over
    return False


@contextmanager
def locked(folder: OutputFolder) -> Iterator[None]:
    """Lock the folder; wait for other processes of the job, which hold the lock for a moment."""
    try:
        _wait_for_lock(folder)
        yield
    finally:
        folder.unlock()


def _wait_for_lock(folder: OutputFolder, *, unless: Callable[[], bool] = lambda: False) -> bool:
    """Lock the folder, unless that is needless before another process releases it; return whether it is locked.

    Raises:
        StorageError: If a process holds the lock for long.
    """
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while not unless():
        try:
            folder.lock()
        except StorageError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOCK_POLL_S)
        else:
            return True
    return False
