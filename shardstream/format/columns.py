"""Samples side by side: a column of each field."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, overload

import numpy as np

from shardstream.format.group import Sample

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
        places: Of each field, as long: buffer, start and end.
    """

    def __init__(self, frame: dict[str, list[Any]], places: dict[str, list[Any]]) -> None:
        self._frame, self._places = frame, places

    def in_place(self, places: Sequence[int] | Column) -> Found:
        """Return them where they belong, as `in_place`."""
        back = _back(places)
        return Found(_taken(self._frame, back), _taken(self._places, back))

    def __getitem__(self, taken: slice) -> Columns:
        columns = {name: column[taken] for name, column in self._frame.items()}
        for name, places in self._places.items():
            columns[name] = [bytes(buffer[start:end]) for buffer, start, end in places[taken]]
        return Columns(columns)


Samples = list[Sample | Exception] | Columns
"""Samples, each of which may be an error instead; columns have no errors."""


def in_place(samples: Samples, places: Sequence[int] | Column) -> Samples:
    """Return samples where they belong: the first at ``places[0]``, and so on; places are a permutation of 0 to n - 1."""
    if len(samples) < 2:
        return samples
    back = _back(places)
    if isinstance(samples, Columns):
        return Columns(_taken(samples.columns, back))
    return list(itemgetter(*back)(samples))


def _back(places: Sequence[int] | Column) -> list[int]:
    """Return the inverse of a permutation."""
    back = np.empty(len(places), dtype=np.int64)
    back[places] = np.arange(len(places))
    return back.tolist()


def _taken(columns: dict[str, list[Any]], places: list[int]) -> dict[str, list[Any]]:
    """Return of each column what is at these places, two at least."""
    take = itemgetter(*places)
    return {name: list(take(column)) for name, column in columns.items()}


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
