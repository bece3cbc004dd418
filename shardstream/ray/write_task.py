"""Write one shard from the rows of Ray blocks, in a Ray worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from ray.data.block import BlockAccessor

from shardstream.errors import SampleError
from shardstream.packing import (
    PartResult,
    PartWriter,
    encode_hashes,
    hash_keys,
)
from shardstream.ray.field_columns import iter_fields


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
        keys = list[str]()
        for row, (key, fields) in enumerate(_loaded_rows(self.ranges), self.first_row):
            # A number may be the key of a row in another block: a union has blocks with keys and others without.
            keys.append(f"{row:08d}" if key is None else key)
            try:
                writer.write(keys[-1], fields)
            except SampleError as error:
                raise name_row(error, row, key) from error
        return PartResult(key_hashes=encode_hashes(hash_keys(keys)))


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
