"""Row `index`: members per second when indexing tars of another tool."""

from __future__ import annotations

import os
import tarfile
import time
from pathlib import Path

from benchmarks.case import Case, Result
from benchmarks.objects import list_tars
from benchmarks.processes import cpu_s


def measure(case: Case) -> Result:
    """Index the tars until ``min_s`` is reached, as their limit does; "samples" of the result are members."""
    folder = Path(case.cache) / "tars"
    folder.mkdir()
    for tar in list_tars(case.location):
        os.link(tar, folder / Path(tar).name)
    import shardstream as ss  # noqa: PLC0415

    _ = ss.index  # imported before the measurement
    work = index_with_tarfile if case.contestant == "tarfile" else index_with_shardstream
    expected = len(case.fields) * case.samples
    if case.min_s:  # to warm up
        work(folder, case)
    rounds, wrong = 0, ""
    began_cpu, began = cpu_s(), time.perf_counter()
    while True:
        members = work(folder, case)
        rounds += 1
        wrong = wrong or ("" if members == expected else f"{members} members")
        seconds = time.perf_counter() - began
        if seconds >= case.min_s:
            break
    return Result(
        seconds=seconds,
        samples=rounds * expected,
        payload_bytes=rounds * case.payload_bytes,
        cpu_s=cpu_s() - began_cpu,
        wrong=wrong,
    )


def index_with_shardstream(folder: Path, case: Case) -> int:
    """Write indexes and the manifest, with the sha256 of every tar."""
    import shardstream as ss  # noqa: PLC0415

    return len(case.fields) * ss.index(str(folder)).manifest.nsamples


def index_with_tarfile(folder: Path, _: Case) -> int:
    """Find all members with Python's tarfile, as index tools of peers do, and write nothing."""
    members = 0
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            members += sum(1 for _ in tar)
    return members
