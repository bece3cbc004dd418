"""Batches of similar samples whose cost is bounded, such as their padded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
from shardstream.order.permutation import Ints
from shardstream.order.row_plan import GroupedRows, RowParts, digest_of

Floats = npt.NDArray[np.float64]

_BATCHES_OF_GROUP = 64
_MIN_GROUP, _MAX_GROUP = 256, 1 << 16
_JITTERS = (0.1, 0.03, 0.01)  # of the costs by which further epochs sort, the largest first


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of batches.

    Args:
        max_cost: Maximum of the cost of a batch.
        max_samples: Maximum of its samples; None for any number.
        padded: Whether a batch costs as much as its samples would if each cost as much as the largest; else the sum of them.
        multiple: The number of batches is a multiple of it, by halving some.
    """

    max_cost: float
    max_samples: int | None = None
    padded: bool = True
    multiple: int = 1


class CostBatches(GroupedRows):
    """Batches of samples of similar cost: samples of a group, by their cost, cut where a batch would cost too much.

    Args:
        costs: Cost of each sample, at least 0, shape (n,), float64.
        limits: Limits of the batches.
        is_new_each_epoch: Whether samples meet others in each epoch. The number of batches stays.
        seed: Seed of these compositions.

    Raises:
        OptionError: If a sample alone costs more than the maximum.
    """

    def __init__(
        self,
        costs: Floats,
        limits: BatchLimits,
        *,
        is_new_each_epoch: bool = True,
        seed: int = 0,
    ) -> None:
        max_cost = limits.max_cost
        if not max_cost > 0:
            raise OptionError(f"max_cost must be above 0, not {max_cost}")
        too_much = costs > max_cost
        if too_much.any():
            number = int(too_much.argmax())
            raise OptionError(
                f"sample {number} costs {costs[number]:g}, more than max_cost={max_cost:g} ({plural(int(too_much.sum()), 'sample')} in all); "
                "raise max_cost, or leave them out with where= or subset="
            )
        self.costs, self.limits = costs, limits
        self._padded_cost = 0.0  # of all batches that `count` has counted
        self._max_samples = limits.max_samples or len(costs)
        per_batch = (
            min(self._max_samples, max_cost / max(float(costs.mean()), 1e-300)) if len(costs) else 1
        )
        group = min(max(int(_BATCHES_OF_GROUP * per_batch), _MIN_GROUP), _MAX_GROUP)
        super().__init__(
            len(costs),
            group,
            is_new_each_epoch=is_new_each_epoch,
            seed=seed,
            multiple=limits.multiple,
        )

    @property
    def num_parts(self) -> int:
        """Samples of all batches."""
        return len(self.costs)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the composition of any row."""
        options = (self.limits, self.is_new_each_epoch)
        return digest_of("cost", options, self._group, self.costs.astype("<f8"))

    @property
    def padding(self) -> float:
        """Share of the cost of all batches that is padding, from 0 to 1, before batches are halved; new compositions have a little more."""
        return 1 - float(self.costs.sum()) / self._padded_cost if self._padded_cost else 0.0

    @property
    def summary(self) -> str:
        """Rows and what they hold, for ``repr``."""
        kind, padding = "cost", ""
        if self.limits.padded:
            kind, padding = "padded cost", f", {self.padding:.1%} padding"
        return f"{plural(len(self), 'batch')} of a {kind} of at most {self.limits.max_cost:g}{padding}, from {plural(len(self.costs), 'sample')}"

    def count(self, groups: Ints) -> Ints:
        """Return the number of batches of some groups, shape (groups,)."""
        found = list[int]()
        for group in groups.tolist():
            costs = np.sort(self.costs[self.samples_of(group)])
            counts = self._cut(costs)
            found.append(len(counts))
            if self.limits.padded:
                self._padded_cost += float((costs[np.cumsum(counts) - 1] * counts).sum())
        if not self.is_new_each_epoch:
            return np.array(found, dtype=np.int64)
        # Room for other compositions, which are a little less even.
        raised = [count + -(-count // 50) for count in found]
        sizes = [len(self.costs[self.samples_of(group)]) for group in groups.tolist()]
        return np.minimum(raised, sizes)

    def plan(self, groups: Ints, keys: Sequence[int | None]) -> list[RowParts]:
        """Return the parts of all batches of some groups."""
        return [self._plan_group(*one) for one in zip(groups.tolist(), keys, strict=True)]

    def _plan_group(self, group: int, key: int | None) -> RowParts:
        members = self.samples_of(group)
        costs = self.costs[members]
        wanted = int(min(self.firsts[group + 1] - self.firsts[group], len(costs)))
        order = np.argsort(costs, kind="stable")
        counts = self._cut(costs[order])
        if key is not None:
            draws = np.random.Generator(np.random.PCG64(key)).random(len(costs))
            for jitter in _JITTERS:
                tried = np.argsort(costs * (1 + jitter * draws), kind="stable")
                cut = self._cut(costs[tried])
                if len(cut) <= wanted:
                    order, counts = tried, cut
                    break
        counts = _split_largest(counts, wanted)
        numbers = np.arange(members.start, members.stop, dtype=np.int64)[order]
        return RowParts(counts, numbers, np.zeros_like(numbers), np.full_like(numbers, -1))

    def _cut(self, costs: Floats) -> Ints:
        """Return the number of samples of each batch of samples in the order in which they fill batches, shape (batches,)."""
        counts, first = list[int](), 0
        while first < len(costs):
            some = costs[first : first + self._max_samples]
            if self.limits.padded:
                if some[0]:  # the smallest
                    some = some[: max(1, int(self.limits.max_cost / some[0]))]
                total = np.maximum.accumulate(some) * np.arange(1, len(some) + 1)
            else:
                total = np.cumsum(some)
            counts.append(max(1, int(np.searchsorted(total, self.limits.max_cost, side="right"))))
            first += counts[-1]
        return np.array(counts, dtype=np.int64)


def _split_largest(counts: Ints, wanted: int) -> Ints:
    """Return the sizes of as many batches as wanted, of which the largest are halved."""
    sizes = counts.tolist()
    while len(sizes) < wanted:
        place = max(range(len(sizes)), key=sizes.__getitem__)
        half = sizes[place] // 2
        sizes[place : place + 1] = [half, sizes[place] - half]
    return np.array(sizes, dtype=np.int64)
