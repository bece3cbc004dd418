"""Compute seeded orders and splits of records, as pure functions."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
from shardstream.packing.job.key_hashes import KeyHashes

Numbers = npt.NDArray[np.int64]
SplitNumbers = npt.NDArray[np.uint16]
"""Shape (n,): number of the split of each record."""

_DRAWS = 1 << 16


def shuffled_order(count: int, *, seed: int, purpose: str) -> Iterator[Numbers]:
    """Yield the numbers 0 to ``count`` - 1, many at a time, in an order that the seed and the purpose decide.

    Memory holds a few million numbers, a temporary file the others.

    >>> np.concatenate([*shuffled_order(5, seed=0, purpose="order")]).tolist()
    [3, 1, 4, 2, 0]

    Raises:
        StorageError: If the temporary folder is full.
    """
    # Python guarantees equal random() for equal seeds, but not equal shuffle().
    source = random.Random(f"{purpose}/{seed}")
    with KeyHashes() as draws:
        for first in range(0, count, _DRAWS):
            numbers = np.arange(first, min(first + _DRAWS, count), dtype=np.int64)
            some = np.fromiter((source.random() for _ in numbers), dtype=np.float64)
            # random() is a multiple of 2**-53: 53 bits, as the first of 64, have the same order.
            draws.add((some * 2.0**53).astype(np.uint64) << np.uint64(11), numbers)
        for _, numbers in draws.sorted_blocks():
            yield numbers


def split_counts(count: int, fractions: Mapping[str, float]) -> dict[str, int]:
    """Return how many of ``count`` samples each split gets: all of them, rounded by the largest remainder.

    >>> split_counts(10, {"train": 0.75, "val": 0.25})
    {'train': 8, 'val': 2}

    Raises:
        OptionError: If the fractions do not make one whole, a name cannot be a folder, or a split would be empty.
    """
    for name, fraction in fractions.items():
        if not name or not name.replace("-", "").replace("_", "").isalnum():
            raise OptionError(
                f"a split's name must have only letters, digits, '-' and '_', not {name!r}"
            )
        if not 0 < fraction < 1:
            raise OptionError(
                f"the fraction of split {name!r} must be between 0 and 1, not {fraction}"
            )
    if not math.isclose(sum(fractions.values()), 1, abs_tol=1e-6):
        raise OptionError(
            f"the fractions of the splits add up to {sum(fractions.values()):g}, not 1; write for example train=0.9,val=0.1"
        )
    exact = {name: fraction * count for name, fraction in fractions.items()}
    counts = {name: int(part + 1e-9) for name, part in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: count - sum(counts.values())]:
        counts[name] += 1
    empty = next((name for name, size in counts.items() if not size), None)
    if empty is not None:
        raise OptionError(
            f"split {empty!r} would be empty: the source has {plural(count, 'sample')}"
        )
    return counts


def assign_splits(count: int, fractions: Mapping[str, float], *, seed: int) -> SplitNumbers:
    """Return for each record the number of its split, in the order of the fractions; shape (count,).

    Raises:
        OptionError: As `split_counts`.
    """
    counts = list(split_counts(count, fractions).values())
    labels = np.repeat(np.arange(len(counts), dtype=np.uint16), counts)
    assigned = np.empty(count, dtype=np.uint16)
    first = 0
    for numbers in shuffled_order(count, seed=seed, purpose="split"):
        assigned[numbers] = labels[first : first + len(numbers)]
        first += len(numbers)
    return assigned
