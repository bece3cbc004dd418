"""Mix the samples of several datasets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from shardstream.errors import OptionError


def round_robin_shortest(*sources: Iterator[Any]) -> Iterator[Any]:
    """Yield one item of each source in turn, until one has no more."""
    for source in itertools.cycle(sources):
        try:
            item = next(source)
        except StopIteration:
            return
        yield item


def round_robin_longest(*sources: Iterator[Any]) -> Iterator[Any]:
    """Yield one item of each source in turn, until none has more."""
    left, number = list(sources), 0
    while left:
        number %= len(left)
        try:
            item = next(left[number])
        except StopIteration:
            del left[number]
            continue
        number += 1
        yield item


class RoundRobin(IterableDataset[Any]):
    """Items of several datasets in turn.

    Args:
        datasets: The datasets.
        longest: Go on until all have ended; else the first that ends stops all.
    """

    def __init__(self, datasets: Sequence[Iterable[Any]], longest: bool = False) -> None:
        self.datasets = datasets
        self.longest = longest

    def __iter__(self) -> Iterator[Any]:
        sources = [iter(dataset) for dataset in self.datasets]
        return round_robin_longest(*sources) if self.longest else round_robin_shortest(*sources)


def random_samples(
    sources: Sequence[Iterator[Any]], probs: Sequence[float] | None = None, longest: bool = False
) -> Iterator[Any]:
    """Yield items of sources that are drawn by their weights."""
    left = list(sources)
    weights = [1.0] * len(left) if probs is None else list(probs)
    if len(weights) != len(left) or min(weights, default=0) < 0:
        raise OptionError(f"{len(left)} datasets need as many weights of at least 0, not {weights}")
    while left and sum(weights) > 0:
        (number,) = random.choices(range(len(left)), weights)
        try:
            item = next(left[number])
        except StopIteration:
            if not longest:
                return
            del left[number], weights[number]
            continue
        yield item


class RandomMix(IterableDataset[Any]):
    """Items of several datasets, drawn by weight.

    Args:
        datasets: The datasets.
        probs: Weight of each; None is equal weights.
        longest: Go on until all have ended; else the first that ends stops all.
    """

    def __init__(
        self,
        datasets: Sequence[Iterable[Any]],
        probs: Sequence[float] | None = None,
        longest: bool = False,
    ) -> None:
        self.datasets = datasets
        self.probs = probs
        self.longest = longest

    def __iter__(self) -> Iterator[Any]:
        return random_samples(
            [iter(dataset) for dataset in self.datasets], self.probs, self.longest
        )
