"""Join the samples of several datasets to one sample each (``ss.join``), or mix datasets into one, with weights (``ss.mix``)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from shardstream.catalog import Classes, ClassNames, warn_of_difference
from shardstream.distributed import WorkerInfo
from shardstream.errors import OptionError, plural
from shardstream.loader.dataset import (
    OPTIONS_OF_OPENING,
    ShardDataset,
    StreamDataset,
    refuse_own_iteration,
)
from shardstream.loader.dataset_versions import Versions
from shardstream.pipeline import (
    Balance,
    IndexedSource,
    ItemStage,
    MixIndexedSource,
    MixRecipe,
    MixWeights,
    OrderOptions,
    Pipeline,
    ReadOptions,
    SamplesSource,
    Stop,
    WeightSchedule,
    balance_of,
    numbered_source,
    options_or_default,
    refuse_options,
    whole_number,
)
from shardstream.samples import (
    Concat,
    JoinBy,
    JoinMissing,
    JoinPart,
    check_missing,
    join_samples,
    open_part,
)
from shardstream.storage import Storage

OtherDataset = (
    StreamDataset | str | os.PathLike[str] | Mapping[Any, Sequence[str] | Mapping[str, str] | None]
)
"""A dataset, or its URL, or its URL -> the fields to take (None for all); of a table field -> column."""
_CONCURRENT_REQUESTS = 16


def join(
    first: OtherDataset,
    *others: OtherDataset,
    by: JoinBy = "auto",
    missing: JoinMissing = "error",
    storage_options: Mapping[str, Any] | None = None,
) -> StreamDataset:
    """Join datasets with the same keys: each sample gets the fields of the samples of the same key in the others.

    The first dataset decides: its samples, their order, ``shuffle``, ``seed``, ``subset=`` and all other options of reading but ``fields=`` and ``lazy=``. The datasets may be of
    any kind whose samples have numbers: shards, loose files, joins. Length, splits, states and steps are those of a `ShardDataset`. Bytes of each dataset are read by range requests of their own, ahead of their use.
    Samples of the others whose key the first does not have are not read.

        images = ss.ShardDataset("s3://bucket/images/", shuffle=True)
        dataset = ss.join(images, "s3://bucket/captions/", {"s3://bucket/embeddings/": ["npy"]})

    Args:
        first: The dataset that decides, without steps; or its URL; or ``{url: [field, ...]}`` to keep some of its fields only, so that others replace the rest.
        others: Datasets whose fields are added, without steps; their URLs; or ``{url: fields}`` to add some fields only: names, or ``{field: name
            there}``. The URL may be that of a table (Parquet, CSV, TSV, JSON lines) with ``{field: column}``, whose keys are in the column
            ``__key__`` or ``key``, or in the one that ``{"__key__": column}`` names; its cells are encoded as `pack` does. A field that two of them
            have is an error at its sample, and if their manifests list fields, when they are opened.
        by: "key" joins by the keys in the columns that ``pack`` and ``index`` write (``shardstream index URL --columns __key__``); those of shards
            without columns are read from the shards, all bytes once. "position" joins
            sample i with sample i, for datasets of the same length and order; the keys of each sample are compared when it is read, and
            different ones are an error. "auto" takes the keys where all datasets have columns, else the position.
        missing: What happens to a sample whose key another dataset lacks: "error" when the join is opened; "drop" leaves it out, with a
            warning in the log that counts them; "keep" leaves its fields out; or fields as bytes (``{"txt": b""}``) that it gets instead.
            With "error", a sample or row there that lacks one of the named fields is an error, too.
        storage_options: For fsspec, to open URLs.

    Raises:
        OptionError: If a dataset has steps or cannot be read by number, keys are missing, or fields are in two datasets.
        StorageError: If a dataset or its columns cannot be read.
    """
    if not others:
        raise OptionError("join takes two datasets or more")
    if by not in ("auto", "key", "position"):
        raise OptionError(f"by must be 'auto', 'key' or 'position', not {by!r}")
    check_missing(missing)
    first, kept = _split(first)
    if isinstance(kept, Mapping):
        raise OptionError("fields of the first dataset keep their names: {url: [field, ...]}")
    if not isinstance(first, StreamDataset):
        first = ShardDataset(_url_of(first), storage_options=storage_options)
    source = _source_of(first, is_first=True)
    opened = [_open(other, storage_options) for other in others]
    parts = [part for part, _ in opened]
    samples = join_samples(source.samples, parts, by, missing, kept)
    if len(samples) < len(source.samples) and source.draws:
        raise OptionError(
            f"missing='drop' leaves out {plural(len(source.samples) - len(samples), 'sample')} that weights= counts; leave them out with "
            "subset=, or choose missing='keep'"
        )
    pipeline = replace(first.pipeline, source=replace(source, samples=samples))
    joined = first._with_pipeline(pipeline)
    # Of the dataset whose field ``cls`` is taken; if it has none, of the first.
    numbering = [dataset for part, dataset in opened if dataset is not None and part.has_classes]
    joined._class_names, joined._length = _FirstClassNames([*numbering, first]), None
    joined._versions = first.versions
    for _, dataset in opened:
        joined._versions += () if dataset is None else dataset.versions

    def remake(_: StreamDataset, versions: Versions) -> StreamDataset:
        made = first._of_versions(versions)
        rest = [
            _made_of(other, dataset, versions)
            for other, (_, dataset) in zip(others, opened, strict=True)
        ]
        chosen = made if kept is None else {made: kept}
        return join(chosen, *rest, by=by, missing=missing, storage_options=storage_options)

    joined._remake = remake
    return joined


def _made_of(
    other: OtherDataset, dataset: StreamDataset | None, versions: Versions
) -> OtherDataset:
    """Return another dataset, as `join` takes it, made of other versions; a table has none."""
    if dataset is None:
        return other
    made = dataset._of_versions(versions)
    return dict.fromkeys([made], *other.values()) if isinstance(other, Mapping) else made


class _FirstClassNames(ClassNames):
    """The class names of the first dataset that has any, read at the first access."""

    def __init__(self, datasets: Sequence[StreamDataset]) -> None:
        self._all_names = [one._class_names for one in datasets]

    @property
    def found(self) -> Mapping[str, Classes]:
        return next((one.found for one in self._all_names if one.found), {})


def _source_of(dataset: StreamDataset, *, is_first: bool = False) -> SamplesSource:
    source = dataset.pipeline.source
    refuse_own_iteration(dataset)
    if dataset.pipeline.stages and not dataset.pipeline.num_steps:
        raise OptionError(
            "a dataset with fields= or lazy= cannot be joined; leave them out, and give fields to join: {url: [field, ...]}"
        )
    if dataset.pipeline.stages:
        raise OptionError(
            f"a dataset with steps ({', '.join(dataset.pipeline.steps)}) cannot be joined; join first, then add the steps, and give fields to join: {{url: [field, ...]}}"
        )
    if isinstance(source, SamplesSource) and source.draws and not is_first:
        raise OptionError(
            "weights= of a dataset that is joined to another would have no effect; give them to the first"
        )
    numbered = numbered_source(source)
    if not isinstance(numbered, SamplesSource):
        raise OptionError(
            "a mix or rows cannot be joined, as their samples may have steps; join the datasets before"
        )
    return numbered


def _url_of(value: object) -> str:
    if not isinstance(value, str | os.PathLike):
        raise OptionError(
            f"join takes datasets and URLs, not a {type(value).__name__}; ss.join(a, b, c) joins several at once"
        )
    return os.fspath(value)


def _split(
    other: OtherDataset,
) -> tuple[StreamDataset | str | os.PathLike[str], Sequence[str] | Mapping[str, str] | None]:
    """Return a dataset or its URL, and the fields to take; None for all."""
    if not isinstance(other, Mapping):
        return other, None
    if len(other) != 1 or any(isinstance(one, str) for one in other.values()):
        raise OptionError(
            f"give each dataset with fields as {{url: [field, ...]}}, not {dict(other)!r}"
        )
    [item] = other.items()
    return item


def _open(
    other: OtherDataset, storage_options: Mapping[str, Any] | None
) -> tuple[JoinPart, StreamDataset | None]:
    """Return the samples of another dataset, and the dataset; None for a table."""
    other, fields = _split(other)
    if isinstance(other, StreamDataset):
        return open_part(_source_of(other).samples, fields), other
    url = _url_of(other)
    from shardstream.packing import is_table, open_table_part  # noqa: PLC0415  (0.1 s, for a join only)

    if is_table(url):
        return open_table_part(url, fields, Storage(storage_options)), None
    dataset = ShardDataset(url, storage_options=storage_options)
    return open_part(_source_of(dataset).samples, fields), dataset


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
        refuse_own_iteration(dataset)
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
    changed = (one.counted_in for one in sources if one.counted_in is not None)
    source = MixIndexedSource(
        recipe=recipe,
        sources=sources,
        samples=samples,
        seed=seed,
        options=order,
        reading=replace(read, hedge=hedge),
        balance=None if order.balance is None else balance_of(order.balance, samples, shuffle=True),
        yields_batches=all(source.yields_batches for source in sources),
        is_new_each_epoch=any(source.is_new_each_epoch for source in sources),
        counted_in=next((one for one in changed if one.has_other_numbers), None),
    )
    if isinstance(order.balance, Balance):  # else None
        source.check_numbers(order.balance.costs, "balance=")
    return source


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
