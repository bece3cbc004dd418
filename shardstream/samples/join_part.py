"""A dataset whose samples are added to those of another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.samples.base import Samples
from shardstream.samples.mapped import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPart:
    """Samples that are added to those of a first dataset.

    Args:
        samples: The samples.
        numbers: For each sample of the join its number here, -1 if it has none; None if all numbers are equal.
        fields: Field -> its name here; None for all fields, under their names.
        defaults: Fields, as bytes, of the samples that have none here.
        is_strict: Whether a sample here without one of ``fields`` is an error.
        num_unused: Number of samples here whose key no sample has.
    """

    samples: Samples
    numbers: npt.NDArray[np.signedinteger[Any]] | None = None
    fields: Mapping[str, str] | None = None
    defaults: Mapping[str, bytes]
    is_strict: bool = False
    num_unused: int = 0

    @property
    def known_fields(self) -> tuple[str, ...] | None:
        """Fields that it adds; None if they are unknown."""
        return self.samples.fields if self.fields is None else tuple(self.fields)

    @property
    def has_classes(self) -> bool:
        """Whether the field ``cls`` of the joined samples is that of these, whose class names count then."""
        is_own = self.fields is None or self.fields.get("cls") == "cls"
        return is_own and "cls" in (self.known_fields or ())

    def numbers_of(self, numbers: Numbers, nsamples: int) -> Numbers:
        """Return the number here of each sample of the join, which has ``nsamples``; -1 for none. A copy is a copy here, too."""
        copies, numbers = np.divmod(numbers, max(1, nsamples))
        theirs = numbers if self.numbers is None else self.numbers[numbers].astype(np.int64)
        return np.where(theirs < 0, -1, theirs + copies * len(self.samples))
