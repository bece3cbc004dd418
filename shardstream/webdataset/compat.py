"""WebDataset and WebLoader: pipelines with a method for each stage; and the source of samples in the order of an epoch plan."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from torch.utils.data import DataLoader, IterableDataset
from webdataset import compat as _theirs

from shardstream.errors import OptionError
from shardstream.loader import ShardDataset, WorkerIterator, begin_epoch, current_worker_info
from shardstream.pipeline import OnError, OrderOptions, ReadOptions
from shardstream.webdataset import cache, filters, handlers, shardlists, utils
from shardstream.webdataset.gopen import refuse_commands, rewrite_url
from shardstream.webdataset.handlers import Handler, reraise_exception
from shardstream.webdataset.pipeline import DataPipeline
from shardstream.webdataset.tariterators import group_by_keys, tar_file_expander

_expand = filters.pipelinefilter(tar_file_expander)
_group = filters.pipelinefilter(group_by_keys)
_SHARD_BUFFER = 100


class FluidInterface(_theirs.FluidInterface):
    """Methods that return a copy of a pipeline with one more stage; arguments as in `filters`."""

    def listed(self, batchsize: int, partial: bool = True) -> Self:
        """Combine so many samples to a list."""
        return self._add(filters.batched(batchsize, collation_fn=None, partial=partial))

    def map(self, f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Self:
        """Replace each sample by ``f(sample)``."""
        return self._add(filters.map(f, handler=handler))

    def decode(self, *args: Any, handler: Handler = reraise_exception, **kw: Any) -> Self:
        """Decode fields, see `autodecode.Decoder`."""
        return self._add(filters.decode(*args, handler=handler, **kw))

    def map_dict(self, **kw: Any) -> Self:
        """Replace fields by functions of them."""
        return self._add(filters.map_dict(**kw))

    def to_tuple(self, *args: Any, **kw: Any) -> Self:
        """Turn samples into tuples of fields."""
        return self._add(filters.to_tuple(*args, **kw))

    def map_tuple(self, *args: Any, **kw: Any) -> Self:
        """Apply one function to each part of a tuple."""
        return self._add(filters.map_tuple(*args, **kw))

    def rename(self, **kw: Any) -> Self:
        """Rename fields: ``new="old;or_old"``."""
        return self._add(filters.rename(**kw))

    def xdecode(self, *args: Any, **kw: Any) -> Self:
        """Decode fields by functions of a stream."""
        return self._add(filters.xdecode(*args, **kw))

    def mcached(self) -> Self:
        """Keep samples in memory."""
        return self._add(filters.Cached())

    def lmdb_cached(self, *args: Any, **kw: Any) -> Self:
        """Refuse a cache of pickles."""
        return self._add(filters.LMDBCached(*args, **kw))

    def _add(self, stage: Any) -> Self:
        return self.compose(stage)  # type: ignore[no-any-return]


def check_empty(source: Iterable[Any]) -> Iterator[Any]:
    """Pass on all samples, and refuse an empty source.

    Raises:
        OptionError: If there is no sample.
    """
    return shardlists.non_empty(
        source,
        "No samples found in dataset; perhaps you have fewer shards than workers. Use fewer workers or more shards, or turn this "
        "off with empty_check=False in the WebDataset constructor.",
    )


class WebDataset(DataPipeline, FluidInterface):
    """Samples of shards, split over nodes and workers by shards, as WebDataset reads them.

    Args:
        urls: A pattern, or a list of URLs.
        handler: Decides about shards that cannot be opened or read to their end; that is all but a whole shard that is skipped.
        mode: "resampled" draws shards with replacement, without end.
        resampled: The same.
        repeat: Ignored, as in WebDataset; use ``.repeat()``.
        shardshuffle: Buffer in which shards are shuffled; False or 0 keeps their order, True is 100.
        cache_size: Limit of the cache in bytes; 0 is no cache.
        cache_dir: Folder of a cache of remote bytes; it must exist.
        url_to_name: Must be left out (see `cache.FileCache`).
        detshuffle: Another order of shards in each pass, by the seed.
        nodesplitter: Stage that splits shards over ranks; by default several ranks are refused.
        workersplitter: Stage that splits shards over workers.
        select_files: Keeps the files whose names it accepts.
        rename_files: Changes names of files.
        empty_check: Refuse a worker without samples.
        verbose: Ignored.
        seed: Seed of the order of shards; by default WDS_SEED, or any.
        storage_options: As in `ShardDataset`; not in WebDataset.
        exact: Read by shardstream's epoch plan: ranks and workers take each sample once, also with fewer shards than workers, and
            ``shardshuffle`` shuffles the whole dataset. Remote shards need an index; every rank needs the same ``seed`` (0 by
            default) and number of workers. Not in WebDataset.

    Raises:
        OptionError: If an argument is invalid, or the folder of the cache is missing.
    """

    def __init__(
        self,
        urls: Any,
        handler: Handler = reraise_exception,
        mode: str | None = None,
        resampled: bool = False,
        repeat: bool = False,
        shardshuffle: bool | int | None = None,
        cache_size: int = -1,
        cache_dir: str | os.PathLike[str] | None = None,
        url_to_name: Callable[..., str] = cache.pipe_cleaner,
        detshuffle: bool = False,
        nodesplitter: Any = shardlists.single_node_only,
        workersplitter: Any = shardlists.split_by_worker,
        select_files: Callable[[str], bool] | None = None,
        rename_files: Callable[[str], str] | None = None,
        empty_check: bool = True,
        verbose: bool = False,
        seed: Any = None,
        storage_options: dict[str, Any] | None = None,
        exact: bool = False,
    ) -> None:
        arguments = {**locals()}
        super().__init__()
        mode = "resampled" if resampled else mode
        shuffled = _shard_buffer(shardshuffle, is_resampled=mode == "resampled")
        if seed is None:
            seed = utils.variable("WDS_SEED") or random.randint(0, 1_000_000)
        self.seed = seed
        cache.check_url_to_name(url_to_name)
        if exact:
            self.append(
                _exact_source(arguments, is_resampled=mode is not None, is_shuffled=shuffled > 0)
            )
            if empty_check:
                self.append(check_empty)
            return
        self.append(_shards(urls, mode))
        if nodesplitter is not None:
            self.append(nodesplitter)
        if workersplitter:
            self.append(workersplitter)
        if shuffled:
            stage = filters.detshuffle(shuffled, seed=_number(self.seed)) if detshuffle else None
            self.append(stage or filters.shuffle(shuffled, seed=self.seed))
        self.append(_opener(cache_dir, cache_size, handler, storage_options))
        self.append(_expand(handler=handler, select_files=select_files, rename_files=rename_files))
        self.append(_group(handler=handler))
        if empty_check:
            self.append(check_empty)

    def __iter__(self) -> Iterator[Any]:
        if self.pipeline and isinstance(self.pipeline[0], ExactSource):
            self.pipeline[0].begin()
        return super().__iter__()

    def describe(self) -> str:
        """Return in words how the pipeline is run, for the log."""
        if self.pipeline and isinstance(self.pipeline[0], ExactSource):
            return "an exact plan: samples by index, split over all ranks and workers"
        return super().describe()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, with ``exact=True``, also in persistent workers; on one rank later ones count on from it.

        Raises:
            OptionError: If the dataset has no plan.
        """
        if not self.pipeline or not isinstance(self.pipeline[0], ExactSource):
            raise OptionError(
                "set_epoch needs WebDataset(..., exact=True); without it use detshuffle, or a stage of your own"
            )
        self.pipeline[0].dataset.set_epoch(epoch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def _shard_buffer(shardshuffle: bool | int | None, *, is_resampled: bool) -> int:
    """Return the size of the buffer of shards; warn where webdataset does."""
    if is_resampled:
        if shardshuffle not in (False, None):
            warnings.warn(
                "WebDataset(shardshuffle=...) is ignored for resampled datasets", stacklevel=3
            )
        return 0
    if shardshuffle is None:
        warnings.warn(
            "WebDataset(shardshuffle=...) is None; set explicitly to False or a number",
            stacklevel=3,
        )
        return 0
    if shardshuffle is True:
        warnings.warn(
            "set WebDataset(shardshuffle=...) to a positive integer or 0 or False", stacklevel=3
        )
        return _SHARD_BUFFER
    return int(shardshuffle)


def _exact_source(
    arguments: dict[str, Any], *, is_resampled: bool, is_shuffled: bool
) -> ExactSource:
    policy = check_exact(arguments, is_resampled)
    folder, limit = _cache_of(arguments["cache_dir"], arguments["cache_size"])
    options = {
        "shuffle": is_shuffled,
        # Never a random one: ranks with different orders would lose samples.
        "seed": _number(arguments["seed"] or utils.variable("WDS_SEED") or 0),
        "on_error": policy,
        "storage_options": arguments["storage_options"],
        "read": ReadOptions(
            index="require",
            cache_dir=folder,
            cache_bytes=limit if folder is not None and limit > 0 else None,
        ),
    }
    by_node = arguments["nodesplitter"] is shardlists.split_by_node
    return ExactSource(arguments["urls"], options, is_split_by_node=by_node)


def _number(seed: Any) -> int:
    return int(seed) if isinstance(seed, int) or str(seed).isdigit() else utils.make_seed(seed)


def _shards(urls: Any, mode: str | None) -> Any:
    if isinstance(urls, str):
        refuse_commands(urls)
        shardlists.refuse_specification(urls)
        if urls.endswith("/"):
            if mode not in ("resample", "keep", "unlink"):
                raise OptionError(
                    f"{urls!r} is a folder: webdataset would rename its shards and wait for more of them without end; pass a pattern "
                    "or a list of shards, or shardstream.ShardDataset(folder), or mode='resample', 'keep' or 'unlink' if that is meant"
                )
            return shardlists.DirectoryShardList(urls, mode=mode)
    elif isinstance(urls, dict) or not utils.is_iterable(urls):
        raise OptionError(
            f"cannot handle urls of type {type(urls).__name__}; pass a pattern or a list of URLs"
        )
    return (
        shardlists.ResampledShards(urls)
        if mode == "resampled"
        else shardlists.SimpleShardList(urls)
    )


def _opener(
    cache_dir: str | os.PathLike[str] | None,
    cache_size: int,
    handler: Handler,
    storage_options: dict[str, Any] | None,
) -> cache.StreamingOpen:
    folder, size = _cache_of(cache_dir, cache_size)
    options = {"storage_options": storage_options} if storage_options else {}
    if folder is None:
        return cache.StreamingOpen(handler=handler, options=options)
    return cache.FileCache(folder, cache_size=size, handler=handler, options=options)


def _cache_of(cache_dir: str | os.PathLike[str] | None, cache_size: int) -> tuple[str | None, int]:
    """Return folder and limit of the cache; WDS_CACHE and WDS_CACHE_SIZE come first."""
    size = int(utils.variable("WDS_CACHE_SIZE") or cache_size)
    given = utils.variable("WDS_CACHE") or cache_dir
    if given is None or size == 0:
        return None, size
    folder = os.path.expanduser(given)
    if not os.path.exists(folder):
        raise OptionError(
            f"cache directory {folder} does not exist; create it, for this user alone (mode 700)"
        )
    return folder, size


class FluidWrapper(DataPipeline, FluidInterface):
    """A dataset with the methods of `FluidInterface`."""

    def __init__(self, initial: Any) -> None:
        super().__init__(initial)


class WebLoader(DataPipeline, FluidInterface):
    """A torch ``DataLoader`` with the methods of `FluidInterface`; arguments are those of the loader."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(DataLoader(*args, **kw))


_POLICIES: tuple[tuple[Callable[[Exception], Any], OnError], ...] = (
    (reraise_exception, "raise"),
    (handlers.warn_and_continue, "warn"),
    (handlers.ignore_and_continue, "skip"),
)


class ExactSource(IterableDataset[Any]):
    """Samples of shards, each once in an epoch, whatever the number of ranks, workers and shards.

    Args:
        urls: A pattern, folder or list of URLs.
        options: Options of `ShardDataset`.
        is_split_by_node: Whether several ranks are allowed.

    Raises:
        OptionError: If a shard has no index.
        StorageError: If the shards cannot be listed.
    """

    def __init__(self, urls: Any, options: Mapping[str, Any], *, is_split_by_node: bool) -> None:
        super().__init__()
        expanded = shardlists.expand_source(urls)
        self.dataset = ShardDataset(
            [rewrite_url(url) for url in expanded],
            order=OrderOptions(remainder="keep"),
            **options,
        )
        self.is_split_by_node = is_split_by_node
        self._epoch: int | None = None
        self._passes = 0

    def begin(self) -> None:
        """Make the next pass the first one of an iteration, so that all workers read the same epochs."""
        self._epoch = None

    def __iter__(self) -> Iterator[Any]:
        placement = self.dataset.placement
        if not self.is_split_by_node:
            shardlists.check_single_node(placement.world_size)
        if utils.variable("NUM_WORKERS") is not None:
            raise OptionError(
                "exact=True splits over torch's workers; unset WORKER and NUM_WORKERS"
            )
        if self._epoch is None:
            self._epoch, self._passes = begin_epoch(self.dataset, placement), 0
        epoch = self._epoch + self._passes
        self._passes += 1
        return self._read(
            WorkerIterator(self.dataset.pipeline, current_worker_info(self, placement), epoch)
        )

    def _read(self, iterator: WorkerIterator) -> Iterator[Any]:
        try:
            for sample in iterator:
                if (path := cache.local_path(sample["__url__"])) is not None:
                    sample["__local_path__"] = path
                yield sample
        finally:
            iterator.close()


def check_exact(arguments: Mapping[str, Any], is_resampled: bool) -> OnError:
    """Return the policy for bad samples, and refuse options of WebDataset that a plan cannot follow.

    Raises:
        OptionError: If there is one.
    """
    policy = next((name for one, name in _POLICIES if one is arguments["handler"]), None)
    splitters = (shardlists.split_by_node, shardlists.single_node_only)
    reasons = {
        "resampled=True": is_resampled,
        "nodesplitter=, unless it is wds.split_by_node": arguments["nodesplitter"] not in splitters,
        "workersplitter=": arguments["workersplitter"] is not shardlists.split_by_worker,
        "select_files=": arguments["select_files"] is not None,
        "rename_files=": arguments["rename_files"] is not None,
        "a handler= of one's own": policy is None,
    }
    wrong = [name for name, is_wrong in reasons.items() if is_wrong]
    if wrong or policy is None:
        raise OptionError(f"exact=True does not go with {', '.join(wrong)}; leave one of them out")
    return policy
