"""Which samples were bad: what a run passed over, one by one, for those who mend the data."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shardstream.errors import OptionError, ShardStreamError, redact
from shardstream.placement import Placement
from shardstream.storage.filesystem import Storage
from shardstream.storage.joined import AnyCatalog, JoinedCatalog
from shardstream.storage.publish import publish_bytes

_MESSAGE_CHARACTERS = 500
_EVERY_S = 10.0  # a report is written again, at most so often
_RANK = "{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """One bad sample that was passed over; what is not known is None.

    Args:
        error: Name of the exception's class.
        message: What it said, up to 500 characters.
        shard: URL of the tar.
        offset: Byte in it: of the header that is wrong, or else of the sample's first header.
        number: Of the sample in the dataset, from 0; None in a mix.
        key: Its ``__key__``.
        field: The field that cannot be decoded.
        epoch: In which it was met first.
        rank: Which rank met it.
        worker: Which loader worker of that rank.
    """

    error: str
    message: str
    shard: str | None = None
    offset: int | None = None
    number: int | None = None
    key: str | None = None
    field: str | None = None
    epoch: int | None = None
    rank: int | None = None
    worker: int | None = None

    @classmethod
    def of(cls, error: Exception, item: Any = None, number: int | None = None) -> BadSample:
        """Describe an error and the sample it came from, as far as that is known."""
        message = "; ".join([str(error), *getattr(error, "__notes__", ())])
        sample = item if isinstance(item, dict) else {}
        shard, key = sample.get("__url__"), sample.get("__key__")
        offset = field = None
        if isinstance(error, ShardStreamError):
            shard, key = error.shard or shard, error.key or key
            offset, field = error.offset, error.field
        return cls(
            error=type(error).__name__,
            message=message[:_MESSAGE_CHARACTERS],
            shard=None if shard is None else redact(str(shard)),
            offset=offset,
            number=number,
            key=key,
            field=field,
        )

    @property
    def place(self) -> tuple[Any, ...]:
        """What tells it from others: the same sample is bad in every epoch."""
        return self.shard, self.offset, self.key, self.field, self.error


def located(bad: Iterable[BadSample], catalog: AnyCatalog) -> tuple[BadSample, ...]:
    """Complete shard and offset from the sample's number.

    In a mix a number may be that of one of its datasets, so it says nothing, and is left out.
    """
    done: list[BadSample] = []
    for one in bad:
        if isinstance(catalog, JoinedCatalog):
            done.append(replace(one, number=None))
        elif one.number is None or one.offset is not None:
            done.append(one)
        else:
            shards, starts, _ = catalog.extents([one.number % len(catalog)])
            url = redact(catalog.url_of(int(shards[0])))
            done.append(replace(one, shard=url, offset=int(starts[0])))
    return tuple(done)


class Quarantine:
    """The bad samples of a loader, each once, and the report of them.

    Args:
        report: Path or URL of a file of JSON lines, with ``{rank}`` in it where there are several ranks; None for none.
        placement: Of the loader.

    Raises:
        OptionError: If several ranks would write one file.
    """

    def __init__(self, report: str | None, placement: Placement) -> None:
        if report is not None and placement.world_size > 1 and _RANK not in report:
            raise OptionError(
                f"report={report!r}: {placement.world_size} ranks would write one file; put {_RANK} in its name"
            )
        self._url = None if report is None else report.replace(_RANK, str(placement.rank))
        self._rank = placement.rank
        self._found: dict[tuple[Any, ...], BadSample] = {}
        self._before: dict[tuple[Any, ...], BadSample] | None = None
        self._is_new = False
        self._written_at = -_EVERY_S

    @property
    def samples(self) -> list[BadSample]:
        """Those met so far, in order."""
        return list(self._found.values())

    def add(self, bad: Sequence[BadSample], *, epoch: int, worker: int) -> None:
        """Take in what a worker has met, and bring the report up to date from time to time."""
        for one in bad:
            if one.place not in self._found:
                self._found[one.place] = replace(one, epoch=epoch, rank=self._rank, worker=worker)
                self._is_new = True
        if self._is_new and time.monotonic() - self._written_at >= _EVERY_S:
            self.write()

    def write(self) -> None:
        """Publish the report, whole, if there is something new; what an earlier run wrote there stays in it.

        Raises:
            OptionError: If another file is there.
            StorageError: If it cannot be written.
        """
        if self._url is None or not self._is_new:
            return
        storage = Storage()
        if self._before is None:
            self._before = _read(self._url, storage)
        lines = [json.dumps(asdict(one)) for one in (self._before | self._found).values()]
        publish_bytes(storage, self._url, "".join(f"{line}\n" for line in lines).encode())
        self._is_new, self._written_at = False, time.monotonic()


def _read(url: str, storage: Storage) -> dict[tuple[Any, ...], BadSample]:
    if not storage.exists(url):
        return {}
    names = {field.name for field in fields(BadSample)}
    found: dict[tuple[Any, ...], BadSample] = {}
    for line in storage.read(url).splitlines():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or values.keys() != names:
            raise OptionError("this file is no report of bad samples; give another name", shard=url)
        one = BadSample(**values)
        found[one.place] = one
    return found
