"""Write the samples of a dataset to other shards: other sizes, another order, fewer fields, other samples, joined ones."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np

from shardstream.catalog import ShardCatalog, StoredClassNames, open_samples
from shardstream.errors import OptionError, parse_bytes, plural, redact
from shardstream.format import (
    CLASSES_NAME,
    END_OF_ARCHIVE,
    ColumnSources,
    Sample,
    encode_classes,
    mask_fields,
)
from shardstream.packing.encode import MASK_ALONE
from shardstream.packing.job.folder_state import ShardNames, check_is_elsewhere
from shardstream.packing.job.parts import PartJob, cut_by_size, fields_bytes
from shardstream.packing.job.report import PackReport, ProgressFunction
from shardstream.packing.job.run_jobs import run_jobs
from shardstream.packing.sample_range import (
    Kept,
    Order,
    SampleFunction,
    SampleRange,
    Steps,
    encoded_samples,
    read_rows,
    steps_of,
)
from shardstream.packing.shards.column_builder import checked_columns, columns_identity
from shardstream.packing.shards.part_writer import PartResult, PartWriter, WriterOptions
from shardstream.packing.shards.shard_writer import DEFAULT_MAX_BYTES, DEFAULT_MAX_SAMPLES
from shardstream.packing.sources.source import fingerprint_of
from shardstream.pipeline import Context, KeepFields, Records, Rename, Stage, open_runner
from shardstream.samples import Join, Numbers, Samples, leaves_of
from shardstream.storage import Storage, Urls, locate_shards, masks_in, parent_url
from shardstream.tasks import Executor

# Shards of a random order are cut by the mean size of a sample; the fraction leaves room for larger ones.
_FILL = 0.95
# Samples whose fields are measured, where only some fields are kept, or some are added.
_PROBES = 64
_DECIMALS = 4
_LOSS = (
    "pictures were decoded and are encoded again, which may lose detail (jpg, webp, avif), transparency, palettes, metadata and further "
    "frames; leave fields that no step changes out of decode (only=)"
)
_LENGTHS = 1 << 16  # samples whose sizes are read at a time


@runtime_checkable
class AnyDataset(Protocol):
    """A dataset whose samples can be written again."""

    def records(self) -> Records:
        """Return all samples in a fixed order, with the steps."""


def reshard(  # noqa: PLR0913  (public door)
    source: Urls | AnyDataset,
    dest: str | os.PathLike[str],
    *,
    max_samples: int = DEFAULT_MAX_SAMPLES,
    max_bytes: int | str = DEFAULT_MAX_BYTES,
    seed: int | None = None,
    fields: Sequence[str] | None = None,
    map: SampleFunction | None = None,  # noqa: A002  (as in ShardDataset.map)
    batch_size: int | None = None,
    version: int | str | None = None,
    name: str = "",
    columns: ColumnSources | None = None,
    overwrite: bool = False,
    executor: Executor | None = None,
    progress: ProgressFunction | None = None,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
) -> PackReport:
    """Write the samples of a dataset to new shards; equal input gives equal bytes, whatever the executor.

    Each new shard is one task, which reads its samples by range requests: memory stays at about 100 MiB for each process, whatever
    the order. A stopped or killed job is resumed by the same call: finished shards are kept; with functions, if they have a ``version``. ``classes.json``
    is that of the dataset whose ``cls`` is written.

    Fields that no step changes are copied as they are. Values that a step makes are encoded as `ShardWriter.write` does: pixels that
    ``decode`` has made of a picture become a new one (a ``jpg`` of quality 90), with a warning, so leave fields undecoded that you do not change.

        ss.reshard(ss.join("images/", "captions/"), "both/")
        ss.reshard(ss.ShardDataset("images/", where="width >= 512").map(add_caption), "large/", seed=1)

    Args:
        source: A `ShardDataset`, `CatalogDataset` or `join`, also `by_number`, with its steps and the epoch of `set_epoch`, without shuffle, weights and steps that need
            several samples; or shards as for `ShardDataset`: a folder, pattern, tar or list. Remote shards need an index.
        dest: Folder, or pattern with ``{shard}``.
        max_samples: Maximum samples of a shard.
        max_bytes: Maximum size of a shard, e.g. "256MB". If samples grow in ``map``, the rest of a task goes to further shards, named
            ``000007_01.tar`` and so on.
        seed: Write all samples in a random order, a uniform permutation; by default they keep their order.
        fields: Fields to keep, after all steps; by default all.
        map: ``map(sample)`` returns a sample as `ShardWriter.write` takes it, as `ShardDataset.map` after all other steps; without ``__key__``
            the key stays. A class is instantiated once in each process, for example to hold a model, and its instances are called.
        batch_size: Call ``map`` with lists of up to so many samples; it returns as many.
        version: Version of all functions, also those of the dataset's steps, which cannot be compared: change it when they, what they call or what
            they hold changes. Without it, a stopped job with functions begins again, and cannot be cut into `Parts`.
        name: Name of the dataset, kept in the manifest.
        columns: Also write ``NAME.tar.cols.parquet`` with the key of each sample and these values (see `index`); no functions.
        overwrite: Replace an existing dataset, or an unfinished one of another job.
        executor: Where the tasks run; by default in this process. ``LocalExecutor(processes=8)`` uses processes, `Parts` does a part
            of the job, and `merge` publishes it. Functions must be importable by other processes, and storage options travel with the tasks.
        progress: Called after each shard.
        storage_options: ``storage_options`` of fsspec for the destination.
        source_options: The same for URLs of the source; by default those of the destination.

    Returns:
        Counts. With `Parts` those of this part, and the number of shards that are not done in ``unfinished``.

    Raises:
        OptionError: If an argument is wrong, the samples have no fixed order or no index, or a dataset is in the destination already.
        SourceError: If a function raises; names the sample. If a key comes twice in the new shards.
        SampleError: If a sample cannot be written, e.g. because its key is in the new shard already.
        ShardError: If a sample of the source is damaged.
        ChangedError: If the source changes while it is read.
        StorageError: If a place cannot be reached or is full, or another job writes there.
    """
    kept = None if fields is None else frozenset([fields] if isinstance(fields, str) else fields)
    limits = WriterOptions(
        max_samples=max_samples,
        max_bytes=parse_bytes(max_bytes),
        name=name,
        columns=None if columns is None else checked_columns(columns, takes_functions=False),
    )
    reading = storage_options if source_options is None else source_options
    records = _open_records(source, reading)
    steps = steps_of(records, map, batch_size, kept)
    names = _shard_names(dest, leaves_of(records.samples))
    job = _plan_job(records, steps, names, limits, seed, version)
    return run_jobs(
        [replace(job, storage_options=storage_options)],
        executor=executor,
        overwrite=overwrite,
        progress=progress,
        samples=len(records.samples),
    )


def _open_records(source: Urls | AnyDataset, options: Mapping[str, Any] | None) -> Records:
    """Return the samples of a dataset, or of shards.

    Raises:
        OptionError: If they have no fixed order, no index, or there are none.
        StorageError: If they cannot be reached.
    """
    if isinstance(source, AnyDataset):
        records = source.records()
    elif isinstance(source, str | os.PathLike | Sequence):
        urls: Sequence[object] = [source] if isinstance(source, str | os.PathLike) else source
        others = [type(one).__name__ for one in urls if not isinstance(one, str | os.PathLike)]
        if others:
            raise OptionError(
                f"a list holds URLs of shards, not {others[0]}; pass ss.join(first, second) to join the fields of two datasets, "
                "or ss.ShardDataset([url, url]) to write the samples of one after those of the other"
            )
        storage = Storage(options)
        located = locate_shards(source, storage)
        samples = open_samples(located, storage)
        records = Records(samples=samples, classes=StoredClassNames(located, storage).checked_names)
    else:
        raise OptionError(
            f"reshard takes URLs of shards, or a dataset of shardstream, not a {type(source).__name__}"
        )
    if not len(records.samples):
        raise OptionError("the source has no samples", shard=records.samples.url_of(0))
    return records


def _plan_job(
    records: Records,
    steps: Steps,
    names: ShardNames,
    limits: WriterOptions,
    seed: int | None,
    version: int | str | None,
) -> PartJob:
    """Return the job and the work of its parts."""
    samples = records.samples
    leaves = leaves_of(samples)
    sizes = _measure(samples, steps)
    first = samples.first if isinstance(samples, Join) else samples
    firsts = plan_shards(first, limits, is_shuffled=seed is not None, sizes=sizes)
    options: dict[str, Any] = {
        "max_samples": limits.max_samples,
        "max_bytes": limits.max_bytes,
        "seed": seed,
    }
    if limits.columns is not None:
        options |= {"columns": columns_identity(limits.columns)}
    if records.stages:
        options |= {"seed of the steps": records.seed, "epoch of the steps": records.epoch}
    options |= {
        "fields": None if steps.fields is None else sorted(steps.fields),
        "steps": [*steps.signatures],
        "version": version,
        **sizes.options,
    }
    source = None  # functions cannot be compared: a stopped job begins again
    if version is not None or steps.are_described:
        source = " ".join([samples.fingerprint, *map(_content_of, leaves)])
    classes = records.classes
    call = uuid.uuid4().hex
    work = ReshardWork(
        samples=SampleRange(
            samples=samples,
            order=Order(0, len(samples), len(samples), seed),
            steps=Kept(call, "steps", steps),
            job=call,
        ),
        warnings=_warn_of_unused(samples),
    )
    return PartJob(
        kind="reshard",
        title=_title(leaves),
        names=names,
        source=source,
        options=options,
        limits=limits,
        parts=len(firsts) - 1,
        extras={} if classes is None else {CLASSES_NAME: encode_classes(classes)},
        works=work.parts(firsts),
        call=call,
    )


def _title(leaves: Sequence[Samples]) -> str:
    """Return the number of shards and their folder, for reports."""
    more = f" and {plural(len(leaves) - 1, 'joined dataset')}" if len(leaves) > 1 else ""
    return f"{plural(leaves[0].num_shards, 'shard')} of {parent_url(leaves[0].url_of(0))}{more}"


def _content_of(samples: Samples) -> str:
    """Return text that changes with the bytes of a dataset: by its checksums, else by the times or ETags of its shards."""
    if not isinstance(samples, ShardCatalog):
        return samples.fingerprint
    (content,) = samples.checksums
    if content is not None:
        return content
    storage = samples.storage  # names and sizes alone would not show that a tar was replaced
    with ThreadPoolExecutor(samples.threads, thread_name_prefix="shardstream-look") as pool:
        files = pool.map(lambda shard: storage.info(shard.url), samples.shards)
        return fingerprint_of("versions", (file.version for file in files))


def _warn_of_unused(samples: Samples) -> tuple[str, ...]:
    """Return a warning for each joined dataset with keys that no sample has."""
    if not isinstance(samples, Join):
        return ()
    warnings = []
    for part in samples.parts:
        if part.num_unused:
            leaf = leaves_of(part.samples)[0]
            url = leaf.url_of(0)
            place = redact(parent_url(url) if isinstance(leaf, ShardCatalog) else url)
            warnings.append(
                f"{place}: {plural(part.num_unused, 'key')} of {len(part.samples):,} without a sample in the source"
            )
    return tuple(warnings)


def _shard_names(dest: str | os.PathLike[str], leaves: Sequence[Samples]) -> ShardNames:
    """Return folder and names of the new shards; refuse the folders that are read."""
    names = ShardNames.parse(dest)
    for leaf in leaves:
        if isinstance(leaf, ShardCatalog):
            folders = {parent_url(shard.url) for shard in leaf.shards}
            check_is_elsewhere(folders, names.folder, leaf.storage)
    return names


class _Sizes(NamedTuple):
    """Sizes of new samples, by those of the source."""

    kept: float
    """Fraction of the bytes of the first dataset that is written."""
    added_bytes: int
    """Mean of the bytes that are added to a sample."""

    @property
    def options(self) -> dict[str, float]:
        """The sizes as options of the job, because they decide where shards are cut."""
        return {"kept": self.kept, "added_bytes": self.added_bytes}


def _measure(samples: Samples, steps: Steps) -> _Sizes:
    """Measure new samples on evenly spaced ones, where their sizes follow from the source: functions may make samples of any size.

    Raises:
        OptionError: If no sample has one of the fields, by the manifest or by these samples.
    """
    is_join, fields = isinstance(samples, Join), steps.fields
    chooses = all(isinstance(stage, KeepFields | Rename) for stage in steps.stages)
    is_mapped = steps.lists is not None or not chooses
    if not is_join and (is_mapped or (fields is None and not steps.stages)):
        return _Sizes(1.0, 0)
    numbers = np.unique(np.linspace(0, len(samples) - 1, _PROBES).astype(np.int64))
    source = samples.first if isinstance(samples, Join) else samples
    own = [*read_rows(source, numbers, is_sparse=True)]
    found = [*read_rows(samples, numbers, is_sparse=True)] if is_join else own
    known = set(samples.fields or ())
    before = after = added = 0
    for mine, sample in zip(own, found, strict=True):
        new = sample if is_mapped else _stepped(sample, steps.stages)
        known |= new.keys() if samples.fields is None or steps.stages else set()
        chosen = {
            name: data
            for name, data in new.items()
            if not name.startswith("__") and (is_mapped or fields is None or name in fields)
        }
        kept = {name: data for name, data in chosen.items() if name in mine}
        before += _tar_bytes(mine, mine)
        after += _tar_bytes(sample, kept)
        added += _tar_bytes(sample, chosen) - _tar_bytes(sample, kept)
    known = {name for name in known if not name.startswith("__")}
    missing = [] if is_mapped else sorted((fields or frozenset()) - known)
    if missing and (samples.fields is not None or not after + added):
        raise OptionError(
            f"no sample has the field {', '.join(missing)}; the fields are {', '.join(sorted(known))}",
            shard=samples.url_of(0),
        )
    kept_fraction = 1.0 if after == before else round(after / before, _DECIMALS)
    return _Sizes(max(kept_fraction, 10.0**-_DECIMALS), round(added / len(numbers)))


def _stepped(sample: Sample, stages: Sequence[Stage]) -> Sample:
    """Return a sample after steps that choose and rename fields."""
    choosing = [stage for stage in stages if isinstance(stage, KeepFields | Rename)]
    (stepped,), _ = open_runner(choosing, Context())([sample], [0])
    return cast("Sample", stepped)


def _tar_bytes(sample: Sample, fields: Mapping[str, Any]) -> int:
    sizes = ((name, len(data)) for name, data in fields.items() if not name.startswith("__"))
    return fields_bytes(str(sample["__key__"]), sizes)


def plan_shards(
    samples: Samples, limits: WriterOptions, *, is_shuffled: bool, sizes: _Sizes
) -> Numbers:
    """Return the first sample of each new shard, and the number of samples; shape (shards + 1,).

    In the order of the source, shards are filled up to the limits by the sizes of their samples. In a random order they have
    equal counts, from the mean size.

    Args:
        samples: The source.
        limits: Maximum samples and bytes of a shard.
        is_shuffled: Whether the order is random.
        sizes: Sizes of new samples.
    """
    is_exact = sizes.kept == 1 and not sizes.added_bytes
    limit = (limits.max_bytes - len(END_OF_ARCHIVE)) / sizes.kept * (1.0 if is_exact else _FILL)
    added = round(sizes.added_bytes / sizes.kept)  # in bytes of the source, as the limit
    nsamples = len(samples)
    if is_shuffled:
        mean = samples.total_bytes / nsamples + added
        most = min(limits.max_samples, max(1, int(limit / mean * (_FILL if is_exact else 1))))
        count = -(-nsamples // most)
        return np.arange(count + 1, dtype=np.int64) * nsamples // count
    lengths = (one + added for one in _lengths_of(samples))
    return cut_by_size(lengths, limits.max_samples, limit)


def _lengths_of(samples: Samples) -> Iterator[Numbers]:
    """Yield the bytes of all samples, in order."""
    for first in range(0, len(samples), _LENGTHS):
        yield samples.sizes(np.arange(first, min(first + _LENGTHS, len(samples))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardWork:
    """The work of one part of `reshard`: one new shard, or several if its samples grow.

    Args:
        samples: The samples, and the steps that they pass.
        warnings: Findings about the whole source, which the first part reports.
    """

    samples: SampleRange
    warnings: tuple[str, ...]

    def parts(self, firsts: Numbers) -> Iterator[ReshardWork]:
        """Yield the work of each part; ``firsts`` as `plan_shards` returns it."""
        whole = self.samples.order
        for number, (first, last) in enumerate(itertools.pairwise(firsts.tolist())):
            samples = replace(self.samples, order=whole._replace(first=first, last=last))
            warnings = () if number else self.warnings
            yield replace(self, samples=samples, warnings=warnings)

    def write(self, writer: PartWriter) -> PartResult:
        """Read, change and write the samples (see `PartWork.write`)."""
        pictures, masks = set[str](), set[str]()
        with closing(encoded_samples(self.samples)) as samples:
            for key, fields, encoded_again in samples:
                writer.write(key, fields)
                pictures.update(encoded_again)
                masks |= masks_in(fields) - mask_fields(fields)
        self.samples.samples.check_manifests()
        order = self.samples.order
        warnings = [f"{name}: {_LOSS}" for name in sorted(pictures)]
        warnings += [f"{name}: {MASK_ALONE}" for name in sorted(masks)]
        return PartResult(
            left_out=order.last - order.first - writer.nsamples,
            warnings=(*self.warnings, *warnings),
        )
