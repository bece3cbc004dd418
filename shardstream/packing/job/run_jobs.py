"""Run the parts of jobs, in this process or by an executor, and publish the datasets when all are done.

A job is cut into parts by its source and options alone, so that every process computes the same parts. The first process claims the
destination with a journal (`claim`); each finished part leaves a record in the same folder (`part_record`). `publish` reads the records,
writes ``index.json`` and deletes them. A part that has a record and whose shards are in place is not run again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from shardstream.errors import OptionError
from shardstream.packing.job.claim import Claim, PartJob, claimed, join
from shardstream.packing.job.part_record import (
    PartRecord,
    PartResult,
    PartTask,
    PartWork,
    missing_parts,
)
from shardstream.packing.job.publish import Ready, publish, publish_locked
from shardstream.packing.job.report import (
    PackReport,
    PartCounts,
    ProgressFunction,
    Skip,
    SplitReport,
    combine_reports,
    logged,
    skipped_before_error,
)
from shardstream.packing.shards.part_writer import PartWriter
from shardstream.storage import absolute_url, is_part_record
from shardstream.tasks import JSON, Executor, Parts, RetryCount, Task

# Parts that are flushed and published while the next one is written; their records are written in order.
_ENDING = 2


CountSample = Callable[[int], None]
"""Counts a sample that is written, by its bytes."""
FindKept = Callable[[int], PartResult | None]
"""Returns the result of a part by its number, if an earlier run has written it and it is kept."""
NumberedWork = tuple[int, PartWork]


class StreamedParts(Protocol):
    """The parts of a job, whose records come from one pass over the source."""

    def open(
        self, find_kept: FindKept, count_sample: CountSample
    ) -> Generator[NumberedWork, None, None]:
        """Yield the number and the work of each part that is not kept, in order; each is run before the next one is taken.

        Args:
            find_kept: To be called once for each part of the job.
            count_sample: To be called by the work, for the progress.
        """


class SplitJob(NamedTuple):
    """The job of one dataset: of a split, or of the only one."""

    split: str
    """Name of the split; "" without splits."""
    job: PartJob
    works: Iterable[PartWork] = ()
    """Work of each part, in order."""
    streamed: StreamedParts | None = None
    """The parts, if all are written in this process, instead of ``works``."""


def run_jobs(
    jobs: Sequence[SplitJob],
    *,
    executor: Executor | None,
    overwrite: bool,
    progress: ProgressFunction | None,
    samples: int | None,
    skips: bool = False,
) -> PackReport:
    """Claim the destinations, run all parts, and publish the datasets together; with `Parts` nothing is published.

    Args:
        jobs: The jobs; one for each dataset.
        executor: Where the parts run; by default in this process, which locks out all others until it ends.
        overwrite: Replace existing datasets, or unfinished ones of other jobs.
        progress: Called after each part.
        samples: Samples of the source, for ``progress``.
        skips: Whether records that cannot be packed are skipped; if not, an earlier run that did so is not continued.

    Raises:
        OptionError: If another dataset or job is in a folder, an earlier run skipped records, or ``overwrite`` is used with `Parts`.
        StorageError: If a folder cannot be reached, or another job takes it over.
    """
    if isinstance(executor, Parts) and overwrite:
        raise OptionError(
            "overwrite cannot be used for one part: a part that starts late would delete what the others wrote; "
            "delete the old dataset first, or write elsewhere"
        )
    begin_s = time.monotonic()
    part_jobs = [one.job for one in jobs]
    first = part_jobs[0]
    logs = logged(f"{first.kind} {first.names.folder}", progress)
    counts = PartCounts(logs, samples, RetryCount(executor), skips=skips)
    run = _Run(counts=counts, executor=executor, keeps_skips=skips or not overwrite)
    if executor is None:
        with claimed(part_jobs, overwrite=overwrite) as claims:
            done = [run.split(one, claim) for one, claim in zip(jobs, claims, strict=True)]
            reports = publish_locked(_ready(claims, done), first.storage_options)
    else:
        claims = join(part_jobs, overwrite=overwrite)
        done = [run.split(one, claim) for one, claim in zip(jobs, claims, strict=True)]
        if isinstance(executor, Parts):
            unfinished = (
                missing_parts(job.open_folder().list_files(), job.parts) for job in part_jobs
            )
            return PackReport(
                source=first.title,
                splits=tuple(one.report for one in done),
                seconds=time.monotonic() - begin_s,
                skipped=tuple(counts.skipped),
                fields=dict(counts.fields),
                unfinished=sum(map(len, unfinished)),
            )
        reports = publish(_ready(claims, done), first.storage_options)
    shown = [
        replace(
            one.splits[0],
            name=ran.report.name,
            url=ran.report.url,
            kept=ran.report.kept if ran.parts else one.shards,
        )
        for one, ran in zip(reports, done, strict=True)
    ]
    report = combine_reports(first.title, reports, seconds=time.monotonic() - begin_s)
    return replace(report, splits=tuple(shown))


def _ready(claims: Sequence[Claim], done: Sequence[_SplitRun]) -> list[Ready]:
    return [
        Ready(
            claim.destination.folder,
            claim.journal.run,
            one.parts,
            journal=claim.journal,
            results=one.results,
        )
        for claim, one in zip(claims, done, strict=True)
    ]


class _Ending(NamedTuple):
    """A part that is written, and is being published and recorded."""

    number: int
    result: Future[PartResult]
    writer: PartWriter


class _SplitRun(NamedTuple):
    report: SplitReport
    parts: int
    """Parts of the job; 0 if the dataset was published before."""
    results: Mapping[int, PartResult]
    """What each part has written, by its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Runs the parts of claimed jobs.

    Args:
        counts: Counts their results.
        executor: Where they run; None: in this process.
        keeps_skips: Whether the shards of an earlier run that skipped records are kept.
    """

    counts: PartCounts
    executor: Executor | None
    keeps_skips: bool

    def split(self, one: SplitJob, claim: Claim) -> _SplitRun:
        """Run the parts of one job, unless its dataset is published already."""
        self.counts.begin(one.split, one.job.names.folder)
        if claim.is_published:
            self._check_published(claim)
            return _SplitRun(self.counts.split, 0, {})
        executor = self.executor
        parts, results = (
            self._run_here(one, claim)
            if executor is None
            else self._run_tasks(one, claim, executor)
        )
        return _SplitRun(self.counts.split, parts, results)

    def _check_published(self, claim: Claim) -> None:
        """Refuse to complete a dataset whose run skipped records, if this one does not."""
        published = claim.journal.published
        if published is not None and published.skipped and not self.counts.skips:
            first = Skip(*published.skipped[0])
            raise skipped_before_error(len(published.skipped), first, claim.destination.folder.url)

    def _record(self, job: PartJob, number: int) -> PartRecord:
        return PartRecord(
            folder=absolute_url(job.names.folder),
            storage_options=job.storage_options,
            run_id=job.run,
            number=number,
            of=self.executor.of if isinstance(self.executor, Parts) else 0,
        )

    def _task(self, job: PartJob, claim: Claim, number: int, work: PartWork) -> PartTask:
        return PartTask(
            record=self._record(job, number),
            work=work,
            template=job.names.template,
            limits=job.limits,
            keeps_skips=self.keeps_skips,
            replaces=claim.replaces,
        )

    def _run_tasks(
        self, one: SplitJob, claim: Claim, executor: Executor
    ) -> tuple[int, dict[int, PartResult]]:
        """Run each part as a task; return the number of parts, and the results."""
        parts, results = 0, dict[int, PartResult]()

        def tasks() -> Iterator[PartTask]:
            nonlocal parts
            for number, work in enumerate(one.works):
                parts = number + 1
                yield self._task(one.job, claim, number, work)

        def count(task: Task, document: Mapping[str, JSON]) -> None:
            result = PartResult.decode(document)
            if isinstance(task, PartTask):
                results[task.record.number] = result
            self.counts.add(result, is_kept=bool(document["kept"]))

        executor.run(tasks(), count)
        return parts, results

    def _run_here(self, one: SplitJob, claim: Claim) -> tuple[int, dict[int, PartResult]]:
        """Write the parts one after the other; publish each, and record it, while the next one is written.

        Returns:
            The number of parts, and the results.
        """
        parts, results = 0, dict[int, PartResult]()
        has_records = any(map(is_part_record, claim.destination.files))

        def find_kept(number: int) -> PartResult | None:
            nonlocal parts
            result = self._record(one.job, number).find() if has_records else None
            if result is None or (result.skipped and not self.keeps_skips):
                return None
            parts = number + 1
            results[number] = replace(result, key_hashes="")
            self.counts.add(result, is_kept=True)
            return result

        if one.streamed is None:
            works = (
                (number, work) for number, work in enumerate(one.works) if find_kept(number) is None
            )
        else:
            works = one.streamed.open(find_kept, self.counts.add_sample)
        ending: deque[_Ending] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="shardstream-end") as pool, closing(works):
            try:
                for number, work in works:
                    # Records are read ahead: a later part may have been found, and kept, already.
                    parts = max(parts, number + 1)
                    while len(ending) >= _ENDING or (ending and ending[0].result.done()):
                        results |= self._count(ending, one)
                    ending.append(
                        self._begin(self._task(one.job, claim, number, work), claim, pool)
                    )
                while ending:
                    results |= self._count(ending, one)
            except BaseException:
                for _, future, writer in ending:
                    if future.cancel():  # its record is not written then
                        writer.close()
                raise
        return parts, results

    def _count(self, ending: deque[_Ending], one: SplitJob) -> dict[int, PartResult]:
        """Wait until the first part is recorded, and count it; return its number and result."""
        number, future, _ = ending.popleft()
        result = future.result()
        self.counts.add(result, has_counted_samples=one.streamed is not None)
        return {number: result}

    def _begin(self, task: PartTask, claim: Claim, pool: ThreadPoolExecutor) -> _Ending:
        """Write the samples of a part, and hand it over to a thread that publishes the last of them."""
        folder = task.record.open_folder()
        writer = task.open_writer(folder, claim.check_owner)
        try:
            written = task.work.write(writer)
            writer.end()
        except BaseException:
            writer.close()
            raise

        def end() -> PartResult:
            with closing(writer):
                return replace(task.end(folder, writer, written), key_hashes="")

        return _Ending(task.record.number, pool.submit(end), writer)
