"""Where a chain begins: raw samples in the order of the plan, by number."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import cast

import numpy as np

from shardstream.catalog.concat_catalog import AnyCatalog
from shardstream.fetch.fetcher import Fetcher, MappedSamples, open_fetcher
from shardstream.format.columns import Columns, Samples
from shardstream.format.samples import Sample
from shardstream.order.partition import RankPartition
from shardstream.order.permutation import Ints
from shardstream.pipeline.bad_samples import SkipTracker
from shardstream.pipeline.stage import State

# Planned and parsed at a time, so that a sample costs a fraction of a microsecond of each; of what is parsed no more bytes, and of
# what is copied.
_CHUNK_SAMPLES, _FOUND_BYTES, _COPIED_BYTES = 16384, 64 << 20, 10 << 20
_CHUNK_STEPS = 1024


def worker_steps(partition: RankPartition, worker: int, num_workers: int, first: int = 0) -> range:
    """Return the steps that a worker takes, from its ``first``-th on."""
    return range(worker + first * num_workers, partition.num_steps, num_workers)


def plan_steps(partition: RankPartition, steps: range) -> Iterator[list[Ints]]:
    """Yield the sample numbers of the steps, an array a step, some steps at a time: one at first, to begin at once."""
    width = partition.config.microbatches * partition.plan.order.batch
    start, size = 0, 1
    while start < len(steps):
        yield partition.samples(_array(steps[start : start + size]))
        start, size = start + size, min(4 * size, max(1, _CHUNK_SAMPLES // width))


def _chunk_steps(steps: list[Ints], most: int) -> Iterator[list[Ints]]:
    """Yield some steps at a time, of so many samples at most."""
    size = max(1, most // max(1, len(steps[-1])))
    return (steps[first : first + size] for first in range(0, len(steps), size))


def group_by_window(partition: RankPartition, steps: range) -> Iterator[Ints]:
    """Yield the sample numbers of these steps again, grouped by window: what is worth reading together, in order of first need."""
    plan, lanes = partition.plan, partition.plan.order.lanes
    reached: dict[int, int] = {}  # lane -> its last window
    full = range(steps.start, min(steps.stop, partition.full_steps), steps.step)
    for start in range(0, len(full), _CHUNK_STEPS):
        numbers = partition.batches(_array(full[start : start + _CHUNK_STEPS])).ravel()
        windows = plan.windows(numbers)
        for window in windows[np.sort(np.unique(windows, return_index=True)[1])].tolist():
            lane = window % lanes if plan.order.shuffle else 0
            if window <= reached.get(lane, -1):
                continue
            reached[lane] = window
            mine = partition.steps_of_window(window)
            mine = mine[(mine >= full.start) & (mine < full.stop)]  # the rest is in the tail
            mine = mine[(mine - full.start) % full.step == 0]
            batches = partition.batches(mine).ravel()
            yield plan.batches(batches[plan.windows(batches) == window]).ravel()
    if len(full) < len(steps):
        yield partition.tail()


def _array(steps: range) -> Ints:
    return np.arange(steps.start, steps.stop, steps.step, dtype=np.int64)


def _read(fetcher: Fetcher, steps: list[Ints], most: int) -> Iterator[tuple[list[int], Samples]]:
    """Yield numbers and samples of each step; no more samples than ``most``, or a step, are copied at a time."""
    found = fetcher.find(np.concatenate(steps))
    if found is not None:
        yield from _split_by_step(steps, found)
        return
    for some in _chunk_steps(steps, most):
        samples = fetcher.samples(np.concatenate(some))
        yield from _split_by_step(some, samples)
        del samples  # before the next are read


def _split_by_step(
    steps: list[Ints], samples: Samples | MappedSamples
) -> Iterator[tuple[list[int], Samples]]:
    first = 0
    for numbers in steps:
        yield numbers.tolist(), samples[first : first + len(numbers)]
        first += len(numbers)


class IndexedRun:
    """Raw samples of one reader, in the order of the plan.

    Args:
        catalog: The dataset.
        partition: The rank's steps.
        worker: Which worker of the rank.
        num_workers: Of how many.
        skips: What becomes of damaged samples.
        prefetch_bytes: How much to hold, or have asked for, before it is used.
        hedge: Ask a second time where an answer is late.
    """

    def __init__(  # noqa: PLR0913
        self,
        catalog: AnyCatalog,
        partition: RankPartition,
        *,
        worker: int,
        num_workers: int,
        skips: SkipTracker,
        prefetch_bytes: int,
        hedge: bool = False,
    ) -> None:
        self.number = -1
        self._catalog, self._partition = catalog, partition
        self._worker, self._num_workers = worker, num_workers
        self._skips = skips
        self._prefetch_bytes, self._hedge = prefetch_bytes, hedge
        self._taken = 0
        self._fetcher: Fetcher | None = None
        self._samples: Generator[tuple[int, Sample], None, None] | None = None

    def __iter__(self) -> IndexedRun:
        return self

    def __next__(self) -> Sample:
        if self._samples is None:
            self._samples = self._read_samples()
        self.number, sample = next(self._samples)
        return sample

    def steps(self) -> Iterator[tuple[list[int], Sequence[Sample]]]:
        """Yield the numbers and samples of each step, from the position on; damaged samples are left out of both."""
        for numbers, found in self._open():
            kept: list[int] = numbers
            samples = cast("list[Sample]", found)
            if not isinstance(found, Columns) and list(map(type, found)).count(dict) < len(found):
                kept, samples = [], []
                for number, sample in zip(numbers, found, strict=True):
                    if isinstance(sample, Exception):
                        self._skips.skip_or_raise(sample, number=number)
                    else:
                        kept.append(number)
                        samples.append(sample)
            self._taken += len(numbers)
            yield kept, samples
            del found, samples  # before the next are read: batches of photos are many MB

    def costs(self) -> dict[str, float]:
        """Return what its reading has cost so far, as `Fetcher.stats`."""
        return {} if self._fetcher is None else self._fetcher.stats()

    def state_dict(self) -> State:
        """Return how many of its samples this reader is past."""
        return {"taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        """Go behind the first ``taken`` samples of this reader."""
        self.close()
        self._taken = state["taken"]

    def close(self) -> None:
        """Close files and threads."""
        if self._samples is not None:
            self._samples.close()
        self._samples = None
        if self._fetcher is not None:
            self._fetcher.close()
        self._fetcher = None

    def _open(self) -> Generator[tuple[list[int], Samples], None, None]:
        """Start reading at the position; yield numbers and samples of each step."""
        width = self._partition.config.microbatches * self._partition.plan.order.batch
        first, within = divmod(self._taken, width)
        steps = worker_steps(self._partition, self._worker, self._num_workers, first)
        ahead = group_by_window(self._partition, steps)
        if within:  # what a resume passes over in its first step is not fetched
            passed = next(plan_steps(self._partition, steps))[0][:within]
            ahead = (kept for numbers in ahead if len(kept := numbers[~np.isin(numbers, passed)]))
        catalog = self._catalog
        mean_bytes = max(1, catalog.total_bytes) / max(1, len(catalog))
        self._fetcher = open_fetcher(
            catalog, ahead, prefetch_bytes=self._prefetch_bytes, hedge=self._hedge
        )
        with closing(self._fetcher) as fetcher:
            for chunk in plan_steps(self._partition, steps):
                chunk[0], within = chunk[0][within:], 0
                for some in _chunk_steps(chunk, int(_FOUND_BYTES / mean_bytes)):
                    yield from _read(fetcher, some, int(_COPIED_BYTES / mean_bytes))
        catalog.check_manifests()

    def _read_samples(self) -> Generator[tuple[int, Sample], None, None]:
        for numbers, found in self._open():
            for number, sample in zip(numbers, found, strict=True):
                self._taken += 1
                if isinstance(sample, Exception):
                    self._skips.skip_or_raise(sample, number=number)
                else:
                    yield number, sample
