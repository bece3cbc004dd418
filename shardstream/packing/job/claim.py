"""Claim the destination of a job with a journal, so that other writers and all readers see an unfinished dataset."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from shardstream.errors import NotFoundError, OptionError, StorageError
from shardstream.format import MANIFEST_NAME
from shardstream.packing.job.append import find_appended
from shardstream.packing.job.destination import (
    Claim,
    ShardNames,
    claim_destination,
    is_half_written,
    published_sha256,
)
from shardstream.packing.job.folder_state import Journal, Task, read_journal
from shardstream.packing.job.part_record import PartWork
from shardstream.packing.shards.part_writer import WriterOptions
from shardstream.storage import (
    JOURNAL_NAME,
    OutputFolder,
    Storage,
    is_part_record,
    open_output_folder,
)

_LOCK_TIMEOUT_S = 10.0  # a process that claims the folder or merges it holds the lock for less
_LOCK_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PartJob:
    """The job of one dataset, and its destination; its identity is equal in all processes that run a part of it.

    Args:
        kind: Verb of the job, e.g. "reshard".
        title: Description of the source, for reports.
        names: Folder and names of the shards.
        source: Text that changes with the source; None if that is unknown: then a stopped job begins again.
        options: All options that decide the bytes, as JSON values.
        limits: Maximum samples and bytes of a shard, its columns, and the name of the dataset.
        parts: Number of parts, which source and options decide; 0 if it is not known before they are run.
        extras: Small text files that are published with the manifest, by name.
        storage_options: ``storage_options`` of the destination; not part of the identity.
        split: Name of the split; "" without splits.
        works: Work of each part, in order, where the parts are not those of a stream.
        skips: Whether records that cannot be packed are skipped; if not, an earlier run that did so is not continued.
        keeps_keys: Of samples that a stream yields, whether their keys are compared when the dataset is published.
        call: Identity of this call, of a job whose source has none.
    """

    kind: str
    title: str
    names: ShardNames
    source: str | None
    options: Mapping[str, Any]
    limits: WriterOptions
    parts: int = 0
    extras: Mapping[str, str] = field(default_factory=dict)
    storage_options: Mapping[str, Any] | None = None
    split: str = ""
    works: Iterable[PartWork] = ()
    skips: bool = False
    keeps_keys: bool = False
    call: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def task(self) -> Task:
        """Source and options, for the journal; `merge` needs no more."""
        options = {"job": self.kind, **self.options, "template": self.names.template}
        extras = dict(sorted(self.extras.items()))
        return Task(
            source=self.source, options=options | {"name": self.limits.name, "extras": extras}
        )

    @property
    def run(self) -> str:
        """Identity of the job, 32 hex digits: equal for all its processes."""
        task = self.task
        text = json.dumps([task.source or self.call, dict(task.options)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def open_folder(self) -> OutputFolder:
        """Open the folder of the dataset."""
        return open_output_folder(self.names.folder, self.storage_options, None)

    def new_journal(self, folder: OutputFolder) -> Journal:
        """Return the journal of the job when it begins; nothing is written."""
        return Journal(folder=folder, task=self.task, parts=self.parts, run=self.run)


@contextmanager
def claimed(jobs: Sequence[PartJob], *, overwrite: bool) -> Iterator[list[Claim]]:
    """Claim the destinations of jobs, or none, and lock out all others until the end; an error before the first change undoes it.

    Raises:
        OptionError: If another dataset or job is in a folder and ``overwrite`` is not set.
        StorageError: If a folder cannot be reached, or another writer is at work there.
    """
    with ExitStack() as stack:

        def begin(job: PartJob) -> Claim:
            folder = job.open_folder()
            stack.callback(folder.unlock)
            folder.lock()
            return _claim(job, folder, overwrite=overwrite)

        claims = _all_or_none(jobs, begin)
        try:
            for claim in claims:
                claim.take()
            yield claims
        except BaseException:
            for claim in claims:
                claim.release()
            raise


def join(jobs: Sequence[PartJob], *, overwrite: bool) -> list[Claim]:
    """Claim the destinations of jobs, or join the processes that run them already; or none.

    Raises:
        OptionError: If another dataset or job is in a folder and ``overwrite`` is not set.
        StorageError: If a folder cannot be reached, or another writer takes it at the same time.
    """

    def begin(job: PartJob) -> Claim:
        folder = job.open_folder()
        try:
            if _wait_for_lock(folder, unless=lambda: _joined(job, folder) is not None):
                return _claim(job, folder, overwrite=overwrite).take()
        finally:
            folder.unlock()
        return _joined(job, folder) or begin(job)

    claims = _all_or_none(jobs, begin)
    for claim in claims:
        if not claim.is_published:  # else nothing is written
            claim.check_owner()
    return claims


def _all_or_none(jobs: Sequence[PartJob], begin: Callable[[PartJob], Claim]) -> list[Claim]:
    claims: list[Claim] = []
    for job in jobs:
        try:
            claims.append(begin(job))
        except OptionError:
            # The first split is published last and keeps its journal longest: that of another one may be deleted already.
            journal = None
            if claims and claims[0].is_published:
                journal = restore_journal(job.open_folder(), job.task, job.run, claims[0].journal)
            if journal is None:
                for claim in claims:
                    claim.release()
                raise
            claims.append(Claim(journal, job.names, "tidy"))
    return claims


def restore_journal(folder: OutputFolder, task: Task, run: str, first: Journal) -> Journal | None:
    """Write the journal of a published split again, to be deleted with the others; None if its dataset is not the one of the first split's journal."""
    files, published = folder.list_files(), first.others.get(str(task.options["split_name"]))
    if JOURNAL_NAME in files or published is None:
        return None
    if published.sha256 != published_sha256(folder, files):  # replaced since
        return None
    journal = Journal(folder=folder, task=task, run=run, published=published)
    journal.write()
    return journal


def _claim(job: PartJob, folder: OutputFolder, *, overwrite: bool) -> Claim:
    """Claim a locked folder (see `decide`)."""
    new, extras = job.new_journal(folder), frozenset(job.extras)
    claim = claim_destination(
        new,
        job.names,
        overwrite=overwrite,
        extras=extras,
        is_appended=lambda has_files: bool(
            find_appended(folder.url, Storage(job.storage_options), has_files=has_files)
        ),
    )
    if job.parts and not claim.journal.parts:  # of a run that did not know it
        claim.journal.parts = job.parts
        claim.journal.write()
    return claim


def _joined(job: PartJob, folder: OutputFolder) -> Claim | None:
    """Return the claim of another process of the job, if there is one and nothing is to be decided; without a listing.

    Hundreds of tasks that start together do not wait for each other's listings so, which take a second each in a large folder.
    """
    # Without a journal, or with an invalid one, `claim_destination` decides.
    with suppress(OptionError, StorageError):
        journal = read_journal(folder, (JOURNAL_NAME,))
        is_mine = journal is not None and journal.run == job.run and journal.published is None
        if journal is None or not is_mine or (job.parts and not journal.parts):
            return None
        try:
            folder.read(MANIFEST_NAME, 0, 1)  # of the dataset to replace
        except NotFoundError:
            return Claim(journal, job.names, "join")
    return None


def remove_job_files(
    folder: OutputFolder, files: Collection[str], names: ShardNames, extras: Container[str]
) -> None:
    """Delete the records and the journal of a job that is published; the journal goes last: until then it says so.

    Args:
        folder: Folder of the dataset.
        files: Names of its files.
        names: Names of its shards: files of killed processes are half-written, and no part is left that could write one.
        extras: Names of the small files next to the manifest.
    """
    for name in files:
        if is_part_record(name) or is_half_written(name, names, extras):
            folder.remove(name)
    folder.remove(JOURNAL_NAME)


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
