"""Render the document of a run as tables, for the terminal and for the docs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.targets import is_limit

Setting = dict[str, Any]
COLUMNS = ("", "median", "min to max", "ours to it", "MB/s", "CPU s/GB")
_HIGHER = {"samples/s", "members/s"}
_MIN_REPETITIONS = 3  # from which a range says something


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, minimum and maximum.

    >>> spread([3.0, 1.0, 2.0, 9.0])
    (2.5, 1.0, 9.0)
    """
    return statistics.median(values), min(values), max(values)


def figures(setting: Setting, name: str) -> list[float]:
    """Return the compared figure of each repetition of a contestant; nothing if one of them was wrong."""
    found = setting["results"].get(name, [])
    if not found or any(result["wrong"] for result in found):
        return []
    if setting["metric"] in _HIGHER:
        return [result["samples"] / result["seconds"] for result in found]
    return [result["seconds"] for result in found]


def number(value: float) -> str:
    """Return a figure with three significant digits.

    >>> number(123456.7), number(12.345), number(0.012345)
    ('123,457', '12.3', '0.0123')
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def advantage(setting: Setting, name: str) -> float | None:
    """Return the speed of shardstream divided by a contestant's, from the medians; None if unknown."""
    ours, theirs = figures(setting, setting["ours"]), figures(setting, name)
    if not ours or not theirs:
        return None
    mine, other = statistics.median(ours), statistics.median(theirs)
    return mine / other if setting["metric"] in _HIGHER else other / mine


def lines(setting: Setting) -> Iterator[tuple[str, ...]]:
    """Yield a line of the table for each contestant, the fastest first, limits last, with the reason for wrong ones."""

    def place(name: str) -> tuple[bool, bool, float]:
        values = figures(setting, name)
        middle = statistics.median(values) if values else 0.0
        return (
            is_limit(name),
            not values,
            -middle if setting["metric"] in _HIGHER else middle,
        )

    for name in sorted(setting["results"], key=place):
        values = figures(setting, name)
        found = setting["results"][name]
        if not values:
            wrong = next((result["wrong"] for result in found if result["wrong"]), "not measured")
            yield (name, f"not counted: {wrong}", "", "", "", "")
            continue
        middle, least, most = spread(values)
        ratio = advantage(setting, name)
        share = "" if ratio is None or name == setting["ours"] else f"{ratio:.2f} x"
        rates = [result["payload_bytes"] / result["seconds"] / 1e6 for result in found]
        costs = [
            result["cpu_s"] * 1e9 / result["payload_bytes"]
            for result in found
            if result["payload_bytes"]
        ]
        yield (
            name,
            number(middle),
            f"{number(least)} to {number(most)}",
            share,
            number(statistics.median(rates)) if any(rates) else "",
            number(statistics.median(costs)) if any(costs) else "",
        )


def target_lines(setting: Setting) -> Iterator[str]:
    """Yield a sentence for each target; for a missed one, with the value of the machine's limit."""
    for target in setting["targets"]:
        sign = "at most" if target["at_most"] else "at least"
        wanted = f"{target['text']}: wanted {sign} {number(target['wanted'])}"
        if target["reached"] is None:
            yield f"{wanted}, not known"
        elif target["met"]:
            yield f"{wanted}, is {number(target['reached'])}: met"
        else:
            limit = target["limit"]
            limit_is = f" ({limit['name']} is {number(limit['reached'])})" if limit else ""
            yield f"{wanted}, is {number(target['reached'])}: NOT MET{limit_is}"


def extra_lines(setting: Setting) -> Iterator[str]:
    """Yield a sentence for each contestant with additional figures."""
    for name, found in setting["results"].items():
        if found and found[0]["extra"] and not is_limit(name) and not found[0]["wrong"]:
            pairs = (
                f"{key} {number(statistics.median(result['extra'][key] for result in found))}"
                for key in found[0]["extra"]
            )
            yield f"{name}: {', '.join(pairs)}"


def noise(document: dict[str, Any]) -> str:
    """Return how much equal measurements of a run differ, which shows how busy its host was with other work.

    >>> done = [{"seconds": s, "samples": 1, "wrong": ""} for s in (1.0, 0.8, 0.9)]
    >>> setting = {"metric": "seconds", "results": {"a": done, "b": done[:1]}}
    >>> noise({"settings": [setting]})
    'repetitions of a measurement differ by 22 % (median of 1), by 22 % in the worst tenth'
    """
    repeated = [
        values
        for setting in document["settings"]
        for name in setting["results"]
        if len(values := figures(setting, name)) >= _MIN_REPETITIONS
    ]
    if not repeated:
        return "no measurement was repeated, so the noise of the host is unknown"
    ranges = sorted((max(one) - min(one)) / statistics.median(one) for one in repeated)
    middle, high = statistics.median(ranges), ranges[int(0.9 * len(ranges))]
    return (
        f"repetitions of a measurement differ by {middle:.0%} (median of {len(ranges)}), by {high:.0%} in the worst tenth"
    ).replace("%", " %")


def print_setting(setting: Setting, console: Console) -> None:
    """Print the table of a setting."""
    table = Table(title=title(setting), title_justify="left", title_style="bold", box=None)
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if place else "left", overflow="fold")
    for line in lines(setting):
        style = "bold green" if line[0].startswith(setting["ours"]) else None
        table.add_row(*line, style="dim" if is_limit(line[0]) else style)
    console.print(table)
    for text in extra_lines(setting):
        console.print(f"  {text}", style="dim")
    for text in target_lines(setting):
        style = "red" if "NOT MET" in text else "green" if text.endswith("met") else "yellow"
        console.print(f"  {text}", style=style, highlight=False)
    console.print()


def title(setting: Setting) -> str:
    """Return the heading of a setting."""
    return f"{setting['row']}: {setting['label']} ({setting['metric']})"


def markdown(document: dict[str, Any]) -> str:
    """Return the tables of a run for the docs."""
    machine, versions = document["machine"], document["versions"]
    brake = document["s3_slow"]
    where = (
        f"{document['date']} · {machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB · "
        f"Linux {machine['kernel']}, Python {machine['python']} · load at the start {machine['load']}"
    )
    brake_text = f"`s3-slow`: {brake['latency_ms']} ms to the first byte, {brake['rate_mb_s']:.0f} MB/s a connection."
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts = [where, f"Noise: {noise(document)}.", named, brake_text]
    for setting in document["settings"]:
        rows = [" | ".join(COLUMNS), " | ".join(["---", *["---:"] * (len(COLUMNS) - 1)])]
        rows += [" | ".join(line).replace("\n", " ") for line in lines(setting)]
        parts.append(f"### {title(setting)}")
        parts.append("\n".join(f"| {row} |" for row in rows))
        notes = [*extra_lines(setting), *target_lines(setting)]
        if notes:
            parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"
