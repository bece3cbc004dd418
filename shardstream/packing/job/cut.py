"""Cut a sequence of records into parts, by their sizes or by a mean size; pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardstream.format import member_bytes

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
