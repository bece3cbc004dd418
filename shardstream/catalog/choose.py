"""Choose samples by number, by key, or by a condition on columns."""

from __future__ import annotations

import os

import numpy as np

from shardstream.catalog.conditions import Keys, Where, find_keys, find_where
from shardstream.errors import OptionError, plural
from shardstream.samples import Choice, Samples, Subset, select_subset


def choose_samples(
    samples: Samples,
    subset: Choice | None = None,
    keys: Keys | None = None,
    where: Where | None = None,
) -> Samples:
    """Return the samples that a user chose by number, by key, by a condition on columns, or by both.

    Raises:
        OptionError: If an argument is invalid or chooses no sample, or the shards have no columns; see `select_subset`, `find_keys` and
            `find_where`.
        StorageError: If a file cannot be read.
    """
    if isinstance(subset, str | os.PathLike) and os.fspath(subset).lower().endswith(".txt"):
        if keys is not None:
            raise OptionError("give subset= or keys=, not both")
        subset, keys = None, subset
    if subset is not None and keys is not None:
        raise OptionError("give subset= or keys=, not both")
    if subset is None and keys is None and where is None:
        return samples
    matching = None if where is None else find_where(samples, where)
    if matching is not None and not len(matching):
        raise OptionError(f"where={str(where)!r} chooses no sample")
    if keys is not None:
        subset = find_keys(samples, keys)
    if subset is None and matching is not None:
        return Subset(samples, matching)
    chosen = select_subset(samples, slice(None) if subset is None else subset)
    if matching is None:
        return chosen
    numbers = chosen.numbers[np.isin(chosen.numbers, matching)]
    if not len(numbers):
        raise OptionError(
            f"where={str(where)!r} chooses none of the {plural(len(chosen), 'sample')} of subset= or keys="
        )
    return Subset(samples, numbers)
