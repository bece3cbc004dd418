"""The protocol of a catalog: samples by number, as byte ranges of shards."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardstream.errors import plural
from shardstream.format import Buffer
from shardstream.storage import AdaptiveLimit, Storage

Numbers = npt.NDArray[np.int64]


class Extents(NamedTuple):
    """Where some samples are: arrays of equal length, int64."""

    shards: Numbers
    """Number of the shard, from 0."""
    starts: Numbers
    """Offset of the sample's first header in its tar."""
    ends: Numbers
    """Offset after the sample."""


class Catalog(ABC):
    """The samples of a dataset by number, 0 to n - 1; picklable, safe among threads and after a fork.

    A sample is a range of bytes in a shard: tar members that share a key, as `shardstream.format.encode_member` writes them. A
    catalog of data that are stored in another way makes these bytes in `fetch`; what it calls a shard is then up to it.
    `shardstream.testing.check_catalog` checks an implementation.
    """

    can_coalesce: bool = True
    """Whether it pays to read samples with neighbouring numbers together; False shuffles single samples."""
    threads: int = 24
    """Requests in flight, in each process."""
    max_prefetch_samples: int = sys.maxsize
    """Samples that are requested ahead of use, at most."""
    is_local: bool = False
    """Whether `map_shard` serves all shards, so that nothing need be requested ahead."""
    timeout_s: float = 100.0
    """Seconds within which `fetch` returns or raises, unless bytes come."""
    has_indexes: bool = False
    """Whether `load_index` is to be called for each shard before `extents`, several at a time: extents then need not wait."""

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
        """Bytes of all shards; the default sizes of windows and blocks follow from it."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset; a state is continued only where it is the same."""

    @abstractmethod
    def url_of(self, shard: int) -> str:
        """Return the URL of a shard, for ``__url__`` and messages."""

    @abstractmethod
    def extents(self, numbers: Numbers | Sequence[int]) -> Extents:
        """Return where samples are, in the order given.

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
            concurrency: The limit of requests that this one belongs to; a server that asks for fewer is reported to it.

        Raises:
            StorageError: If they are out of reach.
        """

    @property
    def storage(self) -> Storage:
        """The storage of the shards; a report of bad samples is written with it."""
        return Storage()

    @property
    def checksums(self) -> list[str | None]:
        """16 hex digits for each dataset that change with its bytes; None where no checksums are known."""
        return [None]

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        return f"{plural(self.num_shards, 'shard')}, {plural(len(self), 'sample')}"

    def shards_of(self, numbers: Numbers) -> list[int]:
        """Return the shards that some samples are in, each once."""
        return sorted(set(self.extents(numbers).shards.tolist()))

    def load_index(self, shard: int) -> object:  # noqa: B027  (nothing to load by default)
        """Read what `extents` needs of a shard.

        Raises:
            StorageError: If it is out of reach.
        """

    def map_shard(self, shard: int) -> Buffer:
        """Return a shard on this machine as a buffer; called only where `is_local` is true."""
        raise NotImplementedError(f"{type(self).__name__} has no shards on this machine")

    def check_unchanged(self, shards: Iterable[int]) -> None:  # noqa: B027  (nothing to check by default)
        """Compare local shards with what they were when the dataset was opened; called after their bytes were copied.

        Raises:
            ChangedError: If one was overwritten.
        """

    def check_manifests(self) -> None:  # noqa: B027
        """Check that the dataset was not replaced; called at the end of an epoch.

        Raises:
            ChangedError: If it was.
        """


def check_numbers(numbers: Numbers, nsamples: int) -> None:
    """Refuse numbers of samples that do not exist.

    Raises:
        IndexError: Naming the range.
    """
    if numbers.size and (numbers.min() < 0 or numbers.max() >= nsamples):
        raise IndexError(
            f"sample numbers go from 0 to {nsamples - 1}, asked for {numbers.min()} to {numbers.max()}"
        )
