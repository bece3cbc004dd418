"""A Ray Datasource whose read tasks are row ranges of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from shardstream.catalog import ShardCatalog
from shardstream.pipeline import Decode, IndexedSource, KeepFields, Pipeline, SequentialSource
from shardstream.ray.arrow_columns import KEY, raw_schema
from shardstream.ray.read_plan import RowRange, count_tasks, cut_rows
from shardstream.ray.read_task import (
    ReadRows,
    ReadShards,
    RowSettings,
    sample_numbers,
    whole_order,
)

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
