"""Datasets for tests, and wrappers that change the length of an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from shardstream.webdataset.utils import PipelineStage


class MockDataset(IterableDataset[Any]):
    """One sample, a number of times."""

    def __init__(self, sample: Any, length: int) -> None:
        self.sample = sample
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            yield self.sample


class with_epoch(IterableDataset[Any], PipelineStage):
    """A dataset with epochs of a given number of samples, which go on where the last one ended.

    Args:
        dataset: The dataset.
        length: Samples of an epoch.
    """

    def __init__(self, dataset: Iterable[Any], length: int) -> None:
        super().__init__()
        self.dataset = dataset
        self.length = length
        self.source: Iterator[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"source": None}  # an iterator cannot be pickled

    def __iter__(self) -> Iterator[Any]:
        return self.run(self.dataset)

    def run(self, dataset: Iterable[Any]) -> Iterator[Any]:
        """Yield the samples of the next epoch."""
        if self.source is None:
            self.source = iter(dataset)
        for _ in range(self.length):
            try:
                sample = next(self.source)
            except StopIteration:
                self.source = iter(dataset)
                try:
                    sample = next(self.source)
                except StopIteration:
                    return
            yield sample


class with_length(IterableDataset[Any], PipelineStage):
    """A dataset with a ``len``, which changes nothing else.

    Args:
        dataset: The dataset.
        length: Its length.
    """

    def __init__(self, dataset: Iterable[Any], length: int) -> None:
        super().__init__()
        self.dataset = dataset
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def run(self, dataset: Iterable[Any]) -> Iterator[Any]:
        """Return the samples of a dataset."""
        return iter(dataset)

    def __len__(self) -> int:
        return self.length
