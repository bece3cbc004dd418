"""Cut a dataset into row ranges for read tasks. Pure arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardstream.packing import cut_by_size

MAX_TASK_BYTES = 128 << 20
MAX_SHUFFLED_TASK_BYTES = (
    64 << 20
)  # one window, whose samples are in about 50 shards; they are pickled with the task
MIN_TASK_BYTES = 4 << 20
TASKS_PER_CPU = 4

Ints = npt.NDArray[np.int64]


class RowRange(NamedTuple):
    """Consecutive rows of a dataset, in the order in which it is read."""

    start: int
    """First row."""
    stop: int
    """Row after the last."""
    nbytes: int
    """Estimated bytes of the rows in their tars."""


def default_task_bytes(total_bytes: int, cpus: int, *, shuffle: bool) -> int:
    """Return the bytes of a read task: a quarter of the share of a CPU, from 4 to 128 MiB, or to 64 MiB if shuffled.

    >>> default_task_bytes(1 << 40, 64, shuffle=False) >> 20, default_task_bytes(1 << 40, 64, shuffle=True) >> 20
    (128, 64)
    >>> default_task_bytes(256 << 20, 2, shuffle=False) >> 20, default_task_bytes(1 << 20, 2, shuffle=False) >> 20
    (32, 4)
    """
    share = total_bytes // max(1, TASKS_PER_CPU * cpus)
    most = MAX_SHUFFLED_TASK_BYTES if shuffle else MAX_TASK_BYTES
    return max(MIN_TASK_BYTES, min(most, share))


def count_tasks(num_rows: int, total_bytes: int, task_bytes: int) -> int:
    """Return the number of read tasks: at least one, at most one for each row.

    >>> count_tasks(1000, 100 << 20, 32 << 20), count_tasks(2, 100 << 20, 32 << 20)
    (4, 2)
    """
    return max(1, min(num_rows, -(-total_bytes // task_bytes)))


def cut_rows(
    rows: Sequence[int], nbytes: Sequence[int], num_tasks: int, unit: int = 1
) -> list[RowRange]:
    """Cut rows into ranges of about equal bytes; together they are all rows, each once.

    Args:
        rows: Number of rows of each part of the dataset (a shard, or all of it), in order.
        nbytes: Bytes of each part.
        num_tasks: Number of ranges; fewer if there are fewer units.
        unit: Ranges begin at multiples of it, because rows in it are read together.

    >>> cut_rows([10, 10], [1000, 3000], 2)
    [RowRange(start=0, stop=13, nbytes=1900), RowRange(start=13, stop=20, nbytes=2100)]
    """
    row_edges = np.concatenate(([0], np.cumsum(rows, dtype=np.int64)))
    byte_edges = np.concatenate(([0], np.cumsum(nbytes, dtype=np.int64))).astype(np.float64)
    num_rows = int(row_edges[-1])
    if not num_rows:
        return []
    if byte_edges[-1] == 0:
        byte_edges = row_edges.astype(np.float64)
    targets = np.linspace(0.0, byte_edges[-1], num_tasks + 1)[1:-1]
    cuts = np.rint(np.interp(targets, byte_edges, row_edges) / unit).astype(np.int64) * unit
    cuts = np.unique(np.concatenate(([0], cuts[cuts < num_rows], [num_rows])))
    at = np.rint(np.interp(cuts, row_edges, byte_edges)).astype(np.int64).tolist()
    edges = cuts.tolist()
    return [RowRange(edges[n], edges[n + 1], at[n + 1] - at[n]) for n in range(len(edges) - 1)]


def cut_by_bytes(sizes: Ints, max_bytes: int) -> list[slice]:
    """Cut consecutive rows into slices of at most ``max_bytes``; a larger row is a slice of its own.

    Args:
        sizes: Bytes of each row, shape (n,).
        max_bytes: Limit of a slice with more than one row.

    >>> cut_by_bytes(np.array([3, 3, 3, 9, 1]), 6)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    cuts = cut_by_size([sizes], max(1, len(sizes)), max_bytes).tolist()
    return [slice(first, last) for first, last in itertools.pairwise(cuts) if first < last]
