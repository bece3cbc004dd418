"""Claim the destination of a job with a journal, so that other writers and all readers see an unfinished dataset, or refuse it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Self

from shardstream.errors import OptionError, StorageError, get_logger
from shardstream.format import CLASSES_NAME, MANIFEST_NAME
from shardstream.packing.job.append import find_appended
from shardstream.packing.job.folder_state import (
    WRITER_TASK,
    Journal,
    ShardNames,
    Task,
    has_versions,
    is_deletable,
    is_half_written,
    published_sha256,
    read_journal,
    read_listed,
    read_old_manifest,
    shard_of,
)
from shardstream.packing.job.parts import PartJob
from shardstream.storage import JOURNAL_NAME, FileInfo, OutputFolder, Storage, is_part_record

_log = get_logger(__name__)


Action = Literal["take", "join", "tidy", "replace"]
Refusal = Literal["published", "samples", "shards", "writer", "job", "journal"]
Whose = Literal["none", "writer", "same job", "samples", "other job", "unreadable"]
_LOCK_TIMEOUT_S = 10.0  # a process that claims the folder or merges it holds the lock for less
_LOCK_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is in a folder that a job is to write to.

    Args:
        journal: Whose journal is there, if any; "writer" also if a `ShardWriter` is to write, which resumes nothing; "samples" if it is of a
            stopped job with the same options whose source has no identity: samples from Python, or functions without a version.
        manifest: Whether a dataset is published there.
        is_of_journal: Whether the job of the journal has published it.
        shards: Whether there are shards with names that the job writes.
        tars: Whether there are tars of any name, or records of parts.
    """

    journal: Whose = "none"
    manifest: bool = False
    is_of_journal: bool = False
    shards: bool = False
    tars: bool = False


def decide(found: Found, *, overwrite: bool = False) -> Action | Refusal:
    """Decide what a job does with a folder; the first line that fits counts.

    =============== ============== ============= ================== =========================
    journal         manifest       other files   without overwrite  with overwrite
    =============== ============== ============= ================== =========================
    unreadable                                   refuse: journal    replace
    same job        of the job                   tidy               replace
    same job        none                         join               join
    same job        another one                  refuse: published  join (it was begun so)
    samples         none                         replace            replace
    samples         of the job                   refuse: samples    replace
    any other       any                          refuse: published  replace
    none, writer    none           its shards    refuse: shards     replace
    writer          none           tars          refuse: writer     replace
    other job       none           tars          refuse: job        replace
    none or other   none                         take               take
    =============== ============== ============= ================== =========================

    "take" claims a folder without a dataset, "join" keeps the finished parts of the job, "tidy" deletes what a publication has left,
    and "replace" deletes the files of the other dataset when the new one is complete.

    >>> decide(Found()), decide(Found(manifest=True)), decide(Found(manifest=True), overwrite=True)
    ('take', 'published', 'replace')
    >>> decide(Found(journal="same job", shards=True)), decide(Found(journal="other job", tars=True))
    ('join', 'job')
    >>> decide(Found(journal="same job", manifest=True, is_of_journal=True))
    'tidy'
    """
    if found.journal == "same job":
        if not found.manifest or (overwrite and not found.is_of_journal):
            return "join"
        if not found.is_of_journal:
            return "published"
        return "replace" if overwrite else "tidy"
    refusal = _refusal(found)
    if refusal is None:
        return "replace" if found.journal == "samples" else "take"
    return "replace" if overwrite else refusal


def _refusal(found: Found) -> Refusal | None:
    """Return why a job must not replace what is there without being told to."""
    if found.journal == "unreadable":
        return "journal"
    if found.manifest:
        is_stopped = found.journal == "samples" and found.is_of_journal
        return "samples" if is_stopped else "published"
    if found.journal in ("none", "writer") and found.shards:
        return "shards"
    if found.journal == "writer" and found.tars:
        return "writer"
    return "job" if found.journal == "other job" and found.tars else None


class Claim:
    """A folder that belongs to a job or a `ShardWriter`, once `take` has written its journal; until the first shard, `release` undoes it.

    Args:
        journal: The journal of the job: that which is there, if the job joins or tidies up, else a new one, which is not written yet.
        names: Names of its shards.
        action: What the job does with the folder (see `decide`).
        files: The files there before, by name.
        extras: Names of small files that the job writes, too.
    """

    def __init__(
        self,
        journal: Journal,
        names: ShardNames,
        action: Action,
        files: Mapping[str, FileInfo] = MappingProxyType({}),
        extras: frozenset[str] = frozenset(),
    ) -> None:
        self.journal, self.names, self.action, self.files = journal, names, action, files
        self.replaces = bool(journal.stale) or any(map(names.is_ours, map(shard_of, files)))
        """Whether shards of the names that are written may exist."""
        self.is_published = action == "tidy"
        """Whether the dataset is published already, and only the files of the job are left to delete."""
        self._extras = extras
        self._lock = threading.Lock()
        self._is_changed = False

    def take(self) -> Self:
        """Write the journal to the locked folder, unless it is there, and delete half-written files of killed writers, and records of another job.

        Raises:
            OptionError: If a dataset would be replaced that has versions.
            StorageError: If another run has taken the folder over meanwhile, or it cannot be written.
        """
        if self.action == "replace" and has_versions(self.journal.folder, self.files):
            raise OptionError(
                "the dataset here has versions, or deleted samples, whose files would stay; delete its folder first, or write elsewhere",
                shard=self.names.folder,
            )
        if self.action in ("take", "replace"):
            self.journal.write()
            for name in self.files:
                if is_part_record(name) or is_half_written(name, self.names, self._extras):
                    self.journal.folder.remove(name)
        return self

    def check_owner(self) -> None:
        """Check that the folder is still that of the claim; before the first change, unpublish the dataset it replaces.

        Raises:
            StorageError: If another run has taken the folder over.
        """
        with self._lock:
            self.journal.check_owner()
            if self._is_changed:
                return
            self._is_changed = True
            if MANIFEST_NAME not in self.files or self.is_published:
                return
            self.journal.folder.remove(MANIFEST_NAME)  # its shards are deleted or replaced later
            if CLASSES_NAME in self.files and CLASSES_NAME not in self._extras:
                _log.warning(
                    "%s belongs to the replaced dataset and is kept; delete it if its names do not match the new class numbers",
                    self.names.url(CLASSES_NAME),
                )
            # A run that took the folder in between may rely on the manifest that is gone now.
            self.journal.check_owner()

    def release(self) -> None:
        """Leave the folder as it was before the claim, if nothing was changed since."""
        if self._is_changed or self.action in ("join", "tidy"):
            return
        with suppress(StorageError):  # the earlier error is the one to report
            folder, before = self.journal.folder, self.files
            files = folder.list_files()
            if MANIFEST_NAME in before:
                is_as_before = MANIFEST_NAME in files
            else:  # it may have had files that are not of a dataset
                is_free = not (self.journal.stale or JOURNAL_NAME in before)
                is_as_before = is_free and not any(map(is_deletable, files))
            if is_as_before:
                folder.remove(*filter(is_part_record, files))  # of parts without samples
                self.journal.remove()


def claim_destination(
    new: Journal,
    names: ShardNames,
    *,
    overwrite: bool,
    extras: frozenset[str] = frozenset(),
    is_appended: Callable[[bool], bool] = lambda _: False,
) -> Claim:
    """Decide which files of the folder are kept or replaced (see `decide`); nothing is changed yet.

    Args:
        new: The journal of a job that begins, in its folder.
        names: Names of the shards.
        overwrite: Replace another dataset or job.
        extras: Names of small files that the job writes, too.
        is_appended: Returns whether the dataset that shards are appended to lists those of this folder, which has files or not.

    Raises:
        OptionError: If another dataset or job is there and ``overwrite`` is not set.
        StorageError: If the folder cannot be reached.
    """
    folder, task = new.folder, new.task
    files = folder.list_files()
    is_listed = "append" in task.options and is_appended(bool(files))
    if not (files or is_listed):  # nothing is to be decided
        return Claim(new, names, "take", extras=extras)
    found, unreadable = None, None
    try:
        found = read_journal(folder, files)
    except OptionError as error:
        unreadable, new.head = error, read_listed(folder, JOURNAL_NAME)
    seen = _look(new, names, files, found, is_listed=is_listed)
    if unreadable is not None:
        seen = Found(journal="unreadable")
    action = decide(seen, overwrite=overwrite)
    if action not in ("take", "join", "tidy", "replace"):
        raise unreadable or _refusal_error(action, names, files, found, task)
    if seen.journal == "samples" and action == "replace" and not overwrite:
        _log.warning(
            "%s: the stopped job begins again, because samples from Python, and functions without a version, cannot be compared; "
            "reshard(version=1) goes on where such a job was stopped",
            names.folder,
        )
    journal = new
    if found is not None and action in ("join", "tidy"):
        journal = found
    elif found is not None:
        new.head = found.head
    stale = frozenset(name for name in files if _may_be_shard(name, names, found))
    if action == "join":
        stale = journal.stale
    elif MANIFEST_NAME in files:
        stale |= {shard.url for shard in read_old_manifest(folder).shards}
    journal.stale = frozenset(filter(is_deletable, stale))
    return Claim(journal, names, action, files, extras)


def _look(
    new: Journal,
    names: ShardNames,
    files: Mapping[str, FileInfo],
    journal: Journal | None,
    *,
    is_listed: bool,
) -> Found:
    whose: Whose = "none"
    task = new.task
    if journal is not None:
        if task == WRITER_TASK or journal.is_of_writer:
            whose = "writer"
        elif task.differences(journal.task):
            whose = "other job"
        else:
            whose = "samples" if task.source is None else "same job"
    published = None if journal is None else journal.published
    sha256 = published_sha256(new.folder, files)
    return Found(
        journal=whose,
        manifest=is_listed or MANIFEST_NAME in files,
        is_of_journal=is_listed or (published is not None and published.sha256 == sha256),
        shards=any(map(names.is_ours, files)),
        tars=any(is_deletable(name) or is_part_record(name) for name in files),
    )


def _may_be_shard(name: str, names: ShardNames, journal: Journal | None) -> bool:
    """Return whether a file is a shard of the job, or of the one that a journal names."""
    if journal is None:
        return names.is_ours(name)
    template = str(journal.task.options.get("template", ""))
    is_theirs = bool(template) and ShardNames(folder="", template=template).is_ours(name)
    return names.is_ours(name) or is_theirs or name in journal.stale


def _refusal_error(
    refusal: Action | Refusal,
    names: ShardNames,
    files: Mapping[str, FileInfo],
    journal: Journal | None,
    task: Task,
) -> OptionError:
    if refusal == "published" and MANIFEST_NAME not in files:
        return OptionError(
            "this source was appended already, with the same options: the dataset lists its shards, and nothing is to be done",
            shard=names.folder,
        )
    if refusal == "published":
        return OptionError(
            "a dataset is published here; replace it with overwrite=True (--overwrite), or write elsewhere",
            shard=names.url(MANIFEST_NAME),
        )
    if refusal == "samples":
        return OptionError(
            "a run that was stopped at its end has published a dataset here, and samples from Python, or functions without version=, have no "
            "identity: complete it with merge (shardstream merge) of this folder, or, with splits, of the folder above it; or replace it with "
            "overwrite=True (--overwrite)",
            shard=names.folder,
        )
    if refusal == "shards" and "append" in task.options:
        return OptionError(
            "this source was appended already, with the same options, and all its samples were deleted; remove the versions that have them first "
            "('shardstream gc'), or give the samples other keys (key=, --key)",
            shard=names.folder,
        )
    if refusal == "shards":
        return OptionError(
            "a shard of this name exists without an index.json, from a failed run or another tool; "
            "replace it with overwrite=True (--overwrite), or write elsewhere",
            shard=names.url(min(filter(names.is_ours, files))),
        )
    if refusal == "job" and journal is not None:
        return OptionError(
            f"an unfinished pack with another source or options is here: {'; '.join(task.differences(journal.task))}. Resume it with its "
            "own source and options, or replace it with overwrite=True (--overwrite), or write elsewhere",
            shard=names.folder,
        )
    return OptionError(
        "another pack or ShardWriter is writing here, or was stopped; wait for it, replace its files with overwrite=True "
        "(--overwrite), or write elsewhere",
        shard=names.folder,
    )


@contextmanager
def claimed(jobs: Sequence[PartJob], *, overwrite: bool) -> Iterator[list[Claim]]:
    """Claim the destinations of jobs, or none, and lock out all others until the end; an error before the first change undoes it.

    Raises:
        OptionError: If another dataset or job is in a folder and ``overwrite`` is not set.
        StorageError: If a folder cannot be reached, or another writer is at work there.
    """
    with ExitStack() as stack:

        def begin(job: PartJob) -> Claim:
            new = job.new_journal()
            stack.callback(new.folder.unlock)
            new.folder.lock()
            return _claim(job, new, overwrite=overwrite)

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
        new = job.new_journal()
        folder = new.folder
        try:
            if _wait_for_lock(folder, unless=lambda: _joined(job, folder) is not None):
                return _claim(job, new, overwrite=overwrite).take()
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
                journal = restore_journal(job.new_journal(), claims[0].journal)
            if journal is None:
                for claim in claims:
                    claim.release()
                raise
            claims.append(Claim(journal, job.names, "tidy"))
    return claims


def restore_journal(journal: Journal, first: Journal) -> Journal | None:
    """Write the journal of a published split again, to be deleted with the others; None if its dataset is not the one of the first split's journal."""
    files = journal.folder.list_files()
    published = first.others.get(str(journal.task.options["split_name"]))
    if JOURNAL_NAME in files or published is None:
        return None
    if published.sha256 != published_sha256(journal.folder, files):  # replaced since
        return None
    journal.published = published
    journal.write()
    return journal


def _claim(job: PartJob, new: Journal, *, overwrite: bool) -> Claim:
    """Claim a locked folder (see `decide`); ``new`` is the journal of the job when it begins."""
    folder = new.folder
    claim = claim_destination(
        new,
        job.names,
        overwrite=overwrite,
        extras=frozenset(job.extras),
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
        if folder.read(MANIFEST_NAME, 0, 1) is None:  # else of the dataset to replace
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
    folder.remove(*filter(is_part_record, files))
    for name in files:
        if is_half_written(name, names, extras):
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
