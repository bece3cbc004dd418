"""Options of commands: those that several share, their values, and the help of all.

The docstring of a command describes its options; this one those that several commands have.

Options:
  urls (URL): Folder, tar, quoted pattern or index.json.
  url (FOLDER): Folder of the dataset.
  dest (DEST): Folder, or pattern such as "s3://bucket/train/{shard:06d}.tar".
  as_json: Write JSON.
  option (KEY=VALUE): Option for the file system, as in fsspec's storage_options; may be repeated. Pass secrets in AWS_*
    variables instead.
  source_option (KEY=VALUE): As --option, for the source; by default --option applies to both.
  version (N|TAG): Read this version of the dataset; by default the current one.
  threads (N): Shards to read concurrently.
  max_samples (N): Samples per shard.
  max_bytes (SIZE): Size of a shard: 256MB, 1GiB.
  name (NAME): Name of the dataset, stored in index.json.
  columns (FIELDS): Also write NAME.tar.cols.parquet with the keys and these values, for where=, keys in subset= and planned
    rows: fields, values in JSON, and lengths of files, e.g. cls,json.width,n=npy.len,t=txt.len,f=mp4.frames,s=wav.seconds,w=jpg.width.
  overwrite: Replace an existing dataset, or the unfinished output of a different command.
  processes (N): Processes that do the work.
  part (K/N): Do part K of N only, for a Slurm array or several machines; then publish with 'shardstream merge'.
  ray: Work on a Ray cluster: of --ray-address or RAY_ADDRESS, else one started on this machine.
  ray_address (HOST:PORT): Work on the Ray cluster at this address.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardstream.cli.terminal import printable
from shardstream.errors import OptionError, plural

if TYPE_CHECKING:
    from shardstream.tasks import Executor

AsJson = Annotated[bool, typer.Option("--json")]
FromZero = Annotated[int | None, typer.Option(min=0)]
FromOne = Annotated[int | None, typer.Option(min=1)]
MaxSamples = Annotated[int, typer.Option(min=1)]
Overwrite = Annotated[bool, typer.Option("--overwrite")]
Ray = Annotated[bool, typer.Option("--ray")]
TaskProcesses = Annotated[int | None, typer.Option(min=1, max=1024)]
Threads = Annotated[int | None, typer.Option(min=1, max=256, show_default="4")]

_EXAMPLES = re.compile(r"(?m)^(Examples?:\n)")
_OPTIONS = "\n\nOptions:\n"
_OPTION = re.compile(r"(?m)^  (\w+)(?: \(([^)]*)\))?: (.+(?:\n {4}.+)*)")
# The values of these stay text even if they look like numbers.
_TEXT_OPTIONS = frozenset({"key", "secret", "token", "username", "password"})


def executor_of(
    processes: int | None, part: str | None, *, ray: bool = False, ray_address: str | None = None
) -> Executor | None:
    """Return the executor that ``--processes``, ``--part`` and ``--ray`` describe; None without any.

    Raises:
        typer.BadParameter: If there is no such part, or the options exclude each other.
    """
    if ray or ray_address is not None:
        if part is not None or processes is not None:
            raise typer.BadParameter(
                "leave --processes and --part out: Ray runs the tasks on its own workers",
                param_hint="--ray",
            )
        from shardstream.ray import RayExecutor  # noqa: PLC0415

        return RayExecutor(ray_address)
    if part is None and processes is None:
        return None
    from shardstream.tasks import LocalExecutor, Parts  # noqa: PLC0415

    if part is None:
        return LocalExecutor(processes=processes or 1)
    try:
        return Parts.parse(part, processes=processes or 1)
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint="--part") from error


def state_of_parts(unfinished: int, folder: str) -> str:
    r"""Say how many tasks of a job in parts are not done, and the command that publishes it.

    >>> state_of_parts(0, "out")
    'all tasks are done; publish with:\n  shardstream merge out'
    """
    merge = f"\n  shardstream merge {printable(folder)}"
    if not unfinished:
        return f"all tasks are done; publish with:{merge}"
    return (
        f"{plural(unfinished, 'task')} of other parts not done; when they are, publish with:{merge}"
    )


def help_of(docstring: str | None) -> str:
    r"""Return the docstring of a command as help text, without its options, with the line breaks of its examples.

    >>> help_of("List.\n\n    Example:\n      shardstream ls data/\n\n    Options:\n      name: Name.")
    'List.\n\n\x08\nExample:\n  shardstream ls data/'
    """
    text, _, _ = inspect.cleandoc(docstring or "").partition(_OPTIONS)
    # A line with only a backspace: click does not rewrap the paragraph after it.
    return _EXAMPLES.sub("\b\n\\1", text)


def describe_options(docstring: str | None) -> dict[str, tuple[str | None, str]]:
    r"""Return the metavar and help of the options that a docstring describes, by parameter.

    >>> describe_options("List.\n\n    Options:\n      key (KEY): Key of\n        the sample.\n      yes: Delete.")
    {'key': ('KEY', 'Key of the sample.'), 'yes': (None, 'Delete.')}
    """
    _, _, section = inspect.cleandoc(docstring or "").partition(_OPTIONS)
    return {
        name: (metavar or None, " ".join(text.split()))
        for name, metavar, text in _OPTION.findall(section)
    }


SHARED = describe_options(__doc__)
"""Metavar and help of the options that several commands have."""


def parse_options(options: Sequence[str] | None, *urls: str) -> dict[str, Any]:
    """Parse ``key=value`` options; values are JSON (true, 4, {"a": 1}) if valid, else text.

    >>> parse_options(["anon=true", "key=123", "endpoint_url=http://host:9000"])
    {'anon': True, 'key': '123', 'endpoint_url': 'http://host:9000'}

    Raises:
        typer.BadParameter: If there is no equals sign, or all of the URLs are files of this machine, on which options have no effect.
    """
    parsed: dict[str, Any] = {}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not (name and equals):
            # The message omits the value: it may be a secret.
            raise typer.BadParameter("give it as KEY=VALUE", param_hint="--option")
        parsed[name] = value if name in _TEXT_OPTIONS else _json_or_text(value)
    if parsed and urls and not any(map(_may_be_remote, urls)):
        raise typer.BadParameter(
            "files of this machine have no options; leave it out", param_hint="--option"
        )
    return parsed


def _may_be_remote(url: str) -> bool:
    """Return whether a URL is remote, or of this machine but perhaps with a manifest that names remote shards."""
    return "://" in url or "::" in url or os.path.isdir(url) or url.endswith((".json", "*", "}"))


def parse_stores(
    option: Sequence[str] | None, source_option: Sequence[str] | None, *urls: str
) -> dict[str, Any]:
    """Return ``--option`` and ``--source-option`` as the arguments ``storage_options`` and ``source_options``."""
    return {
        "storage_options": parse_options(option, *urls),
        "source_options": parse_options(source_option) if source_option else None,
    }


def parse_version(text: str | None) -> int | str | None:
    """Return a version as `ss.ShardDataset` takes it.

    >>> parse_version("12"), parse_version("paper")
    (12, 'paper')
    """
    return int(text) if text is not None and text.isdecimal() else text


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def load_function(name: str, option: str) -> Callable[..., Any]:
    """Import a function by its name.

    >>> load_function("os.path:basename", "--decode")("a/b")
    'b'

    Args:
        name: ``module:function``.
        option: Option that names it, for errors.

    Raises:
        OptionError: If there is no such function.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise OptionError(f"give {option} as module:function, not {name!r}")
    sys.path.insert(0, "")  # functions in the folder where the command runs
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{option} {name}: {error}") from error
    if not callable(found):
        raise OptionError(f"{option} {name}: it is no function")
    function: Callable[..., Any] = found
    return function
