"""List all files under a folder or prefix, and group them into samples."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

from shardstream.errors import NotFoundError, OptionError, SourceError, plural
from shardstream.format import (
    INDEX_SUFFIX,
    MANIFEST_NAME,
    canonical_field,
    is_meta_name,
    split_member_name,
)
from shardstream.storage.atomic_write import is_part
from shardstream.storage.discover import is_tar
from shardstream.storage.journal_marker import check_finished, is_journal
from shardstream.storage.store import FileInfo, Storage, join_url, parent_url

_log = logging.getLogger(__name__)

_THREADS = 16
_RARE, _MANY_RARE_FIELDS = 20, 10  # a field is rare if at most one of 20 samples has it
_MANY_FIELDS = 30  # more are suspicious if there are fewer samples
MAX_FOLDERS = 4096  # with more, one recursive listing takes fewer requests


class ListedFile(NamedTuple):
    """A file under the folder that was listed."""

    path: str
    """Relative to that folder."""
    url: str
    size: int
    version: str | None = None
    """Changes with the bytes, if the file system lists a version."""


def list_files(root: str, storage: Storage, *, max_folders: int = MAX_FOLDERS) -> list[ListedFile]:
    """Return all files under a folder, sorted by path, without hidden and unfinished ones.

    An object store lists a thousand names per request, one page after the other. So the folders directly under this one are listed
    concurrently, up to ``max_folders``; with more, one recursive listing takes fewer requests.

    Raises:
        StorageError: If the folder is missing or cannot be listed.
    """
    return _shown(root, _find(root, storage, max_folders), storage)


def _shown(root: str, files: Iterable[FileInfo], storage: Storage) -> list[ListedFile]:
    base = storage.resolve(root)[1].rstrip("/")
    found = []
    for file in files:
        path = (storage.local_path(file.url) or storage.resolve(file.url)[1])[len(base) + 1 :]
        hidden = path.startswith(".") or "/." in path or is_part(path)
        if (
            path and not hidden and not file.url.endswith("/")
        ):  # web consoles create "a/" to mark a folder
            found.append(ListedFile(path, file.url, file.size, file.version))
    return sorted(found)


def list_all(urls: Sequence[str], storage: Storage) -> tuple[str, list[ListedFile]]:
    """Return the common folder of some URLs, and all files in them with paths relative to it.

    Raises:
        OptionError: If the list of URLs is empty.
        NotFoundError: If one of them is missing or empty.
        UnfinishedError: If a dataset is being written in one of them, or its writer was stopped.
        StorageError: If one cannot be reached.
    """
    if not urls:
        raise OptionError("no folder or file is named; pass at least one URL")
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-list") as pool:
        found = list(pool.map(lambda url: _list_one(url, storage), urls))
    if len(found) == 1:
        return found[0]
    files = sorted({file.url: file for _, some in found for file in some}.values())
    common = os.path.commonprefix([f"{folder}/" for folder, _ in found])  # noqa: RUF071  (URLs: "//" counts)
    root = common.rpartition("/")[0]
    return root, [file._replace(path=file.url[len(root) + 1 :]) for file in files]


def list_beginning(prefix: str, storage: Storage) -> list[str]:
    """Return the files and folders whose URLs begin with a prefix; for a folder of that name, the folder.

    Raises:
        NotFoundError: If there is none.
    """
    folder, start = parent_url(prefix), prefix.rpartition("/")[2]
    files, folders = storage.list_folder(folder)
    if not start or start in folders:
        return [prefix]
    urls = [join_url(folder, name) for name in folders if name.startswith(start)]
    urls += [file.url for file in files if file.url.rpartition("/")[2].startswith(start)]
    if not urls:
        raise NotFoundError("no file or folder begins with this prefix; check it", shard=prefix)
    return urls


def sample_members(root: str, files: Sequence[ListedFile]) -> list[tuple[str, str, ListedFile]]:
    """Return key, field and file of each member of a sample, sorted.

    Files without an extension, and those in folders named like ``__this__``, are left out, with a warning that counts them.
    Names with dots that make many rare fields, or more fields than samples, cause a warning, too.

    Raises:
        OptionError: If the files are tar shards.
        SourceError: If no file is left, or two files would be the same field of a sample.
    """
    _check_loose(root, files)
    named = [(split_member_name(file.path), file) for file in files]
    members = sorted(
        (parts[0], canonical_field(parts[1]), file)
        for parts, file in named
        if parts is not None and not is_meta_name(file.path)
    )
    if len(members) < len(files):
        _log.warning(
            "%s: files without an extension are left out: %d", root, len(files) - len(members)
        )
    if not members:
        raise SourceError("no file here has an extension, so none can be a field", shard=root)
    for one, other in pairwise(members):
        if one[:2] == other[:2]:
            raise SourceError(
                f"{one[2].path} and {other[2].path} would both be the field {one[1]!r} of {one[0]!r}; rename one",
                shard=root,
            )
    _warn_of_rare_fields(root, members)
    return members


def _check_loose(root: str, files: Sequence[ListedFile]) -> None:
    """Refuse packed shards: each tar, index and manifest would become a field of a sample."""
    tars = {file.path for file in files if is_tar(file.path)}
    if not tars:
        return
    folders = set(map(_folder, tars))
    index_files = [
        file.path
        for file in files
        if (file.path.endswith(INDEX_SUFFIX) and file.path.removesuffix(INDEX_SUFFIX) in tars)
        or (file.path.rpartition("/")[2] == MANIFEST_NAME and _folder(file.path) in folders)
    ]
    if index_files or 2 * len(tars) > len(files):
        raise OptionError(
            f"these are tar shards, not loose files (for example {min(tars)}); read them with ss.ShardDataset, "
            "or pack them again as tars, one folder at a time",
            shard=root,
        )


def _warn_of_rare_fields(root: str, members: Sequence[tuple[str, str, ListedFile]]) -> None:
    """Warn if dots in names, instead of extensions, made the fields."""
    fields = Counter(field for _, field, _ in members)
    samples = 1 + sum(one[0] != other[0] for one, other in pairwise(members))
    rare = {field for field, count in fields.items() if count * _RARE <= samples}
    many_rare = len(rare) >= _MANY_RARE_FIELDS
    if many_rare or len(fields) > max(samples, _MANY_FIELDS):
        suspicious_fields = rare if many_rare else fields
        key, field, file = next(member for member in members if member[1] in suspicious_fields)
        rare_share = (
            f", and {len(rare):,} of the fields are in at most {100 // _RARE} % of the samples"
        )
        _log.warning(
            "%s: %s make %s with %s%s. A key ends at the first dot of a name: %s is the field %r of the sample %r. "
            "Rename such files if this is not intended",
            root,
            plural(len(members), "file"),
            plural(samples, "sample"),
            plural(len(fields), "field"),
            rare_share if many_rare else "",
            file.path,
            field,
            key,
        )


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _list_one(url: str, storage: Storage) -> tuple[str, list[ListedFile]]:
    found = _find(url, storage)
    _check_all_finished(found)
    files = _shown(url, found, storage)
    if files:
        return url.rstrip("/"), files
    if url.endswith("/"):
        raise NotFoundError("no files found; check the URL", shard=url)
    info = storage.info(url)
    return parent_url(url), [ListedFile(url.rpartition("/")[2], url, info.size, info.version)]


def _check_all_finished(files: Sequence[FileInfo]) -> None:
    marked = {parent_url(file.url) for file in files if is_journal(_name(file))}
    names: dict[str, list[str]] = {folder: [] for folder in sorted(marked)}
    for file in files if marked else ():
        if (folder := parent_url(file.url)) in marked:
            names[folder].append(_name(file))
    for folder, file_names in names.items():
        check_finished(folder, file_names)


def _name(file: FileInfo) -> str:
    return file.url.rpartition("/")[2]


def _find(root: str, storage: Storage, max_folders: int = MAX_FOLDERS) -> list[FileInfo]:
    files, folders = storage.list_folder(root)
    if len(folders) > max_folders or "" in folders:
        return storage.find(root)
    urls = [join_url(root, folder) for folder in folders if not folder.startswith(".")]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-list") as pool:
        for found in pool.map(storage.find, urls):
            files += found
    return files
