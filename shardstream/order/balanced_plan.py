"""Plan batches with equal costs at each step, from the samples of another plan.

Lane l has every L-th batch, so L consecutive batches are one round of all lanes. K rounds are a stretch, whose samples are those of
the other plan. They are sorted by cost and cut into as many strata as a batch has samples; each stratum in turn goes to the batches, its
largest sample to the cheapest one. Batches that one large sample makes dearer than others stay apart: sorted by cost, consecutive
batches are a round, and the rounds of a stretch come in random order. So a plan stays a function of the batch number.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError
from shardstream.order.epoch_plan import EpochPlan, Places
from shardstream.order.permutation import Ints, derive_key, derive_keys, permute

Costs = npt.NDArray[np.float32]

_ROUNDS, _PLACES, _BATCHES, _SHORT = 10, 11, 12, 13  # purposes of the random keys
# Bits of costs that differ by less than 1/64: exponent and six of the fraction.
_ROUGH = np.int32(-1 << 17)
# At a time: more are not in the processor's cache, and take twice the time.
_PLANNED_SAMPLES = 16384
# By all readers: of a few readers each has neighbours, which it reads together.
_FETCHED_SAMPLES = 1 << 17
_HELD_STRETCHES = 4  # prefetching and reading are in different ones


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBalance:
    """Costs of samples, and how batches are made equal by them.

    Args:
        costs: Cost of each sample, shape (n,), float32, finite and at least 0; sample number i costs ``costs[i % n]``.
        steps: Rounds of all lanes whose samples are dealt together, K.
        group_size: Consecutive batches that shall cost the same, a divisor of the lanes; None is all lanes.
        padded: Whether a batch costs as many times its largest sample as it has samples, instead of their sum.
    """

    costs: Costs
    steps: int
    group_size: int | None
    padded: bool

    def describe(self) -> dict[str, Any]:
        """Return the values of which the order is a function, as JSON values."""
        digest = hashlib.sha256(self.costs.astype("<f4", copy=False).data)
        options = {"steps": self.steps, "group_size": self.group_size, "padded": self.padded}
        return options | {"fingerprint": digest.hexdigest()[:16]}


class BalancedEpochPlan(EpochPlan):
    """The batches of one epoch, with equal costs of the batches of a step.

    Args:
        plan: The epoch whose samples are dealt; it has lanes, so it is shuffled.
        balance: Costs and options.

    Raises:
        OptionError: If the lanes are not a multiple of the group size.
    """

    def __init__(self, plan: EpochPlan, balance: StepBalance) -> None:
        super().__init__(plan.order, plan.epoch)
        lanes = plan.order.lanes
        self.passes, self.nsamples, self.spread = plan.passes, plan.nsamples, lanes
        self._plan, self._balance = plan, balance
        self._group_size = balance.group_size or lanes
        if lanes % self._group_size:
            raise OptionError(
                f"balance= with group_size={self._group_size} needs lanes that are a multiple of it, not {lanes}; set lanes= of OrderOptions, "
                "or choose one that divides the ranks x microbatches of a step"
            )
        self._stretch = balance.steps * lanes
        at_once = max(balance.steps, _FETCHED_SAMPLES // (lanes * plan.order.batch))
        self._window = min(at_once, plan.order.window // plan.order.batch) * lanes
        self._key = derive_key(plan.order.seed, plan.epoch)
        self._dealt: tuple[tuple[int, Ints], ...] = ()  # replaced as a whole: threads read it

    def batches(self, numbers: Ints) -> Ints:
        """Return the samples of some batches, shape (n, b)."""
        stretches, places = np.divmod(numbers, self._stretch)
        found = np.empty((len(numbers), self.order.batch), dtype=np.int64)
        for stretch in np.unique(stretches).tolist():
            mine = stretches == stretch
            found[mine] = self._batches_of(stretch)[places[mine]]
        return found

    def find(self, samples: Ints) -> Places:
        """Return the full batches in which samples come, and where: their stretches are dealt again."""
        numbers, batches, _ = self._plan.find(samples)
        stretches = batches // self._stretch
        found = [Places(*np.empty((3, 0), dtype=np.int64))]
        for stretch in np.unique(stretches).tolist():
            dealt = self._batches_of(stretch)
            batch, slot = np.nonzero(np.isin(dealt, numbers[stretches == stretch]))
            found.append(Places(dealt[batch, slot], stretch * self._stretch + batch, slot))
        return Places(*map(np.concatenate, zip(*found, strict=True)))

    def rest(self, start: int) -> Ints:
        """Return the samples of the batches from ``start`` on, with the last incomplete batch, in order, shape (n,)."""
        end = self.order.num_batches
        full = self.batches(np.arange(start, end, dtype=np.int64)).ravel()
        return np.concatenate((full, self._plan.rest(end)))

    def windows(self, numbers: Ints) -> Ints:
        """Return the window number of each batch, shape (n,): rounds that have no more of a lane's samples than its windows."""
        return numbers // self._window

    def batches_of_window(self, window: int) -> Ints:
        """Return the numbers of the batches of one window, in order: the inverse of `windows`."""
        return self._range(window, self._window)

    def _range(self, number: int, size: int) -> Ints:
        end = min((number + 1) * size, self.order.num_batches)
        return np.arange(number * size, end, dtype=np.int64)

    def _batches_of(self, stretch: int) -> Ints:
        """Return the samples of all batches of a stretch, shape (n, b)."""
        held = dict(self._dealt)
        dealt = held.pop(stretch, None)
        if dealt is None:
            dealt = self._deal(stretch)
        self._dealt = (*list(held.items())[1 - _HELD_STRETCHES :], (stretch, dealt))
        return dealt

    def _deal(self, stretch: int) -> Ints:
        numbers, size = self._range(stretch, self._stretch), self.order.batch
        count, costs = len(numbers), self._balance.costs
        some = np.array_split(numbers, -(-count * size // _PLANNED_SAMPLES))
        samples = np.concatenate([self._plan.batches(one).ravel() for one in some])
        costs = costs[samples % len(costs)]
        made, totals = (deal_neighbours if self._balance.padded else deal_evenly)(costs, size)
        # In random order where costs are about equal: so different batches as possible make a round.
        mixed = permute(np.arange(count), count, derive_key(self._key, _BATCHES, stretch))
        mixed = mixed[_descending((totals[mixed].view(np.int32) & _ROUGH).view(np.float32))]
        return samples[made[mixed[self._places(count, stretch)]]]

    def _places(self, count: int, stretch: int) -> Ints:
        """Return which of the batches in descending order of cost comes at each place of a stretch, shape (n,)."""
        size = self._group_size
        rounds, rest = divmod(count, size)
        places = np.tile(np.arange(size, dtype=np.int64), rounds)
        # The last ones, of which a loader may drop some, are a round of any cost: else the cheapest samples would be missing in each epoch.
        key = derive_key(self._key, _SHORT, stretch)
        short = key % (rounds + 1)
        last = short * size + permute(np.arange(rest, dtype=np.int64), max(1, rest), key)
        if not rounds:
            return last
        round_order = permute(
            np.arange(rounds, dtype=np.int64), rounds, derive_key(self._key, _ROUNDS, stretch)
        )
        # Else the first lane of each round would have its largest batch.
        keys = derive_keys(derive_key(self._key, _PLACES, stretch), round_order)
        places = permute(places, size, np.repeat(keys, size))
        firsts = round_order * size + np.where(round_order < short, 0, rest)
        return np.concatenate((np.repeat(firsts, size) + places, last))


def deal_evenly(costs: Costs, size: int) -> tuple[Ints, Costs]:
    """Deal samples to batches whose sums of costs are about equal.

    Args:
        costs: Shape (n * size,), float32, at least 0.
        size: Samples of a batch.

    Returns:
        Places of the samples of each batch, shape (n, size), ascending in a batch; and the cost of each batch, shape (n,).

    >>> batches, totals = deal_evenly(np.array([9, 1, 2, 3, 8, 1], dtype=np.float32), 2)
    >>> batches.tolist(), totals.tolist()
    ([[0, 1], [4, 5], [2, 3]], [10.0, 9.0, 5.0])
    """
    strata = _descending(costs).reshape(size, -1)
    batches, totals = strata.T.copy(), costs[strata[0]]
    for number in range(1, size):
        cheapest = _descending(totals)[::-1]
        batches[cheapest, number] = strata[number]
        totals[cheapest] += costs[strata[number]]
    batches.sort(axis=1)  # else the first sample of each batch would be its largest
    return batches, totals


def deal_neighbours(costs: Costs, size: int) -> tuple[Ints, Costs]:
    """Deal samples of about equal costs to each batch, which costs as its largest; as `deal_evenly`."""
    batches = _descending(costs).reshape(-1, size)
    return np.sort(batches, axis=1), costs[batches[:, 0]]


def _descending(costs: Costs) -> Ints:
    """Return the places of costs in descending order, shape (n,); places decide between equal costs."""
    # Floats of at least 0 are ordered as their bits. Sorting numbers that hold cost and place is the same everywhere, as a stable
    # argsort is, in a third of its time.
    keys = costs.view(np.int32).astype(np.int64) << 32 | np.arange(len(costs))
    keys.sort()
    places: Ints = (keys & 0xFFFFFFFF)[::-1]
    return places
