"""Find the tars of folders and patterns, whatever a manifest lists."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from urllib.parse import urlsplit

from shardstream.errors import NotFoundError, StorageError, get_logger
from shardstream.format import MANIFEST_NAME
from shardstream.storage.store import FileInfo, Storage
from shardstream.storage.url_globs import explain_web_folder, is_glob
from shardstream.storage.urls import WEB, Urls, expand_urls, has_glob_signs, is_tar, parent_url

_log = get_logger(__name__)


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
