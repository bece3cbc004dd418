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
    """Index the tars; "samples" of the result are members."""
    folder = Path(case.cache) / "tars"
    folder.mkdir()
    for tar in list_tars(case.location):
        os.link(tar, folder / Path(tar).name)
    import shardstream as ss  # noqa: PLC0415

    _ = ss.index  # imported before the measurement
    began_cpu, began = cpu_s(), time.perf_counter()
    members = (
        index_with_tarfile(folder)
        if case.contestant == "tarfile"
        else index_with_shardstream(folder, case)
    )
    return Result(
        seconds=time.perf_counter() - began,
        samples=members,
        payload_bytes=sum(path.stat().st_size for path in folder.glob("*.tar")),
        cpu_s=cpu_s() - began_cpu,
        wrong="" if members == len(case.fields) * case.samples else f"{members} members",
    )


def index_with_shardstream(folder: Path, case: Case) -> int:
    """Write indexes and the manifest, with the sha256 of every tar."""
    import shardstream as ss  # noqa: PLC0415

    return len(case.fields) * ss.index(str(folder)).manifest.nsamples


def index_with_tarfile(folder: Path) -> int:
    """Find all members with Python's tarfile, as index tools of peers do, and write nothing."""
    members = 0
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            members += sum(1 for _ in tar)
    return members
