"""Draw samples by weight: a pure function from weights, seed and epoch to how often each sample comes.

Systematic sampling (Madow, "On the theory of systematic sampling, II", 1949): the samples are put in a random order, each gets a
length in proportion to its weight on a line that is as long as the epoch, and the marks ``u, u + 1, u + 2, ...`` are drawn with one
random ``u``. So a sample that is expected 2.3 times comes 2 or 3 times, 2.3 times in the mean, and the total is exact.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
from shardstream.order.epoch_plan import EpochOrder, EpochPlan, Places
from shardstream.order.permutation import Ints, derive_key, derive_keys

_COPY_BITS = (
    32  # expected copies are whole numbers of 2**-32, whose sums are exact on every machine
)
_MAX_DRAWS = (1 << 63 - _COPY_BITS) - 2
_CERTAIN = (
    1 - 2**-20
)  # expected more often than this, a sample comes once without doubt: rounding must not make it two
_SAMPLE_ORDER, _OFFSET, _COPY_SHIFTS = 7, 8, 9  # purposes of the random keys


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightedDraw:
    """How often each sample is expected in an epoch, see `draw_by_weight`.

    Args:
        copies: Expected copies of each sample, in units of 2**-32, shape (n,), int64; their sum is ``num_samples``.
        num_samples: Samples of an epoch, each counted as often as it comes.
        replacement: Whether a sample may come more than once.
    """

    copies: Ints
    num_samples: int
    replacement: bool

    @property
    def max_copies(self) -> int:
        """The most that a sample may come in an epoch."""
        return int(-(-self.copies.max() >> _COPY_BITS))

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the expected copies."""
        return hashlib.sha256(self.copies.astype("<i8").tobytes()).hexdigest()[:16]

    def draw(self, key: int) -> Ints:
        """Return how often each sample comes in an epoch: its expected copies, rounded down or up; shape (n,), int64."""
        # Unless the order is random, neighbours would depend on each other: of two with 1/2 each, always one would come.
        order_key = derive_key(key, _SAMPLE_ORDER)
        order = np.argsort(derive_keys(order_key, np.arange(len(self.copies), dtype=np.int64)))
        offset = derive_key(key, _OFFSET) % (1 << _COPY_BITS)
        marks = np.cumsum(self.copies[order]) + offset >> _COPY_BITS
        drawn = np.empty_like(self.copies)
        drawn[order] = np.diff(marks, prepend=0)
        return drawn


def draw_by_weight(
    weights: npt.NDArray[Any], *, num_samples: int | None, replacement: bool
) -> WeightedDraw:
    """Return how often samples are expected.

    Args:
        weights: One for each sample, shape (n,), of numbers at least 0; only their ratios count.
        num_samples: Samples of an epoch; None means n.
        replacement: True: a sample is expected ``num_samples * weight / sum(weights)`` times. False: ``min(1, c * weight)`` times,
            with the c that gives ``num_samples`` in all, and comes at most once.

    Raises:
        OptionError: If a weight or the number of samples is not possible.
    """
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise OptionError(
            f"weights= has {weights[wrong[0]]} for sample {wrong[0]}, and {plural(len(wrong), 'such weight')} in all; give finite "
            "numbers of at least 0"
        )
    if not weights.any():
        raise OptionError(
            f"weights= are 0 for all {plural(len(weights), 'sample')}; give one above 0"
        )
    scaled = weights / weights.max()
    possible = int(np.count_nonzero(scaled))
    if num_samples is None and not replacement:
        raise OptionError(
            "replacement=False needs num_samples=: with as many as there are, each sample would come once whatever its weight; "
            f"choose fewer than the {plural(possible, 'sample')} with a weight above 0"
        )
    draws = len(weights) if num_samples is None else num_samples
    if not 1 <= draws <= _MAX_DRAWS:
        raise OptionError(f"num_samples must be from 1 to {_MAX_DRAWS}, not {draws}")
    if not replacement and draws > possible:
        raise OptionError(
            f"num_samples={draws} with replacement=False, but only {plural(possible, 'sample')} of {len(weights)} "
            f"{'has' if possible == 1 else 'have'} a weight above 0; choose at most {possible}, or replacement=True"
        )
    certain = np.zeros(len(weights), dtype=bool)
    if not replacement:
        certain[_find_certain(scaled, draws)] = True
    copies = _share_out(np.where(certain, 0.0, scaled), draws - int(certain.sum()))
    copies[certain] = 1 << _COPY_BITS
    return WeightedDraw(copies=copies, num_samples=draws, replacement=replacement)


def _find_certain(scaled: npt.NDArray[np.float64], draws: int) -> Ints:
    """Return the numbers of the samples that are drawn for sure if no sample is drawn twice."""
    order = np.argsort(-scaled, kind="stable")
    descending = scaled[order]
    left = np.cumsum(descending[::-1])[::-1]  # sum of the weights from each place on
    places = np.arange(draws, dtype=np.int64)
    # With the first k certain, the next sample is expected (draws - k) * weight / left times.
    fits = (draws - places) * descending[:draws] < _CERTAIN * left[:draws]
    return order[: int(fits.argmax()) if fits.any() else draws]


def _share_out(scaled: npt.NDArray[np.float64], draws: int) -> Ints:
    """Return expected copies in proportion to weights, in units of 2**-32, with an exact sum."""
    if draws == 0:
        return np.zeros(len(scaled), dtype=np.int64)
    # NumPy's cumsum adds in order, so the rounding is the same everywhere; a sum may add in blocks of a machine's width.
    ends = np.cumsum(scaled)
    ends = np.rint(ends / ends[-1] * float(draws << _COPY_BITS)).astype(np.int64)
    copies: Ints = np.diff(ends, prepend=0)
    return copies


class WeightedEpochPlan(EpochPlan):
    """The batches of one epoch of samples that are drawn by weight.

    Copy c of sample i has the number ``i + c * n``. The drawn samples are a list that `EpochPlan` shuffles: in the order of their
    numbers, but each copy begins at another place of the dataset. So the copies of a sample are far from each other, and
    blocks read neighbours and have the shares of the whole epoch. Without ``shuffle`` the copies of a sample come together.

    Args:
        order: Parameters of the order; ``nsamples`` is that of the draw.
        epoch: Epoch number, from 0.
        draw: Expected copies of each sample.
    """

    def __init__(self, order: EpochOrder, epoch: int, draw: WeightedDraw) -> None:
        super().__init__(order, epoch)
        self.passes, self.nsamples = draw.max_copies, len(draw.copies)
        self._draw = draw
        self._places = EpochPlan(order, epoch)

    def batches(self, numbers: Ints) -> Ints:
        """Return the samples of some batches, shape (n, b)."""
        return self._drawn[self._places.batches(numbers)]

    def find(self, samples: Ints) -> Places:
        """Return the full batches in which samples come, and where: those of each copy."""
        drawn = np.flatnonzero(np.isin(self._drawn % self.nsamples, samples))
        places, batches, slots = self._places.find(drawn)
        return Places(self._drawn[places], batches, slots)

    def rest(self, start: int) -> Ints:
        """Return the samples of the batches from ``start`` on, with the last incomplete batch, in order, shape (n,)."""
        return self._drawn[self._places.rest(start)]

    @cached_property
    def _drawn(self) -> Ints:
        """The drawn samples, shape (nsamples,); computed at the first use, because lengths and states need no draw."""
        key = derive_key(self.order.seed, self.epoch)
        drawn, nsamples = self._draw.draw(key), len(self._draw.copies)
        numbers = np.repeat(np.arange(nsamples, dtype=np.int64), drawn)
        copies = np.arange(len(numbers)) - np.repeat(np.cumsum(drawn) - drawn, drawn)
        if self.order.shuffle:
            copy_numbers = np.arange(self.passes, dtype=np.int64)
            shifts = derive_keys(derive_key(key, _COPY_SHIFTS), copy_numbers) % np.uint64(nsamples)
            starts = shifts.astype(np.int64)
            # Sorting numbers that hold place and copy takes an eighth of the time of a stable argsort.
            places = np.sort((numbers + starts[copies]) % nsamples * self.passes + copies)
            places, copies = np.divmod(places, self.passes)
            numbers = (places - starts[copies]) % nsamples
        return numbers + copies * nsamples
