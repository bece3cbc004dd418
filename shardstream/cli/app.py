"""Run the command line: all commands, error messages and exit codes."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.main import get_command

from shardstream.cli.maintain_dataset import (
    close,
    compact,
    delete,
    diff,
    doctor,
    gc,
    index,
    log,
    tag,
    verify,
)
from shardstream.cli.options import SHARED, describe_options, help_of
from shardstream.cli.plan_bench import bench, first_use, plan
from shardstream.cli.show_dataset import cat, ls, view
from shardstream.cli.terminal import printable
from shardstream.cli.write_shards import merge, pack, reshard
from shardstream.errors import ShardStreamError

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
_DEBUG = "--debug"

app = typer.Typer(
    name="shardstream",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Markup off: brackets in URLs and keys would be parsed as markup.
    rich_markup_mode=None,
)
_READERS = (index, verify, ls, cat, view, plan, first_use, bench, doctor)
_CHANGES = (delete, compact, log, diff, tag, gc, close)
for command in (pack, reshard, merge, *_READERS, *_CHANGES):
    text = help_of(command.__doc__)
    app.command(help=text, short_help=text.partition("\n")[0])(command)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"shardstream {metadata.version('shardstream')}")
        raise typer.Exit


@app.callback()
def _common(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
    debug: Annotated[bool, typer.Option(_DEBUG, help="Show the traceback of an error.")] = False,
) -> None:
    """Pack samples into tar shards for training; reshard, index, verify, list, change, view and measure shards.

    A URL is a folder (data/train/), a tar, a pattern ("s3://bucket/train/{000000..000099}.tar") or an index.json. Quote
    patterns, or the shell expands them. Credentials and server come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and
    AWS_ENDPOINT_URL.
    """


def command_tree() -> Any:
    """Return all commands as typer's group, for tools that list them."""
    tree: Any = get_command(app)
    for command in tree.commands.values():
        described = SHARED | describe_options(command.callback.__doc__)
        for parameter in command.params:
            if parameter.name in described:
                parameter.metavar, parameter.help = described[parameter.name]
            if parameter.param_type_name == "argument":
                parameter.display_type = lambda ctx: ""  # noqa: ARG005  ("<list[str]>" helps nobody)
    return tree


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; by default those of the process.

    Returns:
        The exit code: 0 success, 1 an error or problems found, 2 wrong usage, 130 interrupted, 143 terminated.
    """
    # atexit runs in reverse order: registered before multiprocessing is imported, it runs after multiprocessing's handlers
    if argv is None:
        atexit.register(_end_resource_tracker)
    with _sigterm_raised():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = _DEBUG in arguments
    if debug:  # accepted at any position, so that it can be appended to a failed command
        arguments = [_DEBUG, *(argument for argument in arguments if argument != _DEBUG)]
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe (such as head). Without this, Python's flush at exit would fail with a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (ShardStreamError, OSError) as error:
        if debug:
            sys.stderr.writelines(
                f"{printable(line)}\n" for line in traceback.format_exc().split("\n")
            )
        else:
            for line in (f"error: {error}", *getattr(error, "__notes__", ())):
                sys.stderr.write(f"{printable(line)}\n")
        return 1
    return code


@contextmanager
def _sigterm_raised() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that files are closed and uploads aborted, as after Ctrl-C."""

    def end(*_: object) -> None:
        raise SystemExit(EXIT_TERMINATED)

    # signal handlers need the main thread
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_resource_tracker() -> None:
    """Stop multiprocessing's resource tracker process, which would briefly outlive the command."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    stop = getattr(getattr(tracker, "_resource_tracker", None), "_stop", None)
    if stop is not None:
        stop()


def _run(arguments: list[str]) -> int:
    try:
        command_tree()(arguments, prog_name="shardstream")
    except SystemExit as exit_:  # typer always exits this way
        return exit_.code if isinstance(exit_.code, int) else 1
    return 0
