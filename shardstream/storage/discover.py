"""Find the shards of a dataset by URL, brace pattern, ``::`` join, glob, list, folder or manifest; or its tars, whatever a manifest lists."""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from urllib.parse import urlsplit

from shardstream.errors import (
    AccessDeniedError,
    ManifestError,
    NotFoundError,
    OptionError,
    StorageError,
    get_logger,
)
from shardstream.format import (
    INDEX_SUFFIX,
    MANIFEST_NAME,
    OFFSET_BYTES,
    Manifest,
    ShardInfo,
    decode_manifest,
    find_repeated,
    num_samples,
)
from shardstream.storage.lazy_shards import LazyShards
from shardstream.storage.publish import JOURNAL_NAME, check_finished
from shardstream.storage.store import FileInfo, Storage
from shardstream.storage.url_globs import explain_web_folder, is_glob
from shardstream.storage.urls import (
    WEB,
    Urls,
    absolute_url,
    check_names,
    expand_urls,
    has_glob_signs,
    is_tar,
    join_url,
    parent_url,
    with_one_protocol,
)

_log = get_logger(__name__)
# Limits of the indexes that are read with the manifest; workers read further or larger ones themselves.
INDEXES, INDEXES_BYTES = 48, 1 << 20
_SMALL_INDEX_BYTES = 1 << 23  # of a million samples
MANIFEST_LIMIT_BYTES = 256 << 20  # over a million shards
_SMALL_MANIFEST_BYTES = 64 << 20
FOLDERS_LIMIT = 10_000  # each is listed once


def absolute_urls(urls: Urls) -> Urls:
    """Return paths of this machine as absolute ones (see `absolute_url`)."""
    if isinstance(urls, str | os.PathLike):
        return absolute_url(urls)
    return [absolute_url(url) for url in urls]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedShards:
    """The shards of a dataset.

    Args:
        shards: Shards with absolute URLs; counts and sizes if a manifest, an index or a listing has them. Many of
            one manifest are read when they are needed.
        manifest_url: URL of the manifest that lists all shards, if there is one.
        manifests: URL of each manifest that was read -> its SHA-256, in hex digits.
        indexed: Contains the URLs of the shards that have an ``.idx`` file.
        indexes: URL of an ``.idx`` -> its bytes, if they have been read already.
        fields: Fields of the samples, by the manifests of all shards; None if a shard or its fields are not listed.
    """

    shards: Sequence[ShardInfo]
    manifest_url: str | None = None
    manifests: Mapping[str, str] = field(default_factory=dict)
    indexed: Container[str] = frozenset()
    indexes: Mapping[str, bytes] = field(default_factory=dict)
    fields: tuple[str, ...] | None = None

    @property
    def folders(self) -> tuple[str, ...]:
        """URLs of the folders of the shards, in order."""
        if isinstance(self.shards, LazyShards):
            return (self.shards.folder,)
        return tuple(dict.fromkeys(parent_url(shard.url) for shard in self.shards))


class AllIndexed(Container[str]):
    """Contains all shards: a binary manifest lists shards with indexes only."""

    def __contains__(self, url: object) -> bool:
        return True


def locate_shards(urls: Urls, storage: Storage) -> LocatedShards:
    """Find the shards of a dataset.

    The shards of a folder or prefix are those in its ``index.json``; without one, all tars in it, sorted by name. Without
    ``index.json``, a folder or glob with an unfinished dataset is refused; tars that are named one by one are not.

    Raises:
        OptionError: If the list of URLs is empty or names a shard twice, a brace is not closed, or a URL starts a command.
        UnfinishedError: If a dataset is being written there, or its writer was stopped.
        StorageError: If nothing is found, or the store cannot be reached.
        ManifestError: If a manifest is invalid.
    """
    expanded = expand_urls(urls)
    located: list[LocatedShards] = []
    tars: list[str] = []
    globbed: set[str] = set()
    for url in expanded:
        if not url.strip():
            raise OptionError(
                "the URL is empty; name a folder, a tar or a pattern ('.' is the current folder)"
            )
        if url.startswith("pipe:"):
            storage.resolve(url)  # raises the error
        elif is_glob(url, storage):
            found = [tar.url for tar in glob_tars(url, storage)]
            globbed.update(map(parent_url, found))
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
        _refuse_repeated(located, storage)
    if len(located) == 1:
        return located[0]
    return LocatedShards(
        shards=tuple(shard for one in located for shard in one.shards),
        manifests={url: digest for one in located for url, digest in one.manifests.items()},
        indexed=frozenset(
            shard.url for one in located for shard in one.shards if shard.url in one.indexed
        ),
        fields=_joined_fields(one.fields for one in located),
    )


def _refuse_repeated(located: Iterable[LocatedShards], storage: Storage) -> None:
    """Refuse a shard that several URLs name, however they spell its path or protocol: its samples would be read twice."""

    def place(url: str) -> str:
        is_remote = "://" in url and not url.startswith(("file:", "local:"))
        path = None if is_remote else storage.local_path(url)
        return with_one_protocol(url) if path is None else os.path.normpath(path)

    repeated = find_repeated(place(shard.url) for one in located for shard in one.shards)
    if repeated is not None:
        raise OptionError(
            "a shard is named twice, so its samples would be read twice; name each once, and "
            "pass weights= or use ss.mix to read samples more often",
            shard=repeated,
        )


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
    return _decoded(data, url, storage)


def _decoded(data: bytes, url: str, storage: Storage) -> tuple[Manifest, str]:
    digest = hashlib.sha256(data).hexdigest()
    manifest = decode_manifest(data, url=url)
    if not isinstance(manifest, Manifest):
        shards = LazyShards(manifest, url, storage)  # their names are relative
        return Manifest(shards=shards, name=manifest.name, fields=manifest.fields), digest
    if "://" in url:  # a manifest on this machine may name anything
        indexes = [shard.index for shard in manifest.shards if shard.index is not None]
        check_names(url, [*(shard.url for shard in manifest.shards), *indexes])
    return manifest, digest


def _too_large(size: str, url: str) -> ManifestError:
    return ManifestError(
        f"a manifest of {size} bytes is over the limit of {MANIFEST_LIMIT_BYTES}; split the dataset",
        shard=url,
    )


def _by_folder(shards: Iterable[ShardInfo]) -> dict[str, list[ShardInfo]]:
    """Group shards by the folders of their indexes, in order."""
    found: dict[str, list[ShardInfo]] = {}
    for shard in shards:
        found.setdefault(parent_url(shard.index_url), []).append(shard)
    return found


def _absolute(shard: ShardInfo, folder: str) -> ShardInfo:
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
        folder = parent_url(url)
        shards = tuple([_absolute(shard, folder) for shard in shards])
        indexed = _find_indexed(shards, url, storage, listed_files)
    return LocatedShards(
        shards=shards,
        manifest_url=url,
        manifests={url: digest},
        indexed=indexed,
        fields=tuple(sorted(manifest.fields)) or None,  # wids writes none
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
    folders = _by_folder(shards)
    if len(folders) > FOLDERS_LIMIT:
        raise ManifestError(
            f"shards in {len(folders)} folders, the limit is {FOLDERS_LIMIT}; move them to fewer folders",
            shard=url,
        )
    for one, in_folder in folders.items():
        if one.startswith(WEB):  # cannot be listed: the first index decides for all
            is_there = storage.exists(in_folder[0].index_url)
            indexed.update([shard.url for shard in in_folder] if is_there else ())
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
        file = storage.info(url) if path is None else FileInfo(url=url, size_or_none=None)
        return read_manifest(file, storage)
    except (NotFoundError, AccessDeniedError):  # some servers refuse what is missing
        return None


def _from_small_reads(folder: str, storage: Storage) -> LocatedShards | None:
    """Return the shards of a folder's manifest with few small reads; None if a listing is needed."""
    url = join_url(folder, MANIFEST_NAME)
    (data,) = storage.read_small_files([url], max_bytes=_SMALL_MANIFEST_BYTES)
    if data is None:
        return None
    manifest, digest = _decoded(data, url, storage)
    if isinstance(manifest.shards, LazyShards):
        file = FileInfo(url=url, size_or_none=None)
        return _from_manifest(file, storage, found=(manifest, digest))
    shards = tuple(_absolute(one, folder) for one in manifest.shards)
    if {parent_url(one.url) for one in shards} != {folder.rstrip("/")}:
        return None
    # The last index decides for all: indexes are written in order, so a stopped run lacks it. Few small indexes are all read.
    wanted = [one.index_url for one in shards]
    size = OFFSET_BYTES * sum(one.nsamples or 0 for one in shards)
    if len(wanted) > INDEXES or size > INDEXES_BYTES:
        wanted = wanted[-1:]
    indexes = storage.read_small_files(wanted, max_bytes=_SMALL_INDEX_BYTES)
    if indexes[-1] is None:
        return None
    return LocatedShards(
        shards=shards,
        manifest_url=url,
        manifests={url: digest},
        indexed=frozenset(one.url for one in shards),
        indexes={one: data for one, data in zip(wanted, indexes, strict=True) if data is not None},
        fields=tuple(sorted(manifest.fields)) or None,  # wids writes none
    )


def _from_folder(url: str, storage: Storage) -> LocatedShards:
    if "://" in url and (located := _from_small_reads(url, storage)) is not None:
        return located
    found = _read_first(url, storage)
    if found is not None and (url.startswith(WEB) or isinstance(found[0].shards, LazyShards)):
        file = FileInfo(url=join_url(url, MANIFEST_NAME), size_or_none=None)
        return _from_manifest(file, storage, found=found)  # the folder need not be listed
    with explain_web_folder(url):
        files, folders = storage.list_folder(url)
    by_name = {file.url.rsplit("/", 1)[-1]: file for file in files}
    if MANIFEST_NAME in by_name:
        return _from_manifest(by_name[MANIFEST_NAME], storage, files, found)
    _check_finished(url, by_name, storage)
    tars = tars_of_folder(url, files)
    warn_of_links(url, tars)
    if tars and url.startswith(WEB):  # the page has no sizes
        return _from_tars([tar.url for tar in tars], storage, ())
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


def _from_tars(urls: list[str], storage: Storage, globbed: Collection[str]) -> LocatedShards:
    """Return named tars with their entries in the manifest of their folder, or counts from their indexes.

    Args:
        urls: The tars.
        storage: Where they are.
        globbed: Folders whose tars a pattern matched; an unfinished dataset there is refused.
    """
    found: dict[str, ShardInfo] = {}
    indexed: set[str] = set()
    manifests: dict[str, str] = {}
    fields: list[Iterable[str] | None] = []
    for folder, shards in _by_folder([ShardInfo(url=url) for url in urls]).items():
        names = {shard.url.rsplit("/", 1)[-1]: shard.url for shard in shards}
        by_name = _look_up(names, folder, storage)
        if folder in globbed:
            _check_finished(folder, by_name, storage)
        missing = next((name for name in names if name not in by_name), None)
        if missing is not None:
            raise NotFoundError(
                "the shard is missing; check the path or the pattern's range",
                shard=names[missing],
            )
        tars = [
            FileInfo(url=url, size_or_none=by_name[name].size, version=by_name[name].version)
            for name, url in names.items()
        ]
        listed = _with_indexes(tars, by_name, storage)
        found |= {shard.url: shard for shard in listed.shards}
        indexed.update(url for url in names.values() if url in listed.indexed)
        fields.append(None)
        if MANIFEST_NAME in by_name:
            file = by_name[MANIFEST_NAME]
            manifest, manifests[file.url] = read_manifest(file, storage)
            known = (
                manifest.shards.find_names(names)
                if isinstance(manifest.shards, LazyShards)
                else {shard.url.rsplit("/", 1)[-1]: shard for shard in manifest.shards}
            )
            found |= {
                url: replace(_absolute(known[name], folder), url=url)
                for name, url in names.items()
                if name in known
            }
            fields[-1] = manifest.fields if names.keys() <= known.keys() else None
    return LocatedShards(
        shards=tuple(found[url] for url in urls),
        manifests=manifests,
        indexed=frozenset(indexed),
        fields=_joined_fields(fields),
    )


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


def find_tars(urls: Urls, storage: Storage) -> list[FileInfo]:
    """Find tars by the same URLs as `locate_shards`; a manifest only names its folder, since it may be the one to repair.

    Raises:
        OptionError: If the list of URLs is empty, or a brace is not closed.
        StorageError: If nothing is found, or the store cannot be reached.
    """
    expanded = expand_urls(urls)
    look_up = cached_look_up(storage)
    tars: list[FileInfo] = []
    for url in expanded:
        if is_glob(url, storage):
            tars += glob_tars(url, storage)
        elif is_tar(url):
            tars.append(look_up(url))
        else:
            folder = parent_url(url) if url.rsplit("/", 1)[-1] == MANIFEST_NAME else url
            files, folders = storage.list_folder(folder)
            found = tars_of_folder(folder, files)
            if not found:
                names = [file.url.rsplit("/", 1)[-1] for file in files]
                raise no_tars_error(folder, names, folders, storage)
            warn_of_links(folder, found)
            tars += found
    # The page of a web server has no sizes.
    return [tar if tar.size_or_none is not None else storage.info(tar.url) for tar in tars]


def cached_look_up(storage: Storage) -> Callable[[str], FileInfo]:
    """Return a function that looks up files, by one listing of each folder instead of a request for each of 10,000 tars."""

    @cache
    def listed(folder: str) -> dict[str, FileInfo]:
        return {file.url.rsplit("/", 1)[-1]: file for file in storage.list_folder(folder)[0]}

    def look_up(url: str) -> FileInfo:
        # Few web servers list a folder.
        file = None if url.startswith(WEB) else listed(parent_url(url)).get(url.rsplit("/", 1)[-1])
        return file or storage.info(url)

    return look_up


def glob_tars(pattern: str, storage: Storage) -> list[FileInfo]:
    """Return the tars that a pattern matches.

    Raises:
        NotFoundError: If there is none.
    """
    with explain_web_folder(pattern):
        folder = parent_url(pattern)
        if pattern.startswith(WEB) and not has_glob_signs(folder):  # the links of the folder
            linked = tars_of_folder(folder, storage.list_folder(folder)[0])
            name = pattern.rsplit("/", 1)[-1]
            found = [file for file in linked if fnmatchcase(file.url.rsplit("/", 1)[-1], name)]
        else:
            found = [file for file in storage.glob(pattern) if is_tar(file.url)]
    warn_of_links(pattern, found)
    if not found:
        raise NotFoundError(
            "no shard matches this pattern; check it, and that the names of the shards end in .tar",
            shard=pattern,
        )
    return found


def tars_of_folder(folder: str, files: Sequence[FileInfo]) -> list[FileInfo]:
    """Return the tars right in a folder; those that a web page links to, each once, whatever the links look like."""
    tars = [file for file in files if is_tar(file.url)]
    if not folder.startswith(WEB):
        return tars
    host, path = urlsplit(folder)[1:3]
    by_path: dict[str, FileInfo] = {}
    # A link without a query is preferred.
    for file in sorted(tars, key=lambda file: "?" in file.url):
        parts = urlsplit(file.url)
        clean = posixpath.normpath(parts.path)
        if parts.netloc == host and posixpath.dirname(clean) == posixpath.normpath(path or "/"):
            by_path.setdefault(clean, replace(file, url=parts._replace(path=clean).geturl()))
    return [by_path[one] for one in sorted(by_path)]


def warn_of_links(url: str, tars: Sequence[FileInfo]) -> None:
    """Warn that the tars of a web folder are those that a page links to, which is no exact list."""
    if tars and url.startswith(WEB):
        _log.warning(
            "%s: the tars are the %d that this page links to, and a page may leave some out. Compare their number, "
            "name them by a pattern such as {000000..000099}.tar, or put an index.json there",
            url,
            len(tars),
        )


def no_tars_error(
    url: str, names: Sequence[str], folders: Sequence[str], storage: Storage
) -> StorageError:
    """Return the error of a folder without tars, whose files and folders have these names."""
    path = storage.local_path(url)
    if path is not None and os.path.isfile(path):
        return StorageError(
            "not a shard: its name does not end in .tar (.tar.gz, .tgz, .tar.zst)", shard=url
        )
    contents = ", ".join([f"{folder}/" for folder in folders[:5]] + [*names[:5]]) or "nothing"
    return StorageError(
        f"no index.json and no .tar here (found: {contents}); name the folder that holds the shards, "
        "or pack them with 'shardstream pack'",
        shard=url,
    )
