"""Draw the README's figure from docs/benchmarks.json: samples per second of shardstream and its peers, as an SVG.

The colours fit light and dark pages: an SVG in an image cannot follow the switch of the page that shows it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

# Row and label in benchmarks.json, the series of ours that is drawn, and the title.
PANELS = (
    ("small-local", "0 workers", "shardstream", "small samples, local disk"),
    ("photo-local", "0 workers", "shardstream", "photos of 100 kB, local disk"),
    ("s3-slow", "1 worker", "shardstream", "photos, S3 with 30 ms latency, 1 worker"),
    ("photo-train", "2 workers", "shardstream+fast", "photos decoded and cropped, 2 workers"),
)
PEERS = ("litdata", "webdataset", "mosaicml", "datasets", "s3torchconnector", "files")
_SHOWN = 4  # peers in a panel, the fastest
_BAR, _LINE, _WIDTH = 15, 21, 470
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_OURS, _THEIRS, _TEXT = "#1f7a4d", "#8b97a5", "#748190"


def speed_chart(run: Mapping[str, Any]) -> str:
    """Return the SVG of a run of the benchmark."""
    height = 2 * (34 + (1 + _SHOWN) * _LINE + 22)
    size = f'viewBox="0 0 {2 * _WIDTH + 20} {height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{_FONT}">',
        f"  <title>Samples per second, {run['date']}</title>",
    ]
    for number, (row, label, ours, title) in enumerate(PANELS):
        (setting,) = [one for one in run["settings"] if (one["row"], one["label"]) == (row, label)]
        x, y = (number % 2) * (_WIDTH + 20), (number // 2) * (height // 2)
        lines += _panel(_rates(setting["results"], ours), title, x, y)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _rates(results: Mapping[str, Any], ours: str) -> dict[str, float]:
    """Return the median samples per second of ours and of the fastest peers."""
    rates = {
        name: statistics.median(one["samples"] / one["seconds"] for one in results[name])
        for name in (ours, *PEERS)
        if results.get(name) and not any(one["wrong"] for one in results[name])
    }
    peers = sorted((name for name in rates if name != ours), key=lambda name: -rates[name])
    return {"shardstream": rates[ours]} | {name: rates[name] for name in peers[:_SHOWN]}


def _panel(rates: Mapping[str, float], title: str, x: int, y: int) -> Iterator[str]:
    yield f'  <text x="{x + 2}" y="{y + 20}" font-size="15" font-weight="600" fill="{_TEXT}">{title}</text>'
    for number, (name, rate) in enumerate(rates.items()):
        top = y + 34 + number * _LINE
        width = max(2, round(240 * rate / max(rates.values())))
        colour, weight = (_OURS, 600) if number == 0 else (_THEIRS, 400)
        yield f'  <text x="{x + 122}" y="{top + 12}" font-size="13" font-weight="{weight}" fill="{_TEXT}" text-anchor="end">{name}</text>'
        yield f'  <rect x="{x + 130}" y="{top}" width="{width}" height="{_BAR}" rx="3" fill="{colour}"/>'
        yield f'  <text x="{x + 136 + width}" y="{top + 12}" font-size="13" font-weight="{weight}" fill="{_TEXT}">{rate:,.0f}/s</text>'
