"""Weights of samples by their class."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
from shardstream.samples.base import Samples

_COLUMN = "cls"


def class_weights(samples: Samples, weights: Mapping[int, float] | None) -> npt.NDArray[np.float64]:
    """Return the weight of each sample by its class, from the column ``cls``.

    Args:
        samples: The samples.
        weights: Number of the class -> weight of each of its samples; None gives all classes equal shares.

    Returns:
        Weights, shape (n,).

    Raises:
        OptionError: If the shards have no such column, a sample has no class, a class has no weight, or a weight no sample.
        StorageError: If the columns cannot be read.
    """
    if _COLUMN not in samples.column_names():
        raise OptionError(
            "weights by class need the column cls; run 'shardstream index --columns cls' on the folder, or give one weight for each sample",
            shard=samples.url_of(0),
        )
    column = samples.read_columns([_COLUMN])[_COLUMN]
    if column.null_count:
        raise OptionError(
            f"{plural(column.null_count, 'sample')} without a class (cls), so without a weight; give one weight for each sample",
            shard=samples.url_of(0),
        )
    classes, inverse, counts = np.unique(
        column.to_numpy(zero_copy_only=False), return_inverse=True, return_counts=True
    )
    if weights is None:
        return (1.0 / counts)[inverse]
    present = set(classes.tolist())
    if present != weights.keys():
        missing, unknown = (
            sorted(present - weights.keys()),
            sorted(weights.keys() - present, key=str),
        )
        raise OptionError(
            f"weights= has no weight of the class {missing[0]}"
            if missing
            else f"weights= has the class {unknown[0]!r}, which no sample has; classes are the numbers of the field cls"
        )
    try:
        by_class = np.array([float(weights[one]) for one in classes.tolist()])
    except (TypeError, ValueError) as error:
        raise OptionError(f"weights= takes a number for each class: {error}") from error
    return by_class[inverse]
