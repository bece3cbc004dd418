"""``shardstream pack``, ``reshard`` and ``merge``: write the samples of a source to shards."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardstream.cli.options import (
    FromOne,
    MaxSamples,
    Overwrite,
    Ray,
    TaskProcesses,
    executor_of,
    parse_options,
    parse_stores,
    parse_version,
    state_of_parts,
)
from shardstream.cli.terminal import (
    aligned,
    job_bar,
    print_checks,
    print_warnings,
    printable,
    report_interruption,
)
from shardstream.errors import human_bytes, plural

if TYPE_CHECKING:
    from shardstream.packing import PackReport

_SKIPS_SHOWN, _FIELDS_SHOWN = 10, 12


def pack(  # noqa: PLR0913  (the options of a command)
    source: str,
    dest: str,
    *,
    kind: str | None = None,
    mapping: Annotated[list[str] | None, typer.Option("--map")] = None,
    root: str | None = None,
    allow: list[str] | None = None,
    header: str | None = None,
    classes: str | None = None,
    key: str | None = None,
    split: str | None = None,
    shuffle: Annotated[bool | None, typer.Option("--shuffle/--no-shuffle")] = None,
    seed: int = 0,
    max_samples: MaxSamples = 10_000,
    max_bytes: str = "256MB",
    columns: str | None = None,
    max_side: FromOne = None,
    image_format: str | None = None,
    masks: str | None = None,
    scale_16_bits: Annotated[bool, typer.Option("--scale-16-bits")] = False,
    quality: Annotated[int | None, typer.Option(min=1, max=100, show_default="90")] = None,
    check: Annotated[bool, typer.Option("--check")] = False,
    processes: Annotated[int, typer.Option(min=1)] = 1,
    part: str | None = None,
    ray: Ray = False,
    ray_address: str | None = None,
    name: str = "",
    append: Annotated[bool, typer.Option("--append")] = False,
    key_check: Annotated[bool, typer.Option("--key-check/--no-key-check")] = True,
    overwrite: Overwrite = False,
    skip_errors: Annotated[bool, typer.Option("--skip-errors")] = False,
    report: str | None = None,
    option: list[str] | None = None,
    source_option: list[str] | None = None,
) -> None:
    """Pack images, files, tables or tars into shards for training.

    Writes tars, an index for each, and index.json last, which publishes the dataset. Equal input gives equal bytes. To resume
    a stopped or killed command, run it again: finished shards are kept.

    A folder of images has a folder for each class; labels go to "cls", names to classes.json. With folders train, val, ... above
    the classes, each becomes a dataset in DEST, all with the same class numbers. Loose files become one
    sample per name: 0001.jpg and 0001.json. In a table, a column mapped to a file holds its path.

    Examples:
      shardstream pack photos/ s3://bucket/photos/ --split train=0.9,val=0.1
      shardstream pack photos/ packed/ --max-side 512 --image-format jpg --processes 8
      shardstream pack captions.csv packed/ --map jpg=path --map txt=caption
      shardstream pack new_photos/ s3://bucket/photos/train --append
      shardstream pack "old/{000000..000099}.tar" new/ --max-bytes 1GB

    Options:
      source (SOURCE): Folder, table (.csv .tsv .jsonl .parquet), tar or quoted pattern of tars.
      kind (KIND): images (a folder for each class), files (grouped by name), table or tars. By default detected.
      mapping (FIELD=COLUMN): For a table: the column of a field, e.g. jpg=path; may be repeated. By default all
        columns go into one field, json.
      root (URL): For a table: the folder of its relative paths. By default the table's folder.
      allow (URL-PREFIX): For a table on a server: URLs that it may name outside the folder of --root, such as https:// or
        s3://bucket/images; may be repeated. A local table may name anything.
      header (NAME,…): Names of all columns, for CSV and TSV without them in the first line.
      classes (URL): Use the class numbers of this classes.json or packed dataset. By default those of a packed split
        next to DEST, else in the order of their names.
      key (TEMPLATE): Template of sample keys: "{index:08d}", "{class}/{stem}", "{path}"; for a table also a column.
        By default the stems of images, or their paths if stems are not unique; the path of loose files; the number of
        a row.
      split (NAME=PART,…): Split into several datasets, e.g. train=0.9,val=0.1: in DEST/train and DEST/val.
      shuffle: Pack in random order. By default only for a source with a folder for each class.
      seed: Seed of the order and of the split.
      max_side (PIXELS): Limit of an image's longest side; larger images are shrunk.
      image_format (FORMAT): Convert all images to jpg, png or webp.
      masks (FIELD,…): Fields whose pixels are numbers, such as class ids: shrunk without averaging, never converted; or none.
        By default seg.png, mask.png and similar names, and a png next to a jpg.
      scale_16_bits: Scale images of 9 to 16 bits to 8 bits; masks keep all bits.
      quality: Quality of re-encoded JPEG and WebP images.
      check: Decode all pixels of each image: a truncated one is an error, or left out with --skip-errors.
      processes (N): Processes that read and encode; the output does not depend on it.
      append: Add the shards to the dataset at DEST, as a new version.
      key_check: With --append: compare the keys with those of the dataset; the first time reads all keys.
      skip_errors: Leave out files and rows that cannot be packed, and list them.
      report (PATH): Write a line of JSON, with place and reason, for each file or row that --skip-errors leaves out.
    """
    import shardstream as ss  # noqa: PLC0415  (numpy, pillow and fsspec take 300 ms)

    images: dict[str, Any] = {"max_side": max_side, "check": check, "masks": parse_masks(masks)}
    images |= {"quality": quality, "image_format": image_format, "scale_16_bits": scale_16_bits}
    order: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "split": parse_split(split)}
    order |= {"kind": kind, "name": name, "overwrite": overwrite, "append": append}
    with report_interruption(), job_bar("packing") as progress:
        packed = ss.pack(
            source,
            dest,
            max_samples=max_samples,
            max_bytes=max_bytes,
            columns=columns,
            key=key,
            **order,
            **_table_options(mapping, root, allow, header),
            classes=classes,
            check_keys=key_check,
            **images,
            **_executor_options(processes, part, ray=ray, ray_address=ray_address),
            on_error="skip" if skip_errors else "raise",
            **{"progress": progress, **parse_stores(option, source_option)},
        )
    _show(packed, part, skips_path=report)


def _table_options(
    mapping: list[str] | None, root: str | None, allow: list[str] | None, header: str | None
) -> dict[str, Any]:
    names = [name.strip() for name in header.split(",")] if header else ()
    return {"fields": parse_mapping(mapping), "root": root, "allow": allow or (), "header": names}


def _executor_options(
    processes: int, part: str | None, *, ray: bool, ray_address: str | None
) -> dict[str, Any]:
    """Return the executor of ``--part`` and ``--ray``, or else the processes that encode."""
    if part is None and not ray and ray_address is None:
        return {"processes": processes}
    own = processes if processes > 1 else None
    return {"executor": executor_of(own, part, ray=ray, ray_address=ray_address)}


def parse_split(text: str | None) -> dict[str, float]:
    """Parse ``name=part,…``.

    >>> parse_split("train=0.9,val=0.1")
    {'train': 0.9, 'val': 0.1}

    Raises:
        typer.BadParameter: If it is anything else.
    """
    parts: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, number = (piece.strip() for piece in part.partition("="))
        try:
            fraction = float(number)
        except ValueError:
            fraction = -1.0
        if fraction < 0 or not name or name in parts:
            raise typer.BadParameter("give it as train=0.9,val=0.1", param_hint="--split")
        parts[name] = fraction
    return parts


def parse_masks(text: str | None) -> list[str] | None:
    """Parse ``field,field`` or ``none``.

    >>> parse_masks("png,seg.png"), parse_masks("none")
    (['png', 'seg.png'], [])
    """
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    return [] if names == ["none"] else names


def parse_mapping(items: list[str] | None) -> dict[str, str]:
    """Parse ``field=column`` options.

    >>> parse_mapping(["jpg=path", "txt=the caption"])
    {'jpg': 'path', 'txt': 'the caption'}

    Raises:
        typer.BadParameter: If one has another form, or a field is repeated.
    """
    fields: dict[str, str] = {}
    for item in items or ():
        field, equals, column = item.partition("=")
        if not (field and equals and column) or field in fields:
            raise typer.BadParameter(
                f"give each field once, as FIELD=COLUMN, not {item!r}", param_hint="--map"
            )
        fields[field] = column
    return fields


def _write_skips(report: PackReport, path: str) -> None:
    from shardstream.storage import Storage, publish_bytes  # noqa: PLC0415  (as above)

    lines = [json.dumps({"where": one.where, "reason": one.reason}) for one in report.skipped]
    publish_bytes(Storage(), path, "".join(f"{line}\n" for line in lines).encode())


def _show(report: PackReport, part: str | None, *, skips_path: str | None) -> None:
    """Print the result, write the skipped records, and print the command to check or publish it."""
    print_warnings(report.warnings)
    for skip in report.skipped[:_SKIPS_SHOWN]:
        typer.echo(f"skipped: {printable(skip.reason)}", err=True)
    if len(report.skipped) > _SKIPS_SHOWN:
        typer.echo(
            f"skipped: {len(report.skipped) - _SKIPS_SHOWN:,} more; --report PATH lists all",
            err=True,
        )
    skipped = f", {len(report.skipped):,} skipped" if report.skipped else ""
    rate = f" ({report.samples / max(report.seconds, 1e-3):,.0f} samples/s)"
    if report.kept:  # they took no time now
        typer.echo(f"kept {plural(report.kept, 'shard')} of an earlier run that was stopped")
        rate = ""
    typer.echo(
        f"packed {plural(report.samples, 'sample')} into {plural(report.shards, 'shard')}{skipped}: "
        f"{human_bytes(report.total_bytes)} in {report.seconds:.1f} s{rate}, from {printable(report.source)}"
    )
    typer.echo(_fields(report))
    rows: list[tuple[str, ...]] = [
        (
            f"  {split.name or 'dataset'}",
            plural(split.samples, "sample"),
            plural(split.shards, "shard"),
            human_bytes(split.total_bytes),
            printable(split.url),
        )
        for split in report.splits
    ]
    for line in aligned(rows, right=frozenset({1, 2, 3})):
        typer.echo(line)
    if skips_path is not None:  # it may fail; the dataset is written
        _write_skips(report, skips_path)
    _print_next(report, part)


def _print_next(report: PackReport, part: str | None) -> None:
    """Print the command to check what was written, or to publish the dataset that a part is of."""
    if part is None:
        print_checks(report)
        return
    folder, name = report.splits[0].url, report.splits[0].name
    state = state_of_parts(report.unfinished, folder.removesuffix(f"/{name}") if name else folder)
    typer.echo(f"part {part}: {state}")


def _fields(report: PackReport) -> str:
    """Describe the fields of the samples, and for loose files the numbers of files and samples."""
    max_shown = sorted(report.fields.items(), key=lambda one: (-one[1], one[0]))
    listed = ", ".join(
        printable(name) if count == report.samples else f"{printable(name)} ({count:,})"
        for name, count in max_shown[:_FIELDS_SHOWN]
    )
    more = ", …" if len(max_shown) > _FIELDS_SHOWN else ""
    made = f"{plural(len(max_shown), 'field')}: {listed}{more}"
    if report.files is None:
        return f"  {made}"
    return f"  {plural(report.files, 'file')} -> {plural(report.samples, 'sample')}, {made}"


def parse_add(texts: Sequence[str]) -> list[dict[str, dict[str, str] | None]]:
    """Parse the values of ``--add`` as `ss.join` takes them: URL -> field -> its name there; None for all fields.

    >>> parse_add(["s3://b/captions/", "a.parquet:__key__=id,txt"])
    [{'s3://b/captions/': None}, {'a.parquet': {'__key__': 'id', 'txt': 'txt'}}]

    Raises:
        typer.BadParameter: If a URL comes twice, or a name is empty.
    """
    added: dict[str, dict[str, str] | None] = {}
    for text in texts:
        url, _, names = text.rpartition(":")
        if not url or "/" in names:  # the colon of s3://, or none
            url, names = text, ""
        pairs = [one.strip().partition("=") for one in names.split(",")] if names else []
        fields = {field: name if sign else field for field, sign, name in pairs}
        if url in added or not all(itertools.chain.from_iterable(fields.items())):
            raise typer.BadParameter(
                "give each URL once, as URL or URL:FIELD,FIELD=NAME", param_hint="--add"
            )
        added[url] = fields or None
    return [{url: fields} for url, fields in added.items()]


def reshard(  # noqa: PLR0913  (the options of a command)
    urls: list[str],
    dest: str,
    *,
    max_samples: MaxSamples = 10_000,
    max_bytes: str = "256MB",
    columns: str | None = None,
    shuffle: Annotated[bool, typer.Option("--shuffle")] = False,
    seed: int | None = None,
    where: str | None = None,
    version: str | None = None,
    fields: str | None = None,
    add: Annotated[list[str] | None, typer.Option("--add")] = None,
    missing: str = "error",
    name: str = "",
    processes: TaskProcesses = None,
    part: str | None = None,
    ray: Ray = False,
    ray_address: str | None = None,
    overwrite: Overwrite = False,
    option: list[str] | None = None,
    source_option: list[str] | None = None,
) -> None:
    """Write the samples of shards to new shards: other sizes, another order, fewer or more fields.

    Remote shards need an index. Equal input gives equal bytes, also with --processes, --part and --ray. To resume a stopped or
    killed command, run it again. For functions on samples see ss.reshard in Python.

    Examples:
      shardstream reshard s3://bucket/train/ s3://bucket/large/ --max-bytes 1GB --processes 8
      shardstream reshard train/ shuffled/ --shuffle --seed 1
      shardstream reshard train/ wide/ --where "width >= 512"
      shardstream reshard train/ new/ --add captions/:txt --add scores.parquet:__key__=id,score.json=score

    Options:
      shuffle: Write all samples in a random order.
      seed (N): Write all samples in the random order of this seed; --shuffle alone takes 0.
      where (SQL): Write the samples whose columns fulfil a condition, e.g. 'cls in (3, 9) and width >= 512'.
      fields (NAME,NAME): Keep these fields; by default all.
      add (URL[:FIELD,…]): Add fields of other shards or of a table, by key; may be repeated. FIELD=NAME takes the field or
        column NAME; the keys of a table are in __key__ or key, or name their column: __key__=COLUMN.
      missing (error|keep|drop): For a sample whose key is not in --add: stop, keep it without the fields, or drop it.
    """
    import shardstream as ss  # noqa: PLC0415  (numpy and fsspec take 300 ms)

    with report_interruption(), job_bar("resharding") as progress:
        stores = parse_stores(option, source_option, *urls, dest, *(add or ()))
        source: Any = urls
        kept = None if fields is None else [one.strip() for one in fields.split(",")]
        reading = stores["source_options"] or stores["storage_options"]
        if where is not None or version is not None or add:  # imports torch
            source = ss.ShardDataset(
                urls, where=where, version=parse_version(version), storage_options=reading
            )
        if add:
            how: Any = {"by": "key", "missing": missing, "storage_options": reading}
            source, kept = ss.join({source: kept}, *parse_add(add), **how), None
        elif missing != "error":
            raise typer.BadParameter("is used with --add only", param_hint="--missing")
        report = ss.reshard(
            source,
            dest,
            max_samples=max_samples,
            max_bytes=max_bytes,
            columns=columns,
            seed=0 if shuffle and seed is None else seed,
            fields=kept,
            name=name,
            overwrite=overwrite,
            executor=executor_of(processes, part, ray=ray, ray_address=ray_address),
            progress=progress,
            **stores,
        )
    _print_report(report, part)


def _print_report(report: PackReport, part: str | None) -> None:
    print_warnings(report.warnings)
    if report.kept:
        typer.echo(f"kept {plural(report.kept, 'shard')} of an earlier run")
    counts = f"{plural(report.samples, 'sample')} in {plural(report.shards, 'shard')}"
    written = f"{counts}: {human_bytes(report.total_bytes)} in {report.seconds:.1f} s, from {printable(report.source)}"
    typer.echo(f"wrote {written}" if part is None else f"part {part}: wrote {written}")
    _print_next(report, part)


def merge(dest: str, *, option: list[str] | None = None) -> None:
    """Publish a dataset whose parts were written with --part, with all its splits.

    Writes index.json when all parts are done; otherwise names those that are missing.

    Example:
      shardstream merge s3://bucket/large/
    """
    import shardstream as ss  # noqa: PLC0415

    report = ss.merge(dest, storage_options=parse_options(option, dest))
    print_warnings(report.warnings)
    for split in report.splits:
        counts = f"{plural(split.samples, 'sample')} in {plural(split.shards, 'shard')}"
        typer.echo(f"published {counts}, {human_bytes(split.total_bytes)}: {printable(split.url)}")
    print_checks(report)
