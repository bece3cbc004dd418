"""Row `ray`: rows a second that `ss.ray.write` or Ray's own `write_webdataset` writes from its object store, on two CPUs."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import shardstream as ss
from benchmarks.case import Case, Result
from benchmarks.processes import cpu_s, peak_rss_bytes
from benchmarks.ray_read import local_cluster


def measure(case: Case) -> Result:
    """Write the rows until ``min_s`` is reached, after once to start Ray's workers; they are in memory before."""
    with local_cluster():
        rows = ss.ray.read(case.location).materialize()
        write(case, rows, f"{case.cache}/warm")
        shutil.rmtree(f"{case.cache}/warm")
        rounds, seconds, began_cpu = 0, 0.0, cpu_s()
        wrong = ""
        while not rounds or seconds < case.min_s:
            target = f"{case.cache}/{rounds}"
            began = time.perf_counter()
            write(case, rows, target)
            seconds += time.perf_counter() - began
            rounds += 1
            wrong = wrong or check(case, target)
            shutil.rmtree(target)
        return Result(
            seconds=seconds,
            samples=rounds * case.samples,
            payload_bytes=rounds * case.payload_bytes,
            cpu_s=cpu_s() - began_cpu,
            peak_rss_bytes=peak_rss_bytes(),
            wrong=wrong,
        )


def write(case: Case, rows: Any, target: str) -> None:
    """Write the rows to a new folder."""
    if case.contestant == "shardstream":
        ss.ray.write(rows, target, max_bytes="32MB")  # as in larger data, more shards than CPUs
    else:
        rows.write_webdataset(target, encoder=None)  # fields are bytes already


def check(case: Case, target: str) -> str:
    """Say what is wrong with the tars that were written; nothing if nothing is."""
    written = sum(path.stat().st_size for path in Path(target).glob("*.tar"))
    if written < case.payload_bytes:
        return f"tars of {written} bytes for {case.payload_bytes} bytes of fields"
    if (
        case.contestant == "shardstream"
        and len(ss.ShardDataset(target).by_number()) != case.samples
    ):
        return f"the dataset does not have {case.samples} samples"
    return ""
