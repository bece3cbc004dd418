"""Count the values of all samples from their columns, or of some samples that were read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from shardstream.codecs import parse_json
from shardstream.display import extension
from shardstream.format import KEY_COLUMN
from shardstream.viewer.samples import FoundSample, Shown

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
