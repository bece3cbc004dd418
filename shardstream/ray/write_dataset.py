"""Write a Ray dataset to shards: encode its blocks as they come, cut them by size, and write each shard in a task."""

from __future__ import annotations

import itertools
import os
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa
import ray
import ray.data
import ray.exceptions
from ray.data.block import BlockAccessor

from shardstream.errors import OptionError, SampleError, parse_bytes
from shardstream.format import END_OF_ARCHIVE
from shardstream.packing import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_SAMPLES,
    PackReport,
    PartJob,
    PartResult,
    PartWriter,
    ShardNames,
    WriterOptions,
    claim_destination,
    iter_cuts,
    run_jobs,
)
from shardstream.pipeline import check_at_least
from shardstream.ray.arrow_columns import EncodedRows, Sizes, encode_block, iter_fields
from shardstream.ray.executor import RayExecutor, raise_own_error
from shardstream.storage import absolute_url


def write(  # noqa: PLR0913  (public door)
    ds: ray.data.Dataset,
    dest: str | os.PathLike[str],
    *,
    max_samples: int = DEFAULT_MAX_SAMPLES,
    max_bytes: int | str = DEFAULT_MAX_BYTES,
    name: str = "",
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    concurrency: int | None = None,
) -> PackReport:
    """Write the rows of a Ray dataset to shards, in their order; equal rows give equal bytes.

    Each row is a sample, each column a field. ``__key__``, else ``key``, is the key, by default the number of the row
    ("00000000"); other columns like ``__this__`` are left out, and so is a null. Bytes are written as they are, other values
    are encoded by the last part of the column's name, as in `ShardWriter.write`.

    Shards are filled up to the limits, whatever the blocks of the dataset are, and each is a Ray task, which is run again if its
    worker dies. The dataset runs while shards are written: Ray's object store holds the blocks of ``concurrency`` shards and of the
    one that is filled, and Ray spills to disk what does not fit. A task has one block at a time in memory. ``index.json`` is written
    last. When the write ends with an error, or is killed, nothing is published: readers refuse the folder, and ``overwrite=True`` replaces
    what is there. The folder stays as it was until the first shard is full.

    To add the fields of the rows to the samples of a dataset, write the rows with ``__key__``, and write `shardstream.join` of both with
    `shardstream.reshard`.

    Args:
        ds: The dataset. It must not read from ``dest``.
        dest: Folder, or pattern with ``{shard}``.
        max_samples: Maximum samples of a shard.
        max_bytes: Maximum size of a shard, e.g. "256MB". A larger row gets a shard of its own.
        name: Name of the dataset, kept in the manifest.
        overwrite: Replace an existing dataset, or an unfinished one.
        storage_options: ``storage_options`` of fsspec for ``dest``; they travel with the tasks.
        concurrency: Shards that are written at the same time; by default the CPUs of the cluster.

    Returns:
        Counts.

    Raises:
        OptionError: If an argument is wrong, a dataset is in the destination already, or there are no rows.
        SampleError: If a row cannot be written; names the row (counted from 0), its key and the field.
        SourceError: If two rows have the same key.
        StorageError: If a place cannot be reached or is full, or another job writes there.
        RayError: If a function of the dataset raises; as Ray raises it.
    """
    limits = WriterOptions(max_samples=max_samples, max_bytes=parse_bytes(max_bytes), name=name)
    check_at_least(1, concurrency=concurrency)
    if not isinstance(ds, ray.data.Dataset):
        raise OptionError(
            f"write() takes a Ray dataset, not {type(ds).__name__}; see ss.ray.read and ray.data"
        )
    names, call = ShardNames.parse(absolute_url(dest)), uuid.uuid4().hex
    job = PartJob(
        kind="ray.write",
        title="rows of a Ray dataset",
        names=names,
        source=call,  # rows have no identity, so that a stopped job cannot be resumed
        options={"max_samples": limits.max_samples, "max_bytes": limits.max_bytes},
        limits=limits,
        storage_options=storage_options,
        call=call,
    )
    # Refuses before the dataset runs; nothing is changed.
    claim_destination(job.new_journal(), names, overwrite=overwrite)
    most = concurrency or max(1, int(ray.cluster_resources().get("CPU", 1)))
    with in_row_order(ds):
        works = _row_works(encoded_blocks(ds, most), limits)
        first = next(works, None)  # the folder stays as it is until then
        if first is None:
            raise OptionError("the dataset has no rows, so there is nothing to publish")
        return run_jobs(
            [replace(job, works=itertools.chain([first], works))],
            executor=RayExecutor(num_cpus=TASK_CPUS, in_flight=most),
            overwrite=overwrite,
            progress=None,
            samples=None,
        )


def _row_works(blocks: Iterable[RowsBlock], limits: WriterOptions) -> Iterator[RowsWork]:
    """Cut rows into shards as they come, and yield the work of each."""
    held: deque[RowsBlock] = deque()  # blocks with rows that no shard has yet

    def sizes() -> Iterator[Any]:
        for block in blocks:
            held.append(block)
            yield block.sizes

    room = limits.max_bytes - len(END_OF_ARCHIVE)
    cuts = iter_cuts(sizes(), limits.max_samples, room)
    for first, last in itertools.pairwise(cuts):
        if first == last:  # there are no rows
            return
        yield RowsWork(
            first_row=first,
            ranges=tuple(_ranges(held, first, last)),
        )
        while held and held[0].first_row + len(held[0].sizes) <= last:
            held.popleft()


def _ranges(blocks: Iterable[RowsBlock], first: int, last: int) -> Iterator[BlockRange]:
    """Yield where some rows of the dataset are."""
    for block in blocks:
        start = max(first - block.first_row, 0)
        stop = min(last - block.first_row, len(block.sizes))
        if start < stop:
            rows = block.rows
            yield BlockRange(rows.reference, rows.start + start, rows.start + stop)


# None: while a pool of actors holds all CPUs, these tasks must run, or the dataset would wait for them forever.
TASK_CPUS = 0


class RowsBlock(NamedTuple):
    """An encoded block of a dataset."""

    rows: BlockRange
    """Where its rows are."""
    first_row: int
    """Number of its first row in the dataset."""
    sizes: Sizes
    """Bytes of each row in a tar, shape (n,)."""


@contextmanager
def in_row_order(dataset: ray.data.Dataset) -> Iterator[None]:
    """Let Ray hand on the blocks of a dataset in the order of its rows."""
    options = dataset.context.execution_options
    before = options.preserve_order
    options.preserve_order = True
    try:
        yield
    finally:
        options.preserve_order = before


def encoded_blocks(dataset: ray.data.Dataset, in_flight: int) -> Iterator[RowsBlock]:
    """Yield the blocks of a dataset that have rows, in order, encoded to field bytes.

    The dataset runs as fast as blocks are taken; an error of its functions is passed on.

    Args:
        dataset: The dataset.
        in_flight: Maximum of blocks that are encoded ahead.

    Raises:
        SampleError: If a row cannot be written; names it.
    """
    encode = ray.remote(_encode).options(num_cpus=TASK_CPUS, num_returns=2).remote
    row = 0
    submitted = (
        (block, *encode(block.reference, block.start, block.stop))
        for block in _block_ranges(dataset)
    )
    for block, encoded, reference in _ahead(submitted, in_flight):
        summary: EncodedRows = _fetch(reference, f"encode the rows from {row} on")
        if summary.bad is not None:
            bad = summary.bad
            raise name_row(bad.error, row + bad.row, bad.key)
        count = len(summary.sizes)
        if not count:
            continue
        first = 0 if summary.is_changed else block.start
        yield RowsBlock(
            BlockRange(encoded if summary.is_changed else block.reference, first, first + count),
            row,
            summary.sizes,
        )
        row += count


def _ahead(items: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield items, while up to ``count`` more of them are taken from their iterator.

    >>> list(_ahead(range(5), 2))
    [0, 1, 2, 3, 4]
    """
    waiting: deque[Any] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def _fetch(reference: Any, name: str) -> Any:
    """Return the result of a Ray task; raise its error as it was raised there."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        raise_own_error(error, name)


def _block_ranges(dataset: ray.data.Dataset) -> Iterator[BlockRange]:
    bundles = dataset.iter_internal_ref_bundles()
    try:
        for bundle in bundles:
            for entry, part in zip(bundle.blocks, bundle.slices, strict=True):
                start, stop = (0, -1) if part is None else (part.start_offset, part.end_offset)
                yield BlockRange(entry.ref, start, stop)
    finally:
        del bundles  # stops what still runs


def _encode(block: Any, start: int, stop: int) -> tuple[pa.Table | None, EncodedRows]:
    """Encode the rows of a block, in a Ray worker; ``stop`` -1 is the end."""
    table = BlockAccessor.for_block(block).to_arrow()
    return encode_block(table.slice(start, None if stop < 0 else stop - start))


class BlockRange(NamedTuple):
    """Rows of a block in Ray's object store."""

    reference: Any
    start: int
    stop: int

    def load(self) -> pa.Table:
        """Return the rows; they stay in the object store."""
        table = BlockAccessor.for_block(ray.get(self.reference)).to_arrow()
        return table.slice(self.start, self.stop - self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsWork:
    """The work of one part of `write`: a shard of consecutive rows.

    Args:
        first_row: Number of its first row; rows without a column of keys are named by their number.
        ranges: Its rows, encoded.
    """

    first_row: int
    ranges: tuple[BlockRange, ...]

    def write(self, writer: PartWriter) -> PartResult:
        """Write the rows (see `PartWork.write`); one block is in memory at a time.

        Raises:
            SampleError: If a row would not read back equal, or its key is in the shard already.
        """
        for row, (key, fields) in enumerate(_loaded_rows(self.ranges), self.first_row):
            # A number may be the key of a row in another block: a union has blocks with keys and others without.
            try:
                writer.write(f"{row:08d}" if key is None else key, fields)
            except SampleError as error:
                raise name_row(error, row, key) from error
        return PartResult()


def name_row(error: SampleError, row: int, key: str | None) -> SampleError:
    """Return an error that names the row of a dataset, counted from 0, and its key."""
    return SampleError(
        error.what, remedy=error.remedy, shard=f"row {row}", key=key or error.key, field=error.field
    )


def _loaded_rows(
    ranges: tuple[BlockRange, ...],
) -> Iterator[tuple[str | None, dict[str, memoryview]]]:
    for number, block in enumerate(ranges):
        if number + 1 < len(ranges):  # starts the transfer of the next block to this node
            ray.wait([ranges[number + 1].reference], timeout=0, fetch_local=True)
        yield from iter_fields(block.load())
