"""Index tars of other tools: write ``NAME.tar.idx`` for each, then ``index.json``. No tar is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from shardstream.errors import ManifestError, OptionError, StorageError, redact
from shardstream.format import (
    INDEX_SUFFIX,
    MANIFEST_NAME,
    WDS2IDX_SUFFIX,
    Manifest,
    ShardInfo,
    encode_index,
    encode_manifest,
    encode_wds2idx,
)
from shardstream.packing.shard_scan import (
    ProgressFunction,
    ProgressMeter,
    ShardScanner,
    run_shard_tasks,
)
from shardstream.storage import (
    TAR_SUFFIXES,
    FileInfo,
    Storage,
    Urls,
    check_finished,
    expand_urls,
    is_compressed,
    is_tar,
    join_url,
    parent_url,
    publish_bytes,
    read_manifest,
)
from shardstream.tasks import JSON, Executor


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
        wds2idx: Also write ``NAME.idx``.
        meter: Counts bytes, in this process only; a task with a meter cannot be pickled.
    """

    tar: FileInfo
    storage: Storage
    wds2idx: bool
    meter: ProgressMeter | None = None

    @property
    def name(self) -> str:
        """Verb and tar."""
        return f"index {redact(self.tar.url)}"

    def run(self) -> Mapping[str, JSON]:
        """Write the index; a second run writes the same bytes."""
        tar, storage = self.tar, self.storage
        with ShardScanner(storage, tar.url, tar.size, self.meter) as shard:
            scan = shard.scan(keep_members=self.wds2idx)
            sha256, nbytes = shard.finish()
        text = None
        if self.wds2idx and scan.keys:
            text = encode_wds2idx(shard.members, shard=tar.url)
        publish_bytes(storage, tar.url + INDEX_SUFFIX, encode_index(scan.offsets))
        if text is not None:
            publish_bytes(storage, tar.url[: -len(TAR_SUFFIXES[0])] + WDS2IDX_SUFFIX, text)
        warnings = [f"{tar.url}: {finding}" for finding in shard.diagnostics.findings()]
        if not scan.keys:
            warnings.append(f"{tar.url}: no samples in it (members need a name like KEY.FIELD)")
        return {
            "samples": len(scan.keys),
            "bytes": nbytes,
            "sha256": sha256,
            "fields": dict(scan.fields),
            "warnings": [*warnings],
        }


def index(  # noqa: PLR0913  (the public door)
    urls: Urls,
    *,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    threads: int = 4,
    name: str = "",
    wds2idx: bool = False,
    progress: ProgressFunction | None = None,
    executor: Executor | None = None,
) -> IndexReport:
    """Write an index for each tar and one manifest for all, so that samples can be read by number.

    Every tar is read once, from its start to its end, in pieces of 8 MiB. Indexes and manifest that are there already are
    replaced. If a tar is bad, ``index.json`` is not written.

    Args:
        urls: A folder or prefix (all tars right in it, sorted by name), a pattern, a tar, or a list; all in one folder.
        storage_options: ``storage_options`` of fsspec.
        filesystem: An fsspec file system to use instead of looking one up by protocol.
        threads: Tars to read at a time; each takes about 32 MiB of memory.
        name: Name of the dataset; by default the one in a manifest that is there already.
        wds2idx: Also write ``NAME.idx``, the text index of NVIDIA DALI.
        progress: Called with bytes done and bytes in all, from the threads that read, one at a time; with an executor after
            each tar, from this thread.
        executor: Executor that scans the tars, instead of ``threads`` threads of this process: e.g. ``LocalExecutor(processes=8)``.
            Storage options travel with the tasks.

    Raises:
        OptionError: If the tars are compressed, in several folders or named twice.
        ShardError: If a tar is damaged, cut or not a tar.
        SampleError: If a key or field is repeated, or a name does not fit ``wds2idx``.
        UnfinishedError: If a pack or `ShardWriter` writes to that folder, or was stopped there.
        StorageError: If a place cannot be listed, read or written.
    """
    storage = Storage(storage_options, filesystem)
    folder, tars, others = _find_tars(urls, storage)
    meter = ProgressMeter(sum(tar.size for tar in tars), progress)
    counted = meter if executor is None else None
    tasks = [IndexShard(tar=tar, storage=storage, wds2idx=wds2idx, meter=counted) for tar in tars]
    results = run_shard_tasks(tasks, executor, threads=threads, meter=meter)
    url = join_url(folder, MANIFEST_NAME)
    manifest = _manifest_of(tars, results, name=name or _name_before(url, storage))
    publish_bytes(storage, url, encode_manifest(manifest))
    found = chain.from_iterable(cast("list[str]", one["warnings"]) for one in results)
    warnings = (*found, *_warn_left_out(others, url))
    return IndexReport(manifest_url=url, manifest=manifest, warnings=warnings)


def _manifest_of(
    tars: Sequence[FileInfo], results: Sequence[Mapping[str, JSON]], *, name: str
) -> Manifest:
    fields: Counter[str] = Counter()
    for result in results:
        fields.update(cast("dict[str, int]", result["fields"]))
    shards = tuple(
        ShardInfo(
            url=_name(tar.url),
            nsamples=cast("int", result["samples"]),
            filesize=cast("int", result["bytes"]),
            sha256=cast("str", result["sha256"]),
        )
        for tar, result in zip(tars, results, strict=True)
    )
    return Manifest(shards=shards, name=name, fields=dict(fields))


def _find_tars(urls: Urls, storage: Storage) -> tuple[str, list[FileInfo], list[str]]:
    """Find the tars to index; an existing manifest is ignored, since it may be the one to repair.

    Returns:
        The folder, the tars in order, and the names of other tars in that folder.
    """
    expanded = [_folder_of_manifest(url) for url in expand_urls(urls)]
    if not expanded:
        raise OptionError("no shards: the list of URLs is empty")
    listed: dict[str, dict[str, FileInfo]] = {}
    found = [tar for url in expanded for tar in _tars_of(url, storage, listed)]
    _refuse_without_manifest(found, storage)
    folder = parent_url(found[0].url)
    names = {_name(tar.url) for tar in found}
    present = [_name(file.url) for file in storage.list_folder(folder)[0]]
    check_finished(
        folder, present
    )  # also if tars are named one by one: a manifest would publish them
    return folder, found, [name for name in present if is_tar(name) and name not in names]


def _refuse_without_manifest(tars: Sequence[FileInfo], storage: Storage) -> None:
    folders = dict.fromkeys(parent_url(storage.resolve(tar.url)[1]) for tar in tars)
    if len(folders) > 1:
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
    is_pattern = any(sign in url for sign in "*?[")
    if is_tar(url) and not is_pattern:
        folder = parent_url(url)
        if folder not in listed:
            listed[folder] = {_name(file.url): file for file in storage.list_folder(folder)[0]}
        return [listed[folder].get(_name(url)) or storage.info(url)]
    files, folders = (storage.glob(url), []) if is_pattern else storage.list_folder(url)
    tars = [file for file in files if is_tar(file.url)]
    if tars:
        return tars
    contents = [f"{folder}/" for folder in folders] + [_name(file.url) for file in files]
    raise StorageError(
        f"no .tar here (found: {', '.join(contents[:8]) or 'nothing'}); "
        "name the tars, or the folder that they are right in",
        shard=url,
    )


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
