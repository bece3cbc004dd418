"""Write the shards that have deleted samples again without them, as the next version of a dataset.

The bytes of the samples that are left are copied as they are, also those of the shards of replaced fields. The new shards go to a folder ``compact-…`` of the
dataset; their names have a digest of the samples that are left out, so that a run that was killed is continued, and runs at the same time write
the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice, pairwise
from operator import or_
from typing import Any, NamedTuple

import numpy as np

from shardstream.catalog import ShardCatalog, open_headers
from shardstream.errors import ChangedError, IndexMismatchError, OptionError
from shardstream.format import (
    END_OF_ARCHIVE,
    INDEX_SUFFIX,
    DatasetVersion,
    Manifest,
    Offsets,
    ReplacedFields,
    ShardInfo,
    count_fields,
    decode_manifest,
    decode_member_index,
    encode_index,
    encode_manifest,
    encode_member_index,
    filter_column_file,
    iter_groups,
    iter_members,
)
from shardstream.packing.job.append import prefix_of_appended
from shardstream.packing.job.claim import locked
from shardstream.packing.job.folder_state import remove_shard
from shardstream.packing.job.key_hashes import KeyHashes
from shardstream.packing.job.report import ProgressFunction
from shardstream.packing.shards.shard_scan import (
    ProgressMeter,
    ShardResult,
    check_threads,
    scan_shards,
)
from shardstream.samples import Numbers
from shardstream.storage import (
    LocalFolder,
    LocatedShards,
    OutputFolder,
    PendingFile,
    RangeStream,
    Storage,
    change_folder,
    commit_all,
    count_samples,
    deleted_by_shard,
    encode_numbers,
    is_part,
    is_part_record,
    join_url,
    locate_shards,
    output_folder_in,
    parent_url,
    part_record_name,
    publish_bytes,
    read_numbers,
)
from shardstream.tasks import JSON, Executor, Parts
from shardstream.versions import (
    AnyManifest,
    all_shards,
    dataset_folder,
    next_version,
    publish_version,
    read_current,
)

_TRIES = 20  # deletions by others meanwhile
_READ_BYTES = 8 << 20
_DIGEST = re.compile(r"-[0-9a-f]{12}\Z")  # in the name of a shard that was compacted before


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactReport:
    """Result of `compact`.

    Args:
        version: Number of the version without deleted samples.
        samples: Deleted samples that its shards do not have any more.
        shards: Shards that were written again, with those of replaced fields.
        removed: Shards that had no other samples.
        total_bytes: Bytes of the shards that were written.
    """

    version: int
    samples: int = 0
    shards: int = 0
    removed: int = 0
    total_bytes: int = 0


def compact(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    progress: ProgressFunction | None = None,
    executor: Executor | None = None,
) -> CompactReport:
    """Write the shards that have deleted samples again without them, as a new version.

    The order and the bytes of the other samples stay, and so do shards without deleted ones. Shards of replaced fields are written in the same way.
    Earlier versions stay readable, with the deleted samples, until `gc` removes them. Other writers may append meanwhile; after a
    deletion the shards that it touches are written once more. A run that was killed leaves the version as it was, and the same call
    continues it.

    Args:
        url: Folder of the dataset.
        storage_options: For fsspec.
        threads: Shards to write at a time, by default 4; each takes about 32 MiB of memory.
        progress: Called with a `Progress` after each piece; with an executor after each shard.
        executor: Executor that writes the shards, instead of ``threads`` threads of this process.

    Raises:
        OptionError: If the executor is `Parts`.
        ShardError: If a shard is damaged; then nothing is published.
        ChangedError: If others delete samples or replace fields again and again.
        StorageError: If a file cannot be read or written.
    """
    check_threads(threads, executor)
    if isinstance(executor, Parts):
        raise OptionError("compact cannot be cut into parts (Parts); use several processes")
    folder, storage = dataset_folder(url), Storage(storage_options)

    def is_compacted(before: DatasetVersion) -> bool:
        return read_current(folder, storage).dataset_version.renumbered != before.renumbered

    for _ in range(_TRIES):
        located = locate_shards(folder, storage)
        version = located.version or DatasetVersion()
        if version.deleted is None:
            return CompactReport(version=version.number)
        output = output_folder_in(
            storage, join_url(folder, change_folder("compact", f"{version.compactions + 1:06d}"))
        )
        replaced = [_find_replaced(one, located, folder, storage) for one in version.replaced]
        plans = [
            _plan(one, storage, output) for one in (located, *(one.located for one in replaced))
        ]
        tasks = [task for plan in plans for task in plan]
        total = sum(task.shard.filesize or 0 for task in tasks)
        meter = ProgressMeter(f"compact {folder}", total, progress, executor)
        if executor is None:
            tasks = [replace(task, meter=meter) for task in tasks]
        with locked(output_folder_in(storage, output.url)), closing(KeyHashes()) as no_keys:
            if is_compacted(version):  # by a run that held the lock
                continue
            found = scan_shards(tasks, no_keys, executor, threads=threads, meter=meter)
            results = iter(zip(tasks, found.values(), strict=True))
            written = [_Written(output, dict(islice(results, len(plan)))) for plan in plans]
            report = _publish(folder, storage, version, replaced, written)
            if report is not None:
                _tidy(output, {task.name for task in tasks})
                return report
            if is_compacted(version):  # on a store, which has no locks
                output.remove(*(part_record_name(task.name) for task in tasks))
    raise ChangedError(
        "others delete samples or replace fields again and again; run it again later", shard=folder
    )


class _Replaced(NamedTuple):
    """Fields that were replaced, and what a compaction leaves of them."""

    entry: ReplacedFields
    located: LocatedShards
    """Their shards, whose deleted samples are those of the dataset."""
    numbers: Numbers
    """The numbers of their other samples in the compacted dataset, ascending."""


def _find_replaced(
    entry: ReplacedFields, dataset: LocatedShards, folder: str, storage: Storage
) -> _Replaced:
    """Find the samples of replaced fields that are deleted in their dataset, and the new numbers of the others."""
    numbers: Numbers = np.arange(entry.nsamples)
    if entry.numbers is not None:
        url, total = join_url(folder, entry.numbers), count_samples(dataset.shards)
        numbers = read_numbers(url, storage, entry.nsamples, total)
    [(_, deleted)] = dataset.deleted
    before = np.searchsorted(deleted, numbers)
    are_gone = np.append(deleted, -1)[before] == numbers
    located = locate_shards(join_url(folder, entry.url), storage)
    gone = ((0, np.flatnonzero(are_gone)),) if are_gone.any() else ()
    return _Replaced(entry, replace(located, deleted=gone), (numbers - before)[~are_gone])


def _tidy(output: OutputFolder, names: set[str]) -> None:
    """Delete the records of all shards, half-written files of killed runs, and the shards that are not published, because more of their samples were deleted meanwhile."""
    files = output.list_files()
    tars = {part_record_name(name): name for name in files}
    for record in filter(is_part_record, files):
        name = tars.get(record)
        if name is not None and name not in names:
            output.remove(ShardInfo(url=name).members_url)
            remove_shard(output, name, files)
        output.remove(record)
    if isinstance(output, LocalFolder):  # locked; elsewhere they may be of a run at the same time
        output.remove(*filter(is_part, files))


def _plan(located: LocatedShards, storage: Storage, output: OutputFolder) -> list[CompactShard]:
    """Return a task for each shard that has deleted samples."""
    return [
        CompactShard(
            name=_name(located.shards[place], deleted, storage),
            place=place,
            shard=located.shards[place],
            deleted=deleted,
            storage=storage,
            output=output,
        )
        for place, deleted in deleted_by_shard(located).items()
    ]


def _name(shard: ShardInfo, deleted: Numbers, storage: Storage) -> str:
    """Return the name of the shard without some samples of another one; of an appended one it says of which job."""
    content = shard.sha256 or storage.info(shard.url).version
    digest = hashlib.sha256(f"{shard.url}\n{content}\n".encode("utf-8", "surrogateescape"))
    digest.update(deleted.astype("<i8").tobytes())
    folder, _, name = shard.url.rpartition("/")
    stem = prefix_of_appended(folder) + _DIGEST.sub("", name.removesuffix(".tar"))
    return f"{stem}-{digest.hexdigest()[:12]}.tar"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompactShard:
    """The task that writes a shard again without its deleted samples.

    Args:
        name: Name of the new shard.
        place: Place of the shard in the dataset.
        shard: The shard.
        deleted: Numbers of its deleted samples, ascending, shape (n,).
        storage: Storage of the files.
        output: Folder of the new shard.
        meter: Counts bytes, in this process only; a task with a meter cannot be pickled.
    """

    name: str
    place: int
    shard: ShardInfo
    deleted: Numbers
    storage: Storage
    output: OutputFolder
    meter: ProgressMeter | None = None

    def run(self) -> Mapping[str, JSON]:
        """Write the shard; the fields of its result are those of the deleted samples."""
        record = part_record_name(self.name)
        if (data := self.output.read(record)) is not None:
            done: dict[str, JSON] = json.loads(data)
            return done
        catalog = ShardCatalog(
            LocatedShards(shards=(self.shard,), indexed=frozenset([self.shard.url])), self.storage
        )
        offsets = catalog.offsets(0)
        is_kept = np.ones(len(offsets) - 1, dtype=bool)
        is_kept[self.deleted] = False
        result = ShardResult(nsamples=0, fields=self._count_fields(offsets))
        if is_kept.any():
            info = self._write(offsets, is_kept)
            result = replace(
                result, nsamples=info.nsamples, nbytes=info.filesize or 0, sha256=info.sha256
            )
        self.output.write(record, json.dumps(result.encode()).encode())
        return result.encode()

    def _count_fields(self, offsets: Offsets) -> dict[str, int]:
        """Return the number of deleted samples that have each field, by their headers."""
        counts = Counter[str]()
        url = self.shard.url
        with open_headers(url, self.storage, size=self.shard.filesize) as (read, _):
            for start, end in zip(offsets[self.deleted], offsets[self.deleted + 1], strict=True):
                members = iter_members(read, start=int(start), end=int(end), shard=url)
                for group in iter_groups(members, shard=url):
                    counts.update(group.fields.keys())
        return dict(counts)

    def _write(self, offsets: Offsets, is_kept: Any) -> ShardInfo:
        sizes = np.diff(offsets)[is_kept]
        new = np.concatenate(([0], np.cumsum(sizes)))
        tar = self.output.open(self.name)
        try:
            info = ShardInfo(
                url=self.name,
                nsamples=len(sizes),
                filesize=int(new[-1]) + len(END_OF_ARCHIVE),
                sha256=self._copy(tar, offsets, is_kept),
            )
            tar.end()
            commit_all(self.output, self._other_files(info, offsets, new, is_kept))
            self.output.commit(tar)
        finally:
            tar.discard()
        return info

    def _copy(self, tar: PendingFile, offsets: Offsets, is_kept: Any) -> str:
        """Copy the bytes of the samples that are kept; return the SHA-256 of the new tar.

        Raises:
            ShardError: If the old tar has another SHA-256 than in the manifest, whose damaged bytes would get a valid one.
        """
        size = self.shard.filesize or self.storage.info(self.shard.url).size
        stopped = None if self.meter is None else self.meter.stopped
        stream = RangeStream(self.storage, self.shard.url, size, cancelled=stopped)
        before, after = hashlib.sha256(), hashlib.sha256()
        edges = np.flatnonzero(np.diff(is_kept)) + 1
        bounds = [0, *offsets[[0, *edges, -1]].tolist(), size]
        are_kept = [False, *is_kept[[0, *edges]].tolist(), False]
        for (start, end), copies in zip(pairwise(bounds), are_kept, strict=True):
            for at in range(start, end, _READ_BYTES):
                data = stream.read(min(_READ_BYTES, end - at))
                before.update(data)
                if copies:
                    after.update(data)
                    tar.write(data)
                if self.meter is not None:
                    self.meter.add(len(data))
        if self.shard.sha256 not in (None, before.hexdigest()):
            raise IndexMismatchError(
                "the bytes of the shard are not those of its sha256 in the manifest: it is damaged",
                remedy="restore it; 'shardstream verify' lists all damaged shards",
                shard=self.shard.url,
            )
        after.update(END_OF_ARCHIVE)
        tar.write(END_OF_ARCHIVE)
        return after.hexdigest()

    def _other_files(
        self, info: ShardInfo, old: Offsets, new: Offsets, is_kept: Any
    ) -> dict[str, bytes]:
        """Return index, columns and index of members of the new shard, by name."""
        files = {info.url + INDEX_SUFFIX: encode_index(new)}
        columns, members = self._read(self.shard.columns_url), self._read(self.shard.members_url)
        if columns is not None:
            files[info.columns_url] = filter_column_file(columns, self.shard, is_kept, info)
        if members is not None:
            listed = decode_member_index(members, url=self.shard.members_url)
            shifts = (new[:-1] - old[:-1][is_kept]).tolist()
            kept = np.flatnonzero(is_kept).tolist()
            moved = [
                (name, 0, body + shift, size)
                for sample, shift in zip(kept, shifts, strict=True)
                for _, body, size, name in listed[sample]
            ]
            files[info.members_url] = encode_member_index(moved, shard=info.url)
        return files

    def _read(self, url: str) -> bytes | None:
        return self.storage.read_bounded(url) if self.storage.exists(url) else None


class _Written:
    """The shards that take the place of those with deleted samples.

    Args:
        output: Their folder.
        results: The tasks that wrote them, and their results.
    """

    def __init__(self, output: OutputFolder, results: Mapping[CompactShard, ShardResult]) -> None:
        folder = output.url.rpartition("/")[2]
        self.gone = sum((Counter(one.fields) for one in results.values()), Counter[str]())
        """Field -> deleted samples that had it."""
        self.shards = {
            task.place: ShardInfo(
                url=f"{folder}/{task.name}",
                nsamples=result.nsamples,
                filesize=result.nbytes,
                sha256=result.sha256,
            )
            for task, result in results.items()
        }
        """Place of a shard -> the one without deleted samples, which may have none."""

    def replace_in(self, shards: Iterable[ShardInfo]) -> tuple[ShardInfo, ...]:
        """Return shards with these in their places."""
        found = (self.shards.get(place, one) for place, one in enumerate(shards))
        return tuple(one for one in found if one.nsamples)


def _publish(
    folder: str,
    storage: Storage,
    begun: DatasetVersion,
    replaced: Sequence[_Replaced],
    written: Sequence[_Written],
) -> CompactReport | None:
    """Publish the version with the new shards; None if samples were deleted or fields replaced meanwhile.

    Args:
        folder: Folder of the dataset.
        storage: Where it is.
        begun: The version that is compacted.
        replaced: Its replaced fields.
        written: The new shards of the dataset, and of each of these fields.
    """
    entries = [
        _publish_replaced(one, new, folder, storage)
        for one, new in zip(replaced, written[1:], strict=True)
        if len(one.numbers)
    ]
    is_published = False

    def change(manifest: AnyManifest) -> AnyManifest | None:
        nonlocal is_published
        now = manifest.dataset_version
        is_published = all(
            getattr(now, name) == getattr(begun, name)
            for name in ("deleted", "renumbered", "replaced")
        )
        if not is_published:
            return None
        gone = reduce(or_, (one.gone for one in written))  # a sample may have a field twice
        counts = Counter(manifest.fields) - gone
        after = Manifest(
            shards=written[0].replace_in(all_shards(manifest, folder, storage)),
            name=manifest.name,
            fields=count_fields(counts, entries),
            dataset_version=now,
        )
        return next_version(after, "compact", deleted=None, ndeleted=0, replaced=tuple(entries))

    after = publish_version(folder, storage, change)
    if not is_published:
        return None
    new = [one for some in written for one in some.shards.values()]
    left = [one for one in new if one.nsamples]
    return CompactReport(
        version=after.dataset_version.number,
        samples=begun.ndeleted,
        shards=len(left),
        removed=len(new) - len(left),
        total_bytes=sum(one.filesize or 0 for one in left),
    )


def _publish_replaced(
    before: _Replaced, written: _Written, folder: str, storage: Storage
) -> ReplacedFields:
    """Write the manifest of replaced fields without deleted samples, and the numbers of the others."""
    entry = replace(before.entry, nsamples=len(before.numbers))
    if written.shards:
        url = join_url(folder, entry.url)
        name = entry.url.rpartition("/")[0]  # "" if it was compacted before
        old = decode_manifest(storage.read_bounded(url), url=url)
        listed = [
            replace(one, url=join_url(name, one.url) if name else one.url)
            for one in all_shards(old, parent_url(url), storage)
        ]
        counts = dict(Counter(old.fields) - written.gone)
        after = Manifest(shards=written.replace_in(listed), name=old.name, fields=counts)
        data = encode_manifest(after)
        entry = replace(entry, url=entry.manifest_name(data))
        publish_bytes(storage, join_url(folder, entry.url), data)
    if entry.numbers is not None:
        file, data = encode_numbers("numbers", before.numbers)
        publish_bytes(storage, join_url(folder, file), data)
        entry = replace(entry, numbers=file)
    return entry
