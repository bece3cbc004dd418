"""``shardstream index`` and ``shardstream verify``."""

from __future__ import annotations

from typing import Annotated

import typer

from shardstream.cli.options import (
    Columns,
    Name,
    Part,
    Ray,
    RayAddress,
    StorageOption,
    TaskProcesses,
    Threads,
    Urls,
    Version,
    executor_of,
    parse_options,
    parse_version,
)
from shardstream.cli.pack_progress import job_bar, print_warnings
from shardstream.cli.terminal_text import printable
from shardstream.errors import human_bytes, plural


def index(  # noqa: PLR0913  (the options of a command)
    urls: Urls,
    *,
    name: Name = "",
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Write indexes and manifest there, for tars in a place that you may only read.",
        ),
    ] = None,
    sha256: Annotated[
        bool,
        typer.Option(
            "--sha256/--no-sha256",
            help="Hash the tars; without, only headers of large samples are read.",
        ),
    ] = True,
    members: Annotated[
        bool,
        typer.Option(
            "--members",
            help="Also write NAME.idx with the place of each field, so that fields= fetches large samples in part; NVIDIA DALI reads it, too.",
        ),
    ] = False,
    columns: Columns = None,
    threads: Threads = None,
    processes: TaskProcesses = None,
    ray: Ray = False,
    ray_address: RayAddress = None,
    option: StorageOption = None,
) -> None:
    """Index existing tars for shuffled, resumable reading.

    Reads every tar once and writes NAME.tar.idx next to it, then index.json for all of them. No tar is changed. Use it
    for shards of other tools; 'shardstream pack' writes its own index.

    Examples:
      shardstream index data/train/
      shardstream index "s3://bucket/train/{000000..000099}.tar"
      shardstream index data/train/ --columns cls,json.width
      shardstream index https://example.org/tars/{00..31}.tar --to mine/ --no-sha256
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
    urls: Urls,
    *,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="Also decode every image, and list those that cannot be; --processes uses all cores.",
        ),
    ] = False,
    version: Version = None,
    threads: Threads = None,
    processes: TaskProcesses = None,
    part: Part = None,
    ray: Ray = False,
    ray_address: RayAddress = None,
    option: StorageOption = None,
) -> None:
    """Read every byte of a dataset and list all problems.

    Compares each tar's length, checksum and samples with index.json and its index, and finds duplicate keys and unexpected
    files. Exit code 0: sound (warnings are possible), 1: errors. With --part, repeated keys are found within the part only.

    Examples:
      shardstream verify s3://bucket/train/
      shardstream verify packed/train/ --decode --processes 8
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
