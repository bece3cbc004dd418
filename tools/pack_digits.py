"""Pack the 1,797 hand-written digits that come with scikit-learn: ``python tools/pack_digits.py --dest /tmp/digits``.

Each is a PNG of 8 x 8 grey pixels, 0 to 255, and a label from 0 to 9 in ``cls``. They are the test set of E. Alpaydin and
C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (CC BY 4.0).
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import typer
from sklearn.datasets import load_digits

from shardstream.cli import parse_split
from shardstream.errors import ShardStreamError
from shardstream.packing import pack


def main() -> int:
    """Read the command line, pack, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dest", required=True, help="folder or pattern with {shard}")
    parser.add_argument("--split", help="e.g. train=0.9,val=0.1")
    parser.add_argument("--max-samples", type=int, default=500, help="samples of a shard")
    parser.add_argument("--seed", type=int, default=0, help="of the order and of the split")
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args()
    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)  # 16 is white there
    samples = [
        {"png": image, "cls": int(label)}
        for image, label in zip(pixels, digits.target, strict=True)
    ]
    try:
        report = pack(
            samples,
            args.dest,
            name="digits",
            split=parse_split(args.split),
            shuffle=True,
            seed=args.seed,
            max_samples=args.max_samples,
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
