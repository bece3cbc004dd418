"""Write a Ray dataset to shards."""

from __future__ import annotations

import itertools
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import ray
import ray.data

from shardstream.errors import OptionError
from shardstream.format import END_OF_ARCHIVE
from shardstream.packing import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_SAMPLES,
    PackReport,
    PartJob,
    ShardNames,
    WriterOptions,
    claim_destination,
    iter_cuts,
    run_jobs,
)
from shardstream.pipeline import check_at_least
from shardstream.ray.executor import run_tasks
from shardstream.ray.row_stream import TASK_CPUS, RowsBlock, encoded_blocks, in_row_order
from shardstream.ray.write_task import BlockRange, RowsWork
from shardstream.storage import absolute_url, parse_bytes
from shardstream.tasks import JSON, Task, run_task

_MAX_RETRIES = 3  # of a task whose worker dies


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
    names = ShardNames.parse(absolute_url(dest))
    job = PartJob(
        kind="ray.write",
        title="rows of a Ray dataset",
        names=names,
        source=uuid.uuid4().hex,  # rows have no identity, so that a stopped job cannot be resumed
        options={"max_samples": limits.max_samples, "max_bytes": limits.max_bytes},
        limits=limits,
        storage_options=storage_options,
    )
    # Refuses before the dataset runs; nothing is changed.
    claim_destination(job.new_journal(job.open_folder()), names, overwrite=overwrite)
    most = concurrency or max(1, int(ray.cluster_resources().get("CPU", 1)))
    with in_row_order(ds):
        works = _row_works(encoded_blocks(ds, most), limits)
        first = next(works, None)  # the folder stays as it is until then
        if first is None:
            raise OptionError("the dataset has no rows, so there is nothing to publish")
        return run_jobs(
            [replace(job, works=itertools.chain([first], works))],
            executor=_ShardTasks(most),
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


class _ShardTasks(NamedTuple):
    """Runs tasks beside those of the dataset, whatever CPUs that takes (see `Executor`); Ray runs one again whose worker dies."""

    most: int
    """Tasks at a time."""

    def run(self, tasks: Iterable[Task], done: Callable[[Task, Mapping[str, JSON]], None]) -> None:
        """Run all tasks."""
        options = {"num_cpus": TASK_CPUS, "max_retries": _MAX_RETRIES, "retry_exceptions": False}
        run_tasks(ray.remote(run_task).options(**options).remote, tasks, done, self.most)
