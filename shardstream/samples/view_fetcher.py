"""Read the samples of a view by a fetcher for each of its inner samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardstream.samples.base import Fetcher, FetchOptions, Samples
from shardstream.samples.mapped import Numbers

_MIN_PREFETCH_BYTES = 1 << 20  # of each inner fetcher
_MAX_WAITING = (
    1 << 20
)  # numbers (8 MB) that wait for a fetcher: more than 64 MiB of the smallest samples
_NONE: Numbers = np.empty(0, dtype=np.int64)


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
        plan = None if upcoming is None else _SharedPlan(upcoming, len(inner))
        self.fetchers: list[Fetcher] = []
        self._numbers_in = numbers_in
        for place, (one, weight) in enumerate(zip(inner, weights, strict=True)):
            budget = max(_MIN_PREFETCH_BYTES, int(options.prefetch_bytes * weight / total))
            own = None if plan is None else _own_groups(plan.groups(place), place, numbers_in)
            self.fetchers.append(one.open_fetcher(own, replace(options, prefetch_bytes=budget)))

    def request(self, numbers: Numbers) -> None:
        """Request samples of all fetchers, before one of them waits."""
        for place, fetcher in enumerate(self.fetchers):
            own = self._numbers_in(place, numbers)
            if len(own):
                fetcher.request(own)

    def prefetch(self) -> None:
        """Request the next samples of all fetchers."""
        for fetcher in self.fetchers:
            fetcher.prefetch()

    def stats(self) -> dict[str, float]:
        """Return the sums of the statistics of all fetchers."""
        found = [fetcher.stats() for fetcher in self.fetchers]
        names = dict.fromkeys(name for stats in found for name in stats)
        return {name: sum(stats.get(name, 0) for stats in found) for name in names}

    def close(self) -> None:
        """Close all fetchers."""
        for fetcher in self.fetchers:
            fetcher.close()


class _SharedPlan:
    """Groups of numbers that several fetchers take, each at its own pace.

    A fetcher that does not prefetch, such as one of local shards in memory, takes none: of what waits for it, only the last is kept. What
    a fetcher misses it reads when it is asked for.
    """

    def __init__(self, upcoming: Iterable[Numbers], count: int) -> None:
        self._upcoming = iter(upcoming)
        self._waiting: list[deque[Numbers]] = [deque() for _ in range(count)]
        self._held = [0] * count

    def groups(self, place: int) -> Iterator[Numbers]:
        """Yield the groups for one of the fetchers."""
        waiting = self._waiting[place]
        while True:
            while waiting:
                group = waiting.popleft()
                self._held[place] -= len(group)
                yield group
            group = next(self._upcoming, _NONE)
            if not len(group):
                return
            for other, queue in enumerate(self._waiting):
                queue.append(group)
                self._held[other] += len(group)
                while self._held[other] > _MAX_WAITING and len(queue) > 1:
                    self._held[other] -= len(queue.popleft())


def _own_groups(
    groups: Iterable[Numbers], place: int, numbers_in: Callable[[int, Numbers], Numbers]
) -> Iterator[Numbers]:
    for group in groups:
        numbers = numbers_in(place, group)
        if len(numbers):  # an empty group is the end
            yield numbers
