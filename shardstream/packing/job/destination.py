"""Name the shards of a folder, and decide whether the folder may be written to."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from string import Formatter
from types import MappingProxyType
from typing import Literal, Self

from shardstream.errors import OptionError, StorageError, get_logger
from shardstream.format import (
    CLASSES_NAME,
    COLUMNS_SUFFIX,
    INDEX_SUFFIX,
    MANIFEST_NAME,
    ShardInfo,
    is_records_name,
)
from shardstream.packing.job.folder_state import (
    WRITER_TASK,
    Journal,
    Task,
    has_versions,
    read_journal,
    read_listed,
    read_old_manifest,
)
from shardstream.storage import (
    JOURNAL_NAME,
    FileInfo,
    OutputFolder,
    Storage,
    final_name,
    is_journal,
    is_part_record,
    join_url,
    parent_url,
)

_log = get_logger(__name__)

DEFAULT_NAME = "{shard:06d}.tar"
_FURTHER = re.compile(r"_\d{2,}\.tar\Z")  # see `ShardNames.name`
_SPEC = re.compile(r"\d*[dboxX]?")  # what gives each number a name of its own
_BASES = {"b": 2, "o": 8, "x": 16, "X": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardNames:
    """Folder of a dataset and names of its shards.

    Args:
        folder: URL of the folder, without a slash at its end.
        template: Name of a shard, with ``{shard}`` where its number goes.
    """

    folder: str
    template: str

    @classmethod
    def parse(cls, url: str | os.PathLike[str]) -> ShardNames:
        """Read a pattern such as ``s3://bucket/train/{shard:06d}.tar``, or the URL of a folder.

        >>> ShardNames.parse("s3://bucket/train/").template
        '{shard:06d}.tar'

        Raises:
            OptionError: If the pattern does not give each shard its own name in one folder.
        """
        text = os.fspath(url)
        if "{" not in text and not text.lower().endswith(".tar"):
            return cls(folder=text.rstrip("/") or "/", template=DEFAULT_NAME)
        names = cls(folder=parent_url(text), template=text.rpartition("/")[2])
        example = (
            f"write for example {join_url(parent_url(text.partition('{')[0]), DEFAULT_NAME)!r}"
        )
        try:
            fields = [
                (name, spec, conversion)
                for _, name, spec, conversion in Formatter().parse(names.template)
                if name is not None
            ]
        except ValueError as error:
            raise OptionError(f"the pattern is wrong ({error}); {example}", shard=text) from error
        for name, spec, conversion in fields:
            if name != "shard" or conversion or not _SPEC.fullmatch(spec or ""):
                raise OptionError(
                    "the pattern may contain only {shard}, with the width of the number, as in {shard:06d} or {shard:04x}; "
                    + example,
                    shard=text,
                )
        if len(fields) != 1 or "{" in names.folder or not names.template.endswith(".tar"):
            raise OptionError(
                "the last part of the pattern must contain {shard} once, for the number, and end in .tar; "
                + example,
                shard=text,
            )
        return names

    def name(self, shard: int, further: int = 0) -> str:
        """Return the name of a shard in its folder.

        Args:
            shard: Its number; of a job in parts, the number of the part.
            further: Number of the shard among those of its part.

        >>> names = ShardNames(folder="x", template="{shard:06d}.tar")
        >>> names.name(7), names.name(7, 1)
        ('000007.tar', '000007_01.tar')
        """
        name = self.template.format(shard=shard)
        return f"{name.removesuffix('.tar')}_{further:02d}.tar" if further else name

    def url(self, name: str) -> str:
        """Return the URL of a file in the folder."""
        return join_url(self.folder, name)

    def is_ours(self, name: str) -> bool:
        """Return whether a name is that of a shard of this pattern.

        >>> names = ShardNames(folder="x", template="a-{shard:06d}.tar")
        >>> names.is_ours("a-000012.tar"), names.is_ours("a-000012_01.tar"), names.is_ours("a-12.tar")
        (True, True, False)
        >>> names = ShardNames(folder="x", template="a_{shard:02x}.tar")
        >>> names.is_ours("a_1f.tar"), names.is_ours("a_1f_01.tar"), names.is_ours("a.tar")
        (True, True, False)
        """
        return self._has_number(name) or self._has_number(_FURTHER.sub(".tar", name))

    def _has_number(self, name: str) -> bool:
        """Return whether a number gives this name."""
        pattern, base = "", 10
        for text, field, spec, _ in Formatter().parse(self.template):
            pattern += re.escape(text)
            if field is not None:
                pattern += "( *[0-9A-Fa-f]+)"
                base = _BASES.get((spec or "")[-1:], 10)
        number = re.fullmatch(pattern, name)
        try:
            return number is not None and name == self.name(int(number[1], base))
        except ValueError:  # letters in a decimal number
            return False


Action = Literal["take", "join", "tidy", "replace"]
Refusal = Literal["published", "samples", "shards", "writer", "job", "journal"]
Whose = Literal["none", "writer", "same job", "samples", "other job", "unreadable"]


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
        self.replaces = bool(journal.stale) or any(names.is_ours(shard_of(name)) for name in files)
        """Whether shards of the names that are written may exist."""
        self._extras = extras
        self._lock = threading.Lock()
        self._is_changed = False

    @property
    def is_published(self) -> bool:
        """Whether the dataset is published already, and only the files of the job are left to delete."""
        return self.action == "tidy"

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
                for name in filter(is_part_record, files):  # of parts without samples
                    folder.remove(name)
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


def check_is_elsewhere(folders: Iterable[str], folder: str, storage: Storage) -> None:
    """Refuse to write shards to a folder whose shards are read.

    Raises:
        OptionError: If the folder is one of ``folders``.
    """
    for taken in folders:
        if storage.resolve(taken)[1].rstrip("/") == storage.resolve(folder)[1].rstrip("/"):
            raise OptionError(
                "the shards would be overwritten while they are read; write elsewhere", shard=folder
            )


def published_sha256(folder: OutputFolder, files: Container[str]) -> str:
    """Return the hash of the manifest of a folder; "" if there is none."""
    return sha256(folder.read(MANIFEST_NAME)).hexdigest() if MANIFEST_NAME in files else ""


def _may_be_shard(name: str, names: ShardNames, journal: Journal | None) -> bool:
    """Return whether a file is a shard of the job, or of the one that a journal names."""
    if journal is None:
        return names.is_ours(name)
    template = str(journal.task.options.get("template", ""))
    is_theirs = bool(template) and ShardNames(folder="", template=template).is_ours(name)
    return names.is_ours(name) or is_theirs or name in journal.stale


def shard_of(name: str) -> str:
    """Return the shard that a file belongs to: the shard itself, its index or its columns.

    >>> [shard_of(name) for name in ("a.tar", "a.tar.idx", "a.tar.cols.parquet")]
    ['a.tar', 'a.tar', 'a.tar']
    """
    return name.removesuffix(COLUMNS_SUFFIX).removesuffix(INDEX_SUFFIX)


def is_half_written(name: str, names: ShardNames, extras: Container[str]) -> bool:
    """Return whether a file is what a killed writer of a dataset has left of one.

    >>> names = ShardNames(folder="x", template="{shard:06d}.tar")
    >>> [is_half_written(f"{name}.part-0123456789ab", names, ()) for name in ("000000.tar", "index.json", "notes.txt")]
    [True, True, False]
    """
    final = final_name(name)
    if final is None:
        return False
    is_manifest = final == MANIFEST_NAME or is_records_name(final)
    return names.is_ours(shard_of(final)) or is_journal(final) or is_manifest or final in extras


def remove_shard(folder: OutputFolder, name: str, files: Container[str]) -> None:
    """Delete a shard, its index, and its columns if they are among some files; the tar last: by it the next run finds what a killed one has left."""
    if name + COLUMNS_SUFFIX in files:
        folder.remove(name + COLUMNS_SUFFIX)
    folder.remove(name + INDEX_SUFFIX)
    folder.remove(name)


def remove_replaced(
    folder: OutputFolder,
    names: ShardNames,
    stale: Iterable[str],
    written: Sequence[ShardInfo],
    files: Collection[str],
    *,
    has_columns: bool,
) -> None:
    """Delete the shards of an earlier dataset that were not written again, and columns of those that were written without.

    Args:
        folder: The folder.
        names: Names of the shards of the new dataset.
        stale: Names of the shards of the earlier dataset.
        written: The shards of the new one.
        files: Names of the files that were there before.
        has_columns: Whether the new dataset has columns.
    """
    urls = {shard.url for shard in written}
    left = set(stale) - urls
    # A killed run of a part may have left a further shard that its next run did not need.
    for name in files:
        if name.endswith(".tar") and name not in urls and names.is_ours(name):
            left.add(name)
    for name in sorted(filter(is_deletable, left)):
        remove_shard(folder, name, files)
    for shard in () if has_columns else written:
        if shard.columns_url in files:
            folder.remove(shard.columns_url)


def is_deletable(name: str) -> bool:
    """Return whether a file that a manifest or journal names may be deleted as a shard: a tar right in the folder.

    >>> [is_deletable(name) for name in ("a.tar", "notes.txt", "..", "../a.tar", "s3://b/a.tar", "file::a.tar")]
    [True, False, False, False, False, False]
    """
    return name.lower().endswith(".tar") and not any(sign in name for sign in ("/", "\\", "::"))


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
