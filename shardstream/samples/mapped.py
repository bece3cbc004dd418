"""Samples found in mapped shards, copied at access."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from shardstream.format import Columns, JoinedFields, LazyColumns

Numbers = npt.NDArray[np.int64]


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
