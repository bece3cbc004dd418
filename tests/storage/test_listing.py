"""Test listing all files under a folder, on each kind of store."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from shardstream import ShardDataset
from shardstream.errors import AccessDeniedError, NotFoundError, StorageError
from shardstream.packing import pack
from shardstream.pipeline import ReadOptions
from shardstream.storage import (
    FileList,
    ListedFile,
    Storage,
    list_all,
    list_beginning,
    list_files,
    publish_bytes,
    sample_members,
)
from tests.servers import S3Server

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


class DoublingFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """A store whose pages repeat a file."""

    protocol = "doubling"

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        return [*super().ls(path, detail=detail, **options)] * 2


def test_file_that_is_listed_twice_is_an_error(tmp_path: Path) -> None:
    filesystem = DoublingFileSystem()
    filesystem.pipe_file(f"{tmp_path}/a/0.tar", b"x")
    with pytest.raises(StorageError, match="lists this file twice"):
        ShardDataset(f"{tmp_path}/a", read=ReadOptions(filesystem=filesystem))
    with pytest.raises(StorageError, match=r"lists this file twice.*a.jpg"):
        FileList([ListedFile("a.jpg", "memory://a.jpg", 3)] * 2)


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


class SmallPages(s3fs.S3FileSystem):  # type: ignore[misc]
    """Lists two names with each request; the first attempt of each request fails."""

    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pages: list[str] = []
        """Prefix of each page."""
        self._failed: set[tuple[str, str]] = set()

    def call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
        assert method == "list_objects_v2"
        page = (options["Prefix"], options.get("ContinuationToken", ""))
        if page not in self._failed:
            self._failed.add(page)
            raise ConnectionResetError("lost")
        self.pages.append(options["Prefix"])
        return super().call_s3(method, *arguments, **options, MaxKeys=2)


@pytest.mark.parametrize("most_folders", [0, 4096])
def test_s3_is_listed_in_pages_that_are_retried(
    most_folders: int, bucket: str, s3: S3Server
) -> None:
    names = [*NAMES, *(f"a/b/{number}.x" for number in range(5)), "marker/", "marker/m.txt", "z.y"]
    for name in names:
        s3_object = {"Bucket": bucket.removeprefix("s3://"), "Key": f"set/{name}"}
        s3fs.S3FileSystem(**s3.storage_options).call_s3("put_object", **s3_object, Body=b"12")
    filesystem = SmallPages(**s3.storage_options)
    found = list_files(f"{bucket}/set", Storage(filesystem=filesystem), max_folders=most_folders)
    assert [file.path for file in found] == sorted({*names} - {"marker/"})
    assert all(file.version == 'ETag "c20ad4d76fe97759aa27a0c99bff6710"' for file in found)
    assert filesystem.pages.count("set/") > 2
    assert filesystem.pages.count("set/a/") == (0 if most_folders == 0 else 4)  # 7 names


def test_pages_of_s3_have_what_s3fs_lists_at_once(bucket: str, s3: S3Server) -> None:
    storage = Storage(s3.storage_options)
    for name in NAMES:
        s3_object = {"Bucket": bucket.removeprefix("s3://"), "Key": f"set/{name}"}
        s3fs.S3FileSystem(**s3.storage_options).call_s3("put_object", **s3_object, Body=b"12")
    at_once = {
        f"s3://{name}": (entry["size"], f"ETag {entry['ETag']}")
        for name, entry in s3fs.S3FileSystem(**s3.storage_options)
        .find(f"{bucket}/set", detail=True)
        .items()
    }
    found = storage.find(f"{bucket}/set")
    assert {file.url: (file.size, file.version) for file in found} == at_once
    assert storage.find(f"{bucket}/none") == []
    one = f"{bucket}/set/{NAMES[0]}"
    assert [file.url for file in storage.find(one)] == [one]
    with pytest.raises(NotFoundError):
        storage.list_folder(f"{bucket}/none")


@pytest.mark.slow
def test_many_files_of_one_prefix_are_packed(bucket: str, s3: S3Server, tmp_path: Path) -> None:
    count = 2_300  # three pages
    with closing(s3.client()) as client, ThreadPoolExecutor(8) as pool:
        put = partial(client.put_object, Bucket=bucket.removeprefix("s3://"), Body=b"x")
        list(pool.map(lambda number: put(Key=f"many/{number:05d}.txt"), range(count)))
    pages = list(Storage(s3.storage_options).find_pages(f"{bucket}/many"))
    assert [len(page) for page in pages] == [1000, 1000, 300]
    report = pack(f"{bucket}/many", tmp_path / "out", source_options=s3.storage_options)
    assert report.samples == count


def test_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    write(str(tmp_path), *NAMES)
    (tmp_path / "a" / "b").chmod(0)
    try:
        if os.access(tmp_path / "a" / "b", os.R_OK):
            pytest.skip("this user may read everything")
        with pytest.raises(AccessDeniedError):
            list_files(str(tmp_path), Storage())
    finally:
        (tmp_path / "a" / "b").chmod(0o755)


def test_links_are_listed_as_by_fsspec(tmp_path: Path) -> None:
    write(f"{tmp_path}/set", "a/x.txt", "b.txt")
    for name, target in (("a/file.txt", "x.txt"), ("a/folder.d", "."), ("a/gone.txt", "none")):
        (tmp_path / "set" / name).symlink_to(target)
    found = {f.url: (f.size, f.version) for f in Storage().find(f"{tmp_path}/set")}
    expected = LocalFileSystem().find(f"{tmp_path}/set", detail=True)
    assert found == {
        name: (entry["size"], f"mtime {entry['mtime']}") for name, entry in expected.items()
    }


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
