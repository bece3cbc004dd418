"""``shardstream delete``, ``compact``, ``log``, ``diff``, ``tag`` and ``gc``."""

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
    parse_version,
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
    gone = f"no shard of it has the {plural(report.samples, 'deleted sample')}"
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


def diff(
    url: Dataset,
    a: Annotated[str, typer.Argument(metavar="A", help="Number or name of a version.")],
    b: Annotated[
        str | None,
        typer.Argument(metavar="[B]", help="Another one; by default the current version."),
    ] = None,
    *,
    keys: Annotated[
        bool, typer.Option("--keys", help="Also list the keys of the deleted samples.")
    ] = False,
    as_json: AsJson = False,
    option: StorageOption = None,
) -> None:
    """Say what a later version of a dataset has changed since an earlier one.

    Examples:
      shardstream diff data/train/ 1
      shardstream diff data/train/ paper 12 --keys --json
    """
    import shardstream as ss  # noqa: PLC0415

    found = ss.versions.diff(
        url,
        parse_version(a) or "",
        parse_version(b),
        keys=keys,
        storage_options=parse_options(option, url),
    )
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1))
        return
    samples = f"{plural(found.added, 'sample')} added, {found.deleted:,} deleted"
    typer.echo(f"version {found.earlier} to {found.later}: {samples}")
    for sign, urls in (("+", found.shards_added), ("-", found.shards_removed)):
        for one in urls:
            typer.echo(f"{sign} {printable(one)}")
    if found.fields:
        typer.echo(f"new fields: {', '.join(map(printable, found.fields))}")
    for key in found.deleted_keys or ():
        typer.echo(f"deleted {printable(key)}")


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
    number = ss.versions.tag(url, name, parse_version(version), storage_options=options)
    typer.echo(f"{printable(name)} is version {number}")


def gc(
    url: Dataset,
    *,
    keep: Annotated[
        int, typer.Option(min=1, metavar="N", help="Latest versions to keep, with the current one.")
    ] = 5,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without, only print.")] = False,
    as_json: AsJson = False,
    option: StorageOption = None,
) -> None:
    """Remove old versions of a dataset, and the files that only they need.

    Versions with a tag stay. States of removed versions cannot continue, and trainings that read one fail. Without --yes nothing is changed.

    Examples:
      shardstream gc data/train/
      shardstream gc s3://bucket/train/ --keep 2 --yes
    """
    import shardstream as ss  # noqa: PLC0415

    options = parse_options(option, url)
    report = ss.versions.gc(url, keep, dry_run=not yes, storage_options=options)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=1))
        return
    for name in report.files:
        typer.echo(printable(name))
    size = f"{plural(len(report.files), 'file')}, {human_bytes(report.total_bytes)}"
    removed = ", ".join(map(str, report.removed)) or "none"
    typer.echo(f"{'removed' if yes else 'would remove'} versions: {removed}; {size}")
    typer.echo(f"versions that stay: {', '.join(map(str, report.kept))}")
    if report.files and not yes:
        typer.echo("run it with --yes to delete these files")
