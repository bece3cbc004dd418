"""``shardstream ls``, ``cat`` and ``view``: show the shards and samples of a dataset."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardstream.cli.options import AsJson, FromZero, load_function, parse_options, parse_version
from shardstream.cli.terminal import aligned, describe, printable, progress_bar, shortened
from shardstream.errors import OptionError, StorageError, how_to_install, human_bytes, plural

if TYPE_CHECKING:
    from shardstream.catalog import Listing

_CLASSES_CHARACTERS = 100


def ls(
    urls: list[str],
    *,
    as_json: AsJson = False,
    version: str | None = None,
    option: list[str] | None = None,
) -> None:
    """List the shards of a dataset: samples, sizes, fields.

    Reads index.json, or else the names and sizes of the files and one sample; never a whole shard. A "?" marks a number that
    is unknown without 'shardstream index'. All splits of a folder are listed; exit code 1: one is not finished.

    Example:
      shardstream ls s3://bucket/train/ --json
    """
    from shardstream.catalog import (  # noqa: PLC0415  (numpy and fsspec take 300 ms)
        list_shards,
        list_splits,
    )

    options = parse_options(option, *urls)
    try:
        listing = list_shards(urls, version=parse_version(version), storage_options=options)
    except StorageError:
        splits = (
            {}
            if len(urls) > 1 or version is not None
            else list_splits(urls[0], storage_options=options)
        )
        if not splits:
            raise
    else:
        splits = {"": listing}
    if as_json:
        splits_shown = {name: split and _as_json(split) for name, split in splits.items()}
        typer.echo(json.dumps(splits_shown.get("", {"splits": splits_shown}), indent=1))
    else:
        _list_all(splits)
    if None in splits.values():
        raise typer.Exit(1)


def _list_all(splits: Mapping[str, Listing | None]) -> None:
    for number, (name, split) in enumerate(splits.items()):
        if name:
            state = ": not finished" if split is None else ""
            typer.echo("\n" * (number > 0) + f"{printable(name)}/{state}")
        if split is not None:
            _list(split)


def _list(listing: Listing) -> None:
    rows = [("shard", "samples", "size", "index"), *_rows(listing)]
    for line in (*aligned(rows, right=frozenset({1, 2})), *_summary(listing)):
        typer.echo(line)


def cat(  # noqa: PLR0913  (the options of a command)
    urls: list[str],
    *,
    number: FromZero = None,
    key: str | None = None,
    field: str | None = None,
    output: str | None = None,
    version: str | None = None,
    option: list[str] | None = None,
) -> None:
    """Show one sample, or extract one of its fields.

    Examples:
      shardstream cat data/train/ --key 0001
      shardstream cat s3://bucket/train/ --number 5 --field png --output 5.png

    Options:
      number (N): Number of the sample, from 0; by default 0.
      key (KEY): Key of the sample; searches shard by shard.
      field (FIELD): Show only this field, text in full.
      output (FILE): With --field: write its bytes to this file, replacing it; - is standard output.
    """
    if number is not None and key is not None:
        raise typer.BadParameter("give --number or --key, not both")
    if output is not None and field is None:
        raise typer.BadParameter("--output needs --field: one file holds one field")
    from shardstream.catalog import class_name, read_one  # noqa: PLC0415

    number = 0 if number is None and key is None else number
    with progress_bar("searching") as progress:
        sample = read_one(
            urls,
            number=number,
            key=key,
            version=parse_version(version),
            storage_options=parse_options(option, *urls),
            progress=progress,
        )
    fields = [name for name in sample if not name.startswith("__")]
    if field is not None and field not in fields:
        raise OptionError(
            f"the sample has no field {field!r}; choose from {', '.join(fields)}",
            key=sample["__key__"],
        )
    if field is None or output is None:
        _show(
            sample,
            field,
            class_name(sample, parse_options(option)) if field is None else None,
        )
    else:
        _extract(sample[field], output)


def _extract(data: bytes, output: str) -> None:
    if output == "-":
        sys.stdout.buffer.write(data)
    else:
        Path(output).write_bytes(data)


def _show(sample: dict[str, Any], field: str | None, class_name: str | None) -> None:
    if field is not None:
        typer.echo(describe(field, sample[field], limit=None))
        return
    typer.echo(f"key    {printable(sample['__key__'])}")
    typer.echo(f"shard  {printable(sample['__url__'])}")
    rows = [
        (
            printable(name),
            human_bytes(len(data)),
            describe(name, data)
            + (f" ({printable(class_name)})" if name == "cls" and class_name else ""),
        )
        for name, data in sample.items()
        if not name.startswith("__")
    ]
    for line in aligned([("field", "size", "content"), *rows], right=frozenset({1})):
        typer.echo(line)


def _rows(listing: Listing) -> list[tuple[str, ...]]:
    return [
        (
            printable(shard.url),
            "?" if shard.nsamples is None else f"{shard.nsamples:,}",
            "?" if shard.filesize is None else human_bytes(shard.filesize),
            "yes" if shard.url in listing.indexed else "no",
        )
        for shard in listing.shards
    ]


def _summary(listing: Listing) -> list[str]:
    samples = "? samples" if listing.nsamples is None else plural(listing.nsamples, "sample")
    size = "? bytes" if listing.total_bytes is None else human_bytes(listing.total_bytes)
    total = f"total: {plural(len(listing.shards), 'shard')}, {samples}, {size}"
    if listing.name:
        total += f" ({printable(listing.name)})"
    whole = None if listing.nsamples is None else listing.nsamples + listing.deleted
    fields = ", ".join(
        printable(name) if count in (None, whole) else f"{printable(name)} ({count:,})"
        for name, count in listing.fields.items()
    )
    lines = [total, f"fields: {fields or 'none'}"]
    if listing.deleted or (listing.version or 1) > 1:
        deleted = f"{plural(listing.deleted, 'sample')} of these shards deleted"
        lines.append(f"version: {listing.version or 'unknown'}, {deleted}")
    if listing.classes:
        names = shortened(", ".join(map(printable, listing.classes)), _CLASSES_CHARACTERS)
        lines.append(f"classes: {len(listing.classes):,} ({names})")
    return lines


def _as_json(listing: Listing) -> dict[str, Any]:
    return {
        "name": listing.name,
        "manifest": listing.manifest_url,
        "version": listing.version,
        "deleted": listing.deleted,
        "nsamples": listing.nsamples,
        "total_bytes": listing.total_bytes,
        "fields": dict(listing.fields),
        "classes": listing.classes,
        "shards": [
            {
                "url": shard.url,
                "nsamples": shard.nsamples,
                "filesize": shard.filesize,
                "sha256": shard.sha256,
                "indexed": shard.url in listing.indexed,
            }
            for shard in listing.shards
        ],
    }


def view(  # noqa: PLR0913  (the options of a command)
    urls: list[str],
    *,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 0,
    host: str = "127.0.0.1",
    no_browser: Annotated[bool, typer.Option("--no-browser")] = False,
    bad: Annotated[list[str] | None, typer.Option("--bad")] = None,
    decode: str | None = None,
    dataset: str | None = None,
    version: str | None = None,
    option: list[str] | None = None,
) -> None:
    """Look at a dataset in the browser: samples, histograms, epochs, bad samples.

    Reads only the samples that are shown. The page is served to this machine alone, at an address with a secret token.
    Ctrl-C ends it.

    Examples:
      shardstream view s3://bucket/train/ --port 8900 --no-browser
      shardstream view data/train/ --bad bad.jsonl --decode my_formats:decode_dicom
      shardstream view data/photos/ data/drawings/ --dataset train:make_dataset

    Options:
      port (N): Port; 0 takes a free one.
      host (ADDRESS): Address to listen at; others than 127.0.0.1 can be reached from the network, without encryption.
      no_browser: Only print the address, open no browser.
      bad (FILE): Report of bad samples, written by SkipBudget(report=); may be repeated.
      decode (MODULE:FUNCTION): Function from a sample, a dict of bytes, to a dict of values, such as pictures and arrays.
      dataset (MODULE:FUNCTION): Function that returns the dataset of a training (a mix, weights, ...), whose epochs are shown.
        Imports torch.
    """
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise OptionError(f"the viewer needs {' and '.join(missing)}: {how_to_install('view')}")
    from shardstream.viewer import Address, ViewOptions, open_source, serve  # noqa: PLC0415

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
