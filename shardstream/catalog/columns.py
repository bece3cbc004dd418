"""Read values of all samples from the files of columns next to their shards, and keys from the shards themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from shardstream.errors import IndexMismatchError, NotFoundError, OptionError, get_logger, plural
from shardstream.format import (
    KEY_COLUMN,
    Buffer,
    ForwardReader,
    ReadAt,
    ShardInfo,
    TarDiagnostics,
    decode_column_file,
    import_parquet,
    key_array,
    scan_shard,
)
from shardstream.storage import RangeStream, Storage

if TYPE_CHECKING:
    import pyarrow as pa

_log = get_logger(__name__)

_THREADS = 16
_SCAN_READ_BYTES = 1 << 20
_SCANS = 4  # shards whose keys are read at a time; each takes 150 bytes for each of its samples


def read_all_columns(
    shards: Sequence[ShardInfo], storage: Storage, names: Sequence[str] | None
) -> pa.Table:
    """Return the columns of all samples; row i is sample i.

    Args:
        shards: The shards.
        storage: Their storage.
        names: Columns to read; None for all.

    Raises:
        OptionError: If a shard has no columns, lacks one, or columns of two shards have different types.
        IndexMismatchError: If columns were made of another shard.
        ManifestError: If a file of columns is damaged.
        StorageError: If one cannot be read.
    """
    pa, _ = import_parquet()

    def read(shard: ShardInfo) -> Any:
        return decode_column_file(_read_file(shard, storage), shard, names)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardstream-columns") as pool:
        tables = list(pool.map(read, shards))
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise OptionError(
            f"columns of two shards do not fit together: {error}; run 'shardstream index --columns' on all",
            shard=shards[0].url,
        ) from error


def read_column_names(shard: ShardInfo, storage: Storage) -> list[str]:
    """Return the names of the columns of a shard, with the errors of `read_all_columns`."""
    names: list[str] = decode_column_file(_read_file(shard, storage), shard, None).column_names
    return names


def _read_file(shard: ShardInfo, storage: Storage) -> bytes:
    try:
        return storage.read_bounded(shard.columns_url)
    except NotFoundError as error:
        raise OptionError(
            "this shard has no columns, which where= and keys in subset= need; run 'shardstream index --columns FIELDS' on its folder, "
            "with fields of numbers or text, or values in JSON (json.NAME); --columns __key__ for the keys alone",
            shard=shard.url,
        ) from error


def scan_keys(
    shards: Sequence[ShardInfo], storage: Storage, map_shard: Callable[[int], Buffer] | None
) -> pa.Table:
    """Return the keys of all samples, in order, from the headers of the shards themselves, as a table.

    Args:
        shards: The shards.
        storage: Their storage.
        map_shard: Returns a local shard as a buffer, by its place; None if they are remote.

    Raises:
        IndexMismatchError: If a shard has another number of samples than its index.
        SampleError: If a key is not UTF-8.
        StorageError: If they cannot be read.
    """
    _log.warning(
        "the keys of %s in %s are read from %s; 'shardstream index --columns __key__' on their folder does so once",
        plural(sum(shard.nsamples or 0 for shard in shards), "sample"), shards[0].url, "their headers" if map_shard else "the shards, all bytes",
    )  # fmt: skip
    pa, _ = import_parquet()
    found = zip(iter_scanned_keys(shards, storage, map_shard), shards, strict=True)
    chunks = [key_array(keys, shard.url) for keys, shard in found]
    return pa.table({KEY_COLUMN: pa.chunked_array(chunks, pa.string())})


def iter_keys(
    shards: Sequence[ShardInfo], storage: Storage, map_shard: Callable[[int], Buffer] | None
) -> Iterator[Sequence[str]]:
    """Yield all keys, some shards at a time, from columns if the first shard has some, else as `scan_keys`."""
    if not storage.exists(shards[0].columns_url):
        yield from iter_scanned_keys(shards, storage, map_shard)
        return
    for first in range(0, len(shards), _THREADS):
        some = shards[first : first + _THREADS]
        yield read_all_columns(some, storage, [KEY_COLUMN])[KEY_COLUMN].to_pylist()


def iter_scanned_keys(
    shards: Sequence[ShardInfo], storage: Storage, map_shard: Callable[[int], Buffer] | None
) -> Iterator[list[str]]:
    """Yield the keys of each shard, in order, from its headers; for the arguments and errors see `scan_keys`."""
    places = range(len(shards))

    def read(place: int) -> list[str]:
        tar = None if map_shard is None else map_shard(place)
        return _scan_shard_keys(shards[place], storage, tar)

    with ThreadPoolExecutor(_SCANS, thread_name_prefix="shardstream-keys") as pool:
        for first in places[::_SCANS]:  # not all at once: results would wait in memory
            yield from pool.map(read, places[first : first + _SCANS])


def _scan_shard_keys(info: ShardInfo, storage: Storage, tar: Buffer | None) -> list[str]:
    """Return the keys of a shard, by the headers of its members."""
    size = info.filesize or storage.info(info.url).size
    read: ReadAt
    if tar is not None:
        read = lambda at, length: bytes(tar[at : at + length])  # pages of headers only
    else:
        stream = RangeStream(storage, info.url, size, min_read_bytes=_SCAN_READ_BYTES)
        read = ForwardReader(stream, chunk_bytes=_SCAN_READ_BYTES)
    keys = scan_shard(read, end=size, shard=info.url, diagnostics=TarDiagnostics()).keys
    if len(keys) != info.nsamples:
        raise IndexMismatchError(
            f"{plural(len(keys), 'sample')} in the tar, {info.nsamples} in its index",
            remedy="run 'shardstream index' again",
            shard=info.url,
        )
    return keys
