"""Join rows with the samples of a dataset by their keys, in the driver."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from shardstream.catalog import ShardCatalog
from shardstream.errors import OptionError, SourceError, plural
from shardstream.format import CLASSES_NAME, END_OF_ARCHIVE, encode_classes
from shardstream.loader import ShardDataset
from shardstream.packing import ShardNames, WriterOptions, cut_by_size
from shardstream.ray.read_dataset import plan_read
from shardstream.ray.read_plan import Ints
from shardstream.ray.row_stream import TASK_CPUS, RowsBlock, ahead, fetch
from shardstream.ray.write_task import JoinWork, read_keys
from shardstream.storage import Storage, Urls, parent_url


class JoinSamples(NamedTuple):
    """The dataset whose samples get the fields of rows."""

    dataset: ShardDataset
    catalog: ShardCatalog
    extras: Mapping[str, str]
    """Small files that are copied, by name."""


def open_samples(
    urls: Urls, names: ShardNames, storage_options: Mapping[str, Any] | None
) -> JoinSamples:
    """Open the samples that rows are joined with.

    Raises:
        OptionError: If they have no index, or lie in the destination.
        StorageError: If they cannot be read.
    """
    options = None if storage_options is None else dict(storage_options)
    dataset = ShardDataset(urls, storage_options=options)
    source = dataset.pipeline.source.indexed
    if source is None or not isinstance(source.catalog, ShardCatalog):
        raise OptionError(
            "the shards of join= have no index",
            remedy="run 'shardstream index' on them",
            shard=str(urls),
        )
    catalog, storage = source.catalog, Storage(storage_options)
    place = storage.resolve(names.folder)[1].rstrip("/")
    for folder in dict.fromkeys(parent_url(shard.url) for shard in catalog.shards):
        if storage.resolve(folder)[1].rstrip("/") == place:
            raise OptionError(
                "the shards of join= would be overwritten while they are read; write elsewhere",
                shard=names.folder,
            )
    classes = dataset.classes
    extras = {} if classes is None else {CLASSES_NAME: encode_classes(classes).decode()}
    return JoinSamples(dataset, catalog, extras)


def join_works(
    samples: JoinSamples,
    blocks: Sequence[RowsBlock],
    limits: WriterOptions,
    names: ShardNames,
    in_flight: int,
) -> Iterator[JoinWork]:
    """Yield the work of each shard of a join.

    Args:
        samples: The dataset.
        blocks: All rows, with their keys.
        limits: Maximum samples and bytes of a shard.
        names: Names of the shards.
        in_flight: Maximum of tasks that read keys.

    Raises:
        OptionError: If the rows have no keys, or fields that the samples have, too.
        SourceError: If the keys of rows and samples are not the same, or one comes twice.
    """
    _check_columns(samples, blocks)
    row_keys = pa.chunked_array([block.keys for block in blocks], pa.string())
    found = match_keys(row_keys, _read_keys(samples, in_flight))
    catalog = samples.catalog
    added = np.concatenate([block.sizes for block in blocks])[found]
    own = np.concatenate([np.diff(catalog.offsets(n)) for n in range(catalog.num_shards)])
    room = limits.max_bytes - len(END_OF_ARCHIVE)
    firsts = cut_by_size([own + added], limits.max_samples, room)
    block_firsts = np.array([block.first_row for block in blocks], dtype=np.int64)
    for number, (first, last) in enumerate(itertools.pairwise(firsts.tolist())):
        rows = found[first:last]
        used, block_of = np.unique(
            np.searchsorted(block_firsts, rows, side="right") - 1, return_inverse=True
        )
        yield JoinWork(
            number=number,
            catalog=catalog.restrict_to(catalog.shards_of(np.arange(first, last))),
            first=first,
            last=last,
            blocks=tuple(blocks[one].rows for one in used.tolist()),
            block_of=block_of.astype(np.int32),
            row_of=rows - block_firsts[used][block_of],
            template=names.template,
            limits=limits,
        )


def match_keys(row_keys: pa.ChunkedArray, sample_keys: pa.ChunkedArray) -> Ints:
    """Return the row of each sample, by their keys; each sample must have one row, and each row one sample.

    >>> match_keys(pa.chunked_array([["b", "a"]]), pa.chunked_array([["a", "b"]])).tolist()
    [1, 0]

    Raises:
        SourceError: If a key is missing on one side or comes twice; names the number of such keys, and the first.
    """
    rows, samples = row_keys.cast(pa.large_string()), sample_keys.cast(pa.large_string())
    for what, keys in (("rows", rows), ("samples of join=", samples)):
        counted = pc.value_counts(keys.combine_chunks()).flatten()
        twice = pc.greater(counted[1], 1)
        _refuse(counted[0], twice, f"of the {what} {{}} more than once", "give each its own key")
    found = pc.index_in(samples, value_set=rows)
    _refuse(
        samples,
        found.is_null(),
        "of the samples of join= {} no row",
        "write all rows, or leave the other samples out with ss.reshard(select=) first",
    )
    _refuse(
        rows,
        pc.invert(pc.is_in(rows, value_set=samples)),
        "of the rows {} no sample in join=",
        "filter these rows out",
    )
    places: Ints = found.to_numpy().astype(np.int64)
    return places


def _refuse(keys: Any, is_bad: Any, what: str, remedy: str) -> None:
    """Raise an error for the keys that are bad, if there are some."""
    count = pc.sum(is_bad).as_py() or 0
    if not count:
        return
    first = keys[pc.index(is_bad, value=True).as_py()].as_py()
    verb = (
        ("has" if count == 1 else "have") if " no " in what else ("comes" if count == 1 else "come")
    )
    raise SourceError(
        f"{plural(count, 'key')} {what.format(verb)}, the first is {first!r}", remedy=remedy
    )


def _check_columns(samples: JoinSamples, blocks: Sequence[RowsBlock]) -> None:
    if any(block.keys is None for block in blocks):
        raise OptionError(
            "rows are joined with samples by key, but they have no column '__key__' or 'key'",
            remedy="return batch['__key__'] from map_batches, too",
        )
    fields = dict.fromkeys(name for block in blocks for name in block.fields)
    both = [name for name in fields if name in (samples.catalog.fields or ())]
    if both:
        raise OptionError(
            f"the samples of join= have the field {both[0]!r} already",
            remedy=f"drop the column with drop_columns([{both[0]!r}]), or rename it",
        )
    if not fields:
        raise OptionError("the rows have no column besides the key", remedy="return a field, too")


def _read_keys(samples: JoinSamples, in_flight: int) -> pa.ChunkedArray:
    """Return the keys of all samples, read by tasks of the cluster."""
    read: Callable[[Any], Any] = ray.remote(read_keys).options(num_cpus=TASK_CPUS).remote
    submitted = (read(task) for task, _ in plan_read(samples.dataset, fields=[]).tasks())
    parts = [
        fetch(reference, "read the keys of join=") for reference in ahead(submitted, in_flight)
    ]
    return pa.chunked_array([chunk for part in parts for chunk in part.chunks], pa.string())
