"""Write the samples of shards to other shards: other sizes, another order, fewer fields, other samples."""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardstream.catalog import ClassNames, Numbers, ShardCatalog, find_difference
from shardstream.errors import ChangedError, OptionError
from shardstream.fetch import open_fetcher
from shardstream.format import (
    CLASSES_NAME,
    END_OF_ARCHIVE,
    Sample,
    encode_classes,
)
from shardstream.order import derive_key, permute
from shardstream.packing.added_source import AddedUrls
from shardstream.packing.job.destination import ShardNames
from shardstream.packing.job.key_hashes import encode_hashes, hash_keys
from shardstream.packing.job.merge import SplitJob, run_jobs
from shardstream.packing.job.part_job import PartJob, PartResult
from shardstream.packing.job.report import PackReport, ProgressFunction
from shardstream.packing.join_fields import FieldJoin, Joiner, Missing, OpenedJoin
from shardstream.packing.opened_shards import OpenedShards, open_shards
from shardstream.packing.sample_steps import SampleFunction, SampleSteps, forget_instances
from shardstream.packing.shards.column_builder import checked_columns, columns_identity
from shardstream.packing.shards.part_writer import PartWriter, WriterOptions
from shardstream.packing.shards.shard_writer import DEFAULT_MAX_BYTES, DEFAULT_MAX_SAMPLES
from shardstream.packing.shards.tar_shard import sample_pieces
from shardstream.storage import (
    OutputFolder,
    Urls,
    absolute_urls,
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
    add: AddedUrls | None = None,
    missing: Missing = "error",
    select: SampleFunction | None = None,
    map: SampleFunction | None = None,  # noqa: A002  (as in ShardDataset.map)
    batch_size: int | None = None,
    version: int | str | None = None,
    name: str = "",
    columns: str | Sequence[str] | Mapping[str, str] | None = None,
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
        fields: Fields to keep; by default all. Those of ``add`` are kept, too.
        add: Sources of more fields, joined by key: ``{URL: fields}``. The URL is that of indexed shards or of tables (Parquet, CSV, TSV,
            JSON lines); ``fields`` are names, or ``{field: name there}``, for tables ``{field: column}``. None takes all fields of shards.
            The keys of a table are in its column ``__key__`` or ``key``, or in the one that ``{"__key__": column}`` names. Fields are
            added before ``select`` and ``map``. A field that the sample has already is an error, unless ``fields`` leaves it out: then
            it is replaced. ``source_options`` apply.
        missing: What happens to a sample whose key, or one of whose named fields, is not in a source of ``add``: "error"; "keep", without
            these fields; or "drop". Keys that no sample has are counted in a warning.
        select: ``select(sample)`` says whether to keep a sample; the shards are cut before, so they get smaller.
        map: ``map(sample)`` returns a sample as `ShardWriter.write` takes it; without ``__key__`` the key stays. A class is instantiated
            once in each process, for example to hold a model, and its instances are called.
        batch_size: Call ``map`` with lists of up to so many samples; it returns as many.
        version: Version of ``select`` and ``map``. A stopped job is resumed only with the same version, names and source text of
            the functions.
        name: Name of the dataset, kept in the manifest.
        columns: Also write ``NAME.tar.cols.parquet`` with the key of each sample and these values (see `index`).
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
        SourceError: If a function raises; names the sample. If a key comes twice, in the new shards or in a source of ``add``.
        SampleError: If a sample cannot be written, e.g. because its key is in the new shard already, or is missing in ``add``.
        ShardError: If a sample of the source is damaged.
        ChangedError: If the source changes while it is read.
        StorageError: If a place cannot be reached or is full, or another job writes there.
    """
    steps = SampleSteps.checked(fields, select, map, batch_size)
    reading = storage_options if source_options is None else source_options
    join = FieldJoin.checked(add, missing, steps.fields, reading, storage_options)
    limits = WriterOptions(
        max_samples=max_samples,
        max_bytes=parse_bytes(max_bytes),
        name=name,
        columns=checked_columns(columns),
    )
    opened = open_shards(source, reading)
    work = ReshardWork(
        job="",
        call=uuid.uuid4().hex,
        source=absolute_urls(source),
        source_options=reading,
        identity=opened.identity,
        seed=seed,
        limits=limits,
        template="",
        steps=steps,
        join=join,
    )
    with closing(join.open()) as joined:
        names = _shard_names(dest, opened, joined)
        split = _plan_job(work, opened, joined, names, version, storage_options)
        try:
            return run_jobs(
                [split],
                executor=executor,
                overwrite=overwrite,
                progress=progress,
                samples=len(opened.catalog),
            )
        finally:
            _close_sources(lambda call, _: call == work.call)
            forget_instances()


def _plan_job(
    work: ReshardWork,
    opened: OpenedShards,
    joined: OpenedJoin,
    names: ShardNames,
    version: int | str | None,
    storage_options: Mapping[str, Any] | None,
) -> SplitJob:
    """Return the job and the work of its parts, from the work without a job."""
    steps, limits, seed = work.steps, work.limits, work.seed
    sizes = _Sizes(_kept_fraction(opened, steps, joined.fields), joined.mean_bytes)
    firsts = plan_shards(opened.catalog, limits, is_shuffled=seed is not None, sizes=sizes)
    options: dict[str, Any] = {
        "max_samples": limits.max_samples,
        "max_bytes": limits.max_bytes,
        "seed": seed,
    }
    if limits.columns is not None:
        options |= {"columns": columns_identity(limits.columns)}
    options |= {**steps.identity, "version": version, **sizes.options, **work.join.choices}
    job = PartJob(
        kind="reshard",
        title=opened.title,
        names=names,
        source=" ".join((opened.identity, *joined.identities)),
        options=options,
        parts=len(firsts) - 1,
        name=limits.name,
        extras=_class_names(opened),
        storage_options=storage_options,
    )
    steps = steps.keeping(joined.fields)
    work = replace(work, job=job.run, template=names.template, steps=steps, join=joined.described)
    return SplitJob("", job, _works(work, firsts, job, joined))


class _Sizes(NamedTuple):
    """Sizes of new samples, by those of the source."""

    kept: float
    """Fraction of the bytes that is written."""
    added_bytes: int
    """Mean of the bytes that are added to a sample."""

    @property
    def options(self) -> dict[str, float]:
        """The sizes as options of the job, because they decide where shards are cut."""
        return {"kept": self.kept, "added_bytes": self.added_bytes}


def _works(
    work: ReshardWork, firsts: Numbers, job: PartJob, joined: OpenedJoin
) -> Iterator[ReshardWork]:
    """Yield the work of each part; the first is taken when the folder is claimed, and the keys of added fields are left there then."""
    if joined.sources:
        joined.write_indexes(job.open_folder(), job.run)
    yield from work.parts(firsts)


def _shard_names(
    dest: str | os.PathLike[str], opened: OpenedShards, joined: OpenedJoin
) -> ShardNames:
    """Return folder and names of the new shards; refuse the folders that are read."""
    names, storage = ShardNames.parse(dest), opened.catalog.storage
    place = storage.resolve(names.folder)[1].rstrip("/")
    folders = [parent_url(shard.url) for shard in opened.catalog.shards]
    folders += itertools.chain.from_iterable(source.folders for source in joined.sources)
    for taken in dict.fromkeys(folders):
        if storage.resolve(taken)[1].rstrip("/") == place:
            raise OptionError(
                "the shards would be overwritten while they are read; write elsewhere",
                shard=names.folder,
            )
    return names


def _class_names(opened: OpenedShards) -> dict[str, str]:
    """Return ``classes.json`` of the source; refuse folders that number their classes differently."""
    found = ClassNames(opened.located, opened.catalog.storage)
    differs = find_difference(found.found)
    if differs is not None:
        raise OptionError(
            f"class numbers differ among these shards: {differs}; reshard each folder separately"
        )
    return {} if found.names is None else {CLASSES_NAME: encode_classes(found.names).decode()}


def _kept_fraction(opened: OpenedShards, steps: SampleSteps, added: frozenset[str]) -> float:
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
    missing = sorted(steps.fields - known - added)
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
    catalog: ShardCatalog, limits: WriterOptions, *, is_shuffled: bool, sizes: _Sizes
) -> Numbers:
    """Return the first sample of each new shard, and the number of samples; shape (shards + 1,).

    In the order of the source, shards are filled up to the limits by the sizes of their samples. In a random order they have
    equal counts, from the mean size.

    Args:
        catalog: The source.
        limits: Maximum samples and bytes of a shard.
        is_shuffled: Whether the order is random.
        sizes: Sizes of new samples.
    """
    is_exact = sizes.kept == 1 and not sizes.added_bytes
    limit = (limits.max_bytes - len(END_OF_ARCHIVE)) / sizes.kept * (1.0 if is_exact else _FILL)
    added = round(sizes.added_bytes / sizes.kept)  # in bytes of the source, as the limit
    if is_shuffled:
        nsamples = len(catalog)
        mean = catalog.total_bytes / nsamples + added
        most = min(limits.max_samples, max(1, int(limit / mean * (_FILL if is_exact else 1))))
        count = -(-nsamples // most)
        return np.arange(count + 1, dtype=np.int64) * nsamples // count
    lengths = (np.diff(catalog.offsets(shard)) + added for shard in range(catalog.num_shards))
    return cut_by_size(lengths, limits.max_samples, limit)


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


class _SourceHere(NamedTuple):
    """What a process has open for a job."""

    opened: OpenedShards
    joined: OpenedJoin
    joiner: Joiner


# Of this process: call of `reshard` and thread -> its open sources. Each thread has its own: another one may end before it.
_sources_here: dict[tuple[str, int], _SourceHere] = {}


def _close_sources(is_over: Callable[[str, int], bool]) -> None:
    """Close the sources of the calls and threads that are over."""
    for key in [*_sources_here]:
        if is_over(*key) and (here := _sources_here.pop(key, None)):
            here.joined.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardWork:
    """The work of one part of `reshard`: one new shard, or several if its samples grow.

    Args:
        job: Identity of the job.
        call: Identity of the call of `reshard`, whose tasks share open sources.
        source: URLs of the source.
        source_options: Its ``storage_options``.
        identity: Its identity when the job was planned.
        seed: Seed of a random order; None keeps the order.
        limits: Maximum samples and bytes of a shard.
        template: Name of a shard.
        steps: Changes to samples.
        join: Sources of added fields.
        number: Number of the new shard.
        first: Position of its first sample in the order of the job.
        last: Position after its last.
    """

    job: str
    call: str
    source: Urls
    source_options: Mapping[str, Any] | None
    identity: str
    seed: int | None
    limits: WriterOptions
    template: str
    steps: SampleSteps
    join: FieldJoin
    number: int = 0
    first: int = 0
    last: int = 0

    def parts(self, firsts: Numbers) -> Iterator[ReshardWork]:
        """Yield the work of each part; ``firsts`` as `plan_shards` returns it."""
        for number, (first, last) in enumerate(itertools.pairwise(firsts.tolist())):
            yield replace(self, number=number, first=first, last=last)

    def write(self, folder: OutputFolder, check_owner: Callable[[], None]) -> PartResult:
        """Read, change and write the samples (see `PartWork.write`)."""
        here = self._open(folder.url)
        sources = here.joined.sources
        matched = [0] * len(sources)
        names = ShardNames(folder=folder.url, template=self.template)
        keys: list[str] = []
        name = partial(names.name, self.number)
        with closing(PartWriter(folder, self.limits, name=name, check_owner=check_owner)) as writer:
            with closing(self._samples(here, matched)) as samples:
                for key, fields in self.steps.apply(samples, self.job):
                    writer.write(key, fields)
                    keys.append(key)
            here.opened.catalog.check_manifests()
            for source in sources:
                source.check_unchanged()
            writer.finish()
        written = sum(shard.nsamples or 0 for shard in writer.shards)
        return PartResult(
            shards=tuple(writer.shards),
            fields=writer.fields,
            columns=tuple(writer.columns),
            left_out=self.last - self.first - written,
            key_hashes=encode_hashes(hash_keys(keys)),
            matched={
                source.url: (count, len(source))
                for source, count in zip(sources, matched, strict=True)
            },
        )

    def _open(self, folder_url: str) -> _SourceHere:
        """Open the sources, or take those that this thread has open.

        Raises:
            ChangedError: If one has changed since the job was planned.
        """
        mine = threading.get_ident()
        here = _sources_here.get((self.call, mine))
        if here is None:
            opened = open_shards(self.source, self.source_options)
            if opened.identity != self.identity:
                raise ChangedError(
                    "the source has changed since the job began; start the job again in another folder, or with overwrite=True "
                    "(--overwrite)",
                    shard=opened.catalog.url_of(0),
                )
            joined = self.join.open()
            joiner = joined.open_joiner(folder_url, self.job)
            _close_sources(lambda _, thread: thread == mine)
            here = _sources_here[self.call, mine] = _SourceHere(opened, joined, joiner)
        return here

    def _samples(self, here: _SourceHere, matched: list[int]) -> Generator[Sample]:
        """Yield the samples of the part, with added fields."""
        catalog = here.opened.catalog
        size = _chunk_samples(catalog.total_bytes // len(catalog) + here.joined.mean_bytes)
        with (
            closing(self._read(catalog)) as samples,
            closing(here.joiner.apply(samples, size, matched)) as joined,
        ):
            yield from joined

    def _read(self, catalog: ShardCatalog) -> Generator[Sample]:
        numbers = np.arange(self.first, self.last, dtype=np.int64)
        if self.seed is not None:
            numbers = permute(numbers, len(catalog), derive_key(self.seed, _PURPOSE))
        size = _chunk_samples(catalog.total_bytes // len(catalog))
        chunks = [numbers[at : at + size] for at in range(0, len(numbers), size)]
        with closing(
            open_fetcher(catalog, iter(chunks), prefetch_bytes=_PREFETCH_BYTES)
        ) as fetcher:
            for chunk in chunks:
                for row in fetcher.samples(chunk):
                    if isinstance(row, Exception):
                        raise row
                    yield row


def _chunk_samples(mean_bytes: int) -> int:
    """Return how many samples are read together."""
    return max(1, min(_CHUNK_SAMPLES, _CHUNK_BYTES // max(1, mean_bytes)))
