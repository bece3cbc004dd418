"""Replace bad samples, so that ranks have equally many batches, or full ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from shardstream.errors import SampleError, get_logger
from shardstream.format import Rows
from shardstream.order import RankPartition, derive_key
from shardstream.pipeline import IndexedSource, Runner, SkipTracker
from shardstream.samples import FetchOptions, Samples

_log = get_logger(__name__)
_ATTEMPTS = 16  # per sample to replace
_SUBSTITUTE = 5


def replace_bad_samples(
    source: IndexedSource,
    runner: Runner,
    partition: RankPartition,
    step: int,
    done: tuple[Sequence[Any], list[int]],
    skips: SkipTracker,
) -> Sequence[Any]:
    """Return the items of a step with replacements for bad samples.

    With ``refill`` all bad samples are replaced; else one, if all samples of the step are bad. Replacements are drawn from the
    epoch as a function of seed, epoch, rank and position only, so a resume draws the same. Samples of the batch itself are
    repeated only if no others are found.

    Args:
        source: The dataset.
        runner: The pipeline's steps.
        partition: The rank's steps.
        step: Number of the step.
        done: Its good items, and their sample numbers.
        skips: Counts bad samples among those drawn, and the replacements.

    Raises:
        SampleError: If too few good samples were found.
    """
    items, present = done
    if skips.budget is not None and skips.budget.refill:
        count = partition.step_size(step) - len(items)
    else:
        count = int(len(items) == 0 and partition.config.world_size > 1)
    if count == 0:
        return items
    planned = partition.samples(np.array([step], dtype=np.int64))[0].tolist()
    taken, bad, replacements = set(present), set(planned) - set(present), list[Any]()
    for attempt in range(_ATTEMPTS * count):
        number = _draw(partition, step, attempt)
        if number in bad or (number in taken and attempt < _ATTEMPTS * count // 2):
            continue
        accepted, _ = runner(_read(source.samples, number), [number])
        if not accepted:
            bad.add(number)
            continue
        taken.add(number)
        replacements += accepted
        if len(replacements) == count:
            skips.refilled += count
            _log.warning("step %s: replaced %s bad samples", step, count)
            return [*items, *replacements]
    raise SampleError(
        f"{count} samples of a batch are bad, and {_ATTEMPTS * count} attempts found {len(replacements)} replacements: this rank would "
        "have fewer batches than the others; fix the data"
    )


def _draw(partition: RankPartition, step: int, attempt: int) -> int:
    """Draw the number of a sample of the epoch; for a mix, by its weights."""
    plan, order = partition.plan, partition.plan.order
    position = partition.consumed_after(step)
    key = derive_key(order.seed, plan.epoch, partition.rank, position, attempt, _SUBSTITUTE)
    if order.num_batches == 0:
        return int(plan.rest(0)[key % order.nsamples])
    batch, slot = divmod(key % (order.num_batches * order.batch), order.batch)
    return int(plan.batches(np.array([batch], dtype=np.int64))[0, slot])


def _read(dataset: Samples, number: int) -> Rows:
    numbers = np.array([number], dtype=np.int64)
    with closing(dataset.open_fetcher([numbers], FetchOptions(prefetch_bytes=1))) as fetcher:
        return fetcher.samples(numbers)
