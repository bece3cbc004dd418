"""The progress of a loader: its cursor, a frozen value that iterations advance and states hold the position of, its counts and its timings."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from shardstream.errors import OptionError, ReportWarning
from shardstream.loader.batch_dataset import BatchDataset
from shardstream.loader.device_transfer import StartedBatch
from shardstream.loader.iterator import EMPTY_EPOCH
from shardstream.loader.rank_consistency import EpochAgreement
from shardstream.loader.stats import LoaderStats, WarmUp, WorkerTimings, sum_timings
from shardstream.loader.worker import SampleCounts, WorkerBatch, total_counts
from shardstream.loader.worker_pool import PoolIteration
from shardstream.order import RankPartition
from shardstream.pipeline import (
    BadSampleReport,
    LoaderPosition,
    SkipBudget,
    SkipTracker,
    warn_or_raise,
)
from shardstream.process import num_cores

Opened = tuple[Iterator[WorkerBatch], PoolIteration | None]
"""The batches of an iteration, and its workers if there are any."""

_START = LoaderPosition()
_NO_BATCH = "no batch came (loader.stats() counts them)"
_SECOND_ITERATION = (
    "the loader was iterated again, or its position set, while this iteration goes on: both may read the same epoch, and only the later one "
    "counts in states; for a look at a batch meanwhile, or pairs as in zip(loader, loader), make two loaders with other seeds"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where a loader is, and where its next iteration begins.

    An iteration whose first batch has been handed out makes the next one an epoch of its own. So does one that came to its end.

    Args:
        position: Position after the last batch of the iteration.
        before: Position before the last batch that was handed out.
        next_position: Position where the next iteration begins.
        is_left: Whether a batch was handed out, so that the next iteration does not begin where this one did.
        partition: Steps of the iteration, if they are known.
        iteration: Number of the iteration. Whatever sets the position ends it: then further batches of it do not count.
        epochs_ahead: Epochs from this iteration to the next: 0 if it repeats, else 1.
        continues: Whether the next iteration begins where this one ends, as in a dataset that is followed, which has one epoch.
    """

    position: LoaderPosition = _START
    before: LoaderPosition = _START
    next_position: LoaderPosition = _START
    is_left: bool = False
    partition: RankPartition | None = None
    iteration: int = 0
    epochs_ahead: int = 1
    continues: bool = False

    def at(self, position: LoaderPosition) -> Cursor:
        """Return a cursor whose next iteration begins at a position."""
        iteration = self.iteration + 1
        return Cursor(
            position=position,
            before=position,
            next_position=position,
            iteration=iteration,
            continues=self.continues,
        )

    def in_epoch(self, epoch: int) -> Cursor:
        """Return a cursor whose next iteration reads an epoch.

        A position of that epoch at which no iteration has begun, as after loading a state, is kept.
        """
        if self.continues:
            return self
        if epoch != self.position.epoch:
            return self.at(LoaderPosition(epoch=epoch))
        return replace(self, next_position=LoaderPosition(epoch=epoch)) if self.is_left else self

    def after_batch(self, position: LoaderPosition, *, is_handed_out: bool) -> Cursor:
        """Return the cursor after a batch.

        Args:
            position: The position after it.
            is_handed_out: False if all its samples were bad.
        """
        if not is_handed_out:
            return replace(self, position=position)
        following = LoaderPosition(epoch=position.epoch + self.epochs_ahead)
        next_position = self.next_position if self.is_left else following
        next_position = position if self.continues else next_position
        return replace(
            self,
            position=position,
            before=self.position,
            next_position=next_position,
            is_left=True,
        )

    def refuse_followed(self, reason: str) -> None:
        """Refuse what is not possible in a dataset that is followed.

        Raises:
            OptionError: If it is one.
        """
        if self.continues:
            raise OptionError(f"{reason}: a dataset with version=Follow() grows while it is read")

    def at_end(self) -> Cursor:
        """Return the cursor after the last batch of the iteration."""
        position = LoaderPosition(epoch=self.position.epoch + self.epochs_ahead)
        position = self.position if self.continues else position
        return replace(
            self, position=position, next_position=position, is_left=False, partition=None
        )

    def past(self, batches: int, rest: RankPartition) -> Cursor:
        """Return the cursor after so many batches that are not read.

        Args:
            batches: Number of batches.
            rest: Steps of this rank from the position on.

        Raises:
            OptionError: If fewer are left.
        """
        # With remainder="keep" another rank may have a batch more; all ranks come to the next epoch together.
        epoch, steps = rest.plan.epoch, rest.max_steps
        if batches > steps:
            raise OptionError(f"cannot skip {batches} batches: {steps} are left of epoch {epoch}")
        if batches == steps:
            return self.at(LoaderPosition(epoch=epoch + 1))
        return self.at(LoaderPosition(epoch=epoch, consumed=rest.consumed_after(batches)))


@dataclass(slots=True)
class Stopwatch:
    """Collects the timings of an epoch in the main process.

    Args:
        epoch: From 0.
        workers: Worker processes.
    """

    epoch: int
    workers: int
    batches: int = 0
    wait_s: float = 0.0
    first_wait_s: float = 0.0
    _begun: float = field(default_factory=time.perf_counter)
    _ended: float | None = None
    _timings: dict[int, WorkerTimings] = field(default_factory=dict)
    _earlier: list[WorkerTimings] = field(default_factory=list)
    """Sums of the times before `resume`."""
    _warm_up: tuple[int, float, float] = (0, 0.0, 0.0)  # batches, seconds, loop_wait_s
    _first_timings: list[WorkerTimings] = field(default_factory=list)

    def add_batch(self, part: int, timings: WorkerTimings, *, waited_s: float) -> None:
        """Count a received batch."""
        if not self.batches:
            self.first_wait_s = waited_s
        self.batches += 1
        self.wait_s += waited_s
        is_first = part not in self._timings
        self._timings[part] = timings
        if is_first and not self._earlier:
            self._first_timings.append(timings)
            self._warm_up = self.batches, time.perf_counter() - self._begun, self.wait_s

    def stop(self) -> None:
        """End the epoch, or pause."""
        self._ended = time.perf_counter()

    def resume(self) -> None:
        """Go on after `stop` with workers that count from 0 again; the time since then does not count."""
        self._begun += time.perf_counter() - (self._ended or time.perf_counter())
        self._ended = None
        if self._timings:
            self._earlier = [sum_timings([*self._earlier, *self._timings.values()])]
            self._timings = {}

    def stats(self) -> LoaderStats:
        """Return the timings so far."""
        batches, seconds, loop_wait_s = self._warm_up
        warm_up = WarmUp(
            batches=batches,
            seconds=seconds,
            loop_wait_s=loop_wait_s,
            timings=sum_timings(list(self._first_timings)),
        )
        return LoaderStats(
            epoch=self.epoch,
            batches=self.batches,
            seconds=(self._ended or time.perf_counter()) - self._begun,
            loop_wait_s=self.wait_s,
            first_wait_s=self.first_wait_s,
            workers=self.workers,
            cores=num_cores(),
            timings=sum_timings([*self._earlier, *self._timings.values()]),
            warm_up=warm_up,
        )


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a loader is, and what its iteration has counted; advanced by the batches that it yields.

    Args:
        batches: The batches of this rank.
        cursor: Where it is.
        stopwatch: Timings of the iteration.
        report: Report of the bad samples of this rank; None if they are not skipped.
        keeps_workers: Whether workers stay for the next iteration.
        agreement: Agreement of the ranks, until the user chooses an epoch.
        counts: Counts of each part, by the samples that were consumed when it began.
    """

    batches: BatchDataset
    cursor: Cursor
    stopwatch: Stopwatch
    report: BadSampleReport | None
    keeps_workers: bool
    agreement: EpochAgreement | None = None
    counts: dict[tuple[int, int], SampleCounts] = field(default_factory=dict)

    def begin(self, cursor: Cursor) -> None:
        """Begin an iteration."""
        self.cursor, self.counts = cursor, {}
        self.stopwatch = Stopwatch(cursor.position.epoch, self.stopwatch.workers)

    def yield_batches(
        self, open_batches: Callable[[], Opened], opened: Opened, begin: Cursor
    ) -> Iterator[Any]:
        """Yield the batches of an iteration; after `set_weights` those of its new order."""
        while True:
            worker_batches, received = opened
            del opened  # the old order ends with its last reference
            stopwatch, requested_at = self.stopwatch, time.perf_counter()
            is_current = True
            with self._ending(received):
                for steps, worker_batch in enumerate(worker_batches, start=1):
                    was_current, is_current = is_current, self.cursor.iteration == begin.iteration
                    if was_current and not is_current:
                        warnings.warn(_SECOND_ITERATION, UserWarning, stacklevel=2)
                    if is_current and self.cursor.partition is not begin.partition:
                        break
                    stopwatch.add_batch(
                        worker_batch.part,
                        worker_batch.timings,
                        waited_s=time.perf_counter() - requested_at,
                    )
                    # Before the position moves: the copy may fail. Popped below, so that this frame keeps no memory of the device.
                    batch = worker_batch.batch
                    ready = [batch.finish() if type(batch) is StartedBatch else batch]
                    del batch
                    self._advance(worker_batch, steps, begin)
                    if not worker_batch.empty:
                        yield ready.pop()
                    if self.agreement is not None and self.cursor.iteration == begin.iteration:
                        self.agreement.check()
                    requested_at = time.perf_counter()
                stopwatch.stop()
            if self.cursor.iteration != begin.iteration:
                return self.cursor.refuse_followed("a newer iteration of this loader reads on")
            if self.cursor.partition is begin.partition and not self._begin_round():
                break
            begin, worker_batches, received = self.cursor, iter(()), None
            stopwatch.resume()
            opened = open_batches()
        self._end(begin)

    def _end(self, begin: Cursor) -> None:
        """Move to the next epoch; an epoch without a batch is worth a warning."""
        if self.stopwatch.batches and not (self.cursor.is_left or begin.position.consumed):
            warnings.warn(EMPTY_EPOCH.format("", _NO_BATCH), UserWarning, stacklevel=3)
        self.cursor = self.cursor.at_end()
        if self.agreement is not None:
            self.agreement.end()

    def _begin_round(self) -> bool:
        """Go on with what was published meanwhile, in a dataset that is followed; return False at the end."""
        cursor = self.cursor
        if cursor.continues:
            self.counts = total_counts(self.counts)  # a training may have millions of rounds
            budget = SkipTracker(self.batches.source_dataset.pipeline.on_error).budget
            for counts in self.counts.values():  # workers compare those of a round
                (budget or SkipBudget()).check(counts.skipped)
        if not self.batches.next_round(cursor.position, self.agreement):
            return False
        self.cursor = replace(cursor, partition=self.batches.partition(cursor.position))
        return True

    @contextmanager
    def _ending(self, received: PoolIteration | None) -> Iterator[None]:
        """End the workers and the report of bad samples; persistent workers only on an error."""
        try:
            yield
        except BaseException as error:
            if received is not None:
                is_left = isinstance(error, GeneratorExit)
                received.end(keeps_workers=self.keeps_workers and is_left)
            waits = not isinstance(error, KeyboardInterrupt)
            if (problem := self._finish_report(waits=waits)) is not None:
                error.add_note(str(problem))
                if isinstance(error, GeneratorExit):  # after a break the note would never be shown
                    warnings.warn(f"{problem}", ReportWarning, stacklevel=2)
            raise
        if received is not None:
            received.end(keeps_workers=self.keeps_workers)
        if (problem := self._finish_report(waits=True)) is not None:
            warn_or_raise(problem)

    def _finish_report(self, *, waits: bool) -> Exception | None:
        return self.report.finish(waits=waits) if self.report else None

    def _advance(self, worker_batch: WorkerBatch, steps: int, begin: Cursor) -> None:
        """Report the bad samples of a batch or raise its error, move the cursor after it, and note its counts."""
        cursor, part, is_handed_out = self.cursor, worker_batch.part, not worker_batch.empty
        if self.report is not None:
            epoch = begin.position.epoch
            self.report.add(worker_batch.bad, epoch=epoch, worker=part)
        if worker_batch.error is not None:
            raise worker_batch.error
        if cursor.iteration != begin.iteration:
            return
        self.counts[begin.position.consumed, part] = worker_batch.counts
        position, partition = cursor.position, cursor.partition
        if partition is None:
            num_parts = self.batches.num_readers
            position = position.after_part(part, worker_batch.state, num_parts)
        else:
            position = replace(position, consumed=partition.consumed_after(steps))
        if self.agreement is not None and is_handed_out:
            is_last = partition is not None and steps == partition.num_steps
            is_first = not cursor.is_left
            self.agreement.add_batch(position.epoch, is_first=is_first, is_last=is_last)
        self.cursor = cursor.after_batch(position, is_handed_out=is_handed_out)
