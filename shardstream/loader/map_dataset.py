"""Map-style datasets: samples by number, for samplers, subsets and splits."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple, Self, overload
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import Dataset

from shardstream.catalog import ClassNames
from shardstream.display import SampleView, samples_html
from shardstream.distributed import Placement
from shardstream.errors import OptionError
from shardstream.loader.epochs import Epochs
from shardstream.loader.steps import ItemSteps
from shardstream.pipeline import (
    Decode,
    IndexedSource,
    ItemStage,
    KeepFields,
    MapDict,
    MixIndexedSource,
    OpenFields,
    Pipeline,
    Records,
    Rename,
    Runner,
    SamplesSource,
    Select,
    SkipTracker,
    Stage,
    ToTuple,
    check_epoch,
    check_stage,
    records_of,
)
from shardstream.process import new_lock
from shardstream.samples import Fetcher, Numbers, Samples, Subset

# 16 MiB; more samples share them, and then draw by the order of reading, too; after `set_epoch` they must not.
MAX_COUNTERS = 1 << 22

_NEVER_DRAW = (Decode, KeepFields, MapDict, OpenFields, Rename, Select, ToTuple)

_opening = new_lock()


class _Opened(NamedTuple):
    """Fetcher and steps of a dataset in one process and epoch."""

    pid: int
    epoch: int
    fetcher: Fetcher
    runner: Runner


class MapDataset(ItemSteps, Dataset[Any]):
    """Samples of a dataset by number, as `by_number` returns them: ``ds[i]``, ``ds[-1]``, ``ds[10:20]``, ``len(ds)``.

    For torch's ``DataLoader`` with a sampler (``DistributedSampler``, ``WeightedRandomSampler``), ``Subset`` and ``random_split``. A batch is
    fetched with few range reads of neighbouring samples; of loose files with 32 requests in flight. Thread-safe if the user's functions are.

    Args:
        pipeline: Samples and steps; a step gives one item for each.
        class_names: Names of the classes.
        epoch: Epoch of ``map(rng=True)``.

    Raises:
        OptionError: If the samples of the pipeline have no numbers.
    """

    _parent: MapDataset | None = None
    """Held, so that the parents of a dataset find it as long as it is used."""
    _children: WeakSet[MapDataset] | None = None

    def __init__(self, pipeline: Pipeline, class_names: ClassNames, *, epoch: int = 0) -> None:
        source = _numbered_source(pipeline)
        self._all_samples, self._is_new_each_epoch = source.samples, source.is_new_each_epoch
        self._numbers: Numbers | range = range(len(source.samples))
        self._pipeline = replace(pipeline, source=source, on_error="raise")
        self._class_names = class_names
        self._opened: _Opened | None = None
        self._epochs = Epochs(epoch)  # persistent workers must see `set_epoch`
        # Datasets of a mix, and the samples of rows, may have steps of their own.
        draws = not isinstance(source, SamplesSource) or any(map(_may_draw, pipeline.stages))
        # In shared memory: new workers must see what earlier ones have read.
        self._reads = _new_counters(len(source.samples)) if draws else None
        self._parent_placement = Placement()  # of the process that spawned this one

    @property
    def samples(self) -> Samples:
        """The samples by number, without the steps, for views over them and `CatalogDataset`."""
        if isinstance(self._numbers, range) and len(self) == len(self._all_samples):
            return self._all_samples
        return Subset(self._all_samples, np.asarray(self._numbers))

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, as `ShardDataset.classes`.

        Raises:
            StorageError: If a folder cannot be read.
        """
        return self._class_names.names

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        chosen = "" if len(self) == len(self._all_samples) else f", {len(self):,} chosen"
        steps = "".join(f" > {step.partition('(')[0]}" for step in self._pipeline.steps)
        return f"{type(self).__name__}({self._all_samples.summary}{chosen}){steps}"

    def _repr_html_(self) -> str:
        return samples_html(type(self).__name__, self._all_samples, self._numbers, self._pipeline)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> Any:
        """Return a sample, which shows itself in a notebook; for a slice, a lazy dataset of its samples.

        Raises:
            IndexError: If there is no such sample.
            SampleError: If it is bad, or a ``select`` refuses it.
        """
        if isinstance(index, slice):
            part = self._copy()
            part._numbers = self._numbers[index]
            return part
        item = self.__getitems__([operator.index(index)])[0]
        return SampleView(item) if type(item) is dict else item

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples in the order of ``indices``; torch's ``DataLoader`` calls it once per batch."""
        size = len(self)
        for index in indices:
            if not -size <= index < size:
                raise IndexError(f"sample number {index} is not from {-size} to {size - 1}")
        numbers = np.array([self._numbers[index] for index in indices], dtype=np.int64)
        unique, inverse = np.unique(numbers, return_inverse=True)
        opened = self._open()
        if self._is_new_each_epoch:  # the rows of an epoch are copies
            unique += opened.epoch * len(self._all_samples)
        raw = list(opened.fetcher.samples(unique))
        samples = [raw[place] for place in inverse]
        if unique.size < numbers.size:  # steps may change a sample
            samples = [dict(one) if isinstance(one, dict) else one for one in samples]
        items, _ = opened.runner(samples, self._count_reads(numbers.tolist()))
        return list(items)

    def _count_reads(self, numbers: list[int]) -> list[int]:
        """Return numbers for the random generators: a sample that is read again gets another, as in a mix."""
        sets_epoch = self._epochs.chosen[1] > 0
        if self._reads is None or (sets_epoch and len(self._reads) < len(self._all_samples)):
            return numbers
        # Without set_epoch a sample that another rank read in the epoch before is new here.
        ranks = Placement() if sets_epoch else self._placement()
        reads, turns = self._reads.numpy(), []
        with _opening:  # threads share the counters
            for number in numbers:
                turns.append(int(reads[number % len(reads)]))
                reads[number % len(reads)] += 1
        return [
            number + (turn * ranks.world_size + ranks.rank) * len(self._all_samples)
            for number, turn in zip(numbers, turns, strict=True)
        ]

    def _placement(self) -> Placement:
        """Return the rank of this process; a spawned worker has no process group, so that of its parent."""
        found = Placement.detect()
        return found if found.world_size > 1 else self._parent_placement

    def _open(self) -> _Opened:
        """Open the fetcher and steps of this process and epoch; threads share them."""
        pid, epoch, opened = os.getpid(), self.epoch, self._opened
        if opened is not None and (opened.pid, opened.epoch) == (pid, epoch):
            return opened
        with _opening:
            opened = self._opened
            # A forked worker has none of its parent's threads.
            if opened is None or opened.pid != pid:
                fetcher = self._all_samples.open_fetcher()
            elif opened.epoch == epoch:  # another thread was first
                return opened
            else:
                fetcher = opened.fetcher
            # Kept open, because steps may own threads: starting four takes three times as long as decoding a small image.
            runner = self._pipeline.open_runner(epoch, SkipTracker(can_refuse=False))
            opened = self._opened = _Opened(pid, epoch, fetcher, runner)
            return opened

    def records(self) -> Records:
        """Return the samples in the order of their numbers, with the steps, as `ss.reshard` writes them.

        Raises:
            OptionError: If the samples are loose files, or a step returns no dict.
        """
        found = records_of(self._pipeline, self._class_names.checked_names, self.epoch)
        return replace(found, samples=self.samples)

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    @property
    def epoch(self) -> int:
        """The epoch of ``map(rng=True)``, from 0."""
        return self._epochs.chosen[0]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of ``map(rng=True)``, and of rows that differ in each, also in persistent workers and in datasets chained from this one.

        The random numbers of a sample depend on seed, epoch, sample and the times that it was read since this call: they are the
        same on every number of ranks and workers, and after a restart. Without this call each epoch has new ones, too.
        What persistent workers had prefetched of an epoch that was stopped early counts as read. Over 4 million samples the times
        do not count after this call.
        """
        self._epochs.set_epoch(check_epoch(epoch))
        if self._reads is not None:
            self._reads.zero_()
        for child in list(self._children or ()):
            child.set_epoch(epoch)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_opened": None, "_parent": None, "_children": None}
        if get_spawning_popen() is not None:
            return state | {"_parent_placement": self._placement()}
        return state | {"_epochs": copy.copy(self._epochs), "_reads": copy.deepcopy(self._reads)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._reads is not None:
            self._reads.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def _num_stages(self) -> int:
        return self._pipeline.num_steps

    def then(self, stage: Stage) -> Self:
        """Append a custom stage that yields one item per item, see `ItemSteps.then`."""
        check_stage(stage)
        if not isinstance(stage, ItemStage):
            raise OptionError(
                f"samples by number cannot use {type(stage).__name__}: it would change their numbers; "
                "leave by_number() out"
            )
        changed = self._copy()
        changed._pipeline = self._pipeline.then(stage)
        if changed._reads is None and _may_draw(stage):
            changed._reads = _new_counters(len(self._all_samples))
        return changed

    def _copy(self) -> Self:
        changed = copy.copy(self)
        if changed._reads is not None:
            changed._reads.zero_()
        if self._children is None:
            self._children = WeakSet()
        changed._parent = self
        self._children.add(changed)
        return changed


def _numbered_source(pipeline: Pipeline) -> IndexedSource:
    """Return the source of a pipeline whose items have the numbers of its samples, without shuffle.

    Raises:
        OptionError: If they have none.
    """
    source = pipeline.source_by_number(
        "these samples have no numbers", "leave it out, or choose samples with where= or subset="
    )
    if source.draws:
        raise OptionError(
            "weights draw the samples of an epoch, so these have no numbers; leave weights out, and give torch's DataLoader a WeightedRandomSampler"
        )
    return source if isinstance(source, MixIndexedSource) else replace(source, shuffle=False)


def _may_draw(stage: Stage) -> bool:
    """Return whether a step may use random numbers; own stages may."""
    return bool(getattr(stage, "rng", not isinstance(stage, _NEVER_DRAW)))


def _new_counters(samples: int) -> torch.Tensor:
    """Return counters in shared memory, shape (min(samples, 2**22),), int32."""
    counters = torch.zeros(min(samples, MAX_COUNTERS), dtype=torch.int32, device="cpu")
    counters.share_memory_()  # type: ignore[no-untyped-call]
    return counters
