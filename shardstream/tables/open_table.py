"""Choose the reader of a table by its URL; the source of a dataset that reads tables in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shardstream.catalog import choose_samples
from shardstream.errors import NotFoundError, OptionError
from shardstream.pipeline import SamplesSource, check_fields, refuse_options
from shardstream.samples import Samples
from shardstream.storage import (
    IN_PLACE_SUFFIXES,
    FileInfo,
    Storage,
    Urls,
    expand_urls,
    one_spelling,
    refuse_repeated,
)
from shardstream.tables.block_samples import Fields

if TYPE_CHECKING:
    from shardstream.tables.mds import MdsSamples
    from shardstream.tables.parquet import ParquetSamples


def table_source(
    urls: Urls,
    storage: Storage,
    fields: Sequence[str] | Mapping[str, str] | None,
    version: object,
    choice: Mapping[str, Any],
    ordered: partial[SamplesSource],
) -> SamplesSource:
    """Return the source of tables that are read in place.

    Raises:
        OptionError: If an option is for shards; or as `open_table`.
    """
    if version is not None:
        raise OptionError("version= is for shards, not for tables; pack them first")
    reason = "on tables that are read in place"
    read = ordered.keywords["reading"]
    no_index = ["index"] if read.index == "ignore" else []  # row groups are read by number
    refuse_options(read, ["lazy", "verify", "on_new_version", *no_index], reason)
    if fields is not None and not isinstance(fields, Mapping):
        check_fields(fields, None, "the table", alternatives=False)
    samples = open_table(urls, storage, fields)
    if choice["where"] is not None and not samples.column_names():
        raise OptionError(
            "where= compares columns, of which MDS has none; use .select(), which reads all samples, or pack them with columns="
        )
    samples = choose_samples(samples, choice["subset"], choice["where"])
    return ordered(samples=samples).drawn(choice["weights"])


def open_table(
    urls: Urls,
    storage: Storage,
    fields: Fields = None,
) -> Samples:
    """Return the rows of Parquet files or MDS shards as samples, in the order of the URLs; those of a glob by name.

    Args:
        urls: URLs, brace patterns or globs that end in ``.parquet``, or ``.mds`` and a compression.
        storage: Storage of the files.
        fields: See `Fields`.

    Raises:
        OptionError: If a URL names another kind of file, a file is named twice, or a glob matches a folder, or names that writers give to files that
            are no data; or as `ParquetSamples` and `MdsSamples`.
        NotFoundError: If a glob matches no file.
        StorageError: If a file is missing or cannot be read.
    """
    files: list[FileInfo] = []
    expanded = expand_urls(urls)
    reader = _reader_of(expanded[0])
    for url in expanded:
        if _reader_of(url) is not reader:
            raise OptionError("data of several kinds are read as one: mix them", shard=url)
        files += _matching(url, storage) if storage.is_glob(url) else [storage.info(url)]
    refuse_repeated((file.url for file in files), storage)
    assert reader is not None  # noqa: S101  (by the caller)
    return reader(files, storage, fields)


def _reader_of(url: str) -> type[ParquetSamples | MdsSamples] | None:
    # Imported here: they take 0.1 s, which datasets of shards do not spend.
    if url.lower().endswith(IN_PLACE_SUFFIXES[0]):
        from shardstream.tables.parquet import ParquetSamples  # noqa: PLC0415

        return ParquetSamples
    if url.lower().endswith(IN_PLACE_SUFFIXES):
        from shardstream.tables.mds import MdsSamples  # noqa: PLC0415

        return MdsSamples
    return None


def _matching(pattern: str, storage: Storage) -> list[FileInfo]:
    """Return the files of a glob.

    Raises:
        OptionError: If it would leave out the files of a folder, or add those that writers mark as unfinished or as no data.
        NotFoundError: If it matches no file.
    """
    found = storage.glob(pattern)
    inner = [] if "**" in pattern else storage.glob(f"{pattern}/*")
    if inner:
        raise OptionError("the glob matches a folder of files; name them", shard=inner[0].url)
    if not found:
        raise NotFoundError("no file matches", shard=pattern)
    marks = {"_", "."} - {name[:1] for name in one_spelling(pattern, storage).split("/")}
    for file in found:
        if any(name[:1] in marks for name in one_spelling(file.url, storage).split("/")):
            raise OptionError(
                "the glob matches a name that begins with _ or a dot, as of unfinished files and logs; name the files that you mean",
                shard=file.url,
            )
    return found
