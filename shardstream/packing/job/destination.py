"""Name the shards of a folder, and decide whether the folder may be written to."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from string import Formatter

from shardstream.errors import OptionError, get_logger
from shardstream.format import (
    CLASSES_NAME,
    COLUMNS_SUFFIX,
    INDEX_SUFFIX,
    MANIFEST_NAME,
    OFFSET_BYTES,
    is_pages_name,
)
from shardstream.packing.job.journal import (
    WRITER_TASK,
    FinishedShard,
    Journal,
    Task,
    read_journal,
    read_listed,
)
from shardstream.packing.shards.manifest_files import read_old_manifest
from shardstream.storage import (
    OutputFolder,
    final_name,
    is_journal,
    is_part_record,
    join_url,
    journal_name,
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
        names = cls(folder=parent_url(text), template=text.rsplit("/", 1)[-1])
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """A folder that may be written to, with its files before the first change.

    Args:
        folder: The folder.
        names: Names of its shards.
        files: Sizes of its files, by name.
        stale: Names of shards of an earlier dataset; those that are not written again are deleted at the end.
        finished: Shards of an earlier run that are kept, in order.
        journal_files: Number of files of an earlier run's journal.
        journal_head: Bytes of the first of them.
        extras: Names of small files that the job writes, too.
    """

    folder: OutputFolder
    names: ShardNames
    files: Mapping[str, int]
    stale: frozenset[str] = frozenset()
    finished: tuple[FinishedShard, ...] = ()
    journal_files: int = 0
    journal_head: bytes | None = None
    extras: frozenset[str] = frozenset()

    @property
    def is_free(self) -> bool:
        """Whether the folder has no files of a dataset, finished or not; it may have other files."""
        return not (self.stale or self.journal_files or self.has_manifest)

    @property
    def replaces(self) -> bool:
        """Whether shards of these names may exist."""
        return any(self.names.is_ours(shard_of(name)) for name in self.files)

    @property
    def has_manifest(self) -> bool:
        """Whether a dataset is published in the folder."""
        return MANIFEST_NAME in self.files

    def unpublish(self) -> None:
        """Delete the existing manifest; its shards are deleted or replaced later."""
        self.folder.remove(MANIFEST_NAME)
        if CLASSES_NAME in self.files and CLASSES_NAME not in self.extras:
            _log.warning(
                "%s belongs to the replaced dataset and is kept; delete it if its names do not match the new class numbers",
                self.names.url(CLASSES_NAME),
            )

    def remove_parts(self) -> None:
        """Delete half-written files of killed writers, and the records of another job in parts."""
        for name in self.files:
            final = final_name(name)
            if is_part_record(name) or (final is not None and self._is_written(final)):
                self.folder.remove(name)

    def _is_written(self, name: str) -> bool:
        """Return whether a writer of this dataset makes a file of that name."""
        is_shard = self.names.is_ours(shard_of(name))
        is_manifest = name == MANIFEST_NAME or is_pages_name(name)
        return is_shard or is_journal(name) or is_manifest or name in self.extras


def claim_destination(
    folder: OutputFolder,
    names: ShardNames,
    *,
    task: Task,
    overwrite: bool,
    extras: frozenset[str] = frozenset(),
) -> Destination:
    """Decide which files of the folder are kept or replaced; nothing is changed yet.

    An unfinished pack of the same task is resumed: its intact shards are kept.

    Raises:
        OptionError: If another dataset or job is there and ``overwrite`` is not set.
        StorageError: If the folder cannot be reached.
    """
    listed = folder.list_files()
    if not listed:
        return Destination(folder=folder, names=names, files={}, extras=extras)
    files = {name: file.size for name, file in listed.items()}
    journal = _read_journal(folder, files, overwrite=overwrite)
    existing_shards = frozenset(name for name in files if names.is_ours(name))
    finished: tuple[FinishedShard, ...] = ()
    if task == WRITER_TASK or journal is None or journal.is_of_writer:
        if not overwrite:
            _refuse_existing_files(names, files, existing_shards, journal)
        stale = existing_shards | _shards_in_manifest(folder, files) | _shards_in_journal(journal)
    else:
        finished = _finished_before(journal, names, files, task=task, overwrite=overwrite)
        stale = existing_shards | _shards_in_journal(journal)
    head = None if journal is None else journal.head
    if head is None and journal_name(0) in files:  # it cannot be read, and is replaced
        head = read_listed(folder, journal_name(0))
    return Destination(
        folder=folder,
        names=names,
        files=files,
        stale=stale,
        finished=finished,
        journal_files=sum(map(is_journal, files)),
        journal_head=head,
        extras=extras,
    )


def _refuse_existing_files(
    names: ShardNames,
    files: Mapping[str, int],
    shards: frozenset[str],
    journal: Journal | None,
) -> None:
    """Raise `OptionError` if a dataset, finished or not, would be replaced."""
    if MANIFEST_NAME in files:
        raise _published_error(names)
    if shards:
        raise OptionError(
            "a shard of this name exists without an index.json, from a failed run or another tool; "
            "replace it with overwrite=True (--overwrite), or write elsewhere",
            shard=names.url(min(shards)),
        )
    if journal is not None and _may_have_shards(journal, files):
        raise OptionError(
            "another pack or ShardWriter is writing here, or was stopped; wait for it, replace its files with overwrite=True "
            "(--overwrite), or write elsewhere",
            shard=names.folder,
        )


def _finished_before(
    journal: Journal,
    names: ShardNames,
    files: Mapping[str, int],
    *,
    task: Task,
    overwrite: bool,
) -> tuple[FinishedShard, ...]:
    """Return the shards of an unfinished pack that this task keeps.

    Raises:
        OptionError: If it is a pack of another task and ``overwrite`` is not set.
    """
    differences = task.differences(journal.task)
    if not overwrite and MANIFEST_NAME in files and not _is_published_by(journal):
        raise _published_error(names)  # the run that was to replace it was stopped before it began
    if differences and _may_have_shards(journal, files) and not overwrite:
        raise OptionError(
            f"an unfinished pack with another source or options is here: {'; '.join(differences)}. Resume it with its own source "
            "and options, or replace it with overwrite=True (--overwrite), or write elsewhere",
            shard=names.folder,
        )
    if differences or task.source is None:
        return ()
    return _intact_shards(journal, names, files)


def shard_of(name: str) -> str:
    """Return the shard that a file belongs to: the shard itself, its index or its columns.

    >>> [shard_of(name) for name in ("a.tar", "a.tar.idx", "a.tar.cols.parquet")]
    ['a.tar', 'a.tar', 'a.tar']
    """
    return name.removesuffix(COLUMNS_SUFFIX).removesuffix(INDEX_SUFFIX)


def remove_shard(folder: OutputFolder, name: str, files: Container[str]) -> None:
    """Delete a shard, its index, and its columns if they are among some files."""
    folder.remove(name)
    folder.remove(name + INDEX_SUFFIX)
    if name + COLUMNS_SUFFIX in files:
        folder.remove(name + COLUMNS_SUFFIX)


def is_deletable(name: str) -> bool:
    """Return whether a file that a manifest or journal names may be deleted as a shard: a tar right in the folder.

    >>> [is_deletable(name) for name in ("a.tar", "notes.txt", "..", "../a.tar", "s3://b/a.tar", "file::a.tar")]
    [True, False, False, False, False, False]
    """
    return name.lower().endswith(".tar") and not any(sign in name for sign in ("/", "\\", "::"))


def _read_journal(
    folder: OutputFolder, files: Mapping[str, int], *, overwrite: bool
) -> Journal | None:
    try:
        return read_journal(folder, files)
    except OptionError:
        if not overwrite:
            raise
        return None


def _may_have_shards(journal: Journal, files: Mapping[str, int]) -> bool:
    return bool(journal.finished) or any(map(is_deletable, files))


def _shards_in_journal(journal: Journal | None) -> frozenset[str]:
    if journal is None:
        return frozenset()
    named = journal.stale | {one.info.url for one in journal.finished}
    return frozenset(filter(is_deletable, named))


def _published_error(names: ShardNames) -> OptionError:
    return OptionError(
        "a dataset is published here; replace it with overwrite=True (--overwrite), or write elsewhere",
        shard=names.url(MANIFEST_NAME),
    )


def _is_published_by(journal: Journal) -> bool:
    """Return whether the published dataset is that of a journal, whose run was stopped before it deleted the journal."""
    shards = read_old_manifest(journal.folder).shards
    return bool(shards) and shards == tuple(one.info for one in journal.finished)


def _intact_shards(
    journal: Journal, names: ShardNames, files: Mapping[str, int]
) -> tuple[FinishedShard, ...]:
    """Return the finished shards up to the first whose files are missing or of another size."""
    kept: list[FinishedShard] = []
    for number, one in enumerate(journal.finished):
        name, index_bytes = names.name(number), OFFSET_BYTES * ((one.info.nsamples or 0) + 1)
        found = files.get(name), files.get(name + INDEX_SUFFIX)
        if one.info.url != name or found != (one.info.filesize, index_bytes):
            break
        kept.append(one)
    return tuple(kept)


def _shards_in_manifest(folder: OutputFolder, files: Mapping[str, int]) -> frozenset[str]:
    shards = read_old_manifest(folder).shards if MANIFEST_NAME in files else ()
    return frozenset(shard.url for shard in shards if is_deletable(shard.url))
