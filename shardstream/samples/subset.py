"""Some samples of others: those that a user chooses, those that are left after deletions, or all with holes where some were deleted."""

from __future__ import annotations

import hashlib
import io
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
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
    places_in,
)
from shardstream.samples.view import View, ViewFetcher, ViewOfOne

if TYPE_CHECKING:
    import pyarrow as pa


Choice = Sequence[int] | Sequence[bool] | npt.NDArray[Any] | slice | str | os.PathLike[str]
"""Numbers of samples, a mask of as many bools as there are samples, a slice, or the path or URL of a ``.npy`` file of numbers or bools, or of
a ``.txt`` file with a key on each line."""

_NUMBER_BYTES = 16  # of a number in a .npy file, at most


class Subset(ViewOfOne):
    """Some samples of others: sample i is the sample ``numbers[i]`` of the whole. Shards keep their numbers.

    Args:
        whole: The whole.
        numbers: Numbers of samples, each at most once, shape (n,).
    """

    def __init__(self, whole: Samples, numbers: Numbers) -> None:
        super().__init__(whole)
        self._length = len(numbers)
        self._kept: Numbers | None = None  # numbers of these samples, after `restrict_to`
        small = len(whole) <= np.iinfo(np.uint32).max  # half the bytes for each spawned worker
        self._numbers = numbers.astype(np.uint32 if small else np.int64)

    def __len__(self) -> int:
        return self._length

    @property
    def numbers(self) -> Numbers:
        """Numbers of the samples in the whole, shape (n,)."""
        return self._numbers.astype(np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset, and with the subset and its order."""
        digest = hashlib.sha256(f"subset of {self.whole.fingerprint}\n".encode())
        digest.update(self._numbers.astype("<u8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        return f"{self._length:,} of {plural(len(self.whole), 'sample')} in {plural(self.num_shards, 'shard')}"

    def restrict_to(self, numbers: Numbers) -> Self:
        """Return some samples under the same numbers (see `Samples.restrict_to`)."""
        part = super().restrict_to(numbers)
        part._kept = np.unique(numbers % self._length)
        part._numbers = self._numbers[places_in(self._kept, part._kept)]
        return part

    def numbers_in(self, place: int, numbers: Numbers) -> Numbers:  # noqa: ARG002  (there is one)
        """Return the numbers of samples in the whole, shape (n,); a copy is a copy there, too."""
        copies, wanted = np.divmod(numbers, max(1, self._length))
        found = self._numbers[places_in(self._kept, wanted)]
        numbers_there: Numbers = found.astype(np.int64) + copies * len(self.whole)
        return numbers_there

    def read_columns(self, names: Sequence[str] | None, *, scans: bool = False) -> pa.Table:
        """Return the columns of all samples; row i is sample i."""
        return self.whole.read_columns(names, scans=scans).take(self.numbers)

    def open_fetcher(
        self, upcoming: Iterable[Numbers] | None = None, options: FetchOptions | None = None
    ) -> Fetcher:
        """Open a fetcher of the whole, which reads these samples only."""
        return super().open_fetcher(upcoming, replace(options or FetchOptions(), is_sparse=True))


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

    def read_columns(self, names: Sequence[str] | None, *, scans: bool = False) -> pa.Table:
        """Return the columns of all samples that are left; row i is sample i."""
        left = np.ones(len(self.whole), dtype=bool)
        left[self.deleted] = False
        return self.whole.read_columns(names, scans=scans).filter(left)


def numbers_left(numbers: Numbers, deleted: Numbers) -> Numbers:
    """Return the numbers that samples have without the deleted ones, shape (n,); -1 for these: the inverse of `WithoutDeleted.numbers_in`.

    >>> numbers_left(np.array([0, 1, 2, 3]), np.array([1])).tolist()
    [0, -1, 1, 2]

    Args:
        numbers: Their numbers with the deleted ones, shape (n,).
        deleted: Numbers of the deleted ones, ascending, shape (m,).
    """
    before = np.searchsorted(deleted, numbers)
    is_deleted = np.append(deleted, -1)[before] == numbers
    return np.where(is_deleted, -1, numbers - before)


class _DeletedSinceFetcher(ViewFetcher):
    """Return a `RefusedError` in place of each deleted sample."""

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


class DeletedSince(ViewOfOne):
    """The samples of an earlier version, of which those that were deleted since are refused and not read.

    Numbers and fingerprint are those of the earlier version, so that orders and states are, too.

    Args:
        whole: All samples of the earlier version.
        deleted: Numbers of the samples that were deleted since, ascending, shape (n,).
        removed: Numbers of those that ``whole`` does not have, because it is of a later version, after a compaction; ascending, shape (m,).
    """

    fetcher_type = _DeletedSinceFetcher

    def __init__(self, whole: Samples, deleted: Numbers, removed: Numbers | None = None) -> None:
        super().__init__(whole)
        self._removed = np.empty(0, dtype=np.int64) if removed is None else removed
        check_numbers(deleted, len(self))
        self._deleted = deleted

    def __len__(self) -> int:
        return len(self.whole) + len(self._removed)

    @property
    def fingerprint(self) -> str:
        """That of the earlier version."""
        return self.whole.fingerprint

    def are_deleted(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Return whether each sample was deleted since, shape (n,); copies of it, too."""
        return np.isin(numbers % max(1, len(self)), self._deleted)

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return zeros, and the numbers in the whole; of removed samples those of their neighbours."""
        own = numbers - np.searchsorted(self._removed, numbers)
        if len(self._removed):
            own = np.minimum(own, len(self.whole) - 1)
        return np.zeros(len(numbers), dtype=np.int64), own

    def numbers_in(self, place: int, numbers: Numbers) -> Numbers:  # noqa: ARG002  (there is one)
        """Return the numbers of the samples that are still there, shape (m,)."""
        left = numbers[~self.are_deleted(numbers)]
        found: Numbers = left - np.searchsorted(self._removed, left)
        return found


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


def select_subset(samples: Samples, subset: Choice) -> Subset:
    """Return the samples that a user chose.

    Raises:
        OptionError: If it chooses none, or a sample that does not exist or twice, or is something else.
        StorageError: If its file cannot be read.
    """
    if isinstance(subset, slice):
        return _checked(samples, np.arange(len(samples))[subset])
    found = read_array(samples, subset, "subset=", "numbers or bools")
    if not found.size:
        raise OptionError("subset= chooses no sample")
    if found.ndim != 1 or not (found.dtype == bool or np.issubdtype(found.dtype, np.integer)):
        raise OptionError(
            "subset= takes the numbers or the keys of samples, or a mask of bools, in one dimension, "
            f"not {found.dtype} of shape {found.shape}: {reprlib.repr(subset)}"
        )
    if found.dtype != bool:
        return _checked(samples, found)
    if len(found) != len(samples):
        raise OptionError(
            f"subset= is a mask of {plural(len(found), 'bool')}, but there are {plural(len(samples), 'sample')}; "
            "give one for each, or the numbers of the samples"
        )
    return _checked(samples, np.flatnonzero(found))


def _checked(samples: Samples, numbers: npt.NDArray[Any]) -> Subset:
    if not len(numbers):
        raise OptionError("subset= chooses no sample")
    nsamples = len(samples)
    outside = numbers[(numbers < 0) | (numbers >= nsamples)]
    if len(outside):
        raise OptionError(
            f"subset= has the sample {outside[0]}, but the samples are numbered from 0 to {nsamples - 1}"
        )
    found, counts = np.unique(numbers, return_counts=True)
    if len(found) < len(numbers):
        raise OptionError(
            f"subset= has the sample {found[counts > 1][0]} more than once, {len(numbers) - len(found)} numbers are repeated; "
            "name each sample once"
        )
    return Subset(samples, numbers.astype(np.int64))


def read_array(samples: Samples, given: object, option: str, kind: str) -> npt.NDArray[Any]:
    """Return the numbers of a list, or of a ``.npy`` file, with one for each sample or fewer.

    Args:
        samples: The samples; their storage reads the file.
        given: The list, or the path or URL of a file.
        option: Name of the option, for errors.
        kind: Its elements, such as "numbers".

    Raises:
        OptionError: If it is no such file, or has lists of different lengths.
        StorageError: If it cannot be read.
    """
    if not isinstance(given, str | os.PathLike):
        try:
            return np.asarray(given)
        except ValueError as error:  # nested lists of different lengths
            raise OptionError(f"{option} takes one list of {kind}: {error}") from error
    url, expected = os.fspath(given), f"{option} takes a .npy file of {kind}"
    data = samples.storage.read_bounded(url, expected_bytes=_NUMBER_BYTES * len(samples))
    try:
        found = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError, RecursionError) as error:
        # A header may name more numbers than the memory holds, and the file has none of them.
        raise OptionError(f"{expected} (numpy.save): {error}", shard=url) from error
    if not isinstance(found, np.ndarray):
        raise OptionError(f"{expected}, one array, not a .npz file", shard=url)
    return found
