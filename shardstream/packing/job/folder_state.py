"""Read and write the two files that tell the state of a folder: the journal of an unfinished dataset, and the manifest of a finished one.

The journal is written before anything else is changed, and deleted last. It holds the identity of the job (source and options), the run that owns
the folder, and, once the dataset is published, the SHA-256 of its ``index.json``; the journal of the first split has those of all others.
A run that finds another owner stops.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from shardstream.errors import (
    ChangedError,
    IndexMismatchError,
    ManifestError,
    NotFoundError,
    OptionError,
    StorageError,
)
from shardstream.format import (
    FIRST_VERSION,
    MANIFEST_NAME,
    Manifest,
    decode_all_shards,
    decode_manifest,
    encode_manifest_files,
    is_numbers_name,
    is_records_name,
    version_name,
)
from shardstream.storage import JOURNAL_NAME, OutputFolder, join_url

# Of the file, and of the bytes that a job writes: a journal of another version is refused.
VERSION = 6
# Raised if JSON has another structure than a journal.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Source and options that determine the bytes of a dataset.

    Args:
        source: Text that changes with the source; None if unknown.
        options: Options as JSON values.
    """

    source: str | None
    options: Mapping[str, Any]

    def differences(self, earlier: Task) -> list[str]:
        """Describe the changes since an earlier task; empty if this task can resume it."""
        now, then = (json.loads(json.dumps(dict(task.options))) for task in (self, earlier))
        found = [
            f"{name} was {then.get(name)!r}, now {now.get(name)!r}"
            for name in dict.fromkeys([*now, *then])
            if now.get(name) != then.get(name)
        ]
        if self.source != earlier.source:
            found.append("the source has changed")
        return found


WRITER_TASK = Task(source=None, options={"writer": "ShardWriter"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A dataset that is published, or about to be: its records may be deleted already.

    Args:
        sha256: Hash of its ``index.json``.
        skipped: File or row, and reason, of each skipped record.
        warnings: Findings that may be mistakes.
    """

    sha256: str
    skipped: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Journal:
    """The journal of one dataset.

    Args:
        folder: Folder of the dataset.
        task: Source and options of the job.
        stale: Names of shards of an earlier dataset; those that are not written again are deleted at the end.
        parts: Number of parts of the job; 0 if it is not known yet.
        published: The dataset, once it is published or about to be.
        others: Of the first of several splits: the other datasets, by name of the split, whose journals are deleted before this one.
        run: Unique name of the run that writes the journal; all processes of a job have one.
        head: Current bytes of the file; None if it does not exist.
    """

    folder: OutputFolder
    task: Task
    stale: frozenset[str] = frozenset()
    parts: int = 0
    published: Published | None = None
    others: Mapping[str, Published] = field(default_factory=dict)
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    head: bytes | None = None

    @property
    def is_of_writer(self) -> bool:
        """Whether a `ShardWriter` wrote it, which cannot be resumed."""
        return self.task == WRITER_TASK

    def write(self) -> None:
        """Write the file over ``head``, which may be that of another run: this one owns the folder then.

        Raises:
            StorageError: If another run has taken the folder over meanwhile, or it cannot be written.
        """
        document = {
            "version": VERSION,
            "run": self.run,
            "source": self.task.source,
            "options": dict(self.task.options),
            "stale": sorted(self.stale),
            "parts": self.parts,
            "published": None if self.published is None else asdict(self.published),
            "others": dict(zip(self.others, map(asdict, self.others.values()), strict=True)),
        }
        data = json.dumps(document).encode()
        try:
            self.folder.replace(JOURNAL_NAME, data, old=self.head)
        except ChangedError as error:
            raise self._owner_changed_error() from error
        self.head = data

    def check_owner(self) -> None:
        """Check that no other run has taken the folder over.

        Raises:
            StorageError: If one has, or the journal was deleted or cannot be read.
        """
        name = JOURNAL_NAME
        owner = None
        with suppress(NotFoundError):
            data = self.folder.read(name)
            with suppress(*_MALFORMED):
                owner = json.loads(data)["run"]
        if owner is None:
            raise StorageError(
                "the journal of this pack or ShardWriter was deleted, by another one that has ended or by hand; check what is published there, or "
                "start again with overwrite=True (--overwrite)",
                shard=join_url(self.folder.url, name),
            )
        if owner != self.run:
            raise self._owner_changed_error()

    def remove(self) -> None:
        """Delete the journal.

        Raises:
            StorageError: If another run has taken the folder over, or it cannot be reached.
        """
        self.check_owner()
        self.folder.remove(JOURNAL_NAME)

    def _owner_changed_error(self) -> StorageError:
        return StorageError(
            "another pack or ShardWriter writes here, so this one stops and publishes nothing; wait until it ends, or write elsewhere",
            shard=self.folder.url,
        )


def read_journal(folder: OutputFolder, names: Collection[str]) -> Journal | None:
    """Read the journal that a job or writer has left.

    Args:
        folder: Folder of the dataset.
        names: Names of the files in it.

    Returns:
        The journal; None if there is none.

    Raises:
        OptionError: If the journal is invalid, or of another version.
        StorageError: If it cannot be reached.
    """
    name = JOURNAL_NAME
    if name not in names:
        return None
    data = read_listed(folder, name)
    url = join_url(folder.url, name)
    try:
        document = json.loads(data)
        version = document["version"]
        journal = _decode(folder, document, data) if version == VERSION else None
    except _MALFORMED as error:
        raise OptionError(
            f"the journal of an unfinished pack cannot be read ({type(error).__name__}: {error}); "
            "start again with overwrite=True (--overwrite)",
            shard=url,
        ) from error
    if journal is None:
        raise OptionError(
            f"the unfinished dataset here was begun by another version of shardstream (its journal has version {version!r}, not "
            f"{VERSION}); finish it with that version, or start again with overwrite=True (--overwrite)",
            shard=url,
        )
    return journal


def _decode(folder: OutputFolder, document: Any, data: bytes) -> Journal:
    published = document["published"]
    return Journal(
        folder=folder,
        task=Task(source=document["source"], options=dict(document["options"])),
        stale=frozenset(map(str, document["stale"])),
        parts=int(document["parts"]),
        published=None if published is None else _decode_published(published),
        others=dict(map(_decode_other, document["others"].items())),
        run=str(document["run"]),
        head=data,
    )


def _decode_published(document: Any) -> Published:
    return Published(
        sha256=str(document["sha256"]),
        skipped=tuple((str(where), str(reason)) for where, reason in document["skipped"]),
        warnings=tuple(map(str, document["warnings"])),
    )


def _decode_other(item: tuple[str, Any]) -> tuple[str, Published]:
    return str(item[0]), _decode_published(item[1])


def read_listed(folder: OutputFolder, name: str) -> bytes:
    """Read a journal that was just listed.

    Raises:
        StorageError: If it is gone, or cannot be reached.
    """
    try:
        return folder.read(name)
    except NotFoundError as error:
        raise StorageError(
            "another pack or ShardWriter has just ended here; check its dataset, then run this again",
            shard=join_url(folder.url, name),
        ) from error


class ManifestFiles:
    """The files of a new manifest: ``index.json``, and its records if there are many shards.

    Args:
        folder: Folder of the dataset.
        manifest: The manifest.
        before: Names of the files in the folder.
        check_owner: Raises if another job has taken the folder over.
    """

    def __init__(
        self,
        folder: OutputFolder,
        manifest: Manifest,
        before: Iterable[str],
        check_owner: Callable[[], None],
    ) -> None:
        self.manifest = manifest
        self._folder, self._before, self._check_owner = folder, before, check_owner
        self._files = encode_manifest_files(manifest)
        self.sha256 = sha256(self._files[MANIFEST_NAME]).hexdigest()
        """Hash of ``index.json``."""
        self._is_written = False

    def is_there(self) -> bool:
        """Return whether the manifest of the folder is this one."""
        try:
            return self._folder.read(MANIFEST_NAME) == self._files[MANIFEST_NAME]
        except NotFoundError:
            return False

    def write(self) -> None:
        """Write the files.

        Raises:
            StorageError: If another run has taken the folder over, or a file cannot be written; call `remove` then.
        """
        self._check_owner()
        self._is_written = True
        for name, data in self._files.items():
            self._folder.write(name, data)
        # A run that took the folder in between has not seen the manifest, so it must not stay.
        self._check_owner()

    def remove_older(self) -> None:
        """Delete the records of earlier manifests, once this one is there, whoever has written it.

        Raises:
            StorageError: If a file cannot be deleted.
        """
        for name in self._before:
            if is_records_name(name) and name not in self._files and self.is_there():
                self._folder.remove(name)

    def remove(self) -> None:
        """Delete the manifest if `write` was to write it, also if an error said that it has not.

        Raises:
            StorageError: If it cannot be deleted.
        """
        if self._is_written and self.is_there():
            self._folder.remove(MANIFEST_NAME)


def read_old_manifest(folder: OutputFolder) -> Manifest:
    """Return the manifest of a folder, to be replaced; an empty one if there is none, or it is invalid."""
    url = join_url(folder.url, MANIFEST_NAME)
    try:
        manifest = decode_manifest(folder.read(MANIFEST_NAME), url=url)
        if isinstance(manifest, Manifest):
            return manifest
        shards = decode_all_shards(folder.read, manifest, url=url)
        return Manifest(
            shards=shards,
            name=manifest.name,
            fields=manifest.fields,
            dataset_version=manifest.dataset_version,
        )
    except (IndexMismatchError, ManifestError, NotFoundError):
        return Manifest(shards=())


def has_versions(folder: OutputFolder, names: Iterable[str]) -> bool:
    """Return whether the dataset in a folder has several versions, or samples that were deleted, also if its ``index.json`` is missing or damaged.

    Args:
        folder: The folder.
        names: Names of the files in it.
    """
    if any(is_numbers_name(name) for name in names):
        return True
    if read_old_manifest(folder).dataset_version != FIRST_VERSION:
        return True
    with suppress(NotFoundError):
        folder.read(version_name(1), 0, 1)
        return True
    return False
