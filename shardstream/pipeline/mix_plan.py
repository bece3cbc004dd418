"""Compute the order of a mix: a schedule says which dataset fills a place of a lane, and the plan of that dataset which sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardstream.errors import OptionError
from shardstream.order import (
    EpochOrder,
    EpochPlan,
    Ints,
    MixSchedule,
    Places,
    SteppedMixSchedule,
    derive_key,
)

if TYPE_CHECKING:
    from shardstream.pipeline.mix import MixIndexedSource, MixRecipe

EPOCHS_PER_PASS = 1 << 32
"""Pass p of a part in epoch e of its mix is epoch ``e + p * EPOCHS_PER_PASS`` of its own."""

_MIX = 5  # purpose of the random key


class MixLanes:
    """Compute the sample at each place of a mix; lane l of the mix takes its samples from lane l of each part.

    Args:
        mix: The mix.
        planned: Segments of the epoch as they were known at its begin.
        segments: Segments of the epoch, with weights that were given since.
        order: Order of the epoch.
        epoch: From 0.
    """

    def __init__(
        self,
        mix: MixIndexedSource,
        planned: list[tuple[int, list[float]]],
        segments: list[tuple[int, list[float]]],
        order: EpochOrder,
        epoch: int,
    ) -> None:
        self._mix, self.nsamples = mix, len(mix.samples)
        self._lanes = order.lanes
        self._epoch = epoch
        self._schedule = _schedule_of(segments, order, epoch)
        shares = np.array([np.array(weights) / sum(weights) for _, weights in segments])
        self._shares: Any = shares.max(axis=0)
        self._windows = _windows_of(planned, segments, order.window)
        self._plans: dict[tuple[int, int], EpochPlan] = {}
        numbers = np.arange(order.lanes, dtype=np.int64)
        part_sizes = [self._plan(part, 0).order.nsamples for part in range(len(self._shares))]
        self.sizes = np.stack([-((numbers - size) // order.lanes) for size in part_sizes], axis=1)
        self.wanted = self._shares > 0
        small = (self.sizes == 0).any(axis=0) & self.wanted
        if small.any():
            name = list(mix.recipe.parts)[int(np.flatnonzero(small)[0])]
            raise OptionError(
                f"dataset {name!r} has fewer samples than the mix has lanes, {order.lanes}; use fewer lanes"
            )

    def whole_length(self, recipe: MixRecipe) -> int:
        """Return the samples that an epoch would have in one lane, with batches of one sample."""
        if recipe.samples is not None:
            return recipe.samples
        lengths = self.sizes.sum(axis=0)[self.wanted] / self._shares[self.wanted]
        return int(lengths.min() if recipe.stop == "first_exhausted" else lengths.max())

    def counts(self, lengths: Ints) -> Ints:
        """Return the number of samples of each part in the first places of every lane, shape (L, parts)."""
        return self._schedule.counts(lengths, np.arange(self._lanes, dtype=np.int64))

    def samples(self, lanes: Ints, places: Ints) -> Ints:
        """Return the sample numbers, in all samples, at places of lanes; shape (n,) each."""
        part, turn = self._schedule.assign_sources(places, lanes)
        passes, turn = np.divmod(turn, self.sizes[lanes, part])
        numbers = np.empty_like(places)
        for kind in np.unique(part).tolist():
            for pass_number in np.unique(passes[part == kind]).tolist():
                is_in_pass = (part == kind) & (passes == pass_number)
                batches = turn[is_in_pass] * self._lanes + lanes[is_in_pass]
                plan = self._plan(kind, pass_number)
                numbers[is_in_pass] = self._number(kind, pass_number, plan.batches(batches)[:, 0])
        return numbers

    def find(self, samples: Ints, counts: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the lanes and places at which samples come: the inverse of `samples`.

        Args:
            samples: Numbers in all samples, without copies; shape (n,).
            counts: How often each part is taken in each lane, shape (L, parts).

        Returns:
            Numbers with copies, lanes and places, shape (m,) each.
        """
        found = [np.empty((3, 0), dtype=np.int64)]
        kinds, own = self._mix.samples.find(samples)
        for kind in np.unique(kinds).tolist():
            sizes = self.sizes[:, kind]
            for pass_number in range(int((-(-counts[:, kind] // np.maximum(sizes, 1))).max())):
                numbers, batches, _ = self._plan(kind, pass_number).find(own[kinds == kind])
                turns, lanes = np.divmod(batches, self._lanes)
                turns += pass_number * sizes[lanes]
                is_taken = turns < counts[lanes, kind]
                lanes = lanes[is_taken]
                places = self._schedule.find_places(
                    np.full_like(lanes, kind), turns[is_taken], lanes
                )
                numbers = self._number(kind, pass_number, numbers[is_taken])
                found.append(np.stack((numbers, lanes, places)))
        numbers, lanes, places = np.concatenate(found, axis=1)
        return numbers, lanes, places

    def _number(self, kind: int, pass_number: int, numbers: Ints) -> Ints:
        """Return the numbers in all samples of those of a part in one of its passes, with copies."""
        samples = self._mix.samples
        inner_pass, inner = np.divmod(numbers, len(samples.inner[kind]))
        # A repeated sample gets a new number: it is fetched again, and its random augmentation differs.
        turns = inner_pass + pass_number * self._plan(kind, 0).passes
        found: Ints = samples.firsts[kind] + inner + turns * len(samples)
        return found

    def passes(self, counts: Ints) -> int:
        """Return an upper bound for the pass numbers of an epoch, so that those of nested mixes do not collide.

        Args:
            counts: As in `find`.
        """
        turns = int((counts / np.maximum(self.sizes, 1)).max()) + 1
        inner = max(self._plan(part, 0).passes for part in range(counts.shape[1]))
        # Doubled for nested mixes whose weights differ between passes.
        return 2 * turns * inner

    def _plan(self, part: int, pass_number: int) -> EpochPlan:
        plan = self._plans.get((part, pass_number))
        if plan is None:
            source = self._mix.sources[part]
            epoch = self._epoch + pass_number * EPOCHS_PER_PASS
            order = source.order(batch=1, lanes=self._lanes, epoch=epoch)
            order = replace(
                order, lanes=self._lanes, window=source.options.window or self._windows[part]
            )
            if pass_number:  # those of a nested mix differ in length, but lanes take as much of each as of the first
                order = replace(order, nsamples=self._plan(part, 0).order.nsamples)
            plan = self._plans[part, pass_number] = source.plan(order, epoch)
        return plan


def _windows_of(
    planned: Sequence[tuple[int, list[float]]],
    segments: Sequence[tuple[int, list[float]]],
    window: int,
) -> list[int]:
    """Return the window of each part: the largest that was planned.

    Weights given within the epoch may not alter the order of a part that has samples already, so they count only for parts that have none
    until then.
    """
    sizes = [
        [one and max(1, round(window * one / sum(weights))) for one in weights]
        for _, weights in (*planned, *segments)
    ]
    of_parts = zip(*sizes, strict=True)
    number = len(planned)
    return [int(max(one[:number]) or next(filter(None, one[number:]), 1)) for one in of_parts]


def _schedule_of(
    segments: Sequence[tuple[int, list[float]]], order: EpochOrder, epoch: int
) -> MixSchedule | SteppedMixSchedule:
    """Return the schedule of an epoch; weights hold from the first whole batch on."""
    by_batch = {-(-first // order.batch): weights for first, weights in segments}
    schedules = [
        (batch, MixSchedule(weights, derive_key(order.seed, epoch, _MIX, *[batch] * (batch > 0))))
        for batch, weights in by_batch.items()
    ]
    if len(schedules) == 1:
        return schedules[0][1]
    return SteppedMixSchedule(schedules, lanes=order.lanes, batch=order.batch)


class MixEpochPlan(EpochPlan):
    """The batches of one epoch of a mix."""

    def __init__(self, order: EpochOrder, epoch: int, lanes: MixLanes) -> None:
        super().__init__(order, epoch)
        self._lanes = lanes
        self._counts = lanes.counts(lane_lengths(order.num_batches, order.lanes) * order.batch)
        self.passes, self.nsamples = lanes.passes(self._counts), lanes.nsamples

    def batches(self, numbers: Ints) -> Ints:
        """Return the samples of some batches, shape (n, b)."""
        order = self.order
        slots = np.arange(order.batch, dtype=np.int64)
        places = (numbers // order.lanes * order.batch)[:, None] + slots
        lanes = np.repeat(numbers % order.lanes, order.batch)
        return self._lanes.samples(lanes, places.ravel()).reshape(places.shape)

    def find(self, samples: Ints) -> Places:
        """Return the batches in which samples come, and where: those of each copy."""
        order = self.order
        numbers, lanes, places = self._lanes.find(samples, self._counts)
        turns, slots = np.divmod(places, order.batch)
        return Places(numbers, turns * order.lanes + lanes, slots)

    def rest(self, start: int) -> Ints:
        """Return the samples of the batches from ``start`` on; a mix ends with a full batch."""
        return self.batches(np.arange(start, self.order.num_batches, dtype=np.int64)).ravel()


def lane_lengths(batches: int, lanes: int) -> Ints:
    """Return the number of batches of each lane."""
    return -((np.arange(lanes, dtype=np.int64) - batches) // lanes)
