"""Progress display of ``pack``, ``reshard``, ``index`` and ``verify``, and messages at the end of a job."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import typer

from shardstream.cli.options import terminal_bar
from shardstream.cli.terminal_text import printable

if TYPE_CHECKING:
    from shardstream.packing import PackReport, Progress


@contextmanager
def report_interruption() -> Iterator[None]:
    """Print how to resume when the command is interrupted."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        typer.echo(
            "stopped before the dataset was published: finished shards are kept; run the same command again to resume",
            err=True,
        )
        raise


def print_warnings(warnings: Iterable[str]) -> None:
    """Print the warnings of a report to stderr."""
    for warning in warnings:
        typer.echo(f"warning: {printable(warning)}", err=True)


def print_checks(report: PackReport) -> None:
    """Print the commands that check the datasets of a report."""
    typer.echo("check with:")
    for split in report.splits:
        typer.echo(f"  shardstream verify {printable(split.url)}")


@contextmanager
def job_bar(title: str) -> Iterator[Callable[[Progress], object]]:
    """Show counts, rates, failures and time left on stderr, or a line every 30 s if it is no terminal; yields the update function.

    Args:
        title: Verb of the job, e.g. "packing".
    """
    from shardstream.packing import counts_text, progress_lines  # noqa: PLC0415  (300 ms that --help does not need)

    if not sys.stderr.isatty():
        yield progress_lines(title, partial(typer.echo, err=True))
        return
    from rich.progress import TextColumn  # noqa: PLC0415  (50 ms that --help does not need)

    counts_column = TextColumn("{task.fields[counts]}", markup=False)
    start_s = time.monotonic()
    with terminal_bar(title, counts_column, counts="") as update_bar:

        def update(progress: Progress) -> None:
            done, total = progress.done
            counts = counts_text(progress, time.monotonic() - start_s)
            update_bar(completed=done, total=total or None, counts=counts)

        yield update
