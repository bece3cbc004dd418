"""Progress display of ``pack``, ``reshard``, ``index`` and ``verify``, and the message when a pack is interrupted."""

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

_LINE_EVERY_S = 30.0


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
def job_bar(title: str) -> Iterator[Callable[[Progress], None]]:
    """Show counts, rates, failures and time left on stderr, or a line every 30 s if it is no terminal; yields the update function.

    Args:
        title: Verb of the job, e.g. "packing".
    """
    if not sys.stderr.isatty():
        yield log_lines(title)
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


def log_lines(
    title: str, clock: Callable[[], float] = time.monotonic
) -> Callable[[Progress], None]:
    """Return a function that prints the progress of a job to stderr, at most every 30 s.

    Args:
        title: Verb of the job.
        clock: Time in seconds.
    """
    start_s = last_s = clock()

    def update(progress: Progress) -> None:
        nonlocal last_s
        now_s = clock()
        if now_s - last_s >= _LINE_EVERY_S:
            last_s = now_s
            text = counts_text(progress, now_s - start_s)
            typer.echo(f"{title}: {_share(progress)}{text}", err=True)

    return update


def _share(progress: Progress) -> str:
    """Return the part of a job that is done, if it is known."""
    done, total = progress.samples + progress.skipped, progress.total
    if progress.total_bytes is not None:
        done, total = progress.size_bytes, progress.total_bytes
    return f"{100 * done / total:.0f} %  " if total else ""


def counts_text(progress: Progress, seconds: float) -> str:
    """Return counts and rates of a job as one line; failures, retries and kept samples only if there are some.

    >>> from shardstream.packing import Progress
    >>> counts_text(Progress(1200, 0, 5_000_000, None, shards=3, failures=1, retries=2), 10.0)
    '3 shards  1,200 samples  120/s  500.0 kB/s  1 failure  2 tasks run again'
    """
    seconds = max(seconds, 1e-3)
    new = progress.samples - progress.kept
    size_bytes: float = progress.size_bytes
    if progress.kept:  # bytes of an earlier run took no time now
        size_bytes *= new / max(progress.samples, 1)
    parts = [
        plural(progress.shards, "shard"),
        plural(progress.samples, "sample"),
        f"{new / seconds:,.0f}/s",
        f"{human_bytes(int(size_bytes / seconds))}/s",
    ]
    if progress.kept:
        parts.append(f"{progress.kept:,} of an earlier run")
    if progress.failures:
        parts.append(plural(progress.failures, "failure"))
    if progress.retries:
        parts.append(f"{plural(progress.retries, 'task')} run again")
    return "  ".join(parts)
