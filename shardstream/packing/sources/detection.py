"""Open the source of a path, URL or iterable, by its given or guessed kind."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardstream.errors import OptionError, SourceError, StorageError
from shardstream.format import MANIFEST_NAME
from shardstream.packing.sources.folder_source import folder_source
from shardstream.packing.sources.source import SamplesSource, Source, SourceOptions
from shardstream.packing.sources.table_source import TableSource
from shardstream.packing.sources.tables import (
    FILE_COLUMN,
    METADATA_NAMES,
    TABLE_SUFFIXES,
    is_table,
    iter_rows,
)
from shardstream.packing.sources.tar_source import TarSource
from shardstream.storage import Storage, broken_link, is_tar, join_url

AnySource = str | os.PathLike[str] | Source | Iterable[Mapping[str, Any]]


def open_source(source: AnySource, storage: Storage, options: SourceOptions) -> Source:
    """Open the source that the user names.

    It is a folder of class folders with images, a folder of loose files, tables, tars, or samples from Python.

    Raises:
        OptionError: If an option does not apply to the source.
        SourceError: If there is nothing to pack, or its kind cannot be guessed.
        StorageError: If it cannot be reached.
    """
    if not isinstance(source, str | os.PathLike):
        return _python_source(source, options)
    url = os.fspath(source)
    kind = options.kind or guess_kind(url, storage)
    metadata = _find_metadata(url, storage) if kind == "metadata" else None
    if kind == "metadata":
        kind = "folder" if metadata is None else "table"
    if kind != "table" and (options.fields or options.root or options.allow or options.header):
        raise OptionError(
            f"fields, root, allow and header (--map, --root, --allow, --header) apply to tables, but this is packed as {kind}",
            shard=url,
        )
    if kind == "table":
        if metadata is None:
            return TableSource(find_tables(url, storage), storage, options)
        return TableSource([metadata], storage, options, file_column=FILE_COLUMN)
    if kind == "tars":
        return TarSource(url, storage, key=options.key)
    if options.kind is not None and not storage.exists(url):  # `guess_kind` has looked
        raise SourceError(broken_link(url) or "not found; check the path", shard=url)
    return folder_source(url, storage, kind=options.kind, key=options.key)


def _python_source(source: Source | Iterable[Mapping[str, Any]], options: SourceOptions) -> Source:
    if options != SourceOptions():
        raise OptionError(
            "kind, key, fields, root, allow and header apply to files; leave them out for samples from Python"
        )
    return source if isinstance(source, Source) else SamplesSource(source)


def guess_kind(url: str, storage: Storage) -> str:
    """Return one of `KINDS`, or "folder", whose kind depends on its files, or "metadata" for one with a table that may describe them."""
    if is_table(url):
        return "table"
    if is_tar(url) or url.endswith(".json") or ("::" in url and not storage.exists(url)):
        return "tars"
    if "{" in url or storage.is_glob(url):
        return "tars"
    if not storage.exists(url):
        raise SourceError(broken_link(url) or "not found; check the path", shard=url)
    is_empty = are_tables = True
    has_files = has_metadata = False
    for files, folders in storage.folder_pages(url):
        names = [file.url.rsplit("/", 1)[-1] for file in files]
        if MANIFEST_NAME in names or any(map(is_tar, names)):
            return "tars"
        is_empty = is_empty and not names and not folders
        has_files = has_files or bool(names)
        are_tables = are_tables and all(map(is_table, names))
        has_metadata = has_metadata or not set(METADATA_NAMES).isdisjoint(names)
    if has_files and are_tables:
        return "table"
    if is_empty and _is_file(url, storage):
        raise SourceError(
            f"neither a table ({', '.join(TABLE_SUFFIXES)}) nor a tar; name its folder", shard=url
        )
    return "metadata" if has_metadata else "folder"


def _find_metadata(url: str, storage: Storage) -> str | None:
    """Return the table of a folder that Hugging Face's ``imagefolder`` reads: it names files in the column ``file_name``."""
    for name in METADATA_NAMES:
        table = join_url(url, name)
        if storage.exists(table):
            row = next(iter_rows(table, storage, columns=None), None)
            if row is not None and FILE_COLUMN in row.checked().cells:
                return table
    return None


def _is_file(url: str, storage: Storage) -> bool:
    try:
        storage.info(url)
    except StorageError:
        return False
    return True


def find_tables(url: str, storage: Storage) -> Sequence[str]:
    """Return the tables of a pattern, a folder or a single URL.

    Raises:
        SourceError: If there is none.
    """
    if storage.is_glob(url):
        found = [file.url for file in storage.glob(url) if is_table(file.url)]
    elif is_table(url):
        found = [url] if storage.exists(url) else []
    else:
        found = [file.url for file in storage.list_folder(url)[0] if is_table(file.url)]
    if not found:
        raise SourceError(
            f"no table found ({', '.join(TABLE_SUFFIXES)}); check the path", shard=url
        )
    return found
