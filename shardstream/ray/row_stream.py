"""Run a Ray dataset, and encode its blocks as they come, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa
import ray
import ray.data
import ray.exceptions
from ray.data.block import BlockAccessor

from shardstream.ray.executor import raise_own_error
from shardstream.ray.field_columns import BadRow, Sizes, encode_block
from shardstream.ray.write_task import BlockRange, name_row

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


class _Summary(NamedTuple):
    """What the driver gets to know about a block."""

    is_encoded: bool
    sizes: Sizes
    bad: BadRow | None


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
        summary: _Summary = _fetch(reference, f"encode the rows from {row} on")
        if summary.bad is not None:
            bad = summary.bad
            raise name_row(bad.error, row + bad.row, bad.key)
        count = len(summary.sizes)
        if not count:
            continue
        first = 0 if summary.is_encoded else block.start
        yield RowsBlock(
            BlockRange(encoded if summary.is_encoded else block.reference, first, first + count),
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


def _encode(block: Any, start: int, stop: int) -> tuple[pa.Table | None, _Summary]:
    """Encode the rows of a block, in a Ray worker; ``stop`` -1 is the end."""
    table = BlockAccessor.for_block(block).to_arrow()
    table = table.slice(start, None if stop < 0 else stop - start)
    found = encode_block(table)
    summary = _Summary(
        is_encoded=found.table is not None,
        sizes=found.sizes,
        bad=found.bad,
    )
    return found.table, summary
