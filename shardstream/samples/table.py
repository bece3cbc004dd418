"""Rows of a table as samples that are joined to others."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardstream.format import KEY_COLUMN, Rows, Sample
from shardstream.samples.base import Fetcher, FetchOptions, Numbers, Samples, places_in

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 1 << 16


class RowEncoder(Protocol):
    """Makes samples of the rows of tables; picklable."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Field -> column."""

    def encode(self, rows: pa.Table, places: Numbers) -> list[Sample | Exception]:
        """Return the encoded fields of each row, or what is wrong with it; ``places`` are its numbers in all tables."""

    def where(self, place: int) -> str:
        """Return the table of a row and its number there, for messages."""


class Table(Samples):
    """Rows of tables in memory, as samples of encoded fields.

    Args:
        table: The columns of keys and of fields.
        keys: Name of the column of keys, which are text.
        url: URL of the tables.
        encoder: Encodes rows.
    """

    is_local = True

    def __init__(
        self,
        table: pa.Table,
        keys: str,
        url: str,
        encoder: RowEncoder,
    ) -> None:
        self._table, self._key_column, self._url = table, keys, url
        self._encoder, self._length = encoder, int(table.num_rows)
        self._kept: Numbers | None = None  # numbers of these rows, after `restrict_to`

    def __len__(self) -> int:
        return self._length

    @property
    def num_shards(self) -> int:
        """One: the table."""
        return 1

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of the table in memory."""
        return int(self._table.nbytes)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the values, and with the fields they go to."""
        digest = hashlib.sha256(f"table {sorted(self._encoder.columns.items())}\n".encode())
        # A copy of all would double the memory.
        for first in range(0, self._table.num_rows, _ROWS_AT_ONCE):
            (rows,) = self._table.slice(first, _ROWS_AT_ONCE).combine_chunks().to_batches()
            digest.update(rows.serialize())
        return digest.hexdigest()[:16]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that columns go to."""
        return tuple(sorted(self._encoder.columns))

    def url_of(self, shard: int) -> str:  # noqa: ARG002
        """Return the URL of the tables."""
        return self._url

    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return zeros: all rows are in the tables."""
        return np.zeros_like(numbers)

    def place_of(self, number: int) -> tuple[str, int | None]:
        """Return the table of a row and its number there."""
        return self._encoder.where(number % len(self)), None

    def column_names(self) -> list[str]:
        """Return the name of the column of keys; other columns are fields."""
        return [KEY_COLUMN]

    def read_columns(self, names: Sequence[str] | None, *, scans: bool = False) -> pa.Table:
        """Return the keys of the rows as a table.

        Raises:
            OptionError: If others are wanted.
        """
        if names is not None and [*names] != self.column_names():
            return super().read_columns(names, scans=scans)
        return self._table.select([self._key_column]).rename_columns([KEY_COLUMN])

    def restrict_to(self, numbers: Numbers) -> Table:
        """Return some rows under the same numbers (see `Samples.restrict_to`)."""
        kept = np.unique(numbers % max(1, len(self)))
        part = copy.copy(self)
        part.__dict__.pop("fingerprint", None)
        part.__dict__["total_bytes"] = self.total_bytes
        part._table, part._kept = self._table.take(places_in(self._kept, kept)), kept
        return part

    def open_fetcher(
        self,
        upcoming: Iterable[Numbers] | None = None,  # noqa: ARG002  (rows are in memory)
        options: FetchOptions | None = None,  # noqa: ARG002
    ) -> Fetcher:
        """Open a fetcher that encodes rows."""
        return TableFetcher(self)

    def rows(self, numbers: Numbers) -> list[Sample | Exception]:
        """Return rows as samples of bytes, or what is wrong with them; null is a missing field."""
        numbers = numbers % max(1, len(self))
        taken = self._table.take(places_in(self._kept, numbers))
        found = self._encoder.encode(taken, numbers)
        for row, key in zip(found, taken[self._key_column].to_pylist(), strict=True):
            if not isinstance(row, Exception):
                row |= {"__key__": key, "__url__": self._url}
        return found


class TableFetcher(Fetcher):
    """Read rows of a table.

    Args:
        table: The table.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def samples(self, numbers: Numbers) -> Rows:
        """Return the row of each number, or what is wrong with it."""
        return self._table.rows(numbers)
