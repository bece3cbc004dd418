"""Read and write the journal of an unfinished pack or `ShardWriter`: small JSON files in the folder of its shards.

Each file holds 64 records, one for each published shard; the first file also holds the task of the pack.
Only the last file is rewritten when a shard is finished, so the cost of a shard does not grow with their number.
Every file names the run that wrote it. The run that the first file names owns the folder; a run that finds another name stops.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from shardstream.errors import ChangedError, NotFoundError, OptionError, StorageError
from shardstream.format import ShardInfo
from shardstream.packing.shards.column_builder import ColumnSummary
from shardstream.storage import OutputFolder, is_journal, join_url, journal_name

# Of the files, and of the bytes that a pack writes: a journal of another version is refused.
VERSION = 3
RECORDS_PER_FILE = 64
# Raised if JSON has another structure than a journal.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class NumberedSkip(NamedTuple):
    """A skipped record."""

    number: int
    """Number of the record in the source."""
    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedShard:
    """A shard that is published with its index.

    Args:
        info: Its entry in the manifest.
        fields: Number of samples that have each field.
        position: Number of the next record of the source.
        skipped: Records that were skipped since the previous shard.
        columns: Number and type of the values of columns.
        key_hashes: Hashes of its keys (see `encode_hashes`), if they may repeat; kept in the file only.
    """

    info: ShardInfo
    fields: Mapping[str, int]
    position: int
    skipped: tuple[NumberedSkip, ...] = ()
    columns: ColumnSummary = field(default_factory=dict)
    key_hashes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Source and options that determine the bytes of a pack.

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


@dataclass(slots=True, kw_only=True)
class Journal:
    """The journal of one dataset.

    Args:
        folder: Folder of the dataset.
        task: Source and options of the pack.
        stale: Names of shards of an earlier dataset; those that are not written again are deleted at the end.
        finished: Published shards, in order.
        run: Unique name of the run that writes the journal.
        head: Current bytes of the first file; None if it does not exist.
    """

    folder: OutputFolder
    task: Task
    stale: frozenset[str] = frozenset()
    finished: list[FinishedShard] = field(default_factory=list)
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    head: bytes | None = None

    @property
    def is_of_writer(self) -> bool:
        """Whether a `ShardWriter` wrote it, which cannot be resumed."""
        return self.task == WRITER_TASK

    def begin(self, num_files: int) -> None:
        """Take the folder over from the run that wrote ``head``, and replace its ``num_files`` journal files.

        Raises:
            StorageError: If another run has taken the folder over meanwhile, or it cannot be written.
        """
        self._write(0)
        for number in reversed(range(self._last + 1, num_files)):
            self.folder.remove(journal_name(number))
        for number in range(1, self._last + 1):
            self._write(number)

    def add(self, finished: FinishedShard) -> None:
        """Record a published shard.

        Raises:
            StorageError: If another run has taken the folder over, or it cannot be written.
        """
        self.finished.append(finished)
        self._write(self._last)

    def check_owner(self) -> None:
        """Check that no other run has taken the folder over.

        Raises:
            StorageError: If one has, or the journal was deleted or cannot be read.
        """
        name = journal_name(0)
        owner = None
        with suppress(NotFoundError):
            data = self.folder.read(name)
            with suppress(*_MALFORMED):
                owner = json.loads(data)["run"]
        if owner is None:
            raise StorageError(
                "the journal of this pack or ShardWriter was deleted, by another one that has ended or by hand; "
                "start again with overwrite=True (--overwrite)",
                shard=join_url(self.folder.url, name),
            )
        if owner != self.run:
            raise self._owner_changed_error()

    def remove(self) -> None:
        """Delete the journal, its first file last.

        Raises:
            StorageError: If another run has taken the folder over, or it cannot be reached.
        """
        self.check_owner()
        for number in reversed(range(self._last + 1)):
            self.folder.remove(journal_name(number))

    @property
    def _last(self) -> int:
        return max(0, len(self.finished) - 1) // RECORDS_PER_FILE

    def _write(self, number: int) -> None:
        mine = slice(number * RECORDS_PER_FILE, (number + 1) * RECORDS_PER_FILE)
        document: dict[str, Any] = {"version": VERSION, "run": self.run}
        if number == 0:
            document |= {"source": self.task.source, "options": dict(self.task.options)}
            document["stale"] = sorted(self.stale)
        document["finished"] = [asdict(one) for one in self.finished[mine]]
        data = json.dumps(document).encode()
        if len(document["finished"]) == RECORDS_PER_FILE:  # this file is not written again
            self.finished[mine] = [replace(one, key_hashes="") for one in self.finished[mine]]
        if number:
            self.folder.write(journal_name(number), data)
            return
        try:
            self.folder.replace(journal_name(0), data, old=self.head)
        except ChangedError as error:
            raise self._owner_changed_error() from error
        self.head = data

    def _owner_changed_error(self) -> StorageError:
        return StorageError(
            "another pack or ShardWriter writes here, so this one stops and publishes nothing; wait until it ends, or write elsewhere",
            shard=self.folder.url,
        )


def read_journal(folder: OutputFolder, names: Collection[str]) -> Journal | None:
    """Read the journal that an earlier pack or writer has left.

    Args:
        folder: Folder of the dataset.
        names: Names of the files in it.

    Returns:
        The journal; None if there is none.

    Raises:
        OptionError: If the journal is invalid.
        StorageError: If it cannot be reached.
    """
    if journal_name(0) not in names:
        return None
    journal = Journal(folder=folder, task=Task(source=None, options={}))
    for number in range(sum(map(is_journal, names))):
        name = journal_name(number)
        if name not in names:
            break
        data = read_listed(folder, name)
        try:
            document = json.loads(data)
            if number and document["run"] != journal.run:
                break  # left by an earlier run that another one replaced
            _load_document(journal, document, number)
            journal.head = data if number == 0 else journal.head
        except _MALFORMED as error:
            raise OptionError(
                f"the journal of an unfinished pack cannot be read ({type(error).__name__}: {error}); "
                "start again with overwrite=True (--overwrite)",
                shard=join_url(folder.url, name),
            ) from error
    return journal


def read_listed(folder: OutputFolder, name: str) -> bytes:
    """Read a journal file that was just listed.

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


def _load_document(journal: Journal, document: Any, number: int) -> None:
    """Add the content of one of its files to a journal."""
    if document["version"] != VERSION:
        raise ValueError(f"its version is {document['version']!r}")
    if number == 0:
        journal.run = str(document["run"])
        journal.task = Task(source=document["source"], options=dict(document["options"]))
        journal.stale = frozenset(map(str, document["stale"]))
    journal.finished += map(_decode, document["finished"])


def _decode(document: Any) -> FinishedShard:
    info = document["info"]
    return FinishedShard(
        info=ShardInfo(
            url=str(info["url"]),
            nsamples=int(info["nsamples"]),
            filesize=int(info["filesize"]),
            sha256=str(info["sha256"]),
        ),
        fields={str(name): int(count) for name, count in document["fields"].items()},
        position=int(document["position"]),
        skipped=tuple(
            NumberedSkip(int(number), str(where), str(reason))
            for number, where, reason in document["skipped"]
        ),
        columns={
            str(name): (int(count), str(kind))
            for name, (count, kind) in document["columns"].items()
        },
        key_hashes=str(document["key_hashes"]),
    )
