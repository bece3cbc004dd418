"""Compute which samples a training reads at each step of an epoch, and when a sample comes: nothing of the data is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardstream.catalog import Keys, find_keys
from shardstream.errors import OptionError, plural
from shardstream.order import EpochPlan, EpochSteps, Ints, PartitionConfig, StepPlaces
from shardstream.pipeline.indexed_source import (
    LOOK_AHEAD_BYTES,
    IndexedSource,
    numbered_source,
)
from shardstream.pipeline.mix import MixIndexedSource
from shardstream.pipeline.rows import RowSource
from shardstream.pipeline.stage import whole_number
from shardstream.samples import (
    Concat,
    FetchOptions,
    Samples,
    parts_in_rows,
    rows_with,
    samples_in_rows,
)

_AT_ONCE = 1 << 16  # samples that are found together: a bound of the memory


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
        self.steps = EpochSteps(plan, config, consumed=consumed)
        """The numbers of samples as loaders have them: of rows those of rows, and of copies those of copies."""
        self._stored = samples_in_rows(source.samples)
        self._is_row_a_batch = source.yields_batches and config.microbatches * plan.order.batch == 1

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, from the position where the plan begins."""
        return self.steps.num_steps

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.steps.config.world_size

    @property
    def extent(self) -> str:
        """The epoch, where in it step 0 is if it is not its first, and the numbers of steps and ranks."""
        begin = f" from sample {self.steps.consumed:,} on" if self.steps.consumed else ""
        return f"epoch {self.epoch}{begin}: {plural(self.num_steps, 'step')} of {plural(self.num_ranks, 'rank')}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extent}, {self._source.summary})"

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
        return self._described(self.steps.at(step, rank))

    def where(
        self, *, numbers: Sequence[int] | Ints | None = None, keys: Keys | None = None
    ) -> PlannedSamples:
        """Return when samples come, by step, rank and place; none, once or several times for each.

        Args:
            numbers: Numbers in ``dataset.samples``.
            keys: Keys instead, or a ``.txt`` file of them, which are found as in ``subset=``: in the column of keys.

        Raises:
            OptionError: If there is no such sample, neither or both are given, or there is no column of keys.
            StorageError: If keys cannot be read.
        """
        if (numbers is None) == (keys is None):
            raise OptionError("where takes numbers= or keys=, one of them")
        samples = self._stored
        wanted = np.asarray(numbers if keys is None else find_keys(samples, keys, "keys="))
        if wanted.ndim != 1 or (len(wanted) and wanted.dtype.kind not in "iu"):
            raise OptionError(
                f"numbers= takes a list of whole numbers, or an array of one dimension, not {numbers!r}"
            )
        asked = np.unique(wanted.astype(np.int64))
        outside = asked[(asked < 0) | (asked >= len(samples))]
        if len(outside):
            raise OptionError(
                f"there is no sample {outside[0]}: they are numbered from 0 to {len(samples) - 1}"
            )
        items = np.unique(rows_with(self._source.samples, asked))
        parts = np.array_split(items, -(-len(items) // _AT_ONCE) or 1)
        found = StepPlaces(*map(np.concatenate, zip(*map(self.steps.find, parts), strict=True)))
        order = np.lexsort((found.places, found.ranks, found.steps))
        return self._described(StepPlaces(*(column[order] for column in found)), asked)

    def keys(self, samples: PlannedSamples) -> list[str | None]:
        """Return the keys of samples, which are read; None for one that is damaged, or was deleted since.

        Raises:
            StorageError: If they cannot be read.
        """
        stored, numbers = self._stored, np.unique(samples.numbers)
        at_once = max(1, int(LOOK_AHEAD_BYTES / stored.mean_bytes))
        groups = np.array_split(numbers, -(-len(numbers) // at_once) or 1)
        keys = list[str | None]()
        with closing(stored.open_fetcher(groups, FetchOptions(is_sparse=True))) as fetcher:
            for group in groups:
                rows: Iterable[Any] = fetcher.samples(group)
                keys += [None if isinstance(row, Exception) else row["__key__"] for row in rows]
        return [keys[place] for place in np.searchsorted(numbers, samples.numbers).tolist()]

    def datasets(self, samples: PlannedSamples) -> list[str]:
        """Return the name of the dataset of a mix that each sample is of, ``outer/inner`` in nested ones; "" without a mix."""
        return _part_names(self._source, self._stored, samples.numbers)

    def _described(self, found: StepPlaces, asked: Ints | None = None) -> PlannedSamples:
        """Return the samples at some places, of rows each of their parts; only those that were asked for, if any were."""
        rows, parts, _ = parts_in_rows(self._source.samples, found.numbers)
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
            workers=self.steps.workers_of(steps[kept], self._workers),
            places=places[kept],
        )


def _part_names(source: IndexedSource, stored: Samples, numbers: Ints) -> list[str]:
    while isinstance(source, RowSource):
        source = numbered_source(source.part.source)
    names = [""] * len(numbers)
    if not isinstance(source, MixIndexedSource):
        return names
    assert isinstance(stored, Concat)  # noqa: S101  (of a mix)
    kinds, own = stored.find(numbers)
    parts = zip(source.recipe.parts, source.sources, stored.inner, strict=True)
    for kind, (name, part, part_samples) in enumerate(parts):
        places = np.flatnonzero(kinds == kind)
        inner_names = _part_names(part, part_samples, own[places])
        for place, inner in zip(places.tolist(), inner_names, strict=True):
            names[place] = f"{name}/{inner}" if inner else name
    return names


def _in_range(name: str, value: Any, end: int) -> int:
    number = whole_number(name, value)
    if not 0 <= number < end:
        known = f"they are numbered from 0 to {end - 1}" if end else f"the plan has no {name}s"
        raise OptionError(f"there is no {name} {number}: {known}")
    return number
