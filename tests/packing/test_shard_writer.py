"""Shard writer: limits, publishing, replacing, and remaining files after an error."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import shardstream as ss
from shardstream.catalog import ShardCatalog
from shardstream.errors import OptionError, SampleError, StorageError, parse_bytes
from shardstream.format import iter_samples
from shardstream.packing import ShardNames, ShardWriter
from shardstream.storage import (
    JOURNAL_NAME,
    LocalFolder,
    PendingFile,
    Storage,
    locate_shards,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def samples_of(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    return [
        sample for _, sample in iter_samples(lambda at, size: data[at : at + size], shard=str(path))
    ]


def write_some(url: str | Path, count: int = 25, **options: Any) -> ShardWriter:
    with ShardWriter(url, **{"max_samples": 10} | options) as writer:
        for i in range(count):
            writer.write({"txt": f"text {i}", "cls": i})
    return writer


def test_shards_indexes_and_the_manifest_are_published(tmp_path: Path) -> None:
    writer = write_some(tmp_path / "train-{shard:03d}.tar", name="texts")
    assert names(tmp_path) == [
        "index.json",
        "train-000.tar", "train-000.tar.idx",
        "train-001.tar", "train-001.tar.idx",
        "train-002.tar", "train-002.tar.idx",
    ]  # fmt: skip
    document = json.loads((tmp_path / "index.json").read_bytes())
    assert (document["name"], document["nsamples"], document["fields"]) == (
        "texts",
        25,
        {"cls": 25, "txt": 25},
    )
    assert [shard["nsamples"] for shard in document["shardlist"]] == [10, 10, 5]
    assert writer.manifest.total_bytes == sum(p.stat().st_size for p in tmp_path.glob("*.tar"))
    storage = Storage()
    catalog = ShardCatalog(locate_shards(str(tmp_path), storage), storage)
    sample = catalog.read_sample(17)
    assert {name: value for name, value in sample.items() if name != "__url__"} == {
        "__key__": "00000017", "txt": b"text 17", "cls": b"17",
    }  # fmt: skip


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_some(tmp_path / folder)
    assert names(tmp_path / "a") == names(tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_shards_exceed_max_bytes_only_for_one_large_sample(tmp_path: Path) -> None:
    sizes = [100, 3000, 9000, 100, 3000, 3000, 100]
    with ShardWriter(tmp_path, max_bytes=8192) as writer:
        for i, size in enumerate(sizes):
            writer.write({"__key__": f"{i}", "bin": bytes(size)})
    found = [[len(s["bin"]) for s in samples_of(p)] for p in sorted(tmp_path.glob("*.tar"))]
    assert found == [[100, 3000], [9000], [100, 3000], [3000, 100]]
    for shard, path in zip(found, sorted(tmp_path.glob("*.tar")), strict=True):
        assert path.stat().st_size <= 8192 or len(shard) == 1


def test_sample_that_fills_a_shard_exactly_fits(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, max_bytes=2 * 1024 + 1024) as writer:
        for i in range(4):
            writer.write({"__key__": f"{i}", "bin": bytes(512)})
    assert [path.stat().st_size for path in sorted(tmp_path.glob("*.tar"))] == [3072, 3072]


def test_error_in_the_block_publishes_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), ShardWriter(tmp_path, max_samples=10) as writer:  # noqa: PT012
        for i in range(25):
            writer.write({"cls": i, "txt": str(1 / (24 - i))})
    assert JOURNAL_NAME in names(tmp_path)
    assert set(names(tmp_path)) - {JOURNAL_NAME} <= {
        f"00000{i}.tar{end}" for i in range(2) for end in ("", ".idx")
    }
    with pytest.raises(OptionError, match="closed"):
        writer.write({"cls": 1})


def test_refused_sample_can_be_caught_and_skipped(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        writer.write({"__key__": "a", "cls": 1})
        for bad in (
            {"__key__": "a", "cls": 1},
            {"__key__": "b", "cls": "x"},
            {"__key__": "b.c", "cls": 1},
            {"__key__": 3, "cls": 1},
        ):
            with pytest.raises(SampleError):
                writer.write(bad)
        writer.write({"__key__": "c", "cls": 2})
    assert [s["__key__"] for s in samples_of(tmp_path / "000000.tar")] == ["a", "c"]


def test_refused_first_sample_of_a_shard_leaves_no_empty_shard(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, max_samples=1, columns="cls") as writer:
        writer.write({"__key__": "a", "json": {"cls": 1}, "cls": 1})
        with pytest.raises(SampleError, match="column"):
            writer.write({"__key__": "b", "cls": b"cat"})
    assert [shard.nsamples for shard in writer.manifest.shards] == [1]
    assert not [name for name in names(tmp_path) if "000001" in name]


def test_error_of_a_value_names_sample_and_field(tmp_path: Path) -> None:
    with (
        pytest.raises(SampleError, match=r"field 'cls'.*sample '0042'"),
        ShardWriter(tmp_path) as writer,
    ):
        writer.write({"__key__": "0042", "cls": "cat"})
    assert names(tmp_path) == []


def test_writer_without_samples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="no samples were written"), ShardWriter(tmp_path / "x"):
        pass


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "s3://b/train.tar",
            r"must contain \{shard\}.*write for example 's3://b/\{shard:06d\}\.tar'",
        ),
        ("train-%06d.tar", r"must contain \{shard\}"),
        ("x/{n}.tar", r"may contain only \{shard\}"),
        ("x/{shard:06q}.tar", r"may contain only \{shard\}"),
        ("{shard}/x.tar", "the last part of the pattern"),
        ("x/{shard:06d}", "end in .tar"),
        ("x/a-{0}.tar", r"may contain only \{shard\}"),
        ("x/{shard!r:.1}{{}}.tar.gz", r"may contain only \{shard\}"),
        ("x/{shard:.1e}.tar", r"may contain only \{shard\}"),  # equal names for 100 numbers
        ("x/{shard}-{shard}.tar", r"must contain \{shard\} once"),
        ("x/{shard.tar", "the pattern is wrong"),
    ],
)
def test_invalid_pattern_is_refused(url: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ShardWriter(url)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1KB", 1000), ("1 kib", 1024), ("2.5MB", 2_500_000), ("7", 7), ("1g", 10**9), (12, 12)],
)
def test_sizes_are_parsed(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "options", [{"max_bytes": "x"}, {"max_bytes": 0}, {"max_bytes": "-1MB"}, {"max_samples": 0}]
)
def test_invalid_limits_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"size|max_samples"):
        ShardWriter(tmp_path, **options)


def test_existing_dataset_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    write_some(tmp_path, 35)
    before = (tmp_path / "index.json").read_bytes()
    (tmp_path / "classes.json").write_text("[]")
    with pytest.raises(OptionError, match="overwrite=True"):
        ShardWriter(tmp_path)
    assert (tmp_path / "index.json").read_bytes() == before
    with ShardWriter(tmp_path, max_samples=10, overwrite=True) as writer:
        assert (tmp_path / "index.json").exists()
        for i in range(12):
            writer.write({"cls": i})
    assert names(tmp_path) == [
        "000000.tar", "000000.tar.idx", "000001.tar", "000001.tar.idx", "classes.json", "index.json",
    ]  # fmt: skip
    assert len(samples_of(tmp_path / "000001.tar")) == 2


def test_a_writer_killed_at_any_deletion_leaves_no_file_of_the_replaced_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, left = LocalFolder.remove, 0
    write_some(tmp_path / "clean", 5)
    for number in range(20):
        dest, left = tmp_path / f"{number}", number
        write_some(dest, 45, columns="__key__")

        def stop(folder: LocalFolder, name: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:  # nothing is changed afterwards, as by a killed process
                raise RuntimeError("killed")
            remove(folder, name)

        with monkeypatch.context() as patch, suppress(RuntimeError):
            patch.setattr(LocalFolder, "remove", stop)
            write_some(dest, 5, overwrite=True)
        write_some(dest, 5, overwrite=True)
        assert names(dest) == names(tmp_path / "clean")
        if left >= 0:
            break
    assert left >= 0


def test_shards_without_a_manifest_are_replaced_only_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "000007.tar").write_bytes(b"another tool's")
    with pytest.raises(OptionError, match=r"without an index\.json"):
        ShardWriter(tmp_path)
    write_some(tmp_path / "other-{shard}.tar")
    assert (tmp_path / "000007.tar").read_bytes() == b"another tool's"


def test_manifest_cannot_delete_files_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "victim.tar").write_bytes(b"mine")
    (tmp_path / "out" / "index.json").write_text(
        json.dumps({
            "__kind__": "wids-shard-index-v1",
            "shardlist": [{"url": "../victim.tar"}, {"url": str(tmp_path / "victim.tar")}],
        })
    )  # fmt: skip
    write_some(tmp_path / "out", overwrite=True)
    assert (tmp_path / "victim.tar").read_bytes() == b"mine"


def test_manifest_cannot_delete_files_other_than_tars(tmp_path: Path) -> None:
    mine = ["notes.txt", "photo.jpg", "000000.tar.idx.txt", ".hidden"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    (tmp_path / "old.tar").write_bytes(b"of the dataset that is replaced")
    named = [*mine, "..", ".", "old.tar", "..\\x.tar", "s3://b/x.tar", "file::x.tar"]
    (tmp_path / "index.json").write_text(
        json.dumps({"__kind__": "wids-shard-index-v1", "shardlist": [{"url": name} for name in named]})
    )  # fmt: skip
    write_some(tmp_path, 5, overwrite=True)
    assert names(tmp_path) == sorted([*mine, "000000.tar", "000000.tar.idx", "index.json"])


def test_memory_and_user_filesystems_are_supported() -> None:
    folder = f"memory://{uuid.uuid4().hex}"
    write_some(f"{folder}/{{shard:02d}}.tar", filesystem=fsspec.filesystem("memory"))
    assert len(locate_shards(folder, Storage()).shards) == 3


def writer_threads() -> list[threading.Thread]:
    """Return the threads of the package, without those that a test of the viewer left to garbage collection."""
    threads = [one for one in threading.enumerate() if one.name.startswith("shardstream")]
    return [one for one in threads if not one.name.startswith("shardstream-view")]


def test_shard_is_uploaded_while_the_next_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Event(), threading.Event()
    open_file = LocalFolder.open

    def slow(folder: LocalFolder, name: str) -> PendingFile:
        if name.endswith(".idx"):
            started.set()
            assert go_on.wait(300)
        return open_file(folder, name)

    monkeypatch.setattr(LocalFolder, "open", slow)
    with ShardWriter(tmp_path, max_samples=1) as writer:
        for i in range(3):  # two in flight, one being written
            writer.write({"cls": i})
        assert started.wait(300)
        assert writer.nsamples == 3
        go_on.set()
    assert writer.manifest.nsamples == 3
    assert not writer_threads()


@pytest.mark.parametrize("caught", [False, True])
def test_failed_shard_upload_raises(
    caught: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = LocalFolder.open

    def fail(folder: LocalFolder, name: str) -> PendingFile:
        if name.endswith(".idx"):
            raise StorageError("refused", shard=name)
        return open_file(folder, name)

    monkeypatch.setattr(LocalFolder, "open", fail)
    writer = ShardWriter(tmp_path, max_samples=1)
    with pytest.raises(StorageError, match="refused"), writer:  # noqa: PT012  (both may raise)
        try:
            for i in range(10):
                writer.write({"cls": i})
                time.sleep(0.01)
        except StorageError:
            if not caught:
                raise
    assert "index.json" not in names(tmp_path)
    assert writer.nsamples < 5
    assert not [name for name in names(tmp_path) if ".part-" in name]
    assert not writer_threads()


def test_writer_whose_shard_is_missing_stays_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file, failures = LocalFolder.open, iter([StorageError("refused")])

    def fail_once(folder: LocalFolder, name: str) -> PendingFile:
        if name == "000000.tar.idx" and (error := next(failures, None)) is not None:
            raise error
        return open_file(folder, name)

    monkeypatch.setattr(LocalFolder, "open", fail_once)
    writer = ShardWriter(tmp_path, max_samples=1)
    writer.write({"cls": 0})
    writer.write({"cls": 1})
    for act in (writer.drain, writer.drain, lambda: writer.write({"cls": 2}), writer.close):
        with pytest.raises(StorageError, match="refused"):
            act()
    assert not [name for name in names(tmp_path) if name.startswith(("0", "index"))]


FULL_DISK = """
import resource, signal, sys
from shardstream.packing import ShardWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
with ShardWriter(sys.argv[1], max_samples=10) as writer:
    for i in range(30):
        writer.write({"bin": bytes(100_000 * (1 + i // 10) ** 2)})
"""


@pytest.mark.parametrize("remote", [False, True])
def test_full_disk_raises_and_publishes_nothing(remote: bool, tmp_path: Path) -> None:
    dest = f"memory://{tmp_path.name}" if remote else str(tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FULL_DISK, dest],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "StorageError: the disk is full; free some space" in done.stderr
    assert ("where it waits to be sent" in done.stderr) == remote
    assert "Exception ignored" not in done.stderr
    if not remote:
        assert names(tmp_path / "out") == [JOURNAL_NAME, "000000.tar", "000000.tar.idx"]


KILLED = """
import os, signal, sys, time
from shardstream.packing import ShardWriter
with ShardWriter(sys.argv[1], max_samples=10) as writer:
    for i in range(25):
        writer.write({"bin": os.urandom(500_000)})
    while not os.path.exists(sys.argv[1] + "/000001.tar.idx"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_writer_leaves_only_whole_shards(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    visible = [name for name in names(tmp_path) if ".part-" not in name]
    shards = ["000000.tar", "000000.tar.idx", "000001.tar", "000001.tar.idx"]
    assert visible == [JOURNAL_NAME, *shards]
    located = locate_shards([f"{tmp_path}/{name}" for name in shards[::2]], Storage())
    assert [shard.nsamples for shard in located.shards] == [10, 10]
    assert [len(samples_of(Path(shard.url))) for shard in located.shards] == [10, 10]


@pytest.mark.usefixtures("s3_env")
def test_writer_on_s3(bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shardstream"):
        writer = write_some(f"{bucket}/train/", 40)
    assert len([r for r in caplog.records if "published" in r.message]) == 4
    storage = Storage()
    catalog = ShardCatalog(locate_shards(f"{bucket}/train/", storage), storage)
    assert (len(catalog), catalog.total_bytes) == (40, writer.manifest.total_bytes)
    assert catalog.read_sample(39)["txt"] == b"text 39"
    with pytest.raises(OptionError, match="published here"):
        ShardWriter(f"{bucket}/train/")
    write_some(f"{bucket}/train/", 15, overwrite=True)
    found = [file.url.rsplit("/", 1)[-1] for file in storage.find(f"{bucket}/train")]
    assert found == ["000000.tar", "000000.tar.idx", "000001.tar", "000001.tar.idx", "index.json"]


@pytest.mark.usefixtures("s3_env")
def test_missing_bucket_is_an_error() -> None:
    with pytest.raises(StorageError, match="the bucket '.*' does not exist; create it"):
        write_some("s3://no-such-bucket-here/train/")


TEMPLATES = (
    "a-{shard:03d}.tar",
    "{shard}.tar",
    "train_{shard:06d}.tar",
    "a_07_{shard:02d}.tar",
    "{shard:x}.tar",
    "x_{shard:04X}.tar",
    "{shard:3o}-{{b}}.tar",
    "a{{{shard:b}_00.tar",
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_shard_names_are_recognised(template: str) -> None:
    shards = ShardNames.parse(f"x/{template}")
    for number in (0, 7, 10, 171, 4095, 10**9):
        assert shards.is_ours(shards.name(number))
        assert shards.is_ours(shards.name(number, 3))
    assert not any(
        map(shards.is_ours, ("a-7.tar", "b-007.tar", "a-.tar", "train.tar", "a_07_.tar"))
    )


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("number", [0, 10, 171])
def test_tars_of_others_are_replaced_only_with_overwrite(
    template: str, number: int, tmp_path: Path
) -> None:
    samples = [{"txt": "a"}]
    ss.pack(samples, tmp_path / "source")
    theirs = tmp_path / "out" / template.format(shard=number)
    theirs.parent.mkdir()
    theirs.write_bytes(b"another tool's")
    dest = tmp_path / "out" / template
    for write in (
        lambda: ShardWriter(dest),
        lambda: ss.pack(samples, dest),
        lambda: ss.pack(tmp_path / "source", dest, executor=ss.tasks.LocalExecutor()),
        lambda: ss.reshard(tmp_path / "source", dest),
    ):
        with pytest.raises(OptionError, match=r"without an index\.json.*--overwrite"):
            write()
    assert [file.name for file in theirs.parent.iterdir()] == [theirs.name]
    assert theirs.read_bytes() == b"another tool's"
    ss.pack(samples, dest, overwrite=True)
    assert number == 0 or not theirs.exists()


def test_numpy_and_bytes_fields_in_one_sample(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        writer.write({"__key__": "a", "npy": np.arange(3), "json": {"a": 1}, "raw": b"x"})
    assert list(samples_of(tmp_path / "000000.tar")[0])[2:] == ["npy", "json", "raw"]


def test_key_in_two_shards_is_refused_before_publication(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, max_samples=2)
    for key in ("a", "b", "c", "d", "e", "b", "a"):
        writer.write({"__key__": key, "txt": key})
    repeated = r"'b' comes twice, in 000000\.tar and in 000002\.tar, and so do 1 other key; nothing"
    with pytest.raises(ss.errors.SourceError, match=repeated):
        writer.close()
    with pytest.raises(ss.errors.UnfinishedError):
        ss.ShardDataset(str(tmp_path))
    write_some(tmp_path, overwrite=True)
    assert ss.verify(str(tmp_path)).problems == ()
