"""Test listing all files under a folder, on each kind of store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.errors import NotFoundError
from shardstream.storage import (
    ListedFile,
    Storage,
    list_all,
    list_beginning,
    list_files,
    publish_bytes,
    sample_members,
)

NAMES = ("a/b/c.jpg", "a/d.txt", "b.c/e", "top.json")
HIDDEN = (".git/x.txt", "a/.DS_Store", "a/d.txt.part-0123456789ab")


def write(root: str, *names: str) -> None:
    for name in names:
        publish_bytes(Storage(), f"{root}/{name}", name.encode())


@pytest.fixture(params=["local", "file", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    made = {"local": f"{tmp_path}", "file": f"file://{tmp_path}", "memory": f"memory:/{tmp_path}"}
    write(made[request.param], *NAMES, *HIDDEN)
    return made[request.param]


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("most_folders", [0, 4096])
def test_folder_listing_equals_recursive_listing(root: str, slash: str, most_folders: int) -> None:
    found = list_files(root + slash, Storage(), max_folders=most_folders)
    assert [file[:3] for file in found] == [(name, f"{root}/{name}", len(name)) for name in NAMES]


def test_several_folders_have_paths_under_their_common_folder(root: str) -> None:
    some, files = list_all([f"{root}/a/b/", f"{root}/a/d.txt", f"{root}/a"], Storage())
    assert (some, [file.path for file in files]) == (f"{root}/a", ["b/c.jpg", "d.txt"])
    one, files = list_all([f"{root}/top.json"], Storage())
    assert (one, [file.path for file in files]) == (root, ["top.json"])


def test_prefix_is_a_folder_or_a_name_prefix(root: str) -> None:
    assert list_beginning(f"{root}/a", Storage()) == [f"{root}/a"]
    assert list_beginning(f"{root}/", Storage()) == [f"{root}/"]
    assert list_beginning(f"{root}/b", Storage()) == [f"{root}/b.c"]
    assert list_beginning(f"{root}/t", Storage()) == [f"{root}/top.json"]
    with pytest.raises(NotFoundError, match="begins with this prefix"):
        list_beginning(f"{root}/z", Storage())


@pytest.mark.slow
def test_unusual_s3_keys_are_listed_without_folder_markers(bucket: str, s3_env: None) -> None:
    filesystem = fsspec.filesystem("s3")
    keys = ("a//b.txt", "/c.txt", "marked/", "marked/d.txt", "e {1}[2]*?.txt")
    for key in keys:
        name = {
            "Bucket": bucket.removeprefix("s3://"),
            "Key": f"set/{key}",
        }  # pipe_file would remove the slash
        filesystem.call_s3("put_object", **name, Body=key.encode())
    found = list_files(f"{bucket}/set", Storage())
    assert {file.path for file in found} == {*keys} - {"marked/"}
    assert all(Storage().read(file.url) == file.path.encode() for file in found)


@pytest.mark.parametrize(("count", "warns"), [(43, True), (30, False)])
def test_dotted_frame_numbers_that_form_one_sample_cause_a_warning(
    count: int, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = [ListedFile(f"frame.{number:06d}.jpg", "", 1) for number in range(count)]
    sample_members("root", files)
    assert ("1 sample with 43 fields. A key ends at the first dot" in caplog.text) is warns


@pytest.mark.parametrize("name", ["none", "none/"])
def test_missing_folder_is_an_error(root: str, name: str) -> None:
    with pytest.raises(NotFoundError):
        list_all([f"{root}/{name}"], Storage())


@given(st.lists(st.text("ab/", min_size=1, max_size=6).filter(lambda name: name[-1] != "/")))
def test_common_folder_contains_all_files(names: list[str]) -> None:
    """For any URLs of files, on a file system that has each of them."""
    files = [
        f"memory://common/x{name}.txt".replace("//", "/").replace(":/", "://") for name in names
    ]
    filesystem: Any = fsspec.filesystem("memory")
    for url in files:
        filesystem.pipe_file(url, b"1")
    if files:
        root, found = list_all(files, Storage())
        assert {f"{root}/{file.path}" for file in found} == {*files}


def test_names_similar_to_temporary_files_are_listed(root: str) -> None:
    write(root, "z/imgs.tar.part-aa", "z/lecture.part-1.jpg", "z/notes.part-1")
    assert [file.path for file in list_files(f"{root}/z", Storage())] == [
        "imgs.tar.part-aa",
        "lecture.part-1.jpg",
        "notes.part-1",
    ]
