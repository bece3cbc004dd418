"""Read the samples of several datasets, and join them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from shardstream.errors import IndexMismatchError, SampleError
from shardstream.format import Columns, Rows, Sample
from shardstream.samples.base import FetchOptions, Samples
from shardstream.samples.join_part import JoinPart
from shardstream.samples.mapped import Numbers
from shardstream.samples.view_fetcher import ViewFetcher

_OWN = ("__key__", "__url__")


class JoinFetcher(ViewFetcher):
    """Read joined samples: each dataset by a fetcher of its own, which prefetches by the same plan.

    Args:
        inner: The datasets, the first one first.
        weights: Share of each in the budget.
        parts: How the others are joined to the first.
        left_out: Fields of the first that are left out.
        upcoming: As in `Samples.open_fetcher`.
        options: Of all fetchers together.
    """

    def __init__(
        self,
        inner: Sequence[Samples],
        weights: Sequence[float],
        parts: Sequence[JoinPart],
        left_out: frozenset[str],
        upcoming: Iterable[Numbers] | None,
        options: FetchOptions,
    ) -> None:
        self._parts, self._left_out, self._length = parts, left_out, len(inner[0])
        super().__init__(inner, weights, upcoming, self._part_numbers, options)

    def samples(self, numbers: Numbers) -> Rows:
        """Return the joined sample of each number, or the first error of its parts.

        Raises:
            IndexMismatchError: If samples of the same position have different keys.
        """
        if not len(numbers):
            return []
        joined = _without(self.fetchers[0].samples(numbers), self._left_out)
        for part, fetcher in zip(self._parts, self.fetchers[1:], strict=True):
            theirs = part.numbers_of(numbers, self._length)
            places = np.flatnonzero(theirs >= 0)
            found = fetcher.samples(theirs[places])
            joined = _join_columns(joined, found, part) or _join_rows(joined, found, places, part)
        return joined

    def _part_numbers(self, place: int, group: Numbers) -> Numbers:
        if not place:
            return group
        numbers = self._parts[place - 1].numbers_of(group, self._length)
        return numbers[numbers >= 0]


def _without(samples: Rows, left_out: frozenset[str]) -> Rows:
    """Return samples without some fields."""
    if not left_out:
        return samples
    if isinstance(samples, Columns):
        kept = {name: one for name, one in samples.columns.items() if name not in left_out}
        return Columns(kept)
    return [
        row if isinstance(row, Exception) else {n: v for n, v in row.items() if n not in left_out}
        for row in samples
    ]


def _names_in(part: JoinPart, fields: Iterable[str]) -> dict[str, str]:
    """Return field -> its name there, of those that a sample of the other dataset adds."""
    if part.fields is None:
        return {field: field for field in fields if field not in _OWN}
    known = frozenset(fields)
    return {field: name for field, name in part.fields.items() if name in known}


def _join_columns(samples: Rows, others: Rows, part: JoinPart) -> Columns | None:
    """Join whole columns; None where samples are missing, of several forms or wrong, or two datasets have a field."""
    if not (isinstance(samples, Columns) and isinstance(others, Columns)):
        return None
    mine, theirs = samples.columns, others.columns
    names = _names_in(part, theirs)
    if part.is_strict and len(names) < len(part.fields or ()):
        return None
    added = {field: theirs[name] for field, name in names.items()}
    if mine["__key__"] != theirs["__key__"] or not added.keys().isdisjoint(mine):
        return None
    if len(set(names.values())) < len(names):  # batches would share the memory of a column
        return None
    return Columns({**mine, **added})


def _join_rows(
    samples: Rows, others: Rows, places: Numbers, part: JoinPart
) -> list[Sample | Exception]:
    """Join samples one by one; ``places`` are those of the samples that the other dataset has."""
    rows = [row if isinstance(row, Exception) else dict(row) for row in samples]
    found: dict[int, Sample | Exception] = dict(zip(places.tolist(), others, strict=True))
    return [_join(row, found.get(place), part) for place, row in enumerate(rows)]


def _join(
    row: Sample | Exception, other: Sample | Exception | None, part: JoinPart
) -> Sample | Exception:
    """Add the fields of another sample to a sample; an error takes the place of both.

    Raises:
        IndexMismatchError: If they have different keys.
    """
    if isinstance(row, Exception) or isinstance(other, Exception):
        return row if isinstance(row, Exception) else cast("Exception", other)
    if other is None:
        return _with_fields(row, part.defaults, "missing=")
    key = other["__key__"]
    if key != row["__key__"]:
        raise IndexMismatchError(
            f"joined samples have the keys {row['__key__']!r} and {key!r}, the second in {other.get('__url__')}: "
            "the datasets are not in the same order",
            remedy="run 'shardstream index --columns __key__' on each, to join them by key",
            shard=row.get("__url__"),
            key=row["__key__"],
        )
    names = _names_in(part, other)
    missing = [field for field in part.fields or () if field not in names]
    if part.is_strict and missing:
        return SampleError(
            f"its sample or row in {other.get('__url__')} has no such field",
            remedy="pass missing='keep' (--missing keep) if some samples lack it",
            shard=row.get("__url__"),
            key=row["__key__"],
            field=missing[0],
        )
    added = {field: other[name] for field, name in names.items()}
    return _with_fields(row, added, str(other.get("__url__")))


def _with_fields(row: Sample, added: Mapping[str, object], url: str) -> Sample | Exception:
    both = next((field for field in added if field in row), None)
    if both is not None:
        return SampleError(
            f"two of the joined datasets have the field {both!r}; the second is {url}",
            remedy=f"take it under another name, {{URL: {{'new.{both}': {both!r}}}}}, or leave it out: ss.join(first, {{URL: fields}})",
            shard=row.get("__url__"),
            key=row["__key__"],
            field=both,
        )
    row.update(added)
    return row
