"""ShardMapDataset: the same shards by number, for samplers, subsets and splits."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, overload

import numpy as np
from torch.utils.data import Dataset

from shardstream.errors import OptionError
from shardstream.format.group import Sample
from shardstream.read.pipeline import Pipeline
from shardstream.read.planned import Options, PlannedSamples
from shardstream.read.skip import Skips
from shardstream.read.stage import ItemStage, Stage, check_epoch
from shardstream.read.steps import ItemSteps
from shardstream.storage.cache import open_cache
from shardstream.storage.catalog import Catalog, Numbers
from shardstream.storage.fetch import Fetcher, open_fetcher
from shardstream.storage.filesystem import Storage
from shardstream.storage.locate import Urls, locate
from shardstream.storage.objects import ObjectCatalog
from shardstream.storage.verified import Verify


class NumberedDataset(ItemSteps, Dataset[Any]):
    """Samples by number, of shards or of loose files.

    Args:
        catalog: The samples.
        seed: For ``map(rng=True)``.
    """

    def __init__(self, catalog: Catalog | ObjectCatalog, *, seed: int) -> None:
        self._catalog = catalog
        self._numbers: Numbers | range = range(len(catalog))
        self._pipeline = Pipeline(
            source=PlannedSamples(catalog=catalog, options=Options(seed=seed))
        )
        self._fetcher: Fetcher | None = None
        self._pid = os.getpid()
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> Any:
        """Return a sample; for a slice a dataset of its samples, nothing of which is read yet.

        Raises:
            IndexError: If there is no such sample.
        """
        if isinstance(index, slice):
            part = self._copy()
            part._numbers = self._numbers[index]
            return part
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples in the order asked; torch's ``DataLoader`` asks for a batch at a time."""
        size = len(self)
        for index in indices:
            if not -size <= index < size:
                raise IndexError(f"sample numbers go from {-size} to {size - 1}, asked for {index}")
        numbers = np.array([self._numbers[index] for index in indices], dtype=np.int64)
        unique, back = np.unique(numbers, return_inverse=True)
        raw = [_sound(sample) for sample in self._open().samples(unique)]
        chain = self._pipeline.chain(self.epoch, Skips())
        try:
            items, _ = chain(
                [raw[place] if unique.size == numbers.size else dict(raw[place]) for place in back],
                numbers.tolist(),
            )
        finally:
            chain.close()
        return list(items)

    def _open(self) -> Fetcher:
        if (
            self._fetcher is None or self._pid != os.getpid()
        ):  # a forked worker has none of its parent's threads
            # What to read is said batch by batch: no read-ahead.
            self._fetcher, self._pid = (
                open_fetcher(self._catalog, (), prefetch_bytes=0),
                os.getpid(),
            )
        return self._fetcher

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that ``map(rng=True)`` draws for; call it before the loader starts its workers."""
        self.epoch = check_epoch(epoch)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fetcher": None}

    @property
    def _num_stages(self) -> int:
        return len(self._pipeline.stages)

    def _then(self, stage: Stage) -> Self:
        if not isinstance(stage, ItemStage):
            raise OptionError(
                f"a dataset by number has no {type(stage).__name__}: it would change what the numbers mean"
            )
        changed = self._copy()
        changed._pipeline = self._pipeline.then(stage)
        return changed

    def _copy(self) -> Self:
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__getstate__())
        return changed


class ShardMapDataset(NumberedDataset):
    """Samples of tar shards by number: ``ds[i]``, ``ds[-1]``, ``ds[10:20]``, ``len(ds)``.

    For torch's ``DataLoader`` with a sampler (``DistributedSampler``, ``WeightedRandomSampler``), ``Subset`` and
    ``random_split``. A batch is fetched with few range reads of neighbouring samples. `ShardDataset` reads faster where a
    sampler is not needed: it knows what comes next.

    Args:
        urls: As in `ShardDataset`; every shard needs an index, or lies on this machine.
        seed: For ``map(rng=True)``.
        storage_options: For fsspec.
        filesystem: An fsspec file system to use instead.
        cache_dir: A folder on a local disk that keeps what is read from afar, for later epochs and other processes.
        cache_bytes: How much it may keep, e.g. "200GB"; by default what leaves a tenth of the disk free.
        verify: As in `ShardDataset`.

    Raises:
        OptionError: If a shard has no index and is not local.
        StorageError: If nothing is there, or it is out of reach.
    """

    def __init__(  # noqa: PLR0913  (the public door)
        self,
        urls: Urls,
        *,
        seed: int = 0,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        verify: Verify | None = None,
    ) -> None:
        storage = Storage(storage_options, filesystem, open_cache(cache_dir, cache_bytes))
        super().__init__(Catalog(locate(urls, storage), storage, verify), seed=seed)


def _sound(sample: Sample | Exception) -> Sample:
    if isinstance(sample, Exception):
        raise sample
    return sample
