"""Pack a source in parts: each shard is a task that any process may run."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from shardstream.errors import ChangedError, OptionError, SampleError, SourceError
from shardstream.format import END_OF_ARCHIVE, member_bytes
from shardstream.packing.encode import encode_field
from shardstream.packing.job.cuts import cut_by_size
from shardstream.packing.job.key_hashes import encode_hashes, hash_keys
from shardstream.packing.job.merge import SplitJob, run_jobs
from shardstream.packing.job.pack_plan import OpenedPack, PackPlan, PackRequest, folder_of_split
from shardstream.packing.job.parallel_encode import Encoded, chunked
from shardstream.packing.job.part_job import PartJob, PartResult
from shardstream.packing.job.report import PackReport, ProgressFunction, Skip
from shardstream.packing.shards.part_writer import PartWriter
from shardstream.packing.sources.source import FileRef, Record, named
from shardstream.packing.sources.split import Numbers, SplitNumbers
from shardstream.storage import OutputFolder
from shardstream.tasks import Executor

_SIZES = 4096
_COUNTED = 1 << 20


def pack_in_parts(
    request: PackRequest,
    executor: Executor,
    *,
    overwrite: bool,
    progress: ProgressFunction | None,
) -> PackReport:
    """Pack with an executor (see `pack`)."""
    request = request.with_absolute_paths()
    opened = request.open()
    plan = opened.plan
    if opened.task.source is None or not isinstance(request.source, str | os.PathLike):
        raise OptionError(
            "samples from Python are packed in this process: write them to files or a table to pack them in others, or leave executor out"
        )
    extras = {name: data.decode() for name, data in plan.source.extras.items()}
    jobs = []
    for split, name in enumerate(plan.splits):
        firsts = _cut(opened, request, split)
        folder = folder_of_split(opened.names, name)
        job = PartJob(
            kind="pack",
            title=plan.source.name,
            names=replace(opened.names, folder=folder),
            source=opened.task.source,
            options={
                **opened.task.options,
                "split_name": name,
                "split_names": [*plan.splits],
            },
            parts=len(firsts) - 1,
            name=request.limits.name,
            extras=extras,
            storage_options=request.writing,
        )
        work = PackWork(request=request, identity=_identity(opened), split=split)
        jobs.append(SplitJob(name, job, work.parts(firsts)))
    try:
        report = run_jobs(
            jobs,
            executor=executor,
            overwrite=overwrite,
            progress=progress,
            samples=plan.total,
            skips=request.skips,
        )
    finally:
        _opened_here.clear()
    return replace(report, files=plan.source.num_files)


def _identity(opened: OpenedPack) -> str:
    """Return a text that changes with source and options."""
    return json.dumps([opened.task.source, dict(opened.task.options)], sort_keys=True)


def _cut(opened: OpenedPack, request: PackRequest, split: int) -> Numbers:
    """Return the first record of each part among the records of a split, and their number; shape (parts + 1,).

    Files that stay as they are are cut like a pack in one process, by their sizes. Otherwise a part has ``max_samples`` records.

    Raises:
        SourceError: If the source has no records.
    """
    plan, limits = opened.plan, request.limits
    room = limits.max_bytes - len(END_OF_ARCHIVE)
    try:
        firsts = cut_by_size(_known_sizes(plan, request, split), limits.max_samples, room)
    except _UnknownSizeError:
        pass
    else:
        if not firsts[-1]:
            raise SourceError(
                "there is nothing to pack: the source is empty", shard=plan.source.name
            )
        return firsts
    if plan.assigned is not None:
        count = int((plan.assigned == split).sum())
    elif plan.total is not None:
        count = plan.total
    else:  # a table that does not store the number of its rows
        count = sum(1 for _ in numbered_records(plan, split, 0))
    return np.append(np.arange(0, count, limits.max_samples, dtype=np.int64), count)


class _UnknownSizeError(Exception):
    """The size of a record in a tar is not known before it is read."""


def _known_sizes(plan: PackPlan, request: PackRequest, split: int) -> Iterator[Numbers]:
    """Yield the sizes of the records of a split, many at a time.

    Raises:
        _UnknownSizeError: If one is not known.
    """

    def sizes() -> Iterator[int]:
        for _, record in numbered_records(plan, split, 0):
            size = _tar_bytes(record, request)
            if size is None:
                raise _UnknownSizeError
            yield size

    found = sizes()
    while some := list(itertools.islice(found, _SIZES)):
        yield np.array(some, dtype=np.int64)


def _tar_bytes(record: Record, request: PackRequest) -> int | None:
    """Return how many bytes a record takes in a tar; None if that is not known before it is read."""
    total = 0
    for field, value in record.fields.items():
        if isinstance(value, FileRef):
            if not value.size or not request.images.changes_nothing:
                return None
            size = value.size
        elif isinstance(value, int):
            size = len(encode_field(field, value))
        else:
            return None
        total += member_bytes(f"{record.key}.{field}", size)
    return total


def numbered_records(plan: PackPlan, split: int, first: int) -> Iterator[tuple[int, Record]]:
    """Yield number and record of the records of a split, from its ``first``-th on.

    Args:
        plan: Records of all splits, in packing order.
        split: Number of the split.
        first: Position among the records of the split.
    """
    if plan.assigned is None:
        yield from enumerate(plan.records.iter_from(first), start=first)
        return
    begin = _nth(plan.assigned, split, first)
    for number, record in enumerate(plan.records.iter_from(begin), start=begin):
        if plan.assigned[number] == split:
            yield number, record


def _nth(assigned: SplitNumbers, split: int, count: int) -> int:
    """Return the number of the record of a split that has ``count`` others before it; that of all records if there is none."""
    for start in range(0, len(assigned), _COUNTED):
        found = np.flatnonzero(assigned[start : start + _COUNTED] == split)
        if count < len(found):
            return start + int(found[count])
        count -= len(found)
    return len(assigned)


# Of this process: the source that was opened last.
_opened_here: dict[str, OpenedPack] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackWork:
    """The work of one part of a pack.

    Args:
        request: The arguments of the pack.
        identity: Source and options when the job was planned.
        split: Number of the split.
        number: Number of the part.
        first: Position of its first record among those of the split.
        last: Position after its last.
    """

    request: PackRequest
    identity: str
    split: int
    number: int = 0
    first: int = 0
    last: int = 0

    def parts(self, firsts: Numbers) -> Iterator[PackWork]:
        """Yield the work of each part; ``firsts`` as `_cut` returns it."""
        for number, (first, last) in enumerate(itertools.pairwise(firsts.tolist())):
            yield replace(self, number=number, first=first, last=last)

    def write(self, folder: OutputFolder, check_owner: Callable[[], None]) -> PartResult:
        """Read, encode and write the records (see `PartWork.write`).

        Raises:
            SourceError: If a record cannot be packed, unless such records are skipped.
            ChangedError: If the source has changed since the job was planned.
        """
        opened = self._open()
        names = replace(opened.names, folder=folder.url)
        skipped: list[Skip] = []
        keys: list[str] = []
        name = partial(names.name, self.number)
        with closing(
            PartWriter(folder, self.request.limits, name=name, check_owner=check_owner)
        ) as writer:
            for sample in self._encoded(opened):
                error = sample.error
                if error is None:
                    try:
                        writer.write(sample.key, sample.fields)
                        keys.append(sample.key)
                    except SampleError as unfit:
                        error = named(unfit, sample.where)
                if error is not None and not self.request.skips:
                    raise error
                if error is not None:
                    skipped.append(Skip(sample.where, str(error)))
            writer.finish()
        compared = keys if opened.plan.source.may_repeat_keys else []
        return PartResult(
            shards=tuple(writer.shards),
            fields=writer.fields,
            columns=tuple(writer.columns),
            skipped=tuple(skipped),
            key_hashes=encode_hashes(hash_keys(compared)),
        )

    def _open(self) -> OpenedPack:
        """Open the source, or take the one that this process has open."""
        opened = _opened_here.get(self.identity)
        if opened is None:
            opened = self.request.open()
            if _identity(opened) != self.identity:
                raise ChangedError(
                    "the source, or the class numbers of a dataset next to the destination, have changed since the job began; start it "
                    "again in another folder, or with overwrite=True (--overwrite)",
                    shard=opened.plan.source.name,
                )
            _opened_here.clear()
            _opened_here[self.identity] = opened
        return opened

    def _encoded(self, opened: OpenedPack) -> Iterator[Encoded]:
        mine = itertools.islice(
            numbered_records(opened.plan, self.split, self.first), self.last - self.first
        )
        for records in chunked(record for _, record in mine):
            yield from opened.encoder.encode(records)
