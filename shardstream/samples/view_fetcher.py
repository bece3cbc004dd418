"""Read the samples of a view by a fetcher for each of its inner samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from shardstream.samples.base import Fetcher, FetchOptions, Samples
from shardstream.samples.mapped import Numbers

_MIN_PREFETCH_BYTES = 1 << 20  # of each inner fetcher


class ViewFetcher(Fetcher):
    """Fetchers of inner samples, which prefetch by one plan and share its budget.

    Args:
        inner: The inner samples.
        weights: Share of each in the budget; only the ratios count.
        upcoming: Sample numbers of the view, as in `Samples.open_fetcher`.
        numbers_in: Returns the numbers that inner samples, given by their place, have for numbers of the view.
        options: Of all fetchers together.
    """

    def __init__(
        self,
        inner: Sequence[Samples],
        weights: Sequence[float],
        upcoming: Iterable[Numbers] | None,
        numbers_in: Callable[[int, Numbers], Numbers],
        options: FetchOptions,
    ) -> None:
        total = sum(weights) or 1.0
        groups = None if upcoming is None else itertools.tee(upcoming, len(inner))
        self.fetchers: list[Fetcher] = []
        for place, (one, weight) in enumerate(zip(inner, weights, strict=True)):
            budget = max(_MIN_PREFETCH_BYTES, int(options.prefetch_bytes * weight / total))
            own = None if groups is None else _own_groups(groups[place], place, numbers_in)
            self.fetchers.append(one.open_fetcher(own, replace(options, prefetch_bytes=budget)))

    def stats(self) -> dict[str, float]:
        """Return the sums of the statistics of all fetchers."""
        found = [fetcher.stats() for fetcher in self.fetchers]
        names = dict.fromkeys(name for stats in found for name in stats)
        return {name: sum(stats.get(name, 0) for stats in found) for name in names}

    def close(self) -> None:
        """Close all fetchers."""
        for fetcher in self.fetchers:
            fetcher.close()


def _own_groups(
    groups: Iterable[Numbers], place: int, numbers_in: Callable[[int, Numbers], Numbers]
) -> Iterator[Numbers]:
    for group in groups:
        numbers = numbers_in(place, group)
        if len(numbers):  # an empty group is the end
            yield numbers
