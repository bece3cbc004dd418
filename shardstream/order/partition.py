"""Partition the batches of an epoch over ranks and workers.

Rank r of W takes at step s the batches ``t0 + (s W + r) m + i`` for i < m; worker j of K takes the steps that are j modulo K.
The samples left after the last W m full batches are one last step, split evenly. If nodes keep their blocks, the batches and
samples of each step are sorted by node before the ranks split them.

A rank meets the same lanes again after a cycle of steps. If workers take whole lanes, and the steps of a cycle are not a
multiple of K, worker j takes the steps whose place in their cycle is j modulo K, so some workers have a gap at the end of a cycle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Literal, NamedTuple, TypeVar, overload

import numpy as np

from shardstream.distributed import Placement
from shardstream.errors import OptionError
from shardstream.order.epoch_plan import EpochOrder, EpochPlan, RangePlan
from shardstream.order.permutation import Ints

Remainder = Literal["pad", "drop", "keep"]
_Place = TypeVar("_Place", int, Ints)

_MIN_BUSY_WORKERS = 0.8  # share of the workers' turns without a gap


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionConfig:
    """Options of the partition of an epoch.

    Args:
        world_size: Ranks, W.
        microbatches: Batches that a rank takes at a step, m.
        remainder: Policy for the samples that do not fill a last step of all ranks: "pad" distributes them evenly and
            repeats at most W - 1 of them, "drop" drops at most W - 1, "keep" returns each once, so that ranks may
            differ by one sample.
        drop_last: True drops a last step of less than full size.
        whole_lanes: Let workers take whole lanes, unless over a fifth of their turns would be gaps: for data of which a part of
            a window costs as much to read as all of it.
    """

    world_size: int = 1
    microbatches: int = 1
    remainder: Remainder = "pad"
    drop_last: bool = False
    whole_lanes: bool = False

    def __post_init__(self) -> None:
        if self.remainder not in ("pad", "drop", "keep"):
            raise OptionError(f"remainder is 'pad', 'drop' or 'keep', not {self.remainder!r}")
        if self.microbatches < 1:
            raise OptionError(f"a step needs at least one microbatch, not {self.microbatches}")

    @property
    def batches_per_step(self) -> int:
        """Batches that all ranks together take at a step."""
        return self.world_size * self.microbatches


class RankPartition:
    """The steps of one rank in the rest of an epoch.

    Args:
        plan: Plan of the epoch.
        config: Options of the partition.
        rank: Number of the rank, from 0.
        consumed: Samples of the epoch that all ranks have consumed before; a multiple of the batch, or all.
    """

    def __init__(
        self, plan: EpochPlan, config: PartitionConfig, *, rank: int, consumed: int = 0
    ) -> None:
        order = plan.order
        if consumed % order.batch and consumed != order.nsamples:
            raise OptionError(
                f"{consumed} consumed samples are not a multiple of the microbatch, {order.batch}"
            )
        if consumed > order.nsamples:
            raise OptionError(f"{consumed} of {order.nsamples} samples are consumed")
        self.plan = plan
        self.config = config
        self.rank = Placement(rank, config.world_size).rank
        done = consumed >= order.nsamples
        self._first = order.num_batches if done else consumed // order.batch
        self._batches_per_step = config.batches_per_step
        self.full_steps = (order.num_batches - self._first) // self._batches_per_step
        own = np.arange(rank * config.microbatches, (rank + 1) * config.microbatches)
        self._own = own if order.nodes == 1 else _sort_by_node(own, order, config, self._first)
        tail_batch = self._first + self.full_steps * self._batches_per_step
        samples_left = 0 if done else order.nsamples - tail_batch * order.batch
        self._tail_batch, self._left = tail_batch, samples_left
        self._tail = _tail_places(
            0 if config.drop_last else samples_left, config, rank, order.nodes
        )
        self._tail_size = len(self._tail)
        self.num_steps = self.full_steps + (self._tail_size > 0)
        """Steps of this rank; the same for all ranks unless the remainder is kept."""
        # With "keep" this rank may get none of the last samples; other ranks then have one more step.
        self._is_short = (
            config.remainder == "keep"
            and not config.drop_last
            and self._tail_size == 0 < samples_left
        )

    @property
    def max_steps(self) -> int:
        """Steps of the rank that has the most."""
        return self.num_steps + self._is_short

    @property
    def short_step_samples(self) -> int:
        """Samples of the last step of all ranks if that step is short, repeats not counted; else 0."""
        return 0 if self.config.drop_last or self.config.remainder == "drop" else self._left

    @property
    def num_samples(self) -> int:
        """Samples of this rank, repeats counted."""
        return self.full_steps * self.config.microbatches * self.plan.order.batch + self._tail_size

    def step_size(self, step: int) -> int:
        """Return the number of samples of a step."""
        if step < self.full_steps:
            return self.config.microbatches * self.plan.order.batch
        return self._tail_size

    def consumed_after(self, steps: int) -> int:
        """Return the samples of the epoch that all ranks together have consumed after ``steps`` steps."""
        if steps >= self.num_steps and not self._is_short:
            return self.plan.order.nsamples
        return (self._first + steps * self._batches_per_step) * self.plan.order.batch

    def worker_of(self, step: int, num_workers: int) -> tuple[int, int]:
        """Return the worker of a step, and which of the worker's own steps it is, from 0."""
        steps = steps_per_cycle(self.plan.order, self.config, num_workers)
        cycle, place = divmod(step, steps)
        turn, worker = divmod(place, num_workers)
        return worker, cycle * len(range(worker, steps, num_workers)) + turn

    def batches(self, steps: Ints) -> Ints:
        """Return the batch numbers of some full steps, shape (n, m)."""
        return (self._first + steps * self._batches_per_step)[:, None] + self._own

    def samples(self, steps: Ints) -> list[Ints]:
        """Return the sample numbers of some steps, one array per step."""
        full = steps[steps < self.full_steps]
        width = self.config.microbatches * self.plan.order.batch
        rows = self.plan.batches(self.batches(full).ravel()).reshape(len(full), width)
        return [*rows, *([self.tail()] if len(full) < len(steps) else [])]

    def only(self, step: int) -> RankPartition:
        """Return one of these steps, as a partition of a single step."""
        single = RankPartition(
            self.plan, self.config, rank=self.rank, consumed=self.consumed_after(step)
        )
        single.full_steps, single.num_steps = min(1, single.full_steps), 1
        return single

    def tail(self) -> Ints:
        """Return the samples of the last, short step; none if there is no such step."""
        return self.plan.rest(self._tail_batch)[self._tail]

    def steps_of_window(self, window: int) -> Ints:
        """Return the steps of this rank that take a batch of the window, shape (n,)."""
        step, place = np.divmod(
            self.plan.batches_of_window(window) - self._first, self._batches_per_step
        )
        steps = step[(step >= 0) & np.isin(place, self._own)]  # in order, as the batches are
        first: Ints = steps[np.diff(steps, prepend=-1) != 0]
        return first


class RangePartition(RankPartition):
    """The steps of one rank in a range of samples.

    Args:
        plan: Plan of the range.
        config: Options of the partition.
        rank: Number of the rank, from 0.
    """

    def __init__(self, plan: RangePlan, config: PartitionConfig, *, rank: int) -> None:
        super().__init__(plan, config, rank=rank)
        self._first_sample = plan.first

    def consumed_after(self, steps: int) -> int:
        """Return the number of the next sample after ``steps`` steps of all ranks."""
        return self._first_sample + super().consumed_after(steps)


class StepPlaces(NamedTuple):
    """Places of samples in the steps of all ranks: an entry for each time that one comes.

    Args:
        numbers: The sample's number, as in the batch: copy c of sample i is ``i + c * nsamples`` of the plan.
        steps: Step of the rank.
        ranks: The rank.
        places: Place in the batch of the rank.
    """

    numbers: Ints
    steps: Ints
    ranks: Ints
    places: Ints


class EpochSteps:
    """The steps of all ranks in the rest of an epoch, and their inverse: when a sample comes.

    Args:
        plan: Plan of the epoch.
        config: Options of the partition.
        consumed: As in `RankPartition`.
    """

    def __init__(self, plan: EpochPlan, config: PartitionConfig, *, consumed: int = 0) -> None:
        self.plan, self.config, self.consumed = plan, config, consumed
        self._first_rank = RankPartition(plan, config, rank=0, consumed=consumed)
        self.num_steps = self._first_rank.max_steps
        """Steps of the rank that has the most."""

    def of_rank(self, rank: int) -> RankPartition:
        """Return the steps of one rank."""
        return RankPartition(self.plan, self.config, rank=rank, consumed=self.consumed)

    def at(self, step: int, rank: int | None = None) -> StepPlaces:
        """Return the samples of a step in the order of the batches: of one rank, or of all, one after the other."""
        if step >= self._first_rank.full_steps:
            tail = self._tail
            if rank is None:
                return tail
            return StepPlaces(*(column[tail.ranks == rank] for column in tail))
        microbatches, batch = self.config.microbatches, self.plan.order.batch
        ranks = np.arange(self.config.world_size, dtype=np.int64)
        ranks = ranks if rank is None else ranks[rank : rank + 1]
        own = self._turns.reshape(-1, microbatches)[ranks].ravel()
        numbers = self.plan.batches(self._first_batch(step) + own).ravel()
        size = microbatches * batch
        return StepPlaces(
            numbers,
            np.full(len(numbers), step, dtype=np.int64),
            np.repeat(ranks, size),
            np.tile(np.arange(size, dtype=np.int64), len(ranks)),
        )

    def find(self, samples: Ints) -> StepPlaces:
        """Return the steps at which samples come, and where, in any order.

        Args:
            samples: Numbers from 0 to ``nsamples - 1`` of the plan, each once; shape (n,).
        """
        first, full_steps = self._first_batch(0), self._first_rank.full_steps
        numbers, batches, slots = self.plan.find(samples)
        steps, turns = np.divmod(batches - first, self.config.batches_per_step)
        is_ahead = (steps >= 0) & (steps < full_steps)
        own = np.argsort(self._turns)[turns[is_ahead]]
        ranks, microbatches = np.divmod(own, self.config.microbatches)
        places = microbatches * self.plan.order.batch + slots[is_ahead]
        full = StepPlaces(numbers[is_ahead], steps[is_ahead], ranks, places)
        in_tail = np.isin(self._tail.numbers % max(1, self.plan.nsamples), samples)
        return StepPlaces(
            *(np.append(own, column[in_tail]) for own, column in zip(full, self._tail, strict=True))
        )

    def workers_of(self, steps: Ints, num_workers: int) -> Ints:
        """Return the worker of each step, shape (n,)."""
        cycle = steps_per_cycle(self.plan.order, self.config, num_workers)
        workers: Ints = steps % cycle % num_workers
        return workers

    def _first_batch(self, step: int) -> int:
        return self._first_rank._first + step * self.config.batches_per_step

    @cached_property
    def _turns(self) -> Ints:
        """The batches of a step, from 0, in the order of the ranks; shape (batches per step,)."""
        turns, order = np.arange(self.config.batches_per_step), self.plan.order
        if order.nodes == 1:
            return turns
        return _sort_by_node(turns, order, self.config, self._first_batch(0))

    @cached_property
    def _tail(self) -> StepPlaces:
        """The last, short step."""
        rank, left = self._first_rank, self._first_rank._left
        left = 0 if self.config.drop_last else left
        places = [
            _tail_places(left, self.config, number, self.plan.order.nodes)
            for number in range(self.config.world_size)
        ]
        sizes = np.array([len(own) for own in places])
        numbers = self.plan.rest(rank._tail_batch)[np.concatenate(places)]
        return StepPlaces(
            numbers,
            np.full(len(numbers), rank.full_steps, dtype=np.int64),
            np.repeat(np.arange(len(sizes), dtype=np.int64), sizes),
            np.concatenate([np.arange(size, dtype=np.int64) for size in sizes.tolist()]),
        )


def steps_per_cycle(order: EpochOrder, config: PartitionConfig, num_workers: int) -> int:
    """Return after how many steps of a rank the turns of its workers start again at the first."""
    if not config.whole_lanes or not order.shuffle:
        return num_workers
    steps = order.lanes // gcd(order.lanes, config.batches_per_step)
    turns = -(-steps // num_workers) * num_workers
    is_worthwhile = num_workers < steps and steps >= _MIN_BUSY_WORKERS * turns
    return steps if is_worthwhile else num_workers


def uneven_effect(order: EpochOrder, config: PartitionConfig, num_workers: int) -> str:
    """Return what follows where lanes are not a multiple of the readers, as the end of a sentence."""
    if (
        steps_per_cycle(order, config, num_workers) > num_workers
        and not order.lanes % config.batches_per_step
    ):
        return "some workers read one lane more than others"
    return "workers read parts of the same windows"


class WorkerSteps:
    """The steps that one worker of a rank takes, in order; a slice is an array, shape (n,), int64.

    Args:
        partition: The steps of the rank.
        worker: Number of the worker, from 0.
        num_workers: Workers of the rank.
        first: Number of its first steps that are left out.
    """

    def __init__(
        self, partition: RankPartition, worker: int, num_workers: int, first: int = 0
    ) -> None:
        self._worker, self._num_workers, self._first = worker, num_workers, first
        self._cycle = steps_per_cycle(partition.plan.order, partition.config, num_workers)
        self._own = len(range(worker, self._cycle, num_workers))
        self._full_steps = partition.full_steps
        cycles, rest = divmod(partition.num_steps, self._cycle)
        last = len(range(worker, rest, num_workers))
        self._length = max(0, cycles * self._own + last - first)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(self._length))

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Ints: ...

    def __getitem__(self, place: int | slice) -> int | Ints:
        if isinstance(place, slice):
            return self._step(np.arange(*place.indices(self._length), dtype=np.int64))
        if not 0 <= place < self._length:
            raise IndexError(place)
        return self._step(place)

    @property
    def num_full(self) -> int:
        """How many are full steps: all, or all but the last."""
        return self._length - (self._length > 0 and self[self._length - 1] >= self._full_steps)

    def contain(self, steps: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return a mask of the full steps that are among them, shape (n,)."""
        cycle, place = np.divmod(steps, self._cycle)
        turn, worker = np.divmod(place, self._num_workers)
        is_ahead = cycle * self._own + turn >= self._first
        mask: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            (worker == self._worker) & is_ahead & (steps < self._full_steps)
        )
        return mask

    def _step(self, place: _Place) -> _Place:
        cycle, turn = divmod(self._first + place, self._own)
        return cycle * self._cycle + turn * self._num_workers + self._worker


def _sort_by_node(places: Ints, order: EpochOrder, config: PartitionConfig, first: int) -> Ints:
    """Return which batches of each step are at these places if they are sorted by node; the steps begin at batch ``first``."""
    per_node, uneven = divmod(config.batches_per_step, order.nodes)
    if uneven:  # no sequence is right for all steps
        return places
    node, turn = np.divmod(places, per_node)
    batches: Ints = (
        node - first
    ) % order.nodes + order.nodes * turn  # batch t is of node t % nodes
    return batches


def _tail_places(samples_left: int, config: PartitionConfig, rank: int, nodes: int) -> Ints:
    """Return the places of a rank's samples among the last ones, which are sorted by node."""
    groups = 1 if config.world_size % nodes else nodes
    ranks = config.world_size // groups
    group, rank_in_group = divmod(rank, ranks)
    first, length = (0, samples_left) if groups == 1 else _split(samples_left, groups, group)
    if config.remainder == "keep":
        start, size = _split(length, ranks, rank_in_group)
    else:
        size, extra = divmod(samples_left, config.world_size)
        size += config.remainder == "pad" and extra > 0
        start = rank_in_group * size
    places = first + (start + np.arange(size, dtype=np.int64)) % max(1, length)
    return places % max(1, samples_left)


def _split(count: int, parts: int, part: int) -> tuple[int, int]:
    """Return the start and size of one of several parts, which differ by at most one."""
    size, extra = divmod(count, parts)
    return part * size + min(part, extra), size + (part < extra)


def find_even_lane_counts(config: PartitionConfig, num_workers: int, lanes: int) -> tuple[int, int]:
    """Return the nearest lane counts below and above that the readers divide evenly, so that each byte is read once.

    >>> find_even_lane_counts(PartitionConfig(world_size=2), 3, 8)
    (6, 12)
    """
    lanes_per_step = config.batches_per_step * num_workers
    return max(lanes_per_step, lanes // lanes_per_step * lanes_per_step), -(
        -lanes // lanes_per_step
    ) * lanes_per_step
