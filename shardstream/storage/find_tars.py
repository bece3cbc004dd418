"""Find the files that a glob matches, and the tars of folders and patterns, whatever a manifest lists.

Globs are matched by listings: those of the S3 clients take a file for a folder, and leave it out, if anything lies under "its name/".
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fsspec.utils import glob_translate

from shardstream.errors import (
    AccessDeniedError,
    ManifestError,
    NotFoundError,
    OptionError,
    StorageError,
    get_logger,
    plural,
)
from shardstream.format import INDEX_SUFFIX, MANIFEST_NAME, is_numbers_name
from shardstream.storage.urls import (
    COMPRESSED_SUFFIXES,
    IN_PLACE_SUFFIXES,
    WEB,
    Urls,
    expand_urls,
    has_glob_signs,
    is_tar,
    join_url,
    parent_url,
    simplify_glob,
)

if TYPE_CHECKING:
    from shardstream.storage.store import FileInfo, Storage

_log = get_logger(__name__)
_LISTED_FOLDERS = 10  # a request each


def matching_files(pattern: str, storage: Storage) -> list[FileInfo]:
    """Return the files that a glob matches, sorted by name.

    A folder in it is meant literally if there is one of this name, as ``out[v1]``.

    Raises:
        OptionError: If it would take too long (see `simplify_glob`), or its "**" is not a whole folder.
        StorageError: If a folder cannot be listed.
        NotFoundError: If the folder before its first sign is missing.
    """
    pattern = simplify_glob(pattern)
    storage.resolve(pattern)  # refuses commands and unknown protocols
    start = pattern.rfind("://") + 3 if "://" in pattern else 0
    try:
        found = list(_matches(pattern[:start], pattern[start:].split("/"), storage))
    except NotFoundError as error:
        message = f"the folder of this pattern is missing: {error.what}"
        raise NotFoundError(message, shard=pattern) from error
    return sorted(found, key=lambda file: file.url)


def relative_paths(root: str, storage: Storage) -> Callable[[FileInfo], str]:
    """Return a function that returns the path of a file under a folder."""
    path = storage.local_path(root) or storage.resolve(root)[1]
    start = len(path.rstrip("/")) + 1
    return lambda file: (storage.local_path(file.url) or storage.resolve(file.url)[1])[start:]


def _matches(folder: str, parts: Sequence[str], storage: Storage) -> Iterator[FileInfo]:
    """Yield the files in a folder ("" or with a slash at its end) whose paths match the parts of a glob."""
    for number, part in enumerate(parts[:-1]):
        if not has_glob_signs(part) or (part.strip("*") and storage.exists(f"{folder}{part}")):
            folder += f"{part}/"
            continue
        parts = parts[number:]
        break
    else:
        parts = parts[-1:]
    wanted = _translate("/".join(parts))
    if "**" in parts:
        path_of = relative_paths(folder or ".", storage)
        yield from (file for file in storage.find(folder or ".") if wanted(path_of(file)))
        return
    files, names = storage.list_folder(folder or ".")
    if len(parts) == 1:
        yield from (file for file in files if wanted(file.url.rpartition("/")[2]))
        return
    is_match = _translate(parts[0])
    for name in names:
        if is_match(name):
            with suppress(NotFoundError):  # there may be no folder of the following names in it
                yield from _matches(f"{folder}{name}/", parts[1:], storage)


def _translate(pattern: str) -> Callable[[str], object]:
    try:
        return re.compile(glob_translate(pattern)).match
    except ValueError as error:
        raise OptionError(
            f"the pattern {pattern!r} is no glob: {error}; '**' stands for folders, as in '**/*.tar'"
        ) from error


@contextmanager
def explain_web_folder(url: str) -> Iterator[None]:
    """Say how the shards of a web server that does not list them can be named."""
    try:
        yield
    except (NotFoundError, AccessDeniedError) as error:
        if not url.startswith(WEB):
            raise
        raise type(error)(
            "this folder has no index.json, and the web server does not list it (or refuses access)",
            remedy="name the shards by a pattern such as {000000..000099}.tar, "
            "or put an index.json there with 'shardstream index'",
            shard=url,
        ) from error


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
        if storage.is_glob(url):
            tars += glob_tars(url, storage)
        elif is_tar(url):
            tars.append(look_up(url))
        else:
            folder = parent_url(url) if url.rsplit("/", 1)[-1] == MANIFEST_NAME else url
            files, folders = storage.list_folder(folder)
            found = tars_of_folder(folder, files)
            names = [file.url.rsplit("/", 1)[-1] for file in files]
            if not found:
                raise no_tars_error(folder, names, folders, storage)
            try:
                check_complete(folder, {*names})
            except (ManifestError, NotFoundError) as error:
                _log.warning("%s", error)
            warn_of_links(folder, found)
            warn_of_folders(folder, folders, storage)
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


def check_complete(folder: str, names: Collection[str], patterns: Sequence[str] = ("*",)) -> None:
    """Refuse a folder of which only a part was copied: without a tar whose index is there, or the manifest that says which samples were deleted.

    A tar that was compressed since is there.

    Args:
        folder: URL of the folder.
        names: Names of all its files.
        patterns: Tars that are wanted.

    Raises:
        ManifestError: If the manifest is missing.
        NotFoundError: If a tar is.
    """
    deleted = [*filter(is_numbers_name, names)]
    if deleted and MANIFEST_NAME not in names:
        raise ManifestError(
            f"there is no index.json, without which deleted samples or old fields would be read, by {deleted[0]}",
            remedy="copy it again, or an earlier one from versions/",
            shard=folder,
        )
    indexed = {name.removesuffix(INDEX_SUFFIX) for name in names if name.endswith(INDEX_SUFFIX)}

    def is_wanted(tar: str) -> bool:
        return is_tar(tar) and any(fnmatchcase(tar, one) for one in patterns)

    def is_compressed_now(tar: str) -> bool:
        stem = tar.removesuffix(".tar")
        return any(stem + end in names and is_wanted(stem + end) for end in COMPRESSED_SUFFIXES)

    missing = filter(is_wanted, sorted(indexed.difference(names)))
    lost = [tar for tar in missing if not is_compressed_now(tar)]
    if lost:
        raise NotFoundError(
            f"{plural(len(lost), 'shard')} missing, by the indexes of this folder",
            remedy="copy the folder again, or delete these indexes, too",
            shard=join_url(folder, lost[0]),
        )


def warn_of_links(url: str, tars: Sequence[FileInfo]) -> None:
    """Warn that the tars of a web folder are those that a page links to, which is no exact list."""
    if tars and url.startswith(WEB):
        _log.warning(
            "%s: the tars are the %d that this page links to, and a page may leave some out. Compare their number, "
            "name them by a pattern such as {000000..000099}.tar, or put an index.json there",
            url,
            len(tars),
        )


def warn_of_folders(url: str, folders: Sequence[str], storage: Storage) -> None:
    """Warn of tars in the folders of a folder, which are not read with its own; the first page of the first folders is listed."""
    if url.startswith(WEB):
        return
    for name in [*filter(None, folders)][:_LISTED_FOLDERS]:  # that of a//b would be `url`
        inner = join_url(url, name)
        with suppress(StorageError):  # that folder may be private
            files, _ = next(storage.folder_pages(inner), ([], []))
            if any(is_tar(file.url) for file in files):
                _log.warning(
                    "%s: only the tars right in this folder are read, not those in its folders, such as %s; "
                    "name each folder in a list, or all tars by a pattern such as '**/*.tar'",
                    url,
                    inner,
                )
                return


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
    tables = (end for end in IN_PLACE_SUFFIXES if any(name.lower().endswith(end) for name in names))
    in_place = "".join(f", or read tables in place as {url.rstrip('/')}/*{end}" for end in tables)
    return StorageError(
        f"no index.json and no .tar here (found: {contents}); name the folder that holds the shards, "
        f"or pack them with 'shardstream pack'{in_place}",
        shard=url,
    )
