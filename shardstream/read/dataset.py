"""ShardDataset: a pipeline as a torch ``IterableDataset``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Literal

from torch.utils.data import IterableDataset, get_worker_info

from shardstream.errors import MissingError, NoIndexWarning, OptionError
from shardstream.placement import Placement, Reader
from shardstream.read.batch import Batched, Unbatched
from shardstream.read.decode import BASIC, Decode, Decoder, Handler
from shardstream.read.group_batch import GroupBatched, Leftover
from shardstream.read.images import EXTENSIONS, ImageDecoder
from shardstream.read.pipeline import PLAIN_MICROBATCH, Pipeline, PlannedSamples
from shardstream.read.plan import Plan
from shardstream.read.share import Remainder, Share, Split
from shardstream.read.skip import OnError
from shardstream.read.stage import Stage
from shardstream.read.stream import Compose, Repeat, Shuffle, Slice
from shardstream.read.tensors import collate, load_tensors, shared_numbers, to_tensor
from shardstream.read.transform import Map, MapDict, MapTuple, Rename, Select, ToTuple
from shardstream.read.whole import WholeShards
from shardstream.storage.catalog import Catalog, lacks_index
from shardstream.storage.filesystem import Storage
from shardstream.storage.locate import locate

_WHOLE_SHARD_WINDOW = 1000  # samples shuffled together where there is no index


class ShardDataset(IterableDataset[Any]):
    """Samples of tar shards, split exactly over ranks and workers, as plain dicts: ``__key__``, ``__url__``, fields.

    Each method returns a new dataset with one more step, under the name that WebDataset users know. Iterate it with a
    `ShardLoader`, with a plain ``torch.utils.data.DataLoader`` or by itself.

    Args:
        urls: A folder or prefix (``s3://bucket/train/``), a pattern (``…/{000000..000099}.tar``), a glob, ``a.tar::b.tar``,
            an ``index.json``, or a list of these.
        shuffle: Another order each epoch, the same for the same seed. False reads in the order of the shards.
        seed: Any whole number.
        lanes: Canonical streams an epoch is cut into; the same number gives the same global batches on every topology.
            By default the number of readers (ranks x workers x microbatches a step).
        microbatch: Samples that always stay together; by default the loader's batch size.
        window: Samples shuffled together, a multiple of the microbatch; by default 64 MiB of them.
        block: Consecutive samples that are fetched together; by default 2 MiB of them.
        remainder: "pad", "drop" or "keep" the samples that do not fill a last step of all ranks (see `Split`).
        index: "auto" reads by number where an index is and by whole shards else; "require" refuses the latter; "ignore"
            reads whole shards.
        storage_options: For fsspec, e.g. ``{"endpoint_url": "http://127.0.0.1:9000"}``.
        filesystem: An fsspec file system to use instead.
        on_error: "raise" at the first bad sample; "warn" or "skip" pass over up to 100 a worker; or a `SkipBudget`.
        prefetch_bytes: Bytes each worker holds ahead of use when it reads from afar.
        placement: Rank and world size; by default those of torch.distributed, Ray Train or RANK/WORLD_SIZE.

    Raises:
        OptionError: If an argument makes no sense.
        StorageError: If nothing is there, or it is out of reach.
        ManifestError: If the manifest cannot be understood.
    """

    def __init__(  # noqa: PLR0913  (the public door: its options are its documentation)
        self,
        urls: str | Sequence[str],
        *,
        shuffle: bool = False,
        seed: int = 0,
        lanes: int | None = None,
        microbatch: int | None = None,
        window: int | None = None,
        block: int | None = None,
        remainder: Remainder = "pad",
        index: Literal["auto", "require", "ignore"] = "auto",
        storage_options: dict[str, Any] | None = None,
        filesystem: Any = None,
        on_error: OnError = "raise",
        prefetch_bytes: int = 64 << 20,
        placement: Placement | None = None,
    ) -> None:
        storage = Storage(storage_options, filesystem)
        located = locate(urls, storage)
        unindexed = located.shards[0].url if index == "ignore" else lacks_index(located, storage)
        source: PlannedSamples | WholeShards
        stages: tuple[Stage, ...] = ()
        if unindexed is None:
            source = PlannedSamples(
                catalog=Catalog(located, storage),
                shuffle=shuffle,
                seed=seed,
                lanes=lanes,
                microbatch=microbatch,
                window=window,
                block=block,
                remainder=remainder,
                prefetch_bytes=prefetch_bytes,
            )
            source.order(batch=microbatch or 1, readers=1)  # refuses nonsense now
        else:
            if index == "require":
                raise OptionError(
                    "this shard has no index; run 'shardstream index' on its folder",
                    shard=unindexed,
                )
            if index == "auto":
                _warn_no_index(unindexed)
            source = WholeShards(shards=located.shards, storage=storage, shuffle=shuffle, seed=seed)
            stages = (Shuffle(window=window or _WHOLE_SHARD_WINDOW),) if shuffle else ()
        self.pipeline = Pipeline(source=source, stages=stages, on_error=on_error)
        self._placement = placement
        self._length: int | None = None
        self._epoch = shared_numbers(0)  # seen by persistent workers too

    @classmethod
    def from_prefix(cls, prefix: str, **options: Any) -> ShardDataset:
        """Take all shards under a prefix, as the S3 connector does: a folder, or the beginning of their names."""
        if prefix.endswith("/"):
            return cls(prefix, **options)
        try:
            return cls(prefix, **options)
        except MissingError:
            return cls(f"{prefix}*", **options)

    # -- steps on single samples -------------------------------------------------------------------------------------------

    def decode(
        self,
        *handlers: str | Handler,
        only: str | Sequence[str] | None = None,
        fields: dict[str, str | Decoder] | None = None,
        threads: int = 0,
    ) -> ShardDataset:
        """Decode fields by their last part: txt, cls, json, npy, npz, pt, …; images where a name such as "rgb8" is given.

        Args:
            handlers: Image names ("pil", "rgb8", "torchrgb", …) or WebDataset's functions ``handler(".jpg", data)``.
            only: Fields to decode; the others stay bytes.
            fields: Decoders of single fields, by name or last part: an image name, or ``function(data)``.
            threads: Decode in so many threads, in order; image decoders release the GIL.
        """
        table: dict[str, Decoder] = {**BASIC, "pt": load_tensors, "pth": load_tensors}
        for handler in handlers:
            if isinstance(handler, str):
                table |= dict.fromkeys(EXTENSIONS, ImageDecoder(spec=handler, to_tensor=to_tensor))
        for name, decoder in (fields or {}).items():
            table[name] = (
                ImageDecoder(spec=decoder, to_tensor=to_tensor)
                if isinstance(decoder, str)
                else decoder
            )
        functions = tuple(handler for handler in handlers if not isinstance(handler, str))
        wanted = None if only is None else frozenset([only] if isinstance(only, str) else only)
        return self._then(Decode(table=table, handlers=functions, only=wanted, threads=threads))

    def map(
        self, function: Callable[..., Any], *, rng: bool = False, threads: int = 0
    ) -> ShardDataset:
        """Apply ``function(item)``; with ``rng`` ``function(item, generator)``, a NumPy generator of that sample and epoch."""
        return self._then(
            Map(function=function, rng=rng, purpose=len(self.pipeline.stages), threads=threads)
        )

    def map_dict(self, **functions: Callable[[Any], Any]) -> ShardDataset:
        """Apply functions to single fields: ``map_dict(json=len)``."""
        return self._then(MapDict(functions=functions))

    def map_tuple(self, *functions: Callable[[Any], Any] | None) -> ShardDataset:
        """Apply the first function to the first element of each tuple, and so on; None leaves an element as it is."""
        return self._then(MapTuple(functions=functions))

    def rename(self, keep: bool = True, **names: str) -> ShardDataset:
        """Give fields new names: ``rename(image="jpg;png", label="cls")``; ``keep=False`` drops the others."""
        return self._then(Rename(names=names, keep=keep))

    def to_tuple(self, *names: str) -> ShardDataset:
        """Take fields in order: ``to_tuple("jpg;png", "cls")`` or ``to_tuple("jpg;png cls")``."""
        return self._then(ToTuple(names=tuple(part for name in names for part in name.split())))

    # -- steps that change counts or order: positions are kept per worker --------------------------------------------------

    def select(self, predicate: Callable[[Any], bool]) -> ShardDataset:
        """Keep the items that ``predicate`` says yes to."""
        return self._then(Select(predicate=predicate))

    def shuffle(self, window: int) -> ShardDataset:
        """Shuffle runs of ``window`` items of each worker; ``ShardDataset(shuffle=True)`` needs none."""
        return self._then(Shuffle(window=window, purpose=len(self.pipeline.stages)))

    def batched(
        self,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] = collate,
        partial: bool = True,
    ) -> ShardDataset:
        """Collate items to batches within each worker; then use the loader with ``batch_size=None``."""
        return self._then(Batched(size=batch_size, collate=collate_fn, partial=partial))

    def unbatched(self) -> ShardDataset:
        """Take batches apart again; after ``map(to_list)`` it is a flat-map that resumes at once."""
        return self._then(Unbatched())

    def map_batches(self, function: Callable[[Any], Any], batch_size: int) -> ShardDataset:
        """Collate ``batch_size`` items, apply ``function(batch)``, and take what it returns apart again."""
        return self.batched(batch_size).map(function).unbatched()

    def group_batched(
        self,
        group: str | Callable[[Any], Any],
        batch_size: int,
        *,
        buffer: int = 1000,
        collate_fn: Callable[[list[Any]], Any] = collate,
        leftover: Leftover = "keep",
    ) -> ShardDataset:
        """Batch items that share a group: a field, or what ``group(item)`` returns (a shape, a length rounded up, …)."""
        function = _field_of(group) if isinstance(group, str) else group
        return self._then(
            GroupBatched(
                group=function,
                size=batch_size,
                buffer=buffer,
                collate=collate_fn,
                leftover=leftover,
            )
        )

    def slice(self, *bounds: int | None) -> ShardDataset:
        """Take ``stop`` items, or those from ``start`` to ``stop`` by ``step``, of each worker, as ``itertools.islice``."""
        cut = slice(*bounds)
        start, step = cut.start or 0, 1 if cut.step is None else cut.step
        if start < 0 or step < 1 or (cut.stop is not None and cut.stop < 0):
            raise OptionError(f"slice{bounds} makes no sense: bounds of a stream are not negative")
        return self._then(Slice(start=start, stop=cut.stop, step=step))

    def repeat(self, times: int | None = None) -> ShardDataset:
        """Go through the epoch ``times`` times, or for ever."""
        return self._then(Repeat(times=times))

    def with_epoch(self, items: int) -> ShardDataset:
        """Let an epoch of each worker have exactly ``items`` items, by repeating or cutting."""
        return self._then(Repeat(items=items))

    def compose(self, *functions: Callable[[Iterator[Any]], Iterable[Any]]) -> ShardDataset:
        """Put the stream through functions from iterator to iterator; a resume runs them from the epoch's start."""
        changed = self
        for function in functions:
            changed = changed._then(Compose(function=function))
        return changed

    def with_length(self, length: int) -> ShardDataset:
        """Let ``len`` say so, where it cannot be known."""
        changed = self._then(None)
        changed._length = length
        return changed

    # -- iteration ---------------------------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        """Rank and world size: as given, or as the process says now."""
        return self._placement or Placement.detect()

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration reads."""
        return int(self._epoch.item())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, in loader workers too, persistent ones included."""
        self._epoch[0] = epoch

    def __iter__(self) -> Iterator[Any]:
        reader = current_reader(self.placement)
        return iter(self.pipeline.open(reader, self.pipeline.context(reader, self.epoch)))

    def __len__(self) -> int:
        if self._length is not None:
            return self._length
        source = self.pipeline.source
        if not isinstance(source, PlannedSamples) or not self.pipeline.is_exact:
            raise TypeError("the length is not known in advance: say it with .with_length(n)")
        placement = self.placement
        order = source.order(batch=source.microbatch or PLAIN_MICROBATCH, readers=1)
        split = Split(world_size=placement.world_size, remainder=source.remainder)
        return Share(Plan(order, 0), split, rank=placement.rank).num_samples

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if (
            get_spawning_popen() is not None
        ):  # on the way to a spawned worker, which could not find out its rank
            state["_placement"] = self.placement
        return state

    def _then(self, stage: Stage | None) -> ShardDataset:
        changed = copy.copy(self)
        changed._epoch = shared_numbers(self.epoch)
        if stage is not None:
            changed.pipeline = self.pipeline.then(stage)
            changed._length = None
        return changed


def current_reader(placement: Placement) -> Reader:
    """Return which reader of the job this process is; the only look at torch's worker number."""
    worker = get_worker_info()
    return Reader(placement) if worker is None else Reader(placement, worker.id, worker.num_workers)


class _field_of:  # noqa: N801  (used as a function; a class, so that it can be pickled)
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, sample: Any) -> Any:
        return sample[self._name]


def _warn_no_index(url: str) -> None:
    folder = url.rpartition("/")[0]
    warnings.warn(
        f"{url} has no index: it is read from start to end, split by whole shards, and steps may differ among ranks. "
        f"Run once: shardstream index {folder or url}  (compressed shards cannot be indexed: pack them again without). "
        "index='ignore' silences this.",
        NoIndexWarning,
        stacklevel=3,
    )
