"""What planning costs: time and memory of one batch, from 10^6 to 10^10 samples in 100,000 shards.

    python tools/bench_plan.py

Prints for each size: building plan and share from nothing (what a start or a resume costs), one batch, one batch when 64 are
planned at a time (as the reader does), and the peak of memory that all of it took. Medians.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from shardstream.read.plan import Order, Plan, default_block, default_window
from shardstream.read.share import Share, Split

_BATCH = 64
_SAMPLE_BYTES = 100_000
_SHARDS = 100_000


def median_ms(work: Callable[[], object], rounds: int = 30) -> float:
    """Return milliseconds: the median of some rounds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def measure(nsamples: int) -> str:
    """Return the row of one size."""
    order = Order(
        nsamples=nsamples,
        batch=_BATCH,
        shuffle=True,
        seed=0,
        lanes=512,
        window=default_window(nsamples, nsamples * _SAMPLE_BYTES, _BATCH),
        block=default_block(nsamples, nsamples * _SAMPLE_BYTES),
    )
    firsts = np.linspace(0, nsamples, _SHARDS + 1).astype(
        np.int64
    )  # what the catalog holds: one number a shard

    def start() -> Share:
        return Share(
            Plan(order, 3), Split(world_size=64), rank=7, consumed=order.num_batches // 2 * _BATCH
        )

    share = start()
    some = np.arange(64) + share.full_steps // 2
    tracemalloc.start()
    numbers = start().samples(some)
    np.searchsorted(firsts, np.concatenate(numbers), side="right")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    single, many = (
        median_ms(lambda: share.samples(some[:1])),
        median_ms(lambda: share.samples(some)) / 64,
    )
    return f"{nsamples:16,}{median_ms(start):12.3f}{single:12.3f}{many:16.4f}{peak / 1e6:12.2f}"


def main() -> None:
    """Measure and print."""
    print(f"{'samples':>16}{'start ms':>12}{'batch ms':>12}{'of 64: ms each':>16}{'peak MB':>12}")
    for exponent in (6, 9, 10):
        print(measure(10**exponent))


if __name__ == "__main__":
    main()
