"""Samples of several datasets joined to one sample each, by position or by key."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardstream.errors import plural
from shardstream.samples.base import Fetcher, FetchOptions, Samples
from shardstream.samples.join_fetcher import JoinFetcher
from shardstream.samples.join_part import JoinPart
from shardstream.samples.mapped import Numbers
from shardstream.samples.view import View

if TYPE_CHECKING:
    import pyarrow as pa


class Join(View):
    """Samples of a first dataset, in its order, each with the fields of one sample of other datasets.

    Shards, places and columns are those of the first.

    Args:
        first: The first dataset.
        parts: The others.
        left_out: Fields of the first that are left out.
    """

    def __init__(
        self, first: Samples, parts: Sequence[JoinPart], left_out: Collection[str] = ()
    ) -> None:
        super().__init__([first, *(part.samples for part in parts)])
        self.parts, self.left_out = tuple(parts), frozenset(left_out)
        self.can_coalesce = first.can_coalesce  # others may be tables, or in any order

    @property
    def first(self) -> Samples:
        """The first dataset."""
        return self.inner[0]

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all samples; the mean size of those of each dataset, times the number of samples."""
        means = (one.total_bytes / max(1, len(one)) for one in self.inner)
        return int(sum(means) * len(self.first))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the datasets, with which of their samples are joined, and with the chosen fields."""
        digest = hashlib.sha256(f"join {self.first.fingerprint}\n".encode())
        digest.update(f"{sorted(self.left_out)}\n".encode() if self.left_out else b"")
        for part in self.parts:
            fields = None if part.fields is None else sorted(part.fields.items())
            defaults = sorted(part.defaults.items())
            digest.update(f"{part.samples.fingerprint} {fields} {defaults}\n".encode())
            if part.numbers is not None:
                digest.update(part.numbers.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Fields of all datasets; None if those of one are unknown."""
        found = [self.first.fields, *(part.known_fields for part in self.parts)]
        if None in found:
            return None
        added = {name for names in found[1:] for name in names or ()}
        return tuple(sorted({*(found[0] or ())}.difference(self.left_out) | added))

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        return f"{plural(len(self), 'sample')} of {len(self.inner)} datasets"

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return zeros, and the numbers: a sample is where it is in the first dataset."""
        return np.zeros(len(numbers), dtype=np.int64), numbers

    def sizes(self, numbers: Numbers) -> Numbers:
        """Return the bytes of each sample in all datasets, shape (n,)."""
        sizes = self.first.sizes(numbers)
        for part in self.parts:
            theirs = part.numbers_of(numbers, len(self))
            has = theirs >= 0
            sizes[has] += part.samples.sizes(theirs[has])
        return sizes

    def restrict_to(self, numbers: Numbers) -> Join:
        """Return some samples under the same numbers (see `Samples.restrict_to`)."""
        parts = []
        for part in self.parts:
            theirs = part.numbers_of(numbers, len(self))
            parts.append(replace(part, samples=part.samples.restrict_to(theirs[theirs >= 0])))
        found = Join(self.first.restrict_to(numbers), parts, self.left_out)
        found.__dict__["total_bytes"] = self.total_bytes
        return found

    @property
    def has_columns(self) -> bool:
        """Whether the first dataset has columns."""
        return self.first.has_columns

    def read_columns(self, names: Sequence[str] | None) -> pa.Table:
        """Return the columns of the first dataset; row i is sample i."""
        return self.first.read_columns(names)

    def read_keys(self, *, scans: bool) -> pa.ChunkedArray | None:
        """Return the keys of all samples, in order."""
        return self.first.read_keys(scans=scans)

    def open_fetcher(
        self, upcoming: Iterable[Numbers] | None = None, options: FetchOptions | None = None
    ) -> Fetcher:
        """Open a fetcher for each dataset; together they have the budget of one."""
        means = [one.total_bytes / max(1, len(one)) for one in self.inner]
        return JoinFetcher(
            self.inner, means, self.parts, self.left_out, upcoming, options or FetchOptions()
        )
