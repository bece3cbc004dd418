"""Pack a folder of class folders with images: ``python tools/pack_imagefolder.py photos/ --dest s3://bucket/photos/``.

All options of ``shardstream pack`` may follow: --split train=0.9,val=0.1, --max-side 512, --processes 2, --overwrite, …
"""

from __future__ import annotations

import argparse
import sys

from shardstream.cli import main as shardstream


def main() -> int:
    """Read the command line, pack, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="folder that holds a folder for each class")
    parser.add_argument("--dest", required=True, help="folder or pattern with {shard}")
    args, options = parser.parse_known_args()
    return shardstream(["pack", args.source, args.dest, "--kind", "images", *options])


if __name__ == "__main__":
    sys.exit(main())
