"""Pack a source into shards: source -> records -> encoded samples -> parts of one or several datasets."""

from __future__ import annotations

import itertools
import json
import os
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from shardstream.errors import ChangedError, OptionError, SampleError, SourceError, parse_bytes
from shardstream.format import END_OF_ARCHIVE, ColumnSources
from shardstream.packing.encode import encode_field
from shardstream.packing.images import DEFAULT_QUALITY, ImageOptions
from shardstream.packing.job.pack_plan import PackPlan, PackRequest, folder_of_split
from shardstream.packing.job.parallel_encode import Encoded, EncoderPool, chunked, value_bytes
from shardstream.packing.job.parts import (
    PartJob,
    Place,
    fields_bytes,
    number_parts,
    records_that_fit,
)
from shardstream.packing.job.report import PackReport, Progress, ProgressFunction
from shardstream.packing.job.run_jobs import FindKept, run_jobs
from shardstream.packing.shards.column_builder import checked_columns
from shardstream.packing.shards.part_writer import PartResult, PartWriter, WriterOptions
from shardstream.packing.shards.shard_writer import DEFAULT_MAX_BYTES, DEFAULT_MAX_SAMPLES
from shardstream.packing.sources.class_numbering import AnyClasses
from shardstream.packing.sources.detection import AnySource
from shardstream.packing.sources.source import FileRef, Numbers, Record, SourceOptions, named
from shardstream.tasks import Executor, forget, keep

T = TypeVar("T")

_PROBES_AT_ONCE = 4  # that a process encodes
_SIZED = frozenset((FileRef, bytes, int))  # their length in a tar is known as they are


def pack(  # noqa: PLR0913  (public door)
    source: AnySource,
    dest: str | os.PathLike[str],
    *,
    kind: str | None = None,
    name: str = "",
    max_samples: int = DEFAULT_MAX_SAMPLES,
    max_bytes: int | str = DEFAULT_MAX_BYTES,
    key: str | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    split: Mapping[str, float] | None = None,
    fields: Mapping[str, str] | None = None,
    root: str | None = None,
    allow: Sequence[str] = (),
    header: Sequence[str] = (),
    classes: AnyClasses | None = None,
    max_side: int | None = None,
    quality: int | None = None,
    image_format: str | None = None,
    masks: Sequence[str] | None = None,
    scale_16_bits: bool = False,
    check: bool = False,
    columns: ColumnSources | None = None,
    processes: int | None = None,
    executor: Executor | None = None,
    append: bool = False,
    check_keys: bool = True,
    overwrite: bool = False,
    on_error: Literal["raise", "skip"] = "raise",
    progress: Callable[[Progress], object] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    source_options: Mapping[str, Any] | None = None,
) -> PackReport:
    """Pack a source into shards, and publish them as a dataset; equal input gives equal bytes, whatever ``processes`` is.

    A job that was stopped or killed is resumed by a call with the same source and options: finished shards are kept.
    Samples from Python are packed again, unless their source has the same ``fingerprint``.

    Args:
        source: A folder of class folders with images (or of splits that hold class folders), a folder of loose files, a table
            (CSV, TSV, JSON lines, Parquet) or tars, local or on any fsspec file system; or an iterable of samples as
            `ShardWriter.write` takes them.
        dest: Folder, or pattern with ``{shard}``.
        kind: "images", "files", "table" or "tars"; by default guessed.
        name: Name of the dataset, kept in the manifest.
        max_samples: Maximum samples of a shard.
        max_bytes: Maximum size of a shard, e.g. "256MB". Shards are filled to 90 % where sizes are not known before: images that are
            encoded again, files that a table names, Parquet, tars.
        key: Template of the keys, e.g. "{index:08d}", "{class}/{stem}"; of a table also the name of a column. By default images
            are named by their stems, or, if two images of a dataset have one stem, by their paths without extension (docs/formats.md), loose
            files by their path up to the first dot, rows and samples by their number; tars keep their keys.
        shuffle: Pack in a random order: by default a folder of classes alone, which would be sorted by class otherwise.
        seed: Seed of the order and the splits.
        split: Name -> fraction, e.g. {"train": 0.9, "val": 0.1}: one dataset each, in a folder of that name under ``dest``. A source with
            folders train, val, … that hold the folders of classes has these splits.
        fields: For a table: field -> column, e.g. {"jpg": "path", "cls": "label"}; by default all columns go to ``json``.
        root: For a table: the folder that its paths are relative to; by default its own.
        allow: For a remote table: beginnings of URLs, such as "https://" or "s3://bucket/images", that it may name although they are not
            under ``root``. A local table may name anything that you can read.
        header: For CSV and TSV without names in their first line: the names of the columns, e.g. ["path", "caption"].
        classes: Class names in the order of their numbers, or the URL of a ``classes.json`` or of the folder of a packed
            dataset. By default the numbers of a split that is already packed in the same parent folder (``out/train`` for
            ``out/val``), else those of the sorted names. For a table: the names are in the column of the field ``cls``.
        max_side: Make larger images smaller: the longest side in pixels.
        quality: Quality of JPEG and WebP that are encoded again because of ``max_side`` or ``image_format``, 1 to 100; by default 90.
        image_format: Turn all images but masks into "jpg", "png" or "webp".
        masks: Fields whose pixels are numbers, which are never averaged: the nearest pixel is taken. By default those with a word
            such as mask, seg, label or depth before their last part, and a png if there is a jpg of the same name.
        scale_16_bits: Scale images of 9 to 16 bits to 8 bits, which "rgb8" and its like can decode; masks keep all bits.
        check: Decode all pixels of each image, as `verify` with ``decode=True``: a truncated one cannot be packed. By default its header is read.
        columns: Also write ``NAME.tar.cols.parquet`` with the key of each sample and these values (see `index`); no functions.
        processes: Processes that read and encode, by default 1; an executor has its own. They are used if there is something to encode or files are remote; local
            files that are packed unchanged are read in this process.
        executor: Pack shards as separate tasks, in processes, on a cluster or in `Parts`, which `merge` publishes (docs/jobs.md).
            The shards are those of a pack without an executor. Not for samples from Python.
        append: Add the shards to the dataset at ``dest``, as a new version; no shard that is there is written again. Fields and columns are those of
            the dataset, new classes get the next numbers, and keys that are running numbers begin with some digits of their own.
        check_keys: With ``append``: compare the keys with those of the dataset. The first append reads all of them, later ones 8 bytes a sample.
        overwrite: Replace an existing dataset, or an unfinished one of another job.
        on_error: For a file or row that cannot be packed: "raise", or "skip" it and report it.
        progress: Called about ten times a second.
        storage_options: ``storage_options`` of fsspec for the destination.
        source_options: The same for the source; by default those of the destination.

    Raises:
        OptionError: If an argument is wrong, or a dataset is there already.
        SourceError: If a file or row cannot be packed, or there is nothing to pack.
        ShardError: If a tar that is packed again is damaged.
        StorageError: If a place cannot be reached or is full, or another pack writes there; then no split is
            published. If a published split cannot be unpublished, a note of the error names it.
    """
    _check_options(processes, executor, on_error)
    limits = WriterOptions(max_samples=max_samples, max_bytes=parse_bytes(max_bytes), name=name)
    pixels: dict[str, Any] = {"check": check, "scale_16_bits": scale_16_bits}
    table: dict[str, Any] = {"fields": fields or {}, "root": root, "allow": _names(allow)}
    request = PackRequest(
        source=source,
        dest=dest,
        source_options=SourceOptions(kind=kind, key=key, header=_names(header), **table),
        limits=replace(
            limits,
            columns=None if columns is None else checked_columns(columns, takes_functions=False),
        ),
        shuffle=shuffle,
        seed=seed,
        split=split or {},
        classes=classes,
        images=replace(_image_options(max_side, quality, image_format, masks), **pixels),
        reading=storage_options if source_options is None else source_options,
        writing=storage_options,
        skips=on_error == "skip",
        appends=append,
        checks_keys=check_keys,
    )
    return run_pack(
        request, executor, processes=processes or 1, overwrite=overwrite, progress=progress
    )


def _check_options(processes: int | None, executor: Executor | None, on_error: str) -> None:
    if processes is not None and processes < 1:
        raise OptionError(f"processes must be 1 or more, not {processes}")
    if processes is not None and executor is not None:
        raise OptionError(
            f"processes={processes} has no effect with an executor; give it to the executor, as in LocalExecutor(processes={processes})"
        )
    if on_error not in ("raise", "skip"):
        raise OptionError(f"on_error is 'raise' or 'skip', not {on_error!r}")


def _image_options(
    max_side: int | None, quality: int | None, image_format: str | None, masks: Sequence[str] | None
) -> ImageOptions:
    images = ImageOptions(
        max_side=max_side,
        quality=DEFAULT_QUALITY if quality is None else quality,
        format=image_format,
        masks=None if masks is None else _names(masks),
    )
    if quality is not None and images.changes_nothing:
        raise OptionError(
            f"quality={quality} (--quality) has no effect, since images are packed as they are; "
            "pass max_side (--max-side) or image_format (--image-format), too, or leave it out"
        )
    if quality is not None and image_format == "png":
        raise OptionError(
            f"quality={quality} (--quality) has no effect on png, which keeps all pixels; leave it out, or pass image_format='jpg' or 'webp' "
            "(--image-format jpg)"
        )
    return images


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def run_pack(
    request: PackRequest,
    executor: Executor | None,
    *,
    processes: int,
    overwrite: bool,
    progress: ProgressFunction | None,
) -> PackReport:
    """Pack in this process, with ``processes`` that encode, or by an executor (see `pack`)."""
    if executor is not None:
        if not isinstance(request.source, str | os.PathLike):
            raise OptionError(
                "samples from Python are packed in this process: write them to files or a table to pack them in others, or leave executor out"
            )
        request = request.with_absolute_paths()
    if request.appends or not request.checks_keys:
        request = request.with_base(is_new=overwrite or bool(request.limits.name))
    plan, call = request.open(), uuid.uuid4().hex
    with EncoderPool(plan.encoder, processes) as pool:
        cut = _Cut.of(plan, request, pool)
        jobs = [*map(partial(_split_job, plan, request, cut, call), plan.splits)]
        stream = None
        if executor is None:
            stream = partial(_open_stream, plan, cut, pool)
        else:
            work = PackWork(request=request, identity=_identity(plan), call=call)
            for split, firsts in enumerate(cut.firsts(plan)):
                works = work.parts(split, firsts)
                jobs[split] = replace(jobs[split], parts=len(firsts) - 1, works=works)
        try:
            report = run_jobs(
                jobs,
                executor=executor,
                overwrite=overwrite,
                progress=progress,
                samples=cut.count or plan.total,
                stream=stream,
            )
        finally:
            if executor is not None:
                forget(call)
    return replace(report, files=plan.source.num_files)


def _split_job(plan: PackPlan, request: PackRequest, cut: _Cut, call: str, split: str) -> PartJob:
    options = dict(plan.task.options)
    if cut.part_records is not None:  # of two processes that measure differently, one stops
        options["part_records"] = cut.part_records
    job = PartJob(
        kind="pack",
        title=plan.source.name,
        names=replace(plan.names, folder=folder_of_split(plan.names, split)),
        source=plan.task.source,
        options=options | {"split_name": split, "split_names": [*plan.splits]},
        limits=request.limits,
        extras={} if request.base else plan.source.extras,
        storage_options=request.writing,
        split=split,
        skips=request.skips,
        keeps_keys=plan.source.may_repeat_keys,
        call=call,
    )
    if request.base is None:
        return job
    folder, limits = request.base.folder_for(job.run[:16]), request.limits
    if limits.num_classes is not None:  # the source may name more
        named = plan.task.options["append"]["classes"].values()
        limits = replace(limits, num_classes=max([limits.num_classes - 1, *named]) + 1)
    return replace(job, names=replace(job.names, folder=folder), limits=limits)


def _identity(plan: PackPlan) -> str:
    """Return a text that changes with source and options."""
    return json.dumps([plan.task.source, dict(plan.task.options)], sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """Where the parts of a pack begin; the same whoever runs them.

    Args:
        max_records: Maximum records of a part.
        max_bytes: Maximum bytes of a part, without the end of its tar.
        part_records: Records of each part, where sizes are not known before; then they are not compared with ``max_bytes``.
        count: Number of all records, where sizes are not known before.
        is_encoded_first: Whether a process that writes all parts cuts the samples when they are encoded: those from Python, which only this
            process has, and values without files, which are encoded once then, and here: sending them to other processes takes longer.
    """

    max_records: int
    max_bytes: int
    part_records: int | None = None
    count: int = 0
    is_encoded_first: bool = False

    @classmethod
    def of(cls, plan: PackPlan, request: PackRequest, pool: EncoderPool) -> _Cut:
        """Return the cut of a pack: by the sizes of files that stay as they are, else by the mean size of some records.

        Raises:
            StorageError: If files cannot be reached.
        """
        limits, source, records = request.limits, plan.source, plan.records
        cut = cls(max_records=limits.max_samples, max_bytes=limits.max_bytes - len(END_OF_ARCHIVE))
        if not isinstance(request.source, str | os.PathLike):
            return replace(cut, is_encoded_first=True)
        if source.has_sizes and request.images.changes_nothing:
            return replace(cut, is_encoded_first=pool.processes == 1 and not source.may_name_files)
        count = records.count()
        if source.total_bytes is not None and request.images.changes_nothing:
            mean_bytes = source.total_bytes / max(1, count)
        else:
            some = ((None, record) for record in records.spaced_records(count))
            samples = pool.encode(some, _PROBES_AT_ONCE)
            sizes = [_encoded_bytes(sample) for _, sample in samples if sample.error is None]
            mean_bytes = sum(sizes) / max(1, len(sizes))
        fit = records_that_fit(mean_bytes, cut.max_records, cut.max_bytes)
        return replace(cut, part_records=fit, count=count)

    def number(
        self, records: Iterable[tuple[int, Record]], firsts: Sequence[int]
    ) -> Iterator[tuple[Place, Record]]:
        """Yield records with the numbers of their splits and parts; ``firsts`` as in `number_parts`."""
        if self.part_records is not None:
            unsized = ((split, record, 0) for split, record in records)
            return number_parts(unsized, self.part_records, 0, firsts)
        return number_parts(_with_sizes(records), self.max_records, self.max_bytes, firsts)

    def firsts(self, plan: PackPlan) -> list[Numbers]:
        """Return for each split the first record of each part among its records, and their number; shape (parts + 1,).

        Raises:
            SourceError: If a split has no records.
        """
        splits = range(len(plan.splits))
        counts, firsts = [0] * len(splits), [list[int]() for _ in splits]
        if self.part_records is None:
            for (split, part), _ in self.number(plan.iter_from(dict.fromkeys(splits, 0)), counts):
                if part == len(firsts[split]):
                    firsts[split].append(counts[split])
                counts[split] += 1
        else:
            counts = [self.count] if plan.assigned is None else plan.split_counts()
            firsts = [[*range(0, count, self.part_records)] for count in counts]
        if not all(counts):
            raise _empty_error(plan)
        return [
            np.array([*some, count], dtype=np.int64)
            for some, count in zip(firsts, counts, strict=True)
        ]


def _empty_error(plan: PackPlan) -> SourceError:
    return SourceError("there is nothing to pack: the source is empty", shard=plan.source.name)


def _with_sizes(records: Iterable[tuple[int, Record]]) -> Iterator[tuple[int, Record, int]]:
    """Yield records with the numbers of their splits, and with their bytes in a tar: all values but files and whole numbers become bytes, or an error."""
    for split, given in records:
        is_sized = _SIZED.issuperset(map(type, given.fields.values()))
        record = given if is_sized else _with_encoded_values(given)
        sizes = map(value_bytes, record.fields.values())
        yield split, record, fields_bytes(record.key, zip(record.fields, sizes, strict=True))


def _with_encoded_values(record: Record) -> Record:
    try:
        return record._replace(
            fields={
                field: value if isinstance(value, FileRef) else encode_field(field, value)
                for field, value in record.fields.items()
            }
        )
    except SampleError as error:
        return Record(record.key, {}, record.where, named(error, record.where))


def _encoded_bytes(sample: Encoded) -> int:
    return fields_bytes(sample.key, ((field, len(data)) for field, data in sample.fields.items()))


def _open_stream(
    plan: PackPlan, cut: _Cut, pool: EncoderPool, jobs: Collection[int], find_kept: FindKept
) -> Generator[tuple[Place, Encoded], None, None]:
    """Yield the samples of the splits whose parts are not kept, from one pass over the records (see `OpenStream`)."""
    missing = set(jobs)
    firsts, begins = [0] * len(plan.splits), dict.fromkeys(jobs, 0)
    for split in jobs:
        # The records of the first kept parts are not read again: each was written or skipped.
        while (kept := find_kept(split, firsts[split])) is not None:
            missing.discard(split)
            firsts[split] += 1
            begins[split] += kept.nsamples + len(kept.skipped)
    records = plan.iter_from(begins)
    if cut.is_encoded_first:
        sized = ((split, one, _encoded_bytes(one)) for split, one in pool.encode(records))
        cuts = number_parts(sized, cut.max_records, cut.max_bytes, firsts)
        numbered = _without_kept(cuts, firsts, find_kept)
    else:  # files of kept parts are not opened
        numbered = pool.encode(_without_kept(cut.number(records, firsts), firsts, find_kept))
    for place, sample in numbered:
        missing.discard(place[0])
        yield place, sample
    if missing:
        raise _empty_error(plan)


def _without_kept(
    numbered: Iterable[tuple[Place, T]], firsts: Sequence[int], find_kept: FindKept
) -> Iterator[tuple[Place, T]]:
    """Leave out the items of kept parts; the first part of each split is known not to be."""
    parts, is_kept = [*firsts], [False] * len(firsts)
    for (split, part), item in numbered:
        if part != parts[split]:
            parts[split] = part
            is_kept[split] = find_kept(split, part) is not None
        if not is_kept[split]:
            yield (split, part), item


@dataclass(frozen=True, slots=True, kw_only=True)
class PackWork:
    """The work of one part of a pack.

    Args:
        request: The arguments of the pack.
        identity: Source and options when the job was planned.
        call: Identity of the call of `pack`.
        split: Number of the split.
        first: Position of its first record among those of the split.
        last: Position after its last.
    """

    request: PackRequest
    identity: str
    call: str
    split: int = 0
    first: int = 0
    last: int = 0

    def parts(self, split: int, firsts: Numbers) -> Iterator[PackWork]:
        """Yield the work of each part of a split; ``firsts`` as `_Cut.firsts` returns it."""
        for first, last in itertools.pairwise(firsts.tolist()):
            yield replace(self, split=split, first=first, last=last)

    def write(self, writer: PartWriter) -> PartResult:
        """Read, encode and write the records (see `PartWork.write`).

        Raises:
            SourceError: If a record cannot be packed, unless such records are skipped.
            ChangedError: If the source has changed since the job was planned.
        """
        # By the call: two sources may have one identity, such as tables that are equal, but name files of other folders.
        plan = keep(self.call, "source", self._open)
        records = itertools.islice(plan.iter_from({self.split: self.first}), self.last - self.first)
        for _, some in chunked(records):
            for sample in plan.encoder.encode(some):
                writer.add(sample, skips=self.request.skips)
        return PartResult()

    def _open(self) -> PackPlan:
        """Open the source."""
        plan = self.request.open()
        if _identity(plan) != self.identity:
            raise ChangedError(
                "the source, or the class numbers of a dataset next to the destination, have changed since the job began; start it "
                "again in another folder, or with overwrite=True (--overwrite)",
                shard=plan.source.name,
            )
        return plan
