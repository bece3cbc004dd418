"""Test a power failure at any moment of a writer, in a model of the guarantees of POSIX for a local disk.

Bytes of a file survive a crash if an ``fsync`` of it came after they were written. Names survive in any mixture, old or
new, until an ``fsync`` of their folder. The model sees ``fsync``, ``rename`` and ``unlink`` as the writer calls them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.format import INDEX_SUFFIX, MANIFEST_NAME
from shardstream.storage import Storage, is_part, publish_bytes

Tree = dict[str, bytes | None]
"""Return name -> the bytes that survive a crash; None if some could be lost."""


class Disk:
    """Models the disk of one folder.

    Args:
        folder: The folder; its existing files are on the disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._synced = {path.stat().st_ino: path.read_bytes() for path in folder.iterdir()}
        self._safe = {path.name: path.stat().st_ino for path in folder.iterdir()}
        self._pending: list[tuple[str, int | None]] = []
        self._held: list[int] = []
        self.moments: list[list[Tree]] = []
        """For each intercepted call: the folder contents that a crash right after it may leave."""

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Intercept the system calls of the writer."""
        for name in ("fsync", "replace", "rename", "unlink", "remove"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, self._seen(real, getattr(self, f"_{name}")))

    def _seen(self, real: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            note(*arguments)  # before the call, while the old name exists
            result = real(*arguments, **options)
            self.moments.append(list(self._trees()))
            return result

        return call

    def _fsync(self, handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path == self._folder:
            self._safe |= {name: inode for name, inode in self._pending if inode is not None}
            for name, inode in self._pending:
                if inode is None:
                    self._safe.pop(name, None)
            self._pending.clear()
        else:
            self._synced[os.fstat(handle).st_ino] = (
                path.read_bytes()
            )  # bytes that have left Python's buffer

    def _hold(self, path: Any) -> None:
        """Keep a file open, so that the system does not give its inode to another while a crash may bring it back."""
        if Path(path).exists():
            self._held.append(os.open(path, os.O_RDONLY))

    def close(self) -> None:
        for handle in self._held:
            os.close(handle)

    def _replace(self, source: Any, target: Any) -> None:
        if Path(target).parent == self._folder:
            self._hold(target)
            self._pending.append((Path(target).name, os.stat(source).st_ino))

    _rename = _replace

    def _unlink(self, path: Any, *_: Any) -> None:
        if Path(path).parent == self._folder and not is_part(Path(path).name):
            self._hold(path)
            self._pending.append((Path(path).name, None))

    _remove = _unlink

    def _trees(self) -> Iterator[Tree]:
        for chosen in itertools.product((True, False), repeat=len(self._pending)):
            names: dict[str, int | None] = dict(self._safe)
            names |= dict(itertools.compress(self._pending, chosen))
            yield {
                name: self._synced.get(inode) for name, inode in names.items() if inode is not None
            }


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Disk]]:
    started: list[Disk] = []

    def start() -> Disk:
        started.append(Disk(tmp_path))
        started[-1].watch(monkeypatch)
        return started[-1]

    yield start
    for one in started:
        one.close()


def write(folder: Path, count: int, *, overwrite: bool = False) -> None:
    with ss.ShardWriter(str(folder), max_samples=2, overwrite=overwrite) as writer:
        for number in range(count):
            writer.write({"__key__": f"{number}", "txt": f"{count} {'x' * number * 700}"})


def published(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_file_is_old_or_new_and_whole_after_a_crash(
    tmp_path: Path, disk: Callable[[], Disk]
) -> None:
    (tmp_path / "a.tar").write_bytes(b"old")
    watched = disk()
    publish_bytes(Storage(), str(tmp_path / "a.tar"), b"new" * 50)
    assert len(watched.moments) >= 3
    for trees in watched.moments:
        assert all(tree["a.tar"] in (b"old", b"new" * 50) for tree in trees)
    assert watched.moments[-1] == [{"a.tar": b"new" * 50}], "a crash after it could undo it"


def test_manifest_after_a_crash_has_its_shards(tmp_path: Path, disk: Callable[[], Disk]) -> None:
    watched = disk()
    write(tmp_path, 5)
    whole = published(tmp_path)
    for tree in itertools.chain.from_iterable(watched.moments):
        assert None not in tree.values(), "a name without its bytes"
        if MANIFEST_NAME in tree:
            assert {name: tree.get(name) for name in whole} == whole


def test_new_shard_never_has_the_index_of_an_old_one(
    tmp_path: Path, disk: Callable[[], Disk]
) -> None:
    write(tmp_path, 5)
    old = published(tmp_path)
    watched = disk()
    write(tmp_path, 6, overwrite=True)
    new = published(tmp_path)
    tars = [name for name in new if name.endswith(".tar")]
    for tree in itertools.chain.from_iterable(watched.moments):
        assert None not in tree.values()
        for tar in tars:
            index = tree.get(tar + INDEX_SUFFIX)
            sides = [side for side in (old, new) if side.get(tar) == tree.get(tar)]
            fits = [side for side in sides if index in (None, side.get(tar + INDEX_SUFFIX))]
            assert fits, f"{tar} and its index are of two datasets"
        if MANIFEST_NAME in tree:
            (side,) = [one for one in (old, new) if one[MANIFEST_NAME] == tree[MANIFEST_NAME]]
            assert {name: tree.get(name) for name in side} == side


def test_one_shard_never_has_the_index_of_the_replaced_one(
    tmp_path: Path, disk: Callable[[], Disk]
) -> None:
    sides = []
    watched = disk()
    for count in (2, 3):
        ss.packing.write_shard(
            tmp_path / "a.tar", [{"__key__": f"{n}", "cls": n} for n in range(count)]
        )
        sides.append(published(tmp_path))
    for tree in itertools.chain.from_iterable(watched.moments):
        tar, index = tree.get("a.tar"), tree.get("a.tar.idx")
        fits = [tar == side["a.tar"] and index in (None, side["a.tar.idx"]) for side in sides]
        assert any(fits) or tree == {}
    assert watched.moments[-1] == [sides[1]], "a crash after it could undo it"


def test_manifest_after_a_crash_has_its_indexes(tmp_path: Path, disk: Callable[[], Disk]) -> None:
    write(tmp_path, 5)
    for path in tmp_path.iterdir():
        if path.suffix != ".tar":
            path.unlink()
    watched = disk()
    ss.index(str(tmp_path), threads=1)
    whole = published(tmp_path)
    for tree in itertools.chain.from_iterable(watched.moments):
        assert None not in tree.values()
        if MANIFEST_NAME in tree:
            assert {name: tree.get(name) for name in whole} == whole
    assert watched.moments[-1] == [whole]
