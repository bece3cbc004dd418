"""Test maps of local shards: kept across epochs, safe with threads and forks, and never of a replaced file."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shardstream as ss
from shardstream.catalog import ShardCatalog
from shardstream.errors import IndexMismatchError, NotFoundError
from shardstream.storage import MmapPool, Storage, locate_shards, num_maps


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of two samples."""
    with ss.ShardWriter(tmp_path, max_samples=2) as writer:
        for number in range(4):
            writer.write({"__key__": str(number), "txt": "good"})
    return tmp_path


def checked(folder: Path) -> ShardCatalog:
    storage = Storage()
    return ShardCatalog(locate_shards(str(folder), storage), storage, "sha256")


def test_map_is_not_reused_for_a_replaced_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2, 2))  # half of the limit is for maps
    catalog, tar = checked(folder), folder / "000000.tar"
    assert catalog.map_shard(0) is catalog.map_shard(0)
    whole = tar.read_bytes()
    (folder / "other").write_bytes(whole.replace(b"good", b"evil"))
    (folder / "other").replace(tar)
    for _ in range(2):
        with pytest.raises(IndexMismatchError, match="the manifest says"):
            catalog.map_shard(0)
    catalog.map_shard(1)  # only one is kept
    with pytest.raises(IndexMismatchError, match="the manifest says"):
        catalog.map_shard(0)
    (folder / "other").write_bytes(whole)
    (folder / "other").replace(tar)
    assert catalog.map_shard(0)[:] == whole
    tar.unlink()
    with pytest.raises(NotFoundError, match=r"000000\.tar"):
        catalog.map_shard(0)


@pytest.mark.parametrize("is_limited", [False, True])
def test_maps_work_with_any_limit_of_open_files(
    is_limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = num_maps()  # of other tests; those of the largest pool are dropped first
    limit = 1 + 2 * others if is_limited else resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    maps = MmapPool()
    for number in range(3):
        maps.keep(number, b"tar")
        assert maps.get(number) is not None
    assert num_maps() == (max(1, others) if is_limited else others + 3)


def test_least_used_map_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # of maps of other tests
    pool, kept = MmapPool(), num_maps() + 2  # so this pool is the largest one
    limit = 2 * (num_maps() + kept)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    for number in range(kept):
        pool.keep(number, b"tar")
    pool.get(0)
    pool.keep(kept, b"tar")
    assert pool.get(0) is not None
    assert pool.get(1) is None


@pytest.fixture
def switching() -> Iterator[None]:
    """Switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_datasets_can_be_opened_while_others_are_read() -> None:
    others = [MmapPool() for _ in range(100)]
    opened: deque[MmapPool] = deque(maxlen=100)

    def open_more() -> None:
        for _ in range(1000):
            opened.append(MmapPool())

    opener = threading.Thread(target=open_more)
    opener.start()
    try:
        while opener.is_alive():
            others[0].keep(0, b"tar")
    finally:
        opener.join()


def use_maps(_: ShardCatalog) -> None:
    MmapPool().keep(0, b"tar")


def use_indexes(catalog: ShardCatalog) -> None:
    catalog.offsets(0)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("use", [use_maps, pytest.param(use_indexes, marks=pytest.mark.slow)])
def test_children_forked_during_a_read_do_not_hang(
    use: Callable[[ShardCatalog], None], folder: Path
) -> None:
    catalog, ends = checked(folder), threading.Event()

    def keep_using() -> None:
        while not ends.is_set():
            use(catalog)

    user = threading.Thread(target=keep_using)
    user.start()
    try:
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # ends a child that waits for a lock that is never released
                use(catalog)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        ends.set()
        user.join()
