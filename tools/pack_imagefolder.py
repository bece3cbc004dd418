"""Pack a folder of class folders with images: ``python tools/pack_imagefolder.py photos/ --dest s3://bucket/photos/``."""

from __future__ import annotations

import argparse
import sys

import typer

from shardstream.cli.pack import parse_split
from shardstream.errors import ShardStreamError
from shardstream.write.job import pack


def main() -> int:
    """Read the command line, pack, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="folder that holds a folder for each class")
    parser.add_argument("--dest", required=True, help="folder or pattern with {shard}")
    parser.add_argument("--split", help="e.g. train=0.9,val=0.1")
    parser.add_argument("--max-side", type=int, help="longest side of an image in pixels")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args()
    try:
        report = pack(
            args.source,
            args.dest,
            kind="images",
            split=parse_split(args.split),
            max_side=args.max_side,
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
