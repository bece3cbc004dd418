"""Grain with shardstream's samples by number: its numbers are shuffled and batched, and a batch is read at once."""

from __future__ import annotations

import grain

import shardstream as ss
from benchmarks.case import Case, Epochs
from benchmarks.loaders import collate, keep
from benchmarks.peers.grain import epochs_of

FORMAT = "tar"


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    samples, make = ss.ShardDataset(case.location).by_number(), collate(case)
    numbers = grain.MapDataset.range(len(samples)).shuffle(seed=0)
    batches = numbers.batch(case.batch_size, batch_fn=keep).map(samples.__getitems__).map(make)
    return epochs_of(batches, case)
