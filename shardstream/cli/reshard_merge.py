"""``shardstream reshard`` and ``shardstream merge``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from shardstream.cli.options import (
    Columns,
    Dest,
    MaxBytes,
    MaxSamples,
    Name,
    Overwrite,
    Part,
    Ray,
    RayAddress,
    SourceOption,
    StorageOption,
    TaskProcesses,
    Urls,
    Version,
    executor_of,
    parse_options,
    parse_stores,
    parse_version,
    state_of_parts,
)
from shardstream.cli.pack_progress import job_bar, print_checks, print_warnings, report_interruption
from shardstream.cli.terminal_text import printable
from shardstream.errors import human_bytes, plural

if TYPE_CHECKING:
    from shardstream.packing import PackReport

_Fields = Annotated[
    str | None,
    typer.Option(metavar="NAME,NAME", help="Keep these fields; by default all."),
]
_Where = Annotated[
    str | None,
    typer.Option(
        metavar="SQL",
        help="Write the samples whose columns fulfil a condition, e.g. 'cls in (3, 9) and width >= 512'.",
    ),
]
_Add = Annotated[
    list[str] | None,
    typer.Option(
        "--add",
        metavar="URL[:FIELD,…]",
        help="Add fields of other shards or of a table, by key; may be repeated. FIELD=NAME is the field NAME there, or a column. The keys "
        "of a table are in its column __key__ or key, or in COLUMN with __key__=COLUMN.",
    ),
]
_Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Write all samples in the random order of this seed; --shuffle alone takes 0.",
    ),
]
_Missing = Annotated[
    str,
    typer.Option(
        metavar="error|keep|drop",
        help="For a sample whose key is not in --add: stop, keep it without the fields, or drop it.",
    ),
]


def parse_add(texts: Sequence[str] | None) -> dict[str, dict[str, str] | None] | None:
    """Parse the values of ``--add``: URL -> field -> its name there; None for all fields.

    >>> parse_add(["s3://b/captions/", "a.parquet:__key__=id,txt"])
    {'s3://b/captions/': None, 'a.parquet': {'__key__': 'id', 'txt': 'txt'}}

    Raises:
        typer.BadParameter: If a URL comes twice, or a name is empty.
    """
    if not texts:
        return None
    added: dict[str, dict[str, str] | None] = {}
    for text in texts:
        url, _, names = text.rpartition(":")
        if not url or "/" in names:  # the colon of s3://, or none
            url, names = text, ""
        pairs = [one.strip().partition("=") for one in names.split(",")] if names else []
        fields = {field: name if sign else field for field, sign, name in pairs}
        if url in added or not all(itertools.chain.from_iterable(fields.items())):
            raise typer.BadParameter(
                "give each URL once, as URL or URL:FIELD,FIELD=NAME", param_hint="--add"
            )
        added[url] = fields or None
    return added


def reshard(  # noqa: PLR0913  (the options of a command)
    urls: Urls,
    dest: Dest,
    *,
    max_samples: MaxSamples = 10_000,
    max_bytes: MaxBytes = "256MB",
    columns: Columns = None,
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Write all samples in a random order.")
    ] = False,
    seed: _Seed = None,
    where: _Where = None,
    version: Version = None,
    fields: _Fields = None,
    add: _Add = None,
    missing: _Missing = "error",
    name: Name = "",
    processes: TaskProcesses = None,
    part: Part = None,
    ray: Ray = False,
    ray_address: RayAddress = None,
    overwrite: Overwrite = False,
    option: StorageOption = None,
    source_option: SourceOption = None,
) -> None:
    """Write the samples of shards to new shards: other sizes, another order, fewer or more fields.

    Remote shards need an index. Equal input gives equal bytes, whatever --processes, --part and --ray are. To resume a stopped or
    killed command, run it again: finished shards are kept. Functions on samples: ss.reshard(select=, map=) in Python.

    Examples:
      shardstream reshard s3://bucket/train/ s3://bucket/large/ --max-bytes 1GB --processes 8
      shardstream reshard train/ shuffled/ --shuffle --seed 1
      shardstream reshard train/ captions/ --fields txt,json --part 3/16
      shardstream reshard train/ wide/ --where "width >= 512"
      shardstream reshard train/ new/ --add captions/:txt --add scores.parquet:__key__=id,score.json=score
    """
    import shardstream as ss  # noqa: PLC0415  (numpy and fsspec take 300 ms)

    with report_interruption(), job_bar("resharding") as progress:
        stores = parse_stores(option, source_option, *urls, dest, *(add or ()))
        source: Any = urls
        if where is not None or version is not None:  # imports torch
            reading = stores["source_options"] or stores["storage_options"]
            source = ss.ShardDataset(
                urls, where=where, version=parse_version(version), storage_options=reading
            )
        report = ss.reshard(
            source,
            dest,
            max_samples=max_samples,
            max_bytes=max_bytes,
            columns=columns,
            seed=0 if shuffle and seed is None else seed,
            fields=None if fields is None else [one.strip() for one in fields.split(",")],
            add=parse_add(add),
            missing=cast("Any", missing),  # checked there
            name=name,
            overwrite=overwrite,
            executor=executor_of(processes, part, ray=ray, ray_address=ray_address),
            progress=progress,
            **stores,
        )
    _print_report(report, part)


def _print_report(report: PackReport, part: str | None) -> None:
    print_warnings(report.warnings)
    if report.kept:
        typer.echo(f"kept {plural(report.kept, 'shard')} of an earlier run")
    counts = f"{plural(report.samples, 'sample')} in {plural(report.shards, 'shard')}"
    written = f"{counts}: {human_bytes(report.total_bytes)} in {report.seconds:.1f} s, from {printable(report.source)}"
    folder = report.splits[0].url
    if part is None:
        typer.echo(f"wrote {written}")
        print_checks(report)
    else:
        typer.echo(f"part {part}: wrote {written}")
        typer.echo(state_of_parts(report.unfinished, folder))


def merge(dest: Dest, *, option: StorageOption = None) -> None:
    """Publish a dataset whose parts were written with --part, with all its splits.

    Writes index.json when all parts are done; otherwise names those that are missing.

    Example:
      shardstream merge s3://bucket/large/
    """
    import shardstream as ss  # noqa: PLC0415

    report = ss.merge(dest, storage_options=parse_options(option, dest))
    print_warnings(report.warnings)
    for split in report.splits:
        counts = f"{plural(split.samples, 'sample')} in {plural(split.shards, 'shard')}"
        typer.echo(f"published {counts}, {human_bytes(split.total_bytes)}: {printable(split.url)}")
    print_checks(report)
