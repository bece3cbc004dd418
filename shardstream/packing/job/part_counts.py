"""Count samples and parts of a job, for the progress and the report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from shardstream.packing.job.part_record import PartResult
from shardstream.packing.job.report import (
    Progress,
    ProgressFunction,
    Skip,
    SplitReport,
    skipped_before_error,
)
from shardstream.tasks import JSON, RetryCount
from shardstream.tasks import Task as ShardTask

_PROGRESS_EVERY_S = 0.1


class PartCounts:
    """Counts what the parts of a job have written.

    Args:
        progress: Called after each part, and about ten times a second with the samples that are written in this process.
        total: Records of the source, if known.
        retries: Counts the tasks that are run again.
        skips: Whether records that cannot be packed are skipped.
    """

    def __init__(
        self,
        progress: ProgressFunction | None,
        total: int | None,
        retries: RetryCount,
        *,
        skips: bool,
    ) -> None:
        self.split = SplitReport(name="", url="", samples=0, shards=0, total_bytes=0)
        """The parts of the current split that were run here."""
        self.fields = Counter[str]()
        self.skipped: list[Skip] = []
        self._progress, self._update = progress, Progress(0, 0, 0, total)
        self.skips = skips
        self._retries = retries
        self._shown_s = 0.0

    def begin(self, split: str, url: str) -> None:
        """Begin the next split."""
        self.split = SplitReport(name=split, url=url, samples=0, shards=0, total_bytes=0)

    def add_sample(self, size_bytes: int) -> None:
        """Count a sample that is written in this process, of a part that is not done yet."""
        if self._progress is None:
            return
        now, now_s = self._update, time.monotonic()
        self._update = now._replace(samples=now.samples + 1, size_bytes=now.size_bytes + size_bytes)
        if now_s - self._shown_s >= _PROGRESS_EVERY_S:
            self._shown_s = now_s
            self._progress(self._update)

    def add_task(self, task: ShardTask, document: Mapping[str, JSON]) -> None:  # noqa: ARG002
        """Count the result of a task (see `add`)."""
        self.add(PartResult.decode(document), is_kept=bool(document["kept"]))

    def add(
        self, result: PartResult, *, is_kept: bool = False, has_counted_samples: bool = False
    ) -> None:
        """Count the result of a part.

        Args:
            result: The result.
            is_kept: Whether an earlier run has written it.
            has_counted_samples: Whether `add_sample` has counted its samples.

        Raises:
            OptionError: If records were skipped in an earlier run, and this one does not skip.
        """
        split, now = self.split, self._update
        if result.skipped and not self.skips:
            raise skipped_before_error(len(result.skipped), result.skipped[0], split.url)
        self.split = replace(
            split,
            samples=split.samples + result.nsamples,
            shards=split.shards + len(result.shards),
            total_bytes=split.total_bytes + result.total_bytes,
            kept=split.kept + len(result.shards) * is_kept,
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
            self._retries.count,
        )
        if self._progress is not None:
            self._progress(self._update)
