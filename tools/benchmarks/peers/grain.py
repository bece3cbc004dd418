"""Grain with its own reader: ArrayRecord files of pickled samples, a global shuffle, batches.

Records are compressed in groups of one, as random access needs. An endless pipeline keeps its processes from epoch to epoch; without
workers this thread reads, which is faster here than Grain's 16 threads.
"""

from __future__ import annotations

import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import grain
from array_record.python.array_record_data_source import ArrayRecordDataSource

from benchmarks.case import Case, Epochs
from benchmarks.loaders import collate

FORMAT = "grain"


def epochs_of(batches: Any, case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch from a map of all."""
    endless = batches.repeat().to_iter_dataset(grain.ReadOptions(0, 0))
    if case.workers:
        endless = endless.mp_prefetch(grain.MultiprocessingOptions(case.workers, case.prefetch))
    running = iter(endless)
    return lambda _: islice(running, len(batches))


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    files = sorted(map(str, Path(case.location).glob("*.array_record")))
    samples = grain.MapDataset.source(ArrayRecordDataSource(files)).shuffle(seed=0)
    batches = samples.map(pickle.loads).batch(case.batch_size, batch_fn=collate(case))
    return epochs_of(batches, case)
