"""Datasets over loose files of a folder or prefix, without packing."""

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
from shardstream.pipeline import (
    DEFAULT_PREFETCH_BYTES,
    OnError,
    ReadOptions,
    SampleWeights,
    SkipTracker,
    keep_fields,
)
from shardstream.storage import Storage, Urls, list_all, list_beginning, open_cache

Label = Literal["folder"] | LabelFunction


class _ObjectDatasetMixin:
    """Constructors and class names that datasets of loose files share."""

    classes: tuple[str, ...] | None
    """Names of the classes, in the order of their labels; None if `label` gave numbers, or was omitted."""

    @classmethod
    def from_prefix(cls, prefix: str, **options: Any) -> Self:
        """Open all files under a folder or name prefix, as the S3 connector does."""
        storage = Storage(options.get("storage_options"), options.get("filesystem"))
        return cls._from_urls(list_beginning(prefix, storage), options)

    @classmethod
    def from_objects(cls, urls: Sequence[str], **options: Any) -> Self:
        """Open files by URL; each costs requests for its size."""
        return cls._from_urls(urls, options)

    @classmethod
    def _from_urls(cls, urls: Sequence[str], options: Mapping[str, Any]) -> Self:
        made: Self = cast("Any", cls)(urls, **options)
        return made


class ObjectDataset(_ObjectDatasetMixin, CatalogDataset):
    """Samples of loose files, with the splits, order, state and steps of `ShardDataset`.

    Keys and fields are those of ``shardstream pack URL DEST --kind files``: the key is the path up to the first dot of its last
    part, the field is the rest, and files that share a key (``a.jpg``, ``a.json``) are one sample. Hidden files and files without an
    extension are left out. The files are listed once, at construction.

    Every file costs one request, and each worker keeps 32 in flight: packed shards are read several times as fast.
    ``shuffle=True`` is a full shuffle, because neighbouring samples share no requests.

    Args:
        urls: A folder or prefix (``s3://bucket/photos/``), a file, or a list of these; patterns are not expanded. Keys are paths
            relative to the common folder.
        label: Adds a field ``cls`` to each sample, as in a packed shard. "folder" uses the name of the folder directly under the
            prefix; a function is called once, at construction, with the path of the sample's first file. Names become numbers,
            see `classes`.
        classes: Names in the order of their numbers; by default the names found, sorted. If a split may lack a class, pass the
            ``classes`` of the training set.
        suffixes: Accepted ends of file names, e.g. ``(".jpg", ".json")``, ignoring case. None accepts all.
        shuffle: As in `ShardDataset`, like all below.
        seed: As in `ShardDataset`.
        lanes: As in `ShardDataset`.
        microbatch: As in `ShardDataset`.
        remainder: As in `ShardDataset`.
        weights: As in `ShardDataset`.
        replacement: As in `ShardDataset`.
        num_samples: As in `ShardDataset`.
        fields: As in `ShardDataset`; files of other fields are read, but not decoded.
        storage_options: As in `ShardDataset`.
        filesystem: As in `ShardDataset`.
        cache_dir: As in `ShardDataset`; the cache has one file for each.
        cache_bytes: As in `ShardDataset`.
        on_error: As in `ShardDataset`; a missing or changed file is always an error.
        prefetch_bytes: As in `ShardDataset`.
        hedge: As in `ShardDataset`.
        placement: As in `ShardDataset`.

    Raises:
        OptionError: If an argument is invalid, or the files are tar shards.
        SourceError: If no file has an extension, or two files map to the same field of a sample.
        UnfinishedError: If the dataset is being written, or its writer was stopped.
        StorageError: If the files are not found or cannot be read.
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
        weights: SampleWeights | None = None,
        replacement: bool = True,
        num_samples: int | None = None,
        fields: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        on_error: OnError = "raise",
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
        hedge: bool = False,
        placement: Placement | None = None,
    ) -> None:
        SkipTracker(on_error)  # validates before any I/O
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
        super().__init__(
            catalog,
            options,
            weights=weights,
            replacement=replacement,
            num_samples=num_samples,
            fields=fields,
            on_error=on_error,
            placement=placement,
        )
        self.classes = catalog.classes


class ObjectMapDataset(_ObjectDatasetMixin, MapDataset):
    """Samples of loose files by number: ``ds[i]``, ``len(ds)``.

    The map-style `ObjectDataset`, for samplers, subsets and splits. A batch is fetched with 32 requests in flight.

    Args:
        urls: As in `ObjectDataset`, like the next three.
        label: As in `ObjectDataset`.
        classes: As in `ObjectDataset`.
        suffixes: As in `ObjectDataset`.
        seed: For ``map(rng=True)``.
        fields: As in `ObjectDataset`.
        storage_options: For fsspec.
        filesystem: An fsspec file system to use instead.
        cache_dir: A local folder that caches remote bytes, for later epochs and other processes.
        cache_bytes: Limit of the cache, e.g. "20GB"; by default a tenth of the disk stays free.

    Raises:
        OptionError: As in `ObjectDataset`.
        SourceError: As in `ObjectDataset`.
        StorageError: As in `ObjectDataset`.
    """

    def __init__(  # noqa: PLR0913  (the public door)
        self,
        urls: Urls,
        *,
        label: Label | None = None,
        classes: Sequence[str] | None = None,
        suffixes: str | Sequence[str] | None = None,
        seed: int = 0,
        fields: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        filesystem: Any = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
    ) -> None:
        storage = Storage(storage_options, filesystem, open_cache(cache_dir, cache_bytes))
        catalog = _open(urls, storage, suffixes)
        _set_labels(catalog, label, classes)
        stages = () if fields is None else (keep_fields(fields, catalog.fields),)
        super().__init__(catalog, seed=seed, stages=stages)
        self.classes = catalog.classes


def _open(urls: Urls, storage: Storage, suffixes: str | Sequence[str] | None) -> ObjectCatalog:
    """List the files and build their catalog."""
    url_list = [urls] if isinstance(urls, str | os.PathLike) else urls
    root, files = list_all([os.fspath(url) for url in url_list], storage)
    if suffixes is not None:
        ends = (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)
        ends = tuple(end.lower() for end in ends)
        files = [file for file in files if file.path.lower().endswith(ends)]
        if not files:
            raise NotFoundError(f"no file ends in {' or '.join(ends)}; check suffixes=", shard=root)
    return ObjectCatalog(root, files, storage)


def _set_labels(catalog: ObjectCatalog, label: Label | None, classes: Sequence[str] | None) -> None:
    if label is None:
        if classes is not None:
            raise OptionError("classes= needs label=, whose names it numbers")
        return
    if label != "folder" and not callable(label):
        raise OptionError(f"label must be 'folder' or a function of the path, not {label!r}")
    catalog.set_labels(folder_label if label == "folder" else label, classes)
