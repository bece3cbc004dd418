"""Pack the rows of a table: ``python tools/pack_table.py captions.csv --dest packed/ --map jpg=path --map txt=caption``."""

from __future__ import annotations

import argparse
import sys

import typer

from shardstream.cli.pack import parse_mapping, parse_split
from shardstream.errors import ShardStreamError
from shardstream.write.job import pack


def main() -> int:
    """Read the command line, pack, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", help=".csv, .tsv, .jsonl, .parquet, or a quoted glob of them")
    parser.add_argument("--dest", required=True, help="folder or pattern with {shard}")
    parser.add_argument("--map", action="append", metavar="FIELD=COLUMN", help="may be repeated")
    parser.add_argument("--key", help="column, or template such as '{index:08d}'")
    parser.add_argument("--root", help="folder that paths are relative to")
    parser.add_argument("--split", help="e.g. train=0.9,val=0.1")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args()
    try:
        report = pack(
            args.table,
            args.dest,
            kind="table",
            fields=parse_mapping(args.map),
            key=args.key,
            root=args.root,
            split=parse_split(args.split),
            processes=args.processes,
            overwrite=args.overwrite,
        )
    except (ShardStreamError, typer.BadParameter) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{report.samples:,} samples, {report.shards:,} shards, {report.total_bytes:,} bytes: {args.dest}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
