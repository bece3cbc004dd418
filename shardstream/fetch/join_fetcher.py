"""Read the samples of several catalogs, and join them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from shardstream.catalog import Catalog, JoinCatalog, JoinPart, Numbers, TableCatalog
from shardstream.errors import IndexMismatchError, SampleError
from shardstream.format import Columns, Sample, Samples

if TYPE_CHECKING:
    from shardstream.fetch.fetcher import Fetcher

_OWN = ("__key__", "__url__")


class OpenPart(Protocol):
    """Opens the fetcher of one catalog."""

    def __call__(self, catalog: Catalog, upcoming: Iterator[Numbers], share: float, /) -> Fetcher:
        """Return a fetcher; ``share`` is its fraction of the bytes of all."""


class JoinFetcher:
    """Read joined samples: each catalog by a fetcher of its own, which prefetches by the same plan.

    Args:
        catalog: The joined samples.
        upcoming: Sample numbers that will be requested, in groups that are read together, in order of first use.
        open_part: Opens the fetcher of a catalog.
    """

    def __init__(
        self, catalog: JoinCatalog, upcoming: Iterable[Numbers], open_part: OpenPart
    ) -> None:
        self._parts, self._left_out = catalog.parts, catalog.left_out
        means = np.array([one.total_bytes / max(1, len(one)) for one in catalog.catalogs])
        shares = (means / max(1.0, means.sum())).tolist()
        groups = itertools.tee(upcoming, len(means))
        self._first = open_part(catalog.first, groups[0], shares[0])
        self._others = [
            open_part(part.catalog, _numbers_of(part, group), share)
            for part, group, share in zip(catalog.parts, groups[1:], shares[1:], strict=True)
        ]

    def samples(self, numbers: Numbers) -> Samples:
        """Return the joined sample of each number, or the first error of its parts.

        Raises:
            IndexMismatchError: If samples of the same position have different keys.
        """
        if not len(numbers):
            return []
        joined = _without(self._first.samples(numbers), self._left_out)
        for part, fetcher in zip(self._parts, self._others, strict=True):
            theirs = part.numbers_of(numbers)
            places = np.flatnonzero(theirs >= 0)
            found = fetcher.samples(theirs[places])
            joined = _join_columns(joined, found, part) or _join_rows(joined, found, places, part)
        return joined

    def find(self, numbers: Numbers) -> None:
        """Return None: samples are joined at once."""

    def locate(self, numbers: Numbers) -> None:
        """Return None: samples are joined at once."""

    def stats(self) -> dict[str, float]:
        """Return the sums of the statistics of all parts."""
        found = [fetcher.stats() for fetcher in (self._first, *self._others)]
        names = dict.fromkeys(name for stats in found for name in stats)
        return {name: sum(stats.get(name, 0) for stats in found) for name in names}

    def close(self) -> None:
        """Close the fetchers of all parts."""
        for fetcher in (self._first, *self._others):
            fetcher.close()


def _numbers_of(part: JoinPart, groups: Iterator[Numbers]) -> Iterator[Numbers]:
    for group in groups:
        numbers = part.numbers_of(group)
        numbers = numbers[numbers >= 0]
        if len(numbers):  # an empty group is the end
            yield numbers


def _without(samples: Samples, left_out: frozenset[str]) -> Samples:
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


def _join_columns(samples: Samples, others: Samples, part: JoinPart) -> Columns | None:
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
    samples: Samples, others: Samples, places: Numbers, part: JoinPart
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
        return _with_fields(row, part.defaults, part.catalog.url_of(0))
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


class TableFetcher:
    """Read rows of a table.

    Args:
        catalog: The table.
    """

    def __init__(self, catalog: TableCatalog) -> None:
        self._catalog = catalog

    def samples(self, numbers: Numbers) -> Samples:
        """Return the row of each number, or what is wrong with it."""
        return self._catalog.rows(numbers)

    def find(self, numbers: Numbers) -> None:
        """Return None: rows are read at once."""

    def locate(self, numbers: Numbers) -> None:
        """Return None: rows are read at once."""

    def stats(self) -> dict[str, float]:
        """Return nothing: the table is in memory."""
        return {}

    def close(self) -> None:
        """Release nothing."""
