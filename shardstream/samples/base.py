"""Define the protocol of samples by number, and of the fetchers that read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
from shardstream.format import Columns, JoinedFields, LazyColumns, Rows
from shardstream.storage import AdaptiveLimit, Storage

if TYPE_CHECKING:
    import pyarrow as pa

Numbers = npt.NDArray[np.int64]
FieldChoice = Callable[[Sequence[str]], Sequence[str] | None]
"""The fields that samples have -> those to read, or None for all."""


class RefusedError(Exception):
    """A step refuses an item, or a sample was deleted since: it is left out, and not bad.

    Args:
        step: The step or the reason, for messages.
    """


class MappedSamples:
    """Samples found in mapped shards, copied at access.

    Args:
        found: Offsets of the samples' fields.
        shards: Shard of each sample, shape (n,).
        check_unchanged: Raises `ChangedError` if one of some shards was overwritten since the dataset was opened.
    """

    def __init__(
        self,
        found: LazyColumns,
        shards: Numbers,
        check_unchanged: Callable[[set[int]], None],
    ) -> None:
        self._found, self._shards = found, shards
        self._check_unchanged = check_unchanged

    def __getitem__(self, taken: slice) -> Columns:
        """Copy a slice of the samples.

        Raises:
            ChangedError: If a shard was overwritten since the dataset was opened.
        """
        # A copy of pages past the end of a file that was cut kills the process (SIGBUS).
        self._check(taken)
        columns = self._found.copy(taken)
        self._check(taken)  # it may have been overwritten meanwhile
        return columns

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that all samples have."""
        return self._found.fields

    def select(self, fields: Sequence[str]) -> MappedSamples:
        """Return the samples with some of their fields only; the bytes of the others are not read."""
        return MappedSamples(self._found.select(fields), self._shards, self._check_unchanged)

    def sizes(self, fields: Sequence[str] | None = None) -> Numbers:
        """Return the bytes of each sample's fields, shape (n,); of all fields by default."""
        return self._found.sizes(fields)

    def join(self, taken: slice, fields: Sequence[str] | None = None) -> JoinedFields:
        """Copy fields of a slice of the samples to one buffer each.

        Raises:
            ChangedError: If a shard was overwritten since the dataset was opened.
        """
        self._check(taken)
        joined = self._found.join(taken, fields)
        self._check(taken)
        return joined

    def _check(self, taken: slice) -> None:
        self._check_unchanged(set(self._shards[taken].tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """Options of a fetcher.

    Args:
        prefetch_bytes: Maximum of bytes in flight or prefetched.
        hedge: Send a second request when a response is slow.
        num_workers: Fetchers that read at the same time on this machine.
        concurrency: Limit of requests in flight of several fetchers together; None for one of each.
        is_sparse: Whether few samples of many are read, so that gaps between them should not be.
    """

    prefetch_bytes: int = 0
    hedge: bool = False
    num_workers: int = 1
    concurrency: AdaptiveLimit | None = None
    is_sparse: bool = False


class Fetcher:
    """Return samples, after waiting for their bytes if necessary; subclasses have `request`, or `samples` if they send no requests before."""

    def samples(self, numbers: Numbers) -> Rows:
        """Return the sample of each number, or its error."""
        return self.request(numbers)()

    def request(self, numbers: Numbers) -> Callable[[], Rows]:
        """Send the requests for samples; return a function that waits for them, as `samples`. By default none are sent."""
        return partial(self.samples, numbers)

    def read(
        self,
        steps: Sequence[Numbers],
        max_samples: int,
        choice: FieldChoice | None = None,  # noqa: ARG002  (all fields are read together)
    ) -> Iterator[Rows]:
        """Yield the samples of each step.

        Args:
            steps: Sample numbers, shape (n,) each.
            max_samples: Samples to read at a time; a step that is longer is read whole.
            choice: Chooses fields; others may be read, too.
        """
        for some in chunk_steps(steps, max_samples):
            found = self.samples(np.concatenate(some))
            yield from split_by_step(some, found)
            del found  # free the memory before the next read

    def find(self, numbers: Numbers) -> MappedSamples | None:  # noqa: ARG002
        """Return samples whose bytes are copied at access; None unless they are local and of one form."""
        return None

    def stats(self) -> dict[str, float]:
        """Return the statistics so far: ``read_bytes``, ``requests``, ``throttled`` and ``wait_s``, as far as there are any."""
        return {}

    def close(self) -> None:
        """Release threads, maps and buffers; by default there are none."""


def chunk_steps(steps: Sequence[Numbers], max_samples: int) -> Iterator[Sequence[Numbers]]:
    """Yield steps in lists of at most ``max_samples`` samples, or of one step."""
    size = max(1, max_samples // max(1, *map(len, steps)))  # the last step may be short
    for first in range(0, len(steps), size):
        yield steps[first : first + size]


def split_by_step(steps: Iterable[Numbers], samples: Rows | MappedSamples) -> Iterator[Rows]:
    """Yield the samples of each step, of those of all steps."""
    first = 0
    for numbers in steps:
        yield samples[first : first + len(numbers)]
        first += len(numbers)


class Stored(NamedTuple):
    """Where some of the samples that were asked for are stored.

    Args:
        samples: The dataset that stores them; a view only if it is joined.
        places: Positions of the samples among those that were asked for, shape (n,).
        numbers: Their numbers in the dataset, shape (n,).
        is_joined: Whether the dataset only adds fields to samples whose own place was given before.
        fields: The fields that it adds; None for all.
    """

    samples: Samples
    places: Numbers
    numbers: Numbers
    is_joined: bool = False
    fields: Collection[str] | None = None


class Samples(ABC):
    """The samples of a dataset by number, 0 to n - 1; picklable, thread-safe and fork-safe.

    Fetchers and places take the numbers of copies, too: copy c of sample i is ``i + c * n``, for samples that come several times in an
    epoch. `shardstream.testing.check_samples` checks an implementation.
    """

    can_coalesce: bool = True
    """Whether reading neighbouring samples together is faster; False shuffles single samples."""
    has_bytes: bool = True
    """Whether all values are bytes; False for tables."""
    is_local: bool = False
    """Whether all samples are in files of this machine, so that nothing is prefetched."""
    blocks: Numbers | None = None
    """Number of the first sample of each block that is read as a whole, and of all samples, shape (blocks + 1,); None where there are none."""
    least_block: int = 1
    """Consecutive samples that an order keeps together at least: those of the largest block, here or in other samples that these are made of."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @property
    @abstractmethod
    def num_shards(self) -> int:
        """Number of shards."""

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes of all samples; determines the default sizes of windows and blocks."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset; a state is resumed only if they are equal."""

    @abstractmethod
    def url_of(self, shard: int) -> str:
        """Return the URL of a shard, for ``__url__`` and messages."""

    @abstractmethod
    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return the shard of each sample, shape (n,)."""

    @abstractmethod
    def open_fetcher(
        self, upcoming: Iterable[Numbers] | None = None, options: FetchOptions | None = None
    ) -> Fetcher:
        """Open a fetcher.

        Args:
            upcoming: Sample numbers that will be requested, in groups that are read together, in order of first use; None if they are
                not known in advance: the fetcher is thread-safe then.
            options: Of the fetcher.
        """

    @property
    def mean_bytes(self) -> float:
        """Bytes of a sample in the mean, above 0."""
        return max(1, self.total_bytes) / max(1, len(self))

    @property
    def has_costly_windows(self) -> bool:
        """Whether reading a part of a window costs as much as all of it: ranges of remote shards hold the samples between, too."""
        return self.can_coalesce and not self.is_local

    @property
    def storage(self) -> Storage:
        """The storage of the shards; a report of bad samples is written with it."""
        return Storage()

    @property
    def checksums(self) -> list[str | None]:
        """16 hex digits for each dataset that change with its bytes; None where no checksums are known."""
        return [None]

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Fields that samples have, without reading any; None if unknown."""
        return None

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        return f"{plural(self.num_shards, 'shard')}, {plural(len(self), 'sample')}"

    def shards_of(self, numbers: Numbers) -> list[int]:
        """Return the shards of some samples, each once, in ascending order."""
        found: list[int] = np.unique(self.find_shards(numbers)).tolist()
        return found

    def find_stored(self, numbers: Numbers) -> Iterator[Stored]:
        """Yield where the samples are stored below all views, each once, and then where fields that are joined to them are. Of a row it is its first sample."""
        yield Stored(self, np.arange(len(numbers)), numbers)

    def place_of(self, number: int) -> tuple[str, int | None]:
        """Return the URL of a sample's shard, and its offset there, where it has one."""
        return self.url_of(int(self.find_shards(np.array([number]))[0])), None

    def sizes(self, numbers: Numbers) -> Numbers:
        """Return the bytes of each sample, shape (n,); by default those of the mean."""
        return np.full(len(numbers), int(self.mean_bytes), dtype=np.int64)

    def restrict_to(self, numbers: Numbers) -> Samples:  # noqa: ARG002
        """Return some samples under the same numbers, and perhaps others, which are smaller when they are pickled.

        ``len`` and `total_bytes` stay those of the whole dataset, so that plans are equal. By default returns all.
        """
        return self

    def column_names(self) -> list[str]:
        """Return the names of the values of all samples that are stored next to them; by default none.

        Raises:
            StorageError: If they cannot be read.
        """
        return []

    def read_columns(self, names: Sequence[str] | None, *, scans: bool = False) -> pa.Table:  # noqa: ARG002
        """Return the columns of all samples; row i is sample i.

        Args:
            names: Columns to read; None for all.
            scans: Whether to read keys from the shards themselves where there are no columns.

        Raises:
            OptionError: If there are none, or one is missing.
            StorageError: If they cannot be read.
        """
        raise OptionError(
            "these samples have no columns, which where=, keys in subset= and a join by key need",
            shard=self.url_of(0),
        )

    def check_manifests(self) -> None:  # noqa: B027  (nothing to check by default)
        """Check that the dataset was not replaced; called at the end of an epoch.

        Raises:
            ChangedError: If it was.
        """


def check_numbers(numbers: Numbers, nsamples: int) -> None:
    """Check that samples with these numbers exist.

    Raises:
        IndexError: If one does not; names the valid range.
    """
    if numbers.size and (numbers.min() < 0 or numbers.max() >= nsamples):
        raise IndexError(
            f"sample numbers go from 0 to {nsamples - 1}, requested {numbers.min()} to {numbers.max()}"
        )


def places_in(kept: Numbers | None, numbers: Numbers) -> Numbers:
    """Return the places of numbers among those that a part of a dataset has (see `Samples.restrict_to`), shape (n,).

    Args:
        kept: Those that it has, ascending; None for all, 0, 1, 2, ...
        numbers: The numbers to find.

    Raises:
        IndexError: If it lacks one.
    """
    if kept is None:
        return numbers
    places = np.searchsorted(kept, numbers)
    if (kept.take(places, mode="clip") != numbers).any():
        raise IndexError("a sample that this part of the dataset lacks (see restrict_to)")
    return places
