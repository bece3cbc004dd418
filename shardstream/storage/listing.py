"""List all files under a folder or prefix, sorted by path, and group them into samples."""

from __future__ import annotations

import itertools
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, overload

from shardstream.errors import (
    NotFoundError,
    OptionError,
    SourceError,
    StorageError,
    get_logger,
    plural,
)
from shardstream.format import (
    COLUMNS_SUFFIX,
    IMAGE_FORMATS,
    INDEX_SUFFIX,
    MANIFEST_NAME,
    canonical_field,
    is_meta_name,
    split_member_name,
)
from shardstream.storage.find_tars import relative_paths
from shardstream.storage.publish import check_finished, is_journal, is_part
from shardstream.storage.row_file import RowFile, sort_rows
from shardstream.storage.store import LISTED_TWICE, FileInfo, Storage
from shardstream.storage.urls import check_parts, is_tar, join_url, parent_url

FileRow: TypeAlias = Sequence[Any]
"""Path, size, URL ("": the prefix and the path) and, if there is one, version: None cannot be compared with text."""


class ListedFile(NamedTuple):
    """A file under the folder that was listed."""

    path: str
    """Relative to that folder."""
    url: str
    size: int
    version: str | None = None
    """Changes with the bytes, if the file system lists a version."""


class FileRows:
    """Converts files to rows of a `RowFile`, which share the beginning of their URLs, and back."""

    _prefix: str | None = None

    def row(self, file: ListedFile) -> FileRow:
        """Return the row of a file; rows with different paths are in the order of their paths."""
        path, url, size, version = file
        if self._prefix is None:
            self._prefix = url.removesuffix(path)
        row = (path, size, "" if url == self._prefix + path else url)
        return row if version is None else (*row, version)

    def file(self, row: FileRow) -> ListedFile:
        """Return the file of a row that this object has made."""
        path, size, url, *version = row
        return ListedFile(
            path, url or f"{self._prefix}{path}", size, version[0] if version else None
        )


class FileList(Sequence[ListedFile]):
    """Files sorted by path, that is by its bytes in UTF-8; a `ListedFile` is made when it is asked for.

    Args:
        files: The files; they are read once.
        is_sorted: Whether they are sorted already.

    Raises:
        StorageError: If a file is listed twice, or the temporary folder is full.
    """

    def __init__(self, files: Iterable[ListedFile], *, is_sorted: bool = False) -> None:
        convert = FileRows()
        self._file = convert.file
        rows = map(convert.row, files)
        self._rows = RowFile(self._each_once(rows if is_sorted else sort_rows(rows)))

    def _each_once(self, rows: Iterable[FileRow]) -> Iterator[FileRow]:
        before = None
        for row in rows:
            if row[0] == before:
                raise StorageError(LISTED_TWICE, shard=self._file(row).url)
            before = row[0]
            yield row

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> ListedFile: ...

    @overload
    def __getitem__(self, at: slice) -> list[ListedFile]: ...

    def __getitem__(self, at: int | slice) -> ListedFile | list[ListedFile]:
        if isinstance(at, slice):
            return [*map(self._file, self._rows[at])]
        return self._file(self._rows[at])

    def __iter__(self) -> Iterator[ListedFile]:
        return self.iter_from(0)

    def iter_from(self, first: int) -> Iterator[ListedFile]:
        """Yield the files from a number on."""
        return map(self._file, self._rows.iter_from(first))

    def paths(self) -> Iterator[str]:
        """Yield the paths in order."""
        return map(itemgetter(0), self._rows.iter_from(0))


_log = get_logger(__name__)

_THREADS = 16
_SYSTEM_FILES = frozenset(("thumbs.db", "ehthumbs.db", "desktop.ini"))
_SYSTEM_FOLDERS = frozenset(("__macosx", "@eadir", "$recycle.bin"))
_TABLES = frozenset(("csv", "tsv", "jsonl", "ndjson", "parquet"))
_SHOWN = 5
_MAX_TABLES = 1000  # more are samples
_RARE, _MANY_RARE_FIELDS = 20, 10  # a field is rare if at most one of 20 samples has it
_MANY_FIELDS = 30  # more are suspicious if there are fewer samples
Member: TypeAlias = tuple[str, str, ListedFile]
"""Key, field and file of a member of a sample."""
MAX_FOLDERS = 4096  # with more, one recursive listing takes fewer requests


def list_files(root: str, storage: Storage, *, max_folders: int = MAX_FOLDERS) -> FileList:
    """Return all files under a folder, sorted by path, without hidden and unfinished ones.

    An object store lists a thousand names per request, one page after the other. So the folders directly under this one are listed
    concurrently, up to ``max_folders``; with more, one recursive listing takes fewer requests.

    Raises:
        StorageError: If the folder is missing or cannot be listed.
    """
    return FileList(_shown(root, _find(root, storage, max_folders), storage))


def _shown(root: str, files: Iterable[FileInfo], storage: Storage) -> Iterator[ListedFile]:
    path_of = relative_paths(root, storage)
    for file in files:
        path = path_of(file)
        hidden = path.startswith(".") or "/." in path or is_part(path) or _is_system_file(path)
        # Web consoles create "a/" to mark a folder.
        if path and not hidden and not file.url.endswith("/"):
            yield ListedFile(path, file.url, file.size, file.version)


def _is_system_file(path: str) -> bool:
    """Return whether Windows, macOS or a NAS has added a file."""
    parts = path.lower().split("/")
    return parts[-1] in _SYSTEM_FILES or not _SYSTEM_FOLDERS.isdisjoint(parts)


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
        OptionError: As in `check_parts`.
    """
    check_parts(prefix)
    folder, start = parent_url(prefix), prefix.rpartition("/")[2]
    files, folders = storage.list_folder(folder)
    if not start or start in folders:
        return [prefix]
    urls = [join_url(folder, name) for name in folders if name.startswith(start)]
    urls += [file.url for file in files if file.url.rpartition("/")[2].startswith(start)]
    if not urls:
        raise NotFoundError("no file or folder begins with this prefix; check it", shard=prefix)
    return urls


def sample_members(root: str, files: Sequence[ListedFile]) -> list[Member]:
    """Return key, field and file of each member of a sample, sorted (see `iter_members`)."""
    members = list(iter_members(root, files))
    warn_of_rare_fields(root, lambda: ((key, field, file.path) for key, field, file in members))
    return members


def iter_members(root: str, files: Sequence[ListedFile]) -> Iterator[Member]:
    """Return an iterator over the files that are members of samples, sorted by key and field.

    Files without an extension, and those in folders named like ``__this__``, are left out, with a warning that counts them.

    Raises:
        OptionError: If the files are tar shards.
        SourceError: If no file is left; while it is read, if two files would be the same field of a sample.
        StorageError: If the temporary folder is full.
    """
    _check_loose(root, files)
    tables = _lone_tables(files)
    if tables:
        _log.warning(
            "%s: tables beside images are left out: %s; to pack their rows, name the table",
            root,
            ", ".join(sorted(tables)[:_SHOWN]),
        )
    convert, count = FileRows(), 0

    def rows() -> Iterator[Sequence[Any]]:
        nonlocal count
        for file in files:
            if (parts := _key_and_field(file.path)) is not None and file.path not in tables:
                count += 1
                yield *parts, *convert.row(file)

    found = sort_rows(rows())
    if left_out := len(files) - count - len(tables):
        _log.warning("%s: files without an extension are left out: %d", root, left_out)
    if not count:
        raise SourceError("no file here has an extension, so none can be a field", shard=root)
    return _members(root, found, convert)


def _lone_tables(files: Sequence[ListedFile]) -> frozenset[str]:
    """Return the paths of tables that describe images, such as ``metadata.csv``: fewer than these, with names of their own."""
    tables: dict[str, str] = {}
    images = 0
    for file in files:
        key, field = _key_and_field(file.path) or ("", "")
        images += field in IMAGE_FORMATS
        if field in _TABLES and len(tables) <= _MAX_TABLES:
            tables[key] = file.path
    if not tables or len(tables) > _MAX_TABLES:
        return frozenset()
    for file in files:
        key, field = _key_and_field(file.path) or ("", "")
        if field not in _TABLES:
            tables.pop(key, None)
    return frozenset(tables.values() if len(tables) < images else ())


def _members(root: str, rows: Iterator[Sequence[Any]], convert: FileRows) -> Iterator[Member]:
    before: Sequence[Any] = ()
    for row in rows:
        key, field, path = row[:3]
        if row[:2] == before[:2]:
            # The path decides which of two equal ones is named first.
            raise SourceError(
                f"{before[2]} and {path} would both be the field {field!r} of {key!r}; rename one",
                shard=root,
            )
        before = row
        yield key, field, convert.file(row[2:])


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


def warn_of_rare_fields(root: str, read: Callable[[], Iterator[tuple[str, str, str]]]) -> None:
    """Warn if dots in names, instead of extensions, made the fields.

    Args:
        root: The folder, for messages.
        read: Returns key, field and path of each member, sorted; called a second time for a warning.
    """
    fields, samples, before = Counter[str](), 0, None
    for key, field, _ in read():
        fields[field] += 1
        samples += key != before
        before = key
    rare = {field for field, count in fields.items() if count * _RARE <= samples}
    many_rare = len(rare) >= _MANY_RARE_FIELDS
    if many_rare or len(fields) > max(samples, _MANY_FIELDS):
        suspicious_fields = rare if many_rare else fields
        key, field, path = next(one for one in read() if one[1] in suspicious_fields)
        rare_share = (
            f", and {len(rare):,} of the fields are in at most {100 // _RARE} % of the samples"
        )
        _log.warning(
            "%s: %s make %s with %s%s. A key ends at the first dot of a name: %s is the field %r of the sample %r. "
            "Rename such files if this is not intended",
            root,
            plural(fields.total(), "file"),
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
    found = list(_find(url, storage))
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


def _find(root: str, storage: Storage, max_folders: int = MAX_FOLDERS) -> Iterator[FileInfo]:
    """Yield all files, in any order, as the pages of the listings arrive."""
    folders: list[str] = []
    for files, names in storage.folder_pages(root):
        yield from files
        if len(folders) <= max_folders:
            folders += names
    if len(folders) > max_folders or "" in folders:
        path_of = relative_paths(root, storage)
        below = storage.find_pages(root)
        yield from (file for page in below for file in page if "/" in path_of(file))
        return
    urls = [join_url(root, folder) for folder in folders if not folder.startswith(".")]
    yield from itertools.chain.from_iterable(_concurrently(map(storage.find_pages, sorted(urls))))


def _concurrently(listings: Iterator[Iterator[list[FileInfo]]]) -> Iterator[list[FileInfo]]:
    """Yield the pages of several listings; one page of each is requested ahead."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-list") as pool:
        waiting = deque[tuple[Iterator[list[FileInfo]], Future[list[FileInfo] | None]]]()
        while True:
            for listing in itertools.islice(listings, 2 * _THREADS - len(waiting)):
                waiting.append((listing, pool.submit(next, listing, None)))
            if not waiting:
                return
            listing, future = waiting.popleft()
            page = future.result()
            if page is not None:
                waiting.append((listing, pool.submit(next, listing, None)))
                yield page
