"""ObjectDataset: a sample for each loose file of a folder or prefix, for data that nobody has packed yet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, cast

from shardstream.catalog import LabelFunction, ObjectCatalog, folder_label
from shardstream.distributed import Placement
from shardstream.errors import NotFoundError, OptionError
from shardstream.loader.dataset import CatalogDataset
from shardstream.loader.map_dataset import MapDataset
from shardstream.order import Remainder
from shardstream.pipeline import OnError, ReadOptions, SkipTracker
from shardstream.storage import Storage, Urls, list_all, list_beginning, open_cache

Label = Literal["folder"] | LabelFunction


class _ObjectDatasetMixin:
    """What datasets of loose files have in common: how the files are named, and their classes."""

    classes: tuple[str, ...] | None
    """Names of the classes, in the order of their labels; None if `label` gave numbers, or was left out."""

    @classmethod
    def from_prefix(cls, prefix: str, **options: Any) -> Self:
        """Take all files under a prefix, as the S3 connector does: a folder, or the beginning of their names."""
        storage = Storage(options.get("storage_options"), options.get("filesystem"))
        return cls._of(list_beginning(prefix, storage), options)

    @classmethod
    def from_objects(cls, urls: Sequence[str], **options: Any) -> Self:
        """Take some files by name; each costs requests to learn its size."""
        return cls._of(urls, options)

    @classmethod
    def _of(cls, urls: Sequence[str], options: Mapping[str, Any]) -> Self:
        made: Self = cast("Any", cls)(urls, **options)
        return made


class ObjectDataset(_ObjectDatasetMixin, CatalogDataset):
    """Samples that are files of their own, not packed: the same splitting, order, state and steps as `ShardDataset`.

    Keys and fields are those that ``shardstream pack URL DEST --kind files`` gives: the key is the path up to the first dot of its last
    part, the field is the rest, and files that share a key (``a.jpg``, ``a.json``) are one sample. Hidden files and files without an
    extension are left out. What is there is listed once, now.

    Every sample is a request of its own, and 32 are in flight for each worker: packed shards are read several times as fast.
    With nothing to gain from neighbours, ``shuffle=True`` is a full shuffle.

    Args:
        urls: A folder or prefix (``s3://bucket/photos/``), a file, or a list of these, as they are: no patterns. Keys are paths under
            the folder that all have in common.
        label: Gives each sample a field ``cls``, as a packed shard has it. "folder" takes the name of the folder right under the
            prefix; a function is called with the path of the sample's first file, once, now. Names become numbers, see `classes`.
        classes: Names in the order of their numbers; by default those that are there, sorted. Where a split may lack a class,
            give it the ``classes`` of the training set.
        suffixes: Ends of the names that count, e.g. ``(".jpg", ".json")``; case does not matter. None takes all.
        shuffle: As in `ShardDataset`, like all below.
        seed: See there.
        lanes: See there.
        microbatch: See there.
        remainder: See there.
        storage_options: See there.
        filesystem: See there.
        cache_dir: See there; each file is one in the cache.
        cache_bytes: See there.
        on_error: See there; a file that is gone or was changed is always an error.
        prefetch_bytes: See there.
        hedge: See there.
        placement: See there.

    Raises:
        OptionError: If an argument makes no sense, or the files are tar shards.
        SourceError: If no file has an extension, or two would be the same field of a sample.
        UnfinishedError: If the dataset is being written, or its writer was stopped.
        StorageError: If nothing is there, or it is out of reach.
    """

    def __init__(  # noqa: PLR0913  (the public door: its options are its documentation)
        self,
        urls: Urls,
        *,
        label: Label | None = None,
        classes: Sequence[str] | None = None,
        suffixes: str | Sequence[str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        lanes: int | None = None,
        microbatch: int | None = None,
        remainder: Remainder = "pad",
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        on_error: OnError = "raise",
        prefetch_bytes: int = 64 << 20,
        hedge: bool = False,
        placement: Placement | None = None,
    ) -> None:
        SkipTracker(on_error)  # refuses nonsense before anything is listed
        options = ReadOptions(
            shuffle=shuffle,
            seed=seed,
            lanes=lanes,
            microbatch=microbatch,
            remainder=remainder,
            prefetch_bytes=prefetch_bytes,
            hedge=hedge,
        )
        storage = Storage(storage_options, filesystem, open_cache(cache_dir, cache_bytes))
        catalog = _open(urls, storage, suffixes)
        _set_labels(catalog, label, classes)
        super().__init__(catalog, options, on_error=on_error, placement=placement)
        self.classes = catalog.classes


class ObjectMapDataset(_ObjectDatasetMixin, MapDataset):
    """Samples that are files of their own, by number: ``ds[i]``, ``len(ds)``, for samplers, subsets and splits.

    As `ShardMapDataset` is to `ShardDataset`. A batch is fetched 32 files at a time.

    Args:
        urls: As in `ObjectDataset`, like the next three.
        label: See there.
        classes: See there.
        suffixes: See there.
        seed: For ``map(rng=True)``.
        storage_options: For fsspec.
        filesystem: An fsspec file system to use instead.
        cache_dir: A folder on a local disk that keeps what is read from afar, for later epochs and other processes.
        cache_bytes: How much it may keep, e.g. "20GB"; by default what leaves a tenth of the disk free.

    Raises:
        OptionError: As in `ObjectDataset`.
        SourceError: See there.
        StorageError: See there.
    """

    def __init__(  # noqa: PLR0913  (the public door)
        self,
        urls: Urls,
        *,
        label: Label | None = None,
        classes: Sequence[str] | None = None,
        suffixes: str | Sequence[str] | None = None,
        seed: int = 0,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
    ) -> None:
        storage = Storage(storage_options, filesystem, open_cache(cache_dir, cache_bytes))
        catalog = _open(urls, storage, suffixes)
        _set_labels(catalog, label, classes)
        super().__init__(catalog, seed=seed)
        self.classes = catalog.classes


def _open(urls: Urls, storage: Storage, suffixes: str | Sequence[str] | None) -> ObjectCatalog:
    """List the files, and give their samples numbers."""
    several = [urls] if isinstance(urls, str | os.PathLike) else urls
    root, files = list_all([os.fspath(url) for url in several], storage)
    if suffixes is not None:
        ends = (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)
        ends = tuple(end.lower() for end in ends)
        files = [file for file in files if file.path.lower().endswith(ends)]
        if not files:
            raise NotFoundError(f"no file here ends in {' or '.join(ends)}", shard=root)
    return ObjectCatalog(root, files, storage)


def _set_labels(catalog: ObjectCatalog, label: Label | None, classes: Sequence[str] | None) -> None:
    if label is None:
        if classes is not None:
            raise OptionError("classes numbers the names of label=, which is missing")
        return
    if label != "folder" and not callable(label):
        raise OptionError(f"label is 'folder' or a function of the path, not {label!r}")
    catalog.set_labels(folder_label if label == "folder" else label, classes)
