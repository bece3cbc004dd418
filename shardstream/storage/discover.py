"""Find the shards of a dataset by URL, brace pattern, ``::`` join, glob, list, folder or manifest; or its tars, whatever a manifest lists."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from shardstream.errors import (
    AccessDeniedError,
    ManifestError,
    NotFoundError,
    OptionError,
    ShardWarning,
    StorageError,
    redact,
)
from shardstream.format import (
    FIRST_VERSION,
    INDEX_SUFFIX,
    MANIFEST_NAME,
    OFFSET_BYTES,
    DatasetVersion,
    Manifest,
    ShardInfo,
    decode_manifest,
    find_repeated,
    num_samples,
)
from shardstream.storage.find_tars import (
    check_complete,
    explain_web_folder,
    glob_tars,
    no_tars_error,
    tars_of_folder,
    warn_of_folders,
    warn_of_links,
)
from shardstream.storage.listed_shards import (
    AllIndexed,
    Deleted,
    LazyShards,
    dataset_of_change,
    deleted_of_some,
    find_listed,
    find_version,
    read_deleted,
    version_url,
    warn_of_others,
)
from shardstream.storage.publish import JOURNAL_NAME, check_finished
from shardstream.storage.store import FileInfo, Storage
from shardstream.storage.urls import (
    WEB,
    Urls,
    absolute_url,
    check_names,
    expand_urls,
    folder_of_manifest,
    is_tar,
    join_url,
    parent_url,
    with_one_protocol,
)

MANIFEST_LIMIT_BYTES = 256 << 20  # over a million shards
FOLDERS_LIMIT = 10_000  # each is listed once


def absolute_urls(urls: Urls) -> Urls:
    """Return paths of this machine as absolute ones (see `absolute_url`)."""
    if isinstance(urls, str | os.PathLike):
        return absolute_url(urls)
    return [absolute_url(url) for url in urls]


class SeenManifest(NamedTuple):
    """A manifest as it was when a dataset was opened."""

    sha256: str
    """Of its bytes, in hex digits."""
    version: int
    """Number of the version of the dataset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedShards:
    """The shards of a dataset.

    Args:
        shards: Shards with absolute URLs; counts and sizes if a manifest, an index or a listing has them. Many of
            one manifest are read when they are needed.
        manifest_url: URL of the manifest that lists all shards, if there is one.
        manifests: URL of each manifest that was read -> how it was.
        indexed: Contains the URLs of the shards that have an ``.idx`` file.
        fields: Fields of the samples, by the manifests of all shards; None if a shard or its fields are not listed.
        version: The version of the dataset, if one manifest lists all shards.
        deleted: Samples that are left out.
        num_classes: How many names of ``classes.json`` an earlier version had; None for all.
    """

    shards: Sequence[ShardInfo]
    manifest_url: str | None = None
    manifests: Mapping[str, SeenManifest] = field(default_factory=dict)
    indexed: Container[str] = frozenset()
    fields: tuple[str, ...] | None = None
    version: DatasetVersion | None = None
    deleted: Deleted = ()
    num_classes: int | None = None

    @property
    def folders(self) -> tuple[str, ...]:
        """URLs of the folders of the shards, in order; of a dataset that was changed, its own."""
        if self.version not in (None, FIRST_VERSION) and self.manifest_url is not None:
            return (folder_of_manifest(self.manifest_url),)
        if isinstance(self.shards, LazyShards):
            return (self.shards.folder,)
        return tuple(dict.fromkeys(map(parent_url, map(attrgetter("url"), self.shards))))


def locate_shards(urls: Urls, storage: Storage, version: int | str | None = None) -> LocatedShards:
    """Find the shards of a dataset.

    The shards of a folder or prefix are those in its ``index.json``; without one, all tars in it, sorted by name. Without
    ``index.json``, a folder or glob with an unfinished dataset is refused; tars that are named one by one are not.

    Args:
        urls: URLs, as above.
        storage: Where they are.
        version: Number or tag of a version of the dataset, whose folder ``urls`` is then; None for the current one.

    Raises:
        OptionError: If the list of URLs is empty or names a shard twice, a brace is not closed, or a URL starts a command; if there is no such version.
        UnfinishedError: If a dataset is being written there, or its writer was stopped.
        StorageError: If nothing is found, or the store cannot be reached.
        ManifestError: If a manifest is invalid.
    """
    expanded = expand_urls(urls)
    if version is not None:
        return _from_version(expanded, storage, version)
    located: list[LocatedShards] = []
    tars: list[str] = []
    globbed: dict[str, tuple[str, ...]] = {}
    for url in expanded:
        if not url.strip():
            raise OptionError(
                "the URL is empty; name a folder, a tar or a pattern ('.' is the current folder)"
            )
        if url.startswith("pipe:"):
            storage.resolve(url)  # raises the error
        elif storage.is_glob(url):
            found = [tar.url for tar in glob_tars(url, storage)]
            names = (url.rsplit("/", 1)[-1],)
            globbed |= {one: globbed.get(one, ()) + names for one in {*map(parent_url, found)}}
            tars += found
        elif is_tar(url):
            tars.append(url)
        else:
            located.append(
                _from_manifest(storage.info(url), storage)
                if url.endswith(".json")
                else _from_folder(url, storage)
            )
    if tars:
        located.append(_from_tars(tars, storage, globbed))
    if len(expanded) > 1:
        refuse_repeated((shard.url for one in located for shard in one.shards), storage)
        _warn_of_copies(shard for one in located for shard in one.shards)
    if len(located) == 1:
        return located[0]
    return LocatedShards(
        shards=tuple(shard for one in located for shard in one.shards),
        manifests={url: digest for one in located for url, digest in one.manifests.items()},
        indexed=frozenset(
            shard.url for one in located for shard in one.shards if shard.url in one.indexed
        ),
        fields=_joined_fields(one.fields for one in located),
        deleted=_joined_deleted(located),
    )


def _joined_deleted(parts: Sequence[LocatedShards]) -> Deleted:
    """Return the deleted samples of parts that are read one after the other.

    Raises:
        OptionError: If fields of one were replaced.
    """
    found: list[tuple[int, Any]] = []
    first = 0
    for part in parts:
        if part.version is not None and part.version.replaced:
            raise OptionError(
                "fields of this dataset were replaced, so it is read alone; read the datasets by ss.mix, or write it again by 'shardstream reshard'",
                shard=part.manifest_url or "",
            )
        found += [(first + place, numbers) for place, numbers in part.deleted]
        first += len(part.shards)
    return tuple(found)


def _from_version(urls: Sequence[str], storage: Storage, asked: int | str) -> LocatedShards:
    """Return the shards of a version of a dataset, by the URL of its folder or manifest."""
    url = urls[0]
    if len(urls) != 1 or is_tar(url) or storage.is_glob(url):
        raise OptionError(
            "version= is that of one dataset: name its folder, or open each with its version and join or mix them"
        )
    folder = folder_of_manifest(url) if url.endswith(".json") else url
    manifest_url = join_url(folder, MANIFEST_NAME)
    found = read_manifest(FileInfo(url=manifest_url, size_or_none=None), storage)
    current = found[0].dataset_version
    number = find_version(current, asked, manifest_url)
    place = version_url(folder, current, number)
    if place == manifest_url:
        return _from_manifest(storage.info(place), storage, found=found)
    located = _from_manifest(FileInfo(url=place, size_or_none=None), storage)
    return replace(located, num_classes=current.num_classes(number))


def refuse_repeated(urls: Iterable[str], storage: Storage) -> None:
    """Refuse a file that several URLs name, however they spell its path or protocol: its samples would be read twice."""
    repeated = find_repeated(one_spelling(url, storage) for url in urls)
    if repeated is not None:
        raise OptionError(
            "a file is named twice, so its samples would be read twice; name each once, and "
            "pass weights= or use ss.mix to read samples more often",
            shard=repeated,
        )


def _warn_of_copies(shards: Iterable[ShardInfo]) -> None:
    """Warn of two shards with the same bytes, by their manifests: samples of a copied dataset would be read twice."""
    known: dict[str, str] = {}
    for shard in shards:
        other = known.setdefault(shard.sha256 or shard.url, shard.url)
        if other != shard.url:
            warnings.warn(
                f"{redact(other)} and {redact(shard.url)} have the same bytes, so their samples are read twice; name one of them",
                ShardWarning,
                stacklevel=4,
            )
            return


def one_spelling(url: str, storage: Storage) -> str:
    """Return the same path or URL for all spellings of that of a file."""
    is_remote = "://" in url and not url.startswith(("file:", "local:"))
    path = None if is_remote else storage.local_path(url)
    return with_one_protocol(url) if path is None else os.path.normpath(path)


def _joined_fields(parts: Iterable[Iterable[str] | None]) -> tuple[str, ...] | None:
    """Return the fields of several manifests, sorted; None if those of one are unknown."""
    known = [*parts]
    if not known or not all(known):  # wids writes manifests without fields
        return None
    return tuple(sorted({name for fields in known for name in fields or ()}))


def read_manifest(file: FileInfo, storage: Storage) -> tuple[Manifest, str]:
    """Read an ``index.json`` that was listed or looked up; return it and the SHA-256 of its bytes.

    Raises:
        ManifestError: If it is invalid, or names files outside its store (see `check_names`).
    """
    url = file.url
    if (file.size_or_none or 0) > MANIFEST_LIMIT_BYTES:  # a web server may not send the size
        raise _too_large(str(file.size), url)
    data = storage.read(url, max_bytes=MANIFEST_LIMIT_BYTES + 1)
    if len(data) > MANIFEST_LIMIT_BYTES:
        raise _too_large(f"over {MANIFEST_LIMIT_BYTES}", url)
    digest = hashlib.sha256(data).hexdigest()
    manifest = decode_manifest(data, url=url)
    if not isinstance(manifest, Manifest):
        shards = LazyShards(manifest, url, storage)  # their names are relative
        found = Manifest(
            shards=shards,
            name=manifest.name,
            fields=manifest.fields,
            dataset_version=manifest.dataset_version,
        )
        return found, digest
    if "://" in url:  # a manifest on this machine may name anything
        indexes = [shard.index for shard in manifest.shards if shard.index is not None]
        check_names(url, [*(shard.url for shard in manifest.shards), *indexes])
    return manifest, digest


def _too_large(size: str, url: str) -> ManifestError:
    return ManifestError(
        f"a manifest of {size} bytes is over the limit of {MANIFEST_LIMIT_BYTES}; split the dataset",
        shard=url,
    )


def _absolute(folder: str, shard: ShardInfo) -> ShardInfo:
    """Return a shard of the manifest in a folder with absolute URLs."""
    index = None if shard.index is None else join_url(folder, shard.index)
    return replace(shard, url=join_url(folder, shard.url), index=index)


def _from_manifest(
    file: FileInfo,
    storage: Storage,
    listed_files: list[FileInfo] | None = None,
    found: tuple[Manifest, str] | None = None,
) -> LocatedShards:
    """Return the shards that a manifest names.

    Args:
        file: The manifest.
        storage: Where it is.
        listed_files: The listing of its folder, if there is one.
        found: The manifest and the SHA-256 of its bytes, if it has been read.
    """
    url = file.url
    manifest, digest = found or read_manifest(file, storage)
    shards = manifest.shards
    indexed: Container[str] = AllIndexed()
    if not isinstance(shards, LazyShards):
        folder = folder_of_manifest(url)
        shards = tuple(map(partial(_absolute, folder), shards))
        if manifest.dataset_version == FIRST_VERSION:
            indexed = _find_indexed(shards, url, storage, listed_files)
    version = manifest.dataset_version
    return LocatedShards(
        shards=shards,
        manifest_url=url,
        manifests={url: SeenManifest(digest, version.number)},
        indexed=indexed,
        fields=tuple(sorted(manifest.fields)) or None,  # wids writes none
        version=version,
        deleted=((0, read_deleted(manifest, url, storage)),) if version.deleted else (),
    )


def _find_indexed(
    shards: Sequence[ShardInfo], url: str, storage: Storage, listed_files: list[FileInfo] | None
) -> frozenset[str]:
    """Return the URLs of the shards that have an index, of those that the manifest at a URL lists."""
    if not shards:
        raise StorageError(
            "the manifest names no shards: the dataset is empty; pack it again", shard=url
        )
    indexed: set[str] = set()
    folders: dict[str, list[ShardInfo]] = {}  # of the indexes
    for shard in shards:
        index_url = shard.index_url
        if "://" in index_url or storage.local_path(index_url) is None:
            folders.setdefault(parent_url(index_url), []).append(shard)
        elif storage.exists(index_url):
            indexed.add(shard.url)
    if len(folders) > FOLDERS_LIMIT:
        raise ManifestError(
            f"shards in {len(folders)} folders, the limit is {FOLDERS_LIMIT}; move them to fewer folders",
            shard=url,
        )
    for one, in_folder in folders.items():
        if _needs_no_listing(one, storage):
            # Two indexes decide for all: they are written in order, so a stopped run lacks the last.
            ends = {in_folder[-1], in_folder[0]}
            is_there = all(_has_index(shard, storage) for shard in ends)
            indexed.update([shard.url for shard in in_folder] if is_there else ())
            if is_there or one.startswith(WEB):  # which cannot be listed
                continue
        is_listed = listed_files is not None and one == parent_url(url)
        listed = listed_files if is_listed else storage.list_folder(one)[0]
        names = {file.url.rsplit("/", 1)[-1] for file in listed or ()}
        indexed.update(
            [shard.url for shard in in_folder if shard.index_url.rsplit("/", 1)[-1] in names]
        )
    return frozenset(indexed)


def _read_first(folder: str, storage: Storage) -> tuple[Manifest, str] | None:
    """Read the manifest of a folder before the folder is listed, which takes long where there are many shards; None if there is none."""
    url = join_url(folder, MANIFEST_NAME)
    path = storage.local_path(url)
    if path is not None and not os.path.isfile(path):
        return None
    try:
        is_one_read = path is not None or storage.is_s3(url)  # a look-up imports s3fs: 0.3 s
        file = FileInfo(url=url, size_or_none=None) if is_one_read else storage.info(url)
        return read_manifest(file, storage)
    except (NotFoundError, AccessDeniedError):  # some servers refuse what is missing
        return None


def _needs_no_listing(folder: str, storage: Storage) -> bool:
    """Return whether a folder with a manifest is not listed: that is slow, or impossible, and the versions of its files are not cached."""
    if "://" not in folder:
        return storage.local_path(folder) is not None
    return folder.startswith(WEB) or (storage.is_s3(folder) and storage.cache is None)


def _has_index(shard: ShardInfo, storage: Storage) -> bool:
    """Return whether a shard has an index, by one small read where a look-up would take longer."""
    if not storage.is_s3(shard.index_url):
        return storage.exists(shard.index_url)
    try:
        storage.read(shard.index_url, 0, OFFSET_BYTES)
    except (NotFoundError, AccessDeniedError):  # some servers refuse what is missing
        return False
    return True


def _from_folder(url: str, storage: Storage) -> LocatedShards:
    if "://" not in url:
        url = storage.local_path(url) or url
    found = _read_first(url, storage)
    if found is not None and (
        _needs_no_listing(url, storage)
        or isinstance(found[0].shards, LazyShards)
        or found[0].dataset_version != FIRST_VERSION
    ):
        file = FileInfo(url=join_url(url, MANIFEST_NAME), size_or_none=None)
        return _from_manifest(file, storage, found=found)  # the folder need not be listed
    with explain_web_folder(url):
        files, folders = storage.list_folder(url)
    by_name = {file.url.rsplit("/", 1)[-1]: file for file in files}
    if MANIFEST_NAME in by_name:
        return _from_manifest(by_name[MANIFEST_NAME], storage, files, found)
    _check_finished(url, by_name, storage)
    check_complete(url, by_name)
    dataset = dataset_of_change(url)
    if dataset is not None and storage.exists(join_url(dataset, MANIFEST_NAME)):
        raise OptionError(
            f"this folder is a part of the dataset {dataset}, which may leave samples of it out; read the dataset",
            shard=url,
        )
    tars = tars_of_folder(url, files)
    warn_of_links(url, tars)
    if tars:
        warn_of_folders(url, folders, storage)
    if tars and url.startswith(WEB):  # the page has no sizes
        return _from_tars([tar.url for tar in tars], storage, {})
    if tars:
        return _with_indexes(tars, by_name, storage)
    raise no_tars_error(url, list(by_name), folders, storage)


def check_folder_finished(folder: str, storage: Storage) -> None:
    """Refuse a folder in which a dataset is being written, or whose writer was stopped.

    Raises:
        UnfinishedError: If it is one.
    """
    if folder.startswith(WEB):
        names = [MANIFEST_NAME] * storage.exists(join_url(folder, MANIFEST_NAME))
    else:
        names = [file.url.rsplit("/", 1)[-1] for file in storage.list_folder(folder)[0]]
    _check_finished(folder, names, storage)


def _check_finished(folder: str, names: Collection[str], storage: Storage) -> None:
    check_finished(folder, names)
    if folder.startswith(WEB):  # web servers list no hidden files
        with suppress(StorageError):  # or refuse the request
            if storage.exists(join_url(folder, JOURNAL_NAME)):
                names = [*names, JOURNAL_NAME]
        check_finished(folder, names)


def _from_tars(
    urls: list[str], storage: Storage, globbed: Mapping[str, Sequence[str]]
) -> LocatedShards:
    """Return named tars with their entries in the manifest of their folder, or counts from their indexes.

    Args:
        urls: The tars.
        storage: Where they are.
        globbed: Folder whose tars patterns matched -> patterns of their names; an unfinished dataset there, or one that lacks tars, is refused.
    """
    found, indexed = dict[str, ShardInfo](), set[str]()
    manifests: dict[str, SeenManifest] = {}
    fields: list[Iterable[str] | None] = []
    deleted: list[tuple[int, Any]] = []
    places = {url: place for place, url in enumerate(urls)}
    by_folder: dict[str, dict[str, str]] = {}
    for url in urls:
        by_folder.setdefault(parent_url(url), {})[url.rsplit("/", 1)[-1]] = url
    for folder, names in by_folder.items():
        by_name = _look_up(names, folder, storage)
        if folder in globbed:
            _check_finished(folder, by_name, storage)
            check_complete(folder, by_name, globbed[folder])
        for name, url in names.items():
            if name not in by_name:
                raise NotFoundError(
                    "the shard is missing; check the path or the pattern's range", shard=url
                )
        tars = [
            FileInfo(url=url, size_or_none=by_name[name].size, version=by_name[name].version)
            for name, url in names.items()
        ]
        listed = _with_indexes(tars, by_name, storage)
        found |= {shard.url: shard for shard in listed.shards}
        indexed.update(url for url in names.values() if url in listed.indexed)
        fields.append(None)
        file = by_name.get(MANIFEST_NAME) or _manifest_above(folder, storage)
        if file is not None:
            manifest, digest = read_manifest(file, storage)
            manifests[file.url] = SeenManifest(digest, manifest.dataset_version.number)
            known = find_listed(manifest, folder, file.url, names)
            warn_of_others(manifest, file.url, places)
            left_out = read_deleted(manifest, file.url, storage)
            known_places = {shard.url: places[names[name]] for name, shard in known.items()}
            deleted += deleted_of_some(manifest, left_out, known_places)
            found |= {
                names[name]: replace(_absolute(parent_url(file.url), shard), url=names[name])
                for name, shard in known.items()
            }
            fields[-1] = manifest.fields if names.keys() <= known.keys() else None
    return LocatedShards(
        shards=tuple(found[url] for url in urls),
        manifests=manifests,
        indexed=frozenset(indexed),
        fields=_joined_fields(fields),
        deleted=tuple(sorted(deleted, key=itemgetter(0))),
    )


def _manifest_above(folder: str, storage: Storage) -> FileInfo | None:
    """Return the manifest of the dataset of which a folder has added shards; None if it is not such a folder."""
    dataset = dataset_of_change(folder)
    url = join_url(dataset or folder, MANIFEST_NAME)
    return storage.info(url) if dataset is not None and storage.exists(url) else None


def _look_up(names: dict[str, str], folder: str, storage: Storage) -> dict[str, FileInfo]:
    """List the folder of some tars; if folders cannot be listed (http), look up each file."""
    if not folder.startswith(WEB):
        return {file.url.rsplit("/", 1)[-1]: file for file in storage.list_folder(folder)[0]}
    # A query (such as a signature) is valid for one file; those of the index and manifest are unknown.
    plain_urls = [url for url in names.values() if "?" not in url]
    wanted = [*names.values(), *(url + INDEX_SUFFIX for url in plain_urls)]
    wanted += [join_url(folder, MANIFEST_NAME)] if plain_urls else []
    return {url.rsplit("/", 1)[-1]: storage.info(url) for url in wanted if storage.exists(url)}


def _with_indexes(
    tars: list[FileInfo], by_name: dict[str, FileInfo], storage: Storage
) -> LocatedShards:
    """Return tars with sample counts from the sizes of their index files; nothing is read.

    No manifest has their checksums, so their versions are pinned: tars that are replaced later are an error, in every process.
    """
    shards, indexed = [], set()
    for tar in tars:
        storage.pin_listed(tar)
        index = by_name.get(tar.url.rsplit("/", 1)[-1] + INDEX_SUFFIX)
        if index is not None:
            indexed.add(tar.url)
        shards.append(
            ShardInfo(
                url=tar.url,
                filesize=tar.size,
                nsamples=None if index is None else num_samples(index.size),
            )
        )
    return LocatedShards(shards=tuple(shards), indexed=frozenset(indexed))
