"""What an unfinished pack has done so far: small JSON files beside its shards, from its start until all is published.

Each file holds 256 records, one for each shard that is there with its index; the first also says what the pack was asked to do.
Only the last file is written anew when a shard is finished, so that 100,000 shards cost no more for each than ten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from shardstream.errors import OptionError
from shardstream.format.manifest import ShardInfo
from shardstream.storage.filesystem import Storage, join_url
from shardstream.storage.publish import publish_bytes, remove
from shardstream.storage.retry import fetch

VERSION = 2  # of the files, and of the bytes that a pack writes: with another, nothing goes on
_NAME = ".shardstream-pack-{number:06d}.json"
_RECORDS_A_FILE = 256
# What is raised by reading JSON that has another shape than ours.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class NumberedSkip(NamedTuple):
    """A record that was left out."""

    number: int
    """Of the record in the source."""
    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
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
        """Say for people what is another thing than in an earlier task; nothing if that can go on as this."""
        now, then = (json.loads(json.dumps(dict(task.options))) for task in (self, earlier))
        found = [
            f"{name} was {then.get(name)!r}, now {now.get(name)!r}"
            for name in dict.fromkeys([*now, *then])
            if now.get(name) != then.get(name)
        ]
        if self.source != earlier.source:
            found.append("the source has changed")
        return found


@dataclass(slots=True, kw_only=True)
class Journal:
    """The journal of one dataset; `read` one, or begin it.

    Args:
        storage: Where it is.
        folder: URL of the dataset.
        task: What the pack was asked to do.
        stale: Names of shards that were there before; those not written again are to be deleted at last.
        finished: The shards that are there, in order.
    """

    storage: Storage
    folder: str
    task: Task
    stale: frozenset[str] = frozenset()
    finished: list[Finished] = field(default_factory=list)

    def begin(self, num_files: int) -> None:
        """Write it as it is now, over ``num_files`` files of an earlier one that begins alike."""
        # The last first: what is left is the true beginning of the earlier journal.
        for number in reversed(range(self._last + 1, num_files)):
            self._remove(number)
        self._write(self._last)

    def add(self, finished: Finished) -> None:
        """Note that a shard is there."""
        self.finished.append(finished)
        self._write(self._last)

    def remove(self) -> None:
        """Delete it; the beginning last."""
        for number in reversed(range(self._last + 1)):
            self._remove(number)

    @property
    def _last(self) -> int:
        return max(0, len(self.finished) - 1) // _RECORDS_A_FILE

    def _write(self, number: int) -> None:
        first = number * _RECORDS_A_FILE
        document: dict[str, Any] = {"version": VERSION}
        if number == 0:
            document |= {"source": self.task.source, "options": dict(self.task.options)}
            document["stale"] = sorted(self.stale)
        document["finished"] = [
            asdict(one) for one in self.finished[first : first + _RECORDS_A_FILE]
        ]
        publish_bytes(self.storage, self._url(number), json.dumps(document).encode())

    def _remove(self, number: int) -> None:
        remove(self.storage, self._url(number))

    def _url(self, number: int) -> str:
        return join_url(self.folder, _NAME.format(number=number))


def is_journal(name: str) -> bool:
    """Tell whether a file is part of a journal, by its name.

    >>> is_journal(".shardstream-pack-000000.json")
    True
    """
    start, end = _NAME.split("{number:06d}")
    return name.startswith(start) and name.endswith(end)


def read_journal(storage: Storage, folder: str, names: Sequence[str]) -> Journal | None:
    """Read what an earlier pack has left.

    Args:
        storage: Where it is.
        folder: URL of the dataset.
        names: Of the files there.

    Returns:
        The journal; None if there is none.

    Raises:
        OptionError: If there is one that cannot be understood.
        StorageError: If it is out of reach.
    """
    if _NAME.format(number=0) not in names:
        return None
    journal = Journal(storage=storage, folder=folder, task=Task(source=None, options={}))
    for number in range(sum(map(is_journal, names))):
        name = _NAME.format(number=number)
        if name not in names:
            break
        url = join_url(folder, name)
        data = fetch(storage, url)
        try:
            _take(journal, json.loads(data), number)
        except _MALFORMED as error:
            raise OptionError(
                f"the notes of an unfinished pack cannot be read ({type(error).__name__}: {error}); "
                "start anew with overwrite=True (--overwrite)",
                shard=url,
            ) from error
    return journal


def _take(journal: Journal, document: Any, number: int) -> None:
    """Add to a journal what one of its files says."""
    if document["version"] != VERSION:
        raise ValueError(f"its version is {document['version']!r}")
    if number == 0:
        journal.task = Task(source=document["source"], options=dict(document["options"]))
        journal.stale = frozenset(map(str, document["stale"]))
    journal.finished += map(_decode, document["finished"])


def _decode(document: Any) -> Finished:
    info = document["info"]
    return Finished(
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
