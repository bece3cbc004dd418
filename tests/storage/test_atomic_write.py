from __future__ import annotations

import errno
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import traceback
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from shardstream.errors import StorageError, UnfinishedError
from shardstream.storage import (
    LocalFolder,
    Storage,
    is_part,
    locate_shards,
    open_pending,
    publish,
    publish_bytes,
    remove,
)

ROOT = Path(__file__).parents[2]
OLD, NEW = b"old" * 50_000, b"new!" * 60_000


class SlowFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A remote store whose PUT is not atomic: half of a file is visible before the rest."""

    protocol = "slow"

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        data = Path(lpath).read_bytes()
        with Path(rpath).open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            if data.endswith(b"fails"):
                raise OSError("connection lost")
            file.write(data[len(data) // 2 :])


class TalkativeFileSystem(LocalFileSystem):  # type: ignore[misc]
    """A remote store whose errors show the credentials."""

    protocol = "talkative"

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:  # noqa: ARG002
        self._refuse()

    def rm_file(self, path: str) -> None:  # noqa: ARG002
        self._refuse()

    def _refuse(self) -> None:
        raise OSError(f"login as me:{self.storage_options['password']} failed")


PLACES = ("local", "memory", "s3", "dir over memory", "not atomic")
# fsspec's memory file system moves a file by copy and delete, which is not atomic.
PLACES_WITH_ATOMIC_MOVES = tuple(place for place in PLACES if place != "dir over memory")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[Storage, str]:
    """A storage and an empty folder on it, of each kind."""
    name = f"test-{uuid.uuid4().hex}"
    if request.param == "local":
        return Storage(), str(request.getfixturevalue("tmp_path"))
    if request.param == "memory":
        return Storage(), f"memory://{name}"
    if request.param == "dir over memory":
        return Storage(filesystem=DirFileSystem(path=f"/{name}", fs=MemoryFileSystem())), "data"
    if request.param == "not atomic":
        return not_atomic(request.getfixturevalue("tmp_path"))
    s3 = request.getfixturevalue("s3")
    return Storage(s3.storage_options), f"{request.getfixturevalue('bucket')}/data"


def not_atomic(folder: Path) -> tuple[Storage, str]:
    filesystem = SlowFileSystem()
    storage = Storage(filesystem=DirFileSystem(path=str(folder), fs=filesystem))
    return storage, "data"


def files_in(storage: Storage, folder: str) -> list[str]:
    return [file.url.rsplit("/", 1)[-1] for file in storage.find(folder)]


@pytest.fixture(autouse=True)
def _own_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("spool")))


def spooled() -> list[str]:
    import tempfile  # noqa: PLC0415  (its folder is this test's own)

    return [name for name in os.listdir(tempfile.gettempdir()) if not name.endswith(".lock")]


# --- on each kind of storage


def test_file_appears_when_its_block_succeeds(place: tuple[Storage, str]) -> None:
    storage, folder = place
    with publish(storage, f"{folder}/sub/a.tar") as stream:
        stream.write(NEW)
        stream.flush()
        assert "a.tar" not in files_in(storage, folder)
    assert storage.read(f"{folder}/sub/a.tar") == NEW
    assert files_in(storage, folder) == ["a.tar"]
    assert not spooled()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_exception_inside_leaves_nothing(
    place: tuple[Storage, str], error: type[BaseException]
) -> None:
    storage, folder = place
    publish_bytes(storage, f"{folder}/old.tar", OLD)

    def write(name: str) -> None:
        with publish(storage, f"{folder}/{name}") as stream:
            stream.write(NEW)
            raise error

    for name in ("new.tar", "old.tar"):
        with pytest.raises(error):
            write(name)
    assert files_in(storage, folder) == ["old.tar"]
    assert storage.read(f"{folder}/old.tar") == OLD
    assert not spooled()


def test_empty_file_can_be_published(place: tuple[Storage, str]) -> None:
    storage, folder = place
    publish_bytes(storage, f"{folder}/empty", b"")
    assert storage.info(f"{folder}/empty").size == 0


def test_pending_file_appears_at_commit(place: tuple[Storage, str]) -> None:
    storage, folder = place
    publish_bytes(storage, f"{folder}/other", b"")
    pending = open_pending(storage, f"{folder}/a")
    pending.write(b"12")
    pending.write(memoryview(b"34"))
    assert not storage.exists(f"{folder}/a")
    pending.commit()
    assert storage.read(f"{folder}/a") == b"1234"
    pending.discard()
    pending.discard()
    assert storage.read(f"{folder}/a") == b"1234"


def test_discarded_file_never_appears(place: tuple[Storage, str]) -> None:
    storage, folder = place
    publish_bytes(storage, f"{folder}/other", b"")
    pending = open_pending(storage, f"{folder}/a")
    pending.write(b"12")
    pending.discard()
    pending.discard()
    assert files_in(storage, folder) == ["other"]
    assert not spooled()


def test_remove_is_idempotent(place: tuple[Storage, str]) -> None:
    storage, folder = place
    publish_bytes(storage, f"{folder}/a", b"1")
    publish_bytes(storage, f"{folder}/b", b"1")
    for _ in range(2):
        remove(storage, f"{folder}/a")
    assert files_in(storage, folder) == ["b"]


@pytest.mark.parametrize("place", PLACES_WITH_ATOMIC_MOVES, indirect=True)
def test_reader_sees_the_old_or_the_new_file(place: tuple[Storage, str]) -> None:
    storage, folder = place
    url = f"{folder}/a.tar"
    publish_bytes(storage, url, OLD)
    wrong: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            data = storage.read(url)
            if data not in (OLD, NEW):
                wrong.append(data[:100])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(30):
            publish_bytes(storage, url, (NEW, OLD)[number % 2])
    finally:
        done.set()
        reader.join()
    assert not wrong


# --- failures


def test_failed_put_leaves_nothing(tmp_path: Path) -> None:
    storage, folder = not_atomic(tmp_path)
    publish_bytes(storage, f"{folder}/a", OLD)
    with pytest.raises(StorageError, match=r"connection lost.*in data/a"):
        publish_bytes(storage, f"{folder}/a", NEW + b"fails")
    assert files_in(storage, folder) == ["a"]
    assert storage.read(f"{folder}/a") == OLD


@pytest.mark.parametrize(
    "operation",
    [lambda storage, url: publish_bytes(storage, url, b"1"), remove],
    ids=["publish", "remove"],
)
def test_errors_show_no_secret(operation: Callable[[Storage, str], None], tmp_path: Path) -> None:
    filesystem = DirFileSystem(path="/", fs=TalkativeFileSystem(password="hunter2"))  # noqa: S106
    storage = Storage(filesystem=filesystem)
    with pytest.raises(StorageError, match="login as me:… failed") as raised:
        operation(storage, str(tmp_path / "a"))
    assert "hunter2" not in "".join(traceback.format_exception(raised.value))


def test_file_at_the_root_of_a_filesystem_makes_no_folder() -> None:
    inner = MemoryFileSystem()
    root = f"/test-{uuid.uuid4().hex}"
    publish_bytes(Storage(filesystem=DirFileSystem(path=root, fs=inner)), "a.tar", b"1")
    assert inner.ls(root, detail=False) == [f"{root}/a.tar"]


def test_bytes_lost_in_transfer_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.get_filesystem_class("memory")
    original = memory.pipe_file
    monkeypatch.setattr(
        memory, "pipe_file", lambda self, path, data: original(self, path, data[:2])
    )
    with pytest.raises(StorageError, match=r"2 of 4 bytes arrived.*memory://b/a"):
        publish_bytes(Storage(), "memory://b/a", b"1234")
    assert not spooled()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file/a.tar", "exists|Not a directory"),
        ("folder", "Is a directory"),
        ("n" * 300, "too long"),
    ],
)
def test_unwritable_location_is_reported(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match=message) as raised:
        publish_bytes(Storage(), str(tmp_path / name), b"1")
    assert (raised.value.shard or "").startswith(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_full_disk_is_reported(tmp_path: Path) -> None:
    pending = open_pending(Storage(), str(tmp_path / "a.tar"))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, pending.stream.fileno())
    os.close(full)
    with pytest.raises(StorageError, match=re.escape(str(tmp_path / "a.tar"))):
        pending.write(b"1" * 1_000_000)
    pending.discard()
    assert not os.listdir(tmp_path)


def test_bucket_that_is_missing_is_reported(request: pytest.FixtureRequest) -> None:
    storage = Storage(request.getfixturevalue("s3").storage_options)
    with pytest.raises(StorageError, match="the bucket '.*' does not exist; create it"):
        publish_bytes(storage, "s3://no-such-bucket-anywhere/a.tar", b"1")
    assert not spooled()


# --- on a local disk


def test_temporary_file_is_in_the_folder_of_the_final_file(tmp_path: Path) -> None:
    with publish(Storage(), f"file://{tmp_path}/a.tar") as stream:
        stream.write(b"1")
        (part,) = os.listdir(tmp_path)
        assert is_part(part)
    assert os.listdir(tmp_path) == ["a.tar"]
    assert not is_part("a.tar")


@pytest.mark.parametrize("before", [b"", OLD])
def test_killed_writer_leaves_nothing_under_the_final_name(before: bytes, tmp_path: Path) -> None:
    if before:
        publish_bytes(Storage(), str(tmp_path / "a.tar"), before)
    publish_bytes(Storage(), str(tmp_path / "b.tar"), b"")
    code = (
        "import sys, time\n"
        "from shardstream.storage import Storage\n"
        "from shardstream.storage import publish\n"
        "with publish(Storage(), sys.argv[1]) as stream:\n"
        "    stream.write(bytes(1 << 20))\n"
        "    stream.flush()\n"
        "    print('half', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a.tar")], cwd=ROOT, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half\n"
        writer.send_signal(signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    found = {name for name in os.listdir(tmp_path) if not is_part(name)}
    assert found == ({"a.tar", "b.tar"} if before else {"b.tar"})
    assert not before or (tmp_path / "a.tar").read_bytes() == before
    with pytest.raises(UnfinishedError, match=r"a\.tar\.part-.* is a half-written tar"):
        locate_shards(str(tmp_path), Storage())
    named = [f"{tmp_path}/{name}" for name in sorted(found)]
    shards = [shard.url for shard in locate_shards(named, Storage()).shards]
    assert shards == sorted(str(tmp_path / name) for name in found)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_published_file_has_the_permissions_of_the_umask(
    umask: int, mode: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        publish_bytes(Storage(), str(tmp_path / "deep" / "er" / "a.tar"), b"1")
    finally:
        os.umask(before)
    assert (tmp_path / "deep" / "er" / "a.tar").stat().st_mode & 0o777 == mode


def test_killed_writer_to_a_store_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "import shardstream as ss\n"
        "with ss.ShardWriter('memory://killed/set') as writer:\n"
        "    writer.write({'bin': bytes(1 << 20)})\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    options = {"cwd": ROOT, "env": os.environ | {"TMPDIR": str(tmp_path)}}
    done = subprocess.run([sys.executable, "-c", code], check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def open_files(folder: Path) -> list[str]:
    found = (Path("/proc/self/fd", one) for one in os.listdir("/proc/self/fd"))
    names = (os.readlink(one) for one in found if one.is_symlink())  # not the handle of the listing
    return [name for name in names if name.startswith(str(folder)) or name == "/dev/full"]


@pytest.mark.parametrize("ends_well", [True, False])
def test_no_file_stays_open(ends_well: bool, tmp_path: Path) -> None:
    for number in range(3):
        pending = open_pending(Storage(), str(tmp_path / f"{number}.tar"))
        pending.write(b"1")
        if ends_well:
            pending.commit()
        else:  # the disk is full, so the last bytes cannot be flushed
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, pending.stream.fileno())
            os.close(full)
            pending.discard()
        assert pending.stream.closed or not ends_well
    assert open_files(tmp_path) == []
    assert len(os.listdir(tmp_path)) == (3 if ends_well else 0)


@pytest.mark.parametrize(
    ("fault", "is_fine"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)]
)
def test_folder_sync_errors_are_ignored_only_if_unsupported(
    fault: int, is_fine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_sync = os.fsync

    def sync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(fault, os.strerror(fault))
        really_sync(handle)

    monkeypatch.setattr(os, "fsync", sync)
    if is_fine:
        publish_bytes(Storage(), str(tmp_path / "a.tar"), b"1")
    else:
        with pytest.raises(StorageError, match="Input/output error"):
            publish_bytes(Storage(), str(tmp_path / "a.tar"), b"1")
    assert [name for name in os.listdir(tmp_path) if is_part(name)] == []


def test_a_file_is_flushed_before_it_is_renamed_and_its_folder_after_each_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise a power cut could leave an empty file under the final name, or restore a removed one.
    really_sync, flushed = os.fsync, []
    url = tmp_path / "a.tar"

    def sync(handle: int) -> None:
        found = os.fstat(handle)
        flushed.append((stat.S_ISDIR(found.st_mode) or found.st_size, url.exists()))
        really_sync(handle)

    monkeypatch.setattr(os, "fsync", sync)
    publish_bytes(Storage(), str(url), NEW)
    assert flushed == [(len(NEW), False), (True, True)]
    flushed.clear()
    remove(Storage(), str(url))
    assert flushed == [(True, False)]


@pytest.mark.parametrize("happens", ["commit", "error"])
def test_a_small_file_follows_flushed_names_whatever_happens_during_an_earlier_flush(
    happens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, really_sync = LocalFolder(str(tmp_path), str(tmp_path)), os.fsync
    flushed = list[set[str]]()

    def sync(handle: int) -> None:
        really_sync(handle)
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            flushed.append({name for name in os.listdir(tmp_path) if not is_part(name)})
            if len(flushed) == 1 and happens == "commit":  # by another thread
                folder.commit(folder.open("b.tar"))
            elif len(flushed) == 1:
                raise OSError(errno.EIO, "disk")

    folder.commit(folder.open("a.tar"))
    monkeypatch.setattr(os, "fsync", sync)
    with nullcontext() if happens == "commit" else pytest.raises(StorageError, match="disk"):
        folder.sync()
    folder.write("index.json", b"1")
    assert flushed[1:2] == [{"a.tar", "b.tar"} if happens == "commit" else {"a.tar"}]


@pytest.mark.parametrize("exists", [True, False])
def test_signal_while_a_file_is_created_leaves_nothing(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, _: str) -> None:
        if exists:
            path.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_pending(Storage(), str(tmp_path / "a.tar"))
    assert os.listdir(tmp_path) == []


class BucketFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A store with an atomic PUT, like Google's and Azure's."""

    protocol = ("gs", "gcs")

    def mv(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a store copies what it moves")


def test_store_with_atomic_put_gets_one_put() -> None:
    folder = f"/bucket-{uuid.uuid4().hex}"
    storage = Storage(filesystem=BucketFileSystem())
    publish_bytes(storage, f"{folder}/a.tar", b"1")
    assert storage.read(f"{folder}/a.tar") == b"1"
    assert files_in(storage, folder) == ["a.tar"]
