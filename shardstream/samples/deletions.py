"""The samples of a dataset without those that were deleted, or with holes where they were."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardstream.errors import plural
from shardstream.format import Rows
from shardstream.samples.base import (
    Fetcher,
    FetchOptions,
    FieldChoice,
    MappedSamples,
    Numbers,
    RefusedError,
    Samples,
    check_numbers,
)
from shardstream.samples.view import View, ViewFetcher, ViewOfOne

if TYPE_CHECKING:
    import pyarrow as pa


class WithoutDeleted(ViewOfOne):
    """The samples that are left, in their order: memory and time depend on the number of deleted ones alone.

    Args:
        whole: All samples.
        deleted: Numbers of the deleted ones, ascending, shape (n,).
    """

    def __init__(self, whole: Samples, deleted: Numbers) -> None:
        super().__init__(whole)
        check_numbers(deleted, len(whole))
        self.deleted = deleted
        # Of the samples that are left, how many come before each deleted one.
        self._left_before: Numbers = deleted - np.arange(len(deleted))
        self._length = len(whole) - len(deleted)

    def __len__(self) -> int:
        return self._length

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset, and with the samples that are deleted."""
        digest = hashlib.sha256(f"without deleted samples: {self.whole.fingerprint}\n".encode())
        digest.update(self.deleted.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        deleted = f"{len(self.deleted):,} deleted"
        return f"{plural(self.num_shards, 'shard')}, {plural(self._length, 'sample')}, {deleted}"

    def numbers_in(self, place: int, numbers: Numbers) -> Numbers:  # noqa: ARG002  (there is one)
        """Return the numbers of samples in the whole, shape (n,); a copy is a copy there, too."""
        copies, wanted = np.divmod(numbers, max(1, self._length))
        before = np.searchsorted(self._left_before, wanted, side="right")
        found: Numbers = wanted + before + copies * len(self.whole)
        return found

    def numbers_of(self, whole_numbers: Numbers) -> Numbers:
        """Return the numbers that samples of the whole have here, shape (n,); -1 for deleted ones: the inverse of `numbers_in`."""
        before = np.searchsorted(self.deleted, whole_numbers)
        is_deleted = np.append(self.deleted, -1)[before] == whole_numbers
        return np.where(is_deleted, -1, whole_numbers - before)

    def read_columns(self, names: Sequence[str] | None, *, scans: bool = False) -> pa.Table:
        """Return the columns of all samples that are left; row i is sample i."""
        left = np.ones(len(self.whole), dtype=bool)
        left[self.deleted] = False
        return self.whole.read_columns(names, scans=scans).filter(left)


class DeletedSince(ViewOfOne):
    """The samples of an earlier version, of which those that were deleted since are refused and not read.

    Numbers and fingerprint are those of the earlier version, so that orders and states are, too.

    Args:
        whole: All samples of the earlier version.
        deleted: Numbers of the samples that were deleted since, ascending, shape (n,).
    """

    def __init__(self, whole: Samples, deleted: Numbers) -> None:
        super().__init__(whole)
        check_numbers(deleted, len(whole))
        self._deleted = deleted

    def __len__(self) -> int:
        return len(self.whole)

    @property
    def fingerprint(self) -> str:
        """That of the earlier version."""
        return self.whole.fingerprint

    def are_deleted(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Return whether each sample was deleted since, shape (n,); copies of it, too."""
        return np.isin(numbers % max(1, len(self)), self._deleted)

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return zeros, and the numbers."""
        return np.zeros(len(numbers), dtype=np.int64), numbers

    def numbers_in(self, place: int, numbers: Numbers) -> Numbers:  # noqa: ARG002  (there is one)
        """Return the numbers of the samples that are still there, shape (m,)."""
        return numbers[~self.are_deleted(numbers)]

    def read_columns(self, names: Sequence[str] | None, *, scans: bool = False) -> pa.Table:
        """Return the columns of all samples of the earlier version; row i is sample i."""
        return self.whole.read_columns(names, scans=scans)

    def open_fetcher(
        self, upcoming: Iterable[Numbers] | None = None, options: FetchOptions | None = None
    ) -> Fetcher:
        """Open a fetcher, which returns a `RefusedError` in place of each deleted sample."""
        return _DeletedSinceFetcher(self, [1.0], upcoming, options or FetchOptions())


class _DeletedSinceFetcher(ViewFetcher):
    _view: DeletedSince

    def request(self, numbers: Numbers) -> Callable[[], Rows]:
        are_deleted = self._view.are_deleted(numbers)
        wait_for_others = list if are_deleted.all() else super().request(numbers)
        if not are_deleted.any():
            return wait_for_others

        def wait() -> Rows:
            others = iter(wait_for_others())
            hole = RefusedError("deleted in a later version")
            return [hole if is_hole else next(others) for is_hole in are_deleted.tolist()]

        return wait

    def read(
        self, steps: Sequence[Numbers], max_samples: int, choice: FieldChoice | None = None
    ) -> Iterator[Rows]:
        if self._view.are_deleted(np.concatenate(steps)).any():
            return Fetcher.read(self, steps, max_samples, choice)
        return super().read(steps, max_samples, choice)

    def find(self, numbers: Numbers) -> MappedSamples | None:
        return None if self._view.are_deleted(numbers).any() else super().find(numbers)


def has_deleted_since(samples: Samples) -> bool:
    """Return whether some samples, or those that they are made of, were deleted since (see `DeletedSince`)."""
    inner = samples.inner if isinstance(samples, View) else ()
    return isinstance(samples, DeletedSince) or any(map(has_deleted_since, inner))


def deleted_since(deleted: Numbers, removed: Iterable[Numbers], nsamples: int) -> Numbers:
    """Return the samples of an earlier version that are deleted in a later one, by their numbers in the shards, ascending.

    >>> deleted_since(np.array([1, 4]), [np.array([0, 2]), np.array([3])], 6).tolist()
    [0, 2, 3, 5]

    Args:
        deleted: Those that the later version leaves out, by their numbers in its shards, ascending.
        removed: For each compaction between both, in order: the numbers of the samples that it removed, before it, ascending.
        nsamples: Samples in the shards of the earlier version.
    """
    for gone in reversed([*removed]):
        before = np.searchsorted(gone - np.arange(len(gone)), deleted, side="right")
        deleted = np.union1d(deleted + before, gone)
    return deleted[deleted < nsamples]
