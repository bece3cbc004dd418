"""Test that output folders behave the same on a local disk and on a remote store."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from shardstream.errors import OptionError, StorageError
from shardstream.storage import LocalFolder, OutputFolder, RemoteFolder, Storage, open_output_folder

MakeFolder = Callable[[Path], OutputFolder]


def by_path(tmp_path: Path) -> OutputFolder:
    return open_output_folder(str(tmp_path / "out"), None, None)


def by_file_url(tmp_path: Path) -> OutputFolder:
    return open_output_folder(f"file://{tmp_path}/out", None, None)


def in_memory(_: Path) -> OutputFolder:
    return open_output_folder(f"memory://{uuid.uuid4().hex}/out", None, None)


@pytest.fixture(params=[by_path, by_file_url, in_memory], ids=lambda make: make.__name__)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> OutputFolder:
    make: MakeFolder = request.param
    return make(tmp_path)


def sizes(folder: OutputFolder) -> dict[str, int]:
    return {name: file.size for name, file in sorted(folder.list_files().items())}


def test_missing_folder_has_no_files(folder: OutputFolder) -> None:
    assert folder.list_files() == {}
    assert folder.read("a") is None
    folder.remove("a")


def test_files_are_written_replaced_read_listed_and_removed(folder: OutputFolder) -> None:
    folder.lock()
    folder.write("a", b"12")
    folder.replace("b", b"1", old=None)
    folder.replace("b", b"123", old=b"1")
    assert (folder.read("a"), folder.read("b")) == (b"12", b"123")
    assert sizes(folder) == {"a": 2, "b": 3}
    folder.remove("a")
    assert sizes(folder) == {"b": 3}
    folder.write("c", b"1")
    folder.remove("b", "missing", "c")
    folder.remove()
    assert sizes(folder) == {}
    folder.unlock()
    folder.unlock()


def test_pending_file_appears_when_it_is_committed(folder: OutputFolder) -> None:
    folder.lock()
    for name in ("kept", "dropped"):
        pending = folder.open(name)
        pending.write(b"abc")
        pending.end()
        assert name not in folder.list_files()
        if name == "kept":
            pending.commit()
        pending.discard()
    assert sizes(folder) == {"kept": 3}
    folder.unlock()


def test_kind_of_a_folder_follows_its_url(tmp_path: Path) -> None:
    assert isinstance(by_path(tmp_path), LocalFolder)
    assert isinstance(by_file_url(tmp_path), LocalFolder)
    assert isinstance(open_output_folder("relative/out", None, None), LocalFolder)
    assert isinstance(in_memory(tmp_path), RemoteFolder)
    with pytest.raises(OptionError, match="retry_timeout_s"):
        open_output_folder(str(tmp_path), {"retry_timeout_s": -1}, None)
    with pytest.raises(OptionError, match="a URL must not start a command"):
        open_output_folder("pipe:cat", None, None)


def test_local_listing_is_that_of_storage(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"12")
    (tmp_path / "sub").mkdir()
    (tmp_path / "to_a").symlink_to("a.tar")
    (tmp_path / "to_sub").symlink_to("sub")
    listed, _ = Storage().list_folder(str(tmp_path))
    folder = LocalFolder(str(tmp_path), str(tmp_path))
    assert sizes(folder) == {Path(file.url).name: file.size for file in listed}


@pytest.mark.parametrize("method", ["list_files", "read", "write", "remove", "lock"])
def test_local_errors_are_those_of_storage(method: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = LocalFolder(str(tmp_path / "file" / "out"), "the/url")
    arguments = {"read": ("a",), "remove": ("a",), "write": ("a", b"")}.get(method, ())
    with pytest.raises(StorageError, match="NotADirectoryError|FileExistsError"):
        getattr(folder, method)(*arguments)


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a" / "in_the_way").mkdir(parents=True)
    folder = LocalFolder(str(tmp_path), str(tmp_path))
    with pytest.raises(StorageError, match="IsADirectoryError"):
        folder.write("a", b"1")
    assert os.listdir(tmp_path) == ["a"]
