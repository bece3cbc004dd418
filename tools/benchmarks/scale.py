"""Row `scale`: cost of planning, from 10^4 to 10^10 samples."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from benchmarks.case import Case, Result
from shardstream.order import (
    EpochOrder,
    EpochPlan,
    PartitionConfig,
    RankPartition,
    default_block,
    default_window,
)

_BATCH = 64
_SAMPLE_BYTES = 100_000
_SHARDS = 100_000


def median_s(work: Callable[[], object], rounds: int = 30) -> float:
    """Return seconds: the median of some rounds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(case: Case) -> Result:
    """Time plan and partition in the middle of an epoch: the cost of a start or a resume.

    "batch_s" is one batch, "batch_of_64_s" one of 64 that are planned together (as the reader does), "peak_bytes" what all of it
    took.
    """
    nsamples = case.samples
    order = EpochOrder(
        nsamples=nsamples,
        batch=_BATCH,
        shuffle=True,
        seed=0,
        lanes=512,
        window=default_window(nsamples, nsamples * _SAMPLE_BYTES, _BATCH),
        block=default_block(nsamples, nsamples * _SAMPLE_BYTES),
    )
    # as in the catalog: one number per shard
    firsts = np.linspace(0, nsamples, _SHARDS + 1).astype(np.int64)

    def start() -> RankPartition:
        consumed = order.num_batches // 2 * _BATCH
        return RankPartition(
            EpochPlan(order, 3), PartitionConfig(world_size=64), rank=7, consumed=consumed
        )

    partition = start()
    some = np.arange(64) % max(1, partition.full_steps // 2) + partition.full_steps // 2
    tracemalloc.start()
    numbers = start().samples(some)
    np.searchsorted(firsts, np.concatenate(numbers), side="right")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Result(
        seconds=median_s(start),
        samples=nsamples,
        extra={
            "batch_s": median_s(lambda: partition.samples(some[:1])),
            "batch_of_64_s": median_s(lambda: partition.samples(some)) / 64,
            "peak_bytes": peak,
        },
    )
