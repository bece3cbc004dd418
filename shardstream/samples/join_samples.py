"""Find the samples of several datasets that belong together, by key or by position."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from shardstream.errors import OptionError, get_logger, plural
from shardstream.format import KEY_COLUMN, import_parquet, is_meta_name
from shardstream.order import mix_bits
from shardstream.samples.base import Samples
from shardstream.samples.join import Join, JoinPart
from shardstream.samples.subset import Subset

if TYPE_CHECKING:
    import pyarrow as pa


_log = get_logger(__name__)

JoinBy = Literal["auto", "key", "position"]
JoinMissing = Literal["error", "drop", "keep"] | Mapping[str, bytes]
_POLICIES = ("error", "drop", "keep")


def open_part(samples: Samples, fields: Collection[str] | None) -> JoinPart:
    """Return samples with the fields to take from it.

    Args:
        samples: The samples to be joined.
        fields: Names, or field -> name there; None for all fields.

    Raises:
        OptionError: If it is known that it has no such field, or a name cannot be that of a field.
    """
    if fields is None:
        return JoinPart(samples=samples, defaults={})
    names = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields}
    for field in names:
        if field != field.lower() or not field or "/" in field or is_meta_name(field):
            raise OptionError(
                f"{field!r} is not a field name; use lower case, e.g. 'txt'",
                shard=samples.url_of(0),
            )
    known = samples.fields
    unknown = [] if known is None else sorted(set(names.values()) - set(known))
    if unknown:
        raise OptionError(
            f"no sample has the field {unknown[0]!r}, but {', '.join(known or ())}",
            shard=samples.url_of(0),
        )
    return JoinPart(samples=samples, fields=names, defaults={})


def join_samples(
    first: Samples,
    parts: Sequence[JoinPart],
    by: JoinBy = "auto",
    missing: JoinMissing = "error",
    kept: Collection[str] | None = None,
) -> Join:
    """Join the samples of datasets to one sample each, in the order of the first (see `ss.join`).

    Args:
        first: The dataset that decides which samples there are.
        parts: The others.
        by: As in `ss.join`.
        missing: As in `ss.join`.
        kept: Fields of the first dataset that are kept; None for all.

    Raises:
        OptionError: If keys are missing or repeated, no key is in a dataset, or fields are in two datasets.
        StorageError: If keys cannot be read.
    """
    _check_fields([open_part(first, kept), *parts])
    _check_defaults(missing, parts)
    datasets = [first, *(part.samples for part in parts)]
    keys = _keys_of(datasets, by)
    is_strict = missing in ("error", "drop")  # of a key that is there, whose sample lacks a field
    parts = [replace(part, is_strict=is_strict and part.fields is not None) for part in parts]
    if keys is None:
        _check_lengths(datasets)
        return Join(first, parts, kept)
    found = [
        match_keys(keys[0], theirs, samples)
        for theirs, samples in zip(keys[1:], datasets[1:], strict=True)
    ]
    if missing == "error":
        _refuse_missing(keys[0], found, datasets)
    unused = [
        len(samples) - _count_used(numbers, len(samples))
        for numbers, samples in zip(found, datasets[1:], strict=True)
    ]
    absent = np.any([numbers < 0 for numbers in found], axis=0)
    if missing == "drop" and absent.any():
        _log.warning(
            "%s of %s left out: another dataset of the join lacks the key, the first %r",
            plural(int(absent.sum()), "sample"), first.url_of(0), keys[0][int(absent.argmax())].as_py(),
        )  # fmt: skip
        left = np.flatnonzero(~absent)
        if not len(left):
            raise OptionError("no key is in all datasets of the join", shard=first.url_of(0))
        first, found = Subset(first, left), [numbers[left] for numbers in found]
    for numbers, samples in zip(found, datasets[1:], strict=True):
        if len(numbers) and (numbers < 0).all():
            raise OptionError(
                f"no sample of {first.url_of(0)} has a key of this dataset; compare the keys (shardstream cat prints those of a shard)",
                shard=samples.url_of(0),
            )
    defaults = missing if isinstance(missing, Mapping) else {}
    joined = [
        replace(
            part,
            numbers=_compact(numbers),
            defaults=_defaults_of(part, defaults),
            num_unused=count,
        )
        for part, numbers, count in zip(parts, found, unused, strict=True)
    ]
    return Join(first, joined, kept)


def check_missing(missing: object) -> None:
    """Check the user's option.

    Raises:
        OptionError: If it is unknown.
    """
    if not isinstance(missing, Mapping) and missing not in _POLICIES:
        raise OptionError(f"missing must be 'error', 'drop', 'keep' or fields, not {missing!r}")


def _keys_of(datasets: Sequence[Samples], by: JoinBy) -> list[Any] | None:
    """Return the keys of all samples of each dataset; None to join by position."""
    if by == "position":
        return None
    if by == "auto" and not all(KEY_COLUMN in one.column_names() for one in datasets):
        return None
    return [one.read_columns([KEY_COLUMN], scans=True)[KEY_COLUMN] for one in datasets]


def _check_fields(datasets: Sequence[JoinPart]) -> None:
    """Refuse fields that two datasets have, where the manifests list them."""
    found: dict[str, str] = {}
    for one in datasets:
        for field in one.known_fields or ():
            url = one.samples.url_of(0)
            if field in found:
                raise OptionError(
                    f"two datasets have the field {field!r}: {found[field]} and {url}; choose the fields of each, {{URL: fields}} (--fields, --add "
                    f"URL:FIELD), or take it under another name: ss.join(first, {{URL: {{'new.{field}': {field!r}}}}}), --add URL:new.{field}={field}"
                )
            found[field] = url


def _check_defaults(missing: JoinMissing, parts: Sequence[JoinPart]) -> None:
    """Refuse defaults of fields that no joined dataset has."""
    found = [part.known_fields for part in parts]
    known = {field for fields in found for field in fields or ()}
    unknown = sorted(set(missing) - known) if isinstance(missing, Mapping) else []
    if unknown and None not in found:
        raise OptionError(
            f"missing= has the field {unknown[0]!r}, which no joined dataset has; they have {', '.join(sorted(known))}"
        )


def _count_used(numbers: Places, nsamples: int) -> int:
    """Return how many of the samples 0 to ``nsamples - 1`` are named."""
    is_used = np.zeros(nsamples, dtype=bool)
    is_used[numbers[numbers >= 0]] = True
    return int(is_used.sum())


def _compact(numbers: Places) -> Places | None:
    """Return None for the numbers 0, 1, 2, ...: the datasets have one order."""
    return None if np.array_equal(numbers, np.arange(len(numbers))) else numbers


def _defaults_of(part: JoinPart, defaults: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return those of the fields that a part has."""
    fields = part.known_fields
    return {name: value for name, value in defaults.items() if fields is None or name in fields}


def _check_lengths(datasets: Sequence[Samples]) -> None:
    for samples in datasets[1:]:
        if len(samples) != len(datasets[0]):
            raise OptionError(
                f"{plural(len(datasets[0]), 'sample')} cannot be joined by position with {plural(len(samples), 'sample')}; "
                "run 'shardstream index --columns __key__' on each dataset, to join by key, or pass by='key'",
                shard=samples.url_of(0),
            )


def _refuse_missing(keys: Any, found: Sequence[Places], datasets: Sequence[Samples]) -> None:
    for numbers, samples in zip(found, datasets[1:], strict=True):
        absent = np.flatnonzero(numbers < 0)
        if len(absent):
            raise OptionError(
                f"{plural(len(absent), 'key')} of {len(numbers):,} missing in this dataset, the first {keys[int(absent[0])].as_py()!r}; "
                "choose missing='drop', 'keep' (--missing) or fields to take instead",
                shard=samples.url_of(0),
            )


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
    """Hash the texts of an array, word by word."""
    pa, _ = import_parquet()
    keys = keys.cast(pa.string())  # no copy, unless their offsets have 64 bits
    _, offsets, data = keys.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int32)[keys.offset : keys.offset + len(keys) + 1]
    lengths = np.diff(bounds)
    text = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(1, np.uint8)
    hashes = mix_bits(lengths.astype(np.uint64))
    for at in range(0, int(lengths.max(initial=0)), _WORD_BYTES):
        mine = np.flatnonzero(lengths > at)
        columns = np.arange(at, at + _WORD_BYTES)
        places = bounds[mine, None].astype(np.int64) + columns
        words = text[np.minimum(places, len(text) - 1)]
        words[columns >= lengths[mine, None]] = 0
        hashes[mine] = mix_bits(hashes[mine] ^ words.view(np.uint64)[:, 0])
    return hashes
