"""A dataset whose samples are drawn by weight in each epoch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
from shardstream.order import (
    BalancedEpochPlan,
    EpochOrder,
    EpochPlan,
    WeightedDraw,
    WeightedEpochPlan,
    draw_by_weight,
)
from shardstream.pipeline.balance import balance_of
from shardstream.pipeline.indexed_source import IndexedSource, SamplesSource
from shardstream.pipeline.options import refuse_options
from shardstream.pipeline.stage import State, whole_number
from shardstream.samples import Samples, values_of

SampleWeights = Sequence[float] | npt.NDArray[Any] | str | os.PathLike[str] | Mapping[int, float]
"""One weight for each sample, the path or URL of a ``.npy`` file of them, or the name of a column; class (number in ``cls``) -> weight; or "balanced"."""
BALANCED = "balanced"
_CLASS_COLUMN = "cls"


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights of samples with their options, for ``weights=`` of a dataset.

        ss.ShardDataset(url, weights=ss.Weights("balanced", num_samples=100_000))

    Args:
        values: One for each sample, or by class, as ``weights=`` takes them.
        replacement: False draws each sample at most once an epoch, with a probability in proportion to its weight (up to 1).
        num_samples: Samples of an epoch, over all ranks; by default as many as there are. Needed for ``replacement=False``.
    """

    values: SampleWeights
    _: KW_ONLY
    replacement: bool = True
    num_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSource(SamplesSource):
    """One dataset, whose samples are drawn by weight in each epoch.

    Args:
        samples: Samples of the dataset; copy c of sample i has the number ``i + c * len(samples)``.
        shuffle: As in `SamplesSource`, like the next three.
        seed: As in `SamplesSource`.
        options: As in `SamplesSource`.
        reading: As in `SamplesSource`.
        draw: Expected copies of each sample.
    """

    draw: WeightedDraw
    is_sparse = True  # a draw may take few samples of many, as a subset does

    @property
    def differs_by_epoch(self) -> bool:
        """Whether epochs differ: each draws anew."""
        return True

    @property
    def nsamples(self) -> int:
        """Samples of an epoch."""
        return self.draw.num_samples

    @property
    def summary(self) -> str:
        """Size of the dataset and of an epoch, for ``repr``."""
        how = "" if self.draw.replacement else ", each at most once"
        return f"{self.samples.summary}, {self.draw.num_samples} drawn by weight{how}"

    def plan(self, order: EpochOrder, epoch: int) -> EpochPlan:
        """Return the batches of an epoch."""
        plan = WeightedEpochPlan(order, epoch, self.draw)
        return plan if self.balance is None else BalancedEpochPlan(plan, self.balance)

    def describe(self, *, steps: bool) -> State:
        """Return the weights and their options, which must equal those of a state."""
        draw = self.draw
        return IndexedSource.describe(self, steps=steps) | {
            "weights": {
                "fingerprint": draw.fingerprint,
                "num_samples": draw.num_samples,
                "replacement": draw.replacement,
            }
        }


def draw_samples(source: SamplesSource, weights: SampleWeights | Weights | None) -> SamplesSource:
    """Return the source, with samples drawn by weight if there are weights, and with costs if its order has ``balance=``.

    Args:
        source: All samples.
        weights: One for each sample, or the path or URL of a ``.npy`` file of them; or by class.

    Raises:
        OptionError: If the options of the order or the weights are not possible.
        StorageError: If the file of the weights cannot be read.
    """
    if weights is not None:
        refuse_options(
            source.options,
            ["nodes", "exchange"],
            "with weights=, which draw other samples in each epoch",
        )
        if not isinstance(weights, Weights):
            weights = Weights(weights)
        count = weights.num_samples
        draw = draw_by_weight(
            _checked_weights(weights.values, source.samples),
            num_samples=None if count is None else whole_number("num_samples", count),
            replacement=weights.replacement,
        )
        own = {one.name: getattr(source, one.name) for one in fields(source)}
        source = WeightedSource(**own, draw=draw)
    source.order(batch=source.options.microbatch or 1, lanes=1, epoch=0)  # validates
    balance = source.options.balance
    if balance is not None:
        source = replace(
            source, balance=balance_of(balance, source.samples, shuffle=source.shuffle)
        )
    return source


def _checked_weights(weights: SampleWeights, samples: Samples) -> npt.NDArray[np.float64]:
    if isinstance(weights, Mapping):
        found = _class_weights(samples, weights)
    elif isinstance(weights, str) and weights == BALANCED:
        found = _class_weights(samples, None)
    else:
        found = values_of(samples, weights, "weights=")
    return found.astype(np.float64)


def _class_weights(
    samples: Samples, weights: Mapping[int, float] | None
) -> npt.NDArray[np.float64]:
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
    if _CLASS_COLUMN not in samples.column_names():
        raise OptionError(
            "weights by class need the column cls; run 'shardstream index --columns cls' on the folder, or give one weight for each sample",
            shard=samples.url_of(0),
        )
    column = samples.read_columns([_CLASS_COLUMN])[_CLASS_COLUMN]
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
