"""Hold samples as columns, one list per field."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, overload

import numpy as np

from shardstream.format.samples import Sample
from shardstream.format.tar_reader import Buffer

Column = np.ndarray[Any, np.dtype[Any]]
_VIEW_BYTES = 16 << 10  # mean size of bodies from which views save more than they cost


Values = list[Any] | Column
"""Values of one field of several samples; numbers of one shape may be an array, shape (n, ...)."""


class Columns(Sequence[Sample]):
    """Samples with the same fields, as one list or array per field, so that batching needs no dict per sample.

    Args:
        columns: ``__key__``, ``__url__`` and the fields, equally long.
    """

    __slots__ = ("columns",)

    def __init__(self, columns: Mapping[str, Values]) -> None:
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


class TupleColumns(Sequence[tuple[Any, ...]]):
    """Tuples of one length, as one list or array per element.

    Args:
        columns: The elements, equally long; at least one.
    """

    __slots__ = ("columns",)

    def __init__(self, columns: Sequence[Values]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, place: int) -> tuple[Any, ...]: ...

    @overload
    def __getitem__(self, place: slice) -> TupleColumns: ...

    def __getitem__(self, place: int | slice) -> tuple[Any, ...] | TupleColumns:
        taken = [column[place] for column in self.columns]
        return TupleColumns(taken) if isinstance(place, slice) else tuple(taken)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return zip(*self.columns, strict=True)


class JoinedFields(NamedTuple):
    """Samples with the same fields, whose bytes are one buffer per field."""

    keys: list[str]
    """Key of each sample."""
    urls: list[str]
    """URL of the shard of each sample."""
    fields: dict[str, tuple[bytes, Column]]
    """Field -> the bytes of all samples, and the offsets of each sample's part, shape (n + 1,), int64."""


class LazyColumns:
    """Checked samples with the same fields, whose bytes are copied at access.

    Args:
        frame: ``__key__`` and ``__url__``, equally long.
        buffers: Buffer that holds the bytes of each sample.
        places: Field -> start and end offsets of its bytes, shape (n,) each.
    """

    def __init__(
        self,
        frame: dict[str, list[Any]],
        buffers: list[Buffer],
        places: dict[str, tuple[Column, Column]],
    ) -> None:
        self._frame, self._buffers, self._places = frame, buffers, places

    def restore_order(self, places: Sequence[int] | Column) -> LazyColumns:
        """Return the samples in the order of `restore_order`."""
        inverse = _invert_permutation(places)
        take = itemgetter(*inverse.tolist())
        frame = {name: list(take(column)) for name, column in self._frame.items()}
        reordered = {
            name: (starts[inverse], ends[inverse]) for name, (starts, ends) in self._places.items()
        }
        return LazyColumns(frame, list(take(self._buffers)), reordered)

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that all samples have."""
        return tuple(self._places)

    def select(self, fields: Iterable[str]) -> LazyColumns:
        """Return the samples with some of their fields only."""
        return LazyColumns(
            self._frame, self._buffers, {name: self._places[name] for name in fields}
        )

    def sizes(self, fields: Iterable[str] | None = None) -> Column:
        """Return the bytes of each sample's fields, shape (n,), int64; of all fields by default."""
        names = self._places if fields is None else self._places.keys() & {*fields}
        total = np.zeros(len(self._buffers), dtype=np.int64)
        for name in names:
            starts, ends = self._places[name]
            total += ends - starts
        return total

    def join(self, taken: slice, fields: Iterable[str] | None = None) -> JoinedFields:
        """Copy fields of a slice of the samples to one buffer each; fields that the samples lack are left out."""
        buffers = self._buffers[taken]
        joined: dict[str, tuple[bytes, Column]] = {}
        for name in self._places if fields is None else [f for f in fields if f in self._places]:
            starts, ends = (places[taken] for places in self._places[name])
            offsets = np.concatenate(([0], np.cumsum(ends - starts)))
            pieces = zip(buffers, starts.tolist(), ends.tolist(), strict=True)
            if offsets[-1] < _VIEW_BYTES * len(buffers):
                # A slice is a copy; views are collected by the garbage collector: 2.8 us each instead of 0.2.
                data = b"".join([buffer[start:end] for buffer, start, end in pieces])
            else:
                data = b"".join([memoryview(buffer)[start:end] for buffer, start, end in pieces])
            joined[name] = data, offsets
        return JoinedFields(self._frame["__key__"][taken], self._frame["__url__"][taken], joined)

    def copy(self, taken: slice) -> Columns:
        """Copy a slice of the samples."""
        columns = {name: column[taken] for name, column in self._frame.items()}
        buffers = self._buffers[taken]
        for name, (starts, ends) in self._places.items():
            places = zip(buffers, starts[taken].tolist(), ends[taken].tolist(), strict=True)
            columns[name] = [bytes(buffer[start:end]) for buffer, start, end in places]
        return Columns(columns)


Rows = list[Sample | Exception] | Columns
"""Samples, some of which may be errors; `Columns` have no errors."""


def restore_order(samples: Rows, places: Sequence[int] | Column) -> Rows:
    """Return samples with the first at ``places[0]``, and so on; places are a permutation of 0 to n - 1."""
    if len(samples) < 2:
        return samples
    take = itemgetter(*_invert_permutation(places).tolist())
    if isinstance(samples, Columns):
        return Columns({name: list(take(column)) for name, column in samples.columns.items()})
    return list(take(samples))


def _invert_permutation(places: Sequence[int] | Column) -> Column:
    """Return the inverse of a permutation, shape (n,)."""
    inverse = np.empty(len(places), dtype=np.int64)
    inverse[places] = np.arange(len(places))
    return inverse


def as_rows(samples: Rows) -> list[object]:
    """Return single samples for `from_rows`; rows of columns are tuples."""
    if not isinstance(samples, Columns):
        return list(samples)
    return list(zip(itertools.repeat(tuple(samples.columns)), *samples.columns.values()))


def from_rows(rows: list[Any]) -> Rows:
    """Return rows of `as_rows` as samples; as columns if all have the same fields."""
    if set(map(type, rows)) == {tuple}:
        names, *columns = zip(*rows, strict=False)
        if names.count(names[0]) == len(names):
            return Columns(dict(zip(names[0], map(list, columns), strict=True)))
    return [dict(zip(row[0], row[1:], strict=True)) if type(row) is tuple else row for row in rows]
