"""Progress bar of ``shardstream pack``, and its message when interrupted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from shardstream.cli.options import terminal_bar
from shardstream.cli.terminal_text import human_bytes
from shardstream.errors import plural

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
def packing_bar() -> Iterator[Callable[[Progress], None] | None]:
    """Show samples, rates and time left on a terminal's stderr; yields its update function, else None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import TextColumn  # noqa: PLC0415  (50 ms that --help does not need)

    counts_column = TextColumn("{task.fields[counts]}", markup=False)
    start_s = time.monotonic()
    with terminal_bar("packing", counts_column, counts="") as update_bar:

        def update(progress: Progress) -> None:
            seconds = max(time.monotonic() - start_s, 1e-3)
            new = progress.samples - progress.kept
            mean_bytes = progress.size_bytes / max(progress.samples, 1)
            kept = f"  {progress.kept:,} of an earlier run" if progress.kept else ""
            counts = (
                f"{plural(progress.samples, 'sample')}  {new / seconds:,.0f}/s  "
                f"{human_bytes(int(new * mean_bytes / seconds))}/s{kept}"
            )
            done = progress.samples + progress.skipped
            update_bar(completed=done, total=progress.total, counts=counts)

        yield update
