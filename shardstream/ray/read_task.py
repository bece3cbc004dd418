"""Read the rows of a range in a Ray worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from shardstream.distributed import Placement, WorkerInfo
from shardstream.errors import OptionError, plural
from shardstream.format import Rows, Sample
from shardstream.order import Ints, RankPartition
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
from shardstream.ray.read_plan import cut_by_bytes
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
