"""Open a dataset with Ray Data: a Datasource whose read tasks are row ranges, and the collation of its batches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
import torch
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.data.collate_fn import NumpyBatchCollateFn
from ray.data.context import DEFAULT_TARGET_MAX_BLOCK_SIZE

from shardstream.catalog import ShardCatalog
from shardstream.distributed import Placement, WorkerInfo
from shardstream.errors import OptionError, parse_bytes
from shardstream.loader import (
    ShardDataset,
    StreamDataset,
    refuse_own_iteration,
    refuse_placement,
)
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
    numbered_source,
)
from shardstream.ray.arrow_columns import KEY, URL, raw_schema
from shardstream.ray.read_task import (
    BLOCK_BYTES,
    ReadRows,
    ReadShards,
    RowRange,
    RowSettings,
    count_tasks,
    cut_rows,
    default_task_bytes,
    sample_numbers,
    whole_order,
)
from shardstream.storage import Urls

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
    is_raw = not pipeline.stages and (
        source.samples.has_bytes
        if isinstance(source, SamplesSource)
        else isinstance(source, SequentialSource)
    )
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
    refuse_own_iteration(urls_or_dataset)
    refuse_placement(
        urls_or_dataset,
        "read() returns the samples of all ranks, but the dataset has placement=; leave it out, and split the Ray dataset with "
        "streaming_split()",
    )
    return urls_or_dataset


def _check_steps(pipeline: Pipeline) -> None:
    """Check that the steps can run in independent tasks.

    Raises:
        OptionError: If one changes the number or order of items, or returns tuples; or the dataset grows while it is read.
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
    if not isinstance(source, SequentialSource):
        numbered_source(source)


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


_SENT_SHARDS = 16  # up to this number a task gets all shards, and no numbers are computed for it
_WINDOW_LIMIT_BYTES = 256 << 20  # larger windows are cut, and fetched in parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadJob:
    """A dataset, and how it is cut into read tasks.

    Args:
        pipeline: Source and steps.
        settings: Options of the rows.
        task_bytes: Bytes of the tars that a task reads.
        num_tasks: Number of tasks, instead of ``task_bytes``; may be less if there are fewer rows.
    """

    pipeline: Pipeline
    settings: RowSettings
    task_bytes: int
    num_tasks: int | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all tars; 0 if they are unknown."""
        source = self.pipeline.source
        if isinstance(source, IndexedSource):
            return source.samples.total_bytes
        assert isinstance(source, SequentialSource)  # noqa: S101  (checked by `read`)
        return sum([shard.filesize or 0 for shard in source.shards])

    def tasks(
        self, row_limit: int | None = None
    ) -> Iterator[tuple[ReadRows | ReadShards, BlockMetadata]]:
        """Yield the read tasks in the order of the rows, each with the counts that Ray plans with.

        Args:
            row_limit: Rows of which no task needs more.
        """
        source = self.pipeline.source
        if not isinstance(source, IndexedSource):
            yield from self._shard_tasks()
            return
        is_exact = not self.pipeline.may_leave_out
        unit, group = self._units(source)
        for rows in self._ranges(source, unit):
            stop = rows.stop
            if row_limit is not None and is_exact:  # else samples in between may be left out
                stop = min(stop, rows.start + row_limit)
            task = ReadRows(
                pipeline=self._part(source, rows.start, stop),
                settings=self.settings,
                start=rows.start,
                stop=stop,
                group=group,
            )
            share = (stop - rows.start) / (rows.stop - rows.start)
            yield (
                task,
                _metadata(
                    stop - rows.start if is_exact else None,
                    int(rows.nbytes * share) if self.settings.is_raw else None,
                ),
            )

    def _units(self, source: IndexedSource) -> tuple[int, int]:
        """Return the rows at whose multiples tasks begin, and the rows that are fetched together."""
        samples, order = source.samples, whole_order(source, self.settings.epoch).plan.order
        mean_bytes = max(1, samples.total_bytes // max(1, len(samples)))
        window = order.window * (order.lanes if order.shuffle else 1)
        fits = window * mean_bytes <= _WINDOW_LIMIT_BYTES
        group = window if fits else max(1, _WINDOW_LIMIT_BYTES // mean_bytes)
        # Neighbouring samples share a request only if their whole window is fetched together.
        is_cut = order.shuffle and samples.has_costly_windows and fits
        return (window if is_cut and self.num_tasks is None else 1), group

    def _ranges(self, source: IndexedSource, unit: int) -> list[RowRange]:
        samples = source.samples
        num_rows = whole_order(source, self.settings.epoch).num_samples
        rows, nbytes = [num_rows], [samples.total_bytes]
        if isinstance(samples, ShardCatalog) and not source.shuffle:
            rows = [shard.nsamples or 0 for shard in samples.shards]
            nbytes = [shard.filesize or 0 for shard in samples.shards]
        num_tasks = self.num_tasks or count_tasks(num_rows, sum(nbytes), self.task_bytes)
        return cut_rows(rows, nbytes, min(num_tasks, max(1, num_rows)), unit)

    def _part(self, source: IndexedSource, start: int, stop: int) -> Pipeline:
        """Return the pipeline with the shards of some rows, or with few shards."""
        samples = source.samples
        if samples.num_shards <= _SENT_SHARDS:
            return self.pipeline
        numbers = sample_numbers(whole_order(source, self.settings.epoch), start, stop)
        return replace(self.pipeline, source=source.restrict_to(numbers))

    def _shard_tasks(self) -> Iterator[tuple[ReadShards, BlockMetadata]]:
        source = self.pipeline.source
        assert isinstance(source, SequentialSource)  # noqa: S101  (checked by `read`)
        sizes = [shard.filesize or 0 for shard in source.shards]
        num_tasks = self.num_tasks or count_tasks(len(sizes), sum(sizes), self.task_bytes)
        for part in cut_rows([1] * len(sizes), sizes, num_tasks):
            task = ReadShards(
                pipeline=self.pipeline,
                settings=self.settings,
                shards=tuple(range(part.start, part.stop)),
            )
            yield task, _metadata(None, None)


class ShardDatasource(Datasource):  # type: ignore[misc]  # Ray is not typed here
    """Rows of a dataset for Ray Data.

    Args:
        job: The dataset and its tasks.
    """

    def __init__(self, job: ReadJob) -> None:
        super().__init__()
        self._job = job
        self._projection_map: dict[str, str] | None = None
        self._kept: dict[tuple[Any, ...], list[ReadTask]] = {}

    def get_name(self) -> str:
        """Return the name of the read tasks."""
        return "Shards"

    def estimate_inmemory_data_size(self) -> int | None:
        """Return the bytes of the rows; None if steps change them."""
        return self._job.total_bytes or None if self._job.settings.is_raw else None

    def supports_projection_pushdown(self) -> bool:
        """Return whether ``select_columns`` reads these columns only: not if bad samples are skipped, which depends on what is decoded."""
        return self._job.settings.is_raw or self._job.pipeline.on_error == "raise"

    @property
    def supports_distributed_reads(self) -> bool:
        """Whether tasks run on all nodes; local shards must lie on a file system that all nodes share."""
        return True

    def get_read_tasks(
        self,
        parallelism: int,  # noqa: ARG002  (decided in `read`, which passes it to Ray)
        per_task_row_limit: int | None = None,
        data_context: object = None,  # noqa: ARG002
    ) -> list[ReadTask]:
        """Return the read tasks in the order of the rows; Ray asks several times."""
        # A table without columns would lose its rows.
        columns = None if self._projection_map is None else tuple(self._projection_map) or (KEY,)
        known = self._kept.get((columns, per_task_row_limit))
        if known is None:
            job = self._job if columns is None else select_columns(self._job, columns)
            schema = _schema_of(job.settings)
            known = [
                ReadTask(task.read, metadata, schema, per_task_row_limit)
                for task, metadata in job.tasks(per_task_row_limit)
            ]
            self._kept = {(columns, per_task_row_limit): known}
        return known


def select_columns(job: ReadJob, columns: Sequence[str]) -> ReadJob:
    """Return a job that reads some columns; fields that are not among them are not decoded."""
    stages = job.pipeline.stages
    if all(isinstance(stage, Decode | KeepFields) for stage in stages):
        stages = tuple(_decode_only(stage, columns) for stage in stages)
    pipeline = replace(job.pipeline, stages=stages, steps=job.pipeline.steps)
    return replace(job, pipeline=pipeline, settings=replace(job.settings, columns=tuple(columns)))


def _decode_only(stage: Any, columns: Iterable[str]) -> Any:
    if isinstance(stage, KeepFields):
        return stage
    wanted = frozenset(columns)
    return replace(stage, only=wanted if stage.only is None else stage.only & wanted)


def _schema_of(settings: RowSettings) -> pa.Schema | None:
    columns = settings.all_columns
    return raw_schema(columns) if settings.is_raw and columns is not None else None


def _metadata(num_rows: int | None, size_bytes: int | None) -> BlockMetadata:
    return BlockMetadata(
        num_rows=num_rows, size_bytes=size_bytes, input_files=None, exec_stats=None
    )


_NUMBERS = "biufc"


class Collate(NumpyBatchCollateFn):  # type: ignore[misc]  # Ray is not typed here
    """Collate a batch for ``iter_torch_batches``: numbers become tensors, all else lists.

    Columns of numbers, and tensors of one shape, become a tensor of shape (B, ...) with the dtype of the column. Tensors of different
    shapes become a list of tensors. Text, bytes, structs and columns with null become lists, where Ray's own function fails
    (``can't convert np.ndarray of type numpy.str_``). Picklable and thread-safe.

    Ray moves a batch to the ``device`` of ``iter_torch_batches`` only if it has nothing but tensors; pass the device here for batches with
    text.

    Args:
        dtypes: dtype of all floating-point and integer tensors, or of single columns by name; None keeps those of the columns.
        device: Device of the tensors, e.g. "cuda"; None leaves them on the CPU.

    Raises:
        OptionError: When it is called, if ``dtypes`` names a column that the batch lacks, or that is not numeric.
    """

    def __init__(
        self,
        dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dtypes = dict(dtypes) if isinstance(dtypes, Mapping) else dtypes
        self.device = device

    def __call__(self, batch: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Return the columns of a batch as tensors or lists."""
        collated = {name: self._column(name, column) for name, column in batch.items()}
        if isinstance(self.dtypes, dict):
            for name in self.dtypes:
                if name not in collated:
                    raise OptionError(
                        f"dtypes names {name!r}, but the columns are {', '.join(collated)}"
                    )
                if isinstance(collated[name], list) and not _are_tensors(collated[name]):
                    raise OptionError(f"dtypes names {name!r}, which is not a column of numbers")
        return collated

    def _column(self, name: str, column: np.ndarray[Any, Any]) -> Any:
        dtype = self.dtypes.get(name) if isinstance(self.dtypes, dict) else self.dtypes
        if column.dtype.kind in _NUMBERS:
            return self._tensor(column, dtype)
        values = column.tolist() if column.dtype.kind != "O" else list(column)
        if values and all(isinstance(v, np.ndarray) and v.dtype.kind in _NUMBERS for v in values):
            return [self._tensor(value, dtype) for value in values]
        return values

    def _tensor(self, array: np.ndarray[Any, Any], dtype: torch.dtype | None) -> torch.Tensor:
        if not array.flags.writeable:  # a view of a block, which torch must not write to
            array = array.copy()
        tensor = torch.as_tensor(array)
        if isinstance(self.dtypes, torch.dtype) and tensor.dtype == torch.bool:
            dtype = None
        return tensor.to(device=self.device, dtype=dtype or tensor.dtype)


def _are_tensors(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)
