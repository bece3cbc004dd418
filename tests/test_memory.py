"""What is done to Python's collector is undone, or done in workers alone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import shardstream as ss
from shardstream import memory
from shardstream.memory import importing


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ZeroDivisionError), importing():
            1 // gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.myself = self


def test_looking_up_a_name_keeps_no_garbage_alive() -> None:
    alive: weakref.WeakSet[Cycle] = weakref.WeakSet()
    for _ in range(20_000):
        alive.add(Cycle())
        assert callable(ss.collate)
    assert len(alive) < 10_000


def test_malloc_is_taught_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.keep_freed_memory()
    monkeypatch.setattr(memory, "_LESSON_BYTES", -1)  # with which bytes() fails
    memory.keep_freed_memory()


def frozen(sample: dict[str, Any]) -> int:
    return int(sample["json"]) + gc.get_freeze_count()


def test_workers_leave_what_they_inherit_out_of_collections(tmp_path: Any) -> None:
    with ss.ShardWriter(tmp_path) as writer:
        for number in range(4):
            writer.write({"__key__": str(number), "json": 0})
    dataset = ss.ShardDataset(str(tmp_path)).decode().map(frozen)
    before = gc.get_freeze_count()
    (in_worker,) = ss.ShardLoader(dataset, batch_size=4, num_workers=1)
    assert min(in_worker) > before
    assert gc.get_freeze_count() == before
