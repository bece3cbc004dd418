"""Index tars of other tools: write ``NAME.tar.idx`` for each, then ``index.json``. No tar is changed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardstream.errors import AccessDeniedError, ChangedError, OptionError, StorageError, redact
from shardstream.format import (
    COLUMNS_SUFFIX,
    INDEX_SUFFIX,
    MANIFEST_NAME,
    Column,
    ColumnSources,
    Manifest,
    ShardInfo,
    encode_index,
    encode_member_index,
    is_records_name,
)
from shardstream.packing.job.claim import locked
from shardstream.packing.job.folder_state import (
    ManifestFiles,
    has_versions,
    read_old_manifest,
    shard_of,
)
from shardstream.packing.job.key_hashes import (
    OTHER_KEYS,
    KeyHashes,
    find_repeated_keys,
    read_keys_by_index,
)
from shardstream.packing.job.report import ProgressFunction
from shardstream.packing.shards.column_builder import (
    ColumnBuilder,
    check_summaries,
    checked_columns,
)
from shardstream.packing.shards.shard_scan import (
    Problem,
    ProgressMeter,
    ShardResult,
    ShardScanner,
    check_threads,
    scan_shards,
)
from shardstream.storage import (
    TAR_SUFFIXES,
    FileInfo,
    OutputFolder,
    Storage,
    Urls,
    absolute_url,
    absolute_urls,
    cached_look_up,
    check_finished,
    check_folder_finished,
    commit_all,
    dataset_of_change,
    final_name,
    find_tars,
    is_compressed,
    is_journal,
    is_tar,
    join_url,
    output_folder_in,
    parent_url,
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
    """The task that scans one tar and writes its index.

    Args:
        tar: The tar to scan.
        storage: The storage of the files.
        members: Also write ``NAME.idx``.
        output: Where the index goes.
        columns: Columns of its samples to write to ``NAME.tar.cols.parquet``; None writes no such file.
        sha256: Hash the tar.
        before: The tar in the manifest that is replaced; its checksum is kept where the tar is not hashed.
        meter: Counts bytes, in this process only; a task with a meter cannot be pickled.
    """

    tar: FileInfo
    storage: Storage
    members: bool
    output: OutputFolder
    columns: tuple[Column, ...] | None = None
    sha256: bool = True
    before: ShardInfo | None = None
    meter: ProgressMeter | None = None

    @property
    def name(self) -> str:
        """Verb and tar."""
        return f"index {redact(self.tar.url)}"

    def run(self) -> Mapping[str, JSON]:
        """Write the index; a second run writes the same bytes."""
        tar, url, name = self.tar, self.tar.url, _name(self.tar.url)
        scanner = ShardScanner(self.storage, url, tar.size, self.meter, hashes=self.sha256)
        builder = None if self.columns is None else ColumnBuilder(self.columns, url)
        with scanner as shard:
            scan = shard.scan(keep_members=self.members, columns=builder)
            sha256, nbytes = shard.finish()
        before = self.before
        if before and (before.nsamples, before.filesize) == (len(scan.keys), nbytes):
            sha256 = sha256 or before.sha256
        result = ShardResult(nbytes=nbytes, sha256=sha256).with_samples(scan)
        files = {name + INDEX_SUFFIX: encode_index(scan.offsets)}
        if builder is not None:
            info = ShardInfo(url=url, filesize=nbytes, sha256=sha256)
            files[name + COLUMNS_SUFFIX] = builder.encode(scan.keys, info)
            result = replace(result, summary=builder.summary)
        if self.members and scan.keys:
            text = encode_member_index(shard.members, shard=url)
            files[name[: -len(TAR_SUFFIXES[0])] + INDEX_SUFFIX] = text
        _check_unchanged(tar, self.storage.info(url))
        commit_all(self.output, files)
        found = [(one.what, one.remedy) for one in shard.diagnostics.findings()]
        if not scan.keys:
            found.append(("no samples in it (members need a name like KEY.FIELD)", ""))
        problems = [
            Problem(shard=url, what=what, remedy=remedy, severity="warning")
            for what, remedy in found
        ]
        return replace(result, problems=problems).encode()


def index(  # noqa: PLR0913  (the public door)
    urls: Urls,
    *,
    to: str | os.PathLike[str] | None = None,
    sha256: bool = True,
    columns: ColumnSources | None = None,
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
        sha256: Hash the tars. Without, only headers are read (of remote tars, where bodies exceed 256 KiB), and damaged bytes are not noticed later;
            with ``columns`` the checksums of the manifest that is there stay, for tars with as many bytes and samples.
        columns: Also write ``NAME.tar.cols.parquet`` (docs/formats.md) with the key of each sample and these values, to choose samples
            with ``where=`` and keys in ``subset=``, and to plan rows: e.g. ``"cls,json.width"``, or name -> source, as in ``{"n": "npy.len"}``. Sources
            are fields of one whole number or text, bools, numbers and text in fields of JSON, and properties of files, read from their headers: ``len`` of
            ``npy`` (first dimension) and text (characters), ``frames`` and ``seconds`` of video and sound, ``height`` and ``width`` of pictures and
            video, ``rate`` and ``channels`` of sound, ``bytes``. A source may be a function of a sample, a dict of its fields as bytes and
            ``__key__``, that returns a bool, number, text or None: ``{"keep": is_sharp}`` (picklable with an executor). ``"__key__"`` writes the keys only.
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
        SampleError: If a key or field is repeated, a name does not fit the index of members, a value its column, or a file is damaged whose length
            is a column. An error of a function is raised as it is, with a note of the sample.
        ChangedError: If a tar was replaced meanwhile; then ``index.json`` is not written.
        UnfinishedError: If a pack or `ShardWriter` writes to that folder, or was stopped there.
        StorageError: If a place cannot be listed, read or written, or a pack or `ShardWriter` replaces the dataset meanwhile.
    """
    check_threads(threads, executor)
    if isinstance(executor, Parts):
        raise OptionError(
            "index cannot be cut into parts (Parts); use several processes (LocalExecutor, --processes) or a cluster (RayExecutor, --ray)"
        )
    # Processes may have another current folder, and the manifest may be elsewhere.
    if executor is not None or to is not None:
        urls = absolute_urls(urls)
    wanted = None if columns is None else checked_columns(columns, takes_functions=True)
    storage = Storage(storage_options, filesystem)
    tars = _find_tars(urls, storage, is_elsewhere=to is not None)
    folder = parent_url(tars[0].url) if to is None else absolute_url(to).rstrip("/")
    output = output_folder_in(storage, folder)
    present = output.list_files()
    _check_folders(tars, output, present, storage)
    meter = ProgressMeter(f"index {folder}", sum(tar.size for tar in tars), progress, executor)
    task = IndexShard(
        tar=tars[0],
        storage=storage,
        members=members,
        output=output,
        columns=wanted,
        sha256=sha256,
        meter=meter if executor is None else None,
    )
    # Another folder object than that of the tasks: one that is locked cannot be pickled.
    with locked(output_folder_in(storage, folder)), closing(KeyHashes()) as keys:
        old = read_old_manifest(output)
        # Columns of an earlier run could be those of another tar: only their checksum tells.
        before = {_name(shard.url): shard for shard in old.shards if wanted is not None}
        tasks = [replace(task, tar=tar, before=before.get(_name(tar.url))) for tar in tars]
        results = [*scan_shards(tasks, keys, executor, threads=threads, meter=meter).values()]
        nsamples = sum(one.nsamples or 0 for one in results)
        warnings = [str(problem) for one in results for problem in one.problems]
        warnings += check_summaries(
            wanted or (), [one.summary for one in results], nsamples, folder
        )
        manifest = _manifest_of(tars, results, name or old.name, is_elsewhere=to is not None)
        _check_all_unchanged(tars, storage)
        warnings += _warn_repeated(keys, manifest, tars, folder, storage)
        _publish(output, manifest, present)
        output.remove(*_half_written(present, tars))
    url = join_url(folder, MANIFEST_NAME)
    warnings += _warn_left_out(present, tars, url)
    return IndexReport(manifest_url=url, manifest=manifest, warnings=tuple(warnings))


def _check_folders(
    tars: Sequence[FileInfo],
    output: OutputFolder,
    present: Mapping[str, FileInfo],
    storage: Storage,
) -> None:
    """Refuse datasets that are not finished or were changed: a manifest of their tars would have deleted samples again, and lose earlier versions.

    Raises:
        UnfinishedError: If the dataset is not finished.
        OptionError: If the tars are in the folder of one that was changed, or the manifest would be.
    """
    check_finished(
        output.url, present
    )  # also of tars named one by one: a manifest would publish all
    folders = dict.fromkeys(dataset_of_change(one) or one for one in _folders(tars))
    for folder in (output, *(output_folder_in(storage, one) for one in folders)):
        if has_versions(folder, _names_in(folder)):
            raise OptionError(
                "this dataset has versions, or deleted samples, which a new manifest of its tars would lose; write it again with 'shardstream reshard' "
                "(--columns), and if its index.json is damaged, restore it or copy the last one of versions/",
                shard=folder.url,
            )


def _names_in(folder: OutputFolder) -> Iterable[str]:
    try:
        return folder.list_files()
    except AccessDeniedError:  # a web server that shows no list; its manifest is read
        return ()


def _folders(tars: Sequence[FileInfo]) -> list[str]:
    return [*dict.fromkeys(parent_url(tar.url) for tar in tars)]


def _warn_repeated(
    keys: KeyHashes, manifest: Manifest, tars: Sequence[FileInfo], folder: str, storage: Storage
) -> Iterator[str]:
    """Warn of keys that several tars have: they can be read by number, but not chosen by key."""
    indexed = [
        ShardInfo(url=tar.url, index=join_url(folder, _name(tar.url) + INDEX_SUFFIX))
        for tar in tars
    ]
    read = partial(read_keys_by_index, storage.read, indexed)
    repeated = find_repeated_keys(keys, manifest.shards, read)
    if repeated is not None:
        yield f"{folder}: {repeated}; {OTHER_KEYS}"


def _manifest_of(
    tars: Sequence[FileInfo], results: Sequence[ShardResult], name: str, *, is_elsewhere: bool
) -> Manifest:
    shards = tuple(
        ShardInfo(
            url=tar.url if is_elsewhere else _name(tar.url),
            nsamples=result.nsamples,
            filesize=result.nbytes,
            sha256=result.sha256,
            index=_name(tar.url) + INDEX_SUFFIX if is_elsewhere else None,
        )
        for tar, result in zip(tars, results, strict=True)
    )
    fields = sum((Counter(one.fields) for one in results), Counter[str]())
    return Manifest(shards=shards, name=name, fields=dict(fields))


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
    look_up = cached_look_up(storage)
    for tar in tars:
        if not tar.url.startswith(("http://", "https://")):  # they were compared one by one
            _check_unchanged(tar, look_up(tar.url))


def _publish(output: OutputFolder, manifest: Manifest, present: Mapping[str, FileInfo]) -> None:
    """Write the manifest, and delete the records of an earlier one among the files that were present.

    Raises:
        StorageError: If a pack or writer has begun since these were listed; stores have no locks.
    """
    now = output.list_files()
    check_finished(output.url, now)
    if not set(filter(is_journal, now)) <= set(present):
        raise StorageError(
            f"a pack or ShardWriter began to replace the dataset while it was indexed, so no {MANIFEST_NAME} was written; "
            "wait until it ends, then run this again if needed",
            shard=output.url,
        )
    output.sync()  # the indexes, which other processes may have written
    files = ManifestFiles(output, manifest, present)
    files.write()
    files.remove_older()


def _half_written(present: Iterable[str], tars: Sequence[FileInfo]) -> Iterator[str]:
    """Yield the files that a killed run has left of an index, of columns or of the manifest."""
    names = {_name(tar.url) for tar in tars}
    for name in present:
        final = final_name(name) or ""
        is_manifest = final == MANIFEST_NAME or is_records_name(final)
        if is_manifest or (final not in names and shard_of(final) in names):
            yield name


def _find_tars(urls: Urls, storage: Storage, *, is_elsewhere: bool) -> list[FileInfo]:
    """Find the tars, which one manifest and one folder of indexes must be able to hold.

    Raises:
        OptionError: If a tar is compressed or named twice; in place, if they are in several folders, else if two have one name.
        UnfinishedError: If a dataset is being written in their folder.
    """
    tars = find_tars(urls, storage)
    for tar, count in Counter(tar.url for tar in tars).items():
        if count > 1:
            raise OptionError("a shard is named twice; name each once", shard=tar)
        if is_compressed(tar):
            raise OptionError(
                "a compressed tar can only be streamed from its start, an index is of no use; "
                "pack it again as a plain .tar to read it by number",
                shard=tar,
            )
    folders = dict.fromkeys(parent_url(storage.resolve(tar.url)[1]) for tar in tars)
    if not is_elsewhere and len(folders) > 1:
        raise OptionError(
            f"shards in {len(folders)} folders ({', '.join(list(folders)[:3])}): a manifest covers one folder; "
            "index each separately, then read them as a list"
        )
    (name, count), *_ = Counter(_name(tar.url) for tar in tars).most_common(1)
    if count > 1:
        raise OptionError(
            f"two tars are named {name}, so their indexes would be one file; index their folders to different places"
        )
    if is_elsewhere:
        for folder in _folders(tars):
            check_folder_finished(folder, storage)
    return tars


def _name(url: str) -> str:
    return url.rsplit("/", 1)[-1]


def _warn_left_out(present: Iterable[str], tars: Iterable[FileInfo], url: str) -> Iterator[str]:
    names = sorted(set(filter(is_tar, present)) - {_name(tar.url) for tar in tars})
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield (
            f"{url}: {', '.join(names[:3])}{more} in the same folder not indexed, so readers of the folder do not see "
            f"{'them' if len(names) > 1 else 'it'}; index the folder itself to include all"
        )
