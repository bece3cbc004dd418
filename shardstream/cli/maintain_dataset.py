"""``shardstream doctor``, ``index``, ``verify``, ``delete``, ``compact``, ``log``, ``diff``, ``tag`` and ``gc``: maintain a dataset."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import chain
from typing import Annotated, Any, cast

import typer

from shardstream.cli.options import (
    AsJson,
    FromOne,
    Ray,
    TaskProcesses,
    Threads,
    executor_of,
    parse_options,
    parse_version,
)
from shardstream.cli.terminal import aligned, job_bar, print_warnings, printable
from shardstream.errors import human_bytes, plural

_NAMED = 5
_MARKS = {"ok": "ok   ", "warning": "WARN ", "error": "ERROR"}


def doctor(
    url: Annotated[str | None, typer.Argument()] = None,
    *,
    seconds: Annotated[float, typer.Option(min=0.1)] = 5.0,
    as_json: AsJson = False,
    option: list[str] | None = None,
) -> None:
    """Examine this machine, and a dataset with its store; name the cure of each finding.

    Looks at Python, packages, cores, /dev/shm, open files and AWS_ variables (never at values of secrets); of a dataset at the
    clock, manifest, indexes, one sample, latency and bandwidth. Writes nothing. Exit code 1: something does not work.

    Examples:
      shardstream doctor
      shardstream doctor s3://bucket/train/

    Options:
      url (URL): Also examine this dataset and its store.
      seconds (S): Time for measuring the bandwidth.
    """
    from shardstream.catalog import (  # noqa: PLC0415  (numpy and fsspec take 300 ms)
        examine_dataset,
        examine_machine,
    )

    options = parse_options(option, *([url] if url else []))
    of_dataset = examine_dataset(url, seconds=seconds, storage_options=options) if url else ()
    findings = []
    for finding in chain(examine_machine(), of_dataset):
        findings.append(finding)
        if not as_json:
            typer.echo(f"{_MARKS[finding.level]} {finding.subject}: {printable(finding.text)}")
            if finding.cure:
                typer.echo(f"        -> {printable(finding.cure)}")
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


def index(  # noqa: PLR0913  (the options of a command)
    urls: list[str],
    *,
    name: str = "",
    to: str | None = None,
    sha256: Annotated[bool, typer.Option("--sha256/--no-sha256")] = True,
    members: Annotated[bool, typer.Option("--members")] = False,
    columns: str | None = None,
    threads: Threads = None,
    processes: TaskProcesses = None,
    ray: Ray = False,
    ray_address: str | None = None,
    option: list[str] | None = None,
) -> None:
    """Index existing tars for shuffled, resumable reading.

    For shards of other tools; 'shardstream pack' writes its own index. Reads every tar once and writes NAME.tar.idx next to
    it, then index.json for all of them. No tar is changed.

    Examples:
      shardstream index data/train/
      shardstream index data/train/ --columns cls,json.width
      shardstream index https://example.org/tars/{00..31}.tar --to mine/ --no-sha256

    Options:
      to (FOLDER): Write indexes and manifest there, for tars that you may only read.
      sha256: Hash the tars; without, only headers of large samples are read.
      members: Also write NAME.idx, as NVIDIA DALI reads it: with it, fields= fetches large samples in part.
    """
    import shardstream as ss  # noqa: PLC0415  (numpy and fsspec take 300 ms)

    with job_bar("indexing") as progress:
        report = ss.index(
            urls,
            to=to,
            sha256=sha256,
            storage_options=parse_options(option, *urls, *([to] if to else [])),
            threads=threads,
            name=name,
            members=members,
            columns=columns,
            progress=progress,
            executor=executor_of(processes, None, ray=ray, ray_address=ray_address),
        )
    print_warnings(report.warnings)
    made = report.manifest
    counts = _counts(len(made.shards), made.nsamples, made.total_bytes)
    typer.echo(f"indexed {counts}: wrote {printable(report.manifest_url)}")


def verify(  # noqa: PLR0913  (the options of a command)
    urls: list[str],
    *,
    decode: Annotated[bool, typer.Option("--decode")] = False,
    version: str | None = None,
    threads: Threads = None,
    processes: TaskProcesses = None,
    part: str | None = None,
    ray: Ray = False,
    ray_address: str | None = None,
    option: list[str] | None = None,
) -> None:
    """Read every byte of a dataset and list all problems.

    Compares each tar's length, checksum and samples with index.json and its index, and finds repeated keys (with --part within
    the part only) and unexpected files. Exit code 0: sound (warnings are possible), 1: errors.

    Examples:
      shardstream verify s3://bucket/train/
      shardstream verify packed/train/ --decode --processes 8

    Options:
      decode: Also decode every image; --processes uses all cores.
    """
    import shardstream as ss  # noqa: PLC0415

    with job_bar("verifying") as progress:
        report = ss.verify(
            urls,
            version=parse_version(version),
            decode=decode,
            storage_options=parse_options(option, *urls),
            threads=threads,
            progress=progress,
            executor=executor_of(processes, part, ray=ray, ray_address=ray_address),
        )
    for problem in report.problems:
        typer.echo(f"{problem.severity}: {printable(str(problem))}")
    errors = len(report.errors)
    warnings = len(report.problems) - errors
    verdict = plural(errors, "error") if errors else "sound"
    if warnings:
        verdict += f", {plural(warnings, 'warning')}"
    checked = _counts(report.shards - report.unchecked, report.samples, report.bytes)
    typer.echo(f"{checked}: {verdict}" if part is None else f"part {part}: {checked}: {verdict}")
    if errors:
        raise typer.Exit(1)


def _counts(shards: int, samples: int, nbytes: int) -> str:
    return f"{plural(shards, 'shard')}, {plural(samples, 'sample')}, {human_bytes(nbytes)}"


def delete(  # noqa: PLR0913  (the options of a command)
    url: str,
    *,
    keys: Annotated[list[str] | None, typer.Option("--keys")] = None,
    where: str | None = None,
    numbers: str | None = None,
    version: FromOne = None,
    missing: str = "error",
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    option: list[str] | None = None,
) -> None:
    """Delete samples, as a new version of the dataset.

    Readers of shardstream leave them out from now on. Other tools still see them in the tars until 'shardstream compact' has
    written the shards again and 'shardstream gc' has removed the earlier versions.

    Examples:
      shardstream delete s3://bucket/train/ --keys takedown.txt --missing ignore
      shardstream delete data/train/ --where "width < 64" --dry-run

    Options:
      keys (FILE|KEY): A text file (.txt) with a key on each line, or a key, which may be repeated.
      where (SQL): A condition on columns, such as "cls = 3".
      numbers (N,N-N): Numbers of samples, and ranges with both ends.
      version (N): The version in which the numbers were found; needed once samples were deleted.
      missing (error|ignore): What to do with keys that no sample has.
      dry_run: Count the samples, and change nothing.
    """
    import shardstream as ss  # noqa: PLC0415  (numpy and fsspec take 300 ms)

    is_file = any(key.lower().endswith(".txt") for key in keys or ())
    if keys and is_file and len(keys) > 1:
        raise typer.BadParameter("give one file, or keys", param_hint="--keys")
    report = ss.delete(
        url,
        keys=keys[0] if keys and is_file else keys or None,
        where=where,
        numbers=None if numbers is None else _parse_numbers(numbers),
        version=version,
        missing=cast("Any", missing),  # checked there
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
    url: str,
    *,
    threads: Threads = None,
    processes: TaskProcesses = None,
    ray: Ray = False,
    ray_address: str | None = None,
    option: list[str] | None = None,
) -> None:
    """Write the shards that have deleted samples again without them, as a new version.

    Other shards stay. Earlier versions keep the deleted samples until 'shardstream gc' removes them.

    Example:
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
    url: str,
    *,
    limit: FromOne = None,
    as_json: AsJson = False,
    option: list[str] | None = None,
) -> None:
    """List the versions of a dataset that can be read, the latest first.

    Example:
      shardstream log s3://bucket/train/ --limit 10 --json

    Options:
      limit (N): Show the latest ones only.
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
    for writer in records[0].writers:
        typer.echo(printable(f"open writer: {writer}"))


def close(
    url: str,
    *,
    writer: str | None = None,
    option: list[str] | None = None,
) -> None:
    """Close writers that were killed, so that readers that follow the dataset do not wait for them.

    'shardstream log' lists the open writers. One that still runs is listed again by its next publication.

    Example:
      shardstream close data/rollouts/ --writer 4e1d3c5b7a90f2d8

    Options:
      writer (TOKEN): Close this one only.
    """
    import shardstream as ss  # noqa: PLC0415

    closed = ss.versions.close_writers(url, writer, storage_options=parse_options(option, url))
    for one in closed:
        typer.echo(printable(f"closed {one}"))
    if not closed:
        typer.echo("no writer is open")


def diff(
    url: str,
    a: str,
    b: Annotated[str | None, typer.Argument()] = None,
    *,
    keys: Annotated[bool, typer.Option("--keys")] = False,
    as_json: AsJson = False,
    option: list[str] | None = None,
) -> None:
    """List the changes between two versions of a dataset.

    Example:
      shardstream diff data/train/ paper 12 --keys --json

    Options:
      a (A): Number or name of a version.
      b ([B]): Another one; by default the current version.
      keys: Also list the keys of the deleted samples.
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
    url: str,
    name: str,
    version: Annotated[str | None, typer.Argument()] = None,
    *,
    remove: Annotated[bool, typer.Option("--remove")] = False,
    option: list[str] | None = None,
) -> None:
    """Name a version of a dataset; 'shardstream gc' keeps versions with a name.

    Examples:
      shardstream tag data/train/ paper 12
      shardstream tag data/train/ paper --remove

    Options:
      name (NAME): Name of the version.
      version ([VERSION]): Number or name of the version; by default the current one.
      remove: Remove the name; the version stays.
    """
    import shardstream as ss  # noqa: PLC0415

    options = parse_options(option, url)
    if remove:
        ss.versions.untag(url, name, storage_options=options)
        typer.echo(f"removed the tag {printable(name)}")
        return
    number = ss.versions.tag(url, name, parse_version(version), storage_options=options)
    typer.echo(f"{printable(name)} is version {number}")


def gc(  # noqa: PLR0913  (the options of a command)
    url: str,
    *,
    keep: Annotated[int, typer.Option(min=1)] = 5,
    keep_days: Annotated[float, typer.Option("--keep-days", min=0)] = 0,
    states: Annotated[list[str] | None, typer.Option("--states")] = None,
    yes: Annotated[bool, typer.Option("--yes")] = False,
    as_json: AsJson = False,
    option: list[str] | None = None,
) -> None:
    """Remove old versions of a dataset, and the files that only they need.

    Versions with a tag stay. States of removed versions cannot continue, and trainings that read one fail.

    Examples:
      shardstream gc data/train/
      shardstream gc s3://bucket/train/ --keep 1 --keep-days 30 --states s3://bucket/run/ --yes

    Options:
      keep (N): Latest versions to keep, with the current one.
      keep_days (N): Also keep the versions that were current in the last N days.
      states (PATH): Also keep the versions that states need: a folder of checkpoints, a checkpoint (.pt) or a .json file; may be
        repeated. Imports torch.
      yes: Delete; without, only print.
    """
    import shardstream as ss  # noqa: PLC0415

    options, saved = parse_options(option, url, *(states or ())), list[Any]()
    for one in states or ():
        saved += ss.loader.read_states(one, storage_options=options if "://" in one else None)
    report = ss.versions.gc(
        url, keep, keep_days=keep_days, states=saved, dry_run=not yes, storage_options=options
    )
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
