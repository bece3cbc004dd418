"""List all files under a folder or prefix, and group them into samples."""

from __future__ import annotations

import itertools
import logging
import os
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shardstream.errors import NotFoundError, OptionError, SourceError, plural
from shardstream.format import (
    COLUMNS_SUFFIX,
    INDEX_SUFFIX,
    MANIFEST_NAME,
    canonical_field,
    is_meta_name,
    split_member_name,
)
from shardstream.storage.atomic_write import is_part
from shardstream.storage.discover import is_tar
from shardstream.storage.file_list import FileList, ListedFile
from shardstream.storage.journal_marker import check_finished, is_journal
from shardstream.storage.store import FileInfo, Storage, join_url, parent_url

_log = logging.getLogger(__name__)

_THREADS = 16
_RARE, _MANY_RARE_FIELDS = 20, 10  # a field is rare if at most one of 20 samples has it
_MANY_FIELDS = 30  # more are suspicious if there are fewer samples
MAX_FOLDERS = 4096  # with more, one recursive listing takes fewer requests


def list_files(root: str, storage: Storage, *, max_folders: int = MAX_FOLDERS) -> FileList:
    """Return all files under a folder, sorted by path, without hidden and unfinished ones.

    An object store lists a thousand names per request, one page after the other. So the folders directly under this one are listed
    concurrently, up to ``max_folders``; with more, one recursive listing takes fewer requests.

    Raises:
        StorageError: If the folder is missing or cannot be listed.
    """
    files = itertools.chain.from_iterable(_find(root, storage, max_folders))
    return FileList(_shown(root, files, storage))


def _shown(root: str, files: Iterable[FileInfo], storage: Storage) -> Iterator[ListedFile]:
    base = storage.resolve(root)[1].rstrip("/")
    for file in files:
        path = (storage.local_path(file.url) or storage.resolve(file.url)[1])[len(base) + 1 :]
        hidden = path.startswith(".") or "/." in path or is_part(path)
        if (
            path and not hidden and not file.url.endswith("/")
        ):  # web consoles create "a/" to mark a folder
            yield ListedFile(path, file.url, file.size, file.version)


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
    """Return key, field and file of each member of a sample, sorted (see `sample_order`)."""
    members = []
    for number in sample_order(root, files).tolist():
        file = files[number]
        key, field = _key_and_field(file.path) or ("", "")
        members.append((key, field, file))
    return members


def sample_order(root: str, files: Sequence[ListedFile]) -> npt.NDArray[np.int64]:
    """Return the numbers of the files that are members of samples, sorted by key and field.

    Files without an extension, and those in folders named like ``__this__``, are left out, with a warning that counts them.
    Names with dots that make many rare fields, or more fields than samples, cause a warning, too.

    Raises:
        OptionError: If the files are tar shards.
        SourceError: If no file is left, or two files would be the same field of a sample.
    """
    _check_loose(root, files)
    numbers = array("q")
    texts: list[bytes] = []  # of key and field, in their order: less memory than a tuple of both
    for number, file in enumerate(files):
        if (parts := _key_and_field(file.path)) is not None:
            numbers.append(number)
            texts.append("\0".join(parts).encode("utf-8", "surrogatepass"))
    if len(numbers) < len(files):
        _log.warning(
            "%s: files without an extension are left out: %d", root, len(files) - len(numbers)
        )
    if not numbers:
        raise SourceError("no file here has an extension, so none can be a field", shard=root)
    # The path decides which of two equal ones an error names first.
    order = np.array(sorted(range(len(texts)), key=texts.__getitem__), dtype=np.int64)
    for one, other in pairwise(order.tolist()):
        if texts[one] == texts[other]:
            paths = [files[numbers[at]].path for at in (one, other)]
            key, field = _key_and_field(paths[0]) or ("", "")
            raise SourceError(
                f"{paths[0]} and {paths[1]} would both be the field {field!r} of {key!r}; rename one",
                shard=root,
            )
    del texts
    found = np.array(numbers, dtype=np.int64)[order]
    _warn_of_rare_fields(root, files, found)
    return found


def _key_and_field(path: str) -> tuple[str, str] | None:
    """Return key and field of a file; None if it is not a member of a sample."""
    parts = split_member_name(path)
    return None if parts is None or is_meta_name(path) else (parts[0], canonical_field(parts[1]))


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
        or (file.path.endswith(COLUMNS_SUFFIX) and file.path.removesuffix(COLUMNS_SUFFIX) in tars)
        or (file.path.rpartition("/")[2] == MANIFEST_NAME and _folder(file.path) in folders)
    ]
    if index_files or 2 * len(tars) > len(files):
        raise OptionError(
            f"these are tar shards, not loose files (for example {min(tars)}); read them with ss.ShardDataset, "
            "or pack them again as tars, one folder at a time",
            shard=root,
        )


def _warn_of_rare_fields(
    root: str, files: Sequence[ListedFile], numbers: npt.NDArray[np.int64]
) -> None:
    """Warn if dots in names, instead of extensions, made the fields."""
    fields, samples, before = Counter[str](), 0, None
    for number in numbers.tolist():
        key, field = _key_and_field(files[number].path) or ("", "")
        fields[field] += 1
        samples += key != before
        before = key
    rare = {field for field, count in fields.items() if count * _RARE <= samples}
    many_rare = len(rare) >= _MANY_RARE_FIELDS
    if many_rare or len(fields) > max(samples, _MANY_FIELDS):
        suspicious_fields = rare if many_rare else fields
        suspicious = (
            (*parts, path)
            for path in (files[number].path for number in numbers.tolist())
            if (parts := _key_and_field(path)) is not None and parts[1] in suspicious_fields
        )
        key, field, path = next(suspicious)
        rare_share = (
            f", and {len(rare):,} of the fields are in at most {100 // _RARE} % of the samples"
        )
        _log.warning(
            "%s: %s make %s with %s%s. A key ends at the first dot of a name: %s is the field %r of the sample %r. "
            "Rename such files if this is not intended",
            root,
            plural(len(numbers), "file"),
            plural(samples, "sample"),
            plural(len(fields), "field"),
            rare_share if many_rare else "",
            path,
            field,
            key,
        )


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _list_one(url: str, storage: Storage) -> tuple[str, list[ListedFile]]:
    found = list(itertools.chain.from_iterable(_find(url, storage)))
    _check_all_finished(found)
    files = sorted(_shown(url, found, storage))
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


def _find(root: str, storage: Storage, max_folders: int = MAX_FOLDERS) -> Iterator[list[FileInfo]]:
    """Yield all files, those of a few folders at a time: `FileInfo` takes five times the memory of a `FileList`."""
    files, folders = storage.list_folder(root)
    if len(folders) > max_folders or "" in folders:
        yield storage.find(root)
        return
    yield files
    urls = [join_url(root, folder) for folder in folders if not folder.startswith(".")]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-list") as pool:
        waiting = deque[Future[list[FileInfo]]]()
        for url in urls:
            waiting.append(pool.submit(storage.find, url))
            if len(waiting) > 2 * _THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
