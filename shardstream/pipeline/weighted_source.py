"""A dataset whose samples are drawn by weight in each epoch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.catalog import Catalog, ConcatCatalog, SubsetCatalog, class_weights, read_array
from shardstream.errors import OptionError, plural
from shardstream.order import EpochOrder, EpochPlan, WeightedDraw, WeightedEpochPlan, draw_by_weight
from shardstream.pipeline.indexed_source import CatalogSource, ReadOptions
from shardstream.pipeline.stage import State, whole_number

SampleWeights = Sequence[float] | npt.NDArray[Any] | str | os.PathLike[str] | Mapping[int, float]
"""One weight for each sample, or the path or URL of a ``.npy`` file of them; class (number in ``cls``) -> weight; or "balanced"."""
BALANCED = "balanced"


class DrawnCatalog(ConcatCatalog):
    """The samples of one catalog, each under several numbers: copy c of sample i is ``i + c * len``.

    Args:
        catalog: The samples.
        draw: Expected copies of each.
    """

    def __init__(self, catalog: Catalog, draw: WeightedDraw) -> None:
        super().__init__([catalog])
        self._draw = draw
        # A draw may take few samples of many, as a subset does.
        self.max_read_ratio = self.max_read_ratio or SubsetCatalog.max_read_ratio

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Those of the catalog."""
        return self.parts[0].fields

    @cached_property
    def fingerprint(self) -> str:
        """That of the catalog: a state compares the weights under a name of their own."""
        return self.parts[0].fingerprint

    @property
    def summary(self) -> str:
        """Size of the dataset and of an epoch, for ``repr``."""
        how = "" if self._draw.replacement else ", each at most once"
        return f"{self.parts[0].summary}, {self._draw.num_samples} drawn by weight{how}"

    def restrict_to(self, shards: Sequence[int]) -> DrawnCatalog:
        """Return a catalog with the samples of some shards under the same numbers (see `Catalog.restrict_to`)."""
        return DrawnCatalog(self.parts[0].restrict_to(shards), self._draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSource(CatalogSource):
    """One dataset, whose samples are drawn by weight in each epoch.

    Args:
        catalog: Samples of the dataset, a `DrawnCatalog`.
        options: Options of their order and of prefetching.
        draw: Expected copies of each sample.
    """

    draw: WeightedDraw

    @property
    def nsamples(self) -> int:
        """Samples of an epoch."""
        return self.draw.num_samples

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
    catalog: Catalog,
    options: ReadOptions,
    weights: SampleWeights | None = None,
    replacement: bool = True,
    num_samples: int | None = None,
) -> CatalogSource:
    """Return the source of a catalog, drawn by weight if there are weights.

    Args:
        catalog: The samples.
        options: Options of their order and of prefetching.
        weights: One for each sample of the catalog, or the path or URL of a ``.npy`` file of them; or by class (see `class_weights`).
        replacement: Draw a sample several times.
        num_samples: Samples of an epoch; by default as many as the catalog has.

    Raises:
        OptionError: If an option is not possible.
        StorageError: If the file of the weights cannot be read.
    """
    if weights is None:
        if num_samples is not None or not replacement:
            raise OptionError("num_samples= and replacement= are options of weights=; give weights")
        source = CatalogSource(catalog=catalog, options=options)
    else:
        draw = draw_by_weight(
            _checked_weights(weights, catalog),
            num_samples=None if num_samples is None else whole_number("num_samples", num_samples),
            replacement=replacement,
        )
        source = WeightedSource(catalog=DrawnCatalog(catalog, draw), options=options, draw=draw)
    source.order(batch=options.microbatch or 1, lanes=1, epoch=0)  # validates
    return source


def _checked_weights(weights: SampleWeights, catalog: Catalog) -> npt.NDArray[np.float64]:
    if isinstance(weights, Mapping):
        found = class_weights(catalog, weights)
    elif isinstance(weights, str) and weights == BALANCED:
        found = class_weights(catalog, None)
    elif isinstance(weights, str | os.PathLike):
        found = read_array(os.fspath(weights), catalog, "weights= takes a .npy file of numbers")
    else:
        try:
            found = np.asarray(weights)
        except ValueError as error:  # nested lists of different lengths
            raise OptionError(f"weights= takes one list of numbers: {error}") from error
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        raise OptionError(
            f"weights= takes one number for each sample, in one dimension, not {found.dtype} of shape {found.shape}"
        )
    if len(found) != len(catalog):
        hint = "give one for each, in the order of the samples"
        if isinstance(catalog, SubsetCatalog):
            hint = "with subset= give those of its samples, in its order"
        raise OptionError(
            f"weights= has {plural(len(found), 'number')}, but there are {plural(len(catalog), 'sample')}; {hint}"
        )
    return found.astype(np.float64)
