"""Choose the reader of a table by its URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardstream.errors import NotFoundError, OptionError
from shardstream.format import find_repeated
from shardstream.samples import Samples
from shardstream.storage import FileInfo, Storage, Urls, expand_urls
from shardstream.tables.parquet import ParquetSamples

_SUFFIX = ".parquet"


def open_table(
    urls: Urls,
    storage: Storage,
    fields: Sequence[str] | Mapping[str, str] | None = None,
) -> Samples:
    """Return the rows of Parquet files as samples, in the order of the URLs; those of a glob by name.

    Args:
        urls: URLs, brace patterns or globs that end in ``.parquet``.
        storage: Storage of the files.
        fields: As in `ParquetSamples`.

    Raises:
        OptionError: If a URL names another kind of file, or a file is named twice; or as `ParquetSamples`.
        NotFoundError: If a glob matches no file.
        StorageError: If a file is missing or cannot be read.
    """
    files: list[FileInfo] = []
    for url in expand_urls(urls):
        if not url.lower().endswith(_SUFFIX):
            raise OptionError("tables and shards are read as one: mix them with ss.mix", shard=url)
        found = storage.glob(url) if storage.is_glob(url) else None
        if found == []:
            raise NotFoundError("no file matches", shard=url)
        files += [storage.info(url)] if found is None else found
    if repeated := find_repeated(file.url for file in files):
        raise OptionError("a file is named twice, so its rows would be read twice", shard=repeated)
    return ParquetSamples(files, storage, fields)
