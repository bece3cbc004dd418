"""Samples side by side: a column of each field."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, overload

import numpy as np

from shardstream.format.samples import Sample
from shardstream.format.tar_reader import Buffer

Column = np.ndarray[Any, np.dtype[Any]]


class Columns(Sequence[Sample]):
    """Samples with the same fields, a list a field: a batch of them is made without making a dict of each.

    Args:
        columns: ``__key__``, ``__url__`` and the fields, equally long.
    """

    __slots__ = ("columns",)

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["__key__"])

    @overload
    def __getitem__(self, place: int) -> Sample: ...

    @overload
    def __getitem__(self, place: slice) -> Columns: ...

    def __getitem__(self, place: int | slice) -> Sample | Columns:
        taken = {name: column[place] for name, column in self.columns.items()}
        return Columns(taken) if isinstance(place, slice) else taken

    def __iter__(self) -> Iterator[Sample]:
        keys, urls, *fields = self.columns.items()
        samples = [
            {"__key__": key, "__url__": url} for key, url in zip(keys[1], urls[1], strict=True)
        ]
        for name, column in fields:
            for sample, value in zip(samples, column, strict=True):
                sample[name] = value
        return iter(samples)


class Found:
    """Samples with the same fields, checked; their bytes are copied when some of them are taken out.

    Args:
        frame: ``__key__`` and ``__url__``, equally long.
        buffers: What the bytes of each are in, as long.
        places: Of each field: where its bytes start and where they end, shape (n,) each.
    """

    def __init__(
        self,
        frame: dict[str, list[Any]],
        buffers: list[Buffer],
        places: dict[str, tuple[Column, Column]],
    ) -> None:
        self._frame, self._buffers, self._places = frame, buffers, places

    def restore_order(self, places: Sequence[int] | Column) -> Found:
        """Return them where they belong, as `restore_order`."""
        back = _back(places)
        take = itemgetter(*back.tolist())
        frame = {name: list(take(column)) for name, column in self._frame.items()}
        moved = {name: (starts[back], ends[back]) for name, (starts, ends) in self._places.items()}
        return Found(frame, list(take(self._buffers)), moved)

    def __getitem__(self, taken: slice) -> Columns:
        columns = {name: column[taken] for name, column in self._frame.items()}
        buffers = self._buffers[taken]
        for name, (starts, ends) in self._places.items():
            places = zip(buffers, starts[taken].tolist(), ends[taken].tolist(), strict=True)
            columns[name] = [bytes(buffer[start:end]) for buffer, start, end in places]
        return Columns(columns)


Samples = list[Sample | Exception] | Columns
"""Samples, each of which may be an error instead; columns have no errors."""


def restore_order(samples: Samples, places: Sequence[int] | Column) -> Samples:
    """Return samples where they belong: the first at ``places[0]``, and so on; places are a permutation of 0 to n - 1."""
    if len(samples) < 2:
        return samples
    take = itemgetter(*_back(places).tolist())
    if isinstance(samples, Columns):
        return Columns({name: list(take(column)) for name, column in samples.columns.items()})
    return list(take(samples))


def _back(places: Sequence[int] | Column) -> Column:
    """Return the inverse of a permutation, shape (n,)."""
    back = np.empty(len(places), dtype=np.int64)
    back[places] = np.arange(len(places))
    return back


def as_rows(samples: Samples) -> list[object]:
    """Return samples one by one, for `from_rows`: of columns a tuple each."""
    if not isinstance(samples, Columns):
        return list(samples)
    return list(zip(itertools.repeat(tuple(samples.columns)), *samples.columns.values()))


def from_rows(rows: list[Any]) -> Samples:
    """Return as samples again what `as_rows` made of several of them: as columns where all have the same fields."""
    if set(map(type, rows)) == {tuple}:
        names, *columns = zip(*rows, strict=False)
        if names.count(names[0]) == len(names):
            return Columns(dict(zip(names[0], map(list, columns), strict=True)))
    return [dict(zip(row[0], row[1:], strict=True)) if type(row) is tuple else row for row in rows]
