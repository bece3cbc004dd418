"""Skip or raise bad samples by one policy for the whole chain, count the skipped ones and those that a step refuses, and report each skipped one."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from shardstream.distributed import Placement
from shardstream.errors import (
    IndexMismatchError,
    OptionError,
    ReportWarning,
    SampleError,
    ShardStreamError,
    SkipBudgetError,
    StorageError,
    describe_error,
    get_logger,
    plural,
    redact,
    shown,
)
from shardstream.samples import RefusedError
from shardstream.storage import Storage, publish_bytes

_log = get_logger(__name__)
_LISTED = 10_000  # in each worker and epoch; further ones are only counted
_FATAL = (OptionError, StorageError, IndexMismatchError, SkipBudgetError, MemoryError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipBudget:
    """Limit of bad samples to skip.

    Args:
        samples: Maximum in each loader worker and epoch; one more is an error.
        warn: Log each skipped sample as a warning.
        report: Path or URL of a file in which a `ShardLoader` lists them, one line of JSON each: shard, offset, number, key, field,
            error. With several ranks its name needs ``{rank}``. Lines of earlier runs stay.
            Written with the dataset's storage options if its protocol is that of the shards. If it cannot be written, a
            `ReportWarning` is issued and training continues.
        refill: A `ShardLoader` replaces bad samples, and those that ``select`` refuses, by other good samples of the epoch, so that all
            batches keep their size on all ranks, as losses over gathered batches need. Replacements appear twice in the epoch;
            `ShardLoader.refilled` counts them.
            Without it, batches shrink by the number of these samples, and ranks may differ at a step. A `ShardLoader` refuses it with
            batch_size=None and after steps that change counts; it has no effect without a `ShardLoader`.
    """

    samples: int = 100
    warn: bool = False
    report: str | None = None
    refill: bool = False

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise OptionError(f"SkipBudget: samples must be at least 0, not {self.samples}")

    def check(self, counts: Mapping[str, int], last: str = "") -> None:
        """Check the number of bad samples of a worker, by kind of error.

        Raises:
            SkipBudgetError: If the budget is exceeded.
        """
        total = sum(counts.values())
        if total > self.samples:
            raise SkipBudgetError(
                f"skip budget exceeded: {plural(total, 'bad sample')}, limit {self.samples} ({dict(counts)}); "
                f"fix the data, or allow more with on_error=ss.SkipBudget(samples=…) (docs/faults.md){last}"
            )


OnError = Literal["raise", "warn", "skip"] | SkipBudget


class SkipTracker:
    """Apply a skip policy and count the bad samples.

    Args:
        on_error: "raise" stops at the first; "skip" and "warn" skip up to 100; a `SkipBudget` sets the limit.
        can_refuse: Whether steps may refuse items; else a refused item is an error.
    """

    def __init__(self, on_error: OnError = "raise", *, can_refuse: bool = True) -> None:
        if on_error not in ("raise", "warn", "skip") and not isinstance(on_error, SkipBudget):
            raise OptionError(
                f"on_error is 'raise', 'warn', 'skip' or ss.SkipBudget(samples=…), not {on_error!r}"
            )
        self.budget: SkipBudget | None = None
        if isinstance(on_error, SkipBudget):
            self.budget = on_error
        elif on_error != "raise":
            self.budget = SkipBudget(warn=on_error == "warn")
        self.counts: Counter[str] = Counter()
        self.samples_per_dataset: Counter[str] = Counter()
        """All samples of each part of a mix, not only bad ones."""
        self.refilled = 0
        """Number of samples that replaced bad or refused ones."""
        self.refused = 0
        """Number of items that steps refused, and of samples that were deleted since."""
        self._can_refuse = can_refuse
        self.drained: list[BadSample] = []
        """Bad samples since the last `drain_bad_samples`."""

    def drain_bad_samples(self) -> list[BadSample]:
        """Return the bad samples since the last call."""
        drained, self.drained = self.drained, []
        return drained

    def skip_or_raise(self, error: Exception, item: Any = None, number: int | None = None) -> None:
        """Count a bad or refused sample, or raise its error again.

        Args:
            error: Error of the sample.
            item: Item that caused it, if known; a sample contains its key and shard.
            number: Number of the sample in the dataset, if known.

        Raises:
            Exception: The error itself if the policy is "raise", or if the sample is not the cause: a wrong option, a storage
                error, an index that does not match.
            SampleError: If it is refused and none may be.
            SkipBudgetError: If the budget is exceeded.
        """
        if isinstance(error, RefusedError):
            if not self._can_refuse:
                sample = item if isinstance(item, dict) else {}
                raise SampleError.of(
                    sample,
                    f"{error} refuses this sample, but here each number has a sample",
                    remedy="choose samples with where= or subset=, or leave by_number() out",
                ) from None
            self.refused += 1
            return
        if isinstance(error, StopIteration):  # would silently end the epoch
            text = "a function of the pipeline raised StopIteration"
            raise RuntimeError(text) from error  # noqa: TRY004  (as PEP 479 does)
        if self.budget is None or isinstance(error, _FATAL):
            raise error
        self.counts[type(error).__name__] += 1
        if self.counts.total() <= _LISTED:
            self.drained.append(BadSample.of(error, item, number))
        notes = "; ".join(getattr(error, "__notes__", ()))
        text = shown(describe_error(error) + (f" ({notes})" if notes else ""))
        _log.log(
            logging.WARNING if self.budget.warn else logging.INFO, "skipped a sample: %s", text
        )
        try:
            self.budget.check(self.counts, f"; last error: {text}")
        except SkipBudgetError as exceeded:
            raise exceeded from error


_MESSAGE_CHARACTERS = 500
_EVERY_S = 10.0  # minimum time between two writes of a report
REPORT_TIMEOUT_S = 30.0  # for the last write at the end of an epoch
_RANK = "{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """One bad sample that was skipped; unknown values are None.

    Args:
        error: Name of the exception's class.
        message: Message of the exception, up to 500 characters.
        shard: URL of the tar.
        offset: Byte offset of the damaged header, or else of the sample's first header.
        number: Number of the sample in the dataset, from 0; None in a mix.
        key: Its ``__key__``.
        field: The field that cannot be decoded.
        epoch: Epoch in which it was found first.
        rank: Rank that found it.
        worker: Loader worker of that rank.
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
        """Describe an error and its sample, as far as known."""
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
            key=None if key is None else str(key),  # rows have several
            field=field,
        )

    @property
    def place(self) -> tuple[Any, ...]:
        """Identity of the sample, equal in every epoch, so that it is listed once."""
        return self.shard, self.offset, self.key, self.field, self.error


class BadSampleReport:
    """Collect the bad samples of a loader, each once, and write a report of them.

    A thread writes the report, so that no training step waits for it.

    Args:
        report: Path or URL of a file of JSON lines, with ``{rank}`` in it if there are several ranks; None for none.
        placement: Rank and world size of the loader.
        storage: Storage for a remote report.

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
        self._earlier_samples: dict[tuple[Any, ...], BadSample] | None = None
        self._is_new = False
        self._write_started_at = -_EVERY_S
        self._writing: Future[None] | None = None

    @property
    def samples(self) -> list[BadSample]:
        """Bad samples so far, in the order in which they were found."""
        return list(self._found.values())

    def add(self, bad: Sequence[BadSample], *, epoch: int, worker: int) -> None:
        """Add the bad samples of a worker, and write the report at most every 10 s."""
        for one in bad:
            if one.place not in self._found:
                self._found[one.place] = replace(one, epoch=epoch, rank=self._rank, worker=worker)
                self._is_new = True
        is_idle = self._writing is None or self._writing.done()
        if self._is_new and is_idle and time.monotonic() - self._write_started_at >= _EVERY_S:
            if (problem := self._wait_for_write()) is not None:
                warn_or_raise(problem)
            self._start_write()

    def finish(self, *, waits: bool = True) -> Exception | None:
        """Write the report; return the error if that fails, for the caller to report.

        Args:
            waits: Wait until it is written or has failed; else return at once.
        """
        problem = self._wait_for_write() if waits else None
        if self._is_new:
            is_late = self._writing is not None
            self._start_write()
            if waits and not is_late:
                problem = self._wait_for_write()
        return problem

    def _start_write(self) -> None:
        """Start a thread that writes the report after the previous thread is done, so that the newest report stays."""
        if self._url is None:
            return
        self._is_new, self._write_started_at = False, time.monotonic()
        previous_write, self._writing = self._writing, Future[None]()
        writing = self._writing
        samples_found = dict(self._found)

        def write() -> None:
            # Other threads stop at finalization.
            if previous_write is not None and not sys.is_finalizing():
                wait([previous_write])
            try:
                self._write(str(self._url), samples_found)
            except Exception as error:  # noqa: BLE001  (reported by the thread that waits)
                writing.set_exception(error)
            else:
                writing.set_result(None)

        if sys.is_finalizing():  # an iterator deleted at exit: threads can no longer start
            write()
        else:  # a daemon, so that a stalled store does not keep the process alive
            threading.Thread(target=write, name="shardstream-report", daemon=True).start()

    def _wait_for_write(self) -> Exception | None:
        """Wait for the thread; return its error, or None."""
        if self._writing is None:
            return None
        try:
            error = self._writing.exception(REPORT_TIMEOUT_S)
        except TimeoutError:
            return StorageError(
                f"writing the report of bad samples took over {REPORT_TIMEOUT_S:.0f} s; check the server, or write it to a local file",
                shard=self._url,
            )
        self._writing = None
        self._is_new |= error is not None  # retried with the next write
        return _as_report_error(error, str(self._url))

    def _write(self, url: str, samples_found: dict[tuple[Any, ...], BadSample]) -> None:
        """Publish the whole report, with the lines of earlier runs."""
        if self._earlier_samples is None:
            self._earlier_samples = _read(url, self._storage)
        lines = [
            json.dumps(asdict(one)) for one in (self._earlier_samples | samples_found).values()
        ]
        publish_bytes(self._storage, url, "".join(f"{line}\n" for line in lines).encode())


def warn_or_raise(problem: Exception) -> None:
    """Warn of a report that cannot be written; raise if its name is wrong.

    Raises:
        OptionError: If another file has this name, or the location cannot be opened.
    """
    if isinstance(problem, OptionError):
        raise problem
    warnings.warn(f"{problem}; training continues", ReportWarning, stacklevel=2)


def _as_report_error(error: BaseException | None, url: str) -> Exception | None:
    """Return an error as a `StorageError` that names the report."""
    if error is None or isinstance(error, OptionError):
        return error
    return StorageError(f"the report of bad samples cannot be written: {error}", shard=url)


def _read(url: str, storage: Storage) -> dict[tuple[Any, ...], BadSample]:
    if not storage.exists(url):
        return {}
    names = {field.name for field in fields(BadSample)}
    samples_found: dict[tuple[Any, ...], BadSample] = {}
    for line in storage.read_bounded(url).splitlines():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or values.keys() != names:
            raise OptionError(
                "this file is not a report of bad samples; give another name", shard=url
            )
        one = BadSample(**values)
        samples_found[one.place] = one
    return samples_found
