"""Progress and report of a job: their values, the counts of its parts, and the progress as lines of text."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardstream.errors import OptionError, get_logger, human_bytes, plural
from shardstream.packing.shards.part_writer import PartResult, Skip
from shardstream.tasks import RetryCount

_log = get_logger(__name__)

LINE_EVERY_S = 30.0
_PROGRESS_EVERY_S = 0.1


class Progress(NamedTuple):
    """Progress of `pack`, `reshard`, `index` or `verify`."""

    samples: int
    """Samples written so far; for `index` and `verify` those of the shards that have been read."""
    skipped: int
    """Records or samples left out so far: by ``select``, or because of an error."""
    size_bytes: int
    """Bytes of the tars so far, written or read."""
    total: int | None
    """Number of all records, if known."""
    kept: int = 0
    """Samples in shards of an earlier run that was stopped."""
    shards: int = 0
    """Shards that are done."""
    failures: int = 0
    """Records that were skipped because of an error; for `verify` errors that were found."""
    retries: int = 0
    """Tasks that were run again because their worker died (see `Executor`)."""
    total_bytes: int | None = None
    """Bytes of all tars, if known: those that `index` and `verify` read."""

    @property
    def done(self) -> tuple[int, int | None]:
        """What is done, and all that is to do, if known: in bytes where these are known, else in records."""
        if self.total_bytes is not None:
            return self.size_bytes, self.total_bytes
        return self.samples + self.skipped, self.total


ProgressFunction = Callable[[Progress], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """Result of one split.

    Args:
        name: Name of the split; "" without splits.
        url: URL of its folder.
        samples: Samples in it.
        shards: Shards in it.
        total_bytes: Bytes of its tars.
        kept: Shards of an earlier run that was stopped.
    """

    name: str
    url: str
    samples: int = 0
    shards: int = 0
    total_bytes: int = 0
    kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackReport:
    """Result of a packing job.

    Args:
        source: Description of the source.
        splits: Result of each split.
        seconds: Duration of the job.
        skipped: Records that were skipped, with ``on_error="skip"``.
        files: Loose files that were grouped to samples; None for other sources.
        fields: Number of samples that have each field.
        unfinished: Parts of the job that are not done, by this process or another one; if any, nothing is published yet.
        warnings: Findings that may be mistakes, e.g. keys of added fields that no sample has; known when the dataset is published.
    """

    source: str
    splits: tuple[SplitReport, ...]
    seconds: float = 0.0
    skipped: tuple[Skip, ...] = ()
    files: int | None = None
    fields: Mapping[str, int] = field(default_factory=dict)
    unfinished: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Samples written."""
        return sum(split.samples for split in self.splits)

    @property
    def shards(self) -> int:
        """Shards written."""
        return sum(split.shards for split in self.splits)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tars."""
        return sum(split.total_bytes for split in self.splits)

    @property
    def kept(self) -> int:
        """Shards of an earlier run that was stopped."""
        return sum(split.kept for split in self.splits)


def combine_reports(source: str, reports: Sequence[PackReport]) -> PackReport:
    """Return the report of a job from those of its datasets.

    Args:
        source: Description of the source.
        reports: A report for each dataset.
    """
    splits: list[SplitReport] = []
    skipped: list[Skip] = []
    warnings: list[str] = []
    fields = Counter[str]()
    for one in reports:
        splits += one.splits
        skipped += one.skipped
        warnings += one.warnings
        fields.update(one.fields)
    return PackReport(
        source=source,
        splits=tuple(splits),
        skipped=tuple(skipped),
        fields=dict(fields),
        warnings=tuple(warnings),
    )


def skipped_before_error(count: int, first: Skip, folder: str) -> OptionError:
    """Describe that a run that does not skip records goes on after one that did.

    Args:
        count: Number of its skipped records.
        first: One of them.
        folder: Folder of the dataset.
    """
    return OptionError(
        f"the stopped run skipped {plural(count, 'record')}, the first: {first.reason}; "
        "continue with on_error='skip' (--skip-errors), or start again with overwrite=True (--overwrite)",
        shard=folder,
    )


def logged(title: str, progress: ProgressFunction | None) -> ProgressFunction | None:
    """Return a progress function that also logs a line every 30 s, if the program logs at INFO.

    Args:
        title: Verb of the job, and its place.
        progress: The function of the caller.
    """
    if not _log.isEnabledFor(logging.INFO):
        return progress
    log = progress_lines(title, _log.info)

    def update(now: Progress) -> None:
        log(now)
        if progress is not None:
            progress(now)

    return update


def progress_lines(
    title: str, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic
) -> ProgressFunction:
    """Return a progress function that writes a line at most every 30 s.

    Args:
        title: Verb of the job.
        write: Takes a line.
        clock: Time in seconds.
    """
    start_s = last_s = clock()

    def update(progress: Progress) -> None:
        nonlocal last_s
        now_s = clock()
        if now_s - last_s >= LINE_EVERY_S:
            last_s = now_s
            write(f"{title}: {_share(progress)}{counts_text(progress, now_s - start_s)}")

    return update


def _share(progress: Progress) -> str:
    """Return the part of a job that is done, if it is known."""
    done, total = progress.done
    return f"{100 * done / total:.0f} %  " if total else ""


def counts_text(progress: Progress, seconds: float) -> str:
    """Return counts and rates of a job as one line; failures, retries and kept samples only if there are some.

    >>> counts_text(Progress(1200, 0, 5_000_000, None, shards=3, failures=1, retries=2), 10.0)
    '3 shards  1,200 samples  120/s  500.0 kB/s  1 failure  2 tasks run again'
    """
    seconds = max(seconds, 1e-3)
    new = progress.samples - progress.kept
    size_bytes: float = progress.size_bytes
    if progress.kept:  # bytes of an earlier run took no time now
        size_bytes *= new / max(progress.samples, 1)
    parts = [
        plural(progress.shards, "shard"),
        plural(progress.samples, "sample"),
        f"{new / seconds:,.0f}/s",
        f"{human_bytes(int(size_bytes / seconds))}/s",
    ]
    if progress.kept:
        parts.append(f"{progress.kept:,} of an earlier run")
    if progress.failures:
        parts.append(plural(progress.failures, "failure"))
    if progress.retries:
        parts.append(f"{plural(progress.retries, 'task')} run again")
    return "  ".join(parts)


class PartCounts:
    """Counts what the parts of a job have written.

    Args:
        progress: Called after each part, and about ten times a second with the samples that are written in this process.
        total: Records of the source, if known.
        retries: Counts the tasks that are run again, if there are tasks.
        skips: Whether records that cannot be packed are skipped.
    """

    def __init__(
        self,
        progress: ProgressFunction | None,
        total: int | None,
        retries: RetryCount | None,
        *,
        skips: bool,
    ) -> None:
        self.splits: list[SplitReport] = []
        """The parts of each dataset that were run here; datasets are added by the owner."""
        self.fields = Counter[str]()
        self.skipped: list[Skip] = []
        self._progress, self._update = progress, Progress(0, 0, 0, total)
        self.skips = skips
        self._retries = retries
        self._shown_s = 0.0

    def add_sample(self, size_bytes: int) -> None:
        """Count a sample that is written in this process, of a part that is not done yet."""
        if self._progress is None:
            return
        now, now_s = self._update, time.monotonic()
        self._update = now._replace(samples=now.samples + 1, size_bytes=now.size_bytes + size_bytes)
        if now_s - self._shown_s >= _PROGRESS_EVERY_S:
            self._shown_s = now_s
            self._progress(self._update)

    def add(
        self,
        result: PartResult,
        split: int,
        *,
        is_kept: bool = False,
        has_counted_samples: bool = False,
    ) -> None:
        """Count the result of a part.

        Args:
            result: The result.
            split: Number of its dataset.
            is_kept: Whether an earlier run has written it.
            has_counted_samples: Whether `add_sample` has counted its samples.

        Raises:
            OptionError: If records were skipped in an earlier run, and this one does not skip.
        """
        before, now = self.splits[split], self._update
        if result.skipped and not self.skips:
            raise skipped_before_error(len(result.skipped), result.skipped[0], before.url)
        self.splits[split] = replace(
            before,
            samples=before.samples + result.nsamples,
            shards=before.shards + len(result.shards),
            total_bytes=before.total_bytes + result.total_bytes,
            kept=before.kept + len(result.shards) * is_kept,
        )
        self.fields.update(result.fields)
        self.skipped += result.skipped
        self._update = Progress(
            now.samples + result.nsamples * (not has_counted_samples),
            now.skipped + result.left_out + len(result.skipped),
            now.size_bytes + result.total_bytes * (not has_counted_samples),
            now.total,
            now.kept + result.nsamples * is_kept,
            now.shards + len(result.shards),
            now.failures + len(result.skipped),
            0 if self._retries is None else self._retries.count,
        )
        if self._progress is not None:
            self._progress(self._update)
