"""Decide whether a place may be written to, and what of it is kept or deleted, before anything is touched."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardstream.errors import ManifestError, NotFoundError, OptionError
from shardstream.format.classes_json import CLASSES_NAME
from shardstream.format.index import INDEX_SUFFIX, OFFSET_BYTES
from shardstream.format.manifest import MANIFEST_NAME, ShardInfo, decode_manifest
from shardstream.packing.journal import FinishedShard, Journal, Task, read_head, read_journal
from shardstream.packing.shard_names import ShardNames
from shardstream.storage.atomic_write import final_name, remove
from shardstream.storage.journal_marker import is_journal, journal_name
from shardstream.storage.store import Storage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """A place that may be written to.

    Args:
        storage: Where it is.
        names: What its shards are called.
        files: What is there now: name -> bytes.
        stale: Names of shards that are there; those not written again are deleted at last.
        finished: Shards of an earlier run that are kept, in order.
        journal_files: How many files the journal of an earlier run has.
        journal_head: The first of them.
        extras: Names of small files that are written, too.
    """

    storage: Storage
    names: ShardNames
    files: Mapping[str, int]
    stale: frozenset[str] = frozenset()
    finished: tuple[FinishedShard, ...] = ()
    journal_files: int = 0
    journal_head: bytes | None = None
    extras: frozenset[str] = frozenset()

    @property
    def is_free(self) -> bool:
        """Whether nothing of a dataset is there, finished or not; other files may be."""
        return not (self.stale or self.journal_files or self.has_manifest)

    @property
    def replaces(self) -> bool:
        """Whether shards of these names may be there."""
        return any(self.names.is_ours(name.removesuffix(INDEX_SUFFIX)) for name in self.files)

    @property
    def has_manifest(self) -> bool:
        """Whether a dataset is published there."""
        return MANIFEST_NAME in self.files

    def unpublish(self) -> None:
        """Delete the manifest that is there; its shards are deleted or replaced later."""
        remove(self.storage, self.names.url(MANIFEST_NAME))
        if CLASSES_NAME in self.files and CLASSES_NAME not in self.extras:
            _log.warning(
                "%s is of the dataset that is replaced, and stays; delete it if its names are not those of the new class numbers",
                self.names.url(CLASSES_NAME),
            )

    def remove_parts(self) -> None:
        """Delete what killed writers left half-written."""
        for name in self.files:
            final = final_name(name)
            if final is not None and self._is_written(final):
                remove(self.storage, self.names.url(name))

    def _is_written(self, name: str) -> bool:
        """Tell whether a writer of this dataset makes a file of that name."""
        is_shard = self.names.is_ours(name.removesuffix(INDEX_SUFFIX))
        return is_shard or is_journal(name) or name in (MANIFEST_NAME, *self.extras)


def claim_destination(
    storage: Storage,
    names: ShardNames,
    *,
    overwrite: bool,
    extras: frozenset[str] = frozenset(),
) -> Destination:
    """Make sure that nothing is destroyed by mistake; what is there is replaced or refused.

    Raises:
        OptionError: If something is there and ``overwrite`` is not set.
        StorageError: If the place is out of reach.
    """
    files = _list(storage, names)
    journal = _read_journal(storage, names, files, overwrite=overwrite)
    there = frozenset(name for name in files if names.is_ours(name))
    if not overwrite:
        if MANIFEST_NAME in files:
            raise _published_error(names)
        if there:
            raise OptionError(
                "a shard of this name is here without an index.json: left by a run that failed, or another tool's; "
                "write over it with overwrite=True (--overwrite), or write elsewhere",
                shard=names.url(min(there)),
            )
        if journal is not None and _may_have_shards(journal, files):
            raise _unfinished_error(names)
    stale = there | _shards_in_manifest(storage, names, files) | _shards_in_journal(journal)
    return _make_destination(storage, names, files, stale=stale, extras=extras, journal=journal)


def claim_or_resume_destination(
    storage: Storage,
    names: ShardNames,
    task: Task,
    *,
    overwrite: bool,
    extras: frozenset[str] = frozenset(),
) -> Destination:
    """Make sure that nothing is destroyed by mistake, and go on where an earlier run of the same task was stopped.

    Raises:
        OptionError: If something else is there and ``overwrite`` is not set.
        StorageError: If the place is out of reach.
    """
    files = _list(storage, names)
    journal = _read_journal(storage, names, files, overwrite=overwrite)
    if journal is None or journal.is_of_writer:
        return claim_destination(storage, names, overwrite=overwrite, extras=extras)
    differences = task.differences(journal.task)
    if not overwrite and MANIFEST_NAME in files and not _is_published_by(journal, names):
        raise _published_error(names)  # the run that was to replace it was stopped before it began
    if differences and _may_have_shards(journal, files) and not overwrite:
        raise OptionError(
            f"an unfinished pack is here, and it is another one: {'; '.join(differences)}. Finish that with its own source "
            "and options, or replace it with overwrite=True (--overwrite), or write elsewhere",
            shard=names.folder,
        )
    can_go_on = not differences and task.source is not None
    finished = _intact_shards(journal, names, files) if can_go_on else ()
    stale = _shards_in_journal(journal) | {name for name in files if names.is_ours(name)}
    destination = _make_destination(
        storage, names, files, stale=stale, extras=extras, journal=journal
    )
    return replace(destination, finished=finished)


def is_deletable(name: str) -> bool:
    """Tell whether a file that a manifest or journal names may be deleted as a shard: a tar right in the folder.

    >>> [is_deletable(name) for name in ("a.tar", "notes.txt", "..", "../a.tar", "s3://b/a.tar", "file::a.tar")]
    [True, False, False, False, False, False]
    """
    return name.lower().endswith(".tar") and not any(sign in name for sign in ("/", "\\", "::"))


def _make_destination(
    storage: Storage,
    names: ShardNames,
    files: Mapping[str, int],
    *,
    stale: frozenset[str],
    extras: frozenset[str],
    journal: Journal | None,
) -> Destination:
    head = None if journal is None else journal.head
    if head is None and journal_name(0) in files:  # one that cannot be read, and is replaced
        head = read_head(storage, names.folder)
    return Destination(
        storage=storage,
        names=names,
        files=files,
        stale=stale,
        extras=extras,
        journal_files=sum(map(is_journal, files)),
        journal_head=head,
    )


def _read_journal(
    storage: Storage, names: ShardNames, files: Mapping[str, int], *, overwrite: bool
) -> Journal | None:
    try:
        return read_journal(storage, names.folder, list(files))
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


def _unfinished_error(names: ShardNames) -> OptionError:
    return OptionError(
        "another pack or ShardWriter is writing here, or was stopped; wait for it, replace what it made with overwrite=True "
        "(--overwrite), or write elsewhere",
        shard=names.folder,
    )


def _published_error(names: ShardNames) -> OptionError:
    return OptionError(
        "a dataset is published here; replace it with overwrite=True (--overwrite), or write elsewhere",
        shard=names.url(MANIFEST_NAME),
    )


def _is_published_by(journal: Journal, names: ShardNames) -> bool:
    """Tell whether the published dataset is what the pack of a journal made, stopped on its way out."""
    shards = _manifest_shards(journal.storage, names)
    return bool(shards) and shards == tuple(one.info for one in journal.finished)


def _intact_shards(
    journal: Journal, names: ShardNames, files: Mapping[str, int]
) -> tuple[FinishedShard, ...]:
    """Return the finished shards up to the first that is not as it was left."""
    kept: list[FinishedShard] = []
    for number, one in enumerate(journal.finished):
        name, index_bytes = names.name(number), OFFSET_BYTES * ((one.info.nsamples or 0) + 1)
        found = files.get(name), files.get(name + INDEX_SUFFIX)
        if one.info.url != name or found != (one.info.filesize, index_bytes):
            break
        kept.append(one)
    return tuple(kept)


def _list(storage: Storage, names: ShardNames) -> dict[str, int]:
    try:
        files, _ = storage.list_folder(names.folder)
    except NotFoundError:
        return {}
    return {file.url.rsplit("/", 1)[-1]: file.size for file in files}


def _shards_in_manifest(
    storage: Storage, names: ShardNames, files: Mapping[str, int]
) -> frozenset[str]:
    shards = _manifest_shards(storage, names) if MANIFEST_NAME in files else ()
    return frozenset(shard.url for shard in shards if is_deletable(shard.url))


def _manifest_shards(storage: Storage, names: ShardNames) -> tuple[ShardInfo, ...]:
    """Return what the manifest there lists; nothing if it cannot be understood."""
    url = names.url(MANIFEST_NAME)
    try:
        return decode_manifest(storage.read(url), url=url).shards
    except ManifestError:
        return ()
