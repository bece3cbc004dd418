"""Cut a sequence of records into parts, by their sizes or by a mean size; pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardstream.format import member_bytes

Numbers = npt.NDArray[np.int64]
T = TypeVar("T")

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
    items: Iterable[T],
    size: Callable[[T], int],
    max_items: int,
    max_bytes: float,
    *,
    first: int = 0,
) -> Iterator[tuple[int, T]]:
    """Yield each item with the number of its part; parts are cut as by `cut_by_size`.

    Args:
        items: The items; one is read at a time.
        size: Returns the bytes of an item in a shard.
        max_items: Maximum items of a part, at least 1.
        max_bytes: Maximum bytes of a part; a single item may exceed it.
        first: Number of the first part.

    >>> list(number_parts("aabbbc", {"a": 2, "b": 3, "c": 9}.__getitem__, 10, 5))
    [(0, 'a'), (0, 'a'), (1, 'b'), (2, 'b'), (3, 'b'), (4, 'c')]
    """
    count = total = 0
    for item in items:
        more = size(item)
        if count and (count >= max_items or total + more > max_bytes):
            first += 1
            count = total = 0
        count += 1
        total += more
        yield first, item


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
    """
    probes = min(count, _PROBES, max(_LEAST_PROBES, count // _RECORDS_OF_A_PROBE))
    return [(2 * number + 1) * count // (2 * probes) for number in range(probes)]


def records_that_fit(mean_bytes: float, max_samples: int, max_bytes: float) -> int:
    """Return how many records make a part of a mean size: 90 % of the limit.

    >>> [records_that_fit(1000.0, limit, 100_000) for limit in (10_000, 50)], records_that_fit(1000.0, 50, 10)
    ([90, 50], 1)
    """
    return min(max_samples, max(1, int(_FILL * max_bytes / max(mean_bytes, 1.0))))
