"""A mix of 64 datasets has the threads, sockets and open files of one: they are bounded for the process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.testing import make_shards
from tests.small_datasets import FEW_CORES

pytestmark = pytest.mark.filterwarnings(FEW_CORES, "ignore:lanes=", "ignore:an epoch of this mix")
DATASETS, SAMPLES = 64, 24
# Requests in flight of a process, its threads for indexes, and some of the test and of torch.
MOST_REQUESTS, MOST_ASIDE, OTHERS = 32, 16, 8


def resources() -> dict[str, int]:
    """Return the numbers of threads and sockets of this process."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "sockets": sum(link.startswith("socket:") for link in links),
    }


def measured(sample: dict[str, Any]) -> dict[str, int]:
    return {"cls": sample["cls"], **resources()}


def most_while_read(folders: list[str], workers: int) -> dict[str, int]:
    """Return the largest numbers that the process of a sample had while a mix was read."""
    parts = [ss.ShardDataset(folder, shuffle=True).decode() for folder in folders]
    dataset = ss.mix(parts, order=ss.OrderOptions(lanes=2)).map(measured)
    loader = ss.ShardLoader(dataset, 16, num_workers=workers)
    batches = list(loader)
    assert sum(len(batch["cls"]) for batch in batches) == len(folders) * SAMPLES
    return {name: max(int(batch[name].max()) for batch in batches) for name in resources()}


def write(root: str) -> list[str]:
    samples = [{"__key__": f"{n}", "cls": n, "bin": os.urandom(30_000)} for n in range(SAMPLES)]
    return [
        make_shards(f"{root}/{n:02d}", samples=samples, per_shard=SAMPLES // 2)
        for n in range(DATASETS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_64_datasets_on_s3_share_threads_and_connections(
    bucket: str, s3_env: None, workers: int
) -> None:
    folders = write(f"{bucket}/many")
    before = resources()
    opened = [ss.ShardDataset(folder) for folder in folders]
    assert resources()["sockets"] <= before["sockets"] + OTHERS
    del opened
    found = most_while_read(folders, workers)
    assert found["threads"] <= before["threads"] + MOST_REQUESTS + MOST_ASIDE + OTHERS
    assert found["sockets"] <= before["sockets"] + MOST_REQUESTS + MOST_ASIDE + OTHERS


def test_64_local_datasets_have_no_threads(tmp_path: Path) -> None:
    folders = write(str(tmp_path))
    before = resources()
    found = most_while_read(folders, 0)
    assert found["threads"] <= before["threads"] + OTHERS
    assert found["sockets"] <= before["sockets"] + OTHERS
