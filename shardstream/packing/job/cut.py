"""Compute seeded orders, splits and parts of records."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
from shardstream.format import member_bytes
from shardstream.packing.job.key_hashes import KeyHashes

Numbers = npt.NDArray[np.int64]
T = TypeVar("T")
Place = tuple[int, int]
"""Numbers of a job and of one of its parts."""

_PROBES = 32
_LEAST_PROBES = 4
_RECORDS_OF_A_PROBE = 16  # measuring costs at most about a sixteenth of the job
_FILL = 0.9  # of a part that is cut by the mean size: the rest is room for larger samples
_BLOCK_BYTES = 512
_PLAIN_NAME_BYTES = 100  # of a name in a header of one block
_PLAIN_SIZE = 8**11
SplitNumbers = npt.NDArray[np.uint16]
"""Shape (n,): number of the split of each record."""
_DRAWS = 1 << 16


def cut_by_size(sizes: Iterable[Numbers], max_samples: int, max_bytes: float) -> Numbers:
    """Cut a sequence of sizes into runs of at most ``max_samples`` and ``max_bytes``, each as long as possible.

    Args:
        sizes: The sizes, in arrays of any length.
        max_samples: Maximum length of a run, at least 1.
        max_bytes: Maximum sum of a run; a single size may exceed it.

    Returns:
        The start of each run, and the number of sizes.

    >>> cut_by_size([np.array([2, 2, 2]), np.array([9, 1])], 10, 5).tolist()
    [0, 2, 3, 4, 5]
    """
    return np.array(list(iter_cuts(sizes, max_samples, max_bytes)), dtype=np.int64)


def iter_cuts(sizes: Iterable[Numbers], max_samples: int, max_bytes: float) -> Iterator[int]:
    """Yield what `cut_by_size` returns, each as soon as the sizes that are read so far decide it."""
    yield 0
    passed = 0  # sizes before the last cut
    waiting = np.empty(0, dtype=np.int64)  # sizes after it
    for some in sizes:
        waiting = np.concatenate((waiting, some))
        ends = np.concatenate(([0], np.cumsum(waiting)))
        first = 0
        while True:
            fits = int(np.searchsorted(ends, ends[first] + max_bytes, side="right")) - 1
            last = min(max(fits, first + 1), first + max_samples)
            if last >= len(waiting):  # the run may go on in the next array
                break
            yield passed + last
            first = last
        waiting = waiting[first:]
        passed += first
    yield passed + len(waiting)


def number_parts(
    items: Iterable[tuple[int, T]],
    size: Callable[[T], int],
    max_items: int,
    max_bytes: float,
    firsts: Sequence[int] = (0,),
) -> Iterator[tuple[Place, T]]:
    """Yield each item with the numbers of its job and of its part; the parts of each job are cut as by `cut_by_size`.

    Args:
        items: The items, each with the number of its job; one is read at a time.
        size: Returns the bytes of an item in a shard.
        max_items: Maximum items of a part, at least 1.
        max_bytes: Maximum bytes of a part; a single item may exceed it.
        firsts: Number of the first part of each job.

    >>> sizes = {"a": 2, "b": 3, "c": 9}
    >>> list(number_parts([(0, "a"), (1, "a"), (0, "b"), (0, "b"), (1, "c")], sizes.__getitem__, 10, 5, [0, 7]))
    [((0, 0), 'a'), ((1, 7), 'a'), ((0, 0), 'b'), ((0, 1), 'b'), ((1, 8), 'c')]
    """
    parts = [*firsts]
    counts, totals = [0] * len(parts), [0] * len(parts)
    for job, item in items:
        more = size(item)
        if counts[job] and (counts[job] >= max_items or totals[job] + more > max_bytes):
            parts[job] += 1
            counts[job] = totals[job] = 0
        counts[job] += 1
        totals[job] += more
        yield (job, parts[job]), item


def fields_bytes(key: str, sizes: Iterable[tuple[str, int]]) -> int:
    """Return how many bytes a sample takes in a tar.

    Args:
        key: Its key.
        sizes: Each field with its length in bytes.

    >>> fields_bytes("a", [("txt", 2), ("jpg", 513)])
    2560
    >>> [fields_bytes("a", [("bin", size)]) - size for size in (8**11 - 512, 8**11)]
    [512, 1536]
    """
    room = _PLAIN_NAME_BYTES - len(key) - 1 if key.isascii() else 0
    total = 0
    for field, size in sizes:
        if len(field) < room and size < _PLAIN_SIZE and field.isascii():
            total += _BLOCK_BYTES + (size + _BLOCK_BYTES - 1 & -_BLOCK_BYTES)
        else:
            total += member_bytes(f"{key}.{field}", size)
    return total


def spaced_numbers(count: int) -> list[int]:
    """Return the numbers of some of ``count`` records, evenly spaced: samples often grow, or come sorted by size.

    >>> spaced_numbers(100)
    [8, 25, 41, 58, 75, 91]
    >>> [len(spaced_numbers(count)) for count in (0, 3, 10, 10_000)]
    [0, 3, 4, 32]
    """
    probes = min(count, _PROBES, max(_LEAST_PROBES, count // _RECORDS_OF_A_PROBE))
    return [(2 * number + 1) * count // (2 * probes) for number in range(probes)]


def records_that_fit(mean_bytes: float, max_samples: int, max_bytes: float) -> int:
    """Return how many records make a part of a mean size: 90 % of the limit.

    >>> [records_that_fit(1000.0, limit, 100_000) for limit in (10_000, 50)], records_that_fit(1000.0, 50, 10)
    ([90, 50], 1)
    """
    return min(max_samples, max(1, int(_FILL * max_bytes / max(mean_bytes, 1.0))))


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
