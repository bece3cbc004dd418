"""Cut a dataset into row ranges, and read the rows of a range in a Ray worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from shardstream.distributed import Placement, WorkerInfo
from shardstream.errors import OptionError, plural
from shardstream.format import Rows, Sample
from shardstream.order import Ints, RankPartition
from shardstream.packing import cut_by_size
from shardstream.pipeline import (
    Context,
    IndexedSource,
    Pipeline,
    SequentialRun,
    SequentialSource,
    SkipTracker,
    default_partition,
    open_stages,
)
from shardstream.ray.arrow_columns import (
    KEY,
    column_names,
    joined_table,
    raw_schema,
    rows_table,
    value_bytes,
)
from shardstream.samples import Fetcher

BLOCK_BYTES = 8 << 20
_LOCATED_SAMPLES = 16_384  # found together in mapped shards
_TRANSFORM_SAMPLES = 32  # that pass the steps together, and so are in memory twice


def whole_order(source: IndexedSource, epoch: int) -> RankPartition:
    """Return the order of an epoch for one reader: each sample once, as ``list(dataset)`` returns them."""
    return default_partition(source, WorkerInfo(Placement()), epoch)


def sample_numbers(partition: RankPartition, start: int, stop: int) -> Ints:
    """Return the sample numbers of some rows of an order, shape (stop - start,)."""
    batch = partition.plan.order.batch
    steps = np.arange(start // batch, -(-stop // batch), dtype=np.int64)
    steps = steps[steps < partition.num_steps]
    first = start // batch * batch
    return np.concatenate(partition.samples(steps))[start - first : stop - first]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """Options that all read tasks of a dataset share.

    Args:
        epoch: Epoch number.
        columns: Columns of the tables; None takes those that the rows have.
        fields: Known fields of undecoded samples, in the order of the columns; None if they are unknown.
        is_raw: Whether no step changes the samples.
    """

    epoch: int
    columns: tuple[str, ...] | None
    fields: tuple[str, ...] | None
    is_raw: bool

    @property
    def all_columns(self) -> tuple[str, ...] | None:
        """Columns that every table has; None if they follow from the rows."""
        if self.columns is None and self.is_raw and self.fields is not None:
            return (KEY, *self.fields)
        return self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRows:
    """Read some rows of an order; picklable, pure, and small because it has only the shards of its rows.

    Args:
        pipeline: Source with these shards, and the steps.
        settings: Options of the dataset.
        start: First row.
        stop: Row after the last.
        group: Rows that are fetched together; ranges begin at multiples of it where that matters.
    """

    pipeline: Pipeline
    settings: RowSettings
    start: int
    stop: int
    group: int

    def read(self) -> Iterator[pa.Table]:
        """Yield the rows as tables of at most 8 MiB.

        Raises:
            ShardStreamError: If a sample is bad and ``on_error`` does not skip it, or the data changed since they were opened.
        """
        source = self.pipeline.source
        assert isinstance(source, IndexedSource)  # noqa: S101  (checked by `read`)
        partition = whole_order(source, self.settings.epoch)
        fetcher = source.samples.open_fetcher(self._groups(partition), source.fetch_options())
        with closing(fetcher):
            if self.settings.is_raw:
                yield from self._read_raw(source, fetcher, self._groups(partition))
            else:
                skips = SkipTracker(self.pipeline.on_error)
                yield from self._read_rows(source, fetcher, self._groups(partition), skips)
        source.samples.check_manifests()

    def _groups(self, partition: RankPartition) -> Iterator[Ints]:
        """Yield the sample numbers of the rows, in groups that are fetched together."""
        edges = [*range(self.start, self.stop, self.group), self.stop]
        return (sample_numbers(partition, first, last) for first, last in itertools.pairwise(edges))

    def _read_raw(
        self, source: IndexedSource, fetcher: Fetcher, groups: Iterable[Ints]
    ) -> Iterator[pa.Table]:
        """Build tables of field bytes without a dict for each sample, where samples have one form."""
        columns, skips = self.settings.all_columns, SkipTracker(self.pipeline.on_error)
        for group in groups:
            for first in range(0, len(group), _LOCATED_SAMPLES):
                numbers = group[first : first + _LOCATED_SAMPLES]
                located = fetcher.find(numbers)
                if located is None:
                    yield from self._read_rows(source, fetcher, [numbers], skips)
                    continue
                for taken in cut_by_bytes(located.sizes(columns), BLOCK_BYTES):
                    joined = located.join(taken, columns)
                    yield joined_table(joined, columns or (KEY, *joined.fields))

    def _read_rows(
        self,
        source: IndexedSource,
        fetcher: Fetcher,
        groups: Iterable[Ints],
        skips: SkipTracker,
    ) -> Iterator[pa.Table]:
        """Build tables of the samples after all steps."""
        blocks = _BlockBuilder(self.settings)
        with closing(self.pipeline.open_runner(self.settings.epoch, skips)) as runner:
            for group in groups:
                for numbers, samples in _read(source, fetcher, group):
                    for first in range(0, len(numbers), _TRANSFORM_SAMPLES):
                        part = slice(first, first + _TRANSFORM_SAMPLES)
                        items, _ = runner(samples[part], numbers[part])
                        yield from blocks.add(items)
        yield from blocks.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShards:
    """Read whole shards that have no index, from start to end.

    Args:
        pipeline: A sequential source, and the steps.
        settings: Options of the dataset.
        shards: Numbers of the shards.
    """

    pipeline: Pipeline
    settings: RowSettings
    shards: tuple[int, ...]

    def read(self) -> Iterator[pa.Table]:
        """Yield the rows as tables of at most 8 MiB.

        Raises:
            ShardStreamError: If a sample is bad and ``on_error`` does not skip it, or the data changed since they were opened.
        """
        source = self.pipeline.source
        assert isinstance(source, SequentialSource)  # noqa: S101  (checked by `read`)
        skips = SkipTracker(self.pipeline.on_error)
        context = Context(seed=source.seed, epoch=self.settings.epoch, skips=skips)
        blocks = _BlockBuilder(self.settings)
        shards = SequentialRun(source, list(self.shards), skips)
        with closing(open_stages(self.pipeline.stages, shards, context)) as run:
            for sample in run:
                yield from blocks.add([sample])
        yield from blocks.finish()


def _read(
    source: IndexedSource, fetcher: Fetcher, numbers: Ints
) -> Iterator[tuple[list[int], Rows]]:
    """Yield sample numbers and samples, at most 8 MiB of their tars at a time; an error stands for a damaged sample."""
    for taken in cut_by_bytes(source.samples.sizes(numbers), BLOCK_BYTES):
        yield numbers[taken].tolist(), fetcher.samples(numbers[taken])


class _BlockBuilder:
    """Collect rows, and build a table when they reach 8 MiB."""

    def __init__(self, settings: RowSettings) -> None:
        self._columns = settings.all_columns
        self._is_raw = settings.is_raw
        self._rows: list[Sample] = []
        self._bytes = 0
        self._never_seen = dict.fromkeys(self._columns or ())
        self._num_rows = 0

    def add(self, items: Iterable[Any]) -> Iterator[pa.Table]:
        """Add items; yield a table if they are enough.

        Raises:
            OptionError: If an item is not a dict.
            SampleError: If a column does not fit one Arrow type.
        """
        for item in items:
            if not isinstance(item, dict) or not all(isinstance(name, str) for name in item):
                raise OptionError(
                    f"a row of Ray is a dict of columns by name, but a step returns {type(item).__name__}",
                    remedy="leave out to_tuple(), or use rename(..., keep=False)",
                )
            self._rows.append(item)
            names = item if self._columns is None else self._columns
            self._bytes += sum([value_bytes(item[name]) for name in names if name in item])
            if self._bytes >= BLOCK_BYTES:
                yield self._flush()

    def finish(self) -> Iterator[pa.Table]:
        """Yield the table of the last rows.

        Raises:
            OptionError: If no row had one of the columns.
        """
        if self._rows:
            yield self._flush()
        if self._num_rows and self._never_seen and not self._is_raw:
            raise OptionError(
                f"none of the {plural(self._num_rows, 'row')} of this read task has a column {next(iter(self._never_seen))!r}",
                remedy="check fields=, and return None for it in .map() if few samples have it",
            )

    def _flush(self) -> pa.Table:
        rows, self._rows, self._bytes = self._rows, [], 0
        self._num_rows += len(rows)
        for name in list(self._never_seen):
            if any(name in row for row in rows):
                del self._never_seen[name]
        names = self._columns or column_names(rows)
        return rows_table(rows, names, raw_schema(names) if self._is_raw else None)


MAX_TASK_BYTES = 128 << 20
# one window, whose samples are in about 50 shards; they are pickled with the task
MAX_SHUFFLED_TASK_BYTES = 64 << 20
MIN_TASK_BYTES = 4 << 20
TASKS_PER_CPU = 4


class RowRange(NamedTuple):
    """Consecutive rows of a dataset, in the order in which it is read."""

    start: int
    """First row."""
    stop: int
    """Row after the last."""
    nbytes: int
    """Estimated bytes of the rows in their tars."""


def default_task_bytes(total_bytes: int, cpus: int, *, shuffle: bool) -> int:
    """Return the bytes of a read task: a quarter of the share of a CPU, from 4 to 128 MiB, or to 64 MiB if shuffled.

    >>> default_task_bytes(1 << 40, 64, shuffle=False) >> 20, default_task_bytes(1 << 40, 64, shuffle=True) >> 20
    (128, 64)
    >>> default_task_bytes(256 << 20, 2, shuffle=False) >> 20, default_task_bytes(1 << 20, 2, shuffle=False) >> 20
    (32, 4)
    """
    share = total_bytes // max(1, TASKS_PER_CPU * cpus)
    most = MAX_SHUFFLED_TASK_BYTES if shuffle else MAX_TASK_BYTES
    return max(MIN_TASK_BYTES, min(most, share))


def count_tasks(num_rows: int, total_bytes: int, task_bytes: int) -> int:
    """Return the number of read tasks: at least one, at most one for each row.

    >>> count_tasks(1000, 100 << 20, 32 << 20), count_tasks(2, 100 << 20, 32 << 20)
    (4, 2)
    """
    return max(1, min(num_rows, -(-total_bytes // task_bytes)))


def cut_rows(
    rows: Sequence[int], nbytes: Sequence[int], num_tasks: int, unit: int = 1
) -> list[RowRange]:
    """Cut rows into ranges of about equal bytes; together they are all rows, each once.

    Args:
        rows: Number of rows of each part of the dataset (a shard, or all of it), in order.
        nbytes: Bytes of each part.
        num_tasks: Number of ranges; fewer if there are fewer units.
        unit: Ranges begin at multiples of it, because rows in it are read together.

    >>> cut_rows([10, 10], [1000, 3000], 2)
    [RowRange(start=0, stop=13, nbytes=1900), RowRange(start=13, stop=20, nbytes=2100)]
    """
    row_edges = np.concatenate(([0], np.cumsum(rows, dtype=np.int64)))
    byte_edges = np.concatenate(([0], np.cumsum(nbytes, dtype=np.int64))).astype(np.float64)
    num_rows = int(row_edges[-1])
    if not num_rows:
        return []
    if byte_edges[-1] == 0:
        byte_edges = row_edges.astype(np.float64)
    targets = np.linspace(0.0, byte_edges[-1], num_tasks + 1)[1:-1]
    cuts = np.rint(np.interp(targets, byte_edges, row_edges) / unit).astype(np.int64) * unit
    cuts = np.unique(np.concatenate(([0], cuts[cuts < num_rows], [num_rows])))
    at = np.rint(np.interp(cuts, row_edges, byte_edges)).astype(np.int64).tolist()
    edges = cuts.tolist()
    return [RowRange(edges[n], edges[n + 1], at[n + 1] - at[n]) for n in range(len(edges) - 1)]


def cut_by_bytes(sizes: Ints, max_bytes: int) -> list[slice]:
    """Cut consecutive rows into slices of at most ``max_bytes``; a larger row is a slice of its own.

    Args:
        sizes: Bytes of each row, shape (n,).
        max_bytes: Limit of a slice with more than one row.

    >>> cut_by_bytes(np.array([3, 3, 3, 9, 1]), 6)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    cuts = cut_by_size([sizes], max(1, len(sizes)), max_bytes).tolist()
    return [slice(first, last) for first, last in itertools.pairwise(cuts) if first < last]
