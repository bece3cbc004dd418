"""Show text, fields, tables and progress on a terminal: control characters are escaped."""

from __future__ import annotations

import io
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from shardstream.packing import PackReport, Progress


def printable(text: str) -> str:
    r"""Escape control, format and private characters, and lone surrogates.

    >>> printable("a\x1b[31m\n\u202e")
    'a\\x1b[31m\\n\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def shortened(text: str, limit: int) -> str:
    """Cut a text to ``limit`` characters, including an ellipsis.

    >>> shortened("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def aligned(rows: Sequence[tuple[str, ...]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Format rows as columns, two spaces apart.

    Args:
        rows: Rows of equal length.
        right: Numbers of the right-aligned columns.

    >>> aligned([("a", "1"), ("bcd", "10")], right=frozenset({1}))
    ['a     1', 'bcd  10']
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


_PICKLES = frozenset(["pyd", "pickle", "pkl", "pth", "pt"])
_BREAKS = re.compile(r"([\n\t])")
_PREVIEW_CHARACTERS = 100
_PREVIEW_BYTES = 16


def describe(field: str, data: bytes, *, limit: int | None = _PREVIEW_CHARACTERS) -> str:
    r"""Describe a field: text in full, images and arrays by header, others by first bytes.

    >>> describe("cls", b"7"), describe("bin", b"\x00\xff"), describe("txt", b"\x1b[31mred")
    ('7', 'bytes 00 ff', '\\x1b[31mred')

    Args:
        field: Name of the field; its extension determines the kind.
        data: Content of the field.
        limit: Characters of text to show; None for all, with line breaks.
    """
    from shardstream.display import extension, kinds_of  # noqa: PLC0415  (numpy and Pillow; a command starts without them)

    if not data:
        return "(empty)"
    kind, preview = kinds_of([field])[field], None
    if kind in ("text", "json", "class"):
        preview = _text(data, limit)
    elif kind in ("picture", "mask"):
        preview = _image(data)
    elif extension(field) == "npy":
        preview = _array(data)
    if preview is None:
        preview = _preview(data)
        if extension(field) in _PICKLES:
            preview += " (may hold a pickle: not opened)"
    return preview


def _text(data: bytes, limit: int | None) -> str | None:
    limited = data if limit is None else data[: 4 * limit + 4]
    try:
        # "ignore" when truncated: the cut may split the last character.
        text = limited.decode("utf-8", "strict" if len(limited) == len(data) else "ignore")
    except UnicodeDecodeError:
        return None
    if limit is None:
        return "".join(part if part in "\n\t" else printable(part) for part in _BREAKS.split(text))
    return shortened(printable(text), limit)


def _image(data: bytes) -> str | None:
    from shardstream.display import image_size  # noqa: PLC0415  (as above)

    try:
        with warnings.catch_warnings():
            # Pillow's size warning does not apply: only the header is read
            warnings.simplefilter("ignore")
            size = image_size(data)
        return f"{size['format']} {size['width']}x{size['height']} {size['mode']}"
    except Exception:  # noqa: BLE001  (Pillow raises various errors on damaged headers; show bytes instead)
        return None


def _array(data: bytes) -> str | None:
    from numpy.lib import format as npy  # noqa: PLC0415

    stream = io.BytesIO(data)
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(stream)
    except Exception:  # noqa: BLE001  (numpy's header parser uses Python's tokenizer, which raises various errors)
        return None
    kind = "Python objects: not opened" if dtype.hasobject else str(dtype)
    return f"array {kind} {'x'.join(map(str, shape)) or 'scalar'}"


def _preview(data: bytes) -> str:
    more = " …" if len(data) > _PREVIEW_BYTES else ""
    return f"bytes {data[:_PREVIEW_BYTES].hex(' ')}{more}"


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


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show bytes done, rate and time left on a terminal's stderr; yields its update function, else None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn  # noqa: PLC0415

    with terminal_bar(title, DownloadColumn(), TransferSpeedColumn()) as update:
        yield lambda done, total: update(completed=done, total=total or None)


@contextmanager
def terminal_bar(title: str, *columns: Any, **fields: Any) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr while the block runs, if that is a terminal.

    Args:
        title: Text before the bar.
        columns: Columns of ``rich.progress`` between the bar and the time left.
        fields: Initial values of the columns' ``task.fields``.

    Yields:
        ``update(completed=, total=, **fields)``.
    """
    if not sys.stderr.isatty():
        yield lambda **_: None
        return
    from rich.console import Console  # noqa: PLC0415  (50 ms that not every command needs)
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    shown = (TextColumn(title, markup=False), BarColumn(), *columns, TimeRemainingColumn())
    with Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        yield partial(bar.update, bar.add_task(title, total=None, **fields))
