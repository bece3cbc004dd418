"""Index tars of other tools: write ``NAME.tar.idx`` for each, then ``index.json``. No tar is changed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

from shardstream.errors import (
    ChangedError,
    ManifestError,
    NotFoundError,
    OptionError,
    StorageError,
    redact,
)
from shardstream.format import (
    COLUMNS_SUFFIX,
    INDEX_SUFFIX,
    MANIFEST_NAME,
    Column,
    Manifest,
    ShardInfo,
    encode_index,
    encode_manifest_files,
    encode_member_index,
)
from shardstream.packing.job.part_job import locked
from shardstream.packing.job.report import ProgressFunction
from shardstream.packing.shards.column_builder import (
    ColumnBuilder,
    ColumnSummary,
    check_summaries,
    checked_columns,
)
from shardstream.packing.shards.manifest_files import remove_old_pages, write_manifest_files
from shardstream.packing.shards.shard_scan import (
    ProgressMeter,
    ShardScanner,
    check_threads,
    run_shard_tasks,
)
from shardstream.storage import (
    TAR_SUFFIXES,
    FileInfo,
    OutputFolder,
    Storage,
    Urls,
    absolute_url,
    absolute_urls,
    check_finished,
    check_folder_finished,
    commit_all,
    expand_urls,
    is_compressed,
    is_glob,
    is_journal,
    is_tar,
    join_url,
    output_folder_in,
    parent_url,
    read_manifest,
    warn_of_links,
)
from shardstream.tasks import JSON, Executor, Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """Result of `index`.

    Args:
        manifest_url: URL of the ``index.json``.
        manifest: Its content.
        warnings: Findings that may be mistakes, although every shard can be read.
    """

    manifest_url: str
    manifest: Manifest
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexShard:
    """The task that scans one tar and writes its index; the result is its line of the manifest.

    Args:
        tar: The tar to scan.
        storage: The storage of the files.
        members: Also write ``NAME.idx``.
        output: Where the index goes.
        columns: Columns of its samples to write to ``NAME.tar.cols.parquet``; None writes no such file.
        sha256: Hash the tar.
        meter: Counts bytes, in this process only; a task with a meter cannot be pickled.
    """

    tar: FileInfo
    storage: Storage
    members: bool
    output: OutputFolder
    columns: tuple[Column, ...] | None = None
    sha256: bool = True
    meter: ProgressMeter | None = None

    @property
    def name(self) -> str:
        """Verb and tar."""
        return f"index {redact(self.tar.url)}"

    def run(self) -> Mapping[str, JSON]:
        """Write the index; a second run writes the same bytes."""
        tar, storage = self.tar, self.storage
        scanner = ShardScanner(storage, tar.url, tar.size, self.meter, hashes=self.sha256)
        builder = None if self.columns is None else ColumnBuilder(self.columns, tar.url)
        with scanner as shard:
            scan = shard.scan(keep_members=self.members, columns=builder)
            sha256, nbytes = shard.finish()
        name = _name(tar.url)
        files = {name + INDEX_SUFFIX: encode_index(scan.offsets)}
        if builder is not None:
            info = ShardInfo(url=tar.url, filesize=nbytes, sha256=sha256)
            files[name + COLUMNS_SUFFIX] = builder.encode(scan.keys, info)
        if self.members and scan.keys:
            text = encode_member_index(shard.members, shard=tar.url)
            files[name[: -len(TAR_SUFFIXES[0])] + INDEX_SUFFIX] = text
        _check_unchanged(tar, storage.info(tar.url))
        commit_all(self.output, files)
        warnings = [f"{tar.url}: {finding}" for finding in shard.diagnostics.findings()]
        if not scan.keys:
            warnings.append(f"{tar.url}: no samples in it (members need a name like KEY.FIELD)")
        return {
            "samples": len(scan.keys),
            "bytes": nbytes,
            "sha256": sha256,
            "fields": dict(scan.fields),
            "columns": None
            if builder is None
            else {name: [*one] for name, one in builder.summary.items()},
            "warnings": [*warnings],
        }


def index(  # noqa: PLR0913  (the public door)
    urls: Urls,
    *,
    to: str | os.PathLike[str] | None = None,
    sha256: bool = True,
    columns: str | Sequence[str] | Mapping[str, str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    threads: int | None = None,
    name: str = "",
    members: bool = False,
    progress: ProgressFunction | None = None,
    executor: Executor | None = None,
) -> IndexReport:
    """Write an index for each tar and one manifest for all, so that samples can be read by number.

    Every tar is read once, from its start to its end. Indexes and manifest that are there already are
    replaced. If a tar is bad, ``index.json`` is not written.

    Args:
        urls: A folder or prefix (all tars right in it, sorted by name), a pattern, a tar, or a list; all in one folder, unless ``to`` is
            given.
        to: Another folder for the indexes and the manifest, for tars in a place that you may only read. Open that folder to read the
            tars; ``storage_options`` must fit both places.
        sha256: Hash the tars. Without, only headers are read (of remote tars, where bodies exceed 256 KiB), and damaged bytes are not noticed later.
        columns: Also write ``NAME.tar.cols.parquet`` (docs/formats.md) with the key of each sample and these values, to choose samples
            with ``where=`` and ``keys=``: e.g. ``"cls,json.width"``, or name -> source, as in ``{"high": "json.size.height"}``. Sources
            are fields of one whole number or text, and bools, numbers and text in fields of JSON. ``"__key__"`` writes the keys only.
        storage_options: ``storage_options`` of fsspec.
        filesystem: An fsspec file system to use instead of looking one up by protocol.
        threads: Tars to read at a time, by default 4; each takes about 4 MiB of memory (remote: 32 MiB).
        name: Name of the dataset; by default the one in a manifest that is there already.
        members: Also write ``NAME.idx``, the text index of NVIDIA DALI with the place of each field: readers of remote shards then fetch the fields
            of ``fields=`` only, where samples are larger than 512 KiB.
        progress: Called with a `Progress` after each piece, from the threads that read, one at a time; with an executor after each tar,
            from this thread.
        executor: Executor that scans the tars, instead of ``threads`` threads of this process: e.g. ``LocalExecutor(processes=8)``.
            Storage options travel with the tasks. `Parts` is refused: no part could write ``index.json``.

    Raises:
        OptionError: If the tars are compressed, in several folders or named twice, or the executor is `Parts`; if no sample has a value for a
            column.
        ShardError: If a tar is damaged, cut or not a tar.
        SampleError: If a key or field is repeated, a name does not fit the index of members, or a value its column.
        ChangedError: If a tar was replaced meanwhile; then ``index.json`` is not written.
        UnfinishedError: If a pack or `ShardWriter` writes to that folder, or was stopped there.
        StorageError: If a place cannot be listed, read or written, or a pack or `ShardWriter` replaces the dataset meanwhile.
    """
    check_threads(threads, executor)
    if isinstance(executor, Parts):
        raise OptionError(
            "index cannot be cut into parts (Parts); use several processes (LocalExecutor, --processes) or a cluster (RayExecutor, --ray)"
        )
    if (
        executor is not None or to is not None
    ):  # processes may have another current folder, and the manifest is elsewhere
        urls = absolute_urls(urls)
    wanted = checked_columns(columns)
    storage = Storage(storage_options, filesystem)
    tars = _find_tars(urls, storage, one_folder=to is None)
    folder = parent_url(tars[0].url) if to is None else absolute_url(to).rstrip("/")
    present = _names_in(folder, storage)
    others = sorted(set(filter(is_tar, present)) - {_name(tar.url) for tar in tars})
    url = join_url(folder, MANIFEST_NAME)
    title = name or _name_before(url, storage)
    _check_all_finished(folder, present, () if to is None else tars, storage)
    meter = ProgressMeter(f"index {folder}", sum(tar.size for tar in tars), progress, executor)
    output = output_folder_in(storage, folder)
    one = IndexShard(
        tar=tars[0],
        storage=storage,
        members=members,
        output=output,
        columns=wanted,
        sha256=sha256,
        meter=meter if executor is None else None,
    )
    tasks = [replace(one, tar=tar) for tar in tars]
    # Another folder object than that of the tasks: one that is locked cannot be pickled.
    with locked(output_folder_in(storage, folder)):
        results = _scan_all(tasks, executor, meter, threads)
        missing = _check_columns(wanted or (), results.values())
        manifest = _manifest_of(results, name=title, is_elsewhere=to is not None)
        _check_all_unchanged(tars, storage)
        _publish_manifest(output, manifest, present)
    listed = chain.from_iterable(cast("list[str]", one["warnings"]) for one in results.values())
    warnings = (*listed, *missing, *_warn_left_out(others, url))
    return IndexReport(manifest_url=url, manifest=manifest, warnings=warnings)


def _scan_all(
    tasks: Sequence[IndexShard],
    executor: Executor | None,
    meter: ProgressMeter,
    threads: int | None,
) -> dict[IndexShard, Mapping[str, JSON]]:
    """Run all tasks; return their results in the order of the tasks."""
    found: dict[int, Mapping[str, JSON]] = {}

    def count(number: int, result: Mapping[str, JSON]) -> None:
        found[number] = result
        # Tasks in other processes have no meter that counts their bytes.
        size_bytes = 0 if executor is None else cast("int", result["bytes"])
        meter.add_shard(cast("int", result["samples"]), 0, size_bytes)

    run_shard_tasks(tasks, count, executor, threads=threads, meter=meter)
    return {task: found[number] for number, task in enumerate(tasks)}


def _check_all_finished(
    folder: str, present: Sequence[str], others: Sequence[FileInfo], storage: Storage
) -> None:
    """Check that no writer is at work in the folder, nor in those of other tars.

    Also if tars are named one by one: a manifest would publish all.

    Raises:
        UnfinishedError: If a pack or `ShardWriter` is, or was stopped there.
    """
    check_finished(folder, present)
    for source in dict.fromkeys(parent_url(tar.url) for tar in others):
        check_folder_finished(source, storage)


def _check_unchanged(before: FileInfo, now: FileInfo) -> None:
    """Check that a tar is the one that was listed when indexing began.

    Raises:
        ChangedError: If its length or version is another.
    """
    if before.is_same_as(now):
        return
    raise ChangedError(
        f"the tar was replaced while it was indexed ({before.size_or_none} bytes, {before.version} then; {now.size_or_none} bytes, "
        f"{now.version} now), so no {MANIFEST_NAME} was written; wait until its writer ends, then run this again",
        shard=before.url,
    )


def _check_all_unchanged(tars: Sequence[FileInfo], storage: Storage) -> None:
    """Check all tars again, by one listing of each folder (see `_check_unchanged`).

    Raises:
        NotFoundError: If a tar is gone.
    """
    listed: dict[str, dict[str, FileInfo]] = {}
    for tar in tars:
        if not tar.url.startswith(("http://", "https://")):  # they were compared one by one
            _check_unchanged(tar, _look_up(tar.url, storage, listed))


def _check_no_other_writer(output: OutputFolder, present: Sequence[str]) -> None:
    """Check that no pack or writer has begun since the folder was listed; stores have no locks.

    Raises:
        StorageError: If one has.
    """
    now = output.list_files()
    check_finished(output.url, now)
    if not set(filter(is_journal, now)) <= set(present):
        raise StorageError(
            f"a pack or ShardWriter began to replace the dataset while it was indexed, so no {MANIFEST_NAME} was written; "
            "wait until it ends, then run this again if needed",
            shard=output.url,
        )


def _check_columns(columns: Sequence[Column], results: Iterable[Mapping[str, JSON]]) -> list[str]:
    """Return warnings of columns that some samples lack (see `check_summaries`)."""
    listed = [*results]
    nsamples = sum(cast("int", one["samples"]) for one in listed)
    return check_summaries(columns, map(_summary, listed), nsamples)


def _summary(result: Mapping[str, JSON]) -> ColumnSummary:
    found = cast("Mapping[str, tuple[int, str]]", result["columns"] or {})
    return {name: (count, kind) for name, (count, kind) in found.items()}


def _publish_manifest(output: OutputFolder, manifest: Manifest, present: Sequence[str]) -> None:
    """Write the manifest, and delete the pages of an earlier one among the files that are present."""
    _check_no_other_writer(output, present)
    files = encode_manifest_files(manifest)
    output.sync()  # the indexes, which other processes may have written
    write_manifest_files(output, files)
    remove_old_pages(output, present, files)


def _manifest_of(
    results: Mapping[IndexShard, Mapping[str, JSON]], *, name: str, is_elsewhere: bool
) -> Manifest:
    fields: Counter[str] = Counter()
    for result in results.values():
        fields.update(cast("dict[str, int]", result["fields"]))
    shards = tuple(
        ShardInfo(
            url=task.tar.url if is_elsewhere else _name(task.tar.url),
            nsamples=cast("int", result["samples"]),
            filesize=cast("int", result["bytes"]),
            sha256=cast("str | None", result["sha256"]),
            index=_name(task.tar.url) + INDEX_SUFFIX if is_elsewhere else None,
        )
        for task, result in results.items()
    )
    return Manifest(shards=shards, name=name, fields=dict(fields))


def _find_tars(urls: Urls, storage: Storage, *, one_folder: bool) -> list[FileInfo]:
    """Find the tars to index, in order; an existing manifest is ignored, since it may be the one to repair.

    Args:
        urls: Where they are.
        storage: The storage of the files.
        one_folder: Refuse tars in several folders; else tars of the same name.
    """
    expanded = [_folder_of_manifest(url) for url in expand_urls(urls)]
    if not expanded:
        raise OptionError("no shards: the list of URLs is empty")
    listed: dict[str, dict[str, FileInfo]] = {}
    found = [tar for url in expanded for tar in _tars_of(url, storage, listed)]
    _refuse_without_manifest(found, storage, one_folder=one_folder)
    return found


def _names_in(folder: str, storage: Storage) -> list[str]:
    """Return the names of the files in a folder; none if it is missing."""
    try:
        return [_name(file.url) for file in storage.list_folder(folder)[0]]
    except NotFoundError:
        return []


def _refuse_without_manifest(
    tars: Sequence[FileInfo], storage: Storage, *, one_folder: bool
) -> None:
    folders = dict.fromkeys(parent_url(storage.resolve(tar.url)[1]) for tar in tars)
    names = Counter(_name(tar.url) for tar in {tar.url: tar for tar in tars}.values())
    repeated = next((name for name, count in names.items() if count > 1), None)
    if not one_folder and repeated is not None:
        raise OptionError(
            f"two tars are named {repeated}, so their indexes would be one file; index their folders to different places"
        )
    if one_folder and len(folders) > 1:
        raise OptionError(
            f"shards in {len(folders)} folders ({', '.join(list(folders)[:3])}): a manifest covers one folder; "
            "index each separately, then read them as a list"
        )
    for tar, count in Counter(tar.url for tar in tars).items():
        if count > 1:
            raise OptionError("a shard is named twice; name each once", shard=tar)
        if is_compressed(tar):
            raise OptionError(
                "a compressed tar can only be streamed from its start, an index is of no use; "
                "pack it again as a plain .tar to read it by number",
                shard=tar,
            )


def _folder_of_manifest(url: str) -> str:
    return parent_url(url) if _name(url) == MANIFEST_NAME else url


def _tars_of(url: str, storage: Storage, listed: dict[str, dict[str, FileInfo]]) -> list[FileInfo]:
    """Find the tars that one URL means.

    Args:
        url: A folder, a pattern or a tar.
        storage: The storage of the files.
        listed: The files of folders listed before, by name: one listing instead of a request for each of 10,000 tars.
    """
    is_pattern = is_glob(url, storage)
    if is_tar(url) and not is_pattern:
        if url.startswith(("http://", "https://")):  # few web servers list a folder
            return [storage.info(url)]
        return [_look_up(url, storage, listed)]
    files, folders = (storage.glob(url), []) if is_pattern else storage.list_folder(url)
    tars = [file for file in files if is_tar(file.url)]
    warn_of_links(url, tars)
    if tars:  # the page of a web server has no sizes
        return [tar if tar.size_or_none is not None else storage.info(tar.url) for tar in tars]
    contents = [f"{folder}/" for folder in folders] + [_name(file.url) for file in files]
    raise StorageError(
        f"no .tar here (found: {', '.join(contents[:8]) or 'nothing'}); "
        "name the tars, or the folder that they are right in",
        shard=url,
    )


def _look_up(url: str, storage: Storage, listed: dict[str, dict[str, FileInfo]]) -> FileInfo:
    """Find a file in the listing of its folder (see `_tars_of`)."""
    folder = parent_url(url)
    if folder not in listed:
        listed[folder] = {_name(file.url): file for file in storage.list_folder(folder)[0]}
    return listed[folder].get(_name(url)) or storage.info(url)


def _name_before(url: str, storage: Storage) -> str:
    """Return the dataset's name in a manifest that is about to be replaced; none if it cannot be read."""
    if not storage.exists(url):
        return ""
    try:
        return read_manifest(storage.info(url), storage)[0].name
    except ManifestError:
        return ""


def _name(url: str) -> str:
    return url.rsplit("/", 1)[-1]


def _warn_left_out(names: Sequence[str], url: str) -> Iterator[str]:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield (
            f"{url}: {', '.join(names[:3])}{more} in the same folder not indexed, so readers of the folder do not see "
            f"{'them' if len(names) > 1 else 'it'}; index the folder itself to include all"
        )
