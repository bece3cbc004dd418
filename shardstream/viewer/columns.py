"""Choose samples by condition, class and key, and count the values of columns, or of some samples that were read, for histograms."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any

import numpy as np

from shardstream.catalog import find_where
from shardstream.codecs import parse_json
from shardstream.display import extension
from shardstream.errors import OptionError, ShardStreamError
from shardstream.format import KEY_COLUMN, scan_shard
from shardstream.samples import Numbers, Samples, Subset
from shardstream.viewer.samples import FoundSample, IndexedSamples, Shown

_KEPT = 16  # selections, of 8 bytes for each chosen sample
_FOUND = 1000  # samples that a search by key returns
_SEARCH_S = 20.0
NO_COLUMNS = (
    "the shards have no columns: run 'shardstream index --columns FIELDS' with fields of numbers or text, or values in JSON (json.NAME); "
    "'--columns __key__' for the keys alone"
)


class Selections:
    """Samples that fulfil conditions; thread-safe. The results of the last conditions are kept.

    Args:
        viewed: The samples.
    """

    def __init__(self, viewed: IndexedSamples) -> None:
        self._viewed, self._samples = viewed, viewed.samples
        choose = partial(find_where, viewed.samples)
        self._choose: Callable[[str], Numbers] = lru_cache(_KEPT)(choose)
        self._table: Any = None
        self._missing: str | None = None  # why there are no columns
        self._lock = threading.Lock()

    def columns(self) -> Any:
        """Return the columns of all samples as a table; row i is sample i. They are read once.

        Raises:
            OptionError: If the shards have no columns, or pyarrow is not installed.
            ShardStreamError: If they cannot be read.
        """
        with self._lock:
            if self._missing is not None:
                raise OptionError(self._missing)
            if self._table is None:
                try:
                    self._table = self._samples.read_columns(None)
                except OptionError as error:
                    self._missing = str(error)
                    raise
            return self._table

    def names(self) -> list[str]:
        """Return the names of the columns; none if there are no columns, or they cannot be read."""
        try:
            return self._samples.column_names()
        except ShardStreamError:
            return []

    def sort(self, numbers: Numbers | None, column: str, *, descending: bool) -> Numbers:
        """Return samples in the order of a column: those without a value come last, equal ones keep their order.

        Args:
            numbers: The samples; None for all.
            column: Name of the column.
            descending: Whether the largest value comes first.

        Raises:
            OptionError: If there is no such column, or its values have no order.
            ShardStreamError: If columns cannot be read.
        """
        table = self.columns()
        if column not in table.column_names:
            raise OptionError(f"no column {column!r}. Columns: {', '.join(table.column_names)}")
        import pyarrow.compute as pc  # noqa: PLC0415  (an extra)

        values = table[column] if numbers is None else table[column].take(numbers)
        try:
            order = "descending" if descending else "ascending"
            places: Numbers = pc.array_sort_indices(values.combine_chunks(), order).to_numpy()
        except NotImplementedError as error:
            raise OptionError(f"the values of {column!r} have no order: {values.type}") from error
        return places.astype(np.int64) if numbers is None else numbers[places]

    def choose(self, where: str) -> Numbers:
        """Return the numbers of the samples that fulfil a condition in SQL, ascending.

        Raises:
            OptionError: If it is invalid, or there are no columns.
            ShardStreamError: If columns cannot be read.
        """
        return self._choose(where)

    def samples(self, where: str) -> Samples:
        """Return the samples that fulfil a condition, as ``ShardDataset(where=)`` reads them."""
        return Subset(self._samples, self.choose(where)) if where else self._samples

    def classes_of(self) -> Numbers | None:
        """Return the class number of each sample, -1 where it is unknown; None without the column ``cls``."""
        try:
            table = self.columns()
        except OptionError:
            return None
        if "cls" not in table.column_names:
            return None
        try:
            column = table["cls"].fill_null(-1).to_numpy()
            return np.asarray(column, dtype=np.int64)
        except (ValueError, TypeError):
            return None

    def search(self, text: str) -> tuple[list[int], str]:
        """Return the numbers of samples whose key contains a text, and what the user should know about them.

        A key that is equal comes first. At most 1,000 are returned.

        Raises:
            OptionError: If the shards are remote and have no column of keys.
        """
        try:
            table = self.columns()
        except OptionError:
            table = None
        if table is not None and KEY_COLUMN in table.column_names:
            import pyarrow.compute as pc  # noqa: PLC0415  (an extra)

            found = np.flatnonzero(pc.match_substring(table[KEY_COLUMN], text).to_numpy())
            equal = np.flatnonzero(pc.equal(table[KEY_COLUMN], text).to_numpy(zero_copy_only=False))
            return _equal_first(equal.tolist(), found.tolist())
        if not self._viewed.catalog.is_local:
            raise OptionError(
                f"a search by key would read the headers of all samples; {NO_COLUMNS}, or use 'shardstream cat --key'"
            )
        return search_headers(self._viewed, text, time.monotonic)


def search_headers(
    viewed: IndexedSamples, text: str, clock: Callable[[], float]
) -> tuple[list[int], str]:
    """Search keys in the headers of local shards, for up to 20 s; returns as `Selections.search`."""
    equal: list[int] = []
    found: list[int] = []
    catalog = viewed.catalog
    first, end_s = 0, clock() + _SEARCH_S
    for number in range(catalog.num_shards):
        if clock() > end_s:
            note = f"searched the first {first:,} of {len(catalog):,} samples in {_SEARCH_S:.0f} s; {NO_COLUMNS} to search all"
            return _equal_first(equal, found)[0], note
        tar = memoryview(catalog.map_shard(number))
        try:
            keys = scan_shard(
                lambda at, size, tar=tar: bytes(tar[at : at + size]),  # type: ignore[misc]
                end=len(tar),
                shard=catalog.url_of(number),
            ).keys
        except ShardStreamError:  # the grid shows what is wrong with it
            keys = []
        places = [place for place, key in enumerate(keys) if text in key]
        numbers = viewed.numbers_here(first + np.array(places, dtype=np.int64)).tolist()
        for place, one in zip(places, numbers, strict=True):
            if one >= 0:
                (equal if keys[place] == text else found).append(one)
        first += catalog.shards[number].nsamples or 0
    return _equal_first(equal, found)


def _equal_first(equal: Sequence[int], found: Sequence[int]) -> tuple[list[int], str]:
    known = set(equal)
    numbers = [*equal, *(number for number in found if number not in known)]
    note = f"the first {_FOUND:,} of {len(numbers):,}" if len(numbers) > _FOUND else ""
    return numbers[:_FOUND], note


_BINS = 24
_VALUES = 24  # of a column of text: the most frequent ones
_FEW = 24  # distinct numbers up to which each has a bar of its own
_JSON_BYTES = 64 << 10

Histogram = dict[str, Any]


def histograms_of_table(table: Any, classes: Sequence[str] | None) -> list[Histogram]:
    """Return the exact histograms of all columns of numbers, text and truth values.

    Args:
        table: A `pyarrow.Table`; row i is sample i.
        classes: Names of the classes, for ``cls``.
    """
    found = []
    for name in table.column_names:
        if name == KEY_COLUMN:
            continue
        column = table[name]
        nulls = column.null_count
        values = column.drop_null()
        if str(column.type) in ("string", "large_string", "bool"):
            counted = values.value_counts()
            pairs = [(one["values"], one["counts"]) for one in counted.to_pylist()]
            found.append(_of_values(name, pairs, nulls, None))
        elif str(column.type) not in ("binary", "null"):
            try:
                numbers = np.asarray(values.to_numpy())
            except (TypeError, ValueError):  # lists and other nested values
                continue
            if numbers.dtype.kind in "iuf":
                found.append(histogram_of_numbers(name, numbers, nulls, _names(name, classes)))
    return found


def histograms_of_samples(
    samples: Sequence[Shown], classes: Sequence[str] | None
) -> list[Histogram]:
    """Return histograms of the classes, sizes and JSON values of some samples, and of their state.

    Args:
        samples: Samples with the bodies of small fields.
        classes: Names of the classes.
    """
    good = [one for one in samples if isinstance(one, FoundSample)]
    columns: dict[str, list[Any]] = {"size in bytes": [one.place.size or 0 for one in good]}
    for one in good:
        for name, value in _small_values(one).items():
            columns.setdefault(name, []).append(value)
    found = []
    for name, values in columns.items():
        nulls = len(good) - len(values)
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            numbers = np.asarray(
                values, dtype=np.float64 if any(isinstance(v, float) for v in values) else None
            )
            if numbers.dtype.kind in "iuf":
                found.append(histogram_of_numbers(name, numbers, nulls, _names(name, classes)))
        else:
            pairs = list(Counter(str(value)[:80] for value in values).items())
            found.append(_of_values(name, pairs, nulls, None))
    for histogram in found:
        for bar in histogram["bars"]:
            del bar["where"]  # there are no columns to choose by
    return found


def histogram_of_numbers(
    name: str, numbers: np.ndarray[Any, Any], nulls: int, names: Sequence[str] | None = None
) -> Histogram:
    """Return the histogram of numbers: a bar for each if there are few, else one for each range between round numbers.

    >>> found = histogram_of_numbers("cls", np.array([1, 0, 1]), 0, ["cat", "dog"])
    >>> [(bar["label"], bar["count"], bar["where"]) for bar in found["bars"]]
    [('0 cat', 1, '"cls" = 0'), ('1 dog', 2, '"cls" = 1')]
    >>> found = histogram_of_numbers("n", np.arange(1990, 2100), 0)
    >>> [(bar["label"], bar["count"]) for bar in found["bars"]][:2], found["bars"][0]["where"]
    ([('1,990 to 1,994', 5), ('1,995 to 1,999', 5)], '"n" >= 1990 AND "n" < 1995')
    """
    finite = numbers[np.isfinite(numbers)]
    nulls += len(numbers) - len(finite)
    distinct, counts = np.unique(finite, return_counts=True)
    if len(distinct) <= _FEW or names is not None:
        pairs = list(zip(distinct.tolist(), counts.tolist(), strict=True))
        return _of_values(name, pairs, nulls, names)
    low, high = (Decimal(repr(one)) for one in (distinct[0].item(), distinct[-1].item()))
    edges = round_edges(low, high)
    is_whole = distinct.dtype.kind in "iu"
    # Compared in the type of the column, as the condition compares them: 0.7 is another number as float32.
    inner = np.array([int(e) if is_whole else float(e) for e in edges[1:-1]], distinct.dtype)
    cumulated = np.append(0, np.cumsum(counts))
    ends = np.append(np.searchsorted(distinct, inner), len(distinct))
    column, bars = _quoted(name), []
    for place, count in enumerate(np.diff(cumulated[ends], prepend=0).tolist()):
        start, end = edges[place : place + 2]
        # In the type of the column, the last end may be the largest value.
        below = "<=" if place == len(ends) - 1 else "<"
        bars.append(
            {
                "label": _range_label(start, end, is_whole=is_whole),
                "count": count,
                "where": f"{column} >= {_edge(start)} AND {column} {below} {_edge(end)}",
            }
        )
    return {"name": name, "bars": bars, "nulls": nulls, "others": 0, "distinct": len(distinct)}


def round_edges(low: Decimal, high: Decimal) -> list[Decimal]:
    """Return multiples of 1, 2 or 5 times a power of ten: the first at most ``low``, the last above ``high``.

    >>> [str(edge) for edge in round_edges(Decimal("0.21"), Decimal("9.9"))][:3]
    ['0.0', '0.5', '1.0']
    """
    least = (high - low) / _BINS
    unit = Decimal(1).scaleb(least.adjusted())
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least)
    first, last = math.floor(low / step), math.floor(high / step)
    return [step * number for number in range(first, last + 2)]


def _range_label(start: Decimal, end: Decimal, *, is_whole: bool) -> str:
    if is_whole:  # with the last one of the range
        end -= 1
    return _shown(start) if start == end else f"{_shown(start)} to {_shown(end)}"


def _shown(edge: Decimal) -> str:
    edge = edge.normalize()
    return f"{edge:,f}" if -5 < edge.adjusted() < 20 else f"{edge:e}"


def _edge(edge: Decimal) -> str:
    return str(int(edge)) if edge == int(edge) else repr(float(edge))


def _of_values(
    name: str, pairs: Sequence[tuple[Any, int]], nulls: int, names: Sequence[str] | None
) -> Histogram:
    """Return a histogram with a bar for each value, or for the most frequent ones."""
    by_count = sorted(pairs, key=lambda pair: (-pair[1], str(pair[0])))
    shown = by_count[:_VALUES]
    if all(isinstance(value, int | float) for value, _ in shown):
        shown = sorted(shown, key=lambda pair: pair[0])
    bars = []
    for value, count in shown:
        label = str(value)[:80]
        if names is not None and isinstance(value, int) and 0 <= value < len(names):
            label = f"{value} {names[value]}"
        bars.append(
            {"label": label, "count": count, "where": f"{_quoted(name)} = {_literal(value)}"}
        )
    others = sum(count for _, count in by_count[_VALUES:])
    return {
        "name": name,
        "bars": bars,
        "nulls": nulls,
        "others": others,
        "distinct": len(pairs),
    }


def _small_values(sample: FoundSample) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for name, data in sample.bodies.items():
        kind = extension(name)
        if kind == "cls" and bytes(data[:18]).strip().isdigit():
            found[name] = int(bytes(data[:18]))
        elif kind == "json" and len(data) <= _JSON_BYTES:
            try:
                value = parse_json(bytes(data))
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                found |= {
                    f"{name}.{key}": one
                    for key, one in value.items()
                    if isinstance(one, str | int | float | bool)
                }
    return found


def _names(name: str, classes: Sequence[str] | None) -> Sequence[str] | None:
    return classes if name == "cls" else None


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return "'" + str(value).replace("'", "''") + "'"
