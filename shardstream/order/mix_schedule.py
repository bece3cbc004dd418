"""Compute the source of each place of a mix, without stored state.

A stream is partitioned into patterns of equal length. In each pattern a source has its share of places, rounded so that rounding
errors never add up, and the places are permuted. Sources are evenly mixed at any scale, and a formula gives how often a source was
taken before any place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardstream.errors import OptionError
from shardstream.order.permutation import Ints, derive_keys, permute

_FRACTION_BITS = 20


class MixSchedule:
    """Assign sources to the places of a stream by weight.

    Args:
        weights: One for each source, 0 for one that is never taken; only their ratios count.
        key: Key of the permutations.

    Raises:
        OptionError: If a weight is negative, or all are 0.
    """

    def __init__(self, weights: Sequence[float], key: int) -> None:
        shares = np.asarray(weights, dtype=np.float64)
        if not np.isfinite(shares).all() or (shares < 0).any() or not (shares > 0).any():
            raise OptionError(
                f"weights must be finite, at least 0, and one of them above 0: {list(weights)}"
            )
        self.length = max(32, len(shares) ** 2)
        self._key = key
        self._largest = int(shares.argmax())
        self._rates = np.rint(shares / shares.sum() * self.length * (1 << _FRACTION_BITS)).astype(
            np.int64
        )
        if ((self._rates == 0) & (shares > 0)).any():
            raise OptionError(
                f"weights differ too much to be represented: {list(weights)}; leave out the smallest"
            )

    def assign_sources(self, places: Ints, streams: Ints) -> tuple[Ints, Ints]:
        """Return for each place of a stream its source, and how often that source was taken before.

        Args:
            places: Shape (n,), from 0.
            streams: Stream of each place, shape (n,); every stream has its own patterns.
        """
        pattern, slot = np.divmod(places, self.length)
        width = int(streams.max(initial=0)) + 1
        pairs, row = np.unique(pattern * width + streams, return_inverse=True)
        patterns, pair_streams = np.divmod(pairs, width)
        sources, occurrences = self._patterns(pair_streams, patterns)
        source: Ints = sources[row, slot]
        num_before: Ints = self._count_before(patterns)[row, source] + occurrences[row, slot]
        return source, num_before

    def find_places(self, sources: Ints, num_before: Ints, streams: Ints) -> Ints:
        """Return the places of streams at which sources are taken that were taken so often before: the inverse of `assign_sources`.

        Args:
            sources: Shape (n,); their weights are above 0.
            num_before: Shape (n,), from 0.
            streams: Shape (n,).
        """
        rates = self._rates.copy()
        rates[self._largest] = 0
        rates[self._largest] = (self.length << _FRACTION_BITS) - rates.sum()
        # Not below the pattern: of all but the largest source it is that; of the largest it may be one or two after it.
        pattern = ((num_before + 1 << _FRACTION_BITS) - 1) // rates[sources]
        rows = np.arange(len(sources))
        while (too_far := self._count_before(pattern)[rows, sources] > num_before).any():
            pattern -= too_far
        in_pattern, occurrences = self._patterns(streams, pattern)
        turns = num_before - self._count_before(pattern)[rows, sources]
        is_place = (in_pattern == sources[:, None]) & (occurrences == turns[:, None])
        places: Ints = pattern * self.length + is_place.argmax(axis=1)
        return places

    def counts(self, lengths: Ints, streams: Ints) -> Ints:
        """Return how often each source is taken in the first ``lengths`` places of streams, shape (n, sources)."""
        pattern, rest = np.divmod(lengths, self.length)
        sources, _ = self._patterns(streams, pattern)
        is_counted = np.arange(self.length) < rest[:, None]
        counts = self._count_before(pattern)
        for kind in range(len(self._rates)):
            counts[:, kind] += ((sources == kind) & is_counted).sum(axis=1)
        return counts

    def _patterns(self, streams: Ints, pattern: Ints) -> tuple[Ints, Ints]:
        """Return the source of every place of some patterns, and its earlier occurrences in the pattern: (n, length) each."""
        slots = np.tile(np.arange(self.length, dtype=np.int64), len(pattern))
        keys = np.repeat(derive_keys(self._key, streams, pattern), self.length)
        shuffled_slots = permute(slots, self.length, keys).reshape(len(pattern), self.length)
        ends = np.cumsum(self._count_before(pattern + 1) - self._count_before(pattern), axis=1)
        sources = (shuffled_slots[:, :, None] >= ends[:, None, :]).sum(axis=2)
        occurrences = np.empty_like(sources)
        for kind in range(len(self._rates)):
            is_kind = sources == kind
            occurrences[is_kind] = (np.cumsum(is_kind, axis=1) - 1)[is_kind]
        return sources, occurrences

    def _count_before(self, pattern: Ints) -> Ints:
        """Return how often each source is taken before a pattern begins, shape (n, sources)."""
        counts: Ints = (pattern[:, None] * self._rates) >> _FRACTION_BITS
        counts[:, self._largest] = 0
        counts[:, self._largest] = pattern * self.length - counts.sum(axis=1)
        return counts


class SteppedMixSchedule:
    """Assign sources to the places of lanes by weights that change with the batch.

    Places of a lane are counted from 0 in each segment, so that a segment has its exact shares from its first batch on.

    Args:
        segments: The first batch of each segment of an epoch, and its schedule; in order, the first from batch 0.
        lanes: Lanes of the epoch; batch t is the next one of lane t mod ``lanes``.
        batch: Samples of a batch.
    """

    def __init__(
        self, segments: Sequence[tuple[int, MixSchedule]], *, lanes: int, batch: int
    ) -> None:
        self._first_batches = np.array([first for first, _ in segments], dtype=np.int64)
        self._schedules = [schedule for _, schedule in segments]
        self._lanes, self._batch = lanes, batch
        numbers = np.arange(lanes, dtype=np.int64)
        # Both by segment and lane: its first place, and how often each source was taken before.
        self._starts = -((numbers - self._first_batches[:, None]) // lanes) * batch
        counts = [
            schedule.counts(length, numbers)
            for schedule, length in zip(
                self._schedules, np.diff(self._starts, axis=0), strict=False
            )
        ]
        self._before = np.cumsum([np.zeros_like(counts[0]), *counts], axis=0)

    def assign_sources(self, places: Ints, lanes: Ints) -> tuple[Ints, Ints]:
        """Return for each place of a lane its source, and how often that source was taken before; shape (n,) each."""
        batches = places // self._batch * self._lanes + lanes
        segments = np.searchsorted(self._first_batches, batches, side="right") - 1
        sources, num_before = np.empty_like(places), np.empty_like(places)
        for segment in np.unique(segments).tolist():
            own = segments == segment
            lane = lanes[own]
            sources[own], within = self._schedules[segment].assign_sources(
                places[own] - self._starts[segment, lane], lane
            )
            num_before[own] = within + self._before[segment, lane, sources[own]]
        return sources, num_before

    def find_places(self, sources: Ints, num_before: Ints, lanes: Ints) -> Ints:
        """Return the places of lanes at which sources are taken that were taken so often before; shape (n,)."""
        segments = (self._before[:, lanes, sources] <= num_before).sum(axis=0) - 1
        places = np.empty_like(num_before)
        for segment in np.unique(segments).tolist():
            own = segments == segment
            kinds, lane = sources[own], lanes[own]
            within = num_before[own] - self._before[segment, lane, kinds]
            places[own] = self._starts[segment, lane] + self._schedules[segment].find_places(
                kinds, within, lane
            )
        return places

    def counts(self, lengths: Ints, lanes: Ints) -> Ints:
        """Return how often each source is taken in the first ``lengths`` places of lanes, shape (n, sources)."""
        segments = (self._starts[:, lanes] <= lengths).sum(axis=0) - 1
        counts: Ints = self._before[segments, lanes]
        for segment in np.unique(segments).tolist():
            own = segments == segment
            rest = lengths[own] - self._starts[segment, lanes[own]]
            counts[own] += self._schedules[segment].counts(rest, lanes[own])
        return counts
