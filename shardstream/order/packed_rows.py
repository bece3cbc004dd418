"""Pack sequences of known length into rows of one length: whole ones by best fit, or all of them one after the other.

Best fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973): the sequences of a group, longest first, each go to the fullest row
that has room for them. Many groups are packed at the same time, an array operation for one sequence of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from shardstream.errors import OptionError, plural
from shardstream.order.permutation import Ints
from shardstream.order.row_plan import GroupedRows, RowParts, RowPlan, digest_of, ranges

Long = Literal["split", "cut", "error"]

_ROWS_OF_GROUP = 128  # so that the last row of a group wastes little
_MIN_GROUP, _MAX_GROUP = 128, 1 << 16
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
        self._lengths = lengths.astype(np.min_scalar_type(lengths.max(initial=0)))
        self._num_tokens = int(
            lengths.sum() if long == "split" else np.minimum(lengths, length).sum()
        )
        mean = max(1.0, self._num_tokens / max(1, len(lengths)))
        group = min(max(int(_ROWS_OF_GROUP * length / mean), _MIN_GROUP), _MAX_GROUP)
        super().__init__(len(lengths), group, is_new_each_epoch=is_new_each_epoch, seed=seed)

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Tokens of each sequence, shape (n,)."""
        return self._lengths

    @property
    def num_parts(self) -> int:
        """Parts of all rows: sequences, and pieces of long ones."""
        if self._long == "cut":
            return len(self._lengths) - self._num_empty
        return int((-(-self._lengths.astype(np.int64) // self.length)).sum())

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the composition of any row."""
        options = (self.length, self._long, self.is_new_each_epoch, self._group)
        return digest_of("best fit", options, self._lengths.astype("<i8"))

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
        return f"{plural(len(self), 'row')} of {self.length} tokens, {self.filled:.1%} filled, from {plural(len(self._lengths), 'sequence')}{notes}"

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
        sizes = self._lengths[members].astype(np.int64)
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

    def __init__(self, lengths: Ints, *, length: int, drop_last: bool = False) -> None:
        self._lengths = lengths.astype(np.min_scalar_type(lengths.max(initial=0)))
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
    def lengths(self) -> np.ndarray[Any, Any]:
        """Tokens of each sequence, shape (n,)."""
        return self._lengths

    @property
    def num_parts(self) -> int:
        """Parts of all rows, at most."""
        return len(self._lengths) + len(self)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with the composition of any row."""
        return digest_of("concat", self.length, self._drop_last, self._lengths.astype("<i8"))

    @property
    def filled(self) -> float:
        """Share of the tokens of all rows that are no padding, from 0 to 1."""
        return min(1.0, self._num_tokens / max(1, len(self) * self.length))

    @property
    def summary(self) -> str:
        """Rows and what they hold, for ``repr``."""
        return f"{plural(len(self), 'row')} of {self.length} tokens, cut out of {plural(len(self._lengths), 'sequence')}"

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
            int(self._lengths[number : (block + 1) * _BLOCK].sum(dtype=np.int64))
            for number, block in zip(samples.tolist(), blocks.tolist(), strict=True)
        ]
        starts = self._ends[blocks] - np.array(sizes, dtype=np.int64)
        stops = starts + self._lengths[samples].astype(np.int64)
        firsts, ends = starts // self.length, -(-stops // self.length)
        rows = np.unique(ranges(firsts, np.where(stops > starts, ends - firsts, 0)))
        return rows[rows < len(self)]

    def _row(self, row: int) -> tuple[Ints, Ints, Ints]:
        """Return the sample numbers of a row, and the first token and the one after the last of each."""
        begin, end = row * self.length, min((row + 1) * self.length, self._num_tokens)
        first, last = np.searchsorted(self._ends, [begin, end - 1], side="right").tolist()
        sizes = self._lengths[first * _BLOCK : (last + 1) * _BLOCK].astype(np.int64)
        ends = np.cumsum(sizes) + (self._ends[first - 1] if first else 0)
        starts = np.maximum(begin - (ends - sizes), 0)
        stops = np.minimum(end - (ends - sizes), sizes)
        inside = np.flatnonzero(stops > starts)
        return inside + first * _BLOCK, starts[inside], stops[inside]
