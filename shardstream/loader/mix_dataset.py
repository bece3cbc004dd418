"""Mix several datasets into one, with weights (``ss.mix``)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from shardstream.catalog import Classes, ClassNames, warn_of_difference
from shardstream.distributed import WorkerInfo
from shardstream.errors import OptionError, plural
from shardstream.loader.dataset import OPTIONS_OF_OPENING, StreamDataset
from shardstream.loader.earlier_versions import Versions
from shardstream.pipeline import (
    IndexedSource,
    ItemStage,
    MixIndexedSource,
    MixRecipe,
    MixWeights,
    OrderOptions,
    Pipeline,
    ReadOptions,
    Stop,
    WeightSchedule,
    balance_of,
    options_or_default,
    refuse_options,
    whole_number,
)
from shardstream.samples import Concat

_CONCURRENT_REQUESTS = 16


def mix(  # noqa: PLR0913  (the public door)
    datasets: Mapping[str, StreamDataset] | Sequence[StreamDataset],
    weights: MixWeights | Sequence[float] | None = None,
    *,
    stop: Stop = "first_exhausted",
    samples: int | None = None,
    seed: int = 0,
    order: OrderOptions | None = None,
    read: ReadOptions | None = None,
) -> MixDataset:
    """Mix datasets, each with its own steps, into one; mixes can be nested.

    Warns with `ClassesWarning` if the datasets number their classes differently.

    A mix is as exact as a single dataset: the same global batches on every topology, and a small state. So every step of the datasets
    yields one item per item, or none (``select``); steps that change the number of items (``batched``, ...) come after the mix.

    Args:
        datasets: By name, or in order.
        weights: Share of each dataset, by name or in order; a function of the epoch that returns them by name; or a `WeightSchedule`, by the
            step of the training. With None an epoch has every sample of all datasets once.
        stop: With weights: an epoch ends before a sample repeats ("first_exhausted"), or when all samples have been read
            ("all_exhausted"; smaller datasets repeat).
        samples: With weights: number of samples of an epoch, instead of ``stop``.
        seed: Of the mix; each dataset keeps its own.
        order: As in `ShardDataset`, but for ``block``. Each lane is mixed separately, in patterns of 32 samples with the given
            shares: with many lanes a small epoch ends some samples early: below 90 % it warns, an epoch without samples is an error.
            An epoch of a mix with weights has whole batches only.
        read: ``prefetch_bytes`` of the mix, and ``hedge``, which is also on if one of the datasets has it.

    Raises:
        OptionError: If names, weights and datasets do not match, a step of a dataset changes the number of items, or a dataset
            is read without an index.
    """
    named = (
        dict(datasets)
        if isinstance(datasets, Mapping)
        else {str(n): one for n, one in enumerate(datasets)}
    )
    if not (weights is None or isinstance(weights, Mapping | WeightSchedule) or callable(weights)):
        if len(weights) != len(named):
            raise OptionError(
                f"{plural(len(weights), 'weight')} for {plural(len(named), 'dataset')}; give one weight per dataset"
            )
        weights = dict(zip(named, weights, strict=True))
    for dataset in named.values():
        if not isinstance(dataset, StreamDataset):
            raise OptionError(
                f"mix takes datasets such as ShardDataset, not a {type(dataset).__name__}; by_number() comes after mix"
            )
    parts = {name: dataset.pipeline for name, dataset in named.items()}
    recipe = MixRecipe(parts=parts, weights=weights, stop=stop, samples=samples)
    order, read = options_or_default(order, OrderOptions), options_or_default(read, ReadOptions)
    refuse_options(order, ["block"], "in a mix, only in its datasets")
    refuse_options(read, OPTIONS_OF_OPENING, "in a mix, only in its datasets")
    policies = [part.on_error for part in parts.values()]
    if any(policy != policies[0] for policy in policies):
        raise OptionError(
            f"the datasets of a mix differ in on_error: {policies}; give all the same"
        )
    placements = {dataset._given_placement for dataset in named.values()}
    if len(placements) > 1:
        raise OptionError(
            f"the datasets of a mix differ in placement: {placements}; give all the same"
        )
    pipeline = Pipeline(
        source=_source(recipe, whole_number("seed", seed), order, read), on_error=policies[0]
    )
    found = _classes(named)
    warn_of_difference(found)
    mixed = MixDataset(pipeline, placements.pop(), ClassNames(found))
    mixed._versions = tuple(number for one in named.values() for number in one.versions)

    def remake(_: StreamDataset, versions: Versions) -> StreamDataset:
        made = {name: one._of_versions(versions) for name, one in named.items()}
        return mix(made, weights, stop=stop, samples=samples, seed=seed, order=order, read=read)

    mixed._remake = remake
    return mixed


def _classes(named: Mapping[str, StreamDataset]) -> dict[str, Classes]:
    """Return name -> class names, for the datasets that have class names."""
    with ThreadPoolExecutor(_CONCURRENT_REQUESTS, thread_name_prefix="shardstream-look") as pool:
        classes_or_none = pool.map(lambda dataset: dataset.classes, named.values())
        return {
            f"dataset {name!r}": names
            for name, names in zip(named, classes_or_none, strict=True)
            if names is not None
        }


def _source(
    recipe: MixRecipe, seed: int, order: OrderOptions, read: ReadOptions
) -> MixIndexedSource:
    sources = tuple(_indexed_source(name, part) for name, part in recipe.parts.items())
    if any(source.is_new_each_epoch for source in sources):
        reason = "of rows that are made anew in each epoch, of other samples and costs"
        refuse_options(order, ["nodes", "exchange", "balance"], reason)
    if any(source.draw is not None or not source.shuffle for source in sources):
        reason = "on datasets without shuffle=True, or with weights=, which draw other samples in each epoch"
        refuse_options(order, ["nodes", "exchange"], reason)
    if order.balance is not None and isinstance(recipe.weights, WeightSchedule):
        warnings.warn(
            "balance= deals the samples of some rounds anew, so new weights of a WeightSchedule begin up to so many rounds earlier or later; "
            "use few, with balance=ss.Balance(..., steps=)",
            UserWarning,
            stacklevel=3,
        )
    hedge = read.hedge or any(source.reading.hedge for source in sources)
    samples = Concat([source.samples for source in sources])
    return MixIndexedSource(
        recipe=recipe,
        sources=sources,
        samples=samples,
        seed=seed,
        options=order,
        reading=replace(read, hedge=hedge),
        balance=None if order.balance is None else balance_of(order.balance, samples, shuffle=True),
        yields_batches=all(source.yields_batches for source in sources),
        is_new_each_epoch=any(source.is_new_each_epoch for source in sources),
    )


def _indexed_source(name: str, part: Pipeline) -> IndexedSource:
    """Return the source of a part, whose samples are known by number.

    Raises:
        OptionError: If a step changes the number of items, or the part is read without an index.
    """
    if part.indexed_source is not None:
        options = ["nodes", "exchange", "balance"]
        refuse_options(
            part.indexed_source.options, options, "in a dataset of a mix, only in its order="
        )
        return part.indexed_source
    changing = [stage for stage in part.stages if not isinstance(stage, ItemStage)]
    if not changing:
        raise OptionError(f"the dataset {name!r} of a mix: {part.source.lacks_numbers}")
    raise OptionError(
        f"the step {type(changing[0]).__name__} of the dataset {name!r} changes the number of items, so a mix cannot compute which sample comes "
        "when; put it after ss.mix, or choose the samples with where= or subset="
    )


class MixDataset(StreamDataset):
    """The dataset that `mix` returns."""

    def counts(self, epoch: int = 0, *, batch_size: int | None = None) -> dict[str, int]:
        """Return the samples of each dataset in an epoch, over all ranks.

        Args:
            epoch: From 0.
            batch_size: The loader's; an epoch of a mix with weights has whole batches only.
        """
        source = self.pipeline.source
        assert isinstance(source, MixIndexedSource)  # noqa: S101  (made by `mix`)
        worker_info = WorkerInfo(self.placement)
        batch = source.options.microbatch or batch_size or 1
        return source.counts(
            source.order(batch=batch, lanes=worker_info.num_global_workers, epoch=epoch), epoch
        )
