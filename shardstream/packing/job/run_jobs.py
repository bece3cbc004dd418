"""Run the parts of jobs, in this process or by an executor, and publish the datasets when all are done.

A job is cut into parts by its source and options alone, so that every process computes the same parts. The first process claims the
destination with a journal (`claim`); each finished part leaves a record in the same folder (`parts`). `publish` reads the records,
writes ``index.json`` and deletes them. A part that has a record and whose shards are in place is not run again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace

from shardstream.errors import OptionError
from shardstream.packing.job.claim import Claim, claimed, join
from shardstream.packing.job.parallel_encode import Encoded
from shardstream.packing.job.parts import (
    OpenPart,
    PartFiles,
    PartJob,
    PartTask,
    Place,
    missing_parts,
)
from shardstream.packing.job.publish import Ready, publish, publish_locked
from shardstream.packing.job.report import (
    PackReport,
    PartCounts,
    ProgressFunction,
    SplitReport,
    logged,
    skipped_before_error,
)
from shardstream.packing.shards.part_writer import PartResult, Skip
from shardstream.storage import absolute_url, is_part_record
from shardstream.tasks import JSON, Executor, Parts, RetryCount, Task

# Parts that are flushed and published while others are written; their records are written in order.
_ENDING = 1

FindKept = Callable[[int, int], PartResult | None]
"""Returns the result of a part, by the numbers of its job and of the part, if an earlier run has written it and it is kept."""


OpenStream = Callable[[Collection[int], FindKept], Generator[tuple[Place, Encoded], None, None]]
"""Yields the samples of several jobs from one pass over the source: each, or the error of its record, with its place; those of one job in order.

It gets the numbers of the jobs whose samples are wanted, at least one, and a function to call once for each part of these jobs: samples of
parts that are kept are left out."""


@dataclass(slots=True, kw_only=True)
class _JobRun:
    """A claimed job whose parts run.

    Args:
        job: The job.
        claim: Its destination.
        has_records: Whether there were records of parts before.
        parts: Number of its parts that are known so far; 0 if its dataset was published before.
    """

    job: PartJob
    claim: Claim
    has_records: bool
    parts: int = 0

    def check_skips(self) -> None:
        """Refuse a dataset that is published already, if its run skipped records and this one does not.

        Raises:
            OptionError: If that is so.
        """
        published = self.claim.journal.published
        if published is not None and published.skipped and not self.job.skips:
            first, url = Skip(*published.skipped[0]), self.claim.journal.folder.url
            raise skipped_before_error(len(published.skipped), first, url)

    def files(self, number: int, of: int = 0) -> PartFiles:
        """Return the files of a part, by its number; ``of`` as in `PartFiles`."""
        job = self.job
        return PartFiles(
            names=replace(job.names, folder=absolute_url(job.names.folder)),
            storage_options=job.storage_options,
            run_id=job.run,
            number=number,
            of=of,
            limits=job.limits,
            replaces=self.claim.replaces,
            keeps_keys=job.keeps_keys,
        )

    def ready(self) -> Ready:
        """Return what is to be published."""
        journal, appends = self.claim.journal, "append" in self.job.options
        return Ready(journal.folder, journal.run, self.parts, appends)


def run_jobs(
    jobs: Sequence[PartJob],
    *,
    executor: Executor | None,
    overwrite: bool,
    progress: ProgressFunction | None,
    samples: int | None,
    stream: OpenStream | None = None,
) -> PackReport:
    """Claim the destinations, run all parts, and publish the datasets together; with `Parts` nothing is published.

    Args:
        jobs: The jobs; one for each dataset.
        executor: Where the parts run; by default in this process, which locks out all others until it ends.
        overwrite: Replace existing datasets, or unfinished ones of other jobs.
        progress: Called after each part.
        samples: Samples of the source, for ``progress``.
        stream: The samples of all jobs, if their parts are written in this process, instead of their works.

    Raises:
        OptionError: If another dataset or job is in a folder, an earlier run skipped records, or ``overwrite``, or a source without identity, is
            used with `Parts`.
        StorageError: If a folder cannot be reached, or another job takes it over.
    """
    if isinstance(executor, Parts) and overwrite:
        raise OptionError(
            "overwrite cannot be used for one part: a part that starts late would delete what the others wrote; "
            "delete the old dataset first, or write elsewhere"
        )
    if isinstance(executor, Parts) and jobs[0].source is None:
        raise OptionError(
            "functions cannot be compared, so parts cannot tell whether they run the same job: pass version= to reshard, and another one when "
            "a function changes"
        )
    begin_s, keeps_skips = time.monotonic(), jobs[0].skips or not overwrite
    first = jobs[0]
    logs = logged(f"{first.kind} {first.names.folder}", progress)
    retries = None if executor is None else RetryCount(executor)
    counts = PartCounts(logs, samples, retries, skips=jobs[0].skips)
    with (
        claimed(jobs, overwrite=overwrite)
        if executor is None
        else nullcontext(join(jobs, overwrite=overwrite))
    ) as claims:
        runs, todo = list[_JobRun](), list[int]()
        for number, (job, claim) in enumerate(zip(jobs, claims, strict=True)):
            counts.splits.append(SplitReport(name=job.split, url=job.names.folder))
            has_records = any(map(is_part_record, claim.files))
            runs.append(_JobRun(job=job, claim=claim, has_records=has_records))
            if claim.is_published:
                runs[number].check_skips()
            else:
                todo.append(number)
        if executor is None:
            with closing(_PartsHere(runs, counts, keeps_skips=keeps_skips)) as here:
                here.run(todo, stream)
            ready = [*map(_JobRun.ready, runs)]
            report = publish_locked(ready, first.storage_options, first.title)
        else:
            _run_tasks(runs, todo, executor, counts, keeps_skips=keeps_skips)
            if isinstance(executor, Parts):
                return _unfinished(jobs, counts, begin_s)
            ready = [*map(_JobRun.ready, runs)]
            report = publish(ready, first.storage_options, first.title)
    shown = [
        replace(one, kept=counted.kept if run.parts else one.shards)
        for one, counted, run in zip(report.splits, counts.splits, runs, strict=True)
    ]
    return replace(report, splits=tuple(shown), seconds=time.monotonic() - begin_s)


def _unfinished(jobs: Sequence[PartJob], counts: PartCounts, begin_s: float) -> PackReport:
    """Return the report of one of several `Parts`."""
    unfinished = [missing_parts(job.new_journal().folder.list_files(), job.parts) for job in jobs]
    return PackReport(
        source=jobs[0].title,
        splits=tuple(counts.splits),
        seconds=time.monotonic() - begin_s,
        skipped=tuple(counts.skipped),
        fields=dict(counts.fields),
        unfinished=sum(map(len, unfinished)),
    )


def _run_tasks(
    runs: Sequence[_JobRun],
    todo: Collection[int],
    executor: Executor,
    counts: PartCounts,
    *,
    keeps_skips: bool,
) -> None:
    """Run each part as a task, those of one job after those of another."""
    of = executor.of if isinstance(executor, Parts) else 0
    for split in todo:
        run = runs[split]

        def tasks(run: _JobRun = run) -> Iterator[PartTask]:
            for number, work in enumerate(run.job.works):
                run.parts = number + 1
                yield PartTask(files=run.files(number, of), work=work, keeps_skips=keeps_skips)

        def count(_: Task, document: Mapping[str, JSON], split: int = split) -> None:
            counts.add(PartResult.decode(document), split, is_kept=bool(document["kept"]))

        executor.run(tasks(), count)


class _PartsHere:
    """Runs parts in this process.

    Args:
        runs: The jobs.
        counts: Counts the results, by the numbers of the jobs.
        keeps_skips: Whether the shards of an earlier run that skipped records are kept.
    """

    def __init__(self, runs: Sequence[_JobRun], counts: PartCounts, *, keeps_skips: bool) -> None:
        self._runs, self._counts, self._keeps_skips = runs, counts, keeps_skips
        self._open: dict[int, OpenPart] = {}  # by the numbers of their jobs
        # Parts that are written, and are being published and recorded, with their jobs; and whether their samples were counted.
        self._ending: deque[tuple[int, OpenPart, Future[PartResult], bool]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardstream-end")

    def close(self) -> None:
        """Drop the parts that are not written, and wait for those that are being published."""
        for part in self._open.values():
            part.writer.close()
        for _, part, result, _ in self._ending:  # there are some after an error only
            if result.cancel():  # its record is not written then
                part.writer.close()
        self._pool.shutdown(wait=True)

    def run(self, jobs: Collection[int], stream: OpenStream | None) -> None:
        """Run the parts of some jobs, by their numbers: those of a stream together, the works one after the other."""
        if stream is not None and jobs:
            self._write_stream(stream, jobs)
        for job in jobs:
            for number, work in enumerate(self._runs[job].job.works):
                if self._find_kept(job, number) is None:
                    part = self._begin(job, number)
                    self._end(job, work.write(part.writer))
        self._wait(0)

    def _write_stream(self, stream: OpenStream, jobs: Collection[int]) -> None:
        with closing(stream(jobs, self._find_kept)) as samples:
            for (job, number), sample in samples:
                part = self._open.get(job)
                if part is None or part.files.number != number:
                    if part is not None:
                        self._end(job)
                    part = self._begin(job, number)
                if size_bytes := part.writer.add(sample, skips=self._runs[job].job.skips):
                    self._counts.add_sample(size_bytes)
        for job in sorted(self._open):
            self._end(job)

    def _find_kept(self, job: int, number: int) -> PartResult | None:
        """Return the result of a part that an earlier run has written and that is kept, and count it."""
        run = self._runs[job]
        result = run.files(number).find() if run.has_records else None
        if result is None or (result.skipped and not self._keeps_skips):
            return None
        run.parts = max(run.parts, number + 1)
        self._counts.add(result, job, is_kept=True)
        return result

    def _begin(self, job: int, number: int) -> OpenPart:
        run = self._runs[job]
        # Records are read ahead: a later part may have been found, and kept, already.
        run.parts = max(run.parts, number + 1)
        part = self._open[job] = run.files(number).open(run.claim.check_owner)
        return part

    def _end(self, job: int, written: PartResult | None = None) -> None:
        """Hand the part of a job over to a thread that publishes its last shard, and records it; ``written`` if its samples are not counted yet."""
        part = self._open[job]
        part.writer.end()
        result = self._pool.submit(part.end, written)
        del self._open[job]
        self._ending.append((job, part, result, written is None))
        self._wait(_ENDING)

    def _wait(self, most: int) -> None:
        """Wait until at most ``most`` parts are not recorded, and count those that are."""
        while len(self._ending) > most or (self._ending and self._ending[0][2].done()):
            job, _, future, has_counted_samples = self._ending.popleft()
            self._counts.add(future.result(), job, has_counted_samples=has_counted_samples)
