"""``shardstream delete``, ``compact``, ``log`` and ``tag``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from shardstream.cli.options import (
    Ray,
    RayAddress,
    StorageOption,
    TaskProcesses,
    Threads,
    executor_of,
    parse_options,
)
from shardstream.cli.pack_progress import job_bar
from shardstream.cli.terminal_text import aligned, printable
from shardstream.errors import human_bytes, plural

_NAMED = 5

Dataset = Annotated[str, typer.Argument(metavar="URL", help="Folder of the dataset.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


def delete(  # noqa: PLR0913  (the options of a command)
    url: Dataset,
    *,
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--keys",
            metavar="FILE|KEY",
            help="A text file (.txt) with a key on each line, or a key; may be repeated.",
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(metavar="SQL", help='A condition on columns, such as "cls = 3".'),
    ] = None,
    numbers: Annotated[
        str | None,
        typer.Option(metavar="N,N-N", help="Numbers of samples, and ranges with both ends."),
    ] = None,
    missing: Annotated[
        str,
        typer.Option(metavar="error|ignore", help="What to do with keys that no sample has."),
    ] = "error",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the samples, and change nothing.")
    ] = False,
    option: StorageOption = None,
) -> None:
    """Delete samples, as a new version of the dataset.

    The bytes stay, and tools that read tars on their own still see them, until 'shardstream compact' has written the shards without them, and
    'shardstream gc' has removed the earlier versions. Readers of shardstream leave them out from now on.

    Examples:
      shardstream delete s3://bucket/train/ --keys takedown.txt --missing ignore
      shardstream delete data/train/ --where "width < 64" --dry-run
      shardstream delete data/train/ --numbers 5,100-199
    """
    import shardstream as ss  # noqa: PLC0415  (numpy and fsspec take 300 ms)

    if missing not in ("error", "ignore"):
        raise typer.BadParameter("error or ignore", param_hint="--missing")
    is_file = keys is not None and len(keys) == 1 and keys[0].lower().endswith(".txt")
    report = ss.delete(
        url,
        keys=keys[0] if keys and is_file else keys or None,
        where=where,
        numbers=None if numbers is None else _parse_numbers(numbers),
        missing="ignore" if missing == "ignore" else "error",
        dry_run=dry_run,
        storage_options=parse_options(option, url),
    )
    count = plural(report.deleted, "sample")
    if dry_run:
        typer.echo(f"would delete {count} of version {report.version}")
    else:
        typer.echo(f"deleted {count}: version {report.version} of {printable(url)}")
    if report.unknown:
        named = ", ".join(map(printable, report.unknown[:_NAMED]))
        more = ", ..." if len(report.unknown) > _NAMED else ""
        typer.echo(f"no sample has {plural(len(report.unknown), 'key')}: {named}{more}")
    if report.deleted and not dry_run:
        typer.echo(
            "their bytes stay in the tars and in earlier versions: run 'shardstream compact', then 'shardstream gc'"
        )


def _parse_numbers(text: str) -> list[int]:
    """Return the numbers that a list names.

    >>> _parse_numbers("5,7-9")
    [5, 7, 8, 9]

    Raises:
        typer.BadParameter: If it is something else.
    """
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last if dash else first) + 1)
    except ValueError as error:
        raise typer.BadParameter(
            "give numbers and ranges, such as 5,7-9", param_hint="--numbers"
        ) from error
    return found


def compact(
    url: Dataset,
    *,
    threads: Threads = None,
    processes: TaskProcesses = None,
    ray: Ray = False,
    ray_address: RayAddress = None,
    option: StorageOption = None,
) -> None:
    """Write the shards that have deleted samples again without them, as a new version.

    Other shards stay. Earlier versions keep the deleted samples until 'shardstream gc' removes them.

    Examples:
      shardstream compact data/train/
      shardstream compact s3://bucket/train/ --processes 8
    """
    import shardstream as ss  # noqa: PLC0415

    with job_bar("compacting") as progress:
        report = ss.compact(
            url,
            storage_options=parse_options(option, url),
            threads=threads,
            progress=progress,
            executor=executor_of(processes, None, ray=ray, ray_address=ray_address),
        )
    if not report.samples:
        typer.echo(f"no samples are deleted in version {report.version}: nothing to do")
        return
    wrote = f"wrote {plural(report.shards, 'shard')} ({human_bytes(report.total_bytes)}) again"
    removed = f", left {plural(report.removed, 'shard')} out" * bool(report.removed)
    gone = f"{plural(report.samples, 'deleted sample')} are in no shard of it"
    typer.echo(f"version {report.version}: {gone}: {wrote}{removed}")


def log(
    url: Dataset,
    *,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Show the latest ones only.")
    ] = None,
    as_json: AsJson = False,
    option: StorageOption = None,
) -> None:
    """List the versions of a dataset that can be read, the latest first.

    Examples:
      shardstream log data/train/
      shardstream log s3://bucket/train/ --limit 10 --json
    """
    import shardstream as ss  # noqa: PLC0415

    records = ss.versions.log(url, limit=limit, storage_options=parse_options(option, url))
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in records], indent=1))
        return
    headings = ("version", "made by", "time", "samples", "deleted", "shards", "size", "tags")
    rows = [
        (
            str(one.number),
            printable(one.operation),
            printable(one.created),
            f"{one.samples:,}",
            f"{one.deleted:,}",
            f"{one.shards:,}",
            human_bytes(one.total_bytes),
            ", ".join(one.tags),
        )
        for one in records
    ]
    for line in aligned([headings, *rows], right=frozenset({0, 3, 4, 5, 6})):
        typer.echo(line.rstrip())


def tag(
    url: Dataset,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the version.")],
    version: Annotated[
        str | None,
        typer.Argument(
            metavar="[VERSION]", help="Number or name of the version; by default the current one."
        ),
    ] = None,
    *,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the name; the version stays.")
    ] = False,
    option: StorageOption = None,
) -> None:
    """Give a version of a dataset a name, which 'shardstream gc' keeps it for.

    Examples:
      shardstream tag data/train/ paper
      shardstream tag data/train/ paper 12
      shardstream tag data/train/ paper --remove
    """
    import shardstream as ss  # noqa: PLC0415

    options = parse_options(option, url)
    if remove:
        ss.versions.untag(url, name, storage_options=options)
        typer.echo(f"removed the tag {printable(name)}")
        return
    asked = int(version) if version is not None and version.isdigit() else version
    number = ss.versions.tag(url, name, asked, storage_options=options)
    typer.echo(f"{printable(name)} is version {number}")
