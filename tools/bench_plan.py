"""Measure how long a plan takes to say which samples come at a step, and when a sample comes, of datasets of any size.

    python tools/bench_plan.py [--samples 10000000000]

Nothing is stored: the samples are numbers. Medians of many calls in one process, each for another step or sample; two workers and batches
of 64. Weights and costs are arrays of one number for each sample, so these rows are of 10^7 samples at most.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import numpy as np

import shardstream as ss
from shardstream.loader import CatalogDataset
from shardstream.samples import Fetcher, FetchOptions, Numbers, Samples

_CALLS, _MOST_S = 300, 5.0
_MOST_NUMBERS = 10**7
_SAMPLE_BYTES = 100_000


class NumberedSamples(Samples):
    """Samples that are numbers, and cannot be read.

    Args:
        count: Their number.
    """

    num_shards, fingerprint = 1, "0" * 16

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @property
    def total_bytes(self) -> int:
        """Bytes of all samples."""
        return self._count * _SAMPLE_BYTES

    def url_of(self, shard: int) -> str:
        """Return a URL."""
        return f"{shard}.tar"

    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return zeros."""
        return np.zeros_like(numbers)

    def open_fetcher(
        self, upcoming: Iterable[Numbers] | None = None, options: FetchOptions | None = None
    ) -> Fetcher:
        """Refuse to read."""
        raise NotImplementedError


def numbered(count: int, **options: Any) -> CatalogDataset:
    """Return a shuffled dataset of so many samples."""
    return CatalogDataset(NumberedSamples(count), shuffle=True, seed=1, **options)


def datasets(count: int) -> dict[str, Any]:
    """Return datasets of so many samples by what is special about them."""
    weights = {"web": 3.0, "code": 1.0}
    parts = {"web": numbered(count), "code": numbered(count // 3)}
    some = np.random.default_rng(2).random(min(count, _MOST_NUMBERS)) ** 2
    return {
        "shuffled": numbered(count),
        "nodes": numbered(count, order=ss.OrderOptions(nodes=8, exchange=0.1)),
        "mix": ss.mix(parts, weights, samples=count),
        "weights": numbered(len(some), weights=some),
        "balance": numbered(len(some), order=ss.OrderOptions(balance=some)),
    }


def median_ms(call: Callable[[int], object]) -> float:
    """Return the median of the milliseconds of processor time of a call, given its number."""
    times = []
    for number in range(_CALLS):
        begin = time.process_time()
        call(number)
        times.append(time.process_time() - begin)
        if sum(times) > _MOST_S:
            break
    return median(times) * 1e3


def measure(plan: Any, count: int) -> list[float]:
    """Return the medians of both questions, each for a little and for much, in milliseconds."""
    steps = np.random.default_rng(0).integers(0, max(1, plan.num_steps - 1), _CALLS).tolist()
    numbers = np.random.default_rng(1).integers(0, count, (_CALLS, 1000))
    return [
        median_ms(lambda n: plan.samples(steps[n], n % plan.num_ranks)),
        median_ms(lambda n: plan.samples(steps[n])),
        median_ms(lambda n: plan.where(numbers=numbers[n, :1])),
        median_ms(lambda n: plan.where(numbers=numbers[n])),
    ]


def main() -> None:
    """Print a row for each dataset."""
    parser = argparse.ArgumentParser(description="Measure how long a plan takes to answer.")
    parser.add_argument("--samples", type=int, default=10**10)
    parser.add_argument("--ranks", type=int, default=8)
    arguments = parser.parse_args()
    print(f"{arguments.samples:.0e} samples, {arguments.ranks} ranks, ms")
    print("dataset   samples(step, rank)  samples(step)  where(1)  where(1,000)")
    for name, dataset in datasets(arguments.samples).items():
        plan = ss.plan(dataset, 3, ranks=arguments.ranks, workers=2, batch_size=64)
        one, all_ranks, few, many = measure(plan, min(arguments.samples, len(dataset.samples)))
        print(f"{name:9}{one:20.2f}{all_ranks:15.2f}{few:10.2f}{many:14.2f}")
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"memory of the process: {peak_mib} MiB")


if __name__ == "__main__":
    main()
