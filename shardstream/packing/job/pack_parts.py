"""Cut a pack into parts: shards that this process writes from one stream of records, or tasks that any process may run."""

from __future__ import annotations

import itertools
import json
import os
import uuid
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TypeVar

import numpy as np

from shardstream.errors import ChangedError, OptionError, SampleError, SourceError
from shardstream.format import END_OF_ARCHIVE
from shardstream.packing.encode import encode_field
from shardstream.packing.job.claim import PartJob
from shardstream.packing.job.cut import fields_bytes, number_parts, records_that_fit
from shardstream.packing.job.key_hashes import encode_hashes, hash_keys
from shardstream.packing.job.pack_plan import OpenedPack, PackPlan, PackRequest, folder_of_split
from shardstream.packing.job.parallel_encode import Encoded, chunked, encode_in_order
from shardstream.packing.job.part_record import PartResult
from shardstream.packing.job.report import PackReport, ProgressFunction, Skip
from shardstream.packing.job.run_jobs import (
    CountSample,
    FindKept,
    NumberedWork,
    SplitJob,
    run_jobs,
)
from shardstream.packing.shards.part_writer import PartWriter
from shardstream.packing.sources.source import FileRef, Record, named
from shardstream.packing.sources.split import Numbers, SplitNumbers
from shardstream.tasks import Executor

T = TypeVar("T")

_SIZED = (FileRef, bytes, int)  # their length in a tar is known as they are


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
    opened = request.open()
    plan, cut = opened.plan, _Cut.of(opened, request, processes)
    jobs, call = [], uuid.uuid4().hex
    for split, name in enumerate(plan.splits):
        job = _part_job(opened, request, cut, name)
        if executor is None:
            stream = PackStream(
                opened=opened, request=request, cut=cut, split=split, processes=processes
            )
            jobs.append(SplitJob(name, job, streamed=stream))
            continue
        firsts = cut.firsts(plan, split)
        work = PackWork(request=request, identity=_identity(opened), call=call, split=split)
        jobs.append(SplitJob(name, replace(job, parts=len(firsts) - 1), work.parts(firsts)))
    try:
        report = run_jobs(
            jobs,
            executor=executor,
            overwrite=overwrite,
            progress=progress,
            samples=cut.count or plan.total,
            skips=request.skips,
        )
    finally:
        _opened_here.clear()
    return replace(report, files=plan.source.num_files)


def _part_job(opened: OpenedPack, request: PackRequest, cut: _Cut, split: str) -> PartJob:
    plan, options = opened.plan, dict(opened.task.options)
    if cut.part_records is not None:  # of two processes that measure differently, one stops
        options["part_records"] = cut.part_records
    extras = {
        name: data.decode("utf-8", "surrogateescape") for name, data in plan.source.extras.items()
    }
    return PartJob(
        kind="pack",
        title=plan.source.name,
        names=replace(opened.names, folder=folder_of_split(opened.names, split)),
        source=opened.task.source,
        options=options | {"split_name": split, "split_names": [*plan.splits]},
        limits=request.limits,
        extras=extras,
        storage_options=request.writing,
    )


def _identity(opened: OpenedPack) -> str:
    """Return a text that changes with source and options."""
    return json.dumps([opened.task.source, dict(opened.task.options)], sort_keys=True)


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
    def of(cls, opened: OpenedPack, request: PackRequest, processes: int) -> _Cut:
        """Return the cut of a pack: by the sizes of files that stay as they are, else by the mean size of some records.

        Raises:
            StorageError: If files cannot be reached.
        """
        limits, source, records = request.limits, opened.plan.source, opened.plan.records
        cut = cls(max_records=limits.max_samples, max_bytes=limits.max_bytes - len(END_OF_ARCHIVE))
        if not isinstance(request.source, str | os.PathLike):
            return replace(cut, is_encoded_first=True)
        if source.has_sizes and request.images.changes_nothing:
            return replace(cut, is_encoded_first=processes == 1 and not source.may_name_files)
        count = records.count()
        if source.total_bytes is not None and request.images.changes_nothing:
            mean_bytes = source.total_bytes / max(1, count)
        else:
            some = records.spaced_records(count)
            with closing(encode_in_order(some, opened.encoder, processes=processes)) as samples:
                sizes = [_encoded_bytes(sample) for sample in samples if sample.error is None]
            mean_bytes = sum(sizes) / max(1, len(sizes))
        fit = records_that_fit(mean_bytes, cut.max_records, cut.max_bytes)
        return replace(cut, part_records=fit, count=count)

    def number(self, records: Iterable[Record], first: int = 0) -> Iterator[tuple[int, Record]]:
        """Yield records with the number of their part; the first begins part ``first``."""
        if self.part_records is not None:
            return number_parts(records, lambda _: 0, self.part_records, 0, first=first)
        encoded = map(_encode_values, records)
        return number_parts(encoded, _record_bytes, self.max_records, self.max_bytes, first=first)

    def number_encoded(
        self, samples: Iterable[Encoded], first: int
    ) -> Iterator[tuple[int, Encoded]]:
        """Yield encoded samples with the number of their part; the first begins part ``first``."""
        return number_parts(samples, _encoded_bytes, self.max_records, self.max_bytes, first=first)

    def firsts(self, plan: PackPlan, split: int) -> Numbers:
        """Return the first record of each part among the records of a split, and their number; shape (parts + 1,).

        Raises:
            SourceError: If the source has no records.
        """
        if self.part_records is not None:
            count = self.count if plan.assigned is None else int((plan.assigned == split).sum())
            firsts = [*range(0, count, self.part_records)]
        else:
            count, firsts = 0, list[int]()
            for count, (part, _) in enumerate(self.number(records_of(plan, split, 0)), start=1):
                if part == len(firsts):
                    firsts.append(count - 1)
        if not firsts:
            raise _empty_error(plan)
        return np.array([*firsts, count], dtype=np.int64)


def _empty_error(plan: PackPlan) -> SourceError:
    return SourceError("there is nothing to pack: the source is empty", shard=plan.source.name)


def _encode_values(record: Record) -> Record:
    """Return a record with all values but files and whole numbers as bytes, or with its error."""
    if all(type(value) in _SIZED for value in record.fields.values()):
        return record
    try:
        return record._replace(
            fields={
                field: value if isinstance(value, FileRef) else encode_field(field, value)
                for field, value in record.fields.items()
            }
        )
    except SampleError as error:
        return Record(record.key, {}, record.where, named(error, record.where))


def _record_bytes(record: Record) -> int:
    """Return how many bytes a record of files, bytes and whole numbers takes in a tar."""
    sizes = [(field, _value_bytes(value)) for field, value in record.fields.items()]
    return fields_bytes(record.key, sizes)


def _value_bytes(value: FileRef | bytes | int) -> int:
    if isinstance(value, FileRef):
        return value.size
    return len(value) if isinstance(value, bytes) else len(b"%d" % value)


def _encoded_bytes(sample: Encoded) -> int:
    return fields_bytes(sample.key, ((field, len(data)) for field, data in sample.fields.items()))


def records_of(plan: PackPlan, split: int, first: int) -> Iterator[Record]:
    """Yield the records of a split, from its ``first``-th on.

    Args:
        plan: Records of all splits, in packing order.
        split: Number of the split.
        first: Position among the records of the split.
    """
    assigned = plan.assigned
    if assigned is None:
        return plan.records.iter_from(first)
    begin = _nth(assigned, split, first)
    return plan.records.iter_some(begin, lambda number: bool(assigned[number] == split))


def _nth(assigned: SplitNumbers, split: int, count: int) -> int:
    """Return the number of the record of a split that has ``count`` others before it; that of all records if there is none."""
    return bisect_left(
        range(len(assigned)),
        count + 1,
        key=lambda number: int(np.count_nonzero(assigned[: number + 1] == split)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncodedPart:
    """The work of a part whose samples are encoded one after the other.

    Args:
        samples: The samples, or the errors of their records.
        skips: Whether records that cannot be packed are skipped.
        may_repeat_keys: Whether keys are compared when the dataset is published.
        count_sample: Called with the bytes of each sample.
    """

    samples: Iterable[Encoded]
    skips: bool
    may_repeat_keys: bool
    count_sample: CountSample = lambda _: None

    def write(self, writer: PartWriter) -> PartResult:
        """Write the samples (see `PartWork.write`).

        Raises:
            SourceError: If a record cannot be packed, unless such records are skipped.
        """
        skipped: list[Skip] = []
        keys: list[str] = []
        for sample in self.samples:
            error, before = sample.error, writer.size_bytes
            if error is None:
                try:
                    writer.write(sample.key, sample.fields)
                except SampleError as unfit:
                    error = named(unfit, sample.where)
            if error is not None:
                if not self.skips:
                    raise error
                skipped.append(Skip(sample.where, str(error)))
                continue
            self.count_sample(writer.size_bytes - before)
            if self.may_repeat_keys:
                keys.append(sample.key)
        return PartResult(skipped=tuple(skipped), key_hashes=encode_hashes(hash_keys(keys)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackStream:
    """The parts of a split that this process writes: one pass over the records, which are encoded ahead, also across parts.

    Args:
        opened: The pack.
        request: Its arguments.
        cut: Where parts begin.
        split: Number of the split.
        processes: Processes that encode.
    """

    opened: OpenedPack
    request: PackRequest
    cut: _Cut
    split: int
    processes: int

    def open(
        self, find_kept: FindKept, count_sample: CountSample
    ) -> Generator[NumberedWork, None, None]:
        """Yield the parts that are not kept (see `StreamedParts`)."""
        plan, part, first = self.opened.plan, 0, 0
        # The records of the first kept parts are not read again: each was written or skipped.
        while (kept := find_kept(part)) is not None:
            part += 1
            first += kept.nsamples + len(kept.skipped)
        records = records_of(plan, self.split, first)
        cut = self._cut_encoded if self.cut.is_encoded_first else self._cut_records
        with closing(cut(records, part, find_kept)) as numbered:
            for number, samples in itertools.groupby(numbered, key=itemgetter(0)):
                part = number + 1
                yield (
                    number,
                    _EncodedPart(
                        samples=map(itemgetter(1), samples),
                        skips=self.request.skips,
                        may_repeat_keys=plan.source.may_repeat_keys,
                        count_sample=count_sample,
                    ),
                )
        if not part:
            raise _empty_error(plan)

    def _cut_records(
        self, records: Iterable[Record], first: int, find_kept: FindKept
    ) -> Generator[tuple[int, Encoded]]:
        """Yield encoded samples with the numbers of their parts; files of kept parts are not opened."""
        todo = _without_kept(self.cut.number(records, first), first, find_kept)
        numbered, again = itertools.tee(todo)
        with closing(self._encode(record for _, record in again)) as encoded:
            for sample, (number, _) in zip(encoded, numbered, strict=True):
                yield number, sample

    def _cut_encoded(
        self, records: Iterable[Record], first: int, find_kept: FindKept
    ) -> Generator[tuple[int, Encoded]]:
        """Yield encoded samples with the numbers of their parts, which are known only now."""
        with closing(self._encode(records)) as encoded:
            yield from _without_kept(self.cut.number_encoded(encoded, first), first, find_kept)

    def _encode(self, records: Iterable[Record]) -> Generator[Encoded]:
        return encode_in_order(records, self.opened.encoder, processes=self.processes)


def _without_kept(
    numbered: Iterable[tuple[int, T]], first: int, find_kept: FindKept
) -> Iterator[tuple[int, T]]:
    """Leave out the items of the parts after ``first`` that are kept."""
    for number, mine in itertools.groupby(numbered, key=itemgetter(0)):
        if number == first or find_kept(number) is None:
            yield from mine


# Of this process: the source that was opened last, by its call. Two sources may have one identity: tables that are equal, but name files of
# other folders.
_opened_here: dict[str, OpenedPack] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackWork:
    """The work of one part of a pack.

    Args:
        request: The arguments of the pack.
        identity: Source and options when the job was planned.
        call: Identity of the call of `pack`.
        split: Number of the split.
        number: Number of the part.
        first: Position of its first record among those of the split.
        last: Position after its last.
    """

    request: PackRequest
    identity: str
    call: str
    split: int
    number: int = 0
    first: int = 0
    last: int = 0

    def parts(self, firsts: Numbers) -> Iterator[PackWork]:
        """Yield the work of each part; ``firsts`` as `_Cut.firsts` returns it."""
        for number, (first, last) in enumerate(itertools.pairwise(firsts.tolist())):
            yield replace(self, number=number, first=first, last=last)

    def write(self, writer: PartWriter) -> PartResult:
        """Read, encode and write the records (see `PartWork.write`).

        Raises:
            SourceError: If a record cannot be packed, unless such records are skipped.
            ChangedError: If the source has changed since the job was planned.
        """
        opened = self._open()
        may_repeat_keys = opened.plan.source.may_repeat_keys
        return _EncodedPart(
            samples=self._encoded(opened),
            skips=self.request.skips,
            may_repeat_keys=may_repeat_keys,
        ).write(writer)

    def _open(self) -> OpenedPack:
        """Open the source, or take the one that this process has open."""
        opened = _opened_here.get(self.call)
        if opened is None:
            opened = self.request.open()
            if _identity(opened) != self.identity:
                raise ChangedError(
                    "the source, or the class numbers of a dataset next to the destination, have changed since the job began; start it "
                    "again in another folder, or with overwrite=True (--overwrite)",
                    shard=opened.plan.source.name,
                )
            _opened_here.clear()
            _opened_here[self.call] = opened
        return opened

    def _encoded(self, opened: OpenedPack) -> Iterator[Encoded]:
        records = records_of(opened.plan, self.split, self.first)
        for some in chunked(itertools.islice(records, self.last - self.first)):
            yield from opened.encoder.encode(some)
