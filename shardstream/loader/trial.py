"""Measure how fast a dataset is read on this machine, with different numbers of workers."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardstream.errors import OptionError, SampleError
from shardstream.loader.dataset import StreamDataset
from shardstream.loader.loader import ShardLoader
from shardstream.loader.stats import LoaderStats

_CLOSE = 0.95
"""Share of the best rate that fewer workers must reach to be recommended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What was measured with a number of workers.

    Args:
        workers: Worker processes; 0 reads in the main process.
        samples_per_s: After the first batch.
        mb_per_s: Of tar members, by their mean size; None if that is unknown.
        first_batch_s: Seconds until the first batch, with the start of the workers.
        stats: Timings of the last epoch.
        bad_samples: Samples that could not be read or decoded, and were skipped.
    """

    workers: int
    samples_per_s: float
    mb_per_s: float | None
    first_batch_s: float
    stats: LoaderStats
    bad_samples: int = 0


def run_trials(
    dataset: StreamDataset, *, workers: Sequence[int], batch_size: int, seconds: float
) -> Iterator[Trial]:
    """Read a dataset with each number of workers in turn, each from the start of another epoch.

    Samples that cannot be collated are put into lists.

    Args:
        dataset: The dataset with its steps.
        workers: Numbers of workers.
        batch_size: Samples of a batch.
        seconds: Time for each of them, after the first batch.

    Raises:
        OptionError: If there are fewer samples than a batch has.
    """
    epochs = itertools.count()
    for number in workers:
        with warnings.catch_warnings():
            # torch's, about more workers than cores: the numbers show whether they help.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            run = partial(_run, dataset, number, epochs, batch_size=batch_size, seconds=seconds)
            try:
                trial = run()
            except SampleError:  # samples of different sizes: a training has steps that resize them
                trial = run(collate_fn=list)
            yield trial


def fewest_workers(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the fewest workers that is about as fast as the fastest."""
    best = max(trial.samples_per_s for trial in trials)
    good = [trial for trial in trials if trial.samples_per_s >= _CLOSE * best]
    return min(good, key=lambda trial: trial.workers)


def _run(
    dataset: StreamDataset,
    workers: int,
    epochs: Iterator[int],
    *,
    batch_size: int,
    seconds: float,
    **options: Any,
) -> Trial:
    if workers:
        options["persistent_workers"] = True
    loader = ShardLoader(dataset, batch_size, num_workers=workers, drop_last=True, **options)
    begin = time.perf_counter()
    started = first_s = 0.0
    batches = 0
    while True:
        loader.set_epoch(next(epochs))
        before = batches
        for _ in loader:
            batches += 1
            if not first_s:
                started = time.perf_counter()
                first_s = started - begin
            if time.perf_counter() - started > seconds:
                break
        if not first_s:
            bad = loader.bad_samples
            found = f", and {len(bad)} bad ones, such as: {bad[0].error}" if bad else ""
            raise OptionError(f"the dataset has fewer samples than a batch of {batch_size}{found}")
        passed = time.perf_counter() - started
        if passed > seconds or batches == before:
            break
    rate, source = (batches - 1) * batch_size / passed, dataset.pipeline.indexed_source
    mean_bytes = None if source is None else source.samples.total_bytes / len(source.samples)
    return Trial(
        workers=workers,
        samples_per_s=rate,
        mb_per_s=None if mean_bytes is None else rate * mean_bytes / 1e6,
        first_batch_s=first_s,
        stats=loader.stats(),
        bad_samples=len(loader.bad_samples),
    )
