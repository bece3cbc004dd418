"""Run a packing job: source -> records -> encoded samples -> shards of one or several datasets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from shardstream.errors import OptionError
from shardstream.format import ColumnSources
from shardstream.packing.images import DEFAULT_QUALITY, ImageOptions
from shardstream.packing.job.pack_parts import run_pack
from shardstream.packing.job.pack_plan import PackRequest
from shardstream.packing.job.report import PackReport, Progress
from shardstream.packing.shards.column_builder import checked_columns
from shardstream.packing.shards.part_writer import WriterOptions
from shardstream.packing.shards.shard_writer import DEFAULT_MAX_BYTES, DEFAULT_MAX_SAMPLES
from shardstream.packing.sources.class_numbering import AnyClasses
from shardstream.packing.sources.detection import AnySource
from shardstream.packing.sources.source import SourceOptions
from shardstream.storage import parse_bytes
from shardstream.tasks import Executor


def pack(  # noqa: PLR0913  (public door)
    source: AnySource,
    dest: str | os.PathLike[str],
    *,
    kind: str | None = None,
    name: str = "",
    max_samples: int = DEFAULT_MAX_SAMPLES,
    max_bytes: int | str = DEFAULT_MAX_BYTES,
    key: str | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    split: Mapping[str, float] | None = None,
    fields: Mapping[str, str] | None = None,
    root: str | None = None,
    allow: Sequence[str] = (),
    header: Sequence[str] = (),
    classes: AnyClasses | None = None,
    max_side: int | None = None,
    quality: int | None = None,
    image_format: str | None = None,
    masks: Sequence[str] | None = None,
    scale_16_bits: bool = False,
    check: bool = False,
    columns: ColumnSources | None = None,
    processes: int | None = None,
    executor: Executor | None = None,
    append: bool = False,
    check_keys: bool = True,
    overwrite: bool = False,
    on_error: Literal["raise", "skip"] = "raise",
    progress: Callable[[Progress], object] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
) -> PackReport:
    """Pack a source into shards, and publish them as a dataset; equal input gives equal bytes, whatever ``processes`` is.

    A job that was stopped or killed is resumed by a call with the same source and options: finished shards are kept.
    Samples from Python are packed again, unless their source has the same ``fingerprint``.

    Args:
        source: A folder of class folders with images (or of splits that hold class folders), a folder of loose files, a table
            (CSV, TSV, JSON lines, Parquet) or tars, local or on any fsspec file system; or an iterable of samples as
            `ShardWriter.write` takes them.
        dest: Folder, or pattern with ``{shard}``.
        kind: "images", "files", "table" or "tars"; by default guessed.
        name: Name of the dataset, kept in the manifest.
        max_samples: Maximum samples of a shard.
        max_bytes: Maximum size of a shard, e.g. "256MB". Shards are filled to 90 % where sizes are not known before: images that are
            encoded again, files that a table names, Parquet, tars.
        key: Template of the keys, e.g. "{index:08d}", "{class}/{stem}"; of a table also the name of a column. By default images
            are named by their stems, or, if two images of a dataset have one stem, by their paths without extension (docs/formats.md), loose
            files by their path up to the first dot, rows and samples by their number; tars keep their keys.
        shuffle: Pack in a random order: by default a folder of classes alone, which would be sorted by class otherwise.
        seed: Seed of the order and the splits.
        split: Name -> fraction, e.g. {"train": 0.9, "val": 0.1}: one dataset each, in a folder of that name under ``dest``. A source with
            folders train, val, … that hold the folders of classes has these splits.
        fields: For a table: field -> column, e.g. {"jpg": "path", "cls": "label"}; by default all columns go to ``json``.
        root: For a table: the folder that its paths are relative to; by default its own.
        allow: For a remote table: beginnings of URLs, such as "https://" or "s3://bucket/images", that it may name although they are not
            under ``root``. A local table may name anything that you can read.
        header: For CSV and TSV without names in their first line: the names of the columns, e.g. ["path", "caption"].
        classes: Class names in the order of their numbers, or the URL of a ``classes.json`` or of the folder of a packed
            dataset. By default the numbers of a split that is already packed in the same parent folder (``out/train`` for
            ``out/val``), else those of the sorted names. For a table: the names are in the column of the field ``cls``.
        max_side: Make larger images smaller: the longest side in pixels.
        quality: Quality of JPEG and WebP that are encoded again because of ``max_side`` or ``image_format``, 1 to 100; by default 90.
        image_format: Turn all images but masks into "jpg", "png" or "webp".
        masks: Fields whose pixels are numbers, which are never averaged: the nearest pixel is taken. By default those with a word
            such as mask, seg, label or depth before their last part, and a png if there is a jpg of the same name.
        scale_16_bits: Scale images of 9 to 16 bits to 8 bits, which "rgb8" and its like can decode; masks keep all bits.
        check: Decode all pixels of each image, as `verify` with ``decode=True``: a truncated one cannot be packed. By default its header is read.
        columns: Also write ``NAME.tar.cols.parquet`` with the key of each sample and these values (see `index`); no functions.
        processes: Processes that read and encode, by default 1; an executor has its own. They are used if there is something to encode or files are remote; local
            files that are packed unchanged are read in this process.
        executor: Pack shards as separate tasks, in processes, on a cluster or in `Parts`, which `merge` publishes (docs/jobs.md).
            The shards are those of a pack without an executor. Not for samples from Python.
        append: Add the shards to the dataset at ``dest``, as a new version; no shard that is there is written again. Fields and columns are those of
            the dataset, new classes get the next numbers, and keys that are running numbers begin with some digits of their own.
        check_keys: With ``append``: compare the keys with those of the dataset. The first append reads all of them, later ones 8 bytes a sample.
        overwrite: Replace an existing dataset, or an unfinished one of another job.
        on_error: For a file or row that cannot be packed: "raise", or "skip" it and report it.
        progress: Called about ten times a second.
        storage_options: ``storage_options`` of fsspec for the destination.
        source_options: The same for the source; by default those of the destination.

    Raises:
        OptionError: If an argument is wrong, or a dataset is there already.
        SourceError: If a file or row cannot be packed, or there is nothing to pack.
        ShardError: If a tar that is packed again is damaged.
        StorageError: If a place cannot be reached or is full, or another pack writes there; then no split is
            published. If a published split cannot be unpublished, a note of the error names it.
    """
    _check_options(processes, executor, on_error)
    limits = WriterOptions(max_samples=max_samples, max_bytes=parse_bytes(max_bytes), name=name)
    pixels: dict[str, Any] = {"check": check, "scale_16_bits": scale_16_bits}
    table: dict[str, Any] = {"fields": fields or {}, "root": root, "allow": _names(allow)}
    request = PackRequest(
        source=source,
        dest=dest,
        source_options=SourceOptions(kind=kind, key=key, header=_names(header), **table),
        limits=replace(limits, columns=checked_columns(columns, takes_functions=False)),
        shuffle=shuffle,
        seed=seed,
        split=split or {},
        classes=classes,
        images=replace(_image_options(max_side, quality, image_format, masks), **pixels),
        reading=storage_options if source_options is None else source_options,
        writing=storage_options,
        skips=on_error == "skip",
        appends=append,
        checks_keys=check_keys,
    )
    return run_pack(
        request, executor, processes=processes or 1, overwrite=overwrite, progress=progress
    )


def _check_options(processes: int | None, executor: Executor | None, on_error: str) -> None:
    if processes is not None and processes < 1:
        raise OptionError(f"processes must be 1 or more, not {processes}")
    if processes is not None and executor is not None:
        raise OptionError(
            f"processes={processes} has no effect with an executor; give it to the executor, as in LocalExecutor(processes={processes})"
        )
    if on_error not in ("raise", "skip"):
        raise OptionError(f"on_error is 'raise' or 'skip', not {on_error!r}")


def _image_options(
    max_side: int | None,
    quality: int | None,
    image_format: str | None,
    masks: Sequence[str] | None,
) -> ImageOptions:
    images = ImageOptions(
        max_side=max_side,
        quality=DEFAULT_QUALITY if quality is None else quality,
        format=image_format,
        masks=None if masks is None else _names(masks),
    )
    if quality is not None and images.changes_nothing:
        raise OptionError(
            f"quality={quality} (--quality) has no effect, since images are packed as they are; "
            "pass max_side (--max-side) or image_format (--image-format), too, or leave it out"
        )
    if quality is not None and image_format == "png":
        raise OptionError(
            f"quality={quality} (--quality) has no effect on png, which keeps all pixels; leave it out, or pass image_format='jpg' or 'webp' "
            "(--image-format jpg)"
        )
    return images


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
