"""Match the samples of two catalogs by their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardstream.catalog.base import Catalog
from shardstream.catalog.sample_columns import read_all_columns
from shardstream.catalog.shard_catalog import ShardCatalog
from shardstream.catalog.subset_catalog import SubsetCatalog
from shardstream.catalog.table_catalog import TableCatalog
from shardstream.errors import IndexMismatchError, OptionError, get_logger, plural
from shardstream.format import (
    KEY_COLUMN,
    ForwardReader,
    ReadAt,
    TarDiagnostics,
    import_parquet,
    scan_shard,
)
from shardstream.storage import RangeStream

if TYPE_CHECKING:
    import pyarrow as pa

_log = get_logger(__name__)

Places = npt.NDArray[np.signedinteger[Any]]
_Hashes = npt.NDArray[np.uint64]

_SCAN_READ_BYTES = 1 << 20
_SCANS = 4  # shards whose keys are read at a time; each takes 150 bytes for each of its samples
_BLOCK_KEYS = 1 << 16  # that are hashed or compared at a time
_WORD_BYTES = 8


def read_column(catalog: Catalog, name: str) -> pa.ChunkedArray | None:
    """Return a column of all samples, in order; None if the shards have no columns.

    Raises:
        OptionError: If some shards have no columns or lack this one, or pyarrow is not installed.
        IndexMismatchError: If columns were made of another shard.
        StorageError: If they cannot be read.
    """
    if isinstance(catalog, TableCatalog) and name == KEY_COLUMN:
        return catalog.keys
    if isinstance(catalog, SubsetCatalog):
        column = read_column(catalog.whole, name)
        return None if column is None else column.take(catalog.numbers)
    if not isinstance(catalog, ShardCatalog) or not len(catalog):
        return None
    if not catalog.storage.exists(catalog.shards[0].columns_url):
        return None
    import_parquet()
    return read_all_columns(catalog, [name])[name]


def read_keys(catalog: Catalog) -> pa.ChunkedArray | None:
    """Return the keys of all samples, in order: from their columns, else from the shards themselves; None if they have neither.

    Raises:
        OptionError: As in `read_column`.
        IndexMismatchError: If a shard has another number of samples than its index.
        StorageError: If they cannot be read.
    """
    found = read_column(catalog, KEY_COLUMN)
    if found is not None:
        return found
    if isinstance(catalog, SubsetCatalog):
        keys = read_keys(catalog.whole)
        return None if keys is None else keys.take(catalog.numbers)
    if not isinstance(catalog, ShardCatalog):
        return None
    _log.warning(
        "the keys of %s in %s are read from %s; 'shardstream index --columns __key__' on their folder does so once",
        plural(len(catalog), "sample"), catalog.url_of(0), "their headers" if catalog.is_local else "the shards, all bytes",
    )  # fmt: skip
    pa, _ = import_parquet()
    shards, chunks = range(catalog.num_shards), list[Any]()
    with ThreadPoolExecutor(_SCANS, thread_name_prefix="shardstream-keys") as pool:
        for first in shards[::_SCANS]:  # not all at once: results would wait in memory
            some = shards[first : first + _SCANS]
            chunks += pool.map(lambda shard: pa.array(_scan_keys(catalog, shard)), some)
    return pa.chunked_array(chunks, pa.string())


def _scan_keys(catalog: ShardCatalog, shard: int) -> list[str]:
    """Return the keys of a shard, by the headers of its members."""
    info, storage = catalog.shards[shard], catalog.storage
    size = info.filesize or storage.info(info.url).size
    read: ReadAt
    if catalog.is_local:
        tar = catalog.map_shard(shard)
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


def match_keys(keys: pa.ChunkedArray, theirs: pa.ChunkedArray, catalog: Catalog) -> Places:
    """Return for each key the number of the sample of another dataset that has it; -1 for none.

    Keys are found by 64-bit hashes, 16 bytes a key, and then compared: Arrow's own tables take 100 bytes a key, and four times as long.

    Args:
        keys: Keys to look up.
        theirs: Keys of the samples of the other dataset.
        catalog: The other dataset, for the message.

    Raises:
        OptionError: If several of its samples have one of the keys.
    """
    hashes = _hash_all(theirs)
    small: type[np.signedinteger[Any]] = np.int64
    if len(hashes) <= np.iinfo(np.int32).max:  # half the memory
        small = np.int32
    order = np.argsort(hashes, kind="stable").astype(small)
    hashes.sort(kind="stable")  # in place: as hashes[order], without a copy
    shared = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
    numbers = np.full(len(keys), -1, dtype=small)
    of_shared: list[int] = []  # places of keys whose hash several samples have
    first = 0
    for block in _blocks(keys) if len(hashes) else ():
        wanted = _hash_block(block)
        sorted_here = np.argsort(wanted)  # ascending searches stay in the cache: 4 times as fast
        wanted = wanted[sorted_here]
        places = np.minimum(np.searchsorted(hashes, wanted), len(hashes) - 1)
        found = np.flatnonzero(hashes[places] == wanted)
        numbers[first + sorted_here[found]] = order[places[found]]
        if len(shared):
            of_shared += (first + sorted_here[np.isin(wanted, shared)]).tolist()
        first += len(block)
    _drop_others(numbers, keys, theirs)
    if of_shared:
        candidates = order[np.isin(hashes, shared)]
        _match_shared(numbers, of_shared, keys, theirs, candidates, catalog)
    return numbers


def _drop_others(numbers: Places, keys: pa.ChunkedArray, theirs: pa.ChunkedArray) -> None:
    """Set the numbers to -1 where another key has the same hash."""
    import pyarrow.compute as pc  # noqa: PLC0415  (an extra)

    for first in range(0, len(numbers), _BLOCK_KEYS):
        some = numbers[first : first + _BLOCK_KEYS]
        places = np.flatnonzero(some >= 0)
        mine = keys.slice(first, len(some)).take(places)
        is_same = pc.equal(mine, theirs.take(some[places])).to_numpy()
        some[places[~is_same.astype(bool)]] = -1


def _match_shared(
    numbers: Places,
    mine: Sequence[int],
    keys: pa.ChunkedArray,
    theirs: pa.ChunkedArray,
    candidates: Places,
    catalog: Catalog,
) -> None:
    """Match the keys whose hash several samples of the other dataset have.

    Raises:
        OptionError: If several of them have one of the keys.
    """
    asked = {keys[place].as_py() for place in mine}
    known: dict[str, int] = {}
    for number in np.sort(candidates).tolist():
        key = theirs[number].as_py()
        if key in known and key in asked:
            raise OptionError(
                f"several samples have the key {key!r}, in {place_of(catalog, known[key])} and {place_of(catalog, number)}, so that it "
                "cannot be joined; remove one of them, or choose one with subset=",
                shard=catalog.url_of(0),
            )
        known.setdefault(key, number)
    for place in mine:
        numbers[place] = known.get(keys[place].as_py(), -1)


def place_of(catalog: Catalog, number: int) -> str:
    """Return the shard of a sample, or the table and its row, for messages."""
    if isinstance(catalog, TableCatalog):
        return catalog.where(number)
    return catalog.url_of(catalog.shards_of(np.array([number]))[0])


def _hash_all(keys: pa.ChunkedArray) -> _Hashes:
    """Return 64 bits of each key, equal for equal keys."""
    hashes = np.empty(len(keys), dtype=np.uint64)
    first = 0
    for block in _blocks(keys):
        hashes[first : first + len(block)] = _hash_block(block)
        first += len(block)
    return hashes


def _blocks(keys: pa.ChunkedArray) -> Iterator[Any]:
    for chunk in keys.chunks:
        for first in range(0, len(chunk), _BLOCK_KEYS):
            yield chunk.slice(first, _BLOCK_KEYS)


def _hash_block(keys: pa.Array) -> _Hashes:
    """Hash the texts of an array, word by word: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    pa, _ = import_parquet()
    keys = keys.cast(pa.string())  # no copy, unless their offsets have 64 bits
    _, offsets, data = keys.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int32)[keys.offset : keys.offset + len(keys) + 1]
    lengths = np.diff(bounds)
    text = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(1, np.uint8)
    hashes = _mixed(lengths.astype(np.uint64))
    for at in range(0, int(lengths.max(initial=0)), _WORD_BYTES):
        mine = np.flatnonzero(lengths > at)
        columns = np.arange(at, at + _WORD_BYTES)
        places = bounds[mine, None].astype(np.int64) + columns
        words = text[np.minimum(places, len(text) - 1)]
        words[columns >= lengths[mine, None]] = 0
        hashes[mine] = _mixed(hashes[mine] ^ words.view(np.uint64)[:, 0])
    return hashes


def _mixed(values: _Hashes) -> _Hashes:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
