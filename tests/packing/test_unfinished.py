"""Test that every reader and tool refuses a folder with a running or stopped pack or writer."""

from __future__ import annotations

import http.server
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.catalog import list_shards, read_one
from shardstream.cli import main
from shardstream.packing import SamplesSource, index, verify
from shardstream.storage import JOURNAL_NAME, LocalFolder, Storage

Write = Callable[[str], None]
NUMBERS = [{"cls": number} for number in range(50)]


KILLED = """
import os, signal, sys, time
from shardstream.packing import ShardWriter
writer = ShardWriter(sys.argv[1], max_samples=10)
for number in range(45):
    writer.write({"cls": number})
while not os.path.exists(sys.argv[1] + "/000003.tar.idx"):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def write(samples: Sequence[Mapping[str, object]], dest: str) -> None:
    with ss.ShardWriter(dest, max_samples=10) as writer:
        for sample in samples:
            writer.write(sample)


def stop_pack(dest: str) -> None:
    with pytest.raises(ss.ShardStreamError, match="whole number"):
        ss.pack([*NUMBERS, {"cls": "no number"}], dest, max_samples=10)


def stop_writer(dest: str) -> None:
    with pytest.raises(ss.errors.SampleError):
        write([*NUMBERS, {"cls": "no number"}], dest)


def kill_writer(dest: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, dest], check=False)
    assert done.returncode == -signal.SIGKILL


def pack_again(source: str) -> object:
    return ss.pack(source, f"memory://{uuid.uuid4().hex}", kind="tars")


READERS: dict[str, Callable[[str], object]] = {
    "ShardDataset": ss.ShardDataset,
    "ShardDataset, whole shards": partial(ss.ShardDataset, read=ss.ReadOptions(index="ignore")),
    "ShardDataset of a glob": lambda url: ss.ShardDataset(f"{url}/*.tar"),
    "ShardDataset of some of a glob": lambda url: ss.ShardDataset(f"{url}/00000[01].tar"),
    "ShardDataset in a list": lambda url: ss.ShardDataset([url]),
    "ShardDataset of the beginning of names": lambda url: ss.ShardDataset(f"{url}/0000*"),
    "ObjectDataset": ss.ObjectDataset,
    "ObjectDataset of the folder above": lambda url: ss.ObjectDataset(url.rpartition("/")[0]),
    "ls": list_shards,
    "cat": partial(read_one, number=0),
    "verify": verify,
    "index": index,
    "index of named tars": lambda url: index([f"{url}/000000.tar"]),
    "index elsewhere": lambda url: index(url, to=f"{url}-mine"),
    "index of named tars elsewhere": lambda url: index(f"{url}/000000.tar", to=f"{url}-mine"),
    "read_columns": ss.catalog.read_columns,
    "reshard": lambda url: ss.reshard(url, f"{url}-mine"),
    "pack": pack_again,
}  # fmt: skip


def is_refused(read: Callable[[str], object], url: str) -> bool:
    try:
        read(url)
    except ss.errors.UnfinishedError:
        return True
    return False


@pytest.mark.parametrize("stop", [stop_pack, stop_writer, kill_writer])
def test_every_reader_refuses_an_unfinished_dataset(stop: Write, tmp_path: Path) -> None:
    dest = str(tmp_path / "above" / "out")
    stop(dest)
    assert len(list(Path(dest).glob("*.tar"))) >= 3
    assert [name for name, read in READERS.items() if not is_refused(read, dest)] == []
    assert not (Path(dest) / "index.json").exists()


@pytest.mark.usefixtures("s3_env")
@pytest.mark.parametrize("stop", [stop_pack, stop_writer])
def test_every_reader_refuses_an_unfinished_dataset_on_s3(stop: Write, bucket: str) -> None:
    stop(f"{bucket}/above/out")
    dest = f"{bucket}/above/out"
    assert [name for name, read in READERS.items() if not is_refused(read, dest)] == []


@pytest.mark.parametrize("command", ["ls", "cat", "verify", "index"])
def test_commands_report_an_unfinished_dataset(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_writer(f"{tmp_path}/out")
    assert main([command, f"{tmp_path}/out"]) == 1
    assert "error: the dataset is not finished" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [stop_pack, stop_writer])
def test_named_tars_of_an_unfinished_dataset_can_be_read(stop: Write, tmp_path: Path) -> None:
    stop(str(tmp_path))
    assert len(ss.ShardDataset([f"{tmp_path}/00000{number}.tar" for number in range(3)])) == 30
    assert len(ss.ShardDataset(f"{tmp_path}/{{000000..000002}}.tar")) == 30


def test_running_pack_is_unfinished_until_it_ends(tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path, max_samples=10) as writer:
        with pytest.raises(ss.errors.UnfinishedError):
            ss.ShardDataset(str(tmp_path))
        for sample in NUMBERS:
            writer.write(sample)
        with pytest.raises(ss.errors.UnfinishedError):
            ss.ShardDataset(str(tmp_path))
    assert len(ss.ShardDataset(str(tmp_path))) == 50
    assert not list(tmp_path.glob(".shardstream*"))


def test_dataset_is_unfinished_during_overwrite(tmp_path: Path) -> None:
    ss.pack(NUMBERS, tmp_path, max_samples=10)
    writer = ss.ShardWriter(tmp_path, overwrite=True, max_samples=10)
    assert len(ss.ShardDataset(str(tmp_path))) == 50
    for sample in NUMBERS[:11]:
        writer.write(sample)
    writer.drain()
    with pytest.raises(
        ss.errors.UnfinishedError, match=r"run the same command again .* delete \.shard"
    ):
        ss.ShardDataset(str(tmp_path))
    writer.abort()
    with pytest.raises(ss.errors.UnfinishedError):
        ss.ShardDataset(str(tmp_path))


def test_overwrite_that_fails_at_once_keeps_the_old_dataset(tmp_path: Path) -> None:
    ss.pack(NUMBERS, tmp_path, max_samples=10)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ss.ShardStreamError, match="whole number"):
        ss.pack([{"cls": "no number"}], tmp_path, overwrite=True)
    ss.ShardWriter(tmp_path, overwrite=True).abort()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_displaced_overwrite_keeps_the_journal_of_the_other_writer() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    ss.pack(NUMBERS, url, max_samples=10)
    late = ss.ShardWriter(url, overwrite=True)
    Storage().resolve(url)[0].rm_file(
        Storage().resolve(f"{url}/index.json")[1]
    )  # by the other writer
    late.abort()
    with pytest.raises(ss.errors.UnfinishedError):
        ss.ShardDataset(url)


SPLIT: dict[str, Any] = {"split": {"train": 0.5, "val": 0.5}, "max_samples": 10}


def kill_between_two_journals(source: SamplesSource, dest: Path, **options: Any) -> None:
    """Pack two splits; the journal of the second is deleted, that of the first is not."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalFolder, "remove", lambda *_: None)
        ss.pack(source, dest, **SPLIT, **options)
    for path in (dest / "val").glob(".shard*"):
        path.unlink()


def test_splits_killed_between_two_journals_are_completed(tmp_path: Path) -> None:
    numbers, killed = SamplesSource(samples=NUMBERS, fingerprint="50 numbers"), tmp_path / "killed"
    kill_between_two_journals(numbers, killed)
    shutil.copytree(killed, tmp_path / "merged")
    clean = {path.name: path.read_bytes() for path in killed.glob("*/[!.]*")}
    assert ss.pack(numbers, killed, **SPLIT).samples == len(NUMBERS)
    assert ss.merge(tmp_path / "merged").samples == len(NUMBERS)
    for folder in (killed, tmp_path / "merged"):
        assert {path.name: path.read_bytes() for path in folder.glob("*/*")} == clean


def test_splits_killed_between_two_journals_are_not_completed_with_another_dataset(
    tmp_path: Path,
) -> None:
    numbers = SamplesSource(samples=NUMBERS, fingerprint="50 numbers")
    kill_between_two_journals(numbers, tmp_path)
    ss.pack([{"cls": 7}], tmp_path / "val", overwrite=True)
    with pytest.raises(ss.errors.UnfinishedError, match="another dataset has replaced .* val"):
        ss.merge(tmp_path)
    with pytest.raises(ss.errors.OptionError, match="a dataset is published here"):
        ss.pack(numbers, tmp_path, **SPLIT)
    shutil.rmtree(tmp_path / "val")
    assert ss.pack(numbers, tmp_path, **SPLIT).samples == len(NUMBERS)
    assert len(ss.ShardDataset(str(tmp_path / "val"))) == len(NUMBERS) // 2


def test_skipped_records_of_splits_killed_between_two_journals_are_reported(tmp_path: Path) -> None:
    bad = [{"cls": "no number"} if number % 5 == 0 else {"cls": number} for number in range(50)]
    numbers = SamplesSource(samples=bad, fingerprint="40 numbers")
    kill_between_two_journals(numbers, tmp_path, on_error="skip")
    assert len(ss.ShardDataset(str(tmp_path / "val"))) < 25  # some were skipped
    assert len(ss.pack(numbers, tmp_path, **SPLIT, on_error="skip").skipped) == 10


def test_splits_of_which_a_later_one_is_another_dataset_are_not_completed(tmp_path: Path) -> None:
    numbers = SamplesSource(samples=NUMBERS, fingerprint="50 numbers")
    ss.pack(numbers, tmp_path / "val")
    with pytest.raises(ss.errors.OptionError, match="a dataset is published here"):
        ss.pack(numbers, tmp_path, **SPLIT)
    assert not list(tmp_path.glob("**/.shard*"))


def test_writer_without_samples_leaves_the_folder_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ss.errors.SampleError, match="no samples"), ss.ShardWriter(tmp_path):
        pass
    ss.ShardWriter(tmp_path).abort()
    with pytest.raises(ss.errors.SourceError):
        ss.pack([], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_pack_without_samples_leaves_loose_files_readable(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("loose")
    with pytest.raises(ss.errors.SourceError):
        ss.pack([{"cls": "no number"}], tmp_path)
    assert len(ss.ObjectDataset(str(tmp_path))) == 1


def test_leftover_journal_with_a_manifest_is_ignored(tmp_path: Path) -> None:
    ss.pack(NUMBERS, tmp_path, max_samples=10)
    (tmp_path / JOURNAL_NAME).write_text("killed on its way out")
    assert len(ss.ShardDataset(str(tmp_path))) == len(ss.ShardDataset(f"{tmp_path}/*.tar")) == 50
    assert [problem.severity for problem in verify(tmp_path).problems] == ["warning"]


def test_partial_tar_without_a_journal_is_unfinished(tmp_path: Path) -> None:
    stop_writer(str(tmp_path))
    (tmp_path / JOURNAL_NAME).unlink()
    assert (
        len(ss.ShardDataset(str(tmp_path))) <= 50
    )  # without a journal the finished tars are readable
    (tmp_path / "000009.tar.part-0123456789ab").write_bytes(b"")
    with pytest.raises(
        ss.errors.UnfinishedError, match=r"000009\.tar\.part-0123456789ab is a half-writ"
    ):
        ss.ShardDataset(str(tmp_path))


def test_unfinished_folder_without_tars_is_reported(tmp_path: Path) -> None:
    writer = ss.ShardWriter(tmp_path)
    with pytest.raises(ss.errors.UnfinishedError):
        ss.ShardDataset(str(tmp_path))
    writer.abort()


class HidesDotFiles(http.server.SimpleHTTPRequestHandler):
    """Lists folders without hidden files, as nginx does."""

    def end_headers(self) -> None:
        self.send_header("Connection", "close")
        super().end_headers()

    def list_directory(self, path: Any) -> Any:
        names = sorted(one.name for one in Path(path).iterdir() if one.name[0] != ".")
        body = "".join(f'<a href="{name}">{name}</a>\n' for name in names).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    handler = partial(HidesDotFiles, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


def test_journal_is_requested_from_servers_that_hide_dot_files(web: str, tmp_path: Path) -> None:
    stop_writer(f"{tmp_path}/out")
    assert [file.url for file in Storage().list_folder(f"{web}/out")[0]]
    for url in (f"{web}/out", f"{web}/out/*.tar"):
        with pytest.raises(ss.errors.UnfinishedError):
            ss.ShardDataset(url)
    (tmp_path / "out" / JOURNAL_NAME).unlink()
    assert len(list_shards(f"{web}/out/*.tar").shards) >= 3
