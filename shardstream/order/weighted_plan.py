"""Plan epochs of samples that are drawn by weight, without drawing an epoch: a place says which sample, and a sample at which places it comes.

Draws are systematic sampling (Madow, "On the theory of systematic sampling, II", 1949): the samples are put in a random order, each gets a
length in proportion to its weight on a line that is as long as the epoch, and the marks ``u, u + 1, u + 2, ...`` are drawn with one
random ``u``. So a sample that is expected 2.3 times comes 2 or 3 times, 2.3 times in the mean, and the total is exact.

The random order is one of groups of 64 neighbours, and within each group one of its samples. So the lengths of groups say how many samples of
each are drawn, and a group is drawn alone when one of its samples is asked for. For each copy of the samples there is a layer of groups:
layer c has copy c of each sample that is expected more than c times. An epoch takes evenly from all layers, each from a random place on, so that
the copies of a sample are far from each other, and blocks read neighbours and have the shares of the whole epoch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
from shardstream.order.epoch_plan import EpochOrder, EpochPlan, Places
from shardstream.order.permutation import Ints, derive_key, derive_keys, permute

# Expected copies are whole numbers of 2**-32, whose sums are exact on every machine.
_COPY_BITS = 32
_ONE = 1 << _COPY_BITS
_MAX_DRAWS = (1 << 63 - _COPY_BITS) - 2
_CERTAIN = (
    1 - 2**-20
)  # expected more often than this, a sample comes once without doubt: rounding must not make it two
_GROUP = 64  # samples; a power of two
_LAYERS = 8  # at most: the last one has all further copies, in an order of single samples
_CELL = 8  # places of an epoch in which each layer has its share
_CHUNK = (
    1 << 17
)  # samples that are looked at together, a multiple of the group: a bound of the memory
_SAMPLE_ORDER, _OFFSET, _LAYER_STARTS, _GROUP_ORDER = 7, 8, 9, 10  # purposes of the random keys


@dataclass(frozen=True, kw_only=True, eq=False)
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
    def expected(self) -> npt.NDArray[np.float64]:
        """Expected copies of each sample, shape (n,)."""
        return self.copies / float(1 << _COPY_BITS)

    @cached_property
    def max_copies(self) -> int:
        """The most that a sample may come in an epoch."""
        return int(-(-self.copies.max() >> _COPY_BITS))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the expected copies."""
        return hashlib.sha256(self.copies.astype("<i8", copy=False).data).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """Return the values of which the draws are a function, as JSON values."""
        options = {"num_samples": self.num_samples, "replacement": self.replacement}
        return {"fingerprint": self.fingerprint} | options | {"draw": "groups of 64"}

    @cached_property
    def lengths(self) -> Ints:
        """Expected copies of all samples of each group in each layer, in units of 2**-32, shape (layers, groups)."""
        layers = np.arange(min(_LAYERS, self.max_copies), dtype=np.int64)[:, None]
        found = [np.empty((len(layers), 0), dtype=np.int64)]
        for first in range(0, len(self.copies), _CHUNK):
            some = _of_layers(self.copies[first : first + _CHUNK], layers, len(layers))
            found.append(np.add.reduceat(some, np.arange(0, some.shape[1], _GROUP), axis=1))
        return np.concatenate(found, axis=1)

    def of_groups(self, layers: Ints, groups: Ints, num_layers: int) -> Ints:
        """Return the expected copies of the samples of some groups in their layers, shape (n, 64); 0 after the last sample."""
        count, rest = divmod(len(self.copies), _GROUP)
        copies, is_whole = np.zeros((len(groups), _GROUP), dtype=np.int64), groups < count
        # Whole rows: a third of the time of single samples.
        copies[is_whole] = self.copies[: count * _GROUP].reshape(count, _GROUP)[groups[is_whole]]
        copies[~is_whole, :rest] = self.copies[count * _GROUP :]
        return _of_layers(copies, layers[:, None], num_layers)


def _of_layers(copies: Ints, layers: Ints, num_layers: int) -> Ints:
    """Return which part of expected copies is in layers: at most one, but in the last layer."""
    most = np.where(layers == num_layers - 1, _MAX_DRAWS + 1, 1) << _COPY_BITS
    found: Ints = np.maximum(copies - (layers << _COPY_BITS), 0)
    np.minimum(found, most, out=found)
    return found


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
    certain = np.empty(0, dtype=np.int64) if replacement else _find_certain(scaled, draws)
    scaled[certain] = 0.0
    copies = _share_out(scaled, draws - len(certain))
    copies[certain] = 1 << _COPY_BITS
    draw = WeightedDraw(copies=copies, num_samples=draws, replacement=replacement)
    draw.lengths  # noqa: B018  (once, not in each worker)
    return draw


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
    """Return expected copies in proportion to weights, in units of 2**-32, with an exact sum; the weights are overwritten."""
    if draws == 0:
        return np.zeros(len(scaled), dtype=np.int64)
    # NumPy's cumsum adds in order, so the rounding is the same everywhere; a sum may add in blocks of a machine's width.
    ends = np.cumsum(scaled, out=scaled)
    ends /= float(ends[-1])
    ends *= float(draws << _COPY_BITS)
    copies: Ints = np.rint(ends, out=ends).astype(np.int64)
    copies[1:] -= copies[:-1]
    return copies


class _Groups(NamedTuple):
    """The groups of an epoch in the order in which it takes them: the groups of layer 0, those of layer 1, ...

    Args:
        starts: Fraction of a copy after the last mark where the group begins on the line, in units of 2**-32, shape (n,).
        firsts: Draws before each group, and all draws, shape (n + 1,).
    """

    starts: Ints
    firsts: Ints


class WeightedEpochPlan(EpochPlan):
    """The batches of one epoch of samples that are drawn by weight.

    Copy c of sample i has the number ``i + c * n``. The draws are a list that `EpochPlan` shuffles. Without ``shuffle`` there is one layer, so that the
    list is in the order of the numbers of samples, with the copies of each together.

    Args:
        order: Parameters of the order; ``nsamples`` is that of the draw.
        epoch: Epoch number, from 0.
        draw: Expected copies of each sample.
    """

    def __init__(self, order: EpochOrder, epoch: int, draw: WeightedDraw) -> None:
        super().__init__(order, epoch)
        self.passes, self.nsamples = draw.max_copies, len(draw.copies)
        self._draw, self._key = draw, derive_key(order.seed, epoch)
        self._places = EpochPlan(order, epoch)
        self._num_layers = min(_LAYERS, draw.max_copies) if order.shuffle else 1
        self._num_groups = -(-len(draw.copies) // _GROUP)
        self._cells = max(1, draw.num_samples // _CELL)

    def batches(self, numbers: Ints) -> Ints:
        """Return the samples of some batches, shape (n, b)."""
        places = self._places.batches(numbers)
        return self._samples_of(places.ravel()).reshape(places.shape)

    def find(self, samples: Ints) -> Places:
        """Return the full batches in which samples come, and where: those of each copy."""
        draws = [np.empty(0, dtype=np.int64)]
        for layer in range(self._num_layers):
            some = samples[self._draw.copies[samples] > layer << _COPY_BITS]
            places, slots = np.divmod(some, _GROUP)
            groups, rows = np.unique(places + layer * self._num_groups, return_inverse=True)
            ends = self._draw_groups(groups)
            before = np.where(slots > 0, ends[rows, slots - 1], 0)
            counts = ends[rows, slots] - before
            turns = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            draws.append(np.repeat(self._groups.firsts[groups][rows] + before, counts) + turns)
        found, batches, slots = self._places.find(self._places_of_draws(np.concatenate(draws)))
        return Places(self._samples_of(found), batches, slots)

    def rest(self, start: int) -> Ints:
        """Return the samples of the batches from ``start`` on, with the last incomplete batch, in order, shape (n,)."""
        return self._samples_of(self._places.rest(start))

    def _samples_of(self, places: Ints) -> Ints:
        """Return the samples at places of the list, with copies; shape (n,)."""
        draws = self._draws_at(places)
        order = np.argsort(draws)  # searches for ascending numbers stay in the processor's cache
        draws, found = draws[order], np.empty_like(draws)
        groups, rows = np.unique(
            np.searchsorted(self._groups.firsts, draws, side="right") - 1, return_inverse=True
        )
        ends, turns = self._draw_groups(groups), draws - self._groups.firsts[groups][rows]
        # One search in all groups: each has numbers of its own.
        numbers = (np.arange(len(groups), dtype=np.int64) << _COPY_BITS)[:, None] + ends
        slots = np.searchsorted(numbers.ravel(), turns + (rows << _COPY_BITS), side="right")
        slots -= rows * _GROUP
        layers, stored = np.divmod(groups[rows], self._num_groups)
        copies = layers + turns - np.where(slots > 0, ends[rows, slots - 1], 0)
        found[order] = stored * _GROUP + slots + copies * self.nsamples
        return found

    @cached_property
    def _groups(self) -> _Groups:
        """The groups of the epoch, drawn as wholes; at the first use, because lengths and states need none."""
        lengths = self._draw.lengths
        if self._num_layers < len(lengths):
            lengths = lengths.sum(axis=0)
        lengths = lengths.ravel()
        # Unless the order is random, neighbours would depend on each other: of two with 1/2 each, always one would come.
        places = np.flatnonzero(lengths)
        places = places[np.argsort(derive_keys(derive_key(self._key, _GROUP_ORDER), places))]
        ends = np.cumsum(lengths[places]) + derive_key(self._key, _OFFSET) % _ONE
        starts, firsts = np.zeros_like(lengths), np.zeros(len(lengths) + 1, dtype=np.int64)
        starts[places] = ends - lengths[places] & _ONE - 1
        firsts[1:][places] = starts[places] + lengths[places] >> _COPY_BITS
        return _Groups(starts, np.cumsum(firsts))

    def _draw_groups(self, groups: Ints) -> Ints:
        """Return how often the samples of some groups are drawn, each with those before it; shape (n, 64)."""
        layers, stored = np.divmod(groups, self._num_groups)
        lengths = self._draw.of_groups(layers, stored, self._num_layers)
        slots = np.arange(_GROUP, dtype=np.int64)
        keys = derive_keys(
            derive_key(self._key, _SAMPLE_ORDER), groups[:, None] * _GROUP + slots
        ).view(np.int64)
        # Sorting numbers that hold key and slot takes less time than an argsort.
        order = np.sort(keys & -_GROUP | slots, axis=1) & _GROUP - 1
        order += np.arange(len(groups))[:, None] * _GROUP
        marks = np.cumsum(lengths.ravel()[order], axis=1)
        marks += self._groups.starts[groups][:, None]
        marks >>= _COPY_BITS
        marks[:, 1:] -= marks[:, :-1]
        drawn = np.empty_like(marks)
        drawn.ravel()[order] = marks
        ends: Ints = np.cumsum(drawn, axis=1)
        return ends

    @cached_property
    def _layers(self) -> tuple[Ints, Ints, Ints]:
        """First draw, number of draws and random start of each layer, shape (layers,) each."""
        bounds = self._groups.firsts[:: self._num_groups]
        sizes, numbers = np.diff(bounds), np.arange(self._num_layers, dtype=np.int64)
        keys = derive_keys(derive_key(self._key, _LAYER_STARTS), numbers)
        starts = (keys % np.maximum(sizes, 1).astype(np.uint64)).astype(np.int64)
        return bounds[:-1], sizes, starts if self.order.shuffle else np.zeros_like(starts)

    def _before(self, cells: Ints) -> Ints:
        """Return how many places of each layer come before some cells, shape (layers, n)."""
        found: Ints = cells * self._layers[1][:, None] // self._cells
        return found

    def _draws_at(self, places: Ints) -> Ints:
        """Return the draws at places of the list, shape (n,)."""
        cells = places * self._cells // self.order.nsamples
        while (is_before := self._before(cells + 1).sum(axis=0) <= places).any():
            cells += is_before
        before = self._before(cells)
        ends = np.cumsum(self._before(cells + 1) - before, axis=0)
        turns = places - before.sum(axis=0)
        layers, rows = (turns >= ends).sum(axis=0), np.arange(len(places))
        turns -= np.where(layers > 0, ends[layers - 1, rows], 0)
        return self._moved(layers, before[layers, rows] + turns)

    def _places_of_draws(self, draws: Ints) -> Ints:
        """Return the places of draws in the list: the inverse of `_draws_at`."""
        firsts, sizes, _ = self._layers
        layers = np.searchsorted(firsts, draws, side="right") - 1
        turns = self._moved(layers, draws - firsts[layers], inverse=True) - firsts[layers]
        cells = ((turns + 1) * self._cells - 1) // np.maximum(sizes, 1)[layers]
        before, after = self._before(cells), self._before(cells + 1)
        is_earlier = np.arange(self._num_layers)[:, None] < layers
        places: Ints = np.where(is_earlier, after, before).sum(axis=0)
        return places + turns - before[layers, np.arange(len(draws))]

    def _moved(self, layers: Ints, turns: Ints, *, inverse: bool = False) -> Ints:
        """Return the draws of turns of layers: from the random start of the layer on; or the inverse of it, as a draw."""
        firsts, sizes, starts = self._layers
        moved = (turns + np.where(inverse, -starts, starts)[layers]) % np.maximum(sizes, 1)[layers]
        last = self._num_layers - 1
        if self.order.shuffle and self.passes > self._num_layers:
            # It may have several copies of a sample, which must not come together.
            of_last, key = layers == last, derive_key(self._key, _LAYER_STARTS, last)
            moved[of_last] = permute(turns[of_last], int(sizes[last]), key, inverse=inverse)
        return firsts[layers] + moved
