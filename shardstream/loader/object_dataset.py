"""Datasets of samples by number of any kind, and of loose files of a folder or prefix, without packing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from shardstream.catalog import (
    ClassNames,
    Keys,
    LabelFunction,
    ObjectCatalog,
    Where,
    choose_samples,
    folder_label,
)
from shardstream.distributed import Placement
from shardstream.errors import NotFoundError, OptionError
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
from shardstream.storage import Storage, Urls, list_all, list_beginning


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


Label = Literal["folder"] | LabelFunction

_OF_SHARDS = ("index", "lazy", "verify", "on_new_version")  # options of reading


class ObjectDataset(StreamDataset):
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
        order: As in `ShardDataset`.
        weights: As in `ShardDataset`.
        fields: As in `ShardDataset`; files of other fields are read, but not decoded.
        storage_options: As in `ShardDataset`.
        read: As in `ShardDataset`, but for ``index``, ``lazy``, ``verify`` and ``on_new_version``; the cache has one file for each.
        on_error: As in `ShardDataset`; a missing or changed file is always an error.
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
        order: OrderOptions | None = None,
        weights: SampleWeights | Weights | None = None,
        fields: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        read: ReadOptions | None = None,
        on_error: OnError = "raise",
        placement: Placement | None = None,
    ) -> None:
        order, read = options_or_default(order, OrderOptions), options_or_default(read, ReadOptions)
        SkipTracker(on_error)  # validates before any I/O
        seed = whole_number("seed", seed)
        refuse_options(read, _OF_SHARDS, "on loose files")
        catalog = _open(urls, read.open_storage(storage_options), suffixes)
        _set_labels(catalog, label, classes)
        source = SamplesSource(
            samples=catalog, shuffle=shuffle, seed=seed, options=order, reading=read
        ).drawn(weights)
        stages = () if fields is None else (keep_fields(fields, catalog.fields),)
        names = {} if catalog.classes is None else {"label=": catalog.classes}
        pipeline = Pipeline(source=source, stages=stages, on_error=on_error)
        super().__init__(pipeline, placement, ClassNames(names))

    @classmethod
    def from_prefix(cls, prefix: str, **options: Any) -> Self:
        """Open all files under a folder or name prefix, as the S3 connector does."""
        read = options_or_default(options.get("read"), ReadOptions)
        storage = read.open_storage(options.get("storage_options"))
        return cls(list_beginning(prefix, storage), **options)


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
