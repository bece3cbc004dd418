"""Fuzz parser, grouping and index with damaged and hostile tars: no crash, no hang, one meaning.

    python tools/fuzz_tar.py [--seconds N] [--seed N] [FILE_OR_FOLDER ...]
    python tools/fuzz_tar.py --atheris [libFuzzer options] [CORPUS_FOLDER ...]

Without atheris it mutates its own small tars, and the files given, for some seconds. With it (``pip install atheris``, not on
every Python) libFuzzer looks for inputs that reach new branches. `check` is the target, which a property test runs as well.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import sys
import tarfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tar_mutations import LONGEST_BYTES, mutate, seeds

from shardstream.errors import ShardStreamError, ShardWarning
from shardstream.format import (
    BLOCK_BYTES,
    ForwardReader,
    ReadAt,
    Sample,
    ShardSlice,
    TarDiagnostics,
    decode_index,
    decode_manifest,
    encode_index,
    iter_members,
    iter_samples,
    read_one,
    read_sample,
    read_samples,
    scan_shard,
)

_SHARD = "a.tar"
_PLACES = 64  # offsets at which samples are read, more than the limit for single reads
_KEPT = 2000  # mutated inputs that are kept for further mutations
Member = tuple[str, bytes]


# --- the target


def check(data: bytes) -> str:
    """Read ``data`` with all readers, and compare.

    Returns:
        The outcome in a word: "both", "refused", "ours alone", "theirs alone".

    Raises:
        AssertionError: If two ways differ, or reading costs more than its length explains.
        Exception: Any exception other than shardstream's is a finding.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardWarning)  # of links
        return _check(data)


def _check(data: bytes) -> str:
    _check_together(data)
    mine = _tried(lambda: _members(_Counted(data), len(data)))
    if mine is not None:
        streamed = _members(_Counted(data), None)
        assert streamed == mine, "members differ where the length is unknown"
        _check_samples(data)
    _tried(lambda: decode_index(data[: len(data) & -8], url=_SHARD))
    _tried(lambda: decode_manifest(data, url=_SHARD))
    theirs = read_with_tarfile(data)
    if mine is None or theirs is None:
        return (
            "refused"
            if theirs is mine is None
            else "theirs alone"
            if mine is None
            else "ours alone"
        )
    assert theirs == mine, "tarfile reads something else"
    return "both"


def _check_samples(data: bytes) -> None:
    diagnostics = TarDiagnostics()
    known = _tried(
        lambda: list(
            iter_samples(_Counted(data), end=len(data), shard=_SHARD, diagnostics=diagnostics)
        )
    )
    forward = ForwardReader(io.BytesIO(data), chunk_bytes=700)
    streamed = _tried(lambda: list(iter_samples(forward, shard=_SHARD)))
    assert streamed == (known if diagnostics.has_end else None), "samples differ in a stream"
    scan = _tried(lambda: scan_shard(_Counted(data), end=len(data), shard=_SHARD))
    assert (scan is None) == (known is None), "only one of indexing and reading accepts it"
    if scan is None or known is None:
        return
    samples: list[Sample] = [sample for _, sample in known]
    assert scan.keys == [sample["__key__"] for sample in samples]
    assert [group.start for group, _ in known] == scan.offsets[:-1].tolist()
    if not samples:
        return
    offsets = decode_index(encode_index(scan.offsets), url=_SHARD).tolist()
    for sample, (start, end) in zip(samples, pairwise(offsets), strict=True):
        assert read_sample(data, 0, start, end, _SHARD) == sample, "by number it is another"
        assert read_sample(data[start:end], start, start, end, _SHARD) == sample


def _check_together(data: bytes) -> None:
    """Compare bulk reads with single reads, at offsets with and without samples."""
    places = range(0, len(data) // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES)[:_PLACES]
    for size in (2 * BLOCK_BYTES, 4 * BLOCK_BYTES):  # two blocks: a member of one block
        alone = [(start, read_one(data, 0, start, start + size, _SHARD)) for start in places]
        alone.sort(
            key=lambda one: isinstance(one[1], Exception)
        )  # the others are compared with the first
        alone *= 1 + _PLACES // max(1, len(alone))
        starts = np.array([start for start, _ in alone], dtype=np.int64)
        shard_slice = ShardSlice(0, _SHARD, data, 0, starts, starts + size)
        found = read_samples([shard_slice, shard_slice._replace(buffer=memoryview(data))])
        expected = [repr(sample) for _, sample in alone]
        assert [repr(sample) for sample in found] == 2 * expected, "together it is another"


class _Counted:
    """Read at offsets, and detect endless reading."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._calls = 3 * len(data) // BLOCK_BYTES + 10
        self._bytes = 3 * len(data) + 10 * BLOCK_BYTES

    def __call__(self, offset: int, size: int) -> bytes:
        assert offset >= 0, "a read before the start"
        assert size >= 0, "a read of less than nothing"
        piece = self._data[offset : offset + size]
        self._calls -= 1
        self._bytes -= len(piece)
        assert self._calls >= 0, "it reads on and on"
        assert self._bytes >= 0, "it reads the same again and again"
        return piece


def _members(read: ReadAt, end: int | None) -> list[Member]:
    return [
        (name, read(body, size))
        for name, _, body, size in iter_members(read, end=end, shard=_SHARD)
    ]


def _tried(function: Callable[[], Any]) -> Any:
    """Call a function; None if it raises an error of shardstream."""
    try:
        return function()
    except ShardStreamError:
        return None


class _PosixInfo(tarfile.TarInfo):
    """Python's reader without the prefix of old GNU headers, which is a time (as GNU tar reads it)."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        info = super().frombuf(buf, encoding, errors)
        if buf[257:263] != b"ustar\0" and not info.isdir():
            info.name = buf[:100].split(b"\0", 1)[0].decode(encoding, errors)
        return info


def read_with_tarfile(data: bytes) -> list[Member] | None:
    """Return the regular files; None if ``tarfile`` raises, or stops silently before the end."""
    found: list[Member] = []
    try:
        with tarfile.open(
            fileobj=io.BytesIO(data), mode="r:", encoding="utf-8", tarinfo=_PosixInfo
        ) as tar:
            for info in tar:
                if info.issparse():  # refused by shardstream; tarfile would fill memory with zeros
                    return None
                if info.isreg():
                    body = tar.extractfile(info)
                    found.append((info.name, b"" if body is None else body.read()))
            rest = data[tar.offset : tar.offset + BLOCK_BYTES]
    except Exception:  # noqa: BLE001  (it raises what it likes on damaged headers)
        return None
    return None if rest.strip(b"\0") else found


# --- runs


def run(
    corpus: Sequence[bytes], *, seconds: float, seed: int, inputs: float = math.inf
) -> Counter[str]:
    """Mutate for some seconds or a number of inputs; stop at the first finding, which is written to a file."""
    rng, kept = random.Random(seed), list(corpus)
    outcomes: Counter[str] = Counter()
    stop = time.monotonic() + seconds
    while outcomes.total() < inputs and time.monotonic() < stop:
        data = mutate(rng.choice(kept), rng)
        try:
            outcome = check(data)
        except BaseException:
            path = Path(f"finding-{zlib.crc32(data):08x}.tar")
            path.write_bytes(data)
            print(f"a finding: {path} ({len(data)} bytes), seed {seed}, after {outcomes.total()}")
            raise
        outcomes[outcome] += 1
        if outcome == "both" and rng.random() < 0.05:  # mutated again later
            if len(kept) < _KEPT:
                kept.append(data)
            else:
                kept[rng.randrange(len(corpus), _KEPT)] = data
    return outcomes


def run_atheris(argv: list[str]) -> None:
    """Run the target in libFuzzer; never returns."""
    import atheris  # noqa: PLC0415  (only where it is asked for)

    def mutated(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        return (
            mutate(data, rng)[:max_size] if rng.random() < 0.8 else atheris.Mutate(data, max_size)
        )

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *argv], check, custom_mutator=mutated)
    atheris.Fuzz()


def main() -> None:
    """Run the fuzzer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long; default 60")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; default 0")
    parser.add_argument("--atheris", action="store_true", help="let libFuzzer drive")
    parser.add_argument("corpus", nargs="*", type=Path, help="tars, or folders of them")
    options, rest = parser.parse_known_args()
    if options.atheris:
        run_atheris([*rest, *map(str, options.corpus)])
    files = [p for path in options.corpus for p in (path.rglob("*") if path.is_dir() else [path])]
    corpus = seeds() + [path.read_bytes()[:LONGEST_BYTES] for path in files if path.is_file()]
    for data in corpus:
        check(data)
    outcomes = run(corpus, seconds=options.seconds, seed=options.seed)
    print(f"{outcomes.total():,} inputs: {dict(outcomes)}")


if __name__ == "__main__":
    main()
