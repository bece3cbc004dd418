from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import shardstream as ss
from shardstream.catalog import ShardCatalog
from shardstream.errors import ChangedError, OptionError, SampleError, ShardError, StorageError
from shardstream.format import decode_index
from shardstream.packing import Progress, index
from shardstream.storage import Storage, locate_shards
from tests.small_tars import foreign_tar, make_dataset, samples, tar_bytes


def test_indexed_folder_can_be_read_by_number(tmp_path: Path) -> None:
    paths = make_dataset(tmp_path)
    before = [path.read_bytes() for path in paths]
    report = index(str(tmp_path), name="tiny")
    assert [path.read_bytes() for path in paths] == before
    assert (report.manifest.nsamples, report.manifest.name, report.warnings) == (12, "tiny", ())
    assert report.manifest.fields == {"bin": 12, "cls": 12}
    assert report.manifest.shards[1].sha256 == hashlib.sha256(before[1]).hexdigest()
    catalog = ShardCatalog(locate_shards(str(tmp_path), Storage()), Storage())
    assert [catalog.read_sample(number)["__key__"] for number in (0, 5, 11)] == [
        "0000",
        "0005",
        "0011",
    ]


def test_index_of_a_foreign_tar_skips_other_members(tmp_path: Path) -> None:
    members = [("README", b"hi"), ("__meta__/x.json", b"{}"), ("a/é 1.JPG", b"1"), ("a/é 1.cls", b"2"),
               ("x" * 120 + ".jpg", b"3")]  # fmt: skip
    foreign_tar(tmp_path / "t.tar", members)
    report = index(str(tmp_path / "t.tar"))
    assert report.manifest.fields == {"jpg": 2, "cls": 1}
    offsets = decode_index((tmp_path / "t.tar.idx").read_bytes(), url="t")
    assert len(offsets) == 3


def test_progress_reports_bytes_as_they_are_read(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    reports: list[Progress] = []
    report = index(str(tmp_path), progress=reports.append)
    assert reports[-1].size_bytes == reports[-1].total_bytes == report.manifest.total_bytes
    assert (reports[-1].shards, reports[-1].samples) == (3, 12)
    assert reports[0].shards == 0


def test_index_of_members_is_that_of_dali(tmp_path: Path) -> None:
    foreign_tar(tmp_path / "t.tar", [("0.JPG", b"123"), ("0.cls", b"1"), ("1.JPG", b"45")])
    index(str(tmp_path), members=True)
    # a folder entry comes first, in the bytes 0 to 512
    assert (tmp_path / "t.idx").read_text() == (
        "v1.2 2\nJPG 1024 3 0.JPG cls 2048 1 0.cls\nJPG 3072 2 1.JPG\n"
    )


def test_index_of_members_refuses_names_with_blanks(tmp_path: Path) -> None:
    foreign_tar(tmp_path / "t.tar", [("a b.jpg", b"1")])
    with pytest.raises(SampleError, match=r"spaces.*sample 'a b'"):
        index(str(tmp_path), members=True)
    assert not (tmp_path / "index.json").exists()


def test_indexing_again_adds_new_tars_and_keeps_the_name(tmp_path: Path) -> None:
    make_dataset(tmp_path, shards=1)
    index(str(tmp_path), name="kept")
    make_dataset(tmp_path, shards=3)
    report = index(str(tmp_path / "index.json"))
    assert (len(report.manifest.shards), report.manifest.name) == (3, "kept")


def test_files_that_a_killed_index_has_left_are_deleted(tmp_path: Path) -> None:
    make_dataset(tmp_path, shards=1)
    (tar,) = tmp_path.glob("*.tar")
    left = [f"{tar.name}.idx", f"{tar.name}.cols.parquet", "index.json"]
    others = ["other.tar.idx", "notes.txt"]
    for name in left + others:
        (tmp_path / f"{name}.part-0123456789ab").write_bytes(b"half")
    index(str(tmp_path))
    found = {path.name for path in tmp_path.glob("*.part-*")}
    assert found == {f"{name}.part-0123456789ab" for name in others}


def test_broken_or_later_manifest_is_replaced(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    for text in (
        "{",
        '{"__kind__": "wids-shard-index-v1", "wids_version": 1, "version": 9, "shardlist": []}',
    ):
        (tmp_path / "index.json").write_text(text)
        index(str(tmp_path))
        assert json.loads((tmp_path / "index.json").read_text())["nsamples"] == 12


def test_tars_missing_from_the_list_cause_a_warning(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    (warning,) = index(str(tmp_path / "train-{000000..000001}.tar")).warnings
    assert "train-000002.tar in the same folder not indexed" in warning


def test_tar_without_end_blocks_causes_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes(samples(0, 2), end=b""))
    (warning,) = index(str(tmp_path)).warnings
    assert "the blocks that end an archive are missing" in warning


def test_tar_without_samples_causes_a_warning(tmp_path: Path) -> None:
    foreign_tar(tmp_path / "a.tar", [("README", b"")])
    (warning,) = index(str(tmp_path), members=True).warnings
    assert "no samples" in warning


WHOLE = tar_bytes(samples(0, 3))
BAD_TARS: dict[str, tuple[bytes, str]] = {
    "text": (b"This is no tar.\n" * 100, r"not a tar file.*byte 0"),
    "empty": (b"", "is empty"),
    "short": (b"abc", r"cut inside a header \(3 of 512"),
    "cut in a header": (WHOLE[: 512 + 1024 + 512 + 512 + 100], r"cut inside a header.*byte 2560"),
    "cut in a body": (WHOLE[: 512 + 300], r"0000.bin needs the bytes 512 to 1212.*byte 0"),
    "flipped header": (WHOLE[:1536] + b"~" + WHOLE[1537:], r"checksum.*byte 1536"),
    "joined": (WHOLE + WHOLE, rf"after the end.*byte {len(WHOLE)}"),
    "padded, then joined": (WHOLE + bytes(10_240) + b"x", rf"after the end.*byte {len(WHOLE) + 10_240}"),
    "same key again": (tar_bytes([*samples(0, 2), ("0000.txt", b"x")]), r"returns after.*sample '0000'"),
    "same field twice": (tar_bytes([("a.cls", b"1"), ("a.cls", b"2")]), r"twice.*'a'.*'cls'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_TARS)
def test_bad_tar_is_named_and_no_manifest_written(tmp_path: Path, kind: str) -> None:
    paths = make_dataset(tmp_path)
    data, message = BAD_TARS[kind]
    paths[1].write_bytes(data)
    with pytest.raises((ShardError, SampleError), match=rf"(?s){message}") as caught:
        index(str(tmp_path))
    assert caught.value.shard == str(paths[1])
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ("{folder}/missing", "not found"),
        ("{folder}/missing.tar", "not found"),
        ("{folder}/empty", r"no \.tar here \(found: nothing\)"),
        ("{folder}/none-*.tar", "no shard matches"),
        (["{folder}/a/0.tar", "{folder}/b/0.tar"], "2 folders"),
        (["{folder}/a/0.tar", "{folder}/a/"], r"named twice.*a/0\.tar"),
        ("{folder}/z", "compressed tar"),
        ([], "list of URLs is empty"),
    ],
)
def test_unsupported_inputs_cannot_be_indexed(
    tmp_path: Path, urls: str | list[str], message: str
) -> None:
    for name in ("a", "b", "z", "empty"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        (tmp_path / name / "0.tar").write_bytes(WHOLE)
    (tmp_path / "z" / "0.tar.gz").write_bytes(gzip.compress(WHOLE))
    folder = str(tmp_path)
    given = (
        urls.format(folder=folder)
        if isinstance(urls, str)
        else [url.format(folder=folder) for url in urls]
    )
    with pytest.raises((OptionError, StorageError), match=message):
        index(given)


def test_no_threads_is_an_option_error(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    with pytest.raises(OptionError, match="threads must be 1 or more"):
        index(str(tmp_path), threads=0)


def test_parts_are_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    with pytest.raises(OptionError, match=r"cannot be cut into parts.*LocalExecutor, --processes"):
        index(str(tmp_path), executor=ss.tasks.Parts(1, 2))
    assert not list(tmp_path.glob("*.idx"))


@pytest.mark.parametrize("door", [index, ss.verify])
def test_threads_beside_an_executor_are_refused(door: Any, tmp_path: Path) -> None:
    make_dataset(tmp_path)
    with pytest.raises(OptionError, match="no effect with an executor"):
        door(str(tmp_path), threads=2, executor=ss.tasks.LocalExecutor())


def test_file_system_is_used_as_given() -> None:
    memory: Any = MemoryFileSystem()
    memory.pipe("/indexing/a.tar", WHOLE)
    report = index("/indexing", filesystem=memory)
    assert report.manifest.nsamples == 3
    assert memory.exists("/indexing/a.tar.idx")
    memory.rm("/indexing", recursive=True)


@pytest.mark.usefixtures("s3_env")
def test_index_on_s3(bucket: str, tmp_path: Path) -> None:
    storage = Storage()
    for path in make_dataset(tmp_path):
        filesystem, target = storage.resolve(f"{bucket}/train/{path.name}")
        filesystem.put_file(str(path), target)
    remote = index(f"{bucket}/train/", threads=2)
    assert remote.manifest == index(str(tmp_path)).manifest
    catalog = ShardCatalog(locate_shards(f"{bucket}/train/", storage), storage)
    assert catalog.read_sample(7)["cls"] == b"7"


# --- another writer meanwhile


def replace_first_tar(folder: Path) -> None:
    """Put a tar of the same length in the place of the first, as a copying tool does."""
    path = min(folder.glob("*.tar"))
    data, status = path.read_bytes(), path.stat()
    (folder / "new").write_bytes(data)
    os.utime(folder / "new", (0, status.st_mtime + 10))
    (folder / "new").replace(path)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_tar_that_is_replaced_while_it_is_indexed_is_refused(
    tmp_path: Path, elsewhere: bool
) -> None:
    for moment in (0, -1):  # while it is read, and after its index was written
        folder = tmp_path / f"{moment}"
        folder.mkdir()
        make_dataset(folder)
        to = tmp_path / f"{moment} index" if elsewhere else None
        count = len(list_progress(tmp_path / f"{moment} count"))
        reports: list[Progress] = []

        def replace(
            report: Progress,
            folder: Path = folder,
            at: int = moment % count,
            reports: list[Progress] = reports,
        ) -> None:
            if len(reports) == at:
                replace_first_tar(folder)
            reports.append(report)

        with pytest.raises(ChangedError, match="was replaced while it was indexed"):
            index(str(folder), threads=1, to=to, progress=replace)
        assert not ((to or folder) / "index.json").exists()


def list_progress(folder: Path) -> list[Progress]:
    folder.mkdir()
    make_dataset(folder)
    reports: list[Progress] = []
    index(str(folder), threads=1, progress=reports.append)
    return reports


def test_pack_waits_until_the_index_is_written(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    refusals: list[str] = []

    def pack(_: Progress) -> None:
        with pytest.raises(StorageError, match="has this folder open") as error:
            ss.pack([{"txt": "other"}], tmp_path, overwrite=True)
        refusals.append(str(error.value))

    index(str(tmp_path), progress=pack)
    assert refusals
    assert ss.verify(str(tmp_path)).problems == ()


def test_index_of_a_store_is_refused_once_another_writer_has_begun() -> None:
    filesystem = MemoryFileSystem()
    folder = "memory://index-beside-a-writer"
    writers: list[ss.ShardWriter] = []
    ss.pack([{"txt": "first"}], folder)

    def begin(_: Progress) -> None:
        if not writers:
            writers.append(ss.ShardWriter(folder, overwrite=True))

    try:
        with pytest.raises(StorageError, match="began to replace the dataset"):
            index(folder, progress=begin)
        assert len(ss.ShardDataset(folder)) == 1
        with writers[0] as writer:
            writer.write({"txt": "second"})
        assert ss.verify(folder).problems == ()
    finally:
        filesystem.rm(folder, recursive=True)
