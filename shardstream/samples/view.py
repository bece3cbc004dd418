"""Samples that are made of other samples: some of them, several after each other, several joined to one, or rows made of parts of them."""

from __future__ import annotations

import copy
import hashlib
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
from shardstream.format import Rows, as_rows, from_rows
from shardstream.order import RowParts, RowPlan
from shardstream.samples.base import (
    Fetcher,
    FetchOptions,
    FieldChoice,
    MappedSamples,
    Numbers,
    Samples,
    Stored,
)
from shardstream.storage import DEFAULT_REQUESTS, Storage, limit_of_worker

if TYPE_CHECKING:
    import pyarrow as pa

_MIN_PREFETCH_BYTES = 1 << 20  # of each inner fetcher
_MAX_WAITING = 1 << 20  # numbers (8 MB) that wait for a fetcher that has taken none
_NONE: Numbers = np.empty(0, dtype=np.int64)
Shares = npt.NDArray[np.float64]


class ViewFetcher(Fetcher):
    """Read each of the inner samples of a view by a fetcher of its own; they prefetch by one plan.

    Args:
        view: The samples.
        upcoming: As in `Samples.open_fetcher`.
        options: Of all fetchers together.
    """

    _view: View
    _shares_requests = True

    def __init__(
        self, view: View, upcoming: Iterable[Numbers] | None, options: FetchOptions
    ) -> None:
        self._view, self._own_limit = view, None
        if self._shares_requests and options.concurrency is None and len(view.inner) > 1:
            # One for all, in the order of need: equal shares leave too few to large inner samples.
            self._own_limit = limit_of_worker(DEFAULT_REQUESTS, options.num_workers)
            options = replace(options, concurrency=self._own_limit)
        weights, total = view.prefetch_weights, sum(view.prefetch_weights)
        plan = None if upcoming is None else _SharedPlan(upcoming, len(view.inner))
        self.fetchers: list[Fetcher] = []
        for place, (one, weight) in enumerate(zip(view.inner, weights, strict=True)):
            budget = max(_MIN_PREFETCH_BYTES, int(options.prefetch_bytes * weight / total))
            own = None if plan is None else self._own_groups(plan.groups(place), place)
            self.fetchers.append(one.open_fetcher(own, replace(options, prefetch_bytes=budget)))

    def request(self, numbers: Numbers) -> Callable[[], Rows]:
        """Send the requests of all fetchers before one of them waits; return a function that waits, as `samples`."""
        if len(self.fetchers) == 1:
            return self.fetchers[0].request(self._view.numbers_in(0, numbers))
        places, own = self._view.find(numbers)
        kinds: list[int] = np.unique(places).tolist()
        if len(kinds) == 1:
            return self.fetchers[kinds[0]].request(own)
        rows_of = [np.flatnonzero(places == kind) for kind in kinds]
        waiting = [
            (mine, self.fetchers[kind].request(own[mine]))
            for kind, mine in zip(kinds, rows_of, strict=True)
        ]

        def wait() -> Rows:
            rows: list[Any] = [None] * len(numbers)
            for mine, wait_for_part in waiting:
                for place, row in zip(mine.tolist(), as_rows(wait_for_part()), strict=True):
                    rows[place] = row
            return from_rows(rows) if rows else []

        return wait

    def read(
        self, steps: Sequence[Numbers], max_samples: int, choice: FieldChoice | None = None
    ) -> Iterator[Rows]:
        """Yield the samples of each step, as the fetcher of the inner samples does if there is only one."""
        if len(self.fetchers) > 1:
            return super().read(steps, max_samples, choice)
        own = [self._view.numbers_in(0, numbers) for numbers in steps]
        return self.fetchers[0].read(own, max_samples, choice)

    def find(self, numbers: Numbers) -> MappedSamples | None:
        """Return samples whose bytes are copied at access; None if there are several inner samples."""
        if len(self.fetchers) > 1:
            return None
        return self.fetchers[0].find(self._view.numbers_in(0, numbers))

    def stats(self) -> dict[str, float]:
        """Return the sums of the statistics of all fetchers, with those of their common limit."""
        found = [fetcher.stats() for fetcher in self.fetchers]
        names = dict.fromkeys(name for stats in found for name in stats)
        total = {name: sum(stats.get(name, 0) for stats in found) for name in names}
        if self._own_limit is not None and "throttled" in total:
            total["throttled"] += self._own_limit.num_throttled
        return total

    def close(self) -> None:
        """Close all fetchers."""
        for fetcher in self.fetchers:
            fetcher.close()

    def _own_groups(self, groups: Iterable[Numbers], place: int) -> Iterator[Numbers]:
        for group in groups:
            numbers = self._view.numbers_in(place, group)
            if len(numbers):  # an empty group is the end
                yield numbers


class _SharedPlan:
    """Groups of numbers that several fetchers take, each at its own pace.

    A fetcher that does not prefetch, such as one of local shards in memory, takes none: of what waits for it, only the last is kept. For
    one that does, all is kept: a fetcher of few small samples may be millions of numbers ahead of it.
    """

    def __init__(self, upcoming: Iterable[Numbers], count: int) -> None:
        self._upcoming = iter(upcoming)
        self._waiting: list[deque[Numbers]] = [deque() for _ in range(count)]
        self._held = [0] * count
        self._takes = [False] * count

    def groups(self, place: int) -> Iterator[Numbers]:
        """Yield the groups for one of the fetchers."""
        waiting = self._waiting[place]
        self._takes[place] = True  # at the first `next`
        while True:
            while waiting:
                group = waiting.popleft()
                self._held[place] -= len(group)
                yield group
            group = next(self._upcoming, _NONE)
            if not len(group):
                return
            for other, queue in enumerate(self._waiting):
                queue.append(group)
                self._held[other] += len(group)
                is_dropped = not self._takes[other]
                while is_dropped and self._held[other] > _MAX_WAITING and len(queue) > 1:
                    self._held[other] -= len(queue.popleft())


class View(Samples):
    """Samples that are made of other samples, of any kind: views of views, too.

    Args:
        inner: The samples that it is made of, at least one.
    """

    fetcher_type: ClassVar[type[ViewFetcher]] = ViewFetcher

    def __init__(self, inner: Sequence[Samples]) -> None:
        self.inner = tuple(inner)
        self.can_coalesce = all(one.can_coalesce for one in inner)
        self.has_bytes = all(one.has_bytes for one in inner)
        self.is_local = all(one.is_local for one in inner)
        self.least_block = max(one.least_block for one in inner)

    @abstractmethod
    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the inner samples to which each sample belongs, by their place, and its number there; shape (n,) each.

        Raises:
            IndexError: If there is no such sample.
        """

    def numbers_in(self, place: int, numbers: Numbers) -> Numbers:
        """Return the numbers that inner samples, given by their place, have for those of some samples that need them; shape (m,)."""
        places, own = self.find(numbers)
        mine: Numbers = own[places == place]
        return mine

    @property
    def prefetch_weights(self) -> list[float]:
        """Share of each of the inner samples in the prefetch; only the ratios count."""
        return [1.0] * len(self.inner)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_first_shards"}

    @property
    def num_shards(self) -> int:
        """Number of shards of all inner samples."""
        return int(self._first_shards[-1])

    @cached_property
    def _first_shards(self) -> Numbers:
        return np.cumsum([0, *(one.num_shards for one in self.inner)])

    @property
    def storage(self) -> Storage:
        """The storage of the first inner samples."""
        return self.inner[0].storage

    @property
    def checksums(self) -> list[str | None]:
        """Those of all inner samples."""
        return [checksum for one in self.inner for checksum in one.checksums]

    def url_of(self, shard: int) -> str:
        """Return the URL of a shard."""
        place = int(np.searchsorted(self._first_shards, shard, side="right")) - 1
        return self.inner[place].url_of(shard - int(self._first_shards[place]))

    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return the shard of each sample, shape (n,)."""
        return self._ask(
            numbers,
            lambda place, own: self.inner[place].find_shards(own) + self._first_shards[place],
        )

    def find_stored(self, numbers: Numbers) -> Iterator[Stored]:
        """Yield where samples are stored (see `Samples.find_stored`)."""
        places, own = self.find(numbers)
        for place in np.unique(places).tolist():
            mine = np.flatnonzero(places == place)
            for one in self.inner[place].find_stored(own[mine]):
                yield one._replace(places=mine[one.places])

    def place_of(self, number: int) -> tuple[str, int | None]:
        """Return the URL of a sample's shard, and its offset there."""
        places, own = self.find(np.array([number]))
        return self.inner[int(places[0])].place_of(int(own[0]))

    def sizes(self, numbers: Numbers) -> Numbers:
        """Return the bytes of each sample, shape (n,)."""
        return self._ask(numbers, lambda place, own: self.inner[place].sizes(own))

    def restrict_to(self, numbers: Numbers) -> Self:
        """Return some samples under the same numbers (see `Samples.restrict_to`)."""
        return self.with_inner(
            [one.restrict_to(self.numbers_in(n, numbers)) for n, one in enumerate(self.inner)]
        )

    def with_inner(self, inner: Sequence[Samples]) -> Self:
        """Return the view of others, which have the same numbers as the inner samples."""
        made = copy.copy(self)
        for name in ("fingerprint", "_first_shards"):  # cached, of the inner samples
            made.__dict__.pop(name, None)
        made.inner = tuple(inner)
        return made

    def column_names(self) -> list[str]:
        """Return the names of the columns of the first inner samples."""
        return self.inner[0].column_names()

    def read_columns(self, names: Sequence[str] | None, *, scans: bool = False) -> pa.Table:
        """Return the columns of the first inner samples; row i is sample i."""
        return self.inner[0].read_columns(names, scans=scans)

    def check_manifests(self) -> None:
        """Check that no dataset was replaced."""
        for one in self.inner:
            one.check_manifests()

    def open_fetcher(
        self, upcoming: Iterable[Numbers] | None = None, options: FetchOptions | None = None
    ) -> Fetcher:
        """Open a fetcher for each of the inner samples; together they have the budget and the requests of one."""
        return self.fetcher_type(self, upcoming, options or FetchOptions())

    def _ask(self, numbers: Numbers, ask: Callable[[int, Numbers], Numbers]) -> Numbers:
        """Return a number for each sample, which its inner samples give for theirs."""
        places, own = self.find(numbers)
        found = np.empty_like(own)
        for place in np.unique(places).tolist():
            is_mine = places == place
            found[is_mine] = ask(place, own[is_mine])
        return found


class ViewOfOne(View):
    """Samples of one other dataset, some or all; columns and shards are its own.

    Args:
        whole: The other samples.
    """

    def __init__(self, whole: Samples) -> None:
        super().__init__([whole])

    @property
    def whole(self) -> Samples:
        """The other samples."""
        return self.inner[0]

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all samples, if they are as large as those of the whole in the mean."""
        return self.whole.total_bytes * len(self) // max(1, len(self.whole))

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Those of the whole."""
        return self.whole.fields

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return zeros, and the numbers of samples in the whole."""
        return np.zeros(len(numbers), dtype=np.int64), self.numbers_in(0, numbers)


def leaves_of(samples: Samples) -> list[Samples]:
    """Return the samples that a view consists of, through all views; those that are no view are their own."""
    if not isinstance(samples, View):
        return [samples]
    return [leaf for one in samples.inner for leaf in leaves_of(one)]


def replace_leaves(samples: Samples, leaves: Iterator[Samples]) -> Samples:
    """Return a view with others in place of its `leaves_of`, in their order."""
    if not isinstance(samples, View):
        return next(leaves)
    return samples.with_inner([replace_leaves(one, leaves) for one in samples.inner])


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

    def column_names(self) -> list[str]:
        """Return the names of the columns that all datasets have."""
        first, *others = (one.column_names() for one in self.inner)
        return [name for name in first if all(name in names for names in others)]

    def read_columns(self, names: Sequence[str] | None, *, scans: bool = False) -> pa.Table:
        """Return the columns of all samples; row i is sample i.

        Raises:
            OptionError: If a dataset has none, or they differ in type.
        """
        import pyarrow as pa  # noqa: PLC0415  (an extra)

        tables = [one.read_columns(names, scans=scans) for one in self.inner]
        try:
            return pa.concat_tables(tables, promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise OptionError(
                f"columns of two datasets do not fit together: {error}; run 'shardstream index --columns' on all",
                shard=self.url_of(0),
            ) from error


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
