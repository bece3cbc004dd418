"""Rows that are made of parts of other samples, such as sequences packed to one length, windows, or batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardstream.errors import plural
from shardstream.format import Rows
from shardstream.order import RowParts, RowPlan
from shardstream.samples.base import Fetcher, Numbers, Samples
from shardstream.samples.view import Concat, ViewFetcher, ViewOfOne

Shares = npt.NDArray[np.float64]


class RowItem(NamedTuple):
    """The parts of a row, as they were read.

    Args:
        samples: The sample of each part, or its error.
        numbers: Number of each sample.
        starts: First element of each part in its sample.
        stops: Element after the last one; -1 for the end of the sample.
    """

    samples: list[Any]
    numbers: list[int]
    starts: list[int]
    stops: list[int]


class _RowFetcher(ViewFetcher):
    """Read the samples of rows; the item of a row is a `RowItem`."""

    _view: RowSamples
    # Those of a view whose samples are those of another would return samples.
    read, find = Fetcher.read, Fetcher.find

    def request(self, numbers: Numbers) -> Callable[[], Rows]:
        """Send the requests for the samples of rows, each once; return a function that waits for them."""
        parts = self._view.plan.parts(numbers)
        unique, places = np.unique(parts.numbers, return_inverse=True)
        wait = self.fetchers[0].request(unique)
        return lambda: list(_split(parts, places.tolist(), list(wait())))


def _split(parts: RowParts, places: list[int], samples: Sequence[Any]) -> Iterator[Any]:
    """Yield a `RowItem` for each row."""
    numbers, starts, stops = parts.numbers.tolist(), parts.starts.tolist(), parts.stops.tolist()
    first = 0
    for count in parts.counts.tolist():
        mine = slice(first, first + count)
        found = [samples[place] for place in places[mine]]
        yield RowItem(found, numbers[mine], starts[mine], stops[mine])
        first += count


class RowSamples(ViewOfOne):
    """Rows as samples: row i consists of the parts of other samples that a plan says.

    Args:
        whole: The other samples.
        plan: The parts of each row.
    """

    fetcher_type = _RowFetcher

    def __init__(self, whole: Samples, plan: RowPlan) -> None:
        super().__init__(whole)
        self.plan = plan

    def __len__(self) -> int:
        return len(self.plan)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of the samples of all rows, those in several rows counted as often."""
        return int(self.whole.mean_bytes * self.plan.num_parts)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset, and with the parts of any row."""
        digest = hashlib.sha256(f"rows {self.whole.fingerprint} {self.plan.fingerprint}\n".encode())
        return digest.hexdigest()[:16]

    @property
    def fields(self) -> tuple[str, ...] | None:
        """None: those of rows are known when they are made."""
        return None

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        return f"{self.plan.summary} in {plural(self.num_shards, 'shard')}"

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return zeros, and the number of the first sample of each row."""
        parts = self.plan.parts(numbers)
        return np.zeros_like(numbers), parts.numbers[parts.firsts]

    def numbers_in(self, place: int, numbers: Numbers) -> Numbers:  # noqa: ARG002  (there is one)
        """Return the numbers of the samples of some rows, each once, shape (m,)."""
        return np.unique(self.plan.parts(numbers).numbers)

    def sizes(self, numbers: Numbers) -> Numbers:
        """Return the bytes of the samples of each row, shape (n,)."""
        parts = self.plan.parts(numbers)
        return np.add.reduceat(self.whole.sizes(parts.numbers), parts.firsts)

    # Columns are those of samples, not of rows.
    column_names, read_columns = Samples.column_names, Samples.read_columns


def has_rows(samples: Samples) -> bool:
    """Return whether samples are rows, or some of them are, as in a mix."""
    if isinstance(samples, Concat):
        return any(map(has_rows, samples.inner))
    return isinstance(samples, RowSamples)


def samples_in_rows(samples: Samples) -> Samples:
    """Return the samples of which rows are made; those that are no rows are their own."""
    if isinstance(samples, RowSamples):
        return samples_in_rows(samples.whole)
    if isinstance(samples, Concat) and has_rows(samples):
        return Concat([samples_in_rows(one) for one in samples.inner])
    return samples


def parts_in_rows(samples: Samples, numbers: Numbers) -> tuple[Numbers, Numbers, Shares]:
    """Return the parts of rows, one row after the other.

    Args:
        samples: Rows, or samples that are no rows, which are parts of their own.
        numbers: Numbers of rows, or of copies; shape (n,).

    Returns:
        Place of the row in ``numbers``; number of the part in `samples_in_rows`, those of copies are copies; and share of the sample's elements that
        the part has. Shape (parts,) each.
    """
    if isinstance(samples, RowSamples):
        plan, parts = samples.plan, samples.plan.parts(numbers)
        rows = np.repeat(np.arange(len(numbers)), parts.counts)
        own = parts.numbers + numbers[rows] // len(samples) * len(samples.whole)
        places, found, shares = parts_in_rows(samples.whole, own)
        if plan.lengths is not None:
            own_shares = (parts.stops - parts.starts) / plan.lengths[parts.numbers]
            shares *= own_shares[places]
        return rows[places], found, shares
    if not (isinstance(samples, Concat) and has_rows(samples)):
        return np.arange(len(numbers)), numbers, np.ones(len(numbers))
    whole = Concat(list(map(samples_in_rows, samples.inner)))
    all_parts = [(numbers[:0], numbers[:0], np.empty(0))]
    kinds, own = samples.find(numbers)
    for kind in np.unique(kinds).tolist():
        is_mine = kinds == kind
        places, found, shares = parts_in_rows(samples.inner[kind], own[is_mine])
        copies, found = np.divmod(found, len(whole.inner[kind]))
        found += whole.firsts[kind] + copies * len(whole)
        all_parts.append((np.flatnonzero(is_mine)[places], found, shares))
    places, found, shares = map(np.concatenate, zip(*all_parts, strict=True))
    order = np.argsort(places, kind="stable")
    return places[order], found[order], shares[order]


def rows_with(samples: Samples, numbers: Numbers) -> Numbers:
    """Return the rows that may have parts of samples, among them all that have (see `RowPlan.rows_of`); shape (rows,).

    Args:
        samples: Rows, or samples that are no rows.
        numbers: Numbers in `samples_in_rows`, each once; shape (n,).
    """
    if isinstance(samples, RowSamples):
        return samples.plan.rows_of(rows_with(samples.whole, numbers))
    if not (isinstance(samples, Concat) and has_rows(samples)):
        return numbers
    kinds, own = Concat(list(map(samples_in_rows, samples.inner))).find(numbers)
    rows = [
        samples.firsts[kind] + rows_with(samples.inner[kind], own[kinds == kind])
        for kind in np.unique(kinds).tolist()
    ]
    return np.concatenate([np.empty_like(numbers, shape=0), *rows])
