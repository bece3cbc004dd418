"""The samples of a dataset without those that were deleted."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardstream.errors import plural
from shardstream.samples.base import Numbers, Samples, check_numbers
from shardstream.samples.view import View

if TYPE_CHECKING:
    import pyarrow as pa


class WithoutDeleted(View):
    """The samples that are left, in their order: memory and time depend on the number of deleted ones alone.

    Args:
        whole: All samples.
        deleted: Numbers of the deleted ones, ascending, shape (n,).
    """

    def __init__(self, whole: Samples, deleted: Numbers) -> None:
        super().__init__([whole])
        check_numbers(deleted, len(whole))
        self.deleted = deleted
        # Of the samples that are left, how many come before each deleted one.
        self._left_before: Numbers = deleted - np.arange(len(deleted))
        self._length = len(whole) - len(deleted)

    def __len__(self) -> int:
        return self._length

    @property
    def whole(self) -> Samples:
        """All samples."""
        return self.inner[0]

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all samples, if they are as large as those of the whole in the mean."""
        return self.whole.total_bytes * self._length // max(1, len(self.whole))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with the dataset, and with the samples that are deleted."""
        digest = hashlib.sha256(f"without deleted samples: {self.whole.fingerprint}\n".encode())
        digest.update(self.deleted.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Those of the whole."""
        return self.whole.fields

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        deleted = f"{len(self.deleted):,} deleted"
        return f"{plural(self.num_shards, 'shard')}, {plural(self._length, 'sample')}, {deleted}"

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return zeros, and the numbers of samples in the whole."""
        return np.zeros(len(numbers), dtype=np.int64), self.numbers_in(0, numbers)

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
