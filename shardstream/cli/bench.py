"""``shardstream bench``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardstream.cli.options import (
    StorageOption,
    Urls,
    Version,
    parse_options,
    parse_version,
    terminal_bar,
)
from shardstream.cli.terminal_text import aligned
from shardstream.errors import OptionError, plural

if TYPE_CHECKING:
    from shardstream.loader import Trial

_BAR_CHARACTERS = 30
_ANY_NUMBER = 1 << 30
_HEADINGS = ("workers", "samples/s", "MB/s", "first batch", "")


_Workers = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=256,
        metavar="N",
        help="Most workers to try: 0, 1, 2, 4, ... N; by default the CPU cores.",
    ),
]
_Decode = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="What decode() gets: rgb8, torchrgb, audio, video, ...; may be repeated. By default fields stay bytes.",
    ),
]


def bench(  # noqa: PLR0913  (a command's options)
    urls: Urls,
    *,
    workers: _Workers = None,
    decode: _Decode = None,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Samples of a batch.")] = 64,
    seconds: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="Time for each number of workers.")
    ] = 5.0,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Read in the order of the shards, not shuffled.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the rates (PNG, SVG); needs matplotlib."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    version: Version = None,
    option: StorageOption = None,
) -> None:
    """Measure how fast a dataset is read on this machine, and recommend the number of workers.

    Reads shuffled batches with 0, 1, 2, 4, ... workers, a few seconds each, says what limits the fastest, and what to change.
    Samples that differ in size are measured without stacking them; bad samples are skipped and counted.
    Bytes of local shards come from the page cache if they were read before.

    Examples:
      shardstream bench data/train/ --decode rgb8
      shardstream bench s3://bucket/train/ --workers 8 --plot rates.png
    """
    from shardstream.loader import (  # noqa: PLC0415  (torch takes over a second)
        ShardDataset,
        fewest_workers,
        run_trials,
    )
    from shardstream.pipeline import SkipBudget  # noqa: PLC0415

    if plot is not None:
        _check_can_plot()
    most = len(os.sched_getaffinity(0)) if workers is None else workers
    numbers = sorted({0, most, *(2**power for power in range(9) if 2**power < most)})
    dataset = ShardDataset(
        list(urls),
        shuffle=not in_order,
        on_error=SkipBudget(samples=_ANY_NUMBER),  # they are counted
        storage_options=parse_options(option, *urls),
        version=parse_version(version),
    )
    if decode:
        dataset = dataset.decode(*decode)
    trials = []
    with _progress() as update:
        for trial in run_trials(dataset, workers=numbers, batch_size=batch_size, seconds=seconds):
            trials.append(trial)
            update(completed=len(trials), total=len(numbers))
    chosen = fewest_workers(trials)
    if as_json:
        typer.echo(json.dumps(_as_json(trials, chosen), indent=1))
    else:
        _show(trials, chosen)
    if plot is not None:
        _draw(trials, chosen, plot)


@contextmanager
def _progress() -> Iterator[Callable[..., None]]:
    if not sys.stderr.isatty():
        yield lambda **_: None
        return
    with terminal_bar("measuring") as update:
        yield update


def _show(trials: Sequence[Trial], chosen: Trial) -> None:
    best = max(trial.samples_per_s for trial in trials)
    rows = [_HEADINGS]
    for trial in trials:
        bar = "█" * max(1, round(_BAR_CHARACTERS * trial.samples_per_s / best))
        rows.append(
            (
                str(trial.workers),
                f"{trial.samples_per_s:,.0f}",
                "?" if trial.mb_per_s is None else f"{trial.mb_per_s:,.1f}",
                f"{trial.first_batch_s:.2f} s",
                bar + (" recommended" if trial is chosen else ""),
            )
        )
    for line in aligned(rows, right=frozenset({0, 1, 2, 3})):
        typer.echo(line)
    if (bad := max(trial.bad_samples for trial in trials)) > 0:
        typer.echo(f"\n{plural(bad, 'bad sample')} skipped: 'shardstream verify' names them")
    typer.echo(f"\nnum_workers={chosen.workers} is recommended for this dataset on this machine.")
    if (verdict := chosen.stats.verdict) is not None:
        typer.echo(str(replace(verdict, workers=None)))  # their number was measured


def _as_json(trials: Sequence[Trial], chosen: Trial) -> dict[str, Any]:
    verdict = chosen.stats.verdict
    return {
        "trials": [
            {
                "workers": trial.workers,
                "samples_per_s": trial.samples_per_s,
                "mb_per_s": trial.mb_per_s,
                "first_batch_s": trial.first_batch_s,
                "bad_samples": trial.bad_samples,
            }
            for trial in trials
        ],
        "recommended_workers": chosen.workers,
        "bottleneck": None if verdict is None else verdict.bottleneck,
        "advice": [] if verdict is None else [verdict.sentence, *verdict.advice],
    }


def _check_can_plot() -> None:
    try:
        import matplotlib  # noqa: F401, PLC0415  (optional)
    except ImportError:
        raise OptionError("--plot needs matplotlib: pip install matplotlib") from None


def _draw(trials: Sequence[Trial], chosen: Trial, path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  (optional)

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.bar(
        [str(trial.workers) for trial in trials],
        [trial.samples_per_s for trial in trials],
        color=["#2f6fde" if trial is chosen else "#b7c6e0" for trial in trials],
    )
    axes.bar_label(bars, fmt="{:,.0f}")
    axes.set_xlabel("num_workers")
    axes.set_ylabel("samples/s")
    axes.set_title(f"{plural(chosen.workers, 'worker')} recommended")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
