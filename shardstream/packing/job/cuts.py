"""Cut samples into shards by their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from shardstream.catalog import Numbers


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
