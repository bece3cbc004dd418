"""Test that a killed pack resumes by the same call, keeps finished shards, and gives the bytes of one clean run."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from PIL import Image

import shardstream as ss
from shardstream.errors import OptionError, SourceError, StorageError
from shardstream.packing import (
    Encoded,
    Journal,
    PackReport,
    PartFiles,
    Record,
    RecordEncoder,
    SamplesSource,
    ShardWriter,
    Task,
    pack,
    read_journal,
)
from shardstream.storage import LocalFolder, Storage, is_journal
from tests.pairs import with_slow_rest
from tests.servers import S3Server

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "import sys; from shardstream.cli import main; sys.exit(main(sys.argv[1:]))"]  # fmt: skip

# Killed at a function call of shardstream, not after a time: the same moment on every machine.
KILLED_AT_A_CALL = """
import os, pathlib, signal, sys, threading
import shardstream.cli

place, after_calls, calls = os.path.dirname(shardstream.__file__), int(sys.argv[1]), 0

def count(frame, event, _):
    global calls
    if event == "call" and frame.f_code.co_filename.startswith(place):
        calls += 1
        if calls == after_calls:
            os.kill(os.getpid(), signal.SIGKILL)

threading.setprofile(count)
sys.setprofile(count)
code = shardstream.cli.main(sys.argv[3:])
sys.setprofile(None)
pathlib.Path(sys.argv[2]).write_text(str(calls))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of 300 loose samples: text of growing length, and a label."""
    root = tmp_path_factory.mktemp("source")
    for i in range(300):
        (root / f"{i:04d}.txt").write_text(f"sample {i} " * (1 + i % 50))
        (root / f"{i:04d}.cls").write_text(str(i % 7))
    return root


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of 2 classes."""
    root = tmp_path_factory.mktemp("photos")
    for i in range(60):
        (root / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(root / "ab"[i % 2] / f"{i:02d}.png")
    return root


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files in a folder, also hidden ones."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def remote_contents(folder: str, options: dict[str, Any] | None = None) -> dict[str, bytes]:
    storage = Storage(options)
    start = len(folder.rstrip("/")) + 1
    return {file.url[start:]: storage.read(file.url) for file in storage.find(folder)}


class StoppedError(Exception):
    """Raised by a test during a pack."""


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Stop packs by an exception after this number of recorded shards; 0: never."""
    original = PartFiles.record
    left = [0]

    def write(self: PartFiles, *args: Any) -> None:
        if left[0] < 0:  # recorded by another thread, after the pack was stopped
            raise StoppedError
        original(self, *args)
        left[0] = max(left[0] - 1, 0) or -1 if left[0] else 0
        if left[0] < 0:
            raise StoppedError

    monkeypatch.setattr(PartFiles, "record", write)

    def arm(count: int) -> None:
        left[0] = count

    return arm


def pack_stopped(stop_after: Callable[[int], None], count: int, *args: Any, **kwargs: Any) -> None:
    stop_after(count)
    with pytest.raises(StoppedError):
        pack(*args, **kwargs)
    stop_after(0)


# --- killed at any moment, as processes


def run_killed(command: list[str], *, after_calls: int, counted: Path) -> bool:
    """Run a command that kills itself at a function call of shardstream; return whether it succeeded.

    Args:
        command: Arguments of the command line.
        after_calls: The number of the call, from 1; 0: none.
        counted: Receives the number of all calls, if the command is not killed.
    """
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_A_CALL, str(after_calls), str(counted), *command],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode == 0


def is_published(storage: Storage, folders: list[str]) -> bool:
    for folder in folders:
        if not storage.exists(f"{folder}/index.json"):
            return False
        if any(is_journal(f.url.rsplit("/", 1)[-1]) for f in storage.list_folder(folder)[0]):
            return False
    return True


def pack_under_fire(
    command: list[str], folders: list[str], counted: Path, *, seed: int, kills: int
) -> None:
    """Repeat a command, killed at random function calls of shardstream, until the dataset is published."""
    draw = random.Random(seed)
    storage = Storage()
    calls = int(counted.read_text())  # of a clean run
    for _ in range(kills):
        run_killed(command, after_calls=draw.randrange(calls // 8, calls // 2), counted=counted)
        if is_published(storage, folders):  # the rest took fewer calls
            break
    else:
        assert run_killed(command, after_calls=0, counted=counted)
    assert is_published(storage, folders)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--split", "a=0.7,b=0.3"], ["--processes", "2", "--max-side", "64"]]
)
def test_resume_after_a_kill_gives_the_same_bytes(
    options: list[str], files: Path, tmp_path: Path
) -> None:
    limits = ["--max-samples", "15", "--shuffle", *options]
    clean = ["pack", str(files), str(tmp_path / "clean"), *limits]
    assert run_killed(clean, after_calls=0, counted=tmp_path / "calls")
    dest = str(tmp_path / "out")
    folders = [f"{dest}/a", f"{dest}/b"] if "--split" in options else [dest]
    again = ["pack", str(files), dest, *limits]
    pack_under_fire(again, folders, tmp_path / "calls", seed=3, kills=3)
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


@pytest.mark.slow
@pytest.mark.usefixtures("s3_env")
def test_resume_after_a_kill_on_s3_gives_the_same_bytes(
    bucket: str, files: Path, tmp_path: Path
) -> None:
    limits = ["--max-samples", "20"]
    clean = ["pack", str(files), f"{bucket}/clean", *limits]
    assert run_killed(clean, after_calls=0, counted=tmp_path / "calls")
    dest = f"{bucket}/out"
    again = ["pack", str(files), dest, *limits]
    pack_under_fire(again, [dest], tmp_path / "calls", seed=1, kills=2)
    assert remote_contents(dest) == remote_contents(f"{bucket}/clean")


def test_encoder_processes_end_when_the_pack_is_killed(files: Path, tmp_path: Path) -> None:
    options = ["--processes", "2", "--max-side", "64", "--max-samples", "1"]
    command = ["pack", str(files), str(tmp_path / "out"), *options]
    with subprocess.Popen([*COMMAND, *command], cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + 300
        while not list((tmp_path / "out").glob("*.tar")):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        children = children_of(process.pid)
        process.kill()
    assert len(children) >= 2
    while any(is_running(child) for child in children):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_terminated_pack_leaves_no_processes(files: Path, tmp_path: Path) -> None:
    options = ["--processes", "2", "--max-side", "64", "--max-samples", "1"]
    command = ["pack", str(files), str(tmp_path / "out"), *options]
    program = "import sys; from shardstream.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", program, *command], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline_s = time.monotonic() + 300
        while (
            len(children := children_of(process.pid)) < 3
        ):  # two encoders, and their resource tracker
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        shown_text = process.communicate()[1]
        assert [child for child in children if is_running(child)] == []
    assert "Traceback" not in shown_text


def children_of(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="int"),
        pytest.param(signal.SIGTERM, 143, id="term", marks=pytest.mark.slow),
    ],
)
def test_signal_prints_a_message_and_the_command_can_be_resumed(
    number: signal.Signals, code: int, files: Path, tmp_path: Path
) -> None:
    command = ["pack", str(files), str(tmp_path / "out"), "--max-samples", "5"]
    with subprocess.Popen(
        [*COMMAND, *command], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline_s = time.monotonic() + 300
        while len(list((tmp_path / "out").glob("*.tar"))) < 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        process.send_signal(number)
        shown_text = process.communicate()[1]
    assert (process.returncode, "Traceback" in shown_text) == (code, False), shown_text
    assert "run the same command again to resume" in shown_text
    assert not list((tmp_path / "out").glob("*.part-*"))
    done = subprocess.run(
        [*COMMAND, *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "of an earlier run that was stopped" in done.stdout
    pack(files, tmp_path / "clean", max_samples=5)
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


# --- kept and rewritten files


def test_resume_neither_writes_nor_encodes_finished_shards(
    photos: Path,
    tmp_path: Path,
    stop_after: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"max_samples": 8, "max_side": 4}
    clean = pack(photos, tmp_path / "clean", **options)
    pack_stopped(stop_after, 4, photos, tmp_path / "out", **options)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("00000[0-3].tar*")}
    assert len(before) == 8
    encoded: list[Record] = []
    original = RecordEncoder.encode

    def encode(self: RecordEncoder, records: Sequence[Record]) -> list[Encoded]:
        encoded.extend(records)
        return original(self, records)

    monkeypatch.setattr(RecordEncoder, "encode", encode)
    report = pack(photos, tmp_path / "out", **options)
    assert (report.kept, clean.kept, report.shards) == (4, 0, clean.shards)
    assert len(encoded) == 60 - 4 * 8 + 4  # some are encoded to know their sizes
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("00000[0-3].tar*")}
    assert after == before
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


@pytest.mark.slow
def test_resume_after_each_shard(
    files: Path, tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    options: dict[str, Any] = {"max_samples": 20, "shuffle": True, "split": {"x": 0.8, "y": 0.2}}
    pack(files, tmp_path / "clean", **options)
    clean = contents(tmp_path / "clean")
    for count in range(1, 16):
        dest = tmp_path / f"out{count}"
        pack_stopped(stop_after, count, files, dest, **options)
        # The other split's thread may finish some more before the pack stops.
        assert pack(files, dest, **options).kept >= count
        assert contents(dest) == clean


@pytest.mark.parametrize(
    "options",
    with_slow_rest(
        [{"shuffle": True}, {"on_error": "skip"}],
        [{}, {"key": "n"}, {"shuffle": True}, {"on_error": "skip"}],
    ),
    ids=str,
)
def test_resume_of_several_splits_of_a_table(
    options: dict[str, Any], tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    """Splits that are written together have not the same parts when they are stopped; one part may be missing between two that are kept."""
    table = tmp_path / "t.csv"
    bad = "x" if options.get("on_error") else "7"
    table.write_text("n,m\n" + "".join(f"{i},{i if i % 5 else bad}\n" for i in range(200)))
    options = options | {"fields": {"cls": "m"}, "max_samples": 10}
    options["split"] = {"a": 0.6, "b": 0.3, "c": 0.1}
    pack(table, tmp_path / "clean", **options)
    clean = contents(tmp_path / "clean")
    for count in (1, 2, 5, 9, 17):
        dest = tmp_path / f"out{count}"
        pack_stopped(stop_after, count, table, dest, **options)
        for lost in sorted(dest.rglob("000001.tar"))[:1]:
            lost.unlink()
        pack(table, dest, **options)
        assert contents(dest) == clean


def test_pack_can_be_stopped_repeatedly(
    files: Path, tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    pack(files, tmp_path / "clean", max_samples=20)
    for _ in range(7):
        pack_stopped(stop_after, 2, files, tmp_path / "out", max_samples=20)
    assert pack(files, tmp_path / "out", max_samples=20).kept == 14
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


def test_resume_remembers_skipped_records(
    tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    table = tmp_path / "t.csv"
    table.write_text("n\n" + "".join(f"{i if i % 5 else 'x'}\n" for i in range(60)))
    options: dict[str, Any] = {"fields": {"cls": "n"}, "max_samples": 10, "split": {"a": 0.5, "b": 0.5}}  # fmt: skip
    clean = pack(table, tmp_path / "clean", on_error="skip", **options)
    pack_stopped(stop_after, 3, table, tmp_path / "out", on_error="skip", **options)
    with pytest.raises(OptionError, match=r"skipped \d+ record.*whole number.*--skip-errors"):
        pack(table, tmp_path / "out", **options)
    report = pack(table, tmp_path / "out", on_error="skip", **options)
    assert report.kept >= 3
    assert (report.skipped, len(report.skipped)) == (clean.skipped, 12)
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


def test_resume_after_a_bad_row_with_skip(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("n\n" + "".join(f"{i if i != 47 else 'x'}\n" for i in range(60)))
    options: dict[str, Any] = {"fields": {"cls": "n"}, "max_samples": 10}
    with pytest.raises(SourceError, match="row 48"):
        pack(table, tmp_path / "out", **options)
    report = pack(table, tmp_path / "out", on_error="skip", **options)
    assert (report.kept >= 2, len(report.skipped), report.samples) == (True, 1, 59)
    pack(table, tmp_path / "clean", on_error="skip", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


def test_resume_does_not_read_tars_before_the_last_finished_shard(
    files: Path, tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    pack(files, tmp_path / "old", max_samples=30)
    pack(tmp_path / "old", tmp_path / "clean", max_samples=25)
    pack_stopped(stop_after, 8, tmp_path / "old", tmp_path / "out", max_samples=25)
    # Delete the first 6 tars of 200 samples: reading one of them would now fail.
    for number in range(6):
        path = tmp_path / "old" / f"{number:06d}.tar"
        stat = path.stat()
        path.write_bytes(bytes(stat.st_size))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert pack(tmp_path / "old", tmp_path / "out", max_samples=25).kept == 8
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


# --- checks hold for the shards that a resumed pack keeps


def tars_with_repeated_key(folder: Path) -> Path:
    """Two tars of 10 samples each, whose stems are equal in samples 2 and 17."""
    with ShardWriter(folder, max_samples=10) as writer:
        for number in range(20):
            writer.write({"__key__": f"{number}/{2 if number == 17 else number}", "txt": "a"})
    return folder


def table(folder: Path, column: str) -> Path:
    path = folder / "table.jsonl"
    values = {"clash": [*range(10), *map(str, range(10))], "none": [None] * 20}[column]
    path.write_text("".join(json.dumps({"a": value}) + "\n" for value in values))
    return path


FAILING: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "key of two tars": (
        lambda folder: tars_with_repeated_key(folder / "tars"),
        {"key": "{stem}"},
        "the key '2' comes twice",
    ),
    "key of two rows": (
        lambda folder: table(folder, "clash"),
        {"key": "a"},
        "the key '0' comes twice",
    ),
    "columns of two types": (
        lambda folder: table(folder, "clash"),
        {"columns": "json.a"},
        "the column a has numbers in some shards and text in others",
    ),
    "column without values": (
        lambda folder: table(folder, "none"),
        {"columns": "json.b"},
        "no sample has a value for the column",
    ),
}


@pytest.mark.parametrize("executor", [None, ss.tasks.LocalExecutor()], ids=["here", "executor"])
@pytest.mark.parametrize("failing", FAILING)
def test_check_that_failed_fails_again(
    failing: str,
    executor: ss.tasks.LocalExecutor | None,
    tmp_path: Path,
) -> None:
    make, options, message = FAILING[failing]
    source = make(tmp_path)
    for _ in range(3):
        with pytest.raises((SourceError, OptionError), match=message):
            pack(source, tmp_path / "out", max_samples=5, executor=executor, **options)
        assert not (tmp_path / "out" / "index.json").exists()
    report = pack(source, tmp_path / "out", max_samples=5, overwrite=True)
    assert report.samples == 20
    assert not ss.verify(str(tmp_path / "out")).problems


@pytest.mark.parametrize("failing", FAILING)
def test_checks_hold_for_the_shards_of_a_killed_run(
    failing: str,
    tmp_path: Path,
    stop_after: Callable[[int], None],
) -> None:
    make, options, message = FAILING[failing]
    source = make(tmp_path)
    for count in (1, 1):
        pack_stopped(stop_after, count, source, tmp_path / "out", max_samples=5, **options)
    with pytest.raises((SourceError, OptionError), match=message):
        pack(source, tmp_path / "out", max_samples=5, **options)
    assert not (tmp_path / "out" / "index.json").exists()


def test_repeated_keys_of_python_samples_are_not_published(tmp_path: Path) -> None:
    samples = [{"__key__": str(number % 7), "txt": "a"} for number in range(10)]
    with pytest.raises(
        SourceError, match=r"the key '0' comes twice, in 000000\.tar and in 000001\.tar"
    ):
        pack(samples, tmp_path / "out", max_samples=5)
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize("executor", [None, ss.tasks.LocalExecutor()], ids=["here", "executor"])
@pytest.mark.parametrize("said", [0, 3, 9])
def test_tar_with_another_count_than_its_index_fails_again(
    said: int, executor: ss.tasks.LocalExecutor | None, tmp_path: Path
) -> None:
    with ShardWriter(tmp_path / "tars", max_samples=5) as writer:
        for number in range(15):
            writer.write({"txt": str(number)})
    manifest = tmp_path / "tars" / "index.json"
    document = json.loads(manifest.read_text())
    document["nsamples"] += said - document["shardlist"][1]["nsamples"]
    document["shardlist"][1]["nsamples"] = said
    manifest.write_text(json.dumps(document))
    for _ in range(3):
        with pytest.raises(
            ss.ShardStreamError, match=rf"5 samples, (its index or|the) manifest says {said}"
        ):
            pack(tmp_path / "tars", tmp_path / "out", max_samples=1, executor=executor)
        assert not (tmp_path / "out" / "index.json").exists()


def test_resume_rewrites_deleted_or_truncated_shards(
    files: Path, tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    pack(files, tmp_path / "clean", max_samples=20)
    for name, data in (("000002.tar", None), ("000002.tar", b"cut"), ("000002.tar.idx", None)):
        pack_stopped(stop_after, 5, files, tmp_path / "out", max_samples=20, overwrite=True)
        path = tmp_path / "out" / name
        path.unlink() if data is None else path.write_bytes(data)
        assert pack(files, tmp_path / "out", max_samples=20, overwrite=True).kept == 4
        assert contents(tmp_path / "out") == contents(tmp_path / "clean")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_samples": 30}, r"max_samples was 20, now 30"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"split": {"a": 0.5, "b": 0.5}}, None),
        ({"source": "another"}, "the source has changed"),
    ],
)
def test_other_pack_options_are_refused_in_an_unfinished_folder(
    change: dict[str, Any],
    message: str | None,
    files: Path,
    tmp_path: Path,
    stop_after: Callable[[int], None],
) -> None:
    options: dict[str, Any] = {"max_samples": 20}
    pack_stopped(stop_after, 5, files, tmp_path / "out", **options)
    source = files
    if "source" in change:
        source = tmp_path / "source"
        source.mkdir()
        (source / "a.txt").write_text("another")
    options |= {name: value for name, value in change.items() if name != "source"}
    before = contents(tmp_path / "out")
    if message is None:  # a split goes to other folders, which are empty
        assert pack(source, tmp_path / "out", **options).kept == 0
        return
    with pytest.raises(OptionError, match=rf"unfinished pack.*{message}.*--overwrite"):
        pack(source, tmp_path / "out", **options)
    assert contents(tmp_path / "out") == before
    assert pack(source, tmp_path / "out", overwrite=True, **options).kept == 0
    pack(source, tmp_path / "clean", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


def test_rewritten_source_file_is_detected(
    tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    for i in range(20):
        (tmp_path / f"in/{i}").mkdir(parents=True)
        (tmp_path / f"in/{i}/x.txt").write_text("same length")
    pack_stopped(stop_after, 2, tmp_path / "in", tmp_path / "out", max_samples=5)
    (tmp_path / "in/3/x.txt").write_text("length same")
    with pytest.raises(OptionError, match="the source has changed"):
        pack(tmp_path / "in", tmp_path / "out", max_samples=5)


def test_resumed_overwrite_deletes_stale_shards(
    files: Path, tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    pack(files, tmp_path / "clean", max_samples=50)
    pack(files, tmp_path / "out", max_samples=10)  # 30 shards, 6 of them rewritten
    options: dict[str, Any] = {"max_samples": 50, "overwrite": True}
    pack_stopped(stop_after, 2, files, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "index.json").exists()
    assert pack(files, tmp_path / "out", **options).kept == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


def test_overwrite_stopped_before_its_first_shard_keeps_the_old_dataset(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(files, tmp_path / "out", max_samples=10)

    def stop(_: LocalFolder, name: str) -> None:
        if name == "index.json":
            raise StoppedError

    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "remove", stop)
        with pytest.raises(StoppedError):
            pack(files, tmp_path / "out", max_samples=50, overwrite=True)
    before = contents(tmp_path / "out")
    for max_samples in (50, 10, 20):
        with pytest.raises(OptionError, match="a dataset is published here"):
            pack(files, tmp_path / "out", max_samples=max_samples)
    assert contents(tmp_path / "out") == before
    pack(files, tmp_path / "out", max_samples=50, overwrite=True)
    pack(files, tmp_path / "clean", max_samples=50)
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


def test_resume_after_the_manifest_was_written(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise StoppedError

    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "remove", stop)
        with pytest.raises(StoppedError):
            pack(files, tmp_path / "out", max_samples=50)
    assert (tmp_path / "out" / "index.json").exists()
    report = pack(files, tmp_path / "out", max_samples=50)
    assert (report.kept, report.shards) == (6, 6)
    pack(files, tmp_path / "clean", max_samples=50)
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


class NamedSamples(list[dict[str, str]]):
    """Samples that say when they change."""

    fingerprint = "numbers to 60"


def test_python_samples_are_resumed_only_with_a_fingerprint(
    tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    samples = [{"txt": f"{i}"} for i in range(60)]
    report: list[PackReport] = []
    for source, kept in (
        (samples, 0),
        (SamplesSource(samples=samples, fingerprint="numbers to 60"), 3),
        (NamedSamples(samples), 3),
    ):
        dest = tmp_path / f"{len(report)}"
        pack_stopped(stop_after, 3, source, dest, max_samples=10)
        report.append(pack(source, dest, max_samples=10))
        assert report[-1].kept == kept
    pack(samples, tmp_path / "clean", max_samples=10)
    for number in range(3):
        assert contents(tmp_path / f"{number}") == contents(tmp_path / "clean")


def test_records_of_a_longer_source_with_the_same_fingerprint_are_not_published(
    tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    def source(count: int) -> SamplesSource:
        samples = [{"txt": f"{number}"} for number in range(count)]
        return SamplesSource(samples=samples, fingerprint="equal by mistake")

    pack_stopped(stop_after, 3, source(60), tmp_path, max_samples=10)
    (tmp_path / "000000.tar").unlink()
    for said, overwrite in (("1 part, .* with more", False), ("3 parts, .* with 1", True)):
        with pytest.raises(StorageError, match=rf"this run has {said}: .* nothing is published"):
            pack(source(5), tmp_path, max_samples=10, overwrite=overwrite)
        assert not (tmp_path / "index.json").exists()


def test_pack_that_fails_before_its_first_shard_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        pack([{"cls": "x"}], tmp_path / "out")
    assert contents(tmp_path / "out") == {}


HEAD: dict[str, object] = {
    "version": 6,
    "run": "1",
    "source": None,
    "options": {},
    "stale": [],
    "parts": 0,
    "published": None,
    "others": {},
}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps(HEAD | {"parts": float("inf")}),
        json.dumps(HEAD | {"published": {"sha256": "", "skipped": [3], "warnings": []}}),
        json.dumps(HEAD | {"options": ["a"]}),
        json.dumps(HEAD | {"stale": 3}),
    ],
)
def test_unreadable_journal_is_an_error_without_overwrite(
    text: str, files: Path, tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    pack_stopped(stop_after, 2, files, tmp_path / "out", max_samples=50)
    (tmp_path / "out" / ".shardstream-pack-000000.json").write_text(text)
    with pytest.raises(
        OptionError, match=r"journal of an unfinished pack cannot be read.*overwrite"
    ):
        pack(files, tmp_path / "out", max_samples=50)
    pack(files, tmp_path / "out", max_samples=50, overwrite=True)
    pack(files, tmp_path / "clean", max_samples=50)
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


def test_unreadable_journal_on_s3_is_replaced(files: Path, bucket: str, s3: S3Server) -> None:
    options = s3.storage_options
    filesystem = fsspec.filesystem("s3", **options)
    filesystem.pipe_file(f"{bucket}/out/.shardstream-pack-000000.json", b"{")
    with pytest.raises(OptionError, match="journal of an unfinished pack cannot be read"):
        pack(files, f"{bucket}/out", storage_options=options)
    report = pack(files, f"{bucket}/out", storage_options=options, overwrite=True)
    assert (
        len(ss.ShardDataset(f"{bucket}/out", storage_options=options).by_number()) == report.samples
    )
    assert not filesystem.exists(f"{bucket}/out/.shardstream-pack-000000.json")


def test_journal_cannot_delete_files_outside_its_folder(files: Path, tmp_path: Path) -> None:
    (tmp_path / "victim.tar").write_bytes(b"mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    stale = ["../victim.tar", "notes.txt", "..", str(tmp_path / "victim.tar"), "file::notes.tar"]
    document = HEAD | {"source": "x", "stale": stale}
    path = tmp_path / "out" / ".shardstream-pack-000000.json"
    path.write_text(json.dumps(document))
    pack(files, tmp_path / "out")
    assert (tmp_path / "victim.tar").read_bytes() == b"mine"
    assert (tmp_path / "out" / "notes.txt").exists()


def test_journal_round_trips(tmp_path: Path) -> None:
    task = Task(source="é\udc80", options={"split": [["a", 0.1]], "key": None})
    folder = LocalFolder(str(tmp_path), str(tmp_path))
    journal = Journal(
        folder=folder, task=task, run=uuid.uuid4().hex, stale=frozenset({"a.tar"}), parts=3
    )
    journal.write()
    back = read_journal(folder, os.listdir(tmp_path))
    assert back is not None
    assert (back.task.differences(task), back.stale, back.parts) == ([], journal.stale, 3)
    journal.remove()
    assert os.listdir(tmp_path) == []
    assert read_journal(folder, []) is None


def test_journal_of_another_version_is_named(tmp_path: Path) -> None:
    (tmp_path / ".shardstream-pack-000000.json").write_text(json.dumps(HEAD | {"version": 3}))
    with pytest.raises(OptionError, match=r"another version of shardstream.* 3, not 6\); finish it with that version, or .*overwrite"):  # fmt: skip
        pack([{"txt": "a"}], tmp_path)
    assert pack([{"txt": "a"}], tmp_path, overwrite=True).samples == 1


# --- skipped records, and a publication that was stopped


@pytest.fixture
def bad_rows(tmp_path: Path) -> Path:
    """A table of 40 rows, of which the second ten and another one cannot be packed."""
    table = tmp_path / "t.csv"
    bad = {*range(10, 20), 33}
    table.write_text("n\n" + "".join(f"{'x' if i in bad else i}\n" for i in range(40)))
    return table


SKIP: dict[str, Any] = {"fields": {"cls": "n"}, "max_samples": 10, "on_error": "skip"}


def test_part_whose_records_are_all_skipped_has_no_shard(bad_rows: Path, tmp_path: Path) -> None:
    report = pack(bad_rows, tmp_path / "out", **SKIP)
    assert (report.samples, report.shards, len(report.skipped)) == (29, 3, 11)
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == [
        "000000.tar", "000002.tar", "000003.tar",
    ]  # fmt: skip
    assert not ss.verify(str(tmp_path / "out")).problems


def test_overwrite_packs_records_again_that_a_stopped_run_has_skipped(
    bad_rows: Path, tmp_path: Path, stop_after: Callable[[int], None]
) -> None:
    pack_stopped(stop_after, 3, bad_rows, tmp_path / "out", **SKIP)
    options = SKIP | {"on_error": "raise"}
    with pytest.raises(OptionError, match="skipped 10 records"):
        pack(bad_rows, tmp_path / "out", **options)
    with pytest.raises(SourceError, match="row 11"):
        pack(bad_rows, tmp_path / "out", overwrite=True, **options)


@pytest.mark.parametrize("executor", [None, ss.tasks.LocalExecutor()], ids=["here", "executor"])
def test_publication_that_was_stopped_is_completed_with_its_whole_report(
    executor: ss.tasks.LocalExecutor | None,
    bad_rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clean = pack(bad_rows, tmp_path / "clean", **SKIP)
    removed: list[str] = []

    def stop(_: LocalFolder, *names: str) -> None:
        for name in names:
            removed.append(name)
            if len(removed) == 3:  # records are deleted before the journal
                raise StoppedError
            (tmp_path / "out" / name).unlink()

    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "remove", stop)
        with pytest.raises(StoppedError):
            pack(bad_rows, tmp_path / "out", executor=executor, **SKIP)
    with pytest.raises(OptionError, match="skipped 11 records"):
        pack(bad_rows, tmp_path / "out", executor=executor, **SKIP | {"on_error": "raise"})
    report = pack(bad_rows, tmp_path / "out", executor=executor, **SKIP)
    assert (report.skipped, report.fields, report.kept) == (clean.skipped, clean.fields, 3)
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


def test_no_record_is_left_of_a_shard_that_was_not_published(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LocalFolder.commit
    commits: list[None] = []

    def fail(self: LocalFolder, *pending: Any) -> None:
        commits.append(None)
        if len(commits) > 3:
            raise StorageError("out of reach")
        original(self, *pending)

    with monkeypatch.context() as patched:
        patched.setattr(LocalFolder, "commit", fail)
        with pytest.raises(StorageError, match="out of reach"):
            pack(files, tmp_path / "out", max_samples=20)
    names = contents(tmp_path / "out")
    tars = {name for name in names if name.endswith(".tar")}
    # Shards of neighbouring parts are published side by side; the record of one comes later, or not at all.
    records = {re.findall(r"-part-(\d{6})", name)[0] for name in names if "-part-" in name}
    assert len(tars) == 3
    assert records
    assert {f"{number}.tar" for number in records} <= tars
    assert pack(files, tmp_path / "out", max_samples=20).kept == len(records)


# --- on S3, and with ShardWriter


@pytest.mark.usefixtures("s3_env")
def test_resume_on_s3_keeps_finished_shards(
    bucket: str, s3: S3Server, files: Path, stop_after: Callable[[int], None]
) -> None:
    client = s3.client()
    name = bucket.removeprefix("s3://")
    pack(files, f"{bucket}/clean", max_samples=30)
    pack_stopped(stop_after, 4, files, f"{bucket}/out", max_samples=30)

    def times() -> dict[str, Any]:
        listed = client.list_objects_v2(Bucket=name, Prefix="out/00000")["Contents"]
        return {one["Key"]: one["LastModified"] for one in listed}

    before = times()
    report = pack(files, f"{bucket}/out", max_samples=30)
    after = times()
    client.close()
    assert report.kept == 4
    assert {key: after[key] for key in list(before)[:8]} == dict(list(before.items())[:8])
    assert remote_contents(f"{bucket}/out") == remote_contents(f"{bucket}/clean")


KILLED = """
import os, signal, sys
from shardstream.packing import ShardWriter
with ShardWriter(sys.argv[1], max_samples=10) as writer:
    for i in range(55):
        writer.write({"bin": bytes(500_000)})
    writer.drain()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_writer_replaces_the_files_of_a_killed_writer(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / "out"], check=False, cwd=ROOT)
    (tmp_path / "out" / "000000.tar.part-aa").write_bytes(b"made by split -b")
    assert any(".part-" in name for name in contents(tmp_path / "out"))
    with pytest.raises(OptionError, match="from a failed run"):
        ShardWriter(tmp_path / "out")
    for folder in ("out", "clean"):
        with ShardWriter(tmp_path / folder, max_samples=10, overwrite=True) as writer:
            for i in range(25):
                writer.write({"cls": i})
    (tmp_path / "out" / "000000.tar.part-aa").unlink()
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")
