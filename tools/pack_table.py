"""Pack the rows of a table: ``python tools/pack_table.py captions.csv --dest packed/ --map jpg=path --map txt=caption``.

All options of ``shardstream pack`` may follow: --key, --root, --split train=0.9,val=0.1, --processes 2, --overwrite, …
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
    parser.add_argument("table", help=".csv, .tsv, .jsonl, .parquet, or a quoted glob of them")
    parser.add_argument("--dest", required=True, help="folder or pattern with {shard}")
    args, options = parser.parse_known_args()
    return shardstream(["pack", args.table, args.dest, "--kind", "table", *options])


if __name__ == "__main__":
    sys.exit(main())
