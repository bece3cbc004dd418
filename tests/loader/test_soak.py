"""Test that memory, files and threads do not grow over many epochs in the same processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import pytest

import shardstream as ss
from shardstream.testing import make_shards
from tests.small_datasets import FEW_CORES, flat, labels

pytestmark = pytest.mark.filterwarnings(FEW_CORES)

EPOCHS, WARM = 50, 10
SAMPLES = 300


class Use(NamedTuple):
    """Memory, files and threads of a process."""

    resident_kib: int
    threads: int
    handles: int


def use_of(pid: int) -> Use:
    status = Path(f"/proc/{pid}/status").read_text()
    resident, threads = (
        int(re.findall(rf"{name}:\s+(\d+)", status)[0]) for name in ("VmRSS", "Threads")
    )
    return Use(resident, threads, len(os.listdir(f"/proc/{pid}/fd")))


def settled(pid: int, threads: int) -> Use:
    """Measure between epochs; threads that are ending get some seconds to end."""
    deadline = time.monotonic() + 300
    while (use := use_of(pid)).threads > threads and time.monotonic() < deadline:
        time.sleep(0.02)
    return use


@pytest.mark.slow
@pytest.mark.usefixtures("s3_env")
def test_memory_after_fifty_cached_epochs_equals_that_after_ten(
    bucket: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    samples = (
        {"__key__": f"{i:06d}", "cls": i, "npy": rng.integers(0, 256, 20_000, dtype=np.uint8)}
        for i in range(SAMPLES)
    )
    url = make_shards(f"{bucket}/soak", samples=samples, per_shard=60)
    # The cache holds 4 of 6 MB, so each epoch has hits and misses.
    dataset = ss.ShardDataset(
        url, shuffle=True, read=ss.ReadOptions(cache_dir=tmp_path, cache_bytes="4MiB")
    ).decode()
    loader = ss.ShardLoader(dataset, 20, num_workers=2, persistent_workers=True)
    uses: dict[int, list[Use]] = {}
    others = {child.pid for child in multiprocessing.active_children()}  # of tests before
    for epoch in range(EPOCHS):
        assert sorted(flat(labels(loader))) == list(range(SAMPLES))
        children = multiprocessing.active_children()
        workers = [child.pid or 0 for child in children if child.pid not in others]
        for pid in [os.getpid(), *workers]:
            seen = uses.setdefault(pid, [])
            threads = max(use.threads for use in seen[:WARM]) if epoch >= WARM else 1000
            seen.append(settled(pid, threads))
    assert [len(seen) for seen in uses.values()] == [EPOCHS] * 3  # the same workers throughout
    for seen in uses.values():
        early, late = seen[:WARM], seen[-WARM:]
        assert max(use.threads for use in late) <= max(use.threads for use in early)
        # A client keeps its maximum of concurrent connections; one leak per epoch would add 40.
        assert max(use.handles for use in late) <= max(use.handles for use in early) + 20
        # The allocator's memory grows for some epochs (it is constant in the last 150 of 200), so later epochs are compared.
        grown = median(use.resident_kib for use in late) - max(
            use.resident_kib for use in seen[: EPOCHS // 2]
        )
        assert grown < 10_000
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4 << 20
