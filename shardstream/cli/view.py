"""``shardstream view``."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from shardstream.cli.options import StorageOption, Urls, Version, parse_options, parse_version
from shardstream.cli.terminal_text import printable
from shardstream.errors import OptionError, how_to_install

_Port = Annotated[
    int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 takes a free one.")
]
_Host = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Address to listen at. Any other than 127.0.0.1 can be reached from the network, without encryption.",
    ),
]
_NoBrowser = Annotated[
    bool, typer.Option("--no-browser", help="Only print the address, open no browser.")
]
_Bad = Annotated[
    list[str] | None,
    typer.Option(
        "--bad",
        metavar="FILE",
        help="Report of bad samples, written by SkipBudget(report=); may be repeated.",
    ),
]
_Decode = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="Function that makes a dict of values of a sample, a dict of bytes; pictures and arrays among them are shown.",
    ),
]


_Dataset = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="Function that returns the dataset of a training (a mix, a join, weights, a subset, ...), whose epochs are shown. Imports torch.",
    ),
]


def view(  # noqa: PLR0913  (the options of a command)
    urls: Urls,
    *,
    port: _Port = 0,
    host: _Host = "127.0.0.1",
    no_browser: _NoBrowser = False,
    bad: _Bad = None,
    decode: _Decode = None,
    dataset: _Dataset = None,
    version: Version = None,
    option: StorageOption = None,
) -> None:
    """Look at a dataset in the browser: samples, histograms, epochs, bad samples.

    Reads the samples that are shown by range requests and downloads no tar. The page is served to this machine alone, at an
    address with a secret token. Ctrl-C ends it.

    Examples:
      shardstream view data/train/
      shardstream view s3://bucket/train/ --port 8900 --no-browser
      shardstream view data/train/ --bad bad.jsonl --decode my_formats:decode_dicom
      shardstream view data/photos/ data/drawings/ --dataset train:make_dataset
    """
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise OptionError(f"the viewer needs {' and '.join(missing)}: {how_to_install('view')}")
    from shardstream.viewer import Address, ViewOptions, load_function, open_source, serve  # noqa: PLC0415

    if decode is not None or dataset is not None:
        sys.path.insert(0, "")  # functions in the folder where the command runs
    options = ViewOptions(
        urls=tuple(urls),
        storage_options=parse_options(option, *urls, *(bad or ())),
        version=parse_version(version),
        bad=tuple(bad or ()),
        decode=None if decode is None else load_function(decode, "--decode"),
        training=None if dataset is None else open_source(load_function(dataset, "--dataset")),
    )
    if host not in ("127.0.0.1", "localhost", "::1"):
        typer.echo(
            f"warning: the page can be reached from the network at {printable(host)}, without encryption",
            err=True,
        )

    def say(page: str) -> None:
        typer.echo(f"{page}\npress Ctrl-C to stop")
        sys.stdout.flush()

    try:
        serve(options, Address(host=host, port=port, opens_browser=not no_browser), say)
    except KeyboardInterrupt:
        typer.echo("stopped")
