"""Windows of long samples, or of runs of samples: which part each row has."""

from __future__ import annotations

import numpy as np

from shardstream.errors import plural
from shardstream.order.permutation import Ints
from shardstream.order.row_plan import RowParts, RowPlan, digest_of, ranges


class WindowRows(RowPlan):
    """Windows of ``size`` elements, a new one every ``stride``: of each sample, or of each run of consecutive samples.

    Args:
        lengths: Elements of each sample, or samples of each run; shape (n,), int64.
        size: Elements of a window.
        stride: Elements between the first ones of neighbouring windows.
        drop_last: Leave out the elements that do not fill a last window; else it is shorter.
        of_runs: Whether the elements are samples, and the lengths those of runs.
    """

    def __init__(
        self, lengths: Ints, *, size: int, stride: int, drop_last: bool, of_runs: bool = False
    ) -> None:
        self.size, self.stride, self.drop_last, self.of_runs = size, stride, drop_last, of_runs
        rest = np.maximum(lengths - size, 0)
        if drop_last:
            counts = np.where(lengths >= size, rest // stride + 1, 0)
        else:  # with a stride over the size, elements between windows are in none
            counts = np.minimum(-(-rest // stride) + 1, -(-lengths // stride))
        self.num_without = int((counts == 0).sum())
        """Samples, or runs, that have no window."""
        self._lengths = lengths
        self._ends: Ints = np.cumsum(counts)
        self._firsts = np.cumsum(lengths) - lengths if of_runs else None  # samples

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def lengths(self) -> Ints | None:
        """Elements of each sample, shape (n,); None for runs."""
        return None if self.of_runs else self._lengths

    @property
    def num_parts(self) -> int:
        """Parts of all rows: samples that are read for them, at most."""
        return len(self) * self.size if self.of_runs else len(self)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the composition of any row."""
        options = (self.size, self.stride, self.drop_last, self.of_runs)
        return digest_of("windows", options, self._lengths.astype("<i8"))

    @property
    def summary(self) -> str:
        """Rows and what they hold, for ``repr``."""
        kind = "run" if self.of_runs else "sample"
        without = f", {plural(self.num_without, kind)} too short" if self.num_without else ""
        return f"{plural(len(self), 'window')} of {self.size}, from {plural(len(self._lengths), kind)}{without}"

    def rows_of(self, samples: Ints) -> Ints:
        """Return the windows of some samples, or of the runs that have them, each once."""
        owners = samples
        if self._firsts is not None:
            owners = np.unique(np.searchsorted(self._firsts, samples, side="right") - 1)
        ends = self._ends[owners]
        counts = np.diff(self._ends, prepend=0)[owners]
        return ranges(ends - counts, counts)

    def parts(self, rows: Ints) -> RowParts:
        """Return the parts of some rows."""
        rows = rows % max(1, len(self))
        owners = np.searchsorted(self._ends, rows, side="right")
        before = np.where(owners > 0, self._ends[owners - 1], 0)
        starts = (rows - before) * self.stride
        stops = np.minimum(starts + self.size, self._lengths[owners])
        if self._firsts is None:
            return RowParts(np.ones_like(rows), owners, starts, stops)
        firsts = self._firsts[owners] + starts
        counts = stops - starts
        numbers = ranges(firsts, counts)
        return RowParts(counts, numbers, np.zeros_like(numbers), np.full_like(numbers, -1))
