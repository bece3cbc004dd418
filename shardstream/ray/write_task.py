"""Write one shard from the rows of Ray blocks, in a Ray worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
from ray.data.block import BlockAccessor

from shardstream.catalog import ShardCatalog
from shardstream.errors import SampleError
from shardstream.fetch import open_fetcher
from shardstream.packing import (
    PartResult,
    PartWriter,
    ShardNames,
    WriterOptions,
    encode_hashes,
    hash_keys,
)
from shardstream.ray.arrow_columns import KEY
from shardstream.ray.field_columns import iter_fields
from shardstream.ray.read_plan import Ints
from shardstream.ray.read_task import ReadRows
from shardstream.storage import OutputFolder

_PREFETCH_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20  # of samples in memory as Python objects
_CHUNK_SAMPLES = 4096


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
        number: Number of the shard.
        first_row: Number of its first row; rows without a column of keys are named by their number.
        ranges: Its rows, encoded.
        template: Name of a shard.
        limits: Maximum samples and bytes of a shard.
    """

    number: int
    first_row: int
    ranges: tuple[BlockRange, ...]
    template: str
    limits: WriterOptions

    def write(self, folder: OutputFolder, check_owner: Callable[[], None]) -> PartResult:
        """Write the rows (see `PartWork.write`); one block is in memory at a time.

        Raises:
            SampleError: If a row would not read back equal, or its key is in the shard already.
        """
        names = ShardNames(folder=folder.url, template=self.template)
        row, keys = self.first_row, list[str]()
        name = partial(names.name, self.number)
        with closing(PartWriter(folder, self.limits, name=name, check_owner=check_owner)) as writer:
            for key, fields in _loaded_rows(self.ranges):
                try:
                    writer.write(f"{row:08d}" if key is None else key, fields)
                except SampleError as error:
                    raise name_row(error, row, key) from error
                row += 1
                if key is not None:  # numbers of rows all differ
                    keys.append(key)
            writer.finish()
        hashes = encode_hashes(hash_keys(keys))
        return PartResult(shards=tuple(writer.shards), fields=writer.fields, key_hashes=hashes)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinWork:
    """The work of one part of `write` with ``join``: a shard of consecutive samples, each with the fields of its row.

    Args:
        number: Number of the shard.
        catalog: The shards of the samples.
        first: Number of the first sample.
        last: Number after the last.
        blocks: Encoded blocks that hold the rows.
        block_of: Place in ``blocks`` for each sample, shape (last - first,).
        row_of: Row in that block for each sample, of the same shape.
        template: Name of a shard.
        limits: Maximum samples and bytes of a shard.
    """

    number: int
    catalog: ShardCatalog
    first: int
    last: int
    blocks: tuple[BlockRange, ...]
    block_of: Ints
    row_of: Ints
    template: str
    limits: WriterOptions

    def write(self, folder: OutputFolder, check_owner: Callable[[], None]) -> PartResult:
        """Read the samples, add the fields of their rows and write them (see `PartWork.write`).

        Raises:
            ShardError: If a sample is damaged.
            SampleError: If a sample has a field of its row already.
            ChangedError: If the samples have changed since the job was planned.
        """
        names = ShardNames(folder=folder.url, template=self.template)
        added = self._added_fields()
        name = partial(names.name, self.number)
        with closing(PartWriter(folder, self.limits, name=name, check_owner=check_owner)) as writer:
            for sample, fields in zip(self._samples(), added, strict=True):
                key = sample["__key__"]
                own = {name: data for name, data in sample.items() if not name.startswith("__")}
                both = sorted(own.keys() & fields.keys())
                if both:
                    raise SampleError(
                        "the sample has this field already",
                        remedy=f"drop the column with drop_columns([{both[0]!r}]), or rename it",
                        shard=sample["__url__"],
                        key=key,
                        field=both[0],
                    )
                writer.write(key, own | fields)
            self.catalog.check_manifests()
            writer.finish()
        return PartResult(shards=tuple(writer.shards), fields=writer.fields)

    def _added_fields(self) -> list[dict[str, memoryview]]:
        """Return the new fields of each sample, taken from one block after the other."""
        added: list[dict[str, memoryview]] = [{}] * len(self.block_of)
        for number, block in enumerate(self.blocks):
            places = np.flatnonzero(self.block_of == number)
            table = block.load().take(pa.array(self.row_of[places]))
            for place, (_, fields) in zip(places.tolist(), iter_fields(table), strict=True):
                added[place] = fields
        return added

    def _samples(self) -> Iterator[Mapping[str, Any]]:
        numbers = np.arange(self.first, self.last, dtype=np.int64)
        mean_bytes = max(1, self.catalog.total_bytes // len(self.catalog))
        size = max(1, min(_CHUNK_SAMPLES, _CHUNK_BYTES // mean_bytes))
        chunks = [numbers[at : at + size] for at in range(0, len(numbers), size)]
        opened = open_fetcher(self.catalog, iter(chunks), prefetch_bytes=_PREFETCH_BYTES)
        with closing(opened) as fetcher:
            for chunk in chunks:
                for sample in fetcher.samples(chunk):
                    if isinstance(sample, Exception):
                        raise sample
                    yield sample


def name_row(error: SampleError, row: int, key: str | None) -> SampleError:
    """Return an error that names the row of a dataset, counted from 0, and its key."""
    return SampleError(
        error.what, remedy=error.remedy, shard=f"row {row}", key=key or error.key, field=error.field
    )


def read_keys(task: ReadRows) -> pa.ChunkedArray:
    """Return the keys of the rows of a read task; here, so that workers import no torch."""
    chunks = [chunk for table in task.read() for chunk in table.column(KEY).chunks]
    return pa.chunked_array(chunks, pa.string())


def _loaded_rows(
    ranges: tuple[BlockRange, ...],
) -> Iterator[tuple[str | None, dict[str, memoryview]]]:
    for number, block in enumerate(ranges):
        if number + 1 < len(ranges):  # starts the transfer of the next block to this node
            ray.wait([ranges[number + 1].reference], timeout=0, fetch_local=True)
        yield from iter_fields(block.load())
