"""Join the samples of several datasets to one sample each (``ss.join``)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardstream.catalog import Classes, ClassNames
from shardstream.errors import OptionError, plural
from shardstream.loader.dataset import ShardDataset, StreamDataset
from shardstream.loader.earlier_versions import Versions
from shardstream.pipeline import SamplesSource, numbered_source
from shardstream.samples import (
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


def join(
    first: StreamDataset | str | os.PathLike[str],
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
        first: The dataset that decides, without steps; or its URL.
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
    if not isinstance(first, StreamDataset):
        first = ShardDataset(_url_of(first), storage_options=storage_options)
    source = _source_of(first, is_first=True)
    opened = [_open(other, storage_options) for other in others]
    parts = [part for part, _ in opened]
    samples = join_samples(source.samples, parts, by, missing)
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
        return join(made, *rest, by=by, missing=missing, storage_options=storage_options)

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
    if dataset.pipeline.stages and not dataset.pipeline.num_steps:
        raise OptionError(
            "a dataset with fields= or lazy= cannot be joined; leave them out, and give fields of the others as {url: [field, ...]}, or "
            "choose fields after the join with rename(..., keep=False)"
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


def _open(
    other: OtherDataset, storage_options: Mapping[str, Any] | None
) -> tuple[JoinPart, StreamDataset | None]:
    """Return the samples of another dataset, and the dataset; None for a table."""
    fields: Sequence[str] | Mapping[str, str] | None = None
    if isinstance(other, Mapping):
        if len(other) != 1 or any(isinstance(one, str) for one in other.values()):
            raise OptionError(
                f"give each dataset with fields as {{url: [field, ...]}}, not {dict(other)!r}"
            )
        [(other, fields)] = other.items()
    if isinstance(other, StreamDataset):
        return open_part(_source_of(other).samples, fields), other
    url = _url_of(other)
    from shardstream.packing import is_table, open_joined_table  # noqa: PLC0415  (0.1 s, for a join only)

    if is_table(url):
        columns = fields if isinstance(fields, Mapping) else {one: one for one in fields or ()}
        table = open_joined_table([url], columns, Storage(storage_options))
        return open_part(table, table.fields), None
    dataset = ShardDataset(url, storage_options=storage_options)
    return open_part(_source_of(dataset).samples, fields), dataset
