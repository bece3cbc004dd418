"""Several datasets one after the other, such as those of a mix."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from shardstream.errors import OptionError
from shardstream.format import Rows, as_rows, from_rows
from shardstream.samples.base import Fetcher, FetchOptions, Samples
from shardstream.samples.mapped import Numbers
from shardstream.samples.view import View
from shardstream.samples.view_fetcher import ViewFetcher
from shardstream.storage import DEFAULT_REQUESTS, limit_of_worker

if TYPE_CHECKING:
    import pyarrow as pa


class Concat(View):
    """Samples of several datasets, one after the other.

    Args:
        inner: The datasets, at least one.
    """

    def __init__(self, inner: Sequence[Samples]) -> None:
        super().__init__(inner)
        self.firsts: Numbers = np.cumsum([0, *map(len, inner)])
        """Number of the first sample of each dataset, and of all samples; shape (datasets + 1,)."""

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all samples."""
        return sum(one.total_bytes for one in self.inner)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with any of the datasets."""
        found = " ".join(one.fingerprint for one in self.inner)
        return hashlib.sha256(found.encode()).hexdigest()[:16]

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Fields of any of the datasets; None if those of one are unknown."""
        found = [one.fields for one in self.inner]
        known = {name for names in found for name in names or ()}
        return None if None in found else tuple(sorted(known))

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the dataset of each sample, and its number there; a copy is a copy there, too."""
        copies, numbers = np.divmod(numbers, len(self))
        places = np.searchsorted(self.firsts, numbers, side="right") - 1
        lengths = np.diff(self.firsts)
        return places, numbers - self.firsts[places] + copies * lengths[places]

    def restrict_to(self, numbers: Numbers) -> Concat:
        """Return some samples under the same numbers (see `Samples.restrict_to`)."""
        places, own = self.find(numbers)
        parts = (one.restrict_to(own[places == place]) for place, one in enumerate(self.inner))
        part = Concat(list(parts))
        part.__dict__["total_bytes"] = self.total_bytes
        return part

    def read_columns(self, names: Sequence[str] | None) -> pa.Table:
        """Return the columns of all samples; row i is sample i.

        Raises:
            OptionError: If a dataset has none, or they differ in type.
        """
        import pyarrow as pa  # noqa: PLC0415  (an extra)

        tables = [one.read_columns(names) for one in self.inner]
        try:
            return pa.concat_tables(tables, promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise OptionError(
                f"columns of two datasets do not fit together: {error}; run 'shardstream index --columns' on all",
                shard=self.url_of(0),
            ) from error

    def read_keys(self, *, scans: bool) -> pa.ChunkedArray | None:
        """Return the keys of all samples, in order; None if those of a dataset are not known."""
        found = [keys for one in self.inner if (keys := one.read_keys(scans=scans)) is not None]
        if len(found) < len(self.inner):
            return None
        import pyarrow as pa  # noqa: PLC0415  (an extra)

        return pa.chunked_array([chunk for keys in found for chunk in keys.chunks], pa.string())

    def open_fetcher(
        self, upcoming: Iterable[Numbers] | None = None, options: FetchOptions | None = None
    ) -> Fetcher:
        """Open a fetcher for each dataset; together they have the budget and the requests of one."""
        return ConcatFetcher(self, upcoming, options or FetchOptions())


class ConcatFetcher(ViewFetcher):
    """Read samples of several datasets, each by a fetcher of its own.

    Args:
        samples: The datasets.
        upcoming: As in `Samples.open_fetcher`.
        options: Of all fetchers together.
    """

    def __init__(
        self, samples: Concat, upcoming: Iterable[Numbers] | None, options: FetchOptions
    ) -> None:
        def numbers_in(place: int, group: Numbers) -> Numbers:
            places, own = samples.find(group)
            mine: Numbers = own[places == place]
            return mine

        self._find, self._own_limit = samples.find, None
        if options.concurrency is None:
            # One for all parts, in the order of need: equal shares leave too few to a large part.
            self._own_limit = limit_of_worker(DEFAULT_REQUESTS, options.num_workers)
            options = replace(options, concurrency=self._own_limit)
        equal = [1.0] * len(samples.inner)
        super().__init__(samples.inner, equal, upcoming, numbers_in, options)

    def stats(self) -> dict[str, float]:
        """Return the sums of the statistics of all fetchers, and those of their common limit."""
        found = super().stats()
        if self._own_limit is not None and "throttled" in found:
            found["throttled"] += self._own_limit.num_throttled
        return found

    def samples(self, numbers: Numbers) -> Rows:
        """Return the sample of each number, or its error."""
        places, own = self._find(numbers)
        kinds: list[int] = np.unique(places).tolist()
        if len(kinds) == 1:
            return self.fetchers[kinds[0]].samples(own)
        of_kinds = {kind: np.flatnonzero(places == kind) for kind in kinds}
        for kind, mine in of_kinds.items():  # before one of them waits
            self.fetchers[kind].request(own[mine])
        self.prefetch()
        rows: list[Any] = [None] * len(numbers)
        for kind, mine in of_kinds.items():
            found = as_rows(self.fetchers[kind].samples(own[mine]))
            for place, row in zip(mine.tolist(), found, strict=True):
                rows[place] = row
        return from_rows(rows) if rows else []
