"""Mix the samples of several datasets, by webdataset's classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from webdataset import mix as _theirs
from webdataset.mix import RoundRobin, random_samples, round_robin_longest, round_robin_shortest

from shardstream.errors import OptionError


class RandomMix(_theirs.RandomMix):
    """Items of several datasets, drawn by weight.

    Args:
        datasets: The datasets.
        probs: Weight of each; None is equal weights.
        longest: Go on until all have ended; else the first that ends stops all.

    Raises:
        OptionError: If the weights do not fit the datasets: webdataset would leave some out, or draw those of weight 0.
    """

    def __init__(
        self,
        datasets: Sequence[Iterable[Any]],
        probs: Sequence[float] | None = None,
        longest: bool = False,
    ) -> None:
        if probs is not None and (len(probs) != len(datasets) or not all(p > 0 for p in probs)):
            raise OptionError(
                f"RandomMix needs a weight above 0 for each of {len(datasets)} datasets, not {list(probs)}"
            )
        super().__init__(datasets, probs, longest)
