"""Progress display of ``pack``, ``reshard``, ``index`` and ``verify``, and the message when a pack is interrupted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import typer

from shardstream.cli.options import terminal_bar

if TYPE_CHECKING:
    from shardstream.packing import Progress


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
            counts = counts_text(progress, time.monotonic() - start_s)
            if progress.total_bytes is not None:
                update_bar(
                    completed=progress.size_bytes, total=progress.total_bytes or None, counts=counts
                )
                return
            done = progress.samples + progress.skipped
            update_bar(completed=done, total=progress.total, counts=counts)

        yield update
