"""``shardstream doctor``."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import chain
from typing import Annotated

import typer

from shardstream.cli.options import StorageOption, parse_options
from shardstream.cli.terminal_text import printable

_MARKS = {"ok": "ok   ", "warning": "WARN ", "error": "ERROR"}


def doctor(
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="Also examine this dataset and its store."),
    ] = None,
    *,
    seconds: Annotated[
        float, typer.Option(min=0.1, metavar="S", help="Time for measuring the bandwidth.")
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    option: StorageOption = None,
) -> None:
    """Examine this machine, and a dataset with its store; name the cure of each finding.

    Looks at Python, packages, cores, /dev/shm, open files and AWS_ variables (never the values of secrets); of a dataset at the
    clock, manifest, indexes, one sample, latency and bandwidth. Writes nothing. The exit code is 1 if something does not work.

    Examples:
      shardstream doctor
      shardstream doctor s3://bucket/train/
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
