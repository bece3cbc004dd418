"""Datasets for tests, and wrappers that change the length of an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from webdataset import extradatasets as _theirs
from webdataset.extradatasets import MockDataset

from shardstream.webdataset.utils import PipelineStage


class with_epoch(_theirs.with_epoch, PipelineStage):
    """A dataset with epochs of a given number of samples, which go on where the last one ended.

    Args:
        dataset: The dataset.
        length: Samples of an epoch.
    """

    source: Iterator[Any] | None

    def __init__(self, dataset: Iterable[Any], length: int) -> None:
        super().__init__(dataset, length)
        self.dataset = dataset

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


class with_length(_theirs.with_length):
    """A dataset with a ``len``, which changes nothing else.

    Args:
        dataset: The dataset.
        length: Its length.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def run(self, dataset: Iterable[Any]) -> Iterator[Any]:
        """Return the samples of a dataset."""
        return iter(dataset)
