"""Compute which samples a training reads at each step of an epoch, and when a sample comes: nothing of the data is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardstream.catalog import find_keys
from shardstream.errors import OptionError, plural
from shardstream.format import KEY_COLUMN
from shardstream.order import EpochOrder, EpochPlan, EpochSteps, Ints, PartitionConfig, StepPlaces
from shardstream.pipeline.indexed_source import IndexedSource, numbered_source
from shardstream.pipeline.pipeline import Pipeline
from shardstream.pipeline.runner import ItemStage
from shardstream.pipeline.stage import check_at_least, whole_number
from shardstream.samples import parts_in_rows, rows_with, samples_in_rows

_AT_ONCE = 1 << 16  # samples that are found together: a bound of the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Ranks and workers of a training, and the batch of each rank.

    Args:
        ranks: Number of ranks.
        workers: Loader workers of each rank; 0 reads in the main process.
        batch_size: Samples of a batch of one rank.
        drop_last: As in ``ShardLoader``.

    Raises:
        OptionError: If a number is out of range.
    """

    ranks: int = 1
    workers: int = 0
    batch_size: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, ranks=self.ranks, batch_size=self.batch_size)
        check_at_least(0, workers=self.workers)

    def partition(self, source: IndexedSource) -> PartitionConfig:
        """Return how the batches of a source are distributed.

        Raises:
            OptionError: If the microbatch of the source does not divide the batch.
        """
        microbatch = source.options.microbatch or self.batch_size
        if self.batch_size % microbatch:
            raise OptionError(
                f"batch_size={self.batch_size} must be a multiple of microbatch={microbatch}"
            )
        return PartitionConfig(
            world_size=self.ranks,
            microbatches=self.batch_size // microbatch,
            remainder=source.options.remainder,
            drop_last=self.drop_last,
            whole_lanes=source.samples.has_costly_windows,
        )

    def order(self, source: IndexedSource, epoch: int) -> EpochOrder:
        """Return the order of an epoch of a source; by default as many lanes as there are readers."""
        lanes = self.partition(source).batches_per_step * max(1, self.workers)
        batch = source.options.microbatch or self.batch_size
        return source.order(batch=batch, lanes=lanes, epoch=epoch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedSamples:
    """Samples of an epoch and when they come: arrays of one length, an entry for each time that a sample comes.

    Args:
        epoch: The epoch.
        numbers: Number of the sample in ``dataset.samples``, shape (n,), int64, as all below.
        copies: Which copy of it: from 0, above 0 where weights or a mix repeat samples in an epoch, or make rows anew.
        steps: Step of the plan, from 0.
        ranks: Rank.
        workers: Loader worker of the rank; 0 if it has none.
        places: Place in the batch of the rank.
    """

    epoch: int
    numbers: Ints
    copies: Ints
    steps: Ints
    ranks: Ints
    workers: Ints
    places: Ints

    def __len__(self) -> int:
        return len(self.numbers)


class EpochSamples:
    """The samples of an epoch by step, and the steps of a sample: of ``loader.plan`` and `ss.plan`.

    Args:
        source: The samples and their order.
        plan: The batches of the epoch.
        config: How they are distributed over ranks.
        workers: Loader workers of each rank, at least 1.
        consumed: Samples of the epoch that all ranks have received before step 0.
        may_leave_out: Whether steps or bad samples may leave samples out.
    """

    def __init__(
        self,
        source: IndexedSource,
        plan: EpochPlan,
        config: PartitionConfig,
        *,
        workers: int,
        consumed: int = 0,
        may_leave_out: bool = False,
    ) -> None:
        self.epoch = plan.epoch
        """The epoch, from 0."""
        self.is_exact = not may_leave_out
        """Whether batches have the samples of the plan for sure: neither ``select`` nor ``on_error=`` may leave some out, or replace them."""
        self._source, self._workers = source, workers
        self._steps = EpochSteps(plan, config, consumed=consumed)
        self._stored = samples_in_rows(source.samples)
        self._is_row_a_batch = source.yields_batches and config.microbatches * plan.order.batch == 1

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, from the position where the plan begins."""
        return self._steps.num_steps

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self._steps.config.world_size

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(epoch {self.epoch}, {plural(self.num_steps, 'step')} of {plural(self.num_ranks, 'rank')}, "
            f"{self._source.summary})"
        )

    def samples(self, step: int, rank: int | None = None) -> PlannedSamples:
        """Return the samples of a step in the order of the batches.

        Args:
            step: From 0, where the plan begins.
            rank: The rank; None for all of them, one after the other.

        Raises:
            OptionError: If there is no such step or rank.
        """
        step = _in_range("step", step, self.num_steps)
        rank = None if rank is None else _in_range("rank", rank, self.num_ranks)
        return self._described(self._steps.at(step, rank))

    def where(
        self, *, numbers: Sequence[int] | Ints | None = None, keys: Iterable[str] | None = None
    ) -> PlannedSamples:
        """Return when samples come, by step, rank and place; none, once or several times for each.

        Args:
            numbers: Numbers in ``dataset.samples``.
            keys: Keys instead, which are found in the columns of the dataset, or in the headers of its shards: all of them are read.

        Raises:
            OptionError: If there is no such sample, or neither or both are given.
            StorageError: If keys cannot be read.
        """
        if (numbers is None) == (keys is None):
            raise OptionError("where takes numbers= or keys=, one of them")
        samples = self._stored
        wanted = np.asarray(numbers if keys is None else find_keys(samples, [*keys], "keys="))
        if len(wanted) and (wanted.ndim != 1 or wanted.dtype.kind not in "iu"):
            raise OptionError(
                f"numbers= takes whole numbers in one dimension, not {wanted.dtype} of shape {wanted.shape}"
            )
        asked = np.unique(wanted.astype(np.int64))
        if len(asked) and not 0 <= asked[0] <= asked[-1] < len(samples):
            raise OptionError(
                f"samples are numbered from 0 to {len(samples) - 1}, not {asked[0]} to {asked[-1]}"
            )
        items = np.unique(rows_with(self._source.samples, asked))
        parts = np.array_split(items, -(-len(items) // _AT_ONCE) or 1)
        found = StepPlaces(*map(np.concatenate, zip(*map(self._steps.find, parts), strict=True)))
        order = np.lexsort((found.places, found.ranks, found.steps))
        return self._described(StepPlaces(*(column[order] for column in found)), asked)

    def keys(self, samples: PlannedSamples) -> list[str]:
        """Return the keys of samples, from the columns of the dataset, or the headers of its shards: all of them are read.

        Raises:
            StorageError: If they cannot be read.
        """
        column = self._stored.read_columns([KEY_COLUMN], scans=True)[KEY_COLUMN]
        keys: list[str] = column.take(samples.numbers).to_pylist()
        return keys

    def _described(self, found: StepPlaces, asked: Ints | None = None) -> PlannedSamples:
        """Return the samples at some places, of rows each of their parts; only those that were asked for, if any were."""
        rows, parts = parts_in_rows(self._source.samples, found.numbers)
        copies, numbers = np.divmod(parts, max(1, len(self._stored)))
        places, steps = found.places[rows], found.steps[rows]
        if self._is_row_a_batch:
            places = np.arange(len(rows)) - np.searchsorted(rows, rows)
        kept = slice(None) if asked is None else np.isin(numbers, asked)
        return PlannedSamples(
            epoch=self.epoch,
            numbers=numbers[kept],
            copies=copies[kept],
            steps=steps[kept],
            ranks=found.ranks[rows][kept],
            workers=self._steps.workers_of(steps[kept], self._workers),
            places=places[kept],
        )


def _in_range(name: str, value: Any, end: int) -> int:
    number = whole_number(name, value)
    if not 0 <= number < end:
        raise OptionError(f"there is no {name} {number}: they are numbered from 0 to {end - 1}")
    return number


def planned_source(pipeline: Pipeline) -> IndexedSource:
    """Return the source of a pipeline whose batches are known before they are read.

    Raises:
        OptionError: If shards are read without an index, or a step changes how many items there are.
    """
    source = numbered_source(pipeline.source)
    for name, stage in zip(pipeline.steps, pipeline.stages, strict=True):
        if not isinstance(stage, ItemStage):
            raise OptionError(
                f"no plan says which sample comes when: the step {name.partition('(')[0]} changes how many items there are"
            )
    return source
