"""Make the batches of one worker: of the steps of a plan, or of a stream with a position of its own; replace bad and refused samples."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from shardstream.distributed import WorkerInfo
from shardstream.errors import SampleError, SkipBudgetError, get_logger, plural
from shardstream.format import Rows
from shardstream.loader.stats import WorkerTimings
from shardstream.order import RankPartition, WorkerSteps, derive_key
from shardstream.pipeline import (
    LOOK_AHEAD_BYTES,
    BadSample,
    IndexedRun,
    IndexedSource,
    Run,
    Runner,
    SkipTracker,
    Source,
    State,
)

_log = get_logger(__name__)
_ATTEMPTS = (
    256  # per sample to replace: a select that accepts 5 % finds none in one case of 500,000
)
_SUBSTITUTE = 5


def replace_samples(
    source: IndexedSource,
    runner: Runner,
    partition: RankPartition,
    step: int,
    done: tuple[Sequence[Any], list[int]],
    skips: SkipTracker,
) -> Sequence[Any]:
    """Return the items of a step with replacements for bad and refused samples.

    With ``refill`` all of them are replaced; else one, if none of the step is left. Replacements are drawn from the
    epoch as a function of seed, epoch, rank and position only, so a resume draws the same. Samples of the batch itself are
    repeated only if no others are found.

    Args:
        source: The dataset.
        runner: The pipeline's steps.
        partition: The rank's steps.
        step: Number of the step.
        done: Its items that are left, and their sample numbers.
        skips: Counts bad and refused samples among those drawn, and the replacements.

    Raises:
        SampleError: If no sample was found.
    """
    items, present = done
    if skips.budget is not None and skips.budget.refill:
        count = partition.step_size(step) - len(items)
    else:
        count = int(len(items) == 0 and partition.config.world_size > 1)
    if count == 0:
        return items
    planned = partition.samples(np.array([step], dtype=np.int64))[0].tolist()
    accepted, seen, replacements = list(present), {*planned}, list[Any]()
    limit = max(1, int(LOOK_AHEAD_BYTES / source.samples.mean_bytes))
    attempt, size = 0, count
    while len(replacements) < count and attempt < _ATTEMPTS * count:
        drawn = dict.fromkeys(_draw(partition, step, range(attempt, attempt + size)))
        numbers = [number for number in drawn if number not in seen]
        # Doubled, so that few requests read many samples where few are accepted.
        attempt, size = attempt + size, min(2 * size, limit)
        if numbers:
            found, kept = runner(_read(source, numbers), numbers)
            seen.update(numbers)
            accepted += kept
            replacements += found
    accepted = accepted or [*source.substitutes]
    for place in range(count - len(replacements)) if accepted else ():
        number = accepted[place % len(accepted)]
        replacements += runner(_read(source, [number]), [number])[0]
    if len(replacements) < count:
        raise SampleError(
            f"all samples of a batch are bad or refused, and {plural(attempt, 'attempt')} found no replacement: this rank would have fewer "
            "batches than the others",
            remedy="fix the data, or choose samples with where= or subset= instead of select",
        )
    skips.refilled += count
    level = logging.INFO if skips.refused else logging.WARNING
    _log.log(level, "step %s: replaced %s", step, plural(count, "sample"))
    return [*items, *replacements[:count]]


def _draw(partition: RankPartition, step: int, attempts: range) -> list[int]:
    """Draw numbers of samples of the epoch; for a mix, by its weights."""
    plan, order = partition.plan, partition.plan.order
    first = (order.seed, plan.epoch, partition.rank, partition.consumed_after(step))
    keys = [derive_key(*first, attempt, _SUBSTITUTE) for attempt in attempts]
    if order.num_batches == 0:
        rest = plan.rest(0)
        return [int(rest[key % order.nsamples]) for key in keys]
    places = np.array([key % (order.num_batches * order.batch) for key in keys], dtype=np.int64)
    batches, slots = np.divmod(places, order.batch)
    numbers: list[int] = plan.batches(batches)[np.arange(len(keys)), slots].tolist()
    return numbers


def _read(source: IndexedSource, some: list[int]) -> Rows:
    numbers = np.array(some, dtype=np.int64)
    options = replace(source.fetch_options(), is_sparse=True)
    with closing(source.samples.open_fetcher([numbers], options)) as fetcher:
        return fetcher.samples(numbers)


class SampleCounts(NamedTuple):
    """Samples of one worker so far in an iteration."""

    skipped: dict[str, int]
    """Bad samples, by kind of error."""
    per_dataset: dict[str, int]
    """All samples, by part of a mix."""
    refilled: int
    """Samples that replaced bad or refused ones."""


class WorkerBatch(NamedTuple):
    """A batch that a worker sends to the main process, with its counts."""

    batch: Any
    empty: bool
    """All samples of the step were left out: the batch counts, but is not yielded."""
    part: int
    state: State
    """Position of the part after this batch; empty if the steps are those of a plan."""
    counts: SampleCounts
    bad: tuple[BadSample, ...]
    """Bad samples of this worker since its last worker batch."""
    timings: WorkerTimings
    """Timings of this worker so far."""
    error: SkipBudgetError | None = None
    """Set if the skip budget is exceeded: there is no batch, and the worker ends."""


def total_counts(
    counts: Mapping[tuple[int, int], SampleCounts],
) -> dict[tuple[int, int], SampleCounts]:
    """Return the counts of each worker in several rounds as those of one round."""
    parts: dict[int, list[SampleCounts]] = {}
    for (_, part), one in counts.items():
        parts.setdefault(part, []).append(one)
    return {
        (-1, part): SampleCounts(
            sum_values(one.skipped for one in own),
            sum_values(one.per_dataset for one in own),
            sum(one.refilled for one in own),
        )
        for part, own in parts.items()
    }


def sum_values(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return name -> sum of the values that it has."""
    return dict(sum(map(Counter, counts), Counter[str]()))


def change_batch(change: Callable[[Any], Any], worker_batch: WorkerBatch) -> WorkerBatch:
    """Return a worker batch whose batch is changed by a function."""
    return worker_batch._replace(batch=change(worker_batch.batch))


@dataclass(slots=True, kw_only=True)
class WorkerPart:
    """The part of one worker in the rest of an epoch.

    Args:
        number: Number of the part.
        run: Reads it.
        skips: Skip policy and counts.
        source: The source of its samples.
        position: Returns the position of a stream, for its state; batches of a plan are counted instead.
        read_stats: Returns the reading statistics so far, as `Fetcher.stats`.
        timings: Timings so far.
    """

    number: int
    run: Run
    skips: SkipTracker
    source: Source
    position: Callable[[], State] = dict
    read_stats: Callable[[], Mapping[str, Any]] = dict
    timings: WorkerTimings = field(default_factory=WorkerTimings)

    def batches(
        self, items_of_batches: Generator[Sequence[Any]], collate: Callable[[Sequence[Any]], Any]
    ) -> Generator[WorkerBatch]:
        """Yield the batches; a collate function makes each of its items."""
        counted = 0
        try:
            for items in items_of_batches:
                started = perf_counter()
                batch = collate(items) if items else None
                self.timings.samples += len(items)
                self.timings.collate_s += perf_counter() - started
                made = [self._worker_batch(batch, empty=not items)]
                counted = self.skips.counts.total() + self.skips.refused
                # Freed here, so that this frame does not keep many MB of photos alive while the next are read.
                del items, batch
                yield made.pop()
            if self.skips.counts.total() + self.skips.refused > counted:  # after the last batch
                yield self._worker_batch(None, empty=True)
        except SkipBudgetError as error:
            yield self._worker_batch(None, empty=True, error=error)
        finally:
            items_of_batches.close()
            self.run.close()

    def _worker_batch(
        self, batch: Any, *, empty: bool, error: SkipBudgetError | None = None
    ) -> WorkerBatch:
        skips = self.skips
        bad = tuple(skips.drain_bad_samples()) if skips.drained else ()
        return WorkerBatch(
            batch,
            empty,
            self.number,
            self.position(),
            SampleCounts(dict(skips.counts), dict(skips.samples_per_dataset), skips.refilled),
            self.source.with_locations(bad) if bad else bad,
            replace(self.timings, refused=skips.refused, **self.read_stats()),
            error,
        )


def read_steps(
    part: WorkerPart, run: IndexedRun, runner: Runner, partition: RankPartition, info: WorkerInfo
) -> Generator[Sequence[Any]]:
    """Yield the items of each step of a worker, with replacements of those that are left out."""
    source, timings, started = part.source, part.timings, perf_counter()
    assert isinstance(source, IndexedSource)  # noqa: S101  (steps are those of a source)
    steps = WorkerSteps(partition, info.worker, info.num_workers)
    with closing(runner):
        for place, (numbers, samples) in enumerate(run.steps()):
            read = perf_counter()
            items, kept = runner(samples, numbers)
            if len(items) < len(numbers):
                items = replace_samples(
                    source, runner, partition, steps[place], (items, kept), part.skips
                )
            timings.read_s += read - started
            timings.steps_s += perf_counter() - read
            timings.decode_s = runner.decode_s
            made = [items]
            del samples, items
            yield made.pop()
            started = perf_counter()


def read_stream(part: WorkerPart, size: int, *, drop_last: bool) -> Generator[Sequence[Any]]:
    """Yield the items of each batch; their reading and steps are not timed apart."""
    timings, started = part.timings, perf_counter()
    while items := list(islice(part.run, size)):
        if drop_last and len(items) < size:
            return
        passed_s = perf_counter() - started
        timings.read_s += passed_s
        timings.mixed_s += passed_s
        made = [items]
        del items
        yield made.pop()
        started = perf_counter()
