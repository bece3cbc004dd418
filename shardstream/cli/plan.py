"""``shardstream plan``."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardstream.cli.options import StorageOption, Version, parse_options, parse_version
from shardstream.cli.terminal_text import aligned, printable
from shardstream.errors import OptionError

if TYPE_CHECKING:
    from shardstream.pipeline import EpochSamples, PlannedSamples, State

_Urls = Annotated[
    list[str] | None,
    typer.Argument(metavar="URL", help="Folder, tar, quoted pattern or index.json."),
]
_Ranks = Annotated[int, typer.Option(min=1, metavar="N", help="Ranks of the training.")]
_Workers = Annotated[int, typer.Option(min=0, metavar="N", help="Loader workers of each rank.")]
_BatchSize = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Samples of a batch of one rank.")
]
_Shuffle = Annotated[
    bool | None,
    typer.Option("--shuffle/--no-shuffle", help="As in ShardDataset; with --state that of it."),
]
_Seed = Annotated[
    int | None, typer.Option(metavar="N", help="As in ShardDataset, 0; with --state that of it.")
]
_Epoch = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="Epoch, from 0; by default 0 or that of --state."),
]
_Step = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Show the samples of this step, from 0.")
]
_Rank = Annotated[int | None, typer.Option(min=0, metavar="N", help="Of --step: this rank only.")]
_Keys = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="KEY", help="Show when this sample comes; may be repeated."),
]
_Numbers = Annotated[
    list[int] | None,
    typer.Option("--number", metavar="N", help="As --key, by number; may be repeated."),
]
_State = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Begin where this state of a loader does, also in steps: its JSON, or a checkpoint of save_checkpoint (.pt).",
    ),
]
_Dataset = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="Function that returns the dataset of the training (a mix, weights, order=, ...), in place of URL. Imports torch.",
    ),
]


def plan(  # noqa: PLR0913  (the options of a command)
    urls: _Urls = None,
    *,
    ranks: _Ranks = 1,
    workers: _Workers = 0,
    batch_size: _BatchSize = None,
    drop_last: Annotated[bool, typer.Option("--drop-last", help="As in ShardLoader.")] = False,
    shuffle: _Shuffle = None,
    seed: _Seed = None,
    epoch: _Epoch = None,
    step: _Step = None,
    rank: _Rank = None,
    key: _Keys = None,
    number: _Numbers = None,
    state: _State = None,
    dataset: _Dataset = None,
    version: Version = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    option: StorageOption = None,
) -> None:
    """Show which samples a training reads at a step, or when samples come.

    Ranks, workers and batch size are those of the ShardLoaders of a training. Computed from the order alone; only the keys that are shown
    are read from the shards. Without --step, --key and --number the number of steps is shown.

    Examples:
      shardstream plan data/train/ --shuffle --ranks 8 --workers 2 --batch-size 64 --epoch 3 --step 1200
      shardstream plan data/train/ --shuffle --ranks 8 --workers 2 --batch-size 64 --key 0001234
      shardstream plan data/train/ --ranks 4 --batch-size 64 --state run/step-00001200.pt --step 0 --json
      shardstream plan --dataset train:make_dataset --ranks 8 --batch-size 64 --step 1200 --rank 3
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
        typer.echo(json.dumps(_as_json(found, rows), indent=1))
    else:
        _show(found, made, rows)


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
    from shardstream.viewer import load_function  # noqa: PLC0415

    sys.path.insert(0, "")  # functions in the folder where the command runs
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


def _show(found: EpochSamples, dataset: Any, rows: list[dict[str, Any]] | None) -> None:
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


def _as_json(found: EpochSamples, rows: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return a plan as JSON values; with samples, if some were asked for."""
    shown = {
        "epoch": found.epoch,
        "consumed": found.steps.consumed,
        "steps": found.num_steps,
        "ranks": found.num_ranks,
        "is_exact": found.is_exact,
    }
    return shown if rows is None else shown | {"samples": rows}
