"""Open a dataset with Ray Data."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import ray.data
from ray.data.context import DEFAULT_TARGET_MAX_BLOCK_SIZE

from shardstream.distributed import Placement, WorkerInfo
from shardstream.errors import OptionError
from shardstream.loader import ShardDataset, StreamDataset, refuse_placement
from shardstream.pipeline import (
    Context,
    Decode,
    IndexedSource,
    ItemStage,
    KeepFields,
    MapTuple,
    Pipeline,
    SamplesSource,
    SequentialSource,
    Shuffle,
    ToTuple,
    check_at_least,
    check_epoch,
    check_fields,
)
from shardstream.ray.arrow_columns import KEY, URL
from shardstream.ray.datasource import ReadJob, ShardDatasource, select_columns
from shardstream.ray.read_plan import default_task_bytes
from shardstream.ray.read_task import BLOCK_BYTES, RowSettings
from shardstream.storage import Urls, parse_bytes

_RAY_OPTIONS = (
    "concurrency",
    "compute",
    "memory",
    "num_cpus",
    "num_gpus",
    "override_num_blocks",
    "ray_remote_args",
    "resources",
    "runtime_env",
)


def read(
    urls_or_dataset: Urls | StreamDataset,
    *,
    fields: Sequence[str] | None = None,
    epoch: int = 0,
    task_bytes: int | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **read_options: Any,
) -> ray.data.Dataset:
    """Return the samples of a dataset as a Ray dataset, one row for each sample.

    The columns are ``__key__`` and one for each field: undecoded fields are binary. The steps of a dataset run in the read tasks,
    and then text is string, whole numbers are int64, fractions double; arrays, tensors and images are tensors, JSON objects
    structs. A field that a sample lacks is null. Counts and, of undecoded fields, the schema come from the manifest, so
    ``count()`` reads no shard.

    Each sample comes exactly once. Rows are in the order of the dataset; with ``shuffle=True`` in the order of ``epoch``, which
    is that of ``list(dataset)``. Ray hands on the blocks of the task that ends first, unless
    ``ray.data.DataContext.get_current().execution_options.preserve_order`` is set. Tasks are pure, so Ray may repeat them.

    Args:
        urls_or_dataset: A `ShardDataset`, `ObjectDataset`, `CatalogDataset` or mix with its steps; or URLs as in `ShardDataset`.
        fields: Columns to return besides ``__key__``, e.g. ``["jpg", "cls"]``; others are not decoded. None returns all.
        epoch: Epoch number, for the order and for ``map(rng=True)``.
        task_bytes: Bytes of the tars that a read task reads, e.g. "64MB"; by default a quarter of the share of a CPU, from 4 to
            128 MiB, or 64 MiB if they are shuffled. A task yields blocks of at most 8 MiB.
        storage_options: For fsspec, if URLs are given.
        read_options: Options of `ShardDataset`, if URLs are given (``shuffle``, ``seed``, ``on_error``, ``read``, ...). And those of
            ``ray.data.read_datasource``: ``concurrency``, ``num_cpus``, ``memory``, ``ray_remote_args``, ``override_num_blocks``, ...

    Raises:
        OptionError: If an argument is invalid, there is no such field, or a step of the dataset changes the number of its items.
        StorageError: If the dataset is not found or cannot be read.
        ManifestError: If the manifest is invalid.
    """
    ray_options = {name: read_options.pop(name) for name in _RAY_OPTIONS if name in read_options}
    dataset = _open(urls_or_dataset, storage_options, read_options)
    job = plan_read(
        dataset,
        fields=fields,
        epoch=epoch,
        task_bytes=None if task_bytes is None else parse_bytes(task_bytes),
        num_tasks=ray_options.pop("override_num_blocks", None),
    )
    if not ray.is_initialized():
        ray.init()
    if task_bytes is None:
        cpus = int(ray.cluster_resources().get("CPU", 1))
        shuffle = job.pipeline.source.shuffle
        size = default_task_bytes(job.total_bytes, cpus, shuffle=shuffle)
        job = replace(job, task_bytes=size)
    source = ShardDatasource(job)
    # Ray would cut the blocks of each task into pieces if it expected another number of tasks.
    num_tasks = max(1, len(source.get_read_tasks(-1)))
    rows = ray.data.read_datasource(source, override_num_blocks=num_tasks, **ray_options)
    if rows.context.target_max_block_size == DEFAULT_TARGET_MAX_BLOCK_SIZE:
        # Ray would join our blocks to 128 MiB: the first batch comes after 0.5 s instead of 0.1, and 1 GB is not read faster.
        rows.context.target_max_block_size = BLOCK_BYTES
    return rows


def plan_read(
    dataset: StreamDataset,
    *,
    fields: Sequence[str] | None = None,
    epoch: int = 0,
    task_bytes: int | None = None,
    num_tasks: int | None = None,
) -> ReadJob:
    """Return the read tasks of a dataset; needs no cluster.

    Args:
        dataset: A dataset whose steps return one dict for each sample.
        fields: As in `read`.
        epoch: As in `read`.
        task_bytes: Bytes of the tars that a task reads; by default the most that `read` chooses.
        num_tasks: Number of tasks, instead of ``task_bytes``.

    Raises:
        OptionError: As in `read`.
    """
    pipeline = dataset.pipeline
    _check_steps(pipeline)
    check_at_least(1, override_num_blocks=num_tasks)
    source = pipeline.source
    known = source.samples.fields if isinstance(source, IndexedSource) else None
    # The parts of a mix may have steps of their own.
    is_raw = not pipeline.stages and isinstance(source, SamplesSource | SequentialSource)
    settings = RowSettings(epoch=check_epoch(epoch), columns=None, fields=known, is_raw=is_raw)
    job = ReadJob(
        pipeline=pipeline,
        settings=settings,
        task_bytes=task_bytes
        or default_task_bytes(sys.maxsize, 1, shuffle=pipeline.source.shuffle),
        num_tasks=num_tasks,
    )
    return job if fields is None else select_columns(job, _checked_columns(fields, pipeline, known))


def _open(
    urls_or_dataset: Urls | StreamDataset,
    storage_options: Mapping[str, Any] | None,
    read_options: Mapping[str, Any],
) -> StreamDataset:
    """Return the dataset of the caller, or open its URLs."""
    if not isinstance(urls_or_dataset, StreamDataset):
        if hasattr(urls_or_dataset, "__getitems__"):
            raise OptionError(
                f"{type(urls_or_dataset).__name__} reads single samples by number; pass the dataset without by_number()"
            )
        return ShardDataset(urls_or_dataset, storage_options=storage_options, **read_options)
    given = [*read_options, *(["storage_options"] if storage_options is not None else [])]
    if given:
        raise OptionError(
            f"{', '.join(given)} must be given to {type(urls_or_dataset).__name__}(...), not to read()"
        )
    refuse_placement(
        urls_or_dataset,
        "read() returns the samples of all ranks, but the dataset has placement=; leave it out, and split the Ray dataset with "
        "streaming_split()",
    )
    return urls_or_dataset


def _check_steps(pipeline: Pipeline) -> None:
    """Check that the steps can run in independent tasks.

    Raises:
        OptionError: If one changes the number or order of items, or returns tuples.
    """
    source = pipeline.source
    for step, stage in zip(pipeline.steps, pipeline.stages, strict=True):
        name = step.partition("(")[0]
        if isinstance(stage, Shuffle) and isinstance(source, SequentialSource):
            raise OptionError(
                "shards without an index cannot be shuffled here; run 'shardstream index' on them, or leave out shuffle= and call "
                "random_shuffle() on the Ray dataset",
                shard=source.shards[0].url,
            )
        if not isinstance(stage, ItemStage):
            raise OptionError(
                f"the step {name} changes the number or the order of items, so it cannot run in independent read tasks; leave it out, "
                "and use map_batches(), flat_map(), limit() or random_shuffle() of the Ray dataset"
            )
        if isinstance(stage, ToTuple | MapTuple):
            raise OptionError(
                f"the step {name} returns tuples, but a row of Ray is a dict; leave it out, or use rename(..., keep=False)"
            )
    if not isinstance(source, IndexedSource | SequentialSource):
        raise OptionError(
            "a mix with a part that has no index, or with a step that changes the number of items, cannot be read by rows; run "
            "'shardstream index' on its parts, or mix Ray datasets"
        )


def _checked_columns(
    fields: Sequence[str], pipeline: Pipeline, known: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Return the columns for some fields, with the key.

    Raises:
        OptionError: If it is known that there is no such field; names those that there are.
    """
    where, kept = "the dataset", pipeline.kept_fields
    if not all(isinstance(stage, Decode | KeepFields) for stage in pipeline.stages):
        known = None  # a step may rename fields
    elif kept is not None:
        known = kept.possible
    elif known is None:
        known = _fields_of_first(pipeline)
        where = "the first sample (run 'shardstream index' to list the fields of all samples)"
    check_fields(fields, known, where, alternatives=False)
    return tuple(dict.fromkeys((KEY, *fields)))


def _fields_of_first(pipeline: Pipeline) -> tuple[str, ...]:
    """Return the fields of the first sample, because no manifest lists those of all."""
    source, first = pipeline.source, dict[str, object]()
    if isinstance(source, SamplesSource) and len(source.samples):
        with closing(source.samples.open_fetcher()) as fetcher:
            (found,) = fetcher.samples(np.zeros(1, dtype=np.int64))
        if isinstance(found, Exception):
            raise found
        first = found
    elif not isinstance(source, IndexedSource) or len(source.samples):
        with closing(source.open(WorkerInfo(Placement()), Context())) as run:
            first = next(iter(run), {})
    return tuple(name for name in first if name not in (KEY, URL))
