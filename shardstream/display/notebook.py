"""Show datasets, samples, batches and timings in a notebook: HTML without scripts, all text escaped, under 100 kB.

A notebook shows whatever the user has made, so nothing here trusts a value: names, texts and numbers of rows are cut, values are
written only as far as they are shown, and what cannot be read is shown by the name of its type. No page raises.
"""

from __future__ import annotations

import base64
import functools
import html
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
import PIL.Image

from shardstream.display.field_pictures import Picture, kinds_of, render, render_value
from shardstream.errors import describe_error, plural, redact

if TYPE_CHECKING:
    from shardstream.pipeline import Pipeline
    from shardstream.samples import Numbers, Samples

_P = ParamSpec("_P")
_PAGE_BYTES = 100_000
_PICTURES_BYTES = 80_000  # of all pictures of a page, as text
_SIDE, _LARGE_SIDE = 72, 192
_TEXT_CHARACTERS, _ERROR_CHARACTERS, _CARD_CHARACTERS = 300, 200, 40
_NAME_CHARACTERS, _FACT_CHARACTERS, _URL_CHARACTERS = 80, 1000, 10_000
_FIELDS_SHOWN, _CARDS_SHOWN, _CARD_TEXTS, _DEPTH_SHOWN = 40, 24, 3, 8
_NUMBERS_CONVERTED = 50_000_000  # of arrays that are no numpy arrays: a copy of 200 MB
_LINE_NUMBERS = 100_000
_PICTURED = ("picture", "mask", "video", "sound", "array")
_NUMBERS = "buifcmM"  # kinds of dtypes that numpy writes without the user's code
_CARD = "display:inline-block;vertical-align:top;width:88px;margin:4px;font-size:11px;overflow-wrap:anywhere"
_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0"
_WRONG = "color:#c62828"
_SAMPLES_SHOWN, _NAMES_SHOWN = 24, 40


class Shown:
    """Something that a notebook shows as HTML, and a terminal as a line.

    Args:
        html_text: The HTML.
        text: The line.
    """

    def __init__(self, html_text: str, text: str) -> None:
        self._html, self._text = html_text, text

    def _repr_html_(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return self._text


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Shares of a whole, drawn as one bar.

    Args:
        title: What they are shares of.
        shares: Name -> size.
    """

    title: str
    shares: Mapping[str, float]


class _Pictures:
    """Makes pictures until they are too many bytes for a page."""

    def __init__(self) -> None:
        self._left = _PICTURES_BYTES

    def of_field(self, name: str, value: Any, kind: str, side: int) -> str:
        """Return the picture of a field's bytes or value; empty if there is none, in red why it cannot be made."""
        try:
            if isinstance(value, bytes):
                found = render(kind, name, value, side) if kind in _PICTURED else None  # type: ignore[arg-type]
            elif isinstance(value, PIL.Image.Image):
                found = render_value(value, side)
            else:
                array = _to_array(value)
                found = None if array is None else render_value(_thinned(array), side)
        except Exception as error:  # noqa: BLE001  (any error of a decoder: the page shows it)
            return _wrong(error)
        return "" if found is None else self._tag(found)

    def _tag(self, picture: Picture) -> str:
        data = base64.b64encode(picture.data).decode()
        if len(data) > self._left:
            return "<i>(too many pictures)</i>"
        self._left -= len(data)
        return f'<img src="data:{picture.media_type};base64,{data}" style="max-width:100%">'


def _never_raising(make: Callable[_P, str]) -> Callable[_P, str]:
    """Show an error in place of the page: an exception would hide the user's value behind our traceback."""

    @functools.wraps(make)
    def page(*args: _P.args, **kwargs: _P.kwargs) -> str:
        try:
            return make(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  (any error of the user's types)
            return f"<div>{_wrong(error)}</div>"

    return page


@_never_raising
def dataset_html(
    title: str, facts: Mapping[str, str], samples: Iterable[tuple[int, object]]
) -> str:
    """Return the page of a dataset.

    Args:
        title: Name of its class.
        facts: What is known of it.
        samples: Some samples with their numbers, or what is wrong with them.
    """
    pictures = _Pictures()
    cards = [_card(pictures, str(number), sample) for number, sample in samples]
    return _page(title, _table(list(facts.items())), cards)


@_never_raising
def sample_html(sample: Mapping[str, Any]) -> str:
    """Return the page of a sample: a row for each field with its size or type, and its picture or beginning."""
    pictures, rows, short_rows = _Pictures(), [], []
    fields = [(_string(name), value) for name, value in islice(sample.items(), _FIELDS_SHOWN)]
    kinds = _kinds(fields)
    for name, value in fields:
        picture = pictures.of_field(name, value, kinds.get(name, "other"), _LARGE_SIDE)
        text = "" if picture else _escaped(_excerpt(name, value))
        cells = (_escaped(_cut(name)), _escaped(_size(value)))
        rows.append(_row((*cells, picture + text)))
        short_rows.append(_row(cells))
    hidden = len(sample) - len(rows)
    more = f"<i>and {plural(hidden, 'more field')}</i>" if hidden > 0 else ""
    return _fitting(
        *(f"<div><table>{''.join(shown)}</table>{more}</div>" for shown in (rows, short_rows))
    )


@_never_raising
def batch_html(batch: Any) -> str:
    """Return the page of a batch: a dict or tuple of columns, or a list of items."""
    columns, hidden = _columns(batch)
    facts = [(name, _size(column)) for name, column in columns]
    if hidden:
        facts.append((f"and {plural(hidden, 'more column')}", ""))
    lengths = [length for _, column in columns if (length := _length(column)) is not None]
    pictures, count = _Pictures(), min(lengths, default=0)
    long = [(name, column) for name, column in columns if _length(column)]
    cards = [_batch_card(pictures, n, long) for n in range(min(count, _CARDS_SHOWN))]
    return _page(f"batch of {count}", _table(facts), cards)


def _batch_card(pictures: _Pictures, number: int, columns: Sequence[tuple[str, Any]]) -> str:
    try:
        sample = {name: column[number] for name, column in columns}
    except Exception as error:  # noqa: BLE001  (any error of the user's types)
        return _card(pictures, str(number), error)
    return _card(pictures, str(number), sample)


def _page(title: str, table: str, cards: Sequence[str]) -> str:
    head = f"<b>{_escaped(_cut(title))}</b>"
    return _fitting(
        f"<div>{head}{table}<div>{''.join(cards)}</div></div>",
        f"<div>{head}{table}<i>(too large to show more)</i></div>",
        f"<div>{head}</div>",
    )


def _fitting(*pages: str) -> str:
    """Return the first page that is small enough."""
    small = (page for page in pages if len(page.encode()) < _PAGE_BYTES)
    return next(small, "<div><i>(too large to show)</i></div>")


@_never_raising
def bars_html(title: str, bars: Sequence[Bars], lines: Sequence[str]) -> str:
    """Return a page of bars and lines of text."""
    colours = ("#4084d6", "#e39b3b", "#5aa469", "#a06cc8", "#c65b5b", "#8c8c8c")
    drawn = []
    for bar in bars:
        total = sum(bar.shares.values()) or 1.0
        parts, names = [], []
        for (name, size), colour in zip(bar.shares.items(), colours, strict=False):
            share = 100 * size / total
            parts.append(
                f'<span style="display:inline-block;height:14px;width:{share:.1f}%;background:{colour}"></span>'
            )
            names.append(
                f'<span style="color:{colour}">■</span> {_escaped(name)} {share:.0f} %&ensp;'
            )
        drawn.append(
            f'<div>{_escaped(bar.title)}</div><div style="width:480px;white-space:nowrap;font-size:0">{"".join(parts)}</div>'
            f'<div style="font-size:12px">{"".join(names)}</div>'
        )
    text = "<br>".join(map(_escaped, lines))
    return _fitting(f"<div><b>{_escaped(title)}</b>{''.join(drawn)}<div>{text}</div></div>")


def _card(pictures: _Pictures, number: str, sample: object) -> str:
    head = f'<div style="opacity:.6">{_escaped(number)}</div>'
    try:
        if isinstance(sample, Exception):
            title, body = "", _wrong(sample)
        else:
            fields = sample if isinstance(sample, Mapping) else {"": sample}
            title, body = _card_body(pictures, fields)
    except Exception as error:  # noqa: BLE001  (any error of the user's types)
        title, body = "", _wrong(error)
    return f'<div style="{_CARD}" title="{title}">{head}{body}</div>'


def _card_body(pictures: _Pictures, sample: Mapping[Any, Any]) -> tuple[str, str]:
    fields = [(_string(name), value) for name, value in islice(sample.items(), _FIELDS_SHOWN)]
    key = next((value for name, value in fields if name == "__key__"), "")
    fields = [(name, value) for name, value in fields if not name.startswith("__")]
    kinds, picture, texts = _kinds(fields), "", list[str]()
    for name, value in fields:
        picture = picture or pictures.of_field(name, value, kinds[name], _SIDE)
        if len(texts) < _CARD_TEXTS and not _has_many_numbers(value):
            text = _excerpt(name, value)
            line = f"{_cut(name)}: {text}"[:_CARD_CHARACTERS]
            texts += [f"<div>{_escaped(line)}</div>"] if text else []
    return _escaped(_string(key)[:_CARD_CHARACTERS]), picture + "".join(texts)


def _kinds(fields: Sequence[tuple[str, Any]]) -> Mapping[str, str]:
    return kinds_of([name for name, _ in fields if not name.startswith("__")])


def _excerpt(name: str, value: Any) -> str:
    """Return the beginning of a value as text; empty for bytes that are no text, the name of its type if it cannot be read."""
    try:
        if name == "__url__":
            text = _string(value)
            return _cut(redact(text), _TEXT_CHARACTERS) if len(text) <= _URL_CHARACTERS else ""
        if isinstance(value, bytes):
            if kinds_of([name])[name] not in ("text", "json", "class"):
                return ""
            value = value[: 4 * _TEXT_CHARACTERS].decode("utf-8", "replace")
        if _is_array(value):
            return _cut(_numbers(value), _TEXT_CHARACTERS)
        text = value if isinstance(value, str) else _written(value)
        return _cut(text, _TEXT_CHARACTERS)
    except Exception:  # noqa: BLE001  (any error of the user's types)
        return type(value).__name__


def _numbers(value: Any) -> str:
    """Return the first numbers of an array."""
    array = _to_array(value)
    if array is None:
        return type(value).__name__
    first = array.flat[:8]  # copies only these
    if array.dtype.kind not in _NUMBERS:
        return _written(first.tolist()[0] if array.size == 1 else first.tolist())
    return str(first[0]) if array.size == 1 else np.array2string(first, threshold=8, precision=4)


def _size(value: Any) -> str:
    """Return the type of a value, with its size."""
    try:
        if isinstance(value, bytes):
            return plural(len(value), "byte")
        if _is_array(value):
            # Its own words: converting it might copy it from a GPU.
            dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
            return _cut(f"{dtype} {'x'.join(map(str, islice(_shape(value), 9))) or 'number'}")
        if isinstance(value, list | tuple):
            return _cut(f"{type(value).__name__} of {len(value)}")
        if isinstance(value, type):
            return _cut(f"class {value.__name__}")
    except Exception:  # noqa: BLE001, S110  (any error of the user's types)
        pass
    return _cut(type(value).__name__)


def _is_array(value: Any) -> bool:
    """Return whether a value says that it can be a numpy array; a class is none."""
    try:
        return hasattr(value, "__array__") and not isinstance(value, str | bytes | type)
    except Exception:  # noqa: BLE001  (of the user's __getattr__)
        return False


def _to_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return an array or tensor as numpy's; None if it is none, is large, or cannot be one, as a sparse tensor.

    This room does not import torch: a tensor is what has its methods.
    """
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if not _is_array(value):
        return None
    try:
        if math.prod(_shape(value)) > _NUMBERS_CONVERTED:
            return None
        if hasattr(value, "detach"):
            value = value.detach().cpu()
        try:
            return np.asarray(value)
        except Exception:  # noqa: BLE001  (numpy has no bfloat16)
            return np.asarray(value.float())
    except Exception:  # noqa: BLE001  (any error of the user's types)
        return None


def _thinned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return every n-th number of a long line: a picture shows no more."""
    return array[:: -(-len(array) // _LINE_NUMBERS)] if array.ndim == 1 and array.size else array


def _has_many_numbers(value: Any) -> bool:
    return _is_array(value) and math.prod(_shape(value)) != 1


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of an array; empty for all other values."""
    try:
        shape = getattr(value, "shape", ())
        return tuple(map(int, shape)) if isinstance(shape, tuple) else ()
    except Exception:  # noqa: BLE001  (any error of the user's types)
        return ()


def _columns(batch: Any) -> tuple[list[tuple[str, Any]], int]:
    """Return the columns that are shown, with the number of the others."""
    if isinstance(batch, Mapping):
        columns = [(_string(name), one) for name, one in islice(batch.items(), _FIELDS_SHOWN)]
        return columns, len(batch) - len(columns)
    if isinstance(batch, tuple):
        columns = [(str(place), one) for place, one in enumerate(batch[:_FIELDS_SHOWN])]
        return columns, len(batch) - len(columns)
    return [("", batch)], 0


def _length(column: Any) -> int | None:
    if isinstance(column, list | tuple):
        return len(column)
    shape = _shape(column)
    return shape[0] if shape else None


class _Writer:
    """Writes values as ``repr`` does, but stops after the characters that are shown: a list of millions takes ``repr`` seconds."""

    def __init__(self, characters: int) -> None:
        self.parts: list[str] = []
        self._left = characters

    def add(self, text: str) -> None:
        """Add a piece."""
        self.parts.append(text)
        self._left -= len(text)

    def write(self, value: Any, depth: int = 0) -> None:
        """Add a value, as far as there is room."""
        name = type(value).__name__
        if self._left <= 0 or depth > _DEPTH_SHOWN:
            self.add("…")
        elif isinstance(value, str | bytes | bytearray):
            self.add(repr(value[: max(1, self._left)]))
        elif isinstance(value, Mapping):
            self._write_items("{", value.items(), "}", depth)
        elif isinstance(value, list | deque):
            self._write_items("[", value, "]", depth)
        elif isinstance(value, tuple):
            self._write_items("(" if type(value) is tuple else f"{name}(", value, ")", depth)
        elif isinstance(value, set | frozenset):
            self._write_items(f"{name}(", value, ")", depth)
        elif depth and _is_array(value) and not isinstance(value, np.generic):
            self.add(_size(value))
        else:
            self.add(_repr_of(value))

    def _write_items(self, begin: str, items: Iterable[Any], end: str, depth: int) -> None:
        self.add(begin)
        for number, item in enumerate(items):
            if self._left <= 0:
                break
            if number:
                self.add(", ")
            if begin == "{":
                self.write(item[0], depth + 1)
                self.add(": ")
                self.write(item[1], depth + 1)
            else:
                self.write(item, depth + 1)
        self.add(end)


def _written(value: Any) -> str:
    writer = _Writer(_TEXT_CHARACTERS + 1)
    writer.write(value)
    return "".join(writer.parts)


def _repr_of(value: Any) -> str:
    try:
        return repr(value)[: _TEXT_CHARACTERS + 1]
    except Exception:  # noqa: BLE001  (any error of the user's types)
        return type(value).__name__


def _string(value: Any) -> str:
    """Return a name or key as text, whatever it is."""
    try:
        return str(value) if isinstance(value, str) else _written(value)
    except Exception:  # noqa: BLE001  (any error of the user's types)
        return type(value).__name__


def _cut(text: str, characters: int = _NAME_CHARACTERS) -> str:
    return text if len(text) <= characters else f"{text[:characters]}…"


def _table(facts: Sequence[tuple[str, str]]) -> str:
    rows = (
        _row((_escaped(_cut(_string(name))), _escaped(_cut(_string(fact), _FACT_CHARACTERS))))
        for name, fact in facts[: _FIELDS_SHOWN + 1]  # and the row of those left out
    )
    return f"<table>{''.join(rows)}</table>"


def _row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"


def _wrong(error: Exception) -> str:
    try:
        text = describe_error(error)[:_ERROR_CHARACTERS]
    except Exception:  # noqa: BLE001  (of the user's __str__)
        text = type(error).__name__
    return f'<span style="{_WRONG}">{_escaped(_cut(text, _ERROR_CHARACTERS))}</span>'


def _escaped(text: str) -> str:
    return html.escape(text.encode("utf-8", "replace").decode())


class SampleView(dict[str, Any]):
    """A sample that a notebook shows as a table; else a plain dict."""

    def _repr_html_(self) -> str:
        return sample_html(self)


def show(value: Any) -> Shown:
    """Return an object that a notebook shows: a dataset, a sample, or a batch with its pictures.

    Datasets, ``loader.stats()`` and the samples of ``dataset.by_number()`` show themselves; batches are plain dicts and tuples, which do not.

    Args:
        value: A dataset, a sample (a dict with ``__key__``), or a batch as a loader returns it.
    """
    if _is_sample(value):
        return Shown(sample_html(value), "<sample>")
    return _shown_by_itself(value) or Shown(batch_html(value), "<batch>")


def _is_sample(value: Any) -> bool:
    try:
        return isinstance(value, Mapping) and isinstance(value.get("__key__"), str)
    except Exception:  # noqa: BLE001  (any error of the user's types)
        return False


def _shown_by_itself(value: Any) -> Shown | None:
    """Return what a value shows of itself; None if it does not, or cannot."""
    if isinstance(value, type):  # its method would need an object
        return None
    try:
        page, text = value._repr_html_(), repr(value)
    except Exception:  # noqa: BLE001  (most values have no such method)
        return None
    return Shown(page, text) if isinstance(page, str) else None


def samples_html(title: str, samples: Samples, numbers: Numbers | range, pipeline: Pipeline) -> str:
    """Return the page of a dataset whose samples have numbers.

    Args:
        title: Name of its class.
        samples: All samples.
        numbers: Numbers of the samples of the dataset.
        pipeline: Its steps.
    """
    facts = {
        "samples": f"{len(numbers):,}",
        "shards": f"{samples.num_shards:,}",
        "size": f"{samples.total_bytes / 1e6:,.1f} MB",
        "fields": _listed(samples.fields or ()) or "unknown before a sample is read",
        "steps": " > ".join(pipeline.steps) or "none",
    }
    return dataset_html(title, facts, _spread(samples, numbers))


def stream_html(title: str, pipeline: Pipeline) -> str:
    """Return the page of a dataset whose samples have no numbers."""
    hint = "unknown: run 'shardstream index' once to count and show samples"
    return dataset_html(title, {"samples": hint, "steps": " > ".join(pipeline.steps) or "none"}, ())


def _listed(names: Sequence[str]) -> str:
    shown = [name[:_NAME_CHARACTERS] for name in names[:_NAMES_SHOWN]]
    more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def _spread(samples: Samples, numbers: Numbers | range) -> Iterator[tuple[int, object]]:
    """Yield samples from equal distances, as stored, with their places; an error of the store in place of one."""
    count = min(len(numbers), _SAMPLES_SHOWN)
    places = [n * len(numbers) // count for n in range(count)]
    chosen = np.array([numbers[place] for place in places], dtype=np.int64)
    fetcher = samples.open_fetcher()
    try:
        unique, inverse = np.unique(chosen, return_inverse=True)
        found = fetcher.samples(unique)
        for place, at in zip(places, inverse.tolist(), strict=True):
            yield place, found[at]
    except Exception as error:  # noqa: BLE001  (a notebook shows what is wrong)
        yield 0, error
    finally:
        fetcher.close()
