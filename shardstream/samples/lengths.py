"""Numbers of all samples that rows are planned with: lengths, costs, and runs of samples that belong together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
from shardstream.samples.base import Numbers, Samples
from shardstream.samples.subset import read_array
from shardstream.samples.view import has_rows, parts_in_rows, samples_in_rows

Lengths = str | os.PathLike[str] | Sequence[float] | npt.NDArray[Any]
"""The name of a column, the path or URL of a ``.npy`` file, or one number for each sample."""
Floats = npt.NDArray[np.float64]
CostFunction = Callable[[Floats], Any]
"""Numbers of samples, shape (n,), to their costs, of the same shape."""

_MAX_LENGTH = 1 << 40  # sums are exact
_ROWS_AT_ONCE = 1 << 16  # whose parts are found together: a bound of the memory
_HOW = "shardstream index URL --columns n=npy.len writes a column n of lengths"


def lengths_of(samples: Samples, given: Lengths, option: str) -> Numbers:
    """Return the length of each sample, shape (n,), int64, at least 0.

    Args:
        samples: The samples.
        given: As `Lengths`.
        option: Name of the option, for errors.

    Raises:
        OptionError: If there is no such column, or a number is missing, negative, or no whole number; or there are too many or too few.
        StorageError: If columns or file cannot be read.
    """
    found = values_of(samples, given, option)
    if found.dtype.kind not in "iu":
        whole = np.rint(found)
        _check(samples, option, found, found == whole, "lengths are whole numbers")
        found = whole
    is_valid = (found >= 0) & (found < _MAX_LENGTH)
    _check(samples, option, found, is_valid, f"lengths are from 0 to {_MAX_LENGTH - 1}")
    return found.astype(np.int64)


def costs_of(
    samples: Samples, given: Lengths, option: str, cost: CostFunction | None = None
) -> Floats:
    """Return the cost of each sample, shape (n,), float64, finite and at least 0.

    Args:
        samples: The samples.
        given: As `Lengths`.
        option: Name of the option, for errors.
        cost: Function of these numbers to costs; None takes the numbers.

    Raises:
        OptionError: As `lengths_of`, or if the function returns another shape, or costs that are negative or not finite.
        StorageError: If columns or file cannot be read.
    """
    return _changed(samples, values_of(samples, given, option), option, cost)


def row_costs(
    samples: Samples, given: Lengths, option: str, cost: CostFunction | None = None
) -> Floats:
    """Return the cost of each row, the sum of those of its parts, shape (n,), as `costs_of`; of samples that are no rows their own.

    Args:
        samples: The rows.
        given: As `Lengths`, of the samples in the rows: a part has its share of the number of its sample, such as its own length.
        option: As above.
        cost: Function of the numbers of all parts.

    Raises:
        OptionError: As above.
        StorageError: As above.
    """
    if not has_rows(samples):
        return costs_of(samples, given, option, cost)
    stored = samples_in_rows(samples)
    values = values_of(stored, given, option)
    chunks = np.array_split(np.arange(len(samples)), -(-len(samples) // _ROWS_AT_ONCE))
    counts, numbers, found = list[Numbers](), list[Numbers](), list[Floats]()
    for chunk in chunks:
        rows, own, shares = parts_in_rows(samples, chunk)
        counts.append(np.bincount(rows, minlength=len(chunk)))
        numbers.append(own)
        found.append(values[own] * shares)
    costs = _changed(stored, np.concatenate(found), option, cost, np.concatenate(numbers))
    firsts = np.cumsum(np.concatenate([[0], *counts]))[:-1]
    return np.add.reduceat(costs, firsts)


def _changed(
    samples: Samples,
    values: npt.NDArray[Any],
    option: str,
    cost: CostFunction | None,
    numbers: Numbers | None = None,
) -> Floats:
    """Return the costs for values of samples, or of parts of the samples with these numbers."""
    found = values.astype(np.float64)
    if cost is not None:
        result = np.asarray(cost(found))
        if result.shape != found.shape or result.dtype.kind not in "biuf":
            raise OptionError(
                f"the cost function returned {result.dtype} of shape {result.shape} for an array of shape {found.shape}; return one number for each"
            )
        found = result.astype(np.float64)
    is_valid = np.isfinite(found) & (found >= 0)
    _check(samples, option, found, is_valid, "costs are finite, at least 0", numbers)
    return found


def run_lengths(samples: Samples, name: str) -> Numbers:
    """Return the number of samples of each run, shape (runs,): samples of one value in a column, stored one after the other in one dataset.

    A run ends where samples were left out (``where=``, ``subset=``): those around a gap do not follow each other.

    Raises:
        OptionError: If there is no such column, a sample has no value, or samples of one value do not follow each other.
        StorageError: If the columns cannot be read.
    """
    column = samples.read_columns([name])[name]
    if column.null_count:
        raise OptionError(
            f"group: {plural(column.null_count, 'sample')} without a value in the column {name!r}",
            shard=samples.url_of(0),
        )
    encoded = column.combine_chunks().dictionary_encode()
    datasets, stored = np.empty((2, len(samples)), dtype=np.int64)
    for place, one in enumerate(samples.find_stored(np.arange(len(samples), dtype=np.int64))):
        if not one.is_joined:
            datasets[one.places], stored[one.places] = place, one.numbers
    groups = encoded.indices.to_numpy().astype(np.int64) + datasets * len(encoded.dictionary)
    is_first = np.diff(groups, prepend=-1) != 0
    seen, counts = np.unique(groups[is_first], return_counts=True)
    if (counts > 1).any():
        value = encoded.dictionary[int(seen[counts > 1][0]) % len(encoded.dictionary)].as_py()
        raise OptionError(
            f"group: samples with {value!r} in the column {name!r} do not follow each other, as those of {plural(int((counts > 1).sum()), 'group')} in "
            "all; pack them in order, without shuffle (with subset= in the order of its numbers)",
            shard=samples.url_of(0),
        )
    starts = np.flatnonzero(is_first | (np.diff(stored, prepend=-2) != 1))
    lengths: Numbers = np.diff(np.append(starts, len(groups)))
    return lengths


def values_of(samples: Samples, given: Lengths, option: str) -> npt.NDArray[Any]:
    """Return one number for each sample, shape (n,), of the type that they have.

    Raises:
        OptionError: If there is no such column, a number is missing, or there are too many or too few.
        StorageError: If columns or file cannot be read.
    """
    found: npt.NDArray[Any]
    if isinstance(given, str) and not given.endswith(".npy"):
        column = samples.read_columns([given])[given]
        if column.null_count:
            number = int(np.flatnonzero(column.is_null().to_numpy())[0])
            raise OptionError(
                f"{option}: sample {number} has no value in the column {given!r}, as {plural(column.null_count, 'sample')} in all; {_HOW}",
                shard=samples.place_of(number)[0],
            )
        found = column.to_numpy()
    else:
        found = read_array(samples, given, option, "numbers")
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        raise OptionError(
            f"{option} takes the name of a column or one number for each sample, in one dimension, not {found.dtype} of shape {found.shape}"
        )
    if len(found) != len(samples):
        raise OptionError(
            f"{option} has {plural(len(found), 'number')}, but there are {plural(len(samples), 'sample')}; "
            "give one for each (with subset= for those of its samples), in their order"
        )
    return found


def _check(
    samples: Samples,
    option: str,
    found: npt.NDArray[Any],
    is_valid: npt.NDArray[np.bool_],
    expected: str,
    numbers: Numbers | None = None,
) -> None:
    if is_valid.all():
        return
    place = int(is_valid.argmin())
    number = place if numbers is None else int(numbers[place])
    raise OptionError(
        f"{option}: sample {number} has {found[place]}; {expected} ({plural(int((~is_valid).sum()), 'sample')} with a wrong one)",
        shard=samples.place_of(number)[0],
    )
