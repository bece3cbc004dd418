"""What several commands take: URLs, storage options, and a progress bar."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

Urls = Annotated[
    list[str],
    typer.Argument(
        metavar="URL", help="Folder, tar, quoted pattern or index.json.", show_default=False
    ),
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="Option for the file system, as in fsspec's storage_options; may be repeated. "
        "Secrets are better kept in AWS_* variables.",
        show_default=False,
    ),
]
Threads = Annotated[
    int, typer.Option(min=1, max=256, metavar="N", help="Shards to read at a time.")
]

_EXAMPLES = re.compile(r"(?m)^(Examples?:\n)")
# Their values are text even where they look like numbers.
_TEXT_OPTIONS = frozenset({"key", "secret", "token", "username", "password"})


def help_of(docstring: str | None) -> str:
    r"""Return the docstring of a command as its help, with the lines of its examples left as they are.

    >>> help_of("List.\n\n    Example:\n      shardstream ls data/")
    'List.\n\n\x08\nExample:\n  shardstream ls data/'
    """
    # A backspace alone on its line: typer does not rewrap the paragraph that follows.
    return _EXAMPLES.sub("\b\n\\1", inspect.cleandoc(docstring or ""))


def parse_options(options: Sequence[str] | None) -> dict[str, Any]:
    """Read ``key=value`` options; a value that is JSON (true, 4, {"a": 1}) counts as that, any other as text.

    >>> parse_options(["anon=true", "key=123", "endpoint_url=http://host:9000"])
    {'anon': True, 'key': '123', 'endpoint_url': 'http://host:9000'}

    Raises:
        typer.BadParameter: If there is no equals sign.
    """
    parsed: dict[str, Any] = {}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not (name and equals):
            # Not the text itself: it may be a secret.
            raise typer.BadParameter("give it as KEY=VALUE", param_hint="--option")
        parsed[name] = value if name in _TEXT_OPTIONS else _json_or_text(value)
    return parsed


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show bytes done and to do on stderr, if it is a terminal; yields what to tell them to, None if nobody looks."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415  (50 ms that not every command needs)
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)
