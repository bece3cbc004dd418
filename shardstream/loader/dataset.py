"""ShardDataset: a pipeline as a torch ``IterableDataset``."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from functools import partial
from itertools import islice
from multiprocessing.context import get_spawning_popen
from typing import Any, Self

from torch.utils.data import IterableDataset, get_worker_info

from shardstream.catalog import (
    ClassNames,
    Keys,
    StoredClassNames,
    Where,
    choose_samples,
    lacks_index,
    open_samples,
    warn_of_difference,
)
from shardstream.display import samples_html, stream_html
from shardstream.distributed import (
    Placement,
    WorkerInfo,
    accelerate_loader,
    is_one_of_several,
    warn_without_ranks,
)
from shardstream.errors import NoIndexWarning, OptionError, redact, shown
from shardstream.loader.dataset_versions import (
    Follow,
    FollowSource,
    Versions,
    locate_followed,
    reopen,
)
from shardstream.loader.epochs import Epochs, epoch_of_reloading_lightning, is_overfit_by_lightning
from shardstream.loader.iterator import WorkerIterator
from shardstream.loader.map_dataset import MapDataset
from shardstream.loader.rank_consistency import OpenedVersions
from shardstream.loader.steps import StreamSteps
from shardstream.order import RowPlan
from shardstream.pipeline import (
    IndexedSource,
    OnError,
    OrderOptions,
    Pipeline,
    ReadOptions,
    Records,
    RowMaker,
    SamplesSource,
    SampleWeights,
    Shuffle,
    SkipTracker,
    Source,
    Stage,
    Weights,
    check_at_least,
    check_epoch,
    check_stage,
    default_partition,
    first_stages,
    numbered_source,
    open_sequential_source,
    options_or_default,
    records_of,
    refuse_options,
    row_pipeline,
    rowable_source,
    whole_number,
)
from shardstream.samples import Choice, Samples, has_rows
from shardstream.storage import (
    IN_PLACE_SUFFIXES,
    FieldPlaces,
    Urls,
    dataset_of_change,
    locate_shards,
)
from shardstream.tables import table_source

_SAY_MICROBATCH = (
    "each worker may end with a short batch, so there may be more batches than len(loader), and the Hugging Face Trainer "
    "drops the last ones; pass order=ss.OrderOptions(microbatch=N) to ShardDataset(...), where N is the batch size over all ranks, or use a ShardLoader"
)
_SAY_BALANCE = (
    "balance= makes microbatches equal, but without a ShardLoader the batch size is not known; pass order=ss.OrderOptions(microbatch=N, lanes=L), "
    "where N is the batch size and L a multiple of ranks x workers, or use a ShardLoader"
)
SAY_LEFT_OUT = (
    "samples may be left out (select, on_error=), so ranks may differ in batches and wait for each other without end; use a ShardLoader "
    "with a batch_size and steps that give one item per item, where all ranks have equally many batches, or choose samples with where= or subset="
)
OPTIONS_OF_OPENING = {one.name for one in fields_of(ReadOptions)} - {"prefetch_bytes", "hedge"}
"""Fields of `ReadOptions` that only a dataset of shards uses, where they are opened or made again."""
_WHOLE_SHARD_WINDOW = 1000  # shuffle window of shards without an index, in samples


class SplitDataset(IterableDataset[Any]):
    """A dataset that is split over the workers of its loader; others that are read in these workers are not."""


class StreamDataset(StreamSteps, SplitDataset):
    """Samples in the order of a pipeline, split over ranks and workers.

    Args:
        pipeline: Source and stages.
        placement: Rank and world size; None detects them when the dataset is iterated.
        class_names: Names of the classes.
    """

    def __init__(
        self, pipeline: Pipeline, placement: Placement | None, class_names: ClassNames
    ) -> None:
        self.pipeline = pipeline
        self._given_placement = placement
        self._class_names = class_names
        self._is_placement_of_parent = False
        self._length: int | None = None
        self._versions: tuple[int | None, ...] = ()
        self._remake: Callable[[StreamDataset, Versions], StreamDataset] | None = None
        """Makes this dataset of other versions; not sent to other processes. No partial, which would show secrets of ``storage_options`` in ``repr``."""
        self._epochs = Epochs()
        # Whether the process that spawned this worker knew it.
        self._is_of_several_ranks = self._is_overfit = False

    @property
    def placement(self) -> Placement:
        """Rank and world size, as given or as detected now.

        Raises:
            OptionError: If one of several ranks was given, but an Accelerate loader reads, which splits over the ranks itself.
        """
        given = self._given_placement if self._has_given_placement else None
        if given is not None and given.world_size > 1 and accelerate_loader() is not None:
            raise OptionError(
                f"the dataset has placement=Placement({given.rank}, {given.world_size}), but an Accelerate loader reads it "
                "and would split that part again; remove placement=, or pass a ShardLoader to accelerator.prepare()"
            )
        return given or Placement.detect()

    @property
    def samples(self) -> Samples:
        """The samples by number, without the steps, for views over them and `CatalogDataset`.

        Raises:
            OptionError: If the shards are read without an index, or the items are rows, which are nothing without their steps.
        """
        source = numbered_source(self.pipeline.source)
        if has_rows(source.samples):
            raise OptionError(
                "rows are made of parts of samples when they are read, so they are no samples of other datasets; join, choose and weight the samples before"
            )
        return source.samples

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, in the order of the numbers in ``cls``, from the ``classes.json`` that `pack` writes.

        None if there is no such file, or if folders or datasets that are read together number their classes differently.

        Raises:
            StorageError: If the folder cannot be read.
        """
        return self._class_names.names

    @property
    def versions(self) -> tuple[int | None, ...]:
        """The version of each `ShardDataset` that this one is made of, in order; None for one that is not a folder with an ``index.json``."""
        return self._versions

    @property
    def _opened(self) -> OpenedVersions:
        """The versions, under the name of the folder of the first one."""
        folder = self.pipeline.source.place()[1].rpartition("/")[0]
        name = (dataset_of_change(folder) or folder).rpartition("/")[2]
        return OpenedVersions(name, self.versions)

    def _of_versions(self, versions: Versions) -> StreamDataset:
        """Return this dataset made of other versions, without the samples that were deleted since; this one where it cannot be made."""
        if self._remake is not None:
            return self._remake(self, versions)
        for _ in islice(versions, len(self._versions)):
            pass
        return self

    def by_number(self) -> MapDataset:
        """Return the samples by number, with the steps so far, for samplers, ``Subset`` and ``random_split`` of torch.

        Number i is sample i of the order without ``shuffle``, so `samples` has it, too. Steps may follow. All ranks see all samples, and a bad
        sample is an error, whatever ``on_error`` is. They begin at the epoch of `set_epoch`, and have a ``set_epoch`` of their own.

        Raises:
            OptionError: If the samples have no numbers: of shards without an index, drawn by weights, or after a step that changes counts; or
                the dataset has ``placement=``.
        """
        refuse_own_iteration(self)
        refuse_placement(
            self,
            "placement= chooses the samples of one rank, but all samples have a number; leave it out, and use torch's DistributedSampler",
        )
        return MapDataset(self.pipeline, self._class_names, epoch=self._epochs.chosen[0])

    @property
    def _has_given_placement(self) -> bool:
        """Whether the placement was given, or detected by the process that spawned this worker."""
        is_spawned_rank = self._is_placement_of_parent and is_one_of_several()
        return self._given_placement is not None and not is_spawned_rank

    @property
    def epoch(self) -> int:
        """The current epoch: that of the latest iteration, or of `set_epoch` if it was called since; from 0."""
        return self._epochs.current

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also in persistent workers, in a `ShardLoader`, and in datasets chained from this one.

        Later iterations count on from it, unless several ranks read with a plain loader.

        Raises:
            OptionError: If it is not an integer from 0 to 2**31 - 1.
        """
        self._epochs.set_epoch(check_epoch(epoch))

    def __iter__(self) -> WorkerIterator:
        worker_info, source = (
            current_worker_info(self, self.placement),
            self.pipeline.indexed_source,
        )
        is_default_microbatch = source is not None and source.options.microbatch is None
        if (
            is_default_microbatch
            and worker_info.num_workers > 1
            and worker_info.worker == 0
            and accelerate_loader()
        ):
            warnings.warn(_SAY_MICROBATCH, stacklevel=2)
        if worker_info.worker == 0 and not self._has_given_placement:
            warn_without_ranks(stacklevel=2)
        if source is not None and worker_info.worker == 0:
            is_part = worker_info.placement.world_size > 1
            if source.balance and is_default_microbatch and (is_part or self._has_several_ranks()):
                warnings.warn(_SAY_BALANCE, stacklevel=2)
            if self.pipeline.may_leave_out and is_part:
                warnings.warn(SAY_LEFT_OUT, stacklevel=2)
        epoch = begin_epoch(self, worker_info.placement)
        return WorkerIterator(
            self.pipeline, worker_info, epoch, self._epochs.resume, self._versions
        )

    def _has_several_ranks(self) -> bool:
        """Return whether other ranks run, whatever part of the samples this one reads; a spawned worker knows it by its parent."""
        return self._is_of_several_ranks or is_one_of_several()

    def _has_to_overfit(self) -> bool:
        return self._is_overfit or is_overfit_by_lightning()

    def __len__(self) -> int:
        if self._length is not None:
            return self._length
        source = self.pipeline.indexed_source
        if source is None:
            raise TypeError("the length is not known in advance; set it with .with_length(n)")
        return default_partition(source, WorkerInfo(self.placement), self.epoch).num_samples

    def __getitem__(self, number: object) -> Any:
        """Refuse indexing."""
        raise OptionError(
            f"a {type(self).__name__} is read in the order of its epoch; for number {number!r} use dataset.by_number()[{number!r}]"
        )

    def __repr__(self) -> str:
        steps = "".join(f" > {step.partition('(')[0]}" for step in self.pipeline.steps)
        versions = ", ".join(map(str, self._versions)) if {*self._versions} - {1, None} else ""
        version = versions and f", version{'s' * (len(self._versions) > 1)} {versions}"
        return f"{type(self).__name__}({self.pipeline.source.summary}{version}){steps}"

    def _repr_html_(self) -> str:
        source = self.pipeline.indexed_source
        if source is None:
            return stream_html(type(self).__name__, self.pipeline)
        numbers = range(len(source.samples))
        return samples_html(type(self).__name__, source.samples, numbers, self.pipeline)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_remake": None}
        if get_spawning_popen() is not None:
            # pickled for a spawned worker, which has no process group to detect its rank; a spawned rank has one
            is_of_parent = self._given_placement is None or self._is_placement_of_parent
            state |= {
                "_given_placement": self.placement,
                "_is_placement_of_parent": is_of_parent,
                "_is_of_several_ranks": self._has_several_ranks(),
                "_is_overfit": self._has_to_overfit(),
            }
        else:
            state["_epochs"] = copy.copy(self._epochs)
        return state

    def records(self) -> Records:
        """Return all samples in the order without shuffle, with the steps, as `ss.reshard` writes them.

        Raises:
            OptionError: If there is no such order, or a step needs more than one sample.
        """
        refuse_own_iteration(self)
        refuse_placement(
            self,
            "the samples of all ranks are written, but the dataset has placement=; leave it out, and pass executor=ss.tasks.Parts(part, of)",
        )
        return records_of(self.pipeline, self._class_names.checked_names, self._epochs.chosen[0])

    def with_length(self, length: int) -> Self:
        """Set the ``len`` of a dataset of unknown length, in items, also for a `ShardLoader`.

        Only ``len`` changes, not the number of items that are read.

        Raises:
            OptionError: If it is not an integer of at least 0.
        """
        check_at_least(0, length=length)
        changed = self._with_pipeline(self.pipeline, lambda made: made)
        changed._length = length
        return changed

    @property
    def _num_stages(self) -> int:
        return self.pipeline.num_steps

    def then(self, stage: Stage) -> Self:
        """Append a custom stage, see `ItemSteps.then`."""
        check_stage(stage)
        changed = self._with_pipeline(self.pipeline.then(stage), lambda made: made.then(stage))
        changed._length = None
        return changed

    def _with_rows(
        self, make_plan: Callable[[IndexedSource], RowPlan], maker: RowMaker, step: str
    ) -> Self:
        plan = make_plan(rowable_source(self.pipeline, step))
        changed = self._with_pipeline(
            row_pipeline(self.pipeline, plan, maker, step),
            lambda made: made._with_rows(make_plan, maker, step),
        )
        changed._length = None
        return changed

    def _with_pipeline(
        self, pipeline: Pipeline, step: Callable[[StreamDataset], StreamDataset] | None = None
    ) -> Self:
        """Return a copy with other samples or steps, which follows `set_epoch` of this dataset.

        Args:
            pipeline: Source and stages.
            step: Returns the same copy of another dataset, for other versions; None if there is no such function.
        """
        changed = copy.copy(self)
        changed.pipeline, changed._epochs = pipeline, self._epochs.chained()
        if step is not None:
            changed._remake = lambda _, versions: step(self._of_versions(versions))
        return changed


class ShardDataset(StreamDataset):
    """Samples of tar shards, split exactly over ranks and workers.

    A sample is a plain dict: ``__key__``, ``__url__`` and its fields. Each method returns a new dataset with one more step,
    under WebDataset's name. Iterate it with a `ShardLoader`, with a plain ``torch.utils.data.DataLoader`` or directly: each iteration
    reads the next epoch. On several ranks only a `ShardLoader` counts; else call `set_epoch` before each epoch.

    Args:
        urls: A folder or prefix (``s3://bucket/train/``), a pattern (``…/{000000..000099}.tar``), a glob, ``a.tar::b.tar``,
            an ``index.json``, or a list of these that names each shard once. Or files that end in ``.parquet`` or ``.mds``, whose rows are read in place (docs/in-place.md). A folder or glob with an unfinished pack or `ShardWriter`, running or
            stopped, is refused; tars that are named one by one are read as they are.
        shuffle: A new order each epoch, the same for the same seed. False reads in the order of the shards.
        seed: Any integer.
        order: How the epoch is cut and shuffled, for other batches on other topologies or larger windows.
        subset: Read some samples only: their numbers, a mask of bools, a slice, or their keys; or the path or URL of a file: ``.npy`` of numbers or
            bools, ``.txt`` with a key on each line. Length, order, state and splits are those of the subset; without ``shuffle`` the order is that
            of the numbers or keys. Keys need the columns that ``index`` and ``pack`` write with ``columns=``, as does ``where``. From a remote
            store at most three bytes are read for each byte used, so samples far apart cost a request each.
        where: Read the samples whose columns fulfil a condition in SQL only, such as ``"cls in (3, 9) and width >= 512"`` (evaluated by DuckDB,
            which the extra ``columns`` installs), or a `pyarrow.compute.Expression`. It may be combined with ``subset``.
        weights: Draw the samples of each epoch by weight: one number of at least 0 for each sample (or for each of ``subset``), a
            ``.npy`` file (path or URL) of them, or the name of a column; only their ratios count. Or by class, with the column ``cls`` (``shardstream index
            URL --columns cls``): ``{0: 1.0, 1: 5.0}``, or "balanced" for equal shares of all classes. A sample is expected ``num_samples * weight / sum(weights)``
            times and comes as often, rounded down or up, its exact share in the mean over epochs. The draw is a function of weights,
            seed and epoch, so length, splits and states are as exact as without; copies get their own ``map(rng=True)``. With
            ``shuffle`` copies are spread over the epoch; without, the samples come in the order of their numbers. `Weights` adds
            the number of samples of an epoch, and draws each sample at most once.
        fields: Fields of the samples, e.g. ``("jpg", "cls")`` or ``("jpg;png", "cls")``, besides key and URL; others are neither decoded
            nor, from local shards of large samples, read. A field that the manifest does not list is refused; a sample without one
            of them is a bad sample (see ``on_error``). Order and ``map(rng=True)`` stay the same. None means all. Of tables: columns, or ``{field: column}``;
            others are not read.
        storage_options: For fsspec, e.g. ``{"endpoint_url": "http://127.0.0.1:9000"}``.
        read: Index, cache, prefetching, lazy fields, checksums, states of earlier versions and a file system of your own.
        on_error: "raise" at the first bad sample; "warn" or "skip" up to 100 per worker; or a `SkipBudget`.
        placement: Rank and world size; by default those of torch.distributed, Ray Train or RANK/WORLD_SIZE.
        version: Number or tag of an earlier version (``urls`` is then the folder of the dataset); None for the current one. Or `Follow()`: read the dataset while writers append to it
            (`ShardWriter` with ``publish_s=``), each sample once, in the order of publication, until no writer is open; only a `ShardLoader` reads it. See docs/versions.md.

    Raises:
        OptionError: If an argument is invalid.
        UnfinishedError: If the dataset is being written, or its writer was stopped.
        StorageError: If the dataset is not found or cannot be read.
        ManifestError: If the manifest is invalid.
    """

    def __init__(  # noqa: PLR0913, PLR0915  (the public door: its options are its documentation)
        self,
        urls: Urls,
        *,
        shuffle: bool = False,
        seed: int = 0,
        order: OrderOptions | None = None,
        subset: Choice | Keys | None = None,
        where: Where | None = None,
        weights: SampleWeights | Weights | None = None,
        fields: Sequence[str] | Mapping[str, str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        read: ReadOptions | None = None,
        on_error: OnError = "raise",
        placement: Placement | None = None,
        version: int | str | Follow | None = None,
    ) -> None:
        order, read = options_or_default(order, OrderOptions), options_or_default(read, ReadOptions)
        SkipTracker(on_error)  # validates, before any I/O
        seed, storage = whole_number("seed", seed), read.open_storage(storage_options)
        choice: Any = {"subset": subset, "where": where, "weights": weights}
        ordered = partial(SamplesSource, shuffle=shuffle, seed=seed, options=order, reading=read)
        first = urls if isinstance(urls, str | os.PathLike) else next(iter(urls := [*urls]), "")
        if os.fspath(first).lower().endswith(IN_PLACE_SUFFIXES):
            source: Source = table_source(urls, storage, fields, version, choice, ordered)
            super().__init__(Pipeline(source=source, on_error=on_error), placement, ClassNames({}))
            return
        if isinstance(version, Follow):
            located = locate_followed(version, urls, storage, choice, ordered)
        else:
            located = locate_shards(urls, storage, version)
        lacking = located.shards[0].url if read.index == "ignore" else lacks_index(located, storage)
        stages, kept, places = first_stages(fields, read.lazy, located.fields, storage)
        opens = partial(open_samples, storage=storage, verify=read.verify)
        opens = partial(opens, fields=kept, places=places)
        if isinstance(version, Follow):
            source = FollowSource(located, version, opens, ordered, seed)
        elif lacking is None:
            whole, takes_all = opens(located), subset is None and where is None
            counted_in = None if version else located.version
            samples = whole if takes_all else choose_samples(whole, subset, where, counted_in)
            source = ordered(samples=samples, counted_in=counted_in).drawn(weights)
        else:
            _check_whole_shards(lacking, order, read, choice, places)
            source = open_sequential_source(located, storage, shuffle=shuffle, seed=seed)
            stages += [Shuffle(window=order.window or _WHOLE_SHARD_WINDOW)] if shuffle else []
        pipeline = Pipeline(source=source, stages=tuple(stages), on_error=on_error)
        class_names = StoredClassNames(located, storage)
        if len(class_names.folders) > 1:  # a single folder is read lazily
            warn_of_difference(class_names.found)
        super().__init__(pipeline, placement, class_names)
        self._versions = (None if located.version is None else located.version.number,)
        made = partial(ShardDataset, urls, shuffle=shuffle, seed=seed, order=order, read=read)
        made = partial(made, fields=fields, on_error=on_error, placement=placement, **choice)
        made = partial(made, storage_options=storage_options)
        self._remake = lambda *present: reopen(made, read.on_new_version, *present)


def refuse_own_iteration(dataset: StreamDataset) -> None:
    """Refuse a dataset whose class has an ``__iter__`` of its own, where only the steps are applied.

    Raises:
        OptionError: If it has.
    """
    if type(dataset).__iter__ is not StreamDataset.__iter__:
        raise OptionError(
            f"{type(dataset).__name__}.__iter__ would not be called here, so its changes would be lost; make them a step (map, select, compose), or read the "
            "dataset with torch's DataLoader"
        )


def refuse_placement(dataset: StreamDataset, reason: str) -> None:
    """Refuse a dataset that has ``placement=`` of one of several ranks.

    Raises:
        OptionError: With the reason, if it has.
    """
    given = dataset._given_placement
    if given is not None and given.world_size > 1:
        raise OptionError(reason)


def begin_epoch(dataset: StreamDataset, placement: Placement) -> int:
    """Return the epoch of an iteration that begins: the next one, or after `set_epoch` the one that was set.

    If several ranks read, it stays the same until `set_epoch`, as with torch's ``DistributedSampler``: else a rank that looked at a
    batch alone would be an epoch ahead, and samples would be repeated and missed. In a worker of another dataset it is that of
    `set_epoch`, so that what a step returns does not depend on the worker. It stays the same where Lightning overfits some batches.
    """
    worker = get_worker_info()
    if worker is not None and not _is_served(dataset, worker.dataset):
        return dataset._epochs.chosen[0]
    if dataset._epochs.chosen == (0, 0) and (made_in := epoch_of_reloading_lightning()):
        dataset.set_epoch(made_in)
    has_several_ranks = placement.world_size > 1 or dataset._has_several_ranks()
    repeats = has_several_ranks or dataset._has_to_overfit()
    epoch, is_repeated = dataset._epochs.begin(counts=not repeats)
    if is_repeated and has_several_ranks and dataset.pipeline.differs_by_epoch:
        warnings.warn(_describe_repeat(dataset, epoch), stacklevel=3)
    return epoch


def current_worker_info(dataset: IterableDataset[Any], placement: Placement) -> WorkerInfo:
    """Return the worker that reads this dataset; the only place that reads torch's worker number.

    It is the whole rank in a worker that serves another dataset, such as a map-style one: each item of that may read all samples.
    An `IterableDataset` of the user may wrap the dataset, so it is split there.
    """
    worker = get_worker_info()
    if worker is None or not _is_served(dataset, worker.dataset):
        return WorkerInfo(placement)
    return WorkerInfo(placement, worker.id, worker.num_workers)


def _is_served(dataset: IterableDataset[Any], by_worker: object) -> bool:
    """Return whether a worker that serves one dataset serves another by reading it."""
    if isinstance(by_worker, SplitDataset):
        return by_worker is dataset
    return isinstance(by_worker, IterableDataset)


def _describe_repeat(dataset: StreamDataset, epoch: int) -> str:
    return (
        f"{dataset!r} is read again without set_epoch, so epoch {epoch} repeats, in the same order: with several ranks epochs are not "
        "counted, because a rank that looks at a batch alone would be an epoch ahead; call dataset.set_epoch(epoch) before each epoch "
        "on all ranks, or use a ShardLoader, which counts and compares the ranks"
    )


def _check_whole_shards(
    url: str,
    order: OrderOptions,
    read: ReadOptions,
    choice: Mapping[str, object],
    places: FieldPlaces | None,
) -> None:
    """Check that shards may be read from start to end; warn if the user did not ask for it.

    Args:
        url: A shard that has no index, or whose index is ignored.
        order: The user's options.
        read: The user's options.
        choice: Options that need an index, by name; None where the user did not give them.
        places: Places of lazy fields, which need one, too.

    Raises:
        OptionError: If one is given, or another that has no effect, or an index is required.
    """
    index, needs = read.index, {**choice, "verify": read.verify, "lazy": places}
    given = [f"{name}=" for name, value in needs.items() if value is not None]
    names = " and ".join(given)
    if given and index == "ignore":
        raise OptionError(
            f"{names} need shards that are read by number; remove index='ignore' from read=",
            shard=url,
        )
    if given or index == "require":
        reason = f", which {names} need" if given else ""
        raise OptionError(
            f"this shard has no index{reason}; run 'shardstream index' on its folder", shard=url
        )
    if index == "auto":
        _warn_no_index(url)
    reason = "on shards that are read whole"
    of_order = ["lanes", "microbatch", "block", "remainder", "nodes", "exchange", "balance"]
    refuse_options(order, of_order, reason)
    refuse_options(read, ["prefetch_bytes", "hedge"], reason)


def _warn_no_index(url: str) -> None:
    url = shown(redact(url))
    folder = url.rpartition("/")[0]
    warnings.warn(
        f"{url} has no index: it is read from start to end, split by whole shards, and steps may differ among ranks. "
        f"Run once: shardstream index {folder or url}  (compressed shards cannot be indexed: pack them again without). "
        "read=ss.ReadOptions(index='ignore') silences this.",
        NoIndexWarning,
        stacklevel=4,
    )
