"""``shardstream plan``, ``first-use`` and ``bench``: the samples that a training reads or has read, and how fast."""

from __future__ import annotations

import itertools
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardstream.cli.options import (
    AsJson,
    FromOne,
    FromZero,
    load_function,
    parse_options,
    parse_version,
)
from shardstream.cli.terminal import aligned, printable, terminal_bar
from shardstream.errors import OptionError, SampleError, plural
from shardstream.process import num_cores

if TYPE_CHECKING:
    from shardstream.loader import FirstUse, LoaderStats, ShardLoader, StreamDataset
    from shardstream.pipeline import EpochSamples, PlannedSamples, State

_CLOSE = 0.95
"""Share of the best rate that fewer workers must reach to be recommended."""


def plan(  # noqa: PLR0913  (the options of a command)
    urls: Annotated[list[str] | None, typer.Argument()] = None,
    *,
    ranks: Annotated[int, typer.Option(min=1)] = 1,
    workers: Annotated[int, typer.Option(min=0)] = 0,
    batch_size: FromOne = None,
    drop_last: Annotated[bool, typer.Option("--drop-last")] = False,
    shuffle: Annotated[bool | None, typer.Option("--shuffle/--no-shuffle")] = None,
    seed: int | None = None,
    epoch: FromZero = None,
    step: FromZero = None,
    rank: FromZero = None,
    key: Annotated[list[str] | None, typer.Option("--key")] = None,
    number: Annotated[list[int] | None, typer.Option("--number")] = None,
    state: str | None = None,
    dataset: str | None = None,
    version: str | None = None,
    as_json: AsJson = False,
    option: list[str] | None = None,
) -> None:
    """Show which samples a training reads at a step, or when samples come.

    Give ranks, workers and batch size as in the ShardLoaders of the training. Only the keys that are shown are read from the
    shards. Without --step, --key and --number the number of steps is shown.

    Examples:
      shardstream plan data/train/ --shuffle --ranks 8 --workers 2 --batch-size 64 --epoch 3 --step 1200
      shardstream plan data/train/ --shuffle --ranks 8 --workers 2 --batch-size 64 --key 0001234
      shardstream plan --dataset train:make_dataset --ranks 8 --batch-size 64 --step 1200 --rank 3

    Options:
      ranks (N): Ranks of the training.
      workers (N): Loader workers of each rank.
      batch_size (N): Samples of a batch of one rank.
      drop_last: As in ShardLoader.
      shuffle: As in ShardDataset; by default as in --state.
      seed (N): As in ShardDataset; by default 0, or as in --state.
      epoch (N): Epoch, from 0; by default 0, or as in --state.
      step (N): Show the samples of this step, from 0.
      rank (N): With --step: this rank only.
      key (KEY): Show when this sample comes; may be repeated.
      number (N): As --key, by number; may be repeated.
      state (FILE): Count steps from this state of a loader: its JSON, or a checkpoint of save_checkpoint (.pt).
      dataset (MODULE:FUNCTION): Function that returns the dataset of the training (a mix, weights, order=, ...), in
        place of URL. Imports torch.
    """
    if (step is not None) + bool(key) + bool(number) > 1:
        raise typer.BadParameter("give one of --step, --key and --number")
    if rank is not None and step is None:
        raise typer.BadParameter("--rank needs --step")
    options = parse_options(option, *(urls or ()), *([state] if state else ()))
    saved = None if state is None else _read_state(state, options)
    import shardstream as ss  # noqa: PLC0415  (torch takes over a second)

    if dataset is None:
        known = {"version": parse_version(version), "storage_options": options}
        made: Any = _open(urls, {"shuffle": shuffle, "seed": seed}, saved or {}, known)
    elif urls or any(one is not None for one in (shuffle, seed, version)) or (option and not state):
        raise typer.BadParameter(
            "--dataset has its own URL, --shuffle, --seed, --version, --option"
        )
    else:
        made = _call(dataset)
    found = ss.plan(
        made,
        epoch,
        ranks=ranks,
        workers=workers,
        batch_size=batch_size,
        drop_last=drop_last,
        state=saved,
    )
    rows = None
    if step is not None:
        rows = _rows(found, found.samples(step, rank))
    elif key or number:
        rows = _rows(found, found.where(keys=key or None, numbers=number or None))
    if as_json:
        typer.echo(json.dumps(_plan_json(found, rows), indent=1))
    else:
        _show_plan(found, made, rows)


def _open(
    urls: list[str] | None,
    order: dict[str, Any],
    state: State,
    options: dict[str, Any],
) -> Any:
    """Open the dataset of the command, in the order of its options, or else of a state."""
    import shardstream as ss  # noqa: PLC0415

    if not urls:
        raise typer.BadParameter("give a URL or --dataset")
    own = {name: state.get(name, 0) if value is None else value for name, value in order.items()}
    own["shuffle"] = bool(own["shuffle"])
    return ss.ShardDataset(urls, read=ss.ReadOptions(index="require"), **own, **options)


def _call(name: str) -> Any:
    """Return the dataset that the function of ``--dataset`` makes."""
    made = load_function(name, "--dataset")()
    if not hasattr(made, "pipeline"):
        raise OptionError(
            f"the function of --dataset returned {type(made).__name__}; it must return a ShardDataset, mix or join"
        )
    return made


def _read_state(url: str, options: dict[str, Any]) -> State:
    """Return the state of a loader in a file of JSON, in a checkpoint, of which nothing is run, or in the latest one of a folder."""
    from shardstream.pipeline import parse_state, state_in  # noqa: PLC0415
    from shardstream.storage import Storage  # noqa: PLC0415

    storage = Storage(options if "://" in url else None)
    if url.endswith((".pt", ".pth", "/")) or os.path.isdir(url):
        from shardstream.loader import find_checkpoints, read_values  # noqa: PLC0415

        return state_in(read_values(find_checkpoints(url, storage)[-1], storage))
    return parse_state(storage.read_bounded(url).decode(errors="replace"))


def _rows(found: EpochSamples, samples: PlannedSamples) -> list[dict[str, Any]]:
    columns: dict[str, list[Any]] = {
        "step": samples.steps.tolist(),
        "rank": samples.ranks.tolist(),
        "worker": samples.workers.tolist(),
        "place": samples.places.tolist(),
        "number": samples.numbers.tolist(),
        "copy": samples.copies.tolist(),
        "key": found.keys(samples),
    }
    datasets = found.datasets(samples)
    if any(datasets):
        columns["dataset"] = datasets
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _show_plan(found: EpochSamples, dataset: Any, rows: list[dict[str, Any]] | None) -> None:
    order = dataset.pipeline.source
    how = f"shuffled with seed {order.seed}" if order.shuffle else "in stored order"
    typer.echo(f"{found.extent}, {how}")
    if not found.is_exact:
        typer.echo(
            "some of these samples may be left out or replaced: by select, on_error=, or as they were deleted since"
        )
    if not rows:
        hint = "show one with --step, --key or --number"
        typer.echo(hint if rows is None else "no such sample comes in it")
        return
    names = [name for name in rows[0] if name != "copy" or any(row["copy"] for row in rows)]
    cells = [tuple(_cell(row[name]) for name in names) for row in rows]
    right = frozenset(range(names.index("key")))
    for line in aligned([tuple(names), *cells], right=right):
        typer.echo(line)


def _cell(value: Any) -> str:
    return "?" if value is None else printable(str(value))


def _plan_json(found: EpochSamples, rows: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return a plan as JSON values; with samples, if some were asked for."""
    shown = {
        "epoch": found.epoch,
        "consumed": found.steps.consumed,
        "steps": found.num_steps,
        "ranks": found.num_ranks,
        "is_exact": found.is_exact,
    }
    return shown if rows is None else shown | {"samples": rows}


def first_use(  # noqa: PLR0913  (the options of a command)
    urls: Annotated[list[str] | None, typer.Argument()] = None,
    *,
    run: Annotated[str, typer.Option()],
    key: Annotated[list[str] | None, typer.Option("--key")] = None,
    keys: Annotated[str | None, typer.Option("--keys")] = None,
    number: Annotated[list[int] | None, typer.Option("--number")] = None,
    dataset: str | None = None,
    version: str | None = None,
    as_json: AsJson = False,
    option: list[str] | None = None,
) -> None:
    """Find the last checkpoint of a run before any of some samples was used, and when each was used first.

    Order, ranks, batch size and version of the dataset come from the last state of the run.

    Examples:
      shardstream first-use s3://bucket/train/ --run s3://bucket/run/ --keys takedown.txt
      shardstream first-use --dataset train:make_dataset --run run/ --number 17 --json

    Options:
      run (PATH): Folder of the checkpoints of save_checkpoint, one of them (.pt), or the JSON of a state (.json).
      key (KEY): A sample; may be repeated.
      keys (FILE): A text file (.txt) with a key on each line.
      number (N): As --key, by number; may be repeated.
      dataset (MODULE:FUNCTION): Function that returns the dataset of the training (a mix, weights, order=, ...) with its ranks
        (placement=), in place of URL.
    """
    if bool(key) + bool(keys) + bool(number) != 1:
        raise typer.BadParameter("give one of --key, --keys and --number")
    options = parse_options(option, *(urls or ()), run)
    import shardstream as ss  # noqa: PLC0415  (torch takes over a second)

    states = ss.loader.read_states(run, storage_options=options if "://" in run else None)
    made = _call(dataset) if dataset else _open_as(urls, states, parse_version(version), options)
    last = (_states_of(made, states) or states)[-1]
    topology: dict[str, Any] = last.get("topology") or {}
    batch_size, drop_last = topology.get("batch_size"), bool(topology.get("drop_last"))
    loader = ss.ShardLoader(made, batch_size, drop_last=drop_last)
    saved = states if run.endswith(".json") else run
    found = ss.first_use(loader, saved, keys=keys or key, numbers=number)
    rows = _use_rows(found, loader)
    if as_json:
        checkpoint = {"checkpoint": found.checkpoint, "state": found.state}
        typer.echo(json.dumps(checkpoint | {"samples": rows}, indent=1))
    else:
        _show_uses(found, rows)


def _states_of(dataset: Any, states: Sequence[State]) -> list[State]:
    """Return the states of the data of a dataset, among those of a run."""
    own = dataset.pipeline.source.fingerprint
    return [one for one in states if one.get("fingerprint") == own]


def _open_as(
    urls: list[str] | None,
    states: Sequence[State],
    version: int | str | None,
    options: dict[str, Any],
) -> Any:
    """Open the dataset of the command in the version that a run has read last, in its order and for its ranks."""
    import shardstream as ss  # noqa: PLC0415

    known: dict[str, Any] = {"storage_options": options, "version": version}
    order, last = {"shuffle": None, "seed": None}, states[-1]
    read = [one["versions"][0] for one in reversed(states) if len(one.get("versions", ())) == 1]
    for number in dict.fromkeys([version] if version is not None else [None, *read]):
        try:
            made = _open(urls, order, {}, known | {"version": number})
        except OptionError:
            if number is version:
                raise
            continue  # it is one of other data
        if own := _states_of(made, states):
            known["version"], last = number, own[-1]
            break
    known["placement"] = ss.Placement(0, (last.get("topology") or {}).get("ranks", 1))
    return _open(urls, order, last, known)


def _use_rows(found: FirstUse, loader: ShardLoader) -> list[dict[str, Any]]:
    """Return number, epoch, step, rank and key of the first use of samples, in the order of uses."""
    uses = zip(found.epochs, found.steps, found.ranks, found.numbers, strict=True)
    rows = [
        {"epoch": int(e), "step": int(s), "rank": int(r), "number": int(n)}
        for e, s, r, n in sorted(uses)
    ]
    keys: dict[int, str | None] = {}
    for epoch in sorted({row["epoch"] for row in rows}):
        plan = loader.plan(epoch)
        planned = plan.where(numbers=[row["number"] for row in rows if row["epoch"] == epoch])
        keys |= dict(zip(planned.numbers.tolist(), plan.keys(planned), strict=True))
    return [row | {"key": keys.get(row["number"])} for row in rows]


def _show_uses(found: FirstUse, rows: list[dict[str, Any]]) -> None:
    if not rows:
        typer.echo("none of these samples comes in the epochs of the run")
    elif found.state is None:
        typer.echo("there is no checkpoint before the first use: begin anew without these samples")
    else:
        at = f"epoch {found.state['epoch']}, after {found.state['consumed']} samples of it"
        place = printable(found.checkpoint or "the state")
        typer.echo(f"the last checkpoint before any use: {place} ({at})")
    if rows:
        cells = [tuple(map(_cell, row.values())) for row in rows]
        for line in aligned([tuple(rows[0]), *cells], right=frozenset(range(4))):
            typer.echo(line)


_BAR_CHARACTERS = 30
_ANY_NUMBER = 1 << 30
_MEASURED = ("workers", "samples_per_s", "mb_per_s", "first_batch_s", "bad_samples")
_HEADINGS = ("workers", "samples/s", "MB/s", "first batch", "")


def bench(  # noqa: PLR0913  (a command's options)
    urls: list[str],
    *,
    workers: Annotated[int | None, typer.Option(min=0, max=256)] = None,
    decode: list[str] | None = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    seconds: Annotated[float, typer.Option(min=0.1)] = 5.0,
    in_order: Annotated[bool, typer.Option("--in-order")] = False,
    plot: Path | None = None,
    as_json: AsJson = False,
    version: str | None = None,
    option: list[str] | None = None,
) -> None:
    """Measure how fast a dataset is read on this machine, and recommend the number of workers.

    Reads shuffled batches with 0, 1, 2, 4, ... workers, says what limits the fastest, and what to change.
    Samples that differ in size are not stacked; bad samples are skipped and counted.
    Local shards come from the page cache if they were read before.

    Examples:
      shardstream bench data/train/ --decode rgb8
      shardstream bench s3://bucket/train/ --workers 8 --plot rates.png

    Options:
      workers (N): Most workers to try: 0, 1, 2, 4, ... N; by default the CPU cores.
      decode (NAME): Argument of decode(): rgb8, torchrgb, audio, video, ...; may be repeated. By default fields stay bytes.
      batch_size (N): Samples of a batch.
      seconds (S): Time for each number of workers.
      in_order: Read in the order of the shards, not shuffled.
      plot (FILE): Draw the rates (PNG, SVG); needs matplotlib.
    """
    from shardstream.loader import ShardDataset  # noqa: PLC0415  (torch takes over a second)
    from shardstream.pipeline import SkipBudget  # noqa: PLC0415

    if plot is not None:
        _check_can_plot()
    most = num_cores() if workers is None else workers
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
    with terminal_bar("measuring") as update:
        for trial in _run_trials(dataset, workers=numbers, batch_size=batch_size, seconds=seconds):
            trials.append(trial)
            update(completed=len(trials), total=len(numbers))
    chosen = _fewest_workers(trials)
    if as_json:
        typer.echo(json.dumps(_trials_json(trials, chosen), indent=1))
    else:
        _show_trials(trials, chosen)
    if plot is not None:
        _draw(trials, chosen, plot)


def _show_trials(trials: Sequence[Trial], chosen: Trial) -> None:
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


def _trials_json(trials: Sequence[Trial], chosen: Trial) -> dict[str, Any]:
    verdict = chosen.stats.verdict
    return {
        "trials": [{name: getattr(trial, name) for name in _MEASURED} for trial in trials],
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What was measured with a number of workers.

    Args:
        workers: Worker processes; 0 reads in the main process.
        samples_per_s: After the first batch.
        mb_per_s: Of tar members, by their mean size; None if that is unknown.
        first_batch_s: Seconds until the first batch, with the start of the workers.
        stats: Timings of the last epoch.
        bad_samples: Samples that could not be read or decoded, and were skipped.
    """

    workers: int
    samples_per_s: float
    mb_per_s: float | None
    first_batch_s: float
    stats: LoaderStats
    bad_samples: int = 0


def _run_trials(
    dataset: StreamDataset, *, workers: Sequence[int], batch_size: int, seconds: float
) -> Iterator[Trial]:
    """Read a dataset with each number of workers in turn, each from the start of another epoch.

    Samples that cannot be collated are put into lists.

    Args:
        dataset: The dataset with its steps.
        workers: Numbers of workers.
        batch_size: Samples of a batch.
        seconds: Time for each of them, after the first batch.

    Raises:
        OptionError: If there are fewer samples than a batch has.
    """
    epochs = itertools.count()
    for number in workers:
        with warnings.catch_warnings():
            # torch's, about more workers than cores: the numbers show whether they help.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            run = partial(_run, dataset, number, epochs, batch_size=batch_size, seconds=seconds)
            try:
                trial = run()
            except SampleError:  # samples of different sizes: a training has steps that resize them
                trial = run(collate_fn=list)
            yield trial


def _fewest_workers(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the fewest workers that is about as fast as the fastest."""
    best = max(trial.samples_per_s for trial in trials)
    good = [trial for trial in trials if trial.samples_per_s >= _CLOSE * best]
    return min(good, key=lambda trial: trial.workers)


def _run(
    dataset: StreamDataset,
    workers: int,
    epochs: Iterator[int],
    *,
    batch_size: int,
    seconds: float,
    **options: Any,
) -> Trial:
    from shardstream.loader import ShardLoader  # noqa: PLC0415  (as above)

    if workers:
        options["persistent_workers"] = True
    loader = ShardLoader(dataset, batch_size, num_workers=workers, drop_last=True, **options)
    begin = time.perf_counter()
    started = first_s = 0.0
    batches = 0
    while True:
        loader.set_epoch(next(epochs))
        before = batches
        for _ in loader:
            batches += 1
            if not first_s:
                started = time.perf_counter()
                first_s = started - begin
            if time.perf_counter() - started > seconds:
                break
        if not first_s:
            bad = loader.bad_samples
            found = f", and {len(bad)} bad ones, such as: {bad[0].error}" if bad else ""
            raise OptionError(f"the dataset has fewer samples than a batch of {batch_size}{found}")
        passed = time.perf_counter() - started
        if passed > seconds or batches == before:
            break
    rate, source = (batches - 1) * batch_size / passed, dataset.pipeline.indexed_source
    mean_bytes = None if source is None else source.samples.total_bytes / len(source.samples)
    return Trial(
        workers=workers,
        samples_per_s=rate,
        mb_per_s=None if mean_bytes is None else rate * mean_bytes / 1e6,
        first_batch_s=first_s,
        stats=loader.stats(),
        bad_samples=len(loader.bad_samples),
    )
