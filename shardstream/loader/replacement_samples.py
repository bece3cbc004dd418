"""Replace bad and refused samples, so that ranks have equally many batches, or full ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from shardstream.errors import SampleError, get_logger, plural
from shardstream.format import Rows
from shardstream.order import RankPartition, derive_key
from shardstream.pipeline import LOOK_AHEAD_BYTES, IndexedSource, Runner, SkipTracker

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
