"""Read the samples of several catalogs, and join them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardstream.catalog import Catalog, JoinCatalog, JoinPart, Numbers, TableCatalog
from shardstream.errors import IndexMismatchError, SampleError
from shardstream.format import Sample, Samples, as_rows, from_rows

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
        self._parts = catalog.parts
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
        joined = [_copied(row) for row in as_rows(self._first.samples(numbers))]
        for part, fetcher in zip(self._parts, self._others, strict=True):
            theirs = part.numbers_of(numbers)
            places = np.flatnonzero(theirs >= 0)
            rows = as_rows(fetcher.samples(theirs[places]))
            for place, row in zip(places.tolist(), rows, strict=True):
                joined[place] = _join(joined[place], row, part)
            for place in np.flatnonzero(theirs < 0).tolist():
                joined[place] = _join(joined[place], dict(part.defaults), part)
        return from_rows(joined)

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


def _copied(row: object) -> object:
    return dict(row) if isinstance(row, Mapping) else row


def _join(row: object, other: object, part: JoinPart) -> object:
    """Add the fields of another sample to a sample; an error takes the place of both.

    Raises:
        IndexMismatchError: If they have different keys.
    """
    if not isinstance(row, dict) or not isinstance(other, Mapping):
        return other if isinstance(row, dict) else row
    key = other.get("__key__", row["__key__"])
    if key != row["__key__"]:
        raise IndexMismatchError(
            f"joined samples have the keys {row['__key__']!r} and {key!r}, the second in {other.get('__url__')}: "
            "the datasets are not in the same order",
            remedy="run 'shardstream index --columns __key__' on each, to join them by key",
            shard=row.get("__url__"),
            key=row["__key__"],
        )
    return _with_fields(row, other, part)


def _with_fields(row: Sample, other: Mapping[str, object], part: JoinPart) -> object:
    for field, value in other.items():
        if field in _OWN or (part.fields is not None and field not in part.fields):
            continue
        if field in row:
            return SampleError(
                f"two of the joined datasets have the field {field!r}; the second is {other.get('__url__')}",
                remedy="choose the fields of each dataset: ss.join(first, {url: fields})",
                shard=row.get("__url__"),
                key=row["__key__"],
                field=field,
            )
        row[field] = value
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
