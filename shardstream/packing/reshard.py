"""Write the samples of shards to other shards: other sizes, another order, fewer fields, other samples."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from shardstream.catalog import ClassNames, Numbers, ShardCatalog, find_difference, lacks_index
from shardstream.errors import ChangedError, OptionError, plural
from shardstream.fetch import open_fetcher
from shardstream.format import (
    CLASSES_NAME,
    END_OF_ARCHIVE,
    Sample,
    checksum,
    encode_classes,
    fingerprint,
)
from shardstream.order import derive_key, permute
from shardstream.packing.destination import ShardNames
from shardstream.packing.merge import SplitJob, run_jobs
from shardstream.packing.part_job import PartJob, PartResult, ProgressFunction
from shardstream.packing.part_writer import PartWriter
from shardstream.packing.report import PackReport
from shardstream.packing.sample_steps import SampleFunction, SampleSteps, forget_instances
from shardstream.packing.shard_writer import DEFAULT_MAX_BYTES, DEFAULT_MAX_SAMPLES, WriterOptions
from shardstream.packing.source import fingerprint_of
from shardstream.packing.tar_shard import sample_pieces
from shardstream.storage import (
    LocatedShards,
    OutputFolder,
    Storage,
    Urls,
    absolute_urls,
    locate_shards,
    parent_url,
    parse_bytes,
)
from shardstream.tasks import Executor

_PREFETCH_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20  # of samples in memory as Python objects
_CHUNK_SAMPLES = 4096
_PURPOSE = 0x7E5A  # separates this permutation from those of epochs
# Shards of a random order are cut by the mean size of a sample; the fraction leaves room for larger ones.
_FILL = 0.95
_FIELD_PROBES = 64  # samples whose fields are measured, where only some fields are kept
_DECIMALS = 4


def reshard(  # noqa: PLR0913  (public door)
    source: Urls,
    dest: str | os.PathLike[str],
    *,
    max_samples: int = DEFAULT_MAX_SAMPLES,
    max_bytes: int | str = DEFAULT_MAX_BYTES,
    seed: int | None = None,
    fields: Sequence[str] | None = None,
    select: SampleFunction | None = None,
    map: SampleFunction | None = None,  # noqa: A002  (as in ShardDataset.map)
    batch_size: int | None = None,
    version: int | str | None = None,
    name: str = "",
    overwrite: bool = False,
    executor: Executor | None = None,
    progress: ProgressFunction | None = None,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
) -> PackReport:
    """Write the samples of indexed shards to new shards; equal input gives equal bytes, whatever the executor.

    Each new shard is one task, which reads its samples by range requests: memory stays at about 100 MiB for each process, whatever
    the order. A stopped or killed job is resumed by the same call: finished shards are kept. ``classes.json`` is copied.

    Args:
        source: Shards as for `ShardDataset`: a folder, pattern, tar or list; remote ones need an index.
        dest: Folder, or pattern with ``{shard}``.
        max_samples: Maximum samples of a shard.
        max_bytes: Maximum size of a shard, e.g. "256MB". If samples grow in ``map``, the rest of a task goes to further shards, named
            ``000007_01.tar`` and so on.
        seed: Write all samples in a random order, a uniform permutation; by default they keep their order.
        fields: Fields to keep; by default all.
        select: ``select(sample)`` says whether to keep a sample; the shards are cut before, so they get smaller.
        map: ``map(sample)`` returns a sample as `ShardWriter.write` takes it; without ``__key__`` the key stays. A class is instantiated
            once in each process, for example to hold a model, and its instances are called.
        batch_size: Call ``map`` with lists of up to so many samples; it returns as many.
        version: Version of ``select`` and ``map``. A stopped job is resumed only with the same version, names and source text of
            the functions.
        name: Name of the dataset, kept in the manifest.
        overwrite: Replace an existing dataset, or an unfinished one of another job.
        executor: Where the tasks run; by default in this process. ``LocalExecutor(processes=8)`` uses processes, `Parts` does a part
            of the job, and `merge` publishes it. Functions must be importable by other processes, and storage options travel with the tasks.
        progress: Called after each shard.
        storage_options: ``storage_options`` of fsspec for the destination.
        source_options: The same for the source; by default those of the destination.

    Returns:
        Counts. With `Parts` those of this part, and the number of shards that are not done in ``unfinished``.

    Raises:
        OptionError: If an argument is wrong, the source has no index, or a dataset is in the destination already.
        SourceError: If a function raises; names the sample.
        SampleError: If a sample cannot be written, e.g. because its key is in the new shard already.
        ShardError: If a sample of the source is damaged.
        ChangedError: If the source changes while it is read.
        StorageError: If a place cannot be reached or is full, or another job writes there.
    """
    steps = SampleSteps.checked(fields, select, map, batch_size)
    reading = storage_options if source_options is None else source_options
    opened = _open_source(source, reading)
    names = _shard_names(dest, opened)
    limits = WriterOptions(max_samples=max_samples, max_bytes=parse_bytes(max_bytes), name=name)
    kept = _kept_fraction(opened, steps)
    options = {"max_samples": limits.max_samples, "max_bytes": limits.max_bytes, "seed": seed}
    firsts = plan_shards(opened.catalog, limits, is_shuffled=seed is not None, kept=kept)
    job = PartJob(
        kind="reshard",
        title=opened.title,
        names=names,
        source=opened.identity,
        options=options | steps.identity | {"version": version, "kept": kept},
        parts=len(firsts) - 1,
        name=name,
        extras=_class_names(opened),
        storage_options=storage_options,
    )
    work = ReshardWork(
        job=job.run,
        source=absolute_urls(source),
        source_options=reading,
        identity=opened.identity,
        seed=seed,
        limits=limits,
        template=names.template,
        steps=steps,
    )
    try:
        return run_jobs(
            [SplitJob("", job, work.parts(firsts))],
            executor=executor,
            overwrite=overwrite,
            progress=progress,
            samples=len(opened.catalog),
        )
    finally:
        _source_here.clear()
        forget_instances()


class _OpenedSource(NamedTuple):
    located: LocatedShards
    catalog: ShardCatalog
    identity: str
    """Changes with the shards: their names, counts and sizes, and their checksums, else their times or ETags."""

    @property
    def title(self) -> str:
        """Number of shards, and the folder of the first, for reports."""
        catalog = self.catalog
        return f"{plural(catalog.num_shards, 'shard')} of {parent_url(catalog.url_of(0))}"


def _open_source(source: Urls, options: Mapping[str, Any] | None) -> _OpenedSource:
    storage = Storage(options)
    located = locate_shards(source, storage)
    bare = lacks_index(located, storage)
    if bare is not None:
        raise OptionError(
            "this shard cannot be read by number; run 'shardstream index' on plain tars, and 'shardstream pack' on compressed ones",
            shard=bare,
        )
    catalog = ShardCatalog(located, storage)
    if not len(catalog):
        raise OptionError("the source has no samples", shard=catalog.url_of(0))
    content = checksum(catalog.shards)
    if content is None:  # names and sizes alone would not show that a tar was replaced
        with ThreadPoolExecutor(catalog.threads, thread_name_prefix="shardstream-look") as pool:
            files = pool.map(lambda shard: storage.info(shard.url), catalog.shards)
            content = fingerprint_of("versions", *(str(file.version) for file in files))
    return _OpenedSource(located, catalog, f"{fingerprint(catalog.shards)}-{content}")


def _shard_names(dest: str | os.PathLike[str], opened: _OpenedSource) -> ShardNames:
    """Return folder and names of the new shards; refuse the folders of the source."""
    names, storage = ShardNames.parse(dest), opened.catalog.storage
    place = storage.resolve(names.folder)[1].rstrip("/")
    for taken in dict.fromkeys(parent_url(shard.url) for shard in opened.catalog.shards):
        if storage.resolve(taken)[1].rstrip("/") == place:
            raise OptionError(
                "the shards would be overwritten while they are read; write elsewhere",
                shard=names.folder,
            )
    return names


def _class_names(opened: _OpenedSource) -> dict[str, str]:
    """Return ``classes.json`` of the source; refuse folders that number their classes differently."""
    found = ClassNames(opened.located, opened.catalog.storage)
    differs = find_difference(found.found)
    if differs is not None:
        raise OptionError(
            f"class numbers differ among these shards: {differs}; reshard each folder separately"
        )
    return {} if found.names is None else {CLASSES_NAME: encode_classes(found.names).decode()}


def _kept_fraction(opened: _OpenedSource, steps: SampleSteps) -> float:
    """Return the fraction of the samples' bytes that stays when only some fields are kept, from evenly spaced samples.

    Raises:
        OptionError: If no sample has one of the fields, by the manifest or by these samples.
    """
    if steps.fields is None or steps.function is not None:  # the function may make the fields
        return 1.0
    catalog, known = opened.catalog, set(opened.located.fields or ())
    numbers = np.unique(np.linspace(0, len(catalog) - 1, _FIELD_PROBES).astype(np.int64))
    before = after = 0
    with ThreadPoolExecutor(catalog.threads, thread_name_prefix="shardstream-look") as pool:
        for sample in pool.map(catalog.read_sample, numbers.tolist()):
            chosen = {name: data for name, data in sample.items() if name in steps.fields}
            before += _tar_bytes(sample)
            after += _tar_bytes({"__key__": sample["__key__"], **chosen}) if chosen else 0
            if opened.located.fields is None:
                known |= {name for name in sample if not name.startswith("__")}
    missing = sorted(steps.fields - known)
    if missing and (opened.located.fields is not None or not after):
        raise OptionError(
            f"no sample has the field {', '.join(missing)}; the fields are {', '.join(sorted(known))}",
            shard=catalog.url_of(0),
        )
    return max(round(after / before, _DECIMALS), 10.0**-_DECIMALS)


def _tar_bytes(sample: Sample) -> int:
    fields = {name: data for name, data in sample.items() if not name.startswith("__")}
    return sum(map(len, sample_pieces(str(sample["__key__"]), fields)))


def plan_shards(
    catalog: ShardCatalog, limits: WriterOptions, *, is_shuffled: bool, kept: float
) -> Numbers:
    """Return the first sample of each new shard, and the number of samples; shape (shards + 1,).

    In the order of the source, shards are filled up to the limits by the sizes of their samples. In a random order they have
    equal counts, from the mean size.

    Args:
        catalog: The source.
        limits: Maximum samples and bytes of a shard.
        is_shuffled: Whether the order is random.
        kept: Fraction of the bytes that is written.
    """
    limit = (limits.max_bytes - len(END_OF_ARCHIVE)) / kept * (1.0 if kept == 1 else _FILL)
    if is_shuffled:
        nsamples = len(catalog)
        mean = catalog.total_bytes / nsamples
        most = min(limits.max_samples, max(1, int(limit / mean * (_FILL if kept == 1 else 1))))
        count = -(-nsamples // most)
        return np.arange(count + 1, dtype=np.int64) * nsamples // count
    sizes = (np.diff(catalog.offsets(shard)) for shard in range(catalog.num_shards))
    return cut_by_size(sizes, limits.max_samples, limit)


def cut_by_size(sizes: Iterable[Numbers], max_samples: int, max_bytes: float) -> Numbers:
    """Cut a sequence of sizes into runs of at most ``max_samples`` and ``max_bytes``, each as long as possible.

    Args:
        sizes: The sizes, in arrays of any length.
        max_samples: Maximum length of a run, at least 1.
        max_bytes: Maximum sum of a run; a single size may exceed it.

    Returns:
        The start of each run, and the number of sizes.

    >>> cut_by_size([np.array([2, 2, 2]), np.array([9, 1])], 10, 5).tolist()
    [0, 2, 3, 4, 5]
    """
    return np.array(list(iter_cuts(sizes, max_samples, max_bytes)), dtype=np.int64)


def iter_cuts(sizes: Iterable[Numbers], max_samples: int, max_bytes: float) -> Iterator[int]:
    """Yield what `cut_by_size` returns, each as soon as the sizes that are read so far decide it."""
    yield 0
    passed = 0  # sizes before the last cut
    waiting = np.empty(0, dtype=np.int64)  # sizes after it
    for some in sizes:
        waiting = np.concatenate((waiting, some))
        ends = np.concatenate(([0], np.cumsum(waiting)))
        first = 0
        while True:
            fits = int(np.searchsorted(ends, ends[first] + max_bytes, side="right")) - 1
            last = min(max(fits, first + 1), first + max_samples)
            if last >= len(waiting):  # the run may go on in the next array
                break
            yield passed + last
            first = last
        waiting = waiting[first:]
        passed += first
    yield passed + len(waiting)


# Of this process: the source that was opened last.
_source_here: dict[tuple[str, str], _OpenedSource] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardWork:
    """The work of one part of `reshard`: one new shard, or several if its samples grow.

    Args:
        job: Identity of the job.
        source: URLs of the source.
        source_options: Its ``storage_options``.
        identity: Its identity when the job was planned.
        seed: Seed of a random order; None keeps the order.
        limits: Maximum samples and bytes of a shard.
        template: Name of a shard.
        steps: Changes to samples.
        number: Number of the new shard.
        first: Position of its first sample in the order of the job.
        last: Position after its last.
    """

    job: str
    source: Urls
    source_options: Mapping[str, Any] | None
    identity: str
    seed: int | None
    limits: WriterOptions
    template: str
    steps: SampleSteps
    number: int = 0
    first: int = 0
    last: int = 0

    def parts(self, firsts: Numbers) -> Iterator[ReshardWork]:
        """Yield the work of each part; ``firsts`` as `plan_shards` returns it."""
        for number, (first, last) in enumerate(itertools.pairwise(firsts.tolist())):
            yield replace(self, number=number, first=first, last=last)

    def write(self, folder: OutputFolder, check_owner: Callable[[], None]) -> PartResult:
        """Read, change and write the samples (see `PartWork.write`)."""
        opened = self._open()
        names = ShardNames(folder=folder.url, template=self.template)
        with closing(PartWriter(folder, names, self.number, self.limits, check_owner)) as writer:
            for key, fields in self.steps.apply(self._read(opened.catalog), self.job):
                writer.write(key, fields)
            opened.catalog.check_manifests()
            writer.finish()
        written = sum(shard.nsamples or 0 for shard in writer.shards)
        return PartResult(
            shards=tuple(writer.shards),
            fields=writer.fields,
            left_out=self.last - self.first - written,
        )

    def _open(self) -> _OpenedSource:
        """Open the source, or take the one that this process has open."""
        key = (str(self.source), self.identity)
        opened = _source_here.get(key)
        if opened is None:
            opened = _open_source(self.source, self.source_options)
            if opened.identity != self.identity:
                raise ChangedError(
                    "the source has changed since the job began; start the job again in another folder, or with overwrite=True "
                    "(--overwrite)",
                    shard=opened.catalog.url_of(0),
                )
            _source_here.clear()
            _source_here[key] = opened
        return opened

    def _read(self, catalog: ShardCatalog) -> Iterator[Sample]:
        numbers = np.arange(self.first, self.last, dtype=np.int64)
        if self.seed is not None:
            numbers = permute(numbers, len(catalog), derive_key(self.seed, _PURPOSE))
        mean_bytes = max(1, catalog.total_bytes // len(catalog))
        size = max(1, min(_CHUNK_SAMPLES, _CHUNK_BYTES // mean_bytes))
        chunks = [numbers[at : at + size] for at in range(0, len(numbers), size)]
        with closing(
            open_fetcher(catalog, iter(chunks), prefetch_bytes=_PREFETCH_BYTES)
        ) as fetcher:
            for chunk in chunks:
                for row in fetcher.samples(chunk):
                    if isinstance(row, Exception):
                        raise row
                    yield row
