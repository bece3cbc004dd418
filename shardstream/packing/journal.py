"""The journal of an unfinished pack or `ShardWriter`: small JSON files in the folder of its shards until all is published.

Each file holds 256 records, one for each published shard; the first file also holds the task of the pack.
Only the last file is rewritten when a shard is finished, so the cost of a shard does not grow with their number.
Every file names the run that wrote it. The run that the first file names owns the folder; a run that finds another name stops.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from shardstream.errors import ChangedError, NotFoundError, OptionError, StorageError
from shardstream.format import ShardInfo
from shardstream.storage import OutputFolder, is_journal, join_url, journal_name

VERSION = 2  # of the files, and of the bytes that a pack writes: with another, nothing goes on
RECORDS_PER_FILE = 256
# What is raised by reading JSON that has another shape than ours.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class NumberedSkip(NamedTuple):
    """A record that was left out."""

    number: int
    """Of the record in the source."""
    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedShard:
    """A shard that is there, with its index.

    Args:
        info: As the manifest will have it.
        fields: How many samples have each field.
        position: Number of the record of the source that comes next.
        skipped: Records that were left out since the shard before.
    """

    info: ShardInfo
    fields: Mapping[str, int]
    position: int
    skipped: tuple[NumberedSkip, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What decides the bytes that a pack writes.

    Args:
        source: Changes when the source does; None if nobody can tell.
        options: As JSON can hold them.
    """

    source: str | None
    options: Mapping[str, Any]

    def differences(self, earlier: Task) -> list[str]:
        """Describe what has changed since an earlier task; empty if that one can be resumed by this."""
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
    """The journal of one dataset; `read` one, or begin it.

    Args:
        folder: Of the dataset.
        task: What the pack was asked to do.
        stale: Names of shards that were there before; those not written again are to be deleted at last.
        finished: The shards that are there, in order.
        run: Unique name of the run that writes it.
        head: The first file as it is there now; None if it is not.
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
        """Take the place from the run whose ``head`` this is, and write this journal over its ``num_files`` files.

        Raises:
            StorageError: If another run has taken it meanwhile, or it cannot be written.
        """
        self._write(0)
        for number in reversed(range(self._last + 1, num_files)):
            self.folder.remove(journal_name(number))
        for number in range(1, self._last + 1):
            self._write(number)

    def add(self, finished: FinishedShard) -> None:
        """Note that a shard is there.

        Raises:
            StorageError: If another run has taken the place, or it cannot be written.
        """
        self.finished.append(finished)
        self._write(self._last)

    def check_owner(self) -> None:
        """Make sure that no other run has taken the place.

        Raises:
            StorageError: If one has, or the journal was deleted or cannot be read.
        """
        name = journal_name(0)
        try:
            owner = json.loads(self.folder.read(name))["run"]
        except (NotFoundError, *_MALFORMED):
            owner = None
        if owner is None:
            raise StorageError(
                "the journal of this pack or ShardWriter was deleted: another one has ended here meanwhile, or somebody removed it; "
                "start again with overwrite=True (--overwrite)",
                shard=join_url(self.folder.url, name),
            )
        if owner != self.run:
            raise self._owner_changed_error()

    def remove(self) -> None:
        """Delete it; the beginning last.

        Raises:
            StorageError: If another run has taken the place, or it cannot be reached.
        """
        self.check_owner()
        for number in reversed(range(self._last + 1)):
            self.folder.remove(journal_name(number))

    @property
    def _last(self) -> int:
        return max(0, len(self.finished) - 1) // RECORDS_PER_FILE

    def _write(self, number: int) -> None:
        first = number * RECORDS_PER_FILE
        document: dict[str, Any] = {"version": VERSION, "run": self.run}
        if number == 0:
            document |= {"source": self.task.source, "options": dict(self.task.options)}
            document["stale"] = sorted(self.stale)
        document["finished"] = [
            asdict(one) for one in self.finished[first : first + RECORDS_PER_FILE]
        ]
        data = json.dumps(document).encode()
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
        folder: Of the dataset.
        names: Of the files in it.

    Returns:
        The journal; None if there is none.

    Raises:
        OptionError: If there is one that cannot be understood.
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
                break  # left by an earlier run, which another one took the place of
            _load_document(journal, document, number)
            journal.head = data if number == 0 else journal.head
        except _MALFORMED as error:
            raise OptionError(
                f"the notes of an unfinished pack cannot be read ({type(error).__name__}: {error}); "
                "start again with overwrite=True (--overwrite)",
                shard=join_url(folder.url, name),
            ) from error
    return journal


def read_listed(folder: OutputFolder, name: str) -> bytes:
    """Read a file of a journal that was listed a moment ago.

    Raises:
        StorageError: If it is gone, or out of reach.
    """
    try:
        return folder.read(name)
    except NotFoundError as error:
        raise StorageError(
            "another pack or ShardWriter has just ended here; look at what it made, then run this again",
            shard=join_url(folder.url, name),
        ) from error


def _load_document(journal: Journal, document: Any, number: int) -> None:
    """Add to a journal what one of its files says."""
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
    )
