"""A dataset whose samples are drawn by weight in each epoch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, plural
from shardstream.order import EpochOrder, EpochPlan, WeightedDraw, WeightedEpochPlan, draw_by_weight
from shardstream.pipeline.indexed_source import ReadOptions, SamplesSource
from shardstream.pipeline.stage import State, whole_number
from shardstream.samples import Samples, class_weights, read_array

SampleWeights = Sequence[float] | npt.NDArray[Any] | str | os.PathLike[str] | Mapping[int, float]
"""One weight for each sample, or the path or URL of a ``.npy`` file of them; class (number in ``cls``) -> weight; or "balanced"."""
BALANCED = "balanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSource(SamplesSource):
    """One dataset, whose samples are drawn by weight in each epoch.

    Args:
        samples: Samples of the dataset; copy c of sample i has the number ``i + c * len(samples)``.
        options: Options of their order and of prefetching.
        draw: Expected copies of each sample.
    """

    draw: WeightedDraw
    is_sparse = True  # a draw may take few samples of many, as a subset does

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
        return WeightedEpochPlan(order, epoch, self.draw)

    def describe(self, *, steps: bool) -> State:  # noqa: ARG002
        """Return the weights and their options, which must equal those of a state."""
        draw = self.draw
        return {
            "weights": {
                "fingerprint": draw.fingerprint,
                "num_samples": draw.num_samples,
                "replacement": draw.replacement,
            }
        }


def open_source(
    samples: Samples,
    options: ReadOptions,
    weights: SampleWeights | None = None,
    replacement: bool = True,
    num_samples: int | None = None,
) -> SamplesSource:
    """Return the source of samples, drawn by weight if there are weights.

    Args:
        samples: The samples.
        options: Options of their order and of prefetching.
        weights: One for each sample, or the path or URL of a ``.npy`` file of them; or by class (see `class_weights`).
        replacement: Draw a sample several times.
        num_samples: Samples of an epoch; by default as many as there are.

    Raises:
        OptionError: If an option is not possible.
        StorageError: If the file of the weights cannot be read.
    """
    if weights is None:
        if num_samples is not None or not replacement:
            raise OptionError("num_samples= and replacement= are options of weights=; give weights")
        source = SamplesSource(samples=samples, options=options)
    else:
        draw = draw_by_weight(
            _checked_weights(weights, samples),
            num_samples=None if num_samples is None else whole_number("num_samples", num_samples),
            replacement=replacement,
        )
        source = WeightedSource(samples=samples, options=options, draw=draw)
    source.order(batch=options.microbatch or 1, lanes=1, epoch=0)  # validates
    return source


def _checked_weights(weights: SampleWeights, samples: Samples) -> npt.NDArray[np.float64]:
    if isinstance(weights, Mapping):
        found = class_weights(samples, weights)
    elif isinstance(weights, str) and weights == BALANCED:
        found = class_weights(samples, None)
    elif isinstance(weights, str | os.PathLike):
        found = read_array(os.fspath(weights), samples, "weights= takes a .npy file of numbers")
    else:
        try:
            found = np.asarray(weights)
        except ValueError as error:  # nested lists of different lengths
            raise OptionError(f"weights= takes one list of numbers: {error}") from error
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        raise OptionError(
            f"weights= takes one number for each sample, in one dimension, not {found.dtype} of shape {found.shape}"
        )
    if len(found) != len(samples):
        raise OptionError(
            f"weights= has {plural(len(found), 'number')}, but there are {plural(len(samples), 'sample')}; "
            "give one for each (with subset= for those of its samples), in their order"
        )
    return found.astype(np.float64)
