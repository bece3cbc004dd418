"""Test that parts of a job run in any order and process, and that `merge` publishes only when all are done."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

import shardstream as ss
from shardstream.cli import main
from shardstream.packing import Journal, PartFiles
from shardstream.storage import RemoteFolder
from tests.small_tars import make_dataset

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """A folder of tars without indexes."""
    folder = tmp_path / "tars"
    folder.mkdir()
    make_dataset(folder)
    return folder


@pytest.fixture
def source(tars: Path) -> str:
    ss.index(str(tars))
    return str(tars)


def reshard_part(source: str, dest: Path, part: int, of: int, max_samples: int = 2) -> int:
    report = ss.reshard(source, dest, max_samples=max_samples, executor=ss.tasks.Parts(part, of))
    return report.unfinished


def test_merge_names_the_missing_parts(source: str, tmp_path: Path) -> None:
    assert [reshard_part(source, tmp_path / "new", part, 4) for part in (1, 4)] == [4, 3]
    with pytest.raises(
        ss.errors.UnfinishedError, match=r"3 of 6 tasks .* part 2/4, 3/4; run these parts"
    ):
        ss.merge(tmp_path / "new")
    assert not (tmp_path / "new" / "index.json").exists()
    assert [reshard_part(source, tmp_path / "new", part, 4) for part in (3, 2)] == [2, 0]
    report = ss.merge(tmp_path / "new")
    assert (report.samples, report.shards) == (12, 6)
    assert not list((tmp_path / "new").glob(".*"))
    with pytest.raises(ss.errors.OptionError, match="published already"):
        ss.merge(tmp_path / "new")
    with pytest.raises(ss.errors.OptionError, match="a dataset is published here"):
        reshard_part(source, tmp_path / "new", 1, 4)


def test_parts_of_another_job_are_refused(source: str, tmp_path: Path) -> None:
    reshard_part(source, tmp_path / "new", 1, 2)
    with pytest.raises(ss.errors.OptionError, match="max_samples was 2, now 3"):
        reshard_part(source, tmp_path / "new", 2, 2, max_samples=3)
    with pytest.raises(ss.errors.OptionError, match="exists without an index.json"):
        ss.ShardWriter(tmp_path / "new")
    with pytest.raises(ss.errors.OptionError, match="unfinished pack with another source"):
        ss.pack([{"txt": "a"}], tmp_path / "new")
    assert reshard_part(source, tmp_path / "new", 2, 2) == 0
    assert ss.merge(tmp_path / "new").samples == 12


def test_part_stops_when_another_writer_takes_the_folder_over(source: str, tmp_path: Path) -> None:
    reshard_part(source, tmp_path / "new", 1, 2)
    with ss.ShardWriter(tmp_path / "new", overwrite=True) as writer:
        writer.write({"txt": "other"})
    assert [path.name for path in sorted((tmp_path / "new").iterdir())] == [
        "000000.tar",
        "000000.tar.idx",
        "index.json",
    ]
    with pytest.raises(ss.errors.OptionError, match="published here"):
        reshard_part(source, tmp_path / "new", 2, 2)


def test_part_is_not_begun_in_a_folder_that_another_writer_has_taken_over(source: str) -> None:
    url, read = f"memory://{uuid.uuid4().hex}", list[str]()

    def count(sample: dict[str, Any]) -> dict[str, Any]:
        read.append(sample["__key__"])
        return sample

    class OvertakenExecutor:
        def run(self, tasks: Iterable[ss.tasks.Task], _: object) -> None:
            first, second, *_others = tasks
            first.run()
            assert len(read) == 2
            with ss.ShardWriter(url, overwrite=True) as writer:
                writer.write({"txt": "other"})
            second.run()

    dataset = ss.ShardDataset(source).map(count)
    with pytest.raises(ss.errors.StorageError, match="was deleted, by another one"):
        ss.reshard(dataset, url, max_samples=2, executor=OvertakenExecutor())
    assert len(read) == 2
    assert [sample["txt"] for sample in ss.ShardDataset(url)] == [b"other"]


def test_part_that_loses_the_folder_leaves_no_record_in_the_dataset_of_the_other(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, later = f"memory://{uuid.uuid4().hex}", list[ss.ShardWriter]()

    pipe_file = MemoryFileSystem.pipe_file

    def overtake(
        filesystem: MemoryFileSystem, path: str, value: bytes, *args: Any, **options: Any
    ) -> None:
        """Let another writer take the folder over right before a record is written."""
        if "-part-" in path and not later:
            later.append(ss.ShardWriter(url, overwrite=True))
        pipe_file(filesystem, path, value, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", overtake)
    with pytest.raises(ss.errors.StorageError, match="another pack or ShardWriter writes here"):
        ss.reshard(source, url, executor=ss.tasks.Parts(1, 2))
    with later[0] as writer:
        writer.write({"txt": "other"})
    assert sorted(name.rpartition("/")[2] for name in MemoryFileSystem().ls(url, detail=False)) == [
        "000000.tar",
        "000000.tar.idx",
        "index.json",
    ]


def test_job_that_loses_the_folder_before_a_record_leaves_that_of_the_other(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = uuid.uuid4().hex
    record, later = f"/{folder}/.shardstream-pack-part-000000.json", list[ss.ShardWriter]()
    pipe_file = MemoryFileSystem.pipe_file

    def overtake(
        filesystem: MemoryFileSystem, path: str, value: bytes, *args: Any, **options: Any
    ) -> None:
        """Let another writer take the folder over right after the last file of a part is written."""
        pipe_file(filesystem, path, value, *args, **options)
        if path.endswith("000000.tar.idx") and not later:
            later.append(ss.ShardWriter(f"memory://{folder}", overwrite=True))
            pipe_file(filesystem, record, b"of the other")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", overtake)
    with pytest.raises(ss.errors.StorageError, match="another pack or ShardWriter writes here"):
        ss.reshard(source, f"memory://{folder}", executor=ss.tasks.Parts(1, 2))
    assert MemoryFileSystem().cat_file(record) == b"of the other"
    later[0].abort()


@pytest.mark.parametrize("moment", ["record file", "record", "journal", "classes", "manifest"])
def test_job_that_loses_the_folder_at_its_end_publishes_nothing(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        Image.new("L", (2, 2)).save(tmp_path / name / f"{name}.png")
    url, later, written = f"memory://{uuid.uuid4().hex}", list[ss.ShardWriter](), list[str]()

    def overtake_after(owner: type, method: str, is_moment: Callable[..., bool]) -> None:
        original = getattr(owner, method)

        def call(self: Any, *args: Any, **options: Any) -> Any:
            result = original(self, *args, **options)
            written.extend(name for name in args if isinstance(name, str))
            if is_moment(self, *args) and not later:
                later.append(ss.ShardWriter(url, overwrite=True))
            return result

        monkeypatch.setattr(owner, method, call)

    if moment == "record":
        overtake_after(PartFiles, "record", lambda *_: True)
    elif moment == "journal":
        overtake_after(Journal, "write", lambda journal: journal.published is not None)
    names = {"record file": "-part-", "classes": "classes.json", "manifest": "index.json"}
    overtake_after(RemoteFolder, "write", lambda _, name, *__: names.get(moment, "?") in name)
    with pytest.raises(ss.errors.StorageError, match="another pack or ShardWriter writes here"):
        ss.pack(tmp_path, url)
    assert ("index.json" in written) == (moment == "manifest")
    assert ("classes.json" in written) == (moment in ("classes", "manifest"))
    with later[0] as writer:
        assert not MemoryFileSystem().exists(f"{url}/index.json")
        writer.write({"txt": "other"})
    assert [sample["txt"] for sample in ss.ShardDataset(url)] == [b"other"]


def test_overwrite_of_one_part_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(ss.errors.OptionError, match="overwrite cannot be used for one part"):
        ss.reshard(source, tmp_path / "new", executor=ss.tasks.Parts(1, 2), overwrite=True)


def test_deleted_shard_is_detected_and_rewritten(source: str, tmp_path: Path) -> None:
    for part in (1, 2):
        reshard_part(source, tmp_path / "new", part, 2)
    (tmp_path / "new" / "000003.tar").unlink()
    with pytest.raises(
        ss.errors.StorageError, match=r"missing although its part is done.*000003\.tar"
    ):
        ss.merge(tmp_path / "new")
    (tmp_path / "new" / "000004.tar.idx").write_bytes(b"")
    for part in (1, 2):
        reshard_part(source, tmp_path / "new", part, 2)
    ss.merge(tmp_path / "new")
    assert not ss.verify(str(tmp_path / "new")).problems


def test_shard_that_a_killed_run_of_a_part_has_left_is_deleted(source: str, tmp_path: Path) -> None:
    reshard_part(source, tmp_path / "new", 1, 2)
    for name in ("000001_01.tar", "000001_01.tar.idx", "other.tar"):
        (tmp_path / "new" / name).write_text("left")
    reshard_part(source, tmp_path / "new", 2, 2)
    ss.merge(tmp_path / "new")
    left = {path.name for path in (tmp_path / "new").iterdir() if path.read_bytes() == b"left"}
    assert left == {"other.tar"}


def test_damaged_record_is_an_error(source: str, tmp_path: Path) -> None:
    for part in (1, 2):
        reshard_part(source, tmp_path / "new", part, 2)
    record = tmp_path / "new" / ".shardstream-pack-part-000001.json"
    document = json.loads(record.read_text())
    record.write_text(json.dumps(document)[:-20])
    with pytest.raises(
        ss.errors.ShardError, match=r"record of a part cannot be read.*part-000001\.json"
    ):
        ss.merge(tmp_path / "new")
    reshard_part(source, tmp_path / "new", 2, 2)  # writes the record again
    assert ss.merge(tmp_path / "new").samples == 12


def test_merges_at_the_same_time_leave_the_dataset_published(
    source: str, bucket: str, s3_env: None
) -> None:
    dest = f"{bucket}/new"
    ss.reshard(source, dest, max_samples=2, executor=ss.tasks.Parts(1, 1))
    results: list[object] = []

    def run() -> None:
        try:
            results.append(ss.merge(dest).samples)
        except ss.ShardStreamError as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 12 in results
    assert len(list(ss.ShardDataset(dest))) == 12
    assert not ss.verify(dest).problems


def test_part_joins_a_claimed_job_while_others_list_the_folder(source: str, tmp_path: Path) -> None:
    new = tmp_path / "new"
    reshard_part(source, new, 1, 2)
    handle = os.open(new, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert reshard_part(source, new, 2, 2) == 0
    finally:
        os.close(handle)
    assert ss.merge(new).samples == 12


@pytest.mark.slow
def test_parts_at_the_same_time_on_s3_write_one_dataset(
    source: str, bucket: str, s3_env: None
) -> None:
    code = (
        "import sys, shardstream as ss\n"
        "ss.reshard(sys.argv[1], sys.argv[2], max_samples=1, executor=ss.tasks.Parts.parse(sys.argv[3]))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, source, f"{bucket}/new", part], cwd=ROOT)
        for part in ("1/2", "2/2", "2/2")
    ]
    codes = [process.wait(120) for process in processes]
    assert codes[0] == 0
    assert 0 in codes[1:]  # of two processes with one part, one may find its upload aborted
    assert ss.merge(f"{bucket}/new").samples == 12
    assert not ss.verify(f"{bucket}/new").problems


@pytest.mark.parametrize("content", ["nothing", "files", "pack"])
def test_merge_without_a_job_is_refused(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "out"
    if content == "files":
        folder.mkdir()
        (folder / "a.txt").write_text("a")
    if content == "pack":
        writer = ss.ShardWriter(folder, max_samples=1)
        writer.write({"txt": "a"})
        with pytest.raises(ss.errors.StorageError, match="has this folder open"):
            ss.merge(folder)
        for _ in range(3):
            writer.write({"txt": "a"})
        writer.drain()
        writer.abort()
    with pytest.raises(
        ss.errors.OptionError,
        match="not a job in parts" if content == "pack" else "nothing to merge",
    ):
        ss.merge(folder)
    assert folder.exists() == (content != "nothing")


def test_merge_of_a_pack_that_was_stopped_before_its_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ss.errors.SourceError, match="sample 2"):
        ss.pack([{"cls": 1}, {"cls": 2}, {"cls": "x"}], tmp_path, max_samples=1)
    with pytest.raises(
        ss.errors.UnfinishedError, match="stopped before the number of its parts was known"
    ):
        ss.merge(tmp_path)


@pytest.mark.parametrize(("part", "of"), [(0, 3), (4, 3), (1, 0), (-1, 3)])
def test_part_that_does_not_exist_is_refused(part: int, of: int) -> None:
    with pytest.raises(ss.errors.OptionError, match="does not exist"):
        ss.tasks.Parts(part, of)


@pytest.mark.parametrize("text", ["3", "3/", "a/b", "3/16/2", "-1/3", ""])
def test_invalid_part_text_is_refused(text: str) -> None:
    with pytest.raises(ss.errors.OptionError, match="3/16"):
        ss.tasks.Parts.parse(text)


def test_verify_in_parts_reads_each_shard_once(source: str) -> None:
    reports = [ss.verify(source, executor=ss.tasks.Parts(part, 2)) for part in (1, 2)]
    assert sum(report.samples for report in reports) == 12
    assert [report.unchecked for report in reports] == [
        reports[1].shards // 2,
        reports[0].shards - reports[0].shards // 2,
    ]
    damaged = sorted(Path(source).glob("*.tar"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-600])
    found = [ss.verify(source, executor=ss.tasks.Parts(part, 2)).errors for part in (1, 2)]
    assert not found[0]
    assert damaged.name in str(found[1][0])


def test_commands_run_parts_and_publish(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> str:
        code = main(arguments)
        said = capsys.readouterr()
        return said.out + said.err + f"exit {code}"

    dest = str(tmp_path / "new")
    options = ("--max-samples", "2", "--shuffle", "--seed", "4")
    said = run("reshard", source, dest, *options, "--part", "2/2")
    assert "part 2/2: wrote 6 samples in 3 shards" in said
    assert "3 tasks of other parts" in said
    assert "part 1/2; run these parts again" in run("merge", dest)
    assert "all tasks are done" in run("reshard", source, dest, *options, "--part", "1/2")
    assert "published 12 samples in 6 shards" in run("merge", dest)
    assert "sound" in run("verify", dest, "--part", "1/3")
    assert "wrote 12 samples in 6 shards" in run(
        "reshard", source, dest + "2", *options, "--processes", "2"
    )
    first, second = (
        {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        for folder in (dest, dest + "2")
    )
    assert first == second
    assert "exit 2" in run("reshard", source, dest, "--part", "3/2")
