"""Partition the batches of an epoch over ranks and workers.

Rank r of W takes at step s the batches ``t0 + (s W + r) m + i`` for i < m; worker j of K takes the steps that are j modulo K.
The samples left after the last W m full batches are one last step, split evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardstream.distributed import Placement
from shardstream.errors import OptionError
from shardstream.order.epoch_plan import EpochPlan
from shardstream.order.permutation import Ints

Remainder = Literal["pad", "drop", "keep"]


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
    """

    world_size: int = 1
    microbatches: int = 1
    remainder: Remainder = "pad"
    drop_last: bool = False

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
        self.plan = plan
        self.config = config
        self.rank = Placement(rank, config.world_size).rank
        done = consumed >= order.nsamples
        self._first = order.num_batches if done else consumed // order.batch
        self.full_steps = (order.num_batches - self._first) // config.batches_per_step
        tail_batch = self._first + self.full_steps * config.batches_per_step
        samples_left = 0 if done else order.nsamples - tail_batch * order.batch
        self._tail_batch, self._left = tail_batch, samples_left
        self._tail_start, self._tail_size = (
            (0, 0) if config.drop_last else _tail_range(samples_left, config, rank)
        )
        # With "keep" this rank may get none of the last samples; other ranks then have one more step.
        self._is_short = (
            config.remainder == "keep" and not config.drop_last and 0 < samples_left <= rank
        )

    @property
    def num_steps(self) -> int:
        """Steps of this rank; the same for all ranks unless the remainder is kept."""
        return self.full_steps + (self._tail_size > 0)

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
        return (self._first + steps * self.config.batches_per_step) * self.plan.order.batch

    def batches(self, steps: Ints) -> Ints:
        """Return the batch numbers of some full steps, shape (n, m)."""
        config = self.config
        first = self._first + (steps * config.world_size + self.rank) * config.microbatches
        return first[:, None] + np.arange(config.microbatches, dtype=np.int64)

    def samples(self, steps: Ints) -> list[Ints]:
        """Return the sample numbers of some steps, one array per step."""
        full = steps[steps < self.full_steps]
        width = self.config.microbatches * self.plan.order.batch
        rows = self.plan.batches(self.batches(full).ravel()).reshape(len(full), width)
        return [*rows, *([self.tail()] if len(full) < len(steps) else [])]

    def tail(self) -> Ints:
        """Return the samples of the last, short step; none if there is no such step."""
        rest = self.plan.rest(self._tail_batch)
        return rest[(self._tail_start + np.arange(self._tail_size)) % len(rest)]

    def steps_of_window(self, window: int) -> Ints:
        """Return the steps of this rank that take a batch of the window, shape (n,)."""
        step_numbers = (
            self.plan.batches_of_window(window) - self._first
        ) // self.config.microbatches
        own_numbers = step_numbers[
            (step_numbers >= 0) & (step_numbers % self.config.world_size == self.rank)
        ]
        steps = own_numbers // self.config.world_size  # in order, as the batches are
        first: Ints = steps[np.diff(steps, prepend=-1) != 0]
        return first


def _tail_range(samples_left: int, config: PartitionConfig, rank: int) -> tuple[int, int]:
    """Return start and size of a rank's part of the last samples."""
    per_rank, extra = divmod(samples_left, config.world_size)
    if config.remainder == "keep":
        return rank * per_rank + min(rank, extra), per_rank + (rank < extra)
    size = per_rank + (config.remainder == "pad" and extra > 0)
    return rank * size, size


def find_even_lane_counts(config: PartitionConfig, num_workers: int, lanes: int) -> tuple[int, int]:
    """Return the nearest lane counts below and above that the readers divide evenly, so that each byte is read once.

    >>> find_even_lane_counts(PartitionConfig(world_size=2), 3, 8)
    (6, 12)
    """
    lanes_per_step = config.batches_per_step * num_workers
    return max(lanes_per_step, lanes // lanes_per_step * lanes_per_step), -(
        -lanes // lanes_per_step
    ) * lanes_per_step
