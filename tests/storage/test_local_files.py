"""Test local files: links, relative paths, reads without a client, and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardstream as ss
from shardstream.errors import NotFoundError, StorageError
from shardstream.storage import Storage
from shardstream.testing import make_shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of four samples."""
    return Path(make_shards(tmp_path / "set", samples=12, per_shard=4))


def keys(url: str | Path) -> list[str]:
    return [sample["__key__"] for sample in ss.ShardDataset(url)]


@pytest.mark.parametrize("manifest", [True, False])
def test_linked_shards_are_found(folder: Path, tmp_path: Path, manifest: bool) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        if manifest or file.name != "index.json":
            (linked / file.name).symlink_to(file)
    assert keys(linked) == keys(folder)
    for url in (f"file://{linked}", f"{linked}/*.tar", f"{linked}/{{000000..000002}}.tar"):
        assert keys(url) == keys(folder)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_shard_without_its_index_is_scanned(number: int, folder: Path) -> None:
    before = keys(folder)
    (folder / f"{number:06d}.tar.idx").unlink()
    assert keys(folder) == before
    assert len(before) == 12


@pytest.mark.parametrize("url", ["{}", "{}/*.tar"])
def test_link_without_a_target_is_an_error_not_fewer_samples(url: str, folder: Path) -> None:
    (folder / "index.json").unlink()
    (folder / "000001.tar").rename(folder.parent / "moved.tar")
    (folder / "000001.tar").symlink_to(folder / "none.tar")
    with pytest.raises(ss.ShardStreamError, match=r"000001\.tar"):
        keys(url.format(folder))
    (folder / "000001.tar.idx").unlink()
    with pytest.raises(NotFoundError, match=r"000001\.tar"):
        keys(url.format(folder))


@pytest.mark.parametrize("url", ["set", "./set", "set/", "../here/set", "set/index.json"])
def test_relative_paths_are_those_of_the_process(
    url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    folder.rename(tmp_path / "here" / "set")
    monkeypatch.chdir(tmp_path / "here")
    assert len(keys(url)) == 12


def test_current_folder_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert len(keys(".")) == 12


def test_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert len(keys("~/set")) == 12


@pytest.mark.parametrize(
    ("start", "end", "max_bytes", "found"),
    [
        (0, None, None, b"0123456789"),
        (3, None, None, b"3456789"),
        (3, 5, None, b"34"),
        (5, 5, None, b""),
        (5, 3, None, b""),
        (0, None, 4, b"0123"),
        (8, None, 4, b"89"),
        (10, None, None, b""),
    ],
)
def test_range_of_a_local_file(
    start: int, end: int | None, max_bytes: int | None, found: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"0123456789")
    for url in (str(path), f"file://{path}"):
        assert Storage().read(url, start, end, max_bytes=max_bytes) == found


def test_failures_are_explained(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"0123")
    with pytest.raises(NotFoundError, match=r"none\.bin"):
        Storage().read(str(tmp_path / "none.bin"))
    with pytest.raises(StorageError, match="shorter than its index says"):
        Storage().read(str(tmp_path / "a.bin"), 2, 10)
    with pytest.raises(StorageError, match="directory"):
        Storage().read(str(tmp_path))
    with pytest.raises(NotFoundError, match="none"):
        Storage().list_folder(str(tmp_path / "none"))
