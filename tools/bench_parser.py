"""Benchmark the tar parser against Python's tarfile on the same bytes, in members per second.

    python tools/bench_parser.py [--samples N]

Each sample is a 550-byte npy and a 30-byte json, in memory; one core, the median of five rounds.
"""

from __future__ import annotations

import argparse
import io
import itertools
import platform
import statistics
import tarfile
import time
from collections.abc import Callable

from shardstream.format import (
    END_OF_ARCHIVE,
    encode_member,
    iter_members,
    iter_samples,
    read_sample,
    scan_shard,
)

_ROUNDS = 5


def make_tar(samples: int) -> bytes:
    """Return a shard of small samples."""
    pieces: list[bytes | memoryview] = []
    for number in range(samples):
        pieces += encode_member(f"{number:08d}.npy", bytes(550))
        pieces += encode_member(f"{number:08d}.json", bytes(30))
    return b"".join([*pieces, END_OF_ARCHIVE])


def rate(count: int, work: Callable[[], object]) -> float:
    """Return items per second: the median of some rounds."""
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return count / statistics.median(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--samples", type=int, default=50_000, help="samples of the shard; two members each"
    )
    samples = parser.parse_args().samples
    tar = make_tar(samples)

    def read(at: int, size: int) -> bytes:
        return tar[at : at + size]

    def by_number() -> None:
        for start, end in itertools.pairwise(offsets):
            read_sample(tar, 0, start, end, "x")

    offsets = scan_shard(read, end=len(tar), shard="x").offsets.tolist()

    def by_tarfile() -> None:
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            archive.getmembers()

    rows = (
        (
            "headers (iter_members)",
            "members",
            2 * samples,
            lambda: sum(1 for _ in iter_members(read, end=len(tar))),
        ),
        (
            "index (scan_shard)",
            "members",
            2 * samples,
            lambda: scan_shard(read, end=len(tar), shard="x"),
        ),
        (
            "samples in order",
            "samples",
            samples,
            lambda: sum(1 for _ in iter_samples(read, end=len(tar), shard="x")),
        ),
        ("samples by number", "samples", samples, by_number),
        (
            "headers by tarfile",
            "members",
            2 * samples,
            by_tarfile,
        ),
    )
    print(f"Python {platform.python_version()}, {len(tar) / 1e6:.0f} MB, {2 * samples} members")
    for name, unit, count, work in rows:
        print(f"{name:26}{rate(count, work):12,.0f} {unit}/s")


if __name__ == "__main__":
    main()
