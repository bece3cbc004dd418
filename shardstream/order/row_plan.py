"""Rows that are made of parts of samples: a pure function from a row number to the samples that it needs, and what of them.

A row is what a dataset yields in place of a sample: documents packed to one length, a window of a long sample, a batch of bounded cost.
Rows have numbers from 0, so orders, partitions, states and mixes treat them as samples. Copy c of row i is ``i + c * n``; where rows are
planned anew in each epoch, that of epoch c has another composition.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardstream.errors import plural
from shardstream.order.permutation import Ints, derive_key

_GROUPS_AT_ONCE = 64  # planned in one call: NumPy's overhead is that of one
_KEPT_PIECES = 4_000_000  # 100 MB


@dataclass(frozen=True, slots=True)
class RowParts:
    """The parts of some rows, one row after the other.

    Args:
        counts: Parts of each row, shape (rows,).
        numbers: Sample number of each part, shape (parts,).
        starts: First element of each part in its sample, shape (parts,).
        stops: Element after the last one, shape (parts,); -1 for the end of the sample, whatever its length.
    """

    counts: Ints
    numbers: Ints
    starts: Ints
    stops: Ints

    @property
    def firsts(self) -> Ints:
        """Place of the first part of each row, shape (rows,)."""
        firsts: Ints = np.cumsum(self.counts) - self.counts
        return firsts

    def take(self, rows: Ints) -> RowParts:
        """Return the parts of some of the rows, by their place."""
        counts = self.counts[rows]
        places = ranges(self.firsts[rows], counts)
        return RowParts(counts, self.numbers[places], self.starts[places], self.stops[places])


def ranges(firsts: Ints, counts: Ints) -> Ints:
    """Return ``first, first + 1, ...`` of each range, one after the other.

    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = np.cumsum(counts) - counts
    found: Ints = np.arange(counts.sum(), dtype=np.int64) + np.repeat(firsts - before, counts)
    return found


def join_parts(some: Sequence[RowParts]) -> RowParts:
    """Return the rows of several, one after the other."""
    columns = (
        np.concatenate([getattr(parts, name) for parts in some])
        for name in ("counts", "numbers", "starts", "stops")
    )
    return RowParts(*columns)


class RowPlan(ABC):
    """Which parts of samples each row has; picklable."""

    is_new_each_epoch: bool = False
    """Whether copies of a row have another composition."""
    rows_of_group: int = 0
    """Consecutive rows whose samples lie among each other, in the mean; 0 if each has its own."""
    lengths: np.ndarray[Any, Any] | None = None
    """Length of each sample that rows were planned with, shape (n,); None if samples are taken whole, whatever their length."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @property
    @abstractmethod
    def num_parts(self) -> int:
        """Parts of all rows."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits that change with the composition of any row."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """Rows and what they hold, for ``repr``."""

    @abstractmethod
    def parts(self, rows: Ints) -> RowParts:
        """Return the parts of some rows, given by their numbers from 0 to n - 1, or those of copies; shape (rows,)."""

    @abstractmethod
    def rows_of(self, samples: Ints) -> Ints:
        """Return the rows that may have parts of some samples, among them all that have, also where copies differ; each once."""


def digest_of(*values: object) -> str:
    """Return 16 hex digits that change with plain values and arrays."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(value.tobytes() if isinstance(value, np.ndarray) else f"{value}\n".encode())
    return digest.hexdigest()[:16]


class GroupedRows(RowPlan):
    """Rows whose parts are samples of one group each: so many consecutive samples, which reading finds close together.

    The number of rows of a group is computed once; which samples each row has, when the row is asked for.

    Args:
        nsamples: Number of samples.
        group: Samples of a group; the last group may have fewer.
        is_new_each_epoch: Whether copies of a row have another composition.
        seed: Seed of the compositions of further epochs.
        multiple: The number of rows becomes a multiple of it, if there are samples for so many.
    """

    def __init__(
        self, nsamples: int, group: int, *, is_new_each_epoch: bool, seed: int, multiple: int = 1
    ) -> None:
        self._nsamples, self._group, self._seed = nsamples, group, seed
        self.is_new_each_epoch = is_new_each_epoch
        num_groups = -(-nsamples // group)
        groups = np.arange(num_groups, dtype=np.int64)
        chunks = np.array_split(groups, -(-num_groups // _GROUPS_AT_ONCE) or 1)
        counts = np.concatenate([self.count(some) for some in chunks])
        room = np.minimum(group, nsamples - groups * group) - counts
        self.firsts: Ints = np.concatenate(([0], np.cumsum(_round_up(counts, room, multiple))))
        """Number of the first row of each group, and of all rows; shape (groups + 1,)."""
        self.rows_of_group = len(self) // max(1, num_groups)
        self._planned = OrderedDict[tuple[int, int], RowParts]()

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_planned": OrderedDict()}

    @abstractmethod
    def count(self, groups: Ints) -> Ints:
        """Return the number of rows of some groups, shape (groups,)."""

    @abstractmethod
    def plan(self, groups: Ints, keys: Sequence[int | None]) -> list[RowParts]:
        """Return the parts of all rows of some groups.

        Args:
            groups: Numbers of the groups, shape (groups,).
            keys: Random key of each composition; None for the first, which `count` counts.
        """

    def samples_of(self, group: int) -> slice:
        """Return the numbers of the samples of a group."""
        return slice(group * self._group, min((group + 1) * self._group, self._nsamples))

    def parts(self, rows: Ints) -> RowParts:
        """Return the parts of some rows."""
        if not len(rows):
            return RowParts(*[np.empty(0, dtype=np.int64)] * 4)
        copies, rows = np.divmod(rows, len(self))
        groups = np.searchsorted(self.firsts, rows, side="right") - 1
        if not self.is_new_each_epoch:
            copies = np.zeros_like(copies)
        num_groups = len(self.firsts) - 1
        pairs, place = np.unique(groups + copies * num_groups, return_inverse=True)
        planned = self._plan_groups([divmod(pair, num_groups) for pair in pairs.tolist()])
        counts = np.array([len(one.counts) for one in planned])
        first_of_pair = np.cumsum(counts) - counts
        return join_parts(planned).take(first_of_pair[place] + rows - self.firsts[groups])

    def rows_of(self, samples: Ints) -> Ints:
        """Return the rows that may have parts of some samples: all of their groups."""
        groups = np.unique(samples // self._group)
        return ranges(self.firsts[groups], np.diff(self.firsts)[groups])

    @cached_property
    def _most_kept(self) -> int:
        pieces = self.num_parts // max(1, len(self.firsts) - 1)  # long samples have many
        return max(8, _KEPT_PIECES // max(1, pieces))

    def _plan_groups(self, pairs: Sequence[tuple[int, int]]) -> list[RowParts]:
        """Return the rows of compositions of groups, given as (copy, group); those planned last are kept."""
        # Threads may do it at once, so each entry is looked up once.
        found = {pair: self._planned.get(pair) for pair in pairs}
        missing = [pair for pair, rows in found.items() if rows is None]
        for first in range(0, len(missing), _GROUPS_AT_ONCE):
            some = missing[first : first + _GROUPS_AT_ONCE]
            keys = [derive_key(self._seed, copy, group) if copy else None for copy, group in some]
            planned = self.plan(np.array([group for _, group in some]), keys)
            for pair, rows in zip(some, planned, strict=True):
                found[pair] = self._planned[pair] = rows
        while len(self._planned) > self._most_kept:
            self._planned.popitem(last=False)
        return [rows for rows in found.values() if rows is not None]


def _round_up(counts: Ints, room: Ints, multiple: int) -> Ints:
    """Return counts whose sum is a multiple, each raised by at most its room; as they are if that is not possible."""
    extra = -int(counts.sum()) % multiple
    if extra > room.sum():
        return counts
    while extra:
        some = np.flatnonzero(room > 0)[:extra]
        counts[some] += 1
        room[some] -= 1
        extra -= len(some)
    return counts


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
        self._lengths, self.lengths = lengths, None if of_runs else lengths
        self._ends: Ints = np.cumsum(counts)
        self._firsts = np.cumsum(lengths) - lengths if of_runs else None  # samples

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

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
