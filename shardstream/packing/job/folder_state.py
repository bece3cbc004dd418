"""Name the shards of a folder, and read and write the two files that tell its state: the journal of an unfinished dataset, and the manifest of a finished one.

The journal is written before anything else is changed, and deleted last. It holds the identity of the job (source and options), the run that owns
the folder, and, once the dataset is published, the SHA-256 of its ``index.json``; the journal of the first split has those of all others.
A run that finds another owner stops.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from string import Formatter
from typing import Any

from shardstream.errors import (
    ChangedError,
    IndexMismatchError,
    ManifestError,
    OptionError,
    StorageError,
)
from shardstream.format import (
    COLUMNS_SUFFIX,
    FIRST_VERSION,
    INDEX_SUFFIX,
    MANIFEST_NAME,
    Manifest,
    decode_all_shards,
    decode_manifest,
    encode_manifest_files,
    is_numbers_name,
    is_records_name,
    version_name,
)
from shardstream.storage import (
    JOURNAL_NAME,
    OutputFolder,
    Storage,
    check_parts,
    final_name,
    is_journal,
    join_url,
    parent_url,
)

# Of the file, and of the bytes that a job writes: a journal of another version is refused.
VERSION = 6
# Raised if JSON has another structure than a journal.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
DEFAULT_NAME = "{shard:06d}.tar"
_FURTHER = re.compile(r"_\d{2,}\.tar\Z")  # see `ShardNames.name`
_SPEC = re.compile(r"\d*[dboxX]?")  # what gives each number a name of its own
_BASES = {"b": 2, "o": 8, "x": 16, "X": 16}


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
        run: Unique name of the run that writes the journal; all processes of a job have one.
        stale: Names of shards of an earlier dataset; those that are not written again are deleted at the end.
        parts: Number of parts of the job; 0 if it is not known yet.
        published: The dataset, once it is published or about to be.
        others: Of the first of several splits: the other datasets, by name of the split, whose journals are deleted before this one.
        head: Current bytes of the file; None if it does not exist.
    """

    folder: OutputFolder
    task: Task
    run: str
    stale: frozenset[str] = frozenset()
    parts: int = 0
    published: Published | None = None
    others: Mapping[str, Published] = field(default_factory=dict)
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
        owner, data = None, self.folder.read(JOURNAL_NAME)
        if data is not None:
            with suppress(*_MALFORMED):
                owner = json.loads(data)["run"]
        if owner is None:
            raise StorageError(
                "the journal of this pack or ShardWriter was deleted, by another one that has ended or by hand; check what is published there, or "
                "start again with overwrite=True (--overwrite)",
                shard=join_url(self.folder.url, JOURNAL_NAME),
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
    published, others = document["published"], document["others"]
    return Journal(
        folder=folder,
        task=Task(source=document["source"], options=dict(document["options"])),
        stale=frozenset(map(str, document["stale"])),
        parts=int(document["parts"]),
        published=None if published is None else _decode_published(published),
        others=dict(zip(others, map(_decode_published, others.values()), strict=True)),
        run=str(document["run"]),
        head=data,
    )


def _decode_published(document: Any) -> Published:
    return Published(
        sha256=str(document["sha256"]),
        skipped=tuple((str(where), str(reason)) for where, reason in document["skipped"]),
        warnings=tuple(map(str, document["warnings"])),
    )


def read_listed(folder: OutputFolder, name: str) -> bytes:
    """Read a journal that was just listed.

    Raises:
        StorageError: If it is gone, or cannot be reached.
    """
    data = folder.read(name)
    if data is None:
        raise StorageError(
            "another pack or ShardWriter has just ended here; check its dataset, then run this again",
            shard=join_url(folder.url, name),
        )
    return data


class ManifestFiles:
    """The files of a new manifest: ``index.json``, and its records if there are many shards.

    Args:
        folder: Folder of the dataset.
        manifest: The manifest.
        before: Names of the files in the folder.
    """

    def __init__(self, folder: OutputFolder, manifest: Manifest, before: Collection[str]) -> None:
        self.manifest = manifest
        self._folder, self._before = folder, before
        self._files = encode_manifest_files(manifest)
        self.sha256 = sha256(self._files[MANIFEST_NAME]).hexdigest()
        """Hash of ``index.json``."""
        self._is_written = False

    def is_there(self) -> bool:
        """Return whether the manifest of the folder is this one."""
        return self._folder.read(MANIFEST_NAME) == self._files[MANIFEST_NAME]

    def write(self) -> None:
        """Write the files.

        Raises:
            StorageError: If another run has taken the folder over, or a file cannot be written; call `remove` then.
        """
        self._folder.check_owner()
        self._is_written = True
        for name, data in self._files.items():
            self._folder.write(name, data)
        # A run that took the folder in between has not seen the manifest, so it must not stay.
        self._folder.check_owner()

    def remove_older(self) -> None:
        """Delete the records of earlier manifests, once this one is there, whoever has written it.

        Raises:
            StorageError: If a file cannot be deleted.
        """
        for name in self._before:
            if is_records_name(name) and name not in self._files and self.is_there():
                self._folder.remove(name)

    def remove_replaced(
        self, names: ShardNames, stale: Iterable[str], *, has_columns: bool
    ) -> None:
        """Delete the shards of an earlier dataset that were not written again, and columns of those that were written without.

        Args:
            names: Names of the shards of the new dataset.
            stale: Names of the shards of the earlier dataset.
            has_columns: Whether the new dataset has columns.
        """
        folder, files = self._folder, self._before
        written = {shard.url for shard in self.manifest.shards}
        left = set(stale) - written
        for name in files:
            # A killed run of a part may have left a further shard that its next run did not need.
            if name.endswith(".tar") and name not in written and names.is_ours(name):
                left.add(name)
            elif not has_columns and name.endswith(COLUMNS_SUFFIX) and shard_of(name) in written:
                folder.remove(name)
        for name in sorted(filter(is_deletable, left)):
            remove_shard(folder, name, files)

    def remove(self) -> None:
        """Delete the manifest if `write` was to write it, also if an error said that it has not.

        Raises:
            StorageError: If it cannot be deleted.
        """
        if self._is_written and self.is_there():
            self._folder.remove(MANIFEST_NAME)


def read_old_manifest(folder: OutputFolder) -> Manifest:
    """Return the manifest of a folder, to be replaced; an empty one if there is none, or it is invalid."""
    url, data = join_url(folder.url, MANIFEST_NAME), folder.read(MANIFEST_NAME)
    try:
        manifest = decode_manifest(data or b"", url=url)
        if isinstance(manifest, Manifest):
            return manifest
        shards = decode_all_shards(lambda name: folder.read(name) or b"", manifest, url=url)
        return Manifest(
            shards=shards,
            name=manifest.name,
            fields=manifest.fields,
            dataset_version=manifest.dataset_version,
        )
    except (IndexMismatchError, ManifestError):
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
    return folder.read(version_name(1), 0, 1) is not None


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
        if "://" in text:
            check_parts(text)
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
        for text, number_name, spec, _ in Formatter().parse(self.template):
            pattern += re.escape(text)
            if number_name is not None:
                pattern += "( *[0-9A-Fa-f]+)"
                base = _BASES.get((spec or "")[-1:], 10)
        number = re.fullmatch(pattern, name)
        try:
            return number is not None and name == self.name(int(number[1], base))
        except ValueError:  # letters in a decimal number
            return False


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
    return sha256(read_listed(folder, MANIFEST_NAME)).hexdigest() if MANIFEST_NAME in files else ""


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


def is_deletable(name: str) -> bool:
    """Return whether a file that a manifest or journal names may be deleted as a shard: a tar right in the folder.

    >>> [is_deletable(name) for name in ("a.tar", "notes.txt", "..", "../a.tar", "s3://b/a.tar", "file::a.tar")]
    [True, False, False, False, False, False]
    """
    return name.lower().endswith(".tar") and not any(sign in name for sign in ("/", "\\", "::"))
