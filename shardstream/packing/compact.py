"""Write the shards that have deleted samples again without them, as the next version of a dataset.

The bytes of the samples that are left are copied as they are. The new shards go to a folder ``compact-…`` of the dataset; their names have a digest
of the samples that are left out, so that a run that was killed is continued, and runs at the same time write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from shardstream.catalog import ShardCatalog, deleted_by_shard, open_headers
from shardstream.errors import ChangedError, IndexMismatchError, NotFoundError, OptionError
from shardstream.format import (
    END_OF_ARCHIVE,
    INDEX_SUFFIX,
    DatasetVersion,
    Manifest,
    Offsets,
    ShardInfo,
    decode_member_index,
    encode_index,
    encode_member_index,
    filter_column_file,
    iter_groups,
    iter_members,
)
from shardstream.packing.job.claim import locked
from shardstream.packing.job.destination import remove_shard
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
    LocatedShards,
    OutputFolder,
    PendingFile,
    RangeStream,
    Storage,
    change_folder,
    commit_all,
    is_part_record,
    join_url,
    locate_shards,
    output_folder_in,
    part_record_name,
)
from shardstream.tasks import JSON, Executor, Parts
from shardstream.versions import (
    AnyManifest,
    all_shards,
    dataset_folder,
    next_version,
    publish_version,
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
        shards: Shards that were written again.
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

    The order and the bytes of the other samples stay, and so do shards without deleted ones. Earlier versions stay readable, with the
    deleted samples, until `gc` removes them. Other writers may append meanwhile; after a deletion the shards that it touches are
    written once more. A run that was killed leaves the version as it was, and the same call continues it.

    Args:
        url: Folder of the dataset.
        storage_options: For fsspec.
        threads: Shards to write at a time, by default 4; each takes about 32 MiB of memory.
        progress: Called with a `Progress` after each piece; with an executor after each shard.
        executor: Executor that writes the shards, instead of ``threads`` threads of this process.

    Raises:
        OptionError: If fields were replaced, or the executor is `Parts`.
        ShardError: If a shard is damaged; then nothing is published.
        ChangedError: If another writer compacts or replaces the dataset, or others delete samples again and again.
        StorageError: If a file cannot be read or written.
    """
    check_threads(threads, executor)
    if isinstance(executor, Parts):
        raise OptionError("compact cannot be cut into parts (Parts); use several processes")
    folder, storage = dataset_folder(url), Storage(storage_options)
    for _ in range(_TRIES):
        located = locate_shards(folder, storage)
        version = located.version or DatasetVersion()
        if version.replaced:
            raise OptionError(
                "fields of this dataset were replaced, by the numbers of its samples; write it again with 'shardstream reshard'",
                shard=folder,
            )
        if version.deleted is None:
            return CompactReport(version=version.number)
        output = output_folder_in(
            storage, join_url(folder, change_folder("compact", f"{version.compactions + 1:06d}"))
        )
        tasks = _plan(located, storage, output)
        total = sum(task.shard.filesize or 0 for task in tasks)
        meter = ProgressMeter(f"compact {folder}", total, progress, executor)
        if executor is None:
            tasks = [replace(task, meter=meter) for task in tasks]
        with locked(output_folder_in(storage, output.url)), KeyHashes() as no_keys:
            found = scan_shards(tasks, no_keys, executor, threads=threads, meter=meter)
            report = _publish(
                folder, storage, version, dict(zip(tasks, found.values(), strict=True))
            )
            if report is not None:
                _tidy(output, {task.name for task in tasks})
                return report
    raise ChangedError("others delete samples again and again; run it again later", shard=folder)


def _tidy(output: OutputFolder, names: set[str]) -> None:
    """Delete the records of all shards, and the shards that are not published, because more of their samples were deleted meanwhile."""
    files = output.list_files()
    tars = {part_record_name(name): name for name in files}
    for record in filter(is_part_record, files):
        name = tars.get(record)
        if name is not None and name not in names:
            output.remove(ShardInfo(url=name).members_url)
            remove_shard(output, name, files)
        output.remove(record)


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
    """Return the name of the shard without some samples of another one."""
    content = shard.sha256 or storage.info(shard.url).version
    digest = hashlib.sha256(f"{shard.url}\n{content}\n".encode("utf-8", "surrogateescape"))
    digest.update(deleted.astype("<i8").tobytes())
    stem = _DIGEST.sub("", shard.url.rpartition("/")[2].removesuffix(".tar"))
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
        with suppress(NotFoundError):
            done: dict[str, JSON] = json.loads(self.output.read(record))
            return done
        catalog = ShardCatalog(
            LocatedShards(shards=(self.shard,), indexed=frozenset([self.shard.url])), self.storage
        )
        offsets = catalog.offsets(0)
        is_kept = np.ones(len(offsets) - 1, dtype=bool)
        is_kept[self.deleted] = False
        fields = self._count_fields(offsets)
        result = ShardResult(nsamples=0, fields=fields)
        if is_kept.any():
            info = self._write(offsets, is_kept)
            result = ShardResult(
                nsamples=info.nsamples,
                nbytes=info.filesize or 0,
                sha256=info.sha256,
                fields=fields,
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


def _publish(
    folder: str,
    storage: Storage,
    begun: DatasetVersion,
    results: Mapping[CompactShard, ShardResult],
) -> CompactReport | None:
    """Publish the version with the new shards; None if samples were deleted meanwhile."""
    gone = sum((Counter(one.fields) for one in results.values()), Counter[str]())
    new = {
        task.place: ShardInfo(
            url=f"{task.output.url.rpartition('/')[2]}/{task.name}",
            nsamples=result.nsamples,
            filesize=result.nbytes,
            sha256=result.sha256,
        )
        for task, result in results.items()
    }
    is_published = False

    def change(manifest: AnyManifest) -> AnyManifest | None:
        nonlocal is_published
        now = manifest.dataset_version
        is_published = (now.deleted, now.compactions) == (begun.deleted, begun.compactions)
        if not is_published:
            return None
        if now.replaced:
            raise ChangedError("another writer has replaced fields meanwhile", shard=folder)
        shards = [
            new.get(place, one) for place, one in enumerate(all_shards(manifest, folder, storage))
        ]
        fields = {
            name: count - gone[name]
            for name, count in manifest.fields.items()
            if count > gone[name]
        }
        after = Manifest(
            shards=tuple(one for one in shards if one.nsamples),
            name=manifest.name,
            fields=fields,
            dataset_version=now,
        )
        return next_version(after, "compact", deleted=None, ndeleted=0)

    after = publish_version(folder, storage, change)
    if not is_published:
        return None
    written = [one for one in new.values() if one.nsamples]
    return CompactReport(
        version=after.dataset_version.number,
        samples=begun.ndeleted,
        shards=len(written),
        removed=len(new) - len(written),
        total_bytes=sum(one.filesize or 0 for one in written),
    )
