"""Plan rows of a bounded size: sequences packed to one length, whole by best fit or one after the other, and batches of bounded cost.

Best fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973): the sequences of a group, longest first, each go to the fullest row
that has room for them. Many groups are packed at the same time, an array operation for one sequence of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
from shardstream.order.permutation import Ints
from shardstream.order.row_plan import GroupedRows, RowParts, RowPlan, digest_of, ranges

Floats = npt.NDArray[np.float64]
Long = Literal["split", "cut", "error"]

# So many rows that the last one of a group wastes little, and of so many samples, at least and at most.
_ROWS_OF_GROUP, _BATCHES_OF_GROUP = 128, 64
_LEAST_SEQUENCES, _LEAST_SAMPLES, _MAX_GROUP = 128, 256, 1 << 16
_JITTERS = (0.1, 0.03, 0.01)  # of the costs by which further epochs sort, the largest first
_BLOCK = 1024  # sequences whose tokens are summed once


class BestFitRows(GroupedRows):
    """Rows that hold whole sequences, by best fit.

    Args:
        lengths: Tokens of each sequence, shape (n,), int64; those without tokens are in no row.
        length: Tokens of a row.
        long: What happens to a sequence longer than a row: "split" into pieces of one row and a rest, "cut" after one row, or "error".
        is_new_each_epoch: Whether sequences meet others in each epoch. The number of rows stays.
        seed: Seed of these compositions.

    Raises:
        OptionError: If a sequence is longer than a row and ``long`` is "error".
    """

    lengths: np.ndarray[Any, Any]

    def __init__(
        self,
        lengths: Ints,
        *,
        length: int,
        long: Long = "split",
        is_new_each_epoch: bool = False,
        seed: int = 0,
    ) -> None:
        too_long = lengths > length
        if long == "error" and too_long.any():
            number = int(too_long.argmax())
            raise OptionError(
                f"sample {number} has {lengths[number]} tokens, more than a row of {length} ({plural(int(too_long.sum()), 'sample')} in all); "
                "long='split' splits them into several rows, long='cut' leaves out the rest of them"
            )
        self.length, self._long = length, long
        self._num_long, self._num_empty = int(too_long.sum()), int((lengths == 0).sum())
        self.lengths = lengths.astype(np.min_scalar_type(lengths.max(initial=0)))
        self._num_tokens = int(
            lengths.sum() if long == "split" else np.minimum(lengths, length).sum()
        )
        mean = max(1.0, self._num_tokens / max(1, len(lengths)))
        group = min(max(int(_ROWS_OF_GROUP * length / mean), _LEAST_SEQUENCES), _MAX_GROUP)
        super().__init__(len(lengths), group, is_new_each_epoch=is_new_each_epoch, seed=seed)

    @property
    def num_parts(self) -> int:
        """Parts of all rows: sequences, and pieces of long ones."""
        if self._long == "cut":
            return len(self.lengths) - self._num_empty
        return int((-(-self.lengths.astype(np.int64) // self.length)).sum())

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the composition of any row."""
        options = (self.length, self._long, self.is_new_each_epoch, self._group)
        return digest_of("best fit", options, self.lengths.astype("<i8"))

    @property
    def filled(self) -> float:
        """Share of the tokens of all rows that are no padding, from 0 to 1."""
        return self._num_tokens / max(1, len(self) * self.length)

    @property
    def summary(self) -> str:
        """Rows and what they hold, for ``repr``."""
        counts = {"longer ones cut" if self._long == "cut" else "longer ones split": self._num_long}
        counts |= {"without tokens left out": self._num_empty}
        notes = "".join(f", {count} {what}" for what, count in counts.items() if count)
        return f"{plural(len(self), 'row')} of {self.length} tokens, {self.filled:.1%} filled, from {plural(len(self.lengths), 'sequence')}{notes}"

    def count(self, groups: Ints) -> Ints:
        """Return the number of rows of some groups, shape (groups,)."""
        pieces = [self._pieces(group)[2] for group in groups.tolist()]
        orders = [np.argsort(-sizes, kind="stable") for sizes in pieces]
        return _num_rows(_fit(pieces, orders, self.length))

    def plan(self, groups: Ints, keys: Sequence[int | None]) -> list[RowParts]:
        """Return the parts of all rows of some groups."""
        pieces = [self._pieces(group) for group in groups.tolist()]
        sizes = [own for _, _, own in pieces]
        wanted = np.diff(self.firsts)[groups]
        orders = [_order(own, key) for own, key in zip(sizes, keys, strict=True)]
        rows = _fit(sizes, orders, self.length)
        # Few compositions in a random order need one row more: these are packed longest first, those of equal length at random.
        more = [n for n, own in enumerate(rows) if own.max(initial=-1) >= wanted[n]]
        orders = [_order(sizes[n], keys[n], exact=True) for n in more]
        for n, own in zip(more, _fit([sizes[n] for n in more], orders, self.length), strict=True):
            rows[n] = own
        return [
            _as_parts(_use_all(own, int(count)), *one)
            for own, count, one in zip(rows, wanted, pieces, strict=True)
        ]

    def _pieces(self, group: int) -> tuple[Ints, Ints, Ints]:
        """Return the sample number, first token and tokens of each piece of a group."""
        members = self.samples_of(group)
        sizes = self.lengths[members].astype(np.int64)
        if self._long == "cut":
            sizes = np.minimum(sizes, self.length)
        counts = -(-sizes // self.length)
        numbers = np.repeat(np.arange(members.start, members.stop, dtype=np.int64), counts)
        starts = ranges(np.zeros_like(counts), counts) * self.length
        return numbers, starts, np.minimum(np.repeat(sizes, counts) - starts, self.length)


def _order(sizes: Ints, key: int | None, *, exact: bool = False) -> Ints:
    """Return the order in which pieces are packed: longest first; with a key those of about the same length at random."""
    if key is None:
        return np.argsort(-sizes, kind="stable")
    draws = np.random.Generator(np.random.PCG64(key)).random(len(sizes))
    classes = sizes if exact else np.frexp(sizes.astype(np.float64))[1]  # doublings
    return np.argsort(-(classes + draws), kind="stable")


def _fit(sizes: Sequence[Ints], orders: Sequence[Ints], length: int) -> list[Ints]:
    """Pack the pieces of several groups by best fit.

    Args:
        sizes: Of the pieces of each group, shape (pieces,), from 1 to ``length``.
        orders: Order in which the pieces of each group are packed.
        length: Room of a row.

    Returns:
        Row of each piece, for each group; shape (pieces,).
    """
    # Those that fill a row have one of their own: books of 1000 rows would take a minute.
    shared = [order[own[order] < length] for own, order in zip(sizes, orders, strict=True)]
    num_pieces = max(map(len, shared), default=0)
    # Unsigned: a piece that does not fit wraps to more than a row.
    dtype = np.min_scalar_type(2 * length)
    waiting = np.zeros((num_pieces, len(sizes)), dtype=dtype)
    for group, (own, order) in enumerate(zip(sizes, shared, strict=True)):
        waiting[: len(order), group] = own[order]
    # All rows but one are more than half full in the end, whatever the order.
    columns = int(waiting.sum(axis=0, dtype=np.int64).max(initial=0)) * 2 // length + 2
    room = np.full((len(sizes), columns), length, dtype=dtype)
    left, groups = np.empty_like(room), np.arange(len(sizes))
    chosen = np.empty(waiting.shape, dtype=np.int64)
    for place, piece in enumerate(waiting):
        np.subtract(room, piece[:, None], out=left)
        best = chosen[place] = left.argmin(axis=1)
        room[groups, best] -= piece
    rows = []
    for group, (own, order) in enumerate(zip(sizes, shared, strict=True)):
        ends = np.cumsum(own == length)
        row = ends - 1
        row[order] = chosen[: len(order), group] + ends[-1:]
        rows.append(row)
    return rows


def _num_rows(rows: Sequence[Ints]) -> Ints:
    return np.array([own.max(initial=-1) + 1 for own in rows], dtype=np.int64)


def _use_all(rows: Ints, count: int) -> Ints:
    """Return the row of each piece, where rows without any get one of those that have most."""
    counts = np.bincount(rows, minlength=count)
    for empty in np.flatnonzero(counts == 0).tolist():
        fullest = int(counts.argmax())
        rows[np.flatnonzero(rows == fullest)[-1]] = empty
        counts[fullest] -= 1
    return rows


def _as_parts(rows: Ints, numbers: Ints, starts: Ints, sizes: Ints) -> RowParts:
    """Return the parts of rows, in the order of their first samples."""
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows)
    parts = RowParts(counts, numbers[order], starts[order], (starts + sizes)[order])
    return parts.take(np.argsort(parts.numbers[parts.firsts], kind="stable"))


class ConcatRows(RowPlan):
    """Rows that are cut out of all sequences, one after the other; a sequence may continue in the next row.

    Args:
        lengths: Tokens of each sequence, shape (n,), int64.
        length: Tokens of a row.
        drop_last: Drop the tokens that do not fill a last row.
    """

    lengths: np.ndarray[Any, Any]

    def __init__(self, lengths: Ints, *, length: int, drop_last: bool = False) -> None:
        self.lengths = lengths.astype(np.min_scalar_type(lengths.max(initial=0)))
        self.length, self._drop_last = length, drop_last
        starts = np.arange(0, len(lengths), _BLOCK)
        blocks = np.add.reduceat(lengths, starts) if len(lengths) else lengths
        self._ends = np.cumsum(blocks, dtype=np.int64)  # tokens up to the end of each block
        self._num_tokens = int(self._ends[-1]) if len(self._ends) else 0

    def __len__(self) -> int:
        return (
            self._num_tokens // self.length
            if self._drop_last
            else -(-self._num_tokens // self.length)
        )

    @property
    def num_parts(self) -> int:
        """Parts of all rows, at most."""
        return len(self.lengths) + len(self)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the composition of any row."""
        return digest_of("concat", self.length, self._drop_last, self.lengths.astype("<i8"))

    @property
    def filled(self) -> float:
        """Share of the tokens of all rows that are no padding, from 0 to 1."""
        return min(1.0, self._num_tokens / max(1, len(self) * self.length))

    @property
    def summary(self) -> str:
        """Rows and what they hold, for ``repr``."""
        return f"{plural(len(self), 'row')} of {self.length} tokens, cut out of {plural(len(self.lengths), 'sequence')}"

    def parts(self, rows: Ints) -> RowParts:
        """Return the parts of some rows."""
        found = [self._row(row) for row in (rows % max(1, len(self))).tolist()]
        counts = np.array([len(numbers) for numbers, _, _ in found], dtype=np.int64)
        empty = [np.empty(0, dtype=np.int64)] * 3
        return RowParts(counts, *map(np.concatenate, zip(empty, *found, strict=True)))

    def rows_of(self, samples: Ints) -> Ints:
        """Return the rows that have parts of some samples, each once."""
        blocks = samples // _BLOCK
        sizes = [
            int(self.lengths[number : (block + 1) * _BLOCK].sum(dtype=np.int64))
            for number, block in zip(samples.tolist(), blocks.tolist(), strict=True)
        ]
        starts = self._ends[blocks] - np.array(sizes, dtype=np.int64)
        stops = starts + self.lengths[samples].astype(np.int64)
        firsts, ends = starts // self.length, -(-stops // self.length)
        rows = np.unique(ranges(firsts, np.where(stops > starts, ends - firsts, 0)))
        return rows[rows < len(self)]

    def _row(self, row: int) -> tuple[Ints, Ints, Ints]:
        """Return the sample numbers of a row, and the first token and the one after the last of each."""
        begin, end = row * self.length, min((row + 1) * self.length, self._num_tokens)
        first, last = np.searchsorted(self._ends, [begin, end - 1], side="right").tolist()
        sizes = self.lengths[first * _BLOCK : (last + 1) * _BLOCK].astype(np.int64)
        ends = np.cumsum(sizes) + (self._ends[first - 1] if first else 0)
        starts = np.maximum(begin - (ends - sizes), 0)
        stops = np.minimum(end - (ends - sizes), sizes)
        inside = np.flatnonzero(stops > starts)
        return inside + first * _BLOCK, starts[inside], stops[inside]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of batches.

    Args:
        max_cost: Maximum of the cost of a batch.
        max_samples: Maximum of its samples; None for any number.
        padded: Whether a batch costs as much as its samples would if each cost as much as the largest; else the sum of them.
        multiple: The number of batches is a multiple of it, by halving some.
    """

    max_cost: float
    max_samples: int | None = None
    padded: bool = True
    multiple: int = 1


class CostBatches(GroupedRows):
    """Batches of samples of similar cost: samples of a group, by their cost, cut where a batch would cost too much.

    Args:
        costs: Cost of each sample, at least 0, shape (n,), float64.
        limits: Limits of the batches.
        is_new_each_epoch: Whether samples meet others in each epoch. The number of batches stays.
        seed: Seed of these compositions.

    Raises:
        OptionError: If a sample alone costs more than the maximum.
    """

    def __init__(
        self,
        costs: Floats,
        limits: BatchLimits,
        *,
        is_new_each_epoch: bool = True,
        seed: int = 0,
    ) -> None:
        max_cost = limits.max_cost
        if not max_cost > 0:
            raise OptionError(f"max_cost must be above 0, not {max_cost}")
        too_much = costs > max_cost
        if too_much.any():
            number = int(too_much.argmax())
            raise OptionError(
                f"sample {number} costs {costs[number]:g}, more than max_cost={max_cost:g} ({plural(int(too_much.sum()), 'sample')} in all); "
                "raise max_cost, or leave them out with where= or subset="
            )
        self.costs, self.limits = costs, limits
        self._padded_cost = 0.0  # of all batches that `count` has counted
        self._max_samples = limits.max_samples or len(costs)
        per_batch = (
            min(self._max_samples, max_cost / max(float(costs.mean()), 1e-300)) if len(costs) else 1
        )
        group = min(max(int(_BATCHES_OF_GROUP * per_batch), _LEAST_SAMPLES), _MAX_GROUP)
        super().__init__(
            len(costs),
            group,
            is_new_each_epoch=is_new_each_epoch,
            seed=seed,
            multiple=limits.multiple,
        )

    @property
    def num_parts(self) -> int:
        """Samples of all batches."""
        return len(self.costs)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the composition of any row."""
        options = (self.limits, self.is_new_each_epoch)
        return digest_of("cost", options, self._group, self.costs.astype("<f8"))

    @property
    def padding(self) -> float:
        """Share of the cost of all batches that is padding, from 0 to 1, before batches are halved; new compositions have a little more."""
        return 1 - float(self.costs.sum()) / self._padded_cost if self._padded_cost else 0.0

    @property
    def summary(self) -> str:
        """Rows and what they hold, for ``repr``."""
        kind, padding = "cost", ""
        if self.limits.padded:
            kind, padding = "padded cost", f", {self.padding:.1%} padding"
        return f"{plural(len(self), 'batch')} of a {kind} of at most {self.limits.max_cost:g}{padding}, from {plural(len(self.costs), 'sample')}"

    def count(self, groups: Ints) -> Ints:
        """Return the number of batches of some groups, shape (groups,)."""
        found = list[int]()
        for group in groups.tolist():
            costs = np.sort(self.costs[self.samples_of(group)])
            counts = self._cut(costs)
            found.append(len(counts))
            if self.limits.padded:
                self._padded_cost += float((costs[np.cumsum(counts) - 1] * counts).sum())
        if not self.is_new_each_epoch:
            return np.array(found, dtype=np.int64)
        # Room for other compositions, which are a little less even.
        raised = [count + -(-count // 50) for count in found]
        sizes = [len(self.costs[self.samples_of(group)]) for group in groups.tolist()]
        return np.minimum(raised, sizes)

    def plan(self, groups: Ints, keys: Sequence[int | None]) -> list[RowParts]:
        """Return the parts of all batches of some groups."""
        return [self._plan_group(*one) for one in zip(groups.tolist(), keys, strict=True)]

    def _plan_group(self, group: int, key: int | None) -> RowParts:
        members = self.samples_of(group)
        costs = self.costs[members]
        wanted = int(min(self.firsts[group + 1] - self.firsts[group], len(costs)))
        order = np.argsort(costs, kind="stable")
        counts = self._cut(costs[order])
        if key is not None:
            draws = np.random.Generator(np.random.PCG64(key)).random(len(costs))
            for jitter in _JITTERS:
                tried = np.argsort(costs * (1 + jitter * draws), kind="stable")
                cut = self._cut(costs[tried])
                if len(cut) <= wanted:
                    order, counts = tried, cut
                    break
        counts = _split_largest(counts, wanted)
        numbers = np.arange(members.start, members.stop, dtype=np.int64)[order]
        return RowParts(counts, numbers, np.zeros_like(numbers), np.full_like(numbers, -1))

    def _cut(self, costs: Floats) -> Ints:
        """Return the number of samples of each batch of samples in the order in which they fill batches, shape (batches,)."""
        counts, first = list[int](), 0
        while first < len(costs):
            some = costs[first : first + self._max_samples]
            if self.limits.padded:
                if some[0]:  # the smallest
                    some = some[: max(1, int(self.limits.max_cost / some[0]))]
                total = np.maximum.accumulate(some) * np.arange(1, len(some) + 1)
            else:
                total = np.cumsum(some)
            counts.append(max(1, int(np.searchsorted(total, self.limits.max_cost, side="right"))))
            first += counts[-1]
        return np.array(counts, dtype=np.int64)


def _split_largest(counts: Ints, wanted: int) -> Ints:
    """Return the sizes of as many batches as wanted, of which the largest are halved."""
    sizes = counts.tolist()
    while len(sizes) < wanted:
        place = max(range(len(sizes)), key=sizes.__getitem__)
        half = sizes[place] // 2
        sizes[place : place + 1] = [half, sizes[place] - half]
    return np.array(sizes, dtype=np.int64)
