"""Match the samples of two datasets by their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError
from shardstream.format import import_parquet
from shardstream.samples.base import Samples

if TYPE_CHECKING:
    import pyarrow as pa

Places = npt.NDArray[np.signedinteger[Any]]
_Hashes = npt.NDArray[np.uint64]

_BLOCK_KEYS = 1 << 16  # that are hashed or compared at a time
_WORD_BYTES = 8


def match_keys(keys: pa.ChunkedArray, theirs: pa.ChunkedArray, samples: Samples) -> Places:
    """Return for each key the number of the sample of another dataset that has it; -1 for none.

    Keys are found by 64-bit hashes, 16 bytes a key, and then compared: Arrow's own tables take 100 bytes a key, and four times as long.

    Args:
        keys: Keys to look up.
        theirs: Keys of the samples of the other dataset.
        samples: The other dataset, for the message.

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
        _match_shared(numbers, of_shared, keys, theirs, candidates, samples)
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
    samples: Samples,
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
                f"several samples have the key {key!r}, in {samples.place_of(known[key])[0]} and {samples.place_of(number)[0]}, so that it "
                "cannot be joined; remove one of them, or choose one with subset=",
                shard=samples.url_of(0),
            )
        known.setdefault(key, number)
    for place in mine:
        numbers[place] = known.get(keys[place].as_py(), -1)


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
