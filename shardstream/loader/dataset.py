"""ShardDataset: a pipeline as a torch ``IterableDataset``."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal, Self

from torch.utils.data import IterableDataset, get_worker_info

from shardstream.catalog import (
    ClassNames,
    Keys,
    ShardCatalog,
    Verify,
    Where,
    choose_samples,
    lacks_index,
    warn_of_difference,
)
from shardstream.distributed import (
    Placement,
    WorkerInfo,
    accelerate_loader,
    is_one_of_several,
)
from shardstream.errors import NoIndexWarning, NotFoundError, OptionError, redact, shown
from shardstream.loader.epoch_chain import EpochChain
from shardstream.loader.epoch_counter import EpochCounter, Worker
from shardstream.loader.iterator import WorkerIterator
from shardstream.loader.lightning import is_overfit_by_lightning
from shardstream.loader.notebook_view import samples_html, stream_html
from shardstream.loader.steps import StreamSteps
from shardstream.order import Remainder
from shardstream.pipeline import (
    DEFAULT_PREFETCH_BYTES,
    OnError,
    Pipeline,
    ReadOptions,
    Records,
    SampleWeights,
    Shuffle,
    SkipTracker,
    Source,
    Stage,
    check_at_least,
    check_epoch,
    check_stage,
    default_partition,
    field_names,
    first_stages,
    keep_fields,
    open_sequential_source,
    open_source,
    records_of,
)
from shardstream.samples import Choice, Samples
from shardstream.storage import LocatedShards, Storage, Urls, locate_shards, open_cache

_SAY_MICROBATCH = (
    "each worker may end with a short batch, so there may be more batches than len(loader), and the Hugging Face Trainer "
    "drops the last ones; pass microbatch=N to ShardDataset(...), where N is the batch size over all ranks, or use a ShardLoader"
)
_WHOLE_SHARD_WINDOW = 1000  # shuffle window of shards without an index, in samples


class SplitDataset(IterableDataset[Any]):
    """A dataset that is split over the workers of its loader; others that are read in these workers are not."""


class StreamDataset(EpochChain, StreamSteps, SplitDataset):
    """Samples in the order of a pipeline, split over ranks and workers.

    Args:
        pipeline: Source and stages.
        placement: Rank and world size; None detects them when the dataset is iterated.
    """

    def __init__(self, pipeline: Pipeline, placement: Placement | None) -> None:
        self.pipeline = pipeline
        self.given_placement = placement
        self._is_placement_of_parent = False
        self._length: int | None = None
        self._epochs = EpochCounter()
        # Whether the process that spawned this worker knew it.
        self._is_of_several_ranks = self._is_overfit = False

    @property
    def placement(self) -> Placement:
        """Rank and world size, as given or as detected now.

        Raises:
            OptionError: If one of several ranks was given, but an Accelerate loader reads, which splits over the ranks itself.
        """
        given = self.given_placement if self.has_given_placement else None
        if given is not None and given.world_size > 1 and accelerate_loader() is not None:
            raise OptionError(
                f"the dataset has placement=Placement({given.rank}, {given.world_size}), but an Accelerate loader reads it "
                "and would split that part again; remove placement=, or pass a ShardLoader to accelerator.prepare()"
            )
        return given or Placement.detect()

    @property
    def has_given_placement(self) -> bool:
        """Whether the placement was given, or detected by the process that spawned this worker."""
        is_spawned_rank = self._is_placement_of_parent and is_one_of_several()
        return self.given_placement is not None and not is_spawned_rank

    @property
    def has_given_length(self) -> bool:
        """Whether ``len`` was set with `with_length`."""
        return self._length is not None

    @property
    def epoch(self) -> int:
        """The current epoch: that of the latest iteration, or of `set_epoch` if it was called since; from 0."""
        return self._epochs.current(_torch_worker())

    @property
    def chosen_epoch(self) -> int:
        """The epoch of the last `set_epoch`, at which a `ShardLoader` begins to count."""
        return self._epochs.chosen[0]

    @property
    def epoch_calls(self) -> int:
        """Number of calls of `set_epoch`."""
        return self._epochs.chosen[1]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also in persistent workers, in a `ShardLoader`, and in datasets chained from this one.

        Later iterations count on from it, unless several ranks read with a plain loader.

        Raises:
            OptionError: If it is not an integer from 0 to 2**31 - 1.
        """
        self._epochs.set_epoch(check_epoch(epoch))
        super().set_epoch(epoch)

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
        epoch = self.begin_epoch(worker_info.placement)
        return WorkerIterator(self.pipeline, worker_info, epoch, self._resume_epoch)

    def begin_epoch(self, placement: Placement) -> int:
        """Return the epoch of an iteration that begins: the next one, or after `set_epoch` the one that was set.

        If several ranks read, it stays the same until `set_epoch`, as with torch's ``DistributedSampler``: else a rank that looked at a
        batch alone would be an epoch ahead, and samples would be repeated and missed. In a worker of another dataset it is that of
        `set_epoch`, so that what a step returns does not depend on the worker. It stays the same where Lightning overfits some batches.
        """
        worker = get_worker_info()
        if worker is not None and not _is_served(self, worker.dataset):
            return self.chosen_epoch
        has_several_ranks = placement.world_size > 1 or self._has_several_ranks()
        repeats = has_several_ranks or self._has_to_overfit()
        epoch, is_repeated = self._epochs.begin(_torch_worker(), counts=not repeats)
        if is_repeated and has_several_ranks and self.pipeline.differs_by_epoch:
            warnings.warn(_describe_repeat(self, epoch), stacklevel=3)
        return epoch

    def _resume_epoch(self, epoch: int) -> None:
        """Count on from the epoch of a state that an iterator of this dataset has loaded."""
        self._epochs.resume(_torch_worker(), epoch)

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
            f"a {type(self).__name__} is read in the order of its epoch, not by number {number!r}; "
            "use ShardMapDataset (or ObjectMapDataset) for that"
        )

    def __repr__(self) -> str:
        steps = "".join(f" > {step.partition('(')[0]}" for step in self.pipeline.steps)
        return f"{type(self).__name__}({self.pipeline.source.summary}){steps}"

    def _repr_html_(self) -> str:
        source = self.pipeline.indexed_source
        if source is None:
            return stream_html(type(self).__name__, self.pipeline)
        numbers = range(len(source.samples))
        return samples_html(type(self).__name__, source.samples, numbers, self.pipeline)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if get_spawning_popen() is not None:
            # pickled for a spawned worker, which has no process group to detect its rank; a spawned rank has one
            is_of_parent = self.given_placement is None or self._is_placement_of_parent
            state |= {
                "given_placement": self.placement,
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
        given = self.given_placement
        if given is not None and given.world_size > 1:
            raise OptionError(
                "the samples of all ranks are written, but the dataset has placement=; leave it out, and pass executor=ss.tasks.Parts(part, of)"
            )
        return records_of(self.pipeline, self._checked_classes(), self.chosen_epoch)

    def _checked_classes(self) -> tuple[str, ...] | None:
        """Return the names of the classes; refuse samples that number them differently."""
        return None

    def with_length(self, length: int) -> Self:
        """Set the ``len`` of a dataset of unknown length, in items, also for a `ShardLoader`.

        Only ``len`` changes, not the number of items that are read.

        Raises:
            OptionError: If it is not an integer of at least 0.
        """
        check_at_least(0, length=length)
        changed = self._copy()
        changed._length = length
        return changed

    @property
    def _num_stages(self) -> int:
        return self.pipeline.num_steps

    def then(self, stage: Stage) -> Self:
        """Append a custom stage, see `ItemSteps.then`."""
        check_stage(stage)
        changed = self._copy()
        changed.pipeline = self.pipeline.then(stage)
        changed._length = None
        return changed

    def _copy(self) -> Self:
        changed = copy.copy(self)
        changed.follow_epoch(self)
        return changed


class CatalogDataset(StreamDataset):
    """Any samples by number: of a `Catalog` over data of another kind, or a view over others, such as a subset of a join.

    Splits, orders, lengths, states and steps are those of `ShardDataset`.

    Args:
        samples: The samples by number.
        options: Order of the samples and prefetching; by default in the order of their numbers.
        subset: As in `ShardDataset`, like all below; columns of a join are those of its first dataset.
        keys: As in `ShardDataset`.
        where: As in `ShardDataset`.
        weights: As in `ShardDataset`.
        replacement: As in `ShardDataset`.
        num_samples: As in `ShardDataset`.
        fields: As in `ShardDataset`.
        on_error: As in `ShardDataset`.
        placement: As in `ShardDataset`.

    Raises:
        OptionError: If an argument is invalid.
    """

    def __init__(  # noqa: PLR0913  (the public door)
        self,
        samples: Samples,
        options: ReadOptions | None = None,
        *,
        subset: Choice | None = None,
        keys: Keys | None = None,
        where: Where | None = None,
        weights: SampleWeights | None = None,
        replacement: bool = True,
        num_samples: int | None = None,
        fields: Sequence[str] | None = None,
        on_error: OnError = "raise",
        placement: Placement | None = None,
    ) -> None:
        SkipTracker(on_error)  # validates
        chosen = choose_samples(samples, subset, keys, where)
        stages = () if fields is None else (keep_fields(fields, chosen.fields),)
        source = open_source(chosen, options or ReadOptions(), weights, replacement, num_samples)
        super().__init__(Pipeline(source=source, stages=stages, on_error=on_error), placement)


class ShardDataset(StreamDataset):
    """Samples of tar shards, split exactly over ranks and workers.

    A sample is a plain dict: ``__key__``, ``__url__`` and its fields. Each method returns a new dataset with one more step,
    under WebDataset's name. Iterate it with a `ShardLoader`, with a plain ``torch.utils.data.DataLoader`` or directly: each iteration
    reads the next epoch. On several ranks only a `ShardLoader` counts; else call `set_epoch` before each epoch.

    Args:
        urls: A folder or prefix (``s3://bucket/train/``), a pattern (``…/{000000..000099}.tar``), a glob, ``a.tar::b.tar``,
            an ``index.json``, or a list of these that names each shard once. A folder or glob with an unfinished pack or `ShardWriter`, running or
            stopped, is refused; tars that are named one by one are read as they are.
        shuffle: A new order each epoch, the same for the same seed. False reads in the order of the shards.
        seed: Any integer.
        lanes: Canonical streams that an epoch is cut into; the same number gives the same global batches on every topology.
            By default the number of readers (ranks x workers x microbatches per step), so every rank needs the same
            ``num_workers`` and ``batch_size``.
        microbatch: Samples that always stay together; by default the loader's batch size.
        window: Samples shuffled together, a multiple of the microbatch; by default 64 MiB of them.
        block: Consecutive samples that are fetched together; by default 2 MiB of them.
        remainder: "pad", "drop" or "keep" the samples that do not fill a last step of all ranks (see `PartitionConfig`).
        index: "auto" reads by number where there is an index, else by whole shards; "require" refuses shards without an
            index; "ignore" always reads whole shards.
        subset: Read some samples only: their numbers, a mask of bools, a slice, or a file (path or URL): ``.npy`` of numbers or bools, ``.txt`` of keys. Length,
            order, state and splits are those of the subset; without ``shuffle`` the order is that of the numbers. From a remote store
            at most three bytes are read for each byte used, so samples far apart cost a request each.
        keys: Read the samples with these keys only, in this order: a list, or the path or URL of a text file with a key on each line. Needs the
            columns that ``index`` and ``pack`` write with ``columns=``, as does ``where``.
        where: Read the samples whose columns fulfil a condition in SQL only, such as ``"cls in (3, 9) and width >= 512"`` (evaluated by DuckDB,
            which the extra ``columns`` installs), or a `pyarrow.compute.Expression`. It may be combined with ``subset`` or ``keys``.
        weights: Draw the samples of each epoch by weight: one number of at least 0 for each sample (or for each of ``subset``), or a
            ``.npy`` file (path or URL) of them; only their ratios count. Or by class, with the column ``cls`` (``shardstream index
            URL --columns cls``): ``{0: 1.0, 1: 5.0}``, or "balanced" for equal shares of all classes. A sample is expected ``num_samples * weight / sum(weights)``
            times and comes as often, rounded down or up, its exact share in the mean over epochs. The draw is a function of weights,
            seed and epoch, so length, splits and states are as exact as without; copies get their own ``map(rng=True)``. With
            ``shuffle`` copies are spread over the epoch; without, the samples come in the order of their numbers.
        replacement: With weights: False draws each sample at most once an epoch, with a probability in proportion to its weight (up to 1).
        num_samples: With weights: samples of an epoch, over all ranks; by default as many as there are. Needed for ``replacement=False``.
        fields: Fields of the samples, e.g. ``("jpg", "cls")`` or ``("jpg;png", "cls")``, besides key and URL; others are neither decoded
            nor, from local shards of large samples, read. A field that the manifest does not list is refused; a sample without one
            of them is a bad sample (see ``on_error``). Order and ``map(rng=True)`` stay the same. None means all.
        lazy: Fields whose bytes are not read, e.g. ``("mp4",)``: their value is a `FieldFile`, which reads parts of them where they are
            used. ``decode("video")`` makes a `Video` of it that fetches only what its frames need (of MP4 and QuickTime files);
            other decoders read it whole. Needs ``shardstream index URL --members``, and not ``verify``. Fields of under 256 KiB are read at once.
        storage_options: For fsspec, e.g. ``{"endpoint_url": "http://127.0.0.1:9000"}``.
        filesystem: An fsspec file system to use instead.
        cache_dir: A local folder that caches remote bytes, for later epochs and other processes.
        cache_bytes: Limit of the cache, e.g. "200GB"; by default a tenth of the disk stays free.
        on_error: "raise" at the first bad sample; "warn" or "skip" up to 100 per worker; or a `SkipBudget`.
        prefetch_bytes: Prefetch buffer of each worker for remote shards, in bytes; raise it for stores with a long latency. The
            rest of the open windows (one per lane) plus a fifth of a window may be held even above this limit: with many
            lanes per worker, choose a smaller window.
        hedge: Send a second request when the first takes three times as long as usual (0.2 s or more), and use the first
            response: for stores that stall at times. Both are read and billed. A mix hedges if one of its parts does.
        verify: "sha256" compares all bytes with the manifest's checksums, which `pack` and `index` write, to detect bits flipped
            in the store or in transit. A wrong response is retried; if it stays wrong, the epoch ends with an
            `IndexMismatchError` whatever ``on_error`` is, because it is unknown which samples are sound.
            At its first use a shard is read whole, so the first epoch reads everything once more, in windows of whole MiB. Forked
            workers share the results, and later epochs reuse them; spawned workers verify again each time. ``cache_dir``
            keeps those bytes on local disk. Local shards are read once when they are opened.
        placement: Rank and world size; by default those of torch.distributed, Ray Train or RANK/WORLD_SIZE.

    Raises:
        OptionError: If an argument is invalid.
        UnfinishedError: If the dataset is being written, or its writer was stopped.
        StorageError: If the dataset is not found or cannot be read.
        ManifestError: If the manifest is invalid.
    """

    def __init__(  # noqa: PLR0913  (the public door: its options are its documentation)
        self,
        urls: Urls,
        *,
        shuffle: bool = False,
        seed: int = 0,
        lanes: int | None = None,
        microbatch: int | None = None,
        window: int | None = None,
        block: int | None = None,
        remainder: Remainder = "pad",
        index: Literal["auto", "require", "ignore"] = "auto",
        subset: Choice | None = None,
        keys: Keys | None = None,
        where: Where | None = None,
        weights: SampleWeights | None = None,
        replacement: bool = True,
        num_samples: int | None = None,
        fields: Sequence[str] | None = None,
        lazy: Sequence[str] = (),
        storage_options: dict[str, Any] | None = None,
        filesystem: Any = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        on_error: OnError = "raise",
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
        hedge: bool = False,
        verify: Verify | None = None,
        placement: Placement | None = None,
    ) -> None:
        _check_options(index, on_error)
        storage = Storage(storage_options, filesystem, open_cache(cache_dir, cache_bytes))
        located = locate_shards(urls, storage)
        unindexed = located.shards[0].url if index == "ignore" else lacks_index(located, storage)
        stages, places = first_stages(fields, lazy, located.fields, storage, verify)
        if unindexed is None:
            options = ReadOptions(
                shuffle=shuffle,
                seed=seed,
                lanes=lanes,
                microbatch=microbatch,
                window=window,
                block=block,
                remainder=remainder,
                prefetch_bytes=prefetch_bytes,
                hedge=hedge,
            )
            whole = ShardCatalog(located, storage, verify, field_names(fields), places)
            chosen = choose_samples(whole, subset, keys, where)
            source: Source = open_source(chosen, options, weights, replacement, num_samples)
        else:
            draws = weights is not None or num_samples is not None or not replacement
            needs = {"verify=": verify, "subset=": subset, "keys=": keys, "where=": where}
            needs |= {"weights=": draws or None, "lazy=": places}
            _check_whole_shards(unindexed, index, needs)
            source = open_sequential_source(located, storage, shuffle=shuffle, seed=seed)
            stages += [Shuffle(window=window or _WHOLE_SHARD_WINDOW)] if shuffle else []
        pipeline = Pipeline(source=source, stages=tuple(stages), on_error=on_error)
        super().__init__(pipeline, placement)
        self._class_names = open_class_names(located, storage)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, in the order of the numbers in ``cls``, from the ``classes.json`` that `pack` writes.

        None if there is no such file, or if folders that are read together number their classes differently.

        Raises:
            StorageError: If the folder cannot be read.
        """
        return self._class_names.names

    def _checked_classes(self) -> tuple[str, ...] | None:
        return self._class_names.checked_names

    @classmethod
    def from_prefix(cls, prefix: str, **options: Any) -> ShardDataset:
        """Open all shards under a folder or name prefix, as the S3 connector does."""
        if prefix.endswith("/"):
            return cls(prefix, **options)
        try:
            return cls(prefix, **options)
        except NotFoundError:
            return cls(f"{prefix}*", **options)


def current_worker_info(dataset: IterableDataset[Any], placement: Placement) -> WorkerInfo:
    """Return the worker that reads this dataset; the only place that reads torch's worker number.

    It is the whole rank in a worker that serves another dataset, such as a map-style one: each item of that may read all samples.
    An `IterableDataset` of the user may wrap the dataset, so it is split there.
    """
    worker = get_worker_info()
    if worker is None or not _is_served(dataset, worker.dataset):
        return WorkerInfo(placement)
    return WorkerInfo(placement, worker.id, worker.num_workers)


def _torch_worker() -> Worker | None:
    """Return the worker of a torch loader that this process is, if it is one."""
    worker = get_worker_info()
    return None if worker is None else Worker(worker.seed - worker.id, worker.id)


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


def open_class_names(located: LocatedShards, storage: Storage) -> ClassNames:
    """Return the class names of a dataset; warn if its folders number their classes differently."""
    class_names = ClassNames(located, storage)
    if len(class_names.folders) > 1:  # a single folder is read lazily
        warn_of_difference(class_names.found, stacklevel=4)  # of the caller of a dataset
    return class_names


def _check_options(index: str, on_error: OnError) -> None:
    """Check options before any I/O."""
    if index not in ("auto", "require", "ignore"):
        raise OptionError(f"index must be 'auto', 'require' or 'ignore', not {index!r}")
    SkipTracker(on_error)


def _check_whole_shards(url: str, index: str, needs: Mapping[str, object]) -> None:
    """Check that shards may be read from start to end; warn if the user did not ask for it.

    Args:
        url: A shard that has no index, or whose index is ignored.
        index: The user's option.
        needs: Options that need an index, by name; None where the user did not give them.

    Raises:
        OptionError: If one is given, or an index is required.
    """
    given = [name for name, value in needs.items() if value is not None]
    names = " and ".join(given)
    if given and index == "ignore":
        raise OptionError(
            f"{names} need shards that are read by number; remove index='ignore'", shard=url
        )
    if given or index == "require":
        reason = f", which {names} need" if given else ""
        raise OptionError(
            f"this shard has no index{reason}; run 'shardstream index' on its folder", shard=url
        )
    if index == "auto":
        _warn_no_index(url)


def _warn_no_index(url: str) -> None:
    url = shown(redact(url))
    folder = url.rpartition("/")[0]
    warnings.warn(
        f"{url} has no index: it is read from start to end, split by whole shards, and steps may differ among ranks. "
        f"Run once: shardstream index {folder or url}  (compressed shards cannot be indexed: pack them again without). "
        "index='ignore' silences this.",
        NoIndexWarning,
        stacklevel=4,
    )
