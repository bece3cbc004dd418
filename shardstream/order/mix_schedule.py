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
        pairs, row = np.unique(np.stack((streams, pattern)), axis=1, return_inverse=True)
        sources, occurrences = self._patterns(pairs[0], pairs[1])
        source: Ints = sources[row, slot]
        num_before: Ints = self._count_before(pairs[1])[row, source] + occurrences[row, slot]
        return source, num_before

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
