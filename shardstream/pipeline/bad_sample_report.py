"""Which samples were bad: what a run passed over, one by one, for those who mend the data."""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from shardstream.catalog import Catalog, ConcatCatalog
from shardstream.distributed import Placement
from shardstream.errors import (
    OptionError,
    ReportWarning,
    ShardStreamError,
    StorageError,
    redact,
)
from shardstream.storage import Storage, publish_bytes

_MESSAGE_CHARACTERS = 500
_EVERY_S = 10.0  # a report is written again, at most so often
REPORT_TIMEOUT_S = 30.0  # for it at the end of an epoch
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


def with_locations(bad: Iterable[BadSample], catalog: Catalog) -> tuple[BadSample, ...]:
    """Complete shard and offset from the sample's number.

    In a mix a number may be that of one of its datasets, so it says nothing, and is left out.
    """
    done: list[BadSample] = []
    for one in bad:
        if isinstance(catalog, ConcatCatalog):
            done.append(replace(one, number=None))
        elif one.number is None or one.offset is not None:
            done.append(one)
        else:
            shards, starts, _ = catalog.extents([one.number % len(catalog)])
            url = redact(catalog.url_of(int(shards[0])))
            done.append(replace(one, shard=url, offset=int(starts[0])))
    return tuple(done)


class BadSampleReport:
    """The bad samples of a loader, each once, and the report of them.

    The report is written by a thread, so that no training step waits for it.

    Args:
        report: Path or URL of a file of JSON lines, with ``{rank}`` in it where there are several ranks; None for none.
        placement: Of the loader.
        storage: Where a remote report goes.

    Raises:
        OptionError: If several ranks would write one file.
    """

    def __init__(self, report: str | None, placement: Placement, storage: Storage) -> None:
        if report is not None and placement.world_size > 1 and _RANK not in report:
            raise OptionError(
                f"report={report!r}: {placement.world_size} ranks would write one file; put {_RANK} in its name"
            )
        self._url = None if report is None else report.replace(_RANK, str(placement.rank))
        self._rank = placement.rank
        self._storage = storage
        self._found: dict[tuple[Any, ...], BadSample] = {}
        self._before: dict[tuple[Any, ...], BadSample] | None = None
        self._is_new = False
        self._begun_at = -_EVERY_S
        self._writing: Future[None] | None = None

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
        is_idle = self._writing is None or self._writing.done()
        if self._is_new and is_idle and time.monotonic() - self._begun_at >= _EVERY_S:
            if (problem := self._problem()) is not None:
                warn_or_raise(problem)
            self._begin()

    def finish(self, *, waits: bool = True) -> Exception | None:
        """Bring the report up to date; return what prevents that, for the caller to tell.

        Args:
            waits: Return when it is written, or cannot be; else at once.
        """
        problem = self._problem() if waits else None
        if self._is_new:
            is_late = self._writing is not None
            self._begin()
            if waits and not is_late:
                problem = self._problem()
        return problem

    def _begin(self) -> None:
        """Let a thread write what there is, behind the one that is still writing: the newest report stays."""
        if self._url is None:
            return
        self._is_new, self._begun_at = False, time.monotonic()
        before, self._writing = self._writing, Future[None]()
        writing = self._writing
        found = dict(self._found)

        def write() -> None:
            if before is not None and not sys.is_finalizing():  # then no other thread goes on
                wait([before])
            try:
                self._write(str(self._url), found)
            except Exception as error:  # noqa: BLE001  (told by the thread that waits)
                writing.set_exception(error)
            else:
                writing.set_result(None)

        if sys.is_finalizing():  # an iterator that is dropped last: no thread starts any more
            write()
        else:  # a daemon: a store that hangs must not keep the process from ending
            threading.Thread(target=write, name="shardstream-report", daemon=True).start()

    def _problem(self) -> Exception | None:
        """Wait for the thread; return why it failed."""
        if self._writing is None:
            return None
        try:
            error = self._writing.exception(REPORT_TIMEOUT_S)
        except TimeoutError:
            return StorageError(
                f"the report of bad samples is not written after {REPORT_TIMEOUT_S:.0f} s; check the server, or write it to a local file",
                shard=self._url,
            )
        self._writing = None
        self._is_new |= error is not None  # it is tried again
        return _as_report_error(error, str(self._url))

    def _write(self, url: str, found: dict[tuple[Any, ...], BadSample]) -> None:
        """Publish the report, whole; what an earlier run wrote there stays in it."""
        if self._before is None:
            self._before = _read(url, self._storage)
        lines = [json.dumps(asdict(one)) for one in (self._before | found).values()]
        publish_bytes(self._storage, url, "".join(f"{line}\n" for line in lines).encode())


def warn_or_raise(problem: Exception) -> None:
    """Warn of a report that cannot be written; a wrong name for it is an error.

    Raises:
        OptionError: If another file is there, or the place cannot be opened.
    """
    if isinstance(problem, OptionError):
        raise problem
    warnings.warn(f"{problem}; training goes on", ReportWarning, stacklevel=2)


def _as_report_error(error: BaseException | None, url: str) -> Exception | None:
    """Return an error as that of the report."""
    if error is None or isinstance(error, OptionError):
        return error
    return StorageError(f"the report of bad samples cannot be written: {error}", shard=url)


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
