"""Test that the order, keys and bytes of a pack do not depend on where its listing is kept, and that its memory is bounded."""

from __future__ import annotations

import gc
import hashlib
import io
import itertools
import multiprocessing
import resource
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import shardstream as ss
from shardstream.errors import SourceError, StorageError
from shardstream.format import canonical_field, is_meta_name, split_member_name
from shardstream.packing import FileRef, Record, SourceOptions, open_source, pack
from shardstream.storage import RowFile, Storage
from tests.limits import set_limits


class ListedNames(AbstractFileSystem):  # type: ignore[misc]
    """A file system of empty files with these names, which are relative to "root"."""

    cachable = False

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._files: dict[str, list[str]] = {}
        for name in names:
            self._files.setdefault(name.partition("/")[0] if "/" in name else "", []).append(name)

    def _entry(self, name: str) -> dict[str, Any]:
        return {"name": f"root/{name}", "size": len(name), "type": "file", "ETag": name[::-1]}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": 0, "type": "directory"}

    def ls(self, _path: str, **_: Any) -> list[dict[str, Any]]:
        folders = [self.info(f"root/{name}") for name in self._files if name]
        return [*folders, *map(self._entry, self._files.get("", ()))]

    def find(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        entries = map(self._entry, self._files.get(path.removeprefix("root/"), ()))
        return {entry["name"]: entry for entry in entries}


@pytest.fixture(scope="module")
def on_disk() -> Iterator[None]:
    """Make lists of a few files as large ones: sorted in runs of three rows, and kept in a temporary file."""
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, RowFile, RUN_ROWS=3, KEPT_BYTES=0)
        yield


def records_of(names: Sequence[str], kind: str) -> list[Record]:
    return list(open_source("root", Storage(filesystem=ListedNames(names)), SourceOptions(kind=kind)))  # fmt: skip


# Any character that a name may have, also surrogates that stand for bytes; no hidden file, and none that fsspec changes.
_text = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=5)
_part = (_text | st.sampled_from(["a", "a.b", "a-b", "A", "ä", "a_b", "::", "\udcff", "\U0001f600"])).filter(
    lambda part: not part.startswith((".", "~"))
)  # fmt: skip
_extension = st.sampled_from(["jpg", "JPG", "png", "seg.png", "json", "Txt"])


def reference_members(names: Sequence[str]) -> list[tuple[str, str, str]]:
    found = []
    for name in names:
        key, field = split_member_name(name) or ("", "")
        if not is_meta_name(name):
            found.append((key, canonical_field(field), name))
    return sorted(found)


@given(
    names=st.lists(
        st.builds("{}/{}.{}".format, _part, _part, _extension), min_size=1, max_size=12, unique=True
    )
)
@pytest.mark.usefixtures("on_disk")
def test_loose_files_are_sorted_by_key_and_field(names: list[str]) -> None:
    members = reference_members(names)
    pairs = Counter(member[:2] for member in members)
    if not members or max(pairs.values()) > 1:
        with pytest.raises(SourceError):
            records_of(names, "files")
        return
    expected = []
    for key, group in itertools.groupby(members, lambda member: member[0]):
        files = {field: FileRef(f"root/{name}", len(name)) for _, field, name in group}
        expected.append(Record(key, files, next(iter(files.values())).url))
    assert records_of(names, "files") == expected


@given(
    names=st.lists(
        st.builds("{}/{}.{}".format, _part, _part, st.sampled_from(["jpg", "PNG"])),
        min_size=1,
        max_size=12,
        unique=True,
    )
)
@pytest.mark.usefixtures("on_disk")
def test_class_folders_are_sorted_by_path(names: list[str]) -> None:
    names.sort()
    classes = sorted({name.partition("/")[0] for name in names})
    stems = [name.partition("/")[2].rpartition(".")[0].replace(".", "_") for name in names]
    paths = [f"{name.partition('/')[0]}/{stem}" for name, stem in zip(names, stems, strict=True)]
    found = records_of(names, "images")
    assert [record.where for record in found] == [f"root/{name}" for name in names]
    for name, record in zip(names, found, strict=True):
        assert record.fields["cls"] == classes.index(name.partition("/")[0])
    keys = [record.key for record in found]
    assert len(set(keys)) == len(keys)
    if len(set(stems)) == len(stems):
        assert keys == stems
    elif len(set(paths)) == len(paths):
        assert keys == paths


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["ant/1.jpg", "bee/2.jpg"], ["1", "2"]),
        (["ant/1.jpg", "bee/1.jpg", "bee/2.jpg"], ["ant/1", "bee/1", "bee/2"]),
        (["a.b/1.jpg", "bee/1.jpg"], ["a.b/1", "bee/1"]),
        (["ant/1.jpg", "ant/1.png"], ["ant/1_00000000", "ant/1_00000001"]),
        (["ant/x.1.jpg", "ant/x_1.jpg"], ["ant/x_1_00000000", "ant/x_1_00000001"]),
        (["ant/\udcff.jpg"], ["\udcff"]),
        (
            ["a/x.jpg", "a/x.png", "b/y.jpg"],
            ["a/x_00000000", "a/x_00000001", "b/y_00000002"],
        ),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/7.jpg"], ["a/1", "b/1", "a/7"]),
        (["train/a/1.jpg", "val/a/1.jpg"], ["1", "1"]),
    ],
)
def test_default_keys_of_images_have_one_form_and_differ_within_a_dataset(
    names: list[str], expected: list[str]
) -> None:
    assert [record.key for record in records_of(names, "images")] == expected


def png(shade: int) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (2, 2), shade).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with names that sort differently by code point, by folder and without extension, with labels beside some."""
    root = tmp_path_factory.mktemp("tree")
    names = ["a", "a.b", "a-b", "A", "ä", "z", "\U0001f600", "\ufffd", "\udcff", "a b", "0", "00"]
    for folder in ("cat", "cat-2", "Cat", "dög", "\udcfe"):
        (root / folder).mkdir()
        for shade, name in enumerate(names):
            (root / folder / f"{name}.{'PNG' if shade % 5 == 0 else 'png'}").write_bytes(png(shade))
    return root


def digest(folder: Path) -> str:
    """Return a hash of all shards and indexes of a dataset."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.tar*")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "images": ({}, "c9b16c96499ab95a"),
    "sorted": ({"shuffle": False}, "85562d05081bc05f"),
    "split": ({"split": {"train": 0.7, "val": 0.3}}, "d50138aaeb1885b0"),
    "key": ({"key": "{class}/{stem}_{index}"}, "8a13f071a8784013"),
    "files": ({"kind": "files"}, "fd0bb3e6816ebefe"),
    "shuffled files": ({"kind": "files", "shuffle": True, "seed": 4}, "07d69f1e12438cf1"),
}
"""Digests of the time when the whole listing was in memory."""


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.usefixtures("on_disk")
def test_shards_of_a_listing_on_disk_are_pinned(job: str, tree: Path, tmp_path: Path) -> None:
    options, expected = JOBS[job]
    pack(tree, tmp_path / "out", max_samples=7, **options)
    assert digest(tmp_path / "out") == expected


def test_splits_in_folders_keep_their_classes(on_disk: None, tree: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for split in ("train", "val"):
        (tmp_path / "in" / split).symlink_to(tree)
    pack(tmp_path / "in", tmp_path / "out", max_samples=7)
    pack(tree, tmp_path / "one", max_samples=7, shuffle=False)
    for split in ("train", "val"):
        one, some = Storage().read(f"{tmp_path}/one/classes.json"), f"{tmp_path}/out/{split}"
        assert Storage().read(f"{some}/classes.json") == one
        assert len(ss.ShardDataset(some).by_number()) == 60


def _threads() -> Executor:
    return ThreadPoolExecutor(2)


def _forked() -> Executor:
    return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))


@pytest.mark.parametrize("pool", [_threads, _forked])
@pytest.mark.parametrize("job", ["images", "split", "shuffled files"])
def test_threads_and_forked_processes_read_one_listing(
    pool: Any, job: str, on_disk: None, tree: Path, tmp_path: Path
) -> None:
    options, expected = JOBS[job]
    with pool() as executor:
        pack(tree, tmp_path / "out", max_samples=7, executor=ss.tasks.FuturesExecutor(executor), **options)  # fmt: skip
    assert digest(tmp_path / "out") == expected


@pytest.mark.slow
@pytest.mark.usefixtures("on_disk")
def test_spawned_processes_encode_the_records_in_order(tree: Path, tmp_path: Path) -> None:
    for processes in (1, 2):
        pack(tree, tmp_path / f"{processes}", max_samples=7, max_side=1, processes=processes)
    assert digest(tmp_path / "1") == digest(tmp_path / "2")


@pytest.mark.parametrize("kind", ["images", "files"])
def test_repeated_keys_of_a_template_are_found_before_packing(
    kind: str, on_disk: None, tree: Path, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=r"'0' comes twice, in .*/Cat/0\.PNG and in .*/cat-2/0\.PNG"):  # fmt: skip
        pack(tree, tmp_path / "out", kind=kind, key="{stem}")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["images", "files"])
def test_memory_does_not_grow_with_the_number_of_files(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, RowFile, RUN_ROWS=500, KEPT_BYTES=1 << 15)
    fields = ("jpg",) if kind == "images" else ("jpg", "json")
    held = {}
    for count in (3_000, 9_000):
        keys = (f"{number % 50:02d}/{number:08d}" for number in range(count // len(fields)))
        names = [f"{key}.{field}" for key in keys for field in fields]
        storage = Storage(filesystem=ListedNames(names))
        tracemalloc.start()
        source = open_source("root", storage, SourceOptions(kind=kind))
        assert sum(1 for _ in source) == source.length == count // len(fields)
        gc.collect()
        held[count], _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert held[9_000] - held[3_000] < 5 * 6_000  # before: 124 to 140 bytes a file


def test_full_temporary_folder_ends_a_pack(on_disk: None, tree: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"names and the order of the files.*TMPDIR"):
            pack(tree, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists()
