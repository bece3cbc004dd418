"""Show datasets, samples, batches and timings in a notebook: HTML without scripts, all text escaped, under 100 kB."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardstream.display.field_kinds import kinds_of
from shardstream.display.pictures import Picture, render, render_value
from shardstream.errors import plural, redact

_PICTURES_BYTES = 80_000  # of all pictures of a page, as text
_SIDE, _LARGE_SIDE = 72, 192
_TEXT_CHARACTERS, _ERROR_CHARACTERS, _CARD_CHARACTERS = 300, 200, 40
_FIELDS_SHOWN, _CARDS_SHOWN = 40, 24
_PICTURED = ("picture", "mask", "video", "sound", "array")
_CARD = "display:inline-block;vertical-align:top;width:88px;margin:4px;font-size:11px;overflow-wrap:anywhere"
_CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0"
_WRONG = "color:#c62828"


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
            else:
                found = render_value(value, side)
        except Exception as error:  # noqa: BLE001  (any error of a decoder: the page shows it)
            return _wrong(error)
        return "" if found is None else self._tag(found)

    def _tag(self, picture: Picture) -> str:
        data = base64.b64encode(picture.data).decode()
        if len(data) > self._left:
            return "<i>(too many pictures)</i>"
        self._left -= len(data)
        return f'<img src="data:{picture.media_type};base64,{data}" style="max-width:100%">'


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
    return f"<div><b>{_escaped(title)}</b>{_table(facts)}<div>{''.join(cards)}</div></div>"


def sample_html(sample: Mapping[str, Any]) -> str:
    """Return the page of a sample: a row for each field with its size or type, and its picture or beginning."""
    pictures, rows = _Pictures(), []
    kinds = kinds_of([name for name in sample if not name.startswith("__")])
    for name, value in list(sample.items())[:_FIELDS_SHOWN]:
        kind = kinds.get(name, "other")
        picture = pictures.of_field(name, value, kind, _LARGE_SIDE)
        text = "" if picture else _escaped(_excerpt(name, value))
        rows.append((_escaped(name), _escaped(_size(value)), picture + text))
    more = f"<i>and {len(sample) - len(rows)} more fields</i>" if len(sample) > len(rows) else ""
    return f"<div><table>{''.join(map(_row, rows))}</table>{more}</div>"


def batch_html(batch: Any) -> str:
    """Return the page of a batch: a dict or tuple of columns, or a list of items."""
    columns = _columns(batch)
    facts = {name: _size(column) for name, column in columns.items()}
    lengths = [length for column in columns.values() if (length := _length(column)) is not None]
    pictures, count = _Pictures(), min(lengths, default=0)
    cards = [
        _card(
            pictures,
            str(n),
            {
                name: column[n]
                for name, column in columns.items()
                if (_length(column) or 0) >= count
            },
        )
        for n in range(min(count, _CARDS_SHOWN))
    ]
    return f"<div><b>batch of {count}</b>{_table(facts)}<div>{''.join(cards)}</div></div>"


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
    return f"<div><b>{_escaped(title)}</b>{''.join(drawn)}<div>{text}</div></div>"


def _card(pictures: _Pictures, number: str, sample: object) -> str:
    head = f'<div style="opacity:.6">{_escaped(number)}</div>'
    if isinstance(sample, Exception):
        return f'<div style="{_CARD}">{head}{_wrong(sample)}</div>'
    if not isinstance(sample, Mapping):
        sample = {"": sample}
    fields = {name: value for name, value in sample.items() if not name.startswith("__")}
    kinds = kinds_of([*fields])
    picture = ""
    for name, value in fields.items():
        picture = picture or pictures.of_field(name, value, kinds[name], _SIDE)
    texts = [
        f"<div>{_escaped(f'{name}: {text}'[:_CARD_CHARACTERS])}</div>"
        for name, value in fields.items()
        if (text := _excerpt(name, value)) and (not _is_array(value) or np.asarray(value).size == 1)
    ]
    key = _escaped(str(sample.get("__key__", ""))[:_CARD_CHARACTERS])
    return f'<div style="{_CARD}" title="{key}">{head}{picture}{"".join(texts[:3])}</div>'


def _excerpt(name: str, value: Any) -> str:
    """Return the beginning of a value as text; empty for bytes that are no text."""
    if name == "__url__":
        value = redact(str(value))
    if isinstance(value, bytes):
        kind = kinds_of([name])[name]
        if kind not in ("text", "json", "class"):
            return ""
        value = value[: 4 * _TEXT_CHARACTERS].decode("utf-8", "replace")
    if _is_array(value):
        flat = np.asarray(value).reshape(-1)
        return (
            str(flat[0])
            if flat.size == 1
            else np.array2string(flat[:8], threshold=8, precision=4)[:_TEXT_CHARACTERS]
        )
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _TEXT_CHARACTERS else f"{text[:_TEXT_CHARACTERS]}…"


def _size(value: Any) -> str:
    if isinstance(value, bytes):
        return plural(len(value), "byte")
    if _is_array(value):
        array = np.asarray(value)
        return f"{array.dtype} {'x'.join(map(str, array.shape)) or 'number'}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and not isinstance(value, str | bytes)


def _columns(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return {str(name): column for name, column in batch.items()}
    if isinstance(batch, tuple):
        return {str(place): column for place, column in enumerate(batch)}
    return {"": batch}


def _length(column: Any) -> int | None:
    if isinstance(column, list | tuple):
        return len(column)
    shape: tuple[int, ...] = getattr(column, "shape", ())
    return int(shape[0]) if len(shape) else None


def _table(facts: Mapping[str, str]) -> str:
    rows = (_row((_escaped(name), _escaped(fact))) for name, fact in facts.items())
    return f"<table>{''.join(rows)}</table>"


def _row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"


def _wrong(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
    return f'<span style="{_WRONG}">{_escaped(text)}</span>'


def _escaped(text: str) -> str:
    return html.escape(text.encode("utf-8", "replace").decode())
