"""``shardstream pack``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardstream.cli.options import (
    Columns,
    Dest,
    MaxBytes,
    MaxSamples,
    Name,
    Overwrite,
    Part,
    Ray,
    RayAddress,
    SourceOption,
    StorageOption,
    executor_of,
    parse_stores,
    state_of_parts,
)
from shardstream.cli.pack_progress import job_bar, print_checks, print_warnings, report_interruption
from shardstream.cli.terminal_text import aligned, printable
from shardstream.errors import human_bytes, plural

if TYPE_CHECKING:
    from shardstream.packing import PackReport

_SKIPS_SHOWN, _FIELDS_SHOWN = 10, 12


_Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Folder, table (.csv .tsv .jsonl .parquet), tar or quoted pattern of tars.",
    ),
]
_Kind = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Kind of the source: images (a folder for each class), files (grouped by name), table or tars. "
        "By default detected.",
    ),
]
_Mapping = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="FIELD=COLUMN",
        help="For a table: the column of a field, e.g. jpg=path; may be repeated. "
        "By default all columns go into one field, json.",
    ),
]
_Root = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="For a table: the folder that its paths are relative to. By default the table's folder.",
    ),
]
_Allow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL-PREFIX",
        help="For a table on a server: a beginning of URLs, such as https:// or s3://bucket/images, that it may name outside "
        "the folder of --root; may be repeated. A local table may name anything.",
    ),
]
_Header = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,…",
        help="For CSV and TSV without names in their first line: the names of all columns.",
    ),
]
_Classes = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Use the class numbers of this classes.json or packed dataset. By default those of a packed split next to DEST, "
        "else in the order of their names.",
    ),
]
_Key = Annotated[
    str | None,
    typer.Option(
        metavar="TEMPLATE",
        help='Template of sample keys: "{index:08d}", "{class}/{stem}", "{path}"; for a table also a column. By default the stems '
        "of images, or their paths if stems are not unique; the path of loose files; the number of a row.",
    ),
]
_Split = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=PART,…",
        help="Split into several datasets, e.g. train=0.9,val=0.1: in DEST/train and DEST/val.",
    ),
]
_Shuffle = Annotated[
    bool | None,
    typer.Option(
        "--shuffle/--no-shuffle",
        help="Pack in random order. By default only for a source with a folder for each class.",
    ),
]
_Seed = Annotated[int, typer.Option(help="Seed of the order and of the split.")]
_MaxSide = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="PIXELS",
        help="Limit of an image's longest side; larger images are shrunk.",
    ),
]
_ImageFormat = Annotated[
    str | None,
    typer.Option(metavar="FORMAT", help="Convert all images to jpg, png or webp."),
]
_Masks = Annotated[
    str | None,
    typer.Option(
        metavar="FIELD,…",
        help="Fields whose pixels are numbers, such as class ids: shrunk without averaging, never converted to another "
        "format; or none. By default seg.png, mask.png and similar names, and a png next to a jpg.",
    ),
]
_Scale16Bits = Annotated[
    bool,
    typer.Option(
        "--scale-16-bits", help="Scale images of 9 to 16 bits to 8 bits; masks keep all bits."
    ),
]
_Quality = Annotated[
    int | None,
    typer.Option(
        min=1, max=100, help="Quality of re-encoded JPEG and WebP images.", show_default="90"
    ),
]
_Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Decode all pixels of each image: a truncated one is an error, or left out with --skip-errors.",
    ),
]
_Processes = Annotated[
    int,
    typer.Option(
        min=1, metavar="N", help="Processes that read and encode; the output does not depend on it."
    ),
]
_Append = Annotated[
    bool,
    typer.Option("--append", help="Add the shards to the dataset at DEST, as a new version."),
]
_KeyCheck = Annotated[
    bool,
    typer.Option(
        "--key-check/--no-key-check",
        help="With --append: compare the keys with those of the dataset; the first time this reads all of them.",
    ),
]
_SkipErrors = Annotated[
    bool,
    typer.Option(
        "--skip-errors",
        help="Leave out files and rows that cannot be packed, and list them.",
    ),
]
_Report = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Write a line of JSON, with its place and the reason, for each file or row that --skip-errors leaves out.",
    ),
]


def pack(  # noqa: PLR0913  (the options of a command)
    source: _Source,
    dest: Dest,
    *,
    kind: _Kind = None,
    mapping: _Mapping = None,
    root: _Root = None,
    allow: _Allow = None,
    header: _Header = None,
    classes: _Classes = None,
    key: _Key = None,
    split: _Split = None,
    shuffle: _Shuffle = None,
    seed: _Seed = 0,
    max_samples: MaxSamples = 10_000,
    max_bytes: MaxBytes = "256MB",
    columns: Columns = None,
    max_side: _MaxSide = None,
    image_format: _ImageFormat = None,
    masks: _Masks = None,
    scale_16_bits: _Scale16Bits = False,
    quality: _Quality = None,
    check: _Check = False,
    processes: _Processes = 1,
    part: Part = None,
    ray: Ray = False,
    ray_address: RayAddress = None,
    name: Name = "",
    append: _Append = False,
    key_check: _KeyCheck = True,
    overwrite: Overwrite = False,
    skip_errors: _SkipErrors = False,
    report: _Report = None,
    option: StorageOption = None,
    source_option: SourceOption = None,
) -> None:
    """Pack images, files, tables or tars into shards for training.

    Writes tars, an index for each, and index.json last, which publishes the dataset. Equal input gives equal bytes. To resume
    a stopped or killed command, run it again: finished shards are kept.

    A folder of images has a folder for each class; labels go to "cls", names to classes.json. If it has the folders train,
    val, ... with the classes inside, each becomes a dataset in DEST, all with the same class numbers. Loose files become one
    sample per name: 0001.jpg and 0001.json. In a table, a column mapped to an image or another file holds its path.

    Examples:
      shardstream pack photos/ s3://bucket/photos/ --split train=0.9,val=0.1
      shardstream pack photos/ packed/ --max-side 512 --image-format jpg --processes 8
      shardstream pack captions.csv packed/ --map jpg=path --map txt=caption
      shardstream pack new_photos/ s3://bucket/photos/train --append
      shardstream pack "old/{000000..000099}.tar" new/ --max-bytes 1GB
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
    if part is not None:
        folder, name = report.splits[0].url, report.splits[0].name
        state = state_of_parts(
            report.unfinished, folder.removesuffix(f"/{name}") if name else folder
        )
        typer.echo(f"part {part}: {state}")
        return
    print_checks(report)


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
