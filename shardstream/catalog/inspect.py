"""Inspect a dataset without reading all of it: its shards and fields, or one sample; read one shard from start to end."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from shardstream.catalog.class_names import StoredClassNames, read_all_classes
from shardstream.catalog.columns import samples_with_keys
from shardstream.catalog.shard_catalog import lacks_index, open_samples
from shardstream.errors import (
    NotFoundError,
    OptionError,
    ShardStreamError,
    UnfinishedError,
    get_logger,
    plural,
)
from shardstream.format import (
    FIRST_VERSION,
    MANIFEST_NAME,
    ForwardReader,
    Group,
    ReadAt,
    Sample,
    ShardInfo,
    TarDiagnostics,
    as_rows,
    iter_groups,
    iter_members,
    iter_samples,
    open_by_content,
    open_decompressed,
    read_sample,
)
from shardstream.storage import (
    Cancellation,
    FileInfo,
    LocatedShards,
    RangeStream,
    Storage,
    Urls,
    dataset_of_change,
    is_compressed,
    is_journal,
    is_tar,
    join_url,
    locate_shards,
    map_file,
    parent_url,
    read_manifest,
)

if TYPE_CHECKING:
    import pyarrow as pa

_log = get_logger(__name__)
_MAX_DIGITS = 18  # of a class number
_MAX_SPLITS = 100  # each folder is listed
_READ_BYTES = 4 << 20
_HEADERS_CHUNK_BYTES = 256 << 10  # of remote tars: larger bodies are skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Shards and fields of a dataset, without reading its tars.

    Args:
        shards: Shards with absolute URLs; counts and sizes are None if unknown.
        fields: Field -> number of samples that have it; None if only the first sample of the first shard was read.
        indexed: Contains the URLs of the shards that have an index.
        name: Name of the dataset, if it has a manifest.
        manifest_url: The manifest, if there is one.
        version: Number of the version, if one manifest lists all shards.
        deleted: Samples that are left out; counts of shards and fields include them.
        classes: Names of the classes, if there are some.
    """

    shards: Sequence[ShardInfo]
    fields: Mapping[str, int | None]
    indexed: Container[str]
    name: str = ""
    manifest_url: str | None = None
    version: int | None = None
    deleted: int = 0
    classes: tuple[str, ...] | None = None

    @property
    def nsamples(self) -> int | None:
        """Number of samples that readers see; None if one count is unknown."""
        total = _total([shard.nsamples for shard in self.shards])
        return None if total is None else total - self.deleted

    @property
    def total_bytes(self) -> int | None:
        """Bytes of all shards; None if one size is unknown."""
        return _total([shard.filesize for shard in self.shards])


def list_shards(
    urls: Urls,
    *,
    version: int | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Listing:
    """List the shards of a dataset from its manifest, or from the names and sizes of its files.

    Without a manifest, the fields are those of the first sample of the first shard.

    Args:
        urls: A folder, a manifest, a pattern, a tar or a list.
        version: Number or tag of a version of the dataset; by default the current one.
        storage_options: ``storage_options`` of fsspec.

    Raises:
        OptionError: If the list of URLs is empty, or there is no such version.
        UnfinishedError: If the dataset is being written, or its writer was stopped.
        StorageError: If nothing is found, or the place cannot be reached.
        ManifestError: If the manifest is invalid.
    """
    storage = Storage(storage_options)
    located = locate_shards(urls, storage, version)
    name, fields = "", dict[str, int | None]()
    if located.manifest_url is not None:
        manifest, _ = read_manifest(storage.info(located.manifest_url), storage)
        name, fields = manifest.name, dict(manifest.fields)
    return Listing(
        shards=located.shards,
        fields=fields or _first_fields(located.shards[0].url, storage),
        indexed=located.indexed,
        name=name,
        manifest_url=located.manifest_url,
        version=None if located.version is None else located.version.number,
        deleted=sum(len(numbers) for _, numbers in located.deleted),
        classes=StoredClassNames(located, storage).names,
    )


def read_columns(
    urls: Urls,
    columns: Sequence[str] | None = None,
    *,
    storage_options: dict[str, Any] | None = None,
    filesystem: Any = None,
) -> pa.Table:
    """Return the columns of all samples, which ``pack``, ``index`` and `ShardWriter` write with ``columns=``, as a `pyarrow.Table`.

    Row i is sample i of a `ShardDataset` without ``shuffle``, so what you compute from the table can be its ``subset=``.

    Args:
        urls: Shards as for `ShardDataset`.
        columns: Columns to read, e.g. ``["__key__", "cls"]``; by default all.
        storage_options: For fsspec.
        filesystem: An fsspec file system to use instead.

    Raises:
        OptionError: If a shard has no index or no columns, lacks one, or columns of two shards have different types; if pyarrow is not installed.
        IndexMismatchError: If columns were made of another shard.
        ManifestError: If a file of columns is damaged.
        StorageError: If one cannot be read.
    """
    storage = Storage(storage_options, filesystem)
    return open_samples(locate_shards(urls, storage), storage).read_columns(columns)


def list_splits(
    folder: str, *, storage_options: Mapping[str, Any] | None = None
) -> dict[str, Listing | None]:
    """List the datasets in the folders directly under one that has no shards itself: the splits of a pack.

    Args:
        folder: URL of the folder.
        storage_options: ``storage_options`` of fsspec.

    Returns:
        Name of the folder -> its dataset, None where that is not finished; sorted. Empty if the folder is missing or has
        shards, or no folder in it has any.

    Raises:
        StorageError: If the folder cannot be reached.
        ManifestError: If a manifest is invalid.
    """
    storage = Storage(storage_options)
    try:
        files, folders = storage.list_folder(folder)
    except NotFoundError:
        return {}
    if _holds_shards(files) or len(folders) > _MAX_SPLITS:
        return {}
    child_folders = {name: join_url(folder, name) for name in folders if not name.startswith(".")}
    splits: dict[str, Listing | None] = {}
    for name, url in child_folders.items():
        if _holds_shards(storage.list_folder(url)[0]):
            try:
                splits[name] = list_shards(url, storage_options=storage_options)
            except UnfinishedError:
                splits[name] = None
    return splits


def _holds_shards(files: Sequence[FileInfo]) -> bool:
    """Return whether a dataset is in a folder, or has begun there."""
    names = [file.url.rsplit("/", 1)[-1] for file in files]
    return any(name == MANIFEST_NAME or is_tar(name) or is_journal(name) for name in names)


def class_name(sample: Sample, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """Return the name of a sample's class, by its field ``cls`` and the ``classes.json`` in the folder of its shard; None if unknown."""
    number = sample.get("cls", b"")
    if not number.isdigit() or len(number) > _MAX_DIGITS:
        return None
    folder = parent_url(sample["__url__"])
    folder = dataset_of_change(folder) or folder
    names = read_all_classes([folder], Storage(storage_options)).get(folder, ())
    return names[int(number)] if int(number) < len(names) else None


def read_one(
    urls: Urls,
    *,
    version: int | str | None = None,
    number: int | None = None,
    key: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Sample:
    """Read one sample, by its number in the dataset or by its key.

    By number, shards with an index and local ones cost one range read; others are streamed up to it. By key, shards are
    searched one after another, as an index has no keys: of plain tars only the headers are read (remote bodies over 256
    KiB are skipped), compressed ones are streamed.

    Args:
        urls: A folder, a manifest, a pattern, a tar or a list.
        number: From 0.
        key: Value of ``__key__``; the first sample with it is returned.
        version: Number or tag of a version of the dataset; by default the current one.
        storage_options: ``storage_options`` of fsspec.
        progress: Called with bytes done and bytes in all of a search by key, after each shard.

    Raises:
        OptionError: If there is no such sample, or not exactly one of number and key is given.
        ShardError: If a shard is damaged.
        UnfinishedError: If the dataset is being written, or its writer was stopped.
        StorageError: If nothing is found, or the place cannot be reached.
    """
    if (number is None) == (key is None):
        raise OptionError("pass the number of a sample or its key, not both")
    storage = Storage(storage_options)
    located = locate_shards(urls, storage, version)
    if number is None and (located.deleted or (located.version or FIRST_VERSION).replaced):
        found, _ = samples_with_keys(open_samples(located, storage), [key or ""])
        if not len(found):
            raise _no_such_key_error(key, located)
        number = int(found[0])
    if number is not None:
        return _read_number(number, located, storage)
    return _search(key or "", located, storage, progress)


def _read_number(number: int, located: LocatedShards, storage: Storage) -> Sample:
    if number < 0:
        raise OptionError(f"samples are numbered from 0, not from {number}")
    if lacks_index(located, storage) is not None:
        return _stream_to(number, located, storage)
    samples = open_samples(located, storage)
    if number >= len(samples):
        raise _no_such_sample_error(number, len(samples))
    with closing(samples.open_fetcher()) as fetcher:
        (found,) = as_rows(fetcher.samples(np.array([number])))
    if isinstance(found, Exception):
        raise found
    return cast("Sample", found)


def _search(
    key: str,
    located: LocatedShards,
    storage: Storage,
    progress: Callable[[int, int], object] | None,
) -> Sample:
    done, total = 0, sum(shard.filesize or 0 for shard in located.shards)
    for shard in located.shards:
        if is_compressed(shard.url):
            with closing(stream_samples(shard.url, storage)) as samples:
                found = next((sample for _, sample in samples if sample["__key__"] == key), None)
        else:
            found = _find(key, shard.url, storage)
        if found is not None:
            return found
        done += shard.filesize or 0
        if progress is not None:
            progress(done, total)
    raise _no_such_key_error(key, located)


def _find(key: str, url: str, storage: Storage) -> Sample | None:
    """Search a key in the headers of a plain tar."""
    with open_headers(url, storage) as (read, end):
        for group in iter_groups(iter_members(read, end=end, shard=url), shard=url):
            if group.key == key:
                data = storage.read(url, group.start, group.end)
                return read_sample(data, group.start, group.start, group.end, url)
    return None


def _stream_to(number: int, located: LocatedShards, storage: Storage) -> Sample:
    """Count samples from the start, skipping shards whose count is known."""
    first = 0
    for shard in located.shards:
        if shard.nsamples is not None and number >= first + shard.nsamples:
            first += shard.nsamples
            continue
        with closing(stream_samples(shard.url, storage)) as samples:
            for _, sample in samples:
                if first == number:
                    return sample
                first += 1
    raise _no_such_sample_error(number, first)


def stream_samples(url: str, storage: Storage) -> Generator[tuple[Group, Sample]]:
    """Yield the samples of a tar, plain or compressed, from its start.

    Raises:
        ShardError: If it is damaged.
        StorageError: If it cannot be read.
    """
    with storage.open(url) as raw, open_decompressed(raw, shard=url) as stream:
        end = None if is_compressed(url) else storage.info(url).size
        yield from iter_samples(ForwardReader(stream), end=end, shard=url)


def read_shard(
    shard: str | os.PathLike[str] | BinaryIO, *, storage_options: Mapping[str, Any] | None = None
) -> Iterator[Sample]:
    """Yield the samples of one tar, plain or compressed with gzip or zstd, with fields as bytes.

    Args:
        shard: URL or path, or a binary stream from its current position, which stays open.
        storage_options: As in `ShardDataset`.

    Raises:
        StorageError: If it cannot be read.
        ShardError: If it is damaged or cut.
        SampleError: If its members do not form samples.
    """
    if isinstance(shard, str | os.PathLike):
        url = os.fspath(shard)
        opened: Any = Storage(storage_options).open(url)
    else:
        url = str(getattr(shard, "name", ""))
        opened = nullcontext(shard)
    diagnostics = TarDiagnostics()
    with opened as file, open_by_content(file, shard=url) as (stream, size):
        read = ForwardReader(stream, chunk_bytes=_READ_BYTES)
        for _, sample in iter_samples(read, end=size, shard=url, diagnostics=diagnostics):
            yield sample
    diagnostics.warn(url)


def _first_fields(url: str, storage: Storage) -> dict[str, int | None]:
    try:
        with open_headers(url, storage) as (read, end):
            first = next(iter_groups(iter_members(read, end=end, shard=url), shard=url), None)
    except ShardStreamError as error:
        _log.warning("the fields are unknown: %s", error)
        first = None
    return dict.fromkeys([] if first is None else first.fields)


@contextmanager
def open_headers(
    url: str, storage: Storage, *, size: int | None = None, cancelled: Cancellation | None = None
) -> Iterator[tuple[ReadAt, int | None]]:
    """Open a tar to read little more than its headers; yields its bytes by growing offsets, and its length, None if it is compressed.

    Of a local tar only the pages of the headers are touched, of a remote one bodies over 256 KiB are skipped.

    Args:
        url: URL of the tar.
        storage: Its storage.
        size: Its length, if that is known.
        cancelled: Ends a read when another thread sets it.
    """
    path = storage.local_path(url)
    if path is not None and not is_compressed(url):
        with closing(map_file(path, url)) as tar:
            yield (lambda at, size: tar[at : at + size]), len(tar)
        return
    size = storage.info(url).size if size is None else size
    raw: Any = RangeStream(storage, url, size, cancelled=cancelled)
    with open_decompressed(raw, shard=url) as stream:
        read = ForwardReader(stream, chunk_bytes=_HEADERS_CHUNK_BYTES)
        yield read, None if is_compressed(url) else size


def _total(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _no_such_sample_error(number: int, count: int) -> OptionError:
    return OptionError(f"there is no sample {number}: they are numbered from 0 to {count - 1}")


def _no_such_key_error(key: str | None, located: LocatedShards) -> OptionError:
    return OptionError(
        f"no sample has the key {key!r} in {plural(len(located.shards), 'shard')}; "
        "a key is a member's name up to the first dot after its last slash"
    )
