"""A dataset of samples by number, of any kind."""

from __future__ import annotations

from collections.abc import Sequence

from shardstream.catalog import ClassNames, Keys, Where, choose_samples
from shardstream.distributed import Placement
from shardstream.loader.dataset import OPTIONS_OF_OPENING, StreamDataset
from shardstream.pipeline import (
    OnError,
    OrderOptions,
    Pipeline,
    ReadOptions,
    SamplesSource,
    SampleWeights,
    SkipTracker,
    Weights,
    keep_fields,
    options_or_default,
    refuse_options,
    whole_number,
)
from shardstream.samples import Choice, Samples


class CatalogDataset(StreamDataset):
    """Any samples by number: of a `Catalog` over data of another kind, or a view over others, such as a subset of a join.

    Splits, orders, lengths, states and steps are those of `ShardDataset`.

    Args:
        samples: The samples by number.
        shuffle: As in `ShardDataset`, like all below; columns of a join are those of its first dataset.
        seed: As in `ShardDataset`.
        order: As in `ShardDataset`.
        subset: As in `ShardDataset`.
        where: As in `ShardDataset`.
        weights: As in `ShardDataset`.
        fields: As in `ShardDataset`.
        read: As in `ShardDataset`: ``prefetch_bytes`` and ``hedge``.
        on_error: As in `ShardDataset`.
        placement: As in `ShardDataset`.

    Raises:
        OptionError: If an argument is invalid.
    """

    def __init__(  # noqa: PLR0913  (the public door)
        self,
        samples: Samples,
        *,
        shuffle: bool = False,
        seed: int = 0,
        order: OrderOptions | None = None,
        subset: Choice | Keys | None = None,
        where: Where | None = None,
        weights: SampleWeights | Weights | None = None,
        fields: Sequence[str] | None = None,
        read: ReadOptions | None = None,
        on_error: OnError = "raise",
        placement: Placement | None = None,
    ) -> None:
        SkipTracker(on_error)  # validates
        reading = options_or_default(read, ReadOptions)
        refuse_options(reading, OPTIONS_OF_OPENING, "on samples that are opened")
        if subset is not None or where is not None:
            samples = choose_samples(samples, subset, where)
        stages = () if fields is None else (keep_fields(fields, samples.fields),)
        source = SamplesSource(
            samples=samples,
            shuffle=shuffle,
            seed=whole_number("seed", seed),
            options=options_or_default(order, OrderOptions),
            reading=reading,
        ).drawn(weights)
        pipeline = Pipeline(source=source, stages=stages, on_error=on_error)
        super().__init__(pipeline, placement, ClassNames({}))
