"""Draw the speeds of a run, one small chart per setting."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from benchmarks.report import figures, number
from benchmarks.targets import is_limit

_OURS, _PEER, _LIMIT = "#1b7f5c", "#b7bec7", "#5b6470"
_COLUMNS = 3


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw a bar for each comparable contestant; settings with one contestant are omitted."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (only for the picture)

    settings = [s for s in document["settings"] if len(_bars(s)) > 1]
    rows = max(1, math.ceil(len(settings) / _COLUMNS))
    figure = Figure(figsize=(5.2 * _COLUMNS, 0.6 + 2.6 * rows), layout="constrained")
    grid: Any = figure.subplots(rows, _COLUMNS, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, setting in zip(grid.flat, settings, strict=False):
        axes.set_axis_on()
        _draw_setting(axes, setting)
    figure.suptitle(
        "shardstream and its peers: medians; whiskers from minimum to maximum", fontsize=14
    )
    figure.savefig(path, dpi=110)


def _bars(setting: dict[str, Any]) -> list[tuple[str, list[float]]]:
    """Return contestants with their figures, the best first, the limit at the end."""
    found = [(name, figures(setting, name)) for name in setting["results"]]
    sign = 1 if setting["metric"] == "seconds" else -1
    return sorted(
        ((name, values) for name, values in found if values),
        key=lambda bar: (is_limit(bar[0]), sign * statistics.median(bar[1])),
    )


def _colour(name: str) -> str:
    if is_limit(name):
        return _LIMIT
    return _OURS if name.startswith("shardstream") else _PEER


def _draw_setting(axes: Any, setting: dict[str, Any]) -> None:
    bars = _bars(setting)
    names = [name.replace("limit-", "limit: ") for name, _ in bars]
    middles = [statistics.median(values) for _, values in bars]
    shown = [middle for (name, _), middle in zip(bars, middles, strict=True) if not is_limit(name)]
    top = max(shown) * 1.25
    for place, ((name, values), middle) in enumerate(zip(bars, middles, strict=True)):
        axes.barh(place, min(middle, top), color=_colour(name), height=0.72)
        if middle <= top:
            axes.plot([min(values), min(max(values), top)], [place, place], color="black", lw=1)
        beyond = " \u2192" if middle > top else ""
        axes.text(
            min(max(*values, middle), top) + top * 0.015,
            place,
            f"{number(middle)}{beyond}",
            va="center",
            fontsize=9,
            fontweight="bold" if name.startswith("shardstream") else "normal",
        )
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, top * 1.2)
    axes.set_xticks([])
    better = "less is better" if setting["metric"] == "seconds" else "more is better"
    axes.set_title(
        f"{setting['row']}: {setting['label']}\n{setting['metric']}, {better}",
        fontsize=10,
        loc="left",
    )
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
