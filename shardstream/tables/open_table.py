"""Choose the reader of a table by its URL."""

from __future__ import annotations

from shardstream.errors import NotFoundError, OptionError
from shardstream.format import find_repeated
from shardstream.samples import Samples
from shardstream.storage import FileInfo, Storage, Urls, expand_urls
from shardstream.tables.mds import MdsSamples
from shardstream.tables.naming import Fields
from shardstream.tables.parquet import ParquetSamples

_READERS: dict[str, type[ParquetSamples | MdsSamples]] = {
    ".parquet": ParquetSamples,
    **dict.fromkeys((".mds", ".mds.zstd", ".mds.gz", ".mds.bz2"), MdsSamples),
}


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
        OptionError: If a URL names another kind of file, or a file is named twice; or as `ParquetSamples` and `MdsSamples`.
        NotFoundError: If a glob matches no file.
        StorageError: If a file is missing or cannot be read.
    """
    files: list[FileInfo] = []
    expanded = expand_urls(urls)
    reader = _reader_of(expanded[0])
    for url in expanded:
        if _reader_of(url) is not reader:
            raise OptionError("data of several kinds are read as one: mix them", shard=url)
        found = storage.glob(url) if storage.is_glob(url) else [storage.info(url)]
        if not found:
            raise NotFoundError("no file matches", shard=url)
        files += found
    if repeated := find_repeated(file.url for file in files):
        raise OptionError("a file is named twice, so its rows would be read twice", shard=repeated)
    assert reader is not None  # noqa: S101  (by the caller)
    return reader(files, storage, fields)


def _reader_of(url: str) -> type[ParquetSamples | MdsSamples] | None:
    return next((one for end, one in _READERS.items() if url.lower().endswith(end)), None)
