"""Choose samples: by a condition on columns, by class, by key; and count values of columns for histograms."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardstream.catalog import ShardCatalog, find_where
from shardstream.errors import OptionError, ShardStreamError
from shardstream.format import KEY_COLUMN, scan_shard
from shardstream.samples import Numbers, Samples, Subset

_KEPT = 16  # selections, of 8 bytes for each chosen sample
_FOUND = 1000  # samples that a search by key returns
_SEARCH_S = 20.0
NO_COLUMNS = (
    "the shards have no columns: run 'shardstream index --columns FIELDS' with fields of numbers or text, or values in JSON (json.NAME); "
    "'--columns __key__' for the keys alone"
)


class Selections:
    """Samples that fulfil conditions; thread-safe. The results of the last conditions are kept.

    Args:
        samples: The samples.
        catalog: Those of all shards, deleted ones, too.
        numbers_here: Numbers of samples of the catalog, shape (n,), to their numbers, -1 for those that are deleted.
    """

    def __init__(
        self, samples: Samples, catalog: ShardCatalog, numbers_here: Callable[[Numbers], Numbers]
    ) -> None:
        self._samples, self._catalog, self._numbers_here = samples, catalog, numbers_here
        self._kept: OrderedDict[str, Numbers] = OrderedDict()
        self._table: Any = None
        self._missing: str | None = None  # why there are no columns
        self._lock = threading.Lock()

    def columns(self) -> Any:
        """Return the columns of all samples as a table; row i is sample i. They are read once.

        Raises:
            OptionError: If the shards have no columns, or pyarrow is not installed.
            ShardStreamError: If they cannot be read.
        """
        with self._lock:
            if self._missing is not None:
                raise OptionError(self._missing)
            if self._table is None:
                try:
                    self._table = self._samples.read_columns(None)
                except OptionError as error:
                    self._missing = str(error)
                    raise
            return self._table

    def names(self) -> list[str]:
        """Return the names of the columns; none if there are no columns, or they cannot be read."""
        try:
            return self._samples.column_names()
        except ShardStreamError:
            return []

    def sort(self, numbers: Numbers | None, column: str, *, descending: bool) -> Numbers:
        """Return samples in the order of a column: those without a value come last, equal ones keep their order.

        Args:
            numbers: The samples; None for all.
            column: Name of the column.
            descending: Whether the largest value comes first.

        Raises:
            OptionError: If there is no such column, or its values have no order.
            ShardStreamError: If columns cannot be read.
        """
        table = self.columns()
        if column not in table.column_names:
            raise OptionError(f"no column {column!r}. Columns: {', '.join(table.column_names)}")
        import pyarrow.compute as pc  # noqa: PLC0415  (an extra)

        values = table[column] if numbers is None else table[column].take(numbers)
        try:
            order = "descending" if descending else "ascending"
            places: Numbers = pc.array_sort_indices(values.combine_chunks(), order).to_numpy()
        except NotImplementedError as error:
            raise OptionError(f"the values of {column!r} have no order: {values.type}") from error
        return places.astype(np.int64) if numbers is None else numbers[places]

    def choose(self, where: str) -> Numbers:
        """Return the numbers of the samples that fulfil a condition in SQL, ascending.

        Raises:
            OptionError: If it is invalid, or there are no columns.
            ShardStreamError: If columns cannot be read.
        """
        kept = self._kept.get(where)
        if kept is not None:
            return kept
        numbers = find_where(self._samples, where)
        with self._lock:
            self._kept[where] = numbers
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return numbers

    def samples(self, where: str) -> Samples:
        """Return the samples that fulfil a condition, as ``ShardDataset(where=)`` reads them."""
        return Subset(self._samples, self.choose(where)) if where else self._samples

    def classes_of(self) -> Numbers | None:
        """Return the class number of each sample, -1 where it is unknown; None without the column ``cls``."""
        try:
            table = self.columns()
        except OptionError:
            return None
        if "cls" not in table.column_names:
            return None
        try:
            column = table["cls"].fill_null(-1).to_numpy()
            return np.asarray(column, dtype=np.int64)
        except (ValueError, TypeError):
            return None

    def search(self, text: str) -> tuple[list[int], str]:
        """Return the numbers of samples whose key contains a text, and what the user should know about them.

        A key that is equal comes first. At most 1,000 are returned.

        Raises:
            OptionError: If the shards are remote and have no column of keys.
        """
        try:
            table = self.columns()
        except OptionError:
            table = None
        if table is not None and KEY_COLUMN in table.column_names:
            import pyarrow.compute as pc  # noqa: PLC0415  (an extra)

            found = np.flatnonzero(pc.match_substring(table[KEY_COLUMN], text).to_numpy())
            equal = np.flatnonzero(pc.equal(table[KEY_COLUMN], text).to_numpy(zero_copy_only=False))
            return _equal_first(equal.tolist(), found.tolist())
        if not self._catalog.is_local:
            raise OptionError(
                f"a search by key would read the headers of all samples; {NO_COLUMNS}, or use 'shardstream cat --key'"
            )
        return search_headers(self._catalog, text, time.monotonic, self._numbers_here)


def search_headers(
    catalog: ShardCatalog,
    text: str,
    clock: Callable[[], float],
    numbers_here: Callable[[Numbers], Numbers],
) -> tuple[list[int], str]:
    """Search keys in the headers of local shards, for up to 20 s; returns as `Selections.search`."""
    equal: list[int] = []
    found: list[int] = []
    first, end_s = 0, clock() + _SEARCH_S
    for number in range(catalog.num_shards):
        if clock() > end_s:
            note = f"searched the first {first:,} of {len(catalog):,} samples in {_SEARCH_S:.0f} s; {NO_COLUMNS} to search all"
            return _equal_first(equal, found)[0], note
        tar = memoryview(catalog.map_shard(number))
        try:
            keys = scan_shard(
                lambda at, size, tar=tar: bytes(tar[at : at + size]),  # type: ignore[misc]
                end=len(tar),
                shard=catalog.url_of(number),
            ).keys
        except ShardStreamError:  # the grid shows what is wrong with it
            keys = []
        places = [place for place, key in enumerate(keys) if text in key]
        numbers = numbers_here(first + np.array(places, dtype=np.int64)).tolist()
        for place, one in zip(places, numbers, strict=True):
            if one >= 0:
                (equal if keys[place] == text else found).append(one)
        first += catalog.shards[number].nsamples or 0
    return _equal_first(equal, found)


def _equal_first(equal: Sequence[int], found: Sequence[int]) -> tuple[list[int], str]:
    known = set(equal)
    numbers = [*equal, *(number for number in found if number not in known)]
    note = f"the first {_FOUND:,} of {len(numbers):,}" if len(numbers) > _FOUND else ""
    return numbers[:_FOUND], note
