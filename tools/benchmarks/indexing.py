"""Row `index`: members a second, indexing tars that another tool wrote."""

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

    _ = ss.index  # looked up when first used: not part of the time
    began_cpu, began = cpu_s(), time.perf_counter()
    members = by_tarfile(folder) if case.contestant == "tarfile" else by_us(folder, case)
    return Result(
        seconds=time.perf_counter() - began,
        samples=members,
        payload_bytes=sum(path.stat().st_size for path in folder.glob("*.tar")),
        cpu_s=cpu_s() - began_cpu,
        wrong="" if members == len(case.fields) * case.samples else f"{members} members",
    )


def by_us(folder: Path, case: Case) -> int:
    """Write indexes, with sha256 of every tar, and the manifest."""
    import shardstream as ss  # noqa: PLC0415

    return len(case.fields) * ss.index(str(folder)).manifest.nsamples


def by_tarfile(folder: Path) -> int:
    """Find all members with Python's tarfile, and write nothing: what index tools of peers are built on."""
    members = 0
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            members += sum(1 for _ in tar)
    return members
