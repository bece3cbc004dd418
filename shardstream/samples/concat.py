"""Several datasets one after the other, such as those of a mix."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardstream.errors import OptionError
from shardstream.samples.base import Numbers, Samples
from shardstream.samples.view import View

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
