"""Define the base class of catalogs, which map sample numbers to byte ranges of shards."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardstream.errors import plural
from shardstream.format import Buffer
from shardstream.storage import AdaptiveLimit, ReceiveBuffer, Storage

Numbers = npt.NDArray[np.int64]
FAR_READ_RATIO = 3.0
"""`Catalog.max_read_ratio` of samples with gaps between them."""


class Extents(NamedTuple):
    """Byte ranges of samples: int64 arrays of equal length."""

    shards: Numbers
    """Number of the shard, from 0."""
    starts: Numbers
    """Offset of the sample's first header in its tar."""
    ends: Numbers
    """Offset after the sample."""


class IndexChunk(NamedTuple):
    """A part of the index of a shard."""

    shard: int
    number: int
    """Place of the chunk in the index, from 0."""


class Catalog(ABC):
    """The samples of a dataset by number, 0 to n - 1; picklable, thread-safe and fork-safe.

    A sample is a byte range of a shard: tar members that share a key, as `shardstream.format.encode_member` writes them. A
    catalog over another storage format creates these bytes in `fetch` and chooses its own unit as a shard.
    `shardstream.testing.check_catalog` checks an implementation.
    """

    can_coalesce: bool = True
    """Whether reading neighbouring samples together is faster; False shuffles single samples."""
    threads: int = 24
    """Maximum of requests in flight, in each process."""
    max_prefetch_samples: int = sys.maxsize
    """Maximum of prefetched samples."""
    is_local: bool = False
    """Whether `map_shard` serves all shards, so that nothing is prefetched."""
    max_read_ratio: float | None = None
    """Maximum of the bytes that are read for each byte of the requested samples, to fetch samples with gaps together; None for no maximum."""
    timeout_s: float = 100.0
    """Maximum time in seconds that `fetch` takes without receiving bytes before it raises."""

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
        """Bytes of all shards; determines the default sizes of windows and blocks."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset; a state is resumed only if they are equal."""

    @abstractmethod
    def url_of(self, shard: int) -> str:
        """Return the URL of a shard, for ``__url__`` and messages."""

    @abstractmethod
    def extents(self, numbers: Numbers | Sequence[int]) -> Extents:
        """Return the byte ranges of samples, in the order given.

        Raises:
            IndexError: If there is no such sample.
        """

    @abstractmethod
    def fetch(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None = None
    ) -> bytes | memoryview:
        """Return the bytes ``start`` to ``end`` of a shard.

        Args:
            shard: Number of the shard.
            start: Offset of the first byte.
            end: Offset after the last.
            concurrency: Limit of concurrent requests; throttling by the server is reported to it.

        Raises:
            StorageError: If they cannot be read.
        """

    def fetch_into(
        self,
        buffer: ReceiveBuffer,
        shard: int,
        start: int,
        end: int,
        concurrency: AdaptiveLimit | None = None,
    ) -> None:
        """Read the bytes ``start`` to ``end`` of a shard into memory, as `fetch`; without a copy where the client can do so.

        Raises:
            StorageError: As `fetch`; some of the memory may be filled then.
        """
        buffer.fill(self.fetch(shard, start, end, concurrency))

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

    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return the shard of each sample, shape (n,); by default those of `extents`."""
        return self.extents(numbers).shards

    def shards_of(self, numbers: Numbers) -> list[int]:
        """Return the shards of some samples, each once, in ascending order."""
        found: list[int] = np.unique(self.find_shards(numbers)).tolist()
        return found

    def restrict_to(self, shards: Sequence[int]) -> Catalog:  # noqa: ARG002
        """Return a catalog with the samples of some shards under the same numbers, which is smaller when it is pickled.

        ``len`` and `total_bytes` stay those of the whole dataset, so that plans are equal. By default returns the catalog itself.
        """
        return self

    def index_chunks(self, numbers: Numbers) -> list[IndexChunk]:  # noqa: ARG002
        """Return the parts of indexes that `extents` needs for some samples; by default none.

        `load_index` is called for each before `extents`, several in parallel, so that `extents` does not wait.
        """
        return []

    def load_index(self, chunk: IndexChunk) -> object:  # noqa: B027  (nothing to load by default)
        """Read a part of an index.

        Raises:
            StorageError: If it cannot be read.
        """

    def map_shard(self, shard: int) -> Buffer:
        """Return a local shard as a buffer; called only if `is_local` is true."""
        raise NotImplementedError(f"{type(self).__name__} has no local shards")

    def check_unchanged(self, shards: Iterable[int]) -> None:  # noqa: B027  (nothing to check by default)
        """Check that local shards are unchanged since the dataset was opened; called after their bytes were copied.

        Raises:
            ChangedError: If one was overwritten.
        """

    def check_manifests(self) -> None:  # noqa: B027
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
