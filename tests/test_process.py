"""Test malloc and garbage collector settings: once per process, and only in workers."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream import process


class Cycle:
    """Garbage that only the cycle collector frees."""

    def __init__(self) -> None:
        self.myself = self


def test_lazy_import_keeps_no_garbage() -> None:
    alive: weakref.WeakSet[Cycle] = weakref.WeakSet()
    for _ in range(20_000):
        alive.add(Cycle())
        assert callable(ss.loader.collate)
    assert len(alive) < 10_000


def test_malloc_is_tuned_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    process.keep_freed_memory()
    monkeypatch.setattr(process, "MMAP_THRESHOLD_PROBE_BYTES", -1)  # bytes() fails with this
    process.keep_freed_memory()


HOLED = """
import sys
from pathlib import Path
from shardstream import process as memory

def held_mb():
    (line,) = [l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon")]
    return int(line.split()[1]) // 1000

if sys.argv[1] == "worker":
    memory.tune_worker_process()
blocks = [bytearray(100_000) for _ in range(1000)]  # below what malloc maps by itself
kept = blocks[::100]
full = held_mb()
del blocks
memory.release_freed_memory(memory.TRIM_AFTER_BYTES - 1)
early = full - held_mb()
memory.release_freed_memory(1)
print(early, full - held_mb())
"""


@pytest.mark.parametrize(("process", "least", "most"), [("worker", 85, 105), ("user", 0, 15)])
def test_worker_returns_free_memory_between_used_blocks(
    process: str, least: int, most: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLED, process], capture_output=True, text=True, check=True
    )
    early, released = map(int, done.stdout.split())
    assert early <= 15  # new pages for each short epoch would cost more
    assert least <= released <= most


def frozen(sample: dict[str, Any]) -> int:
    return int(sample["json"]) + gc.get_freeze_count()


def test_workers_exclude_inherited_objects_from_garbage_collection(tmp_path: Any) -> None:
    with ss.ShardWriter(tmp_path) as writer:
        for number in range(4):
            writer.write({"__key__": str(number), "json": 0})
    dataset = ss.ShardDataset(str(tmp_path)).decode().map(frozen)
    before = gc.get_freeze_count()
    (in_worker,) = ss.ShardLoader(dataset, batch_size=4, num_workers=1)
    assert min(in_worker) > before
    assert gc.get_freeze_count() <= before


class Garbage(Cycle):
    """Writes a file where it is collected in another process than its own, as PyAV's codecs wait for ever there."""

    def __init__(self, found: Path) -> None:
        super().__init__()
        self.found, self.process = found, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            self.found.touch()


def test_workers_never_collect_garbage_of_their_parent(tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path / "data") as writer:
        writer.write({"__key__": "0", "json": 0})
    dataset = ss.ShardDataset(str(tmp_path / "data")).decode()
    loader = ss.ShardLoader(
        dataset, 1, num_workers=1, worker_init_fn=collect, multiprocessing_context="fork"
    )
    gc.disable()
    try:
        Garbage(tmp_path / "found")
        assert len(list(loader)) == 1
    finally:
        gc.enable()
    assert not (tmp_path / "found").exists()


def collect(_: int) -> None:
    gc.collect()
