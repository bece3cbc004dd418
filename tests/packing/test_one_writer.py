"""Test that one of two packs or writers in a folder fails, and that the published dataset is from one only."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import shardstream as ss
from shardstream.packing import merge, verify
from shardstream.storage import JOURNAL_NAME, LocalFolder, Storage
from tests.proxy import spoiling
from tests.servers import S3Server

ANOTHER = "another pack or ShardWriter writes here"
REASONS = (
    "another pack or ShardWriter",
    "journal of this pack or ShardWriter was deleted, by another one that has ended",
    "a dataset is published here",
    "has published a dataset here",
    "a shard of this name exists",
)
"""Why one of two writers fails: the other one is at work, or has just ended."""


def write(writer: ss.ShardWriter, text: str, count: int = 25) -> None:
    for number in range(count):
        writer.write({"txt": f"{text} {number}"})


# --- started at the same moment, as processes


def compete(me: int, base: str, rounds: int, barrier: Barrier, results: Queue[Any]) -> None:
    """Write to several folders in turn, each at the same time as the other process."""
    for number in range(rounds):
        samples = [{"txt": f"{'ab'[me]} {i}"} for i in range(40)]
        url, is_pack, overwrite = f"{base}/{number}", number % 2 == 0, number % 4 > 1
        barrier.wait(300)
        try:
            if is_pack:
                ss.pack(samples, url, max_samples=10, overwrite=overwrite)
            else:
                with ss.ShardWriter(url, max_samples=10, overwrite=overwrite) as writer:
                    write(writer, "ab"[me], 40)
            results.put((number, me, None))
        except ss.ShardStreamError as error:
            results.put((number, me, str(error)))
        barrier.wait(300)


def run_two(base: str, rounds: int) -> dict[int, list[str | None]]:
    """Return both results of each round; None is a success."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=compete, args=(me, base, rounds, barrier, results)) for me in (0, 1)
    ]
    for process in processes:
        process.start()
    found: dict[int, list[str | None]] = {number: [None, None] for number in range(rounds)}
    for _ in range(2 * rounds):
        number, me, results_of_round = results.get(timeout=300)
        found[number][me] = results_of_round
    for process in processes:
        process.join()
    return found


def check_one_won(url: str, results_of_round: list[str | None]) -> None:
    storage = Storage()
    names = [file.url.rsplit("/", 1)[-1] for file in storage.list_folder(url)[0]]
    assert ("index.json" in names, JOURNAL_NAME in names) == (True, False), names
    winners = [me for me in (0, 1) if results_of_round[me] is None]
    # With overwrite=True, a writer that starts after the other has ended replaces its dataset.
    assert winners, results_of_round
    for text in filter(None, results_of_round):
        assert any(reason in text for reason in REASONS), text
    texts = set()
    for shard in json.loads(storage.read(f"{url}/index.json"))["shardlist"]:
        data = storage.read(f"{url}/{shard['url']}")
        assert hashlib.sha256(data).hexdigest() == shard["sha256"]
        texts.add("a" if b"a 1" in data or b"a 2" in data or b"a 3" in data else "b")
    assert len(texts) == 1
    if len(winners) == 1:
        assert texts == {"ab"[winners[0]]}


def test_one_of_two_concurrent_writers_wins(tmp_path: Path) -> None:
    found = run_two(str(tmp_path), 12)
    for number, results_of_round in found.items():
        check_one_won(f"{tmp_path}/{number}", results_of_round)
    assert sum(results_of_round.count(None) == 1 for results_of_round in found.values()) >= 6


@pytest.mark.slow
@pytest.mark.usefixtures("s3_env")
def test_one_of_two_concurrent_writers_on_s3_wins(bucket: str) -> None:
    found = run_two(bucket, 8)
    for number, results_of_round in found.items():
        check_one_won(f"{bucket}/{number}", results_of_round)
    assert sum(results_of_round.count(None) == 1 for results_of_round in found.values()) >= 4


# --- started during another writer


def test_local_folder_is_locked_by_its_writer(tmp_path: Path) -> None:
    with ss.ShardWriter(tmp_path, max_samples=10) as first:
        write(first, "a")
        for overwrite in (False, True):
            with pytest.raises(
                ss.errors.StorageError, match="of this process has this folder open"
            ):
                ss.ShardWriter(tmp_path, overwrite=overwrite)
            with pytest.raises(
                ss.errors.StorageError, match="of this process has this folder open"
            ):
                ss.pack([{"txt": "b"}], tmp_path, overwrite=overwrite)
    assert verify(tmp_path).problems == ()
    assert len(ss.ShardDataset(str(tmp_path))) == 25


@pytest.fixture(params=["memory", "s3"])
def remote(request: pytest.FixtureRequest) -> Iterator[str]:
    """A folder without locks."""
    if request.param == "memory":
        yield f"memory://{uuid.uuid4().hex}/out"
    else:
        request.getfixturevalue("s3_env")
        yield f"{request.getfixturevalue('bucket')}/out"


def test_later_writer_takes_over_a_remote_folder(remote: str) -> None:
    first = ss.ShardWriter(remote, max_samples=10)
    write(first, "a")
    first.drain()  # a shard that is being published now could replace one of the second writer
    with ss.ShardWriter(remote, max_samples=10, overwrite=True) as second:
        write(second, "b", 12)
        with pytest.raises(ss.errors.StorageError, match=ANOTHER), first:
            write(first, "a")
        write(second, "b", 13)
    assert [problem.what for problem in verify(remote).problems] == []
    texts = [sample["txt"] for sample in ss.ShardDataset(remote)]
    assert texts == [b"b %d" % number for number in (*range(12), *range(13))]


def test_paused_writer_publishes_nothing_after_another_has_finished(remote: str) -> None:
    first = ss.ShardWriter(remote, max_samples=10)
    write(first, "a", 5)
    with ss.ShardWriter(remote, overwrite=True) as second:
        write(second, "b", 12)
    with pytest.raises(
        ss.errors.StorageError, match="journal of this pack or ShardWriter was deleted"
    ):
        first.close()
    assert verify(remote).problems == ()
    assert len(ss.ShardDataset(remote)) == 12


def test_error_of_a_storage_option_is_not_told_as_a_deleted_journal(
    s3: S3Server, bucket: str
) -> None:
    options = s3.storage_options | {"s3_client": "http", "s3_additional_kwargs": {}}
    with pytest.raises(ss.errors.OptionError, match="s3_client='http' cannot read this"):
        ss.pack([{"txt": "a"}], f"{bucket}/{uuid.uuid4().hex}", storage_options=options)


def test_displaced_pack_keeps_the_journal_of_the_other(remote: str) -> None:
    first = ss.ShardWriter(remote)
    second = ss.ShardWriter(remote)  # nothing has been written, so it may continue
    first.abort()
    with pytest.raises(ss.errors.UnfinishedError):
        ss.ShardDataset(remote)
    write(second, "b")
    second.close()
    assert len(ss.ShardDataset(remote)) == 25


def test_shard_replaced_by_another_writer_is_detected(remote: str) -> None:
    """A writer that stalls after its check may still overwrite a shard: nothing is published then."""
    storage = Storage()
    filesystem, path = storage.resolve(f"{remote}/000000.tar")
    writer = ss.ShardWriter(remote, max_samples=10)
    write(writer, "a", 20)
    writer.drain()
    if remote.startswith("s3"):
        filesystem.pipe_file(path, bytes(storage.info(f"{remote}/000000.tar").size))
    else:
        filesystem.rm_file(path)
    with pytest.raises(ss.errors.StorageError, match=r"replaced or deleted.*000000\.tar"):
        writer.close()
    with pytest.raises(ss.errors.UnfinishedError):
        ss.ShardDataset(remote)


def test_columns_that_are_deleted_before_the_end_are_detected(tmp_path: Path) -> None:
    writer = ss.ShardWriter(tmp_path, max_samples=10, columns="txt")
    write(writer, "a", 20)
    writer.drain()
    (tmp_path / "000000.tar.cols.parquet").unlink()
    with pytest.raises(ss.errors.StorageError, match=r"replaced or deleted.*000000\.tar"):
        writer.close()
    assert not (tmp_path / "index.json").exists()


class Hooked(MemoryFileSystem):  # type: ignore[misc]
    """Calls a function before ``index.json`` is written."""

    cachable = False
    before_manifest: Callable[[], object] = staticmethod(lambda: None)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if path.endswith("index.json"):
            self.before_manifest()
        super().pipe_file(path, value, mode, **options)


def test_takeover_during_the_manifest_write_prevents_publication() -> None:
    url, filesystem, later = f"memory://{uuid.uuid4().hex}", Hooked(), list[ss.ShardWriter]()
    filesystem.before_manifest = lambda: later.append(ss.ShardWriter(url, overwrite=True))
    with (
        pytest.raises(ss.errors.StorageError, match=ANOTHER),
        ss.ShardWriter(url, filesystem=filesystem) as writer,
    ):
        write(writer, "a")
    assert not Storage().exists(f"{url}/index.json")
    write(later[0], "b", 3)
    later[0].close()
    assert len(ss.ShardDataset(url)) == 3


def test_manifest_of_a_failed_write_is_removed() -> None:
    """As if the response to the request was lost."""

    class Losing(Hooked):
        def pipe_file(
            self, path: str, value: bytes, mode: str = "overwrite", **options: Any
        ) -> None:
            super().pipe_file(path, value, mode, **options)
            if path.endswith("index.json"):
                raise OSError("the connection broke off")

    url = f"memory://{uuid.uuid4().hex}"
    with (
        pytest.raises(ss.errors.StorageError, match="broke off"),
        ss.ShardWriter(url, filesystem=Losing()) as writer,
    ):
        write(writer, "a")
    assert not Storage().exists(f"{url}/index.json")


# --- a request that arrives after another writer has published


class Holding:
    """Holds back one of the requests of a writer until it is released: the first, or a later one, that begins so."""

    def __init__(self, begin: str, number: int = 0) -> None:
        self.begin, self.left = begin, number
        self.arrived, self.released = threading.Event(), threading.Event()

    def __call__(self, request: str, _: int) -> str:
        if request.startswith(self.begin):
            self.left -= 1
            if self.left == -1:
                self.arrived.set()
                assert self.released.wait(60)
        return ""


def write_shards(url: str, text: str, s3: S3Server, nbytes: int = 100) -> None:
    with ss.ShardWriter(
        url, max_samples=2, columns="txt", overwrite=True, storage_options=s3.storage_options
    ) as writer:
        for number in range(4):
            writer.write({"txt": f"{text} {number}", "bin": text.encode() * nbytes})


def check_dataset(url: str, text: str, s3: S3Server) -> None:
    assert Storage(s3.storage_options).exists(f"{url}/index.json")
    report = verify(url, storage_options=s3.storage_options)
    assert [problem.what for problem in report.problems] == []
    samples = ss.ShardDataset(url, storage_options=s3.storage_options)
    assert [sample["txt"] for sample in samples] == [
        b"%s %d" % (text.encode(), n) for n in range(4)
    ]


@pytest.mark.parametrize(
    ("held", "nbytes", "before"),
    [
        ("PUT /bucket/{out}/000001.tar", 100, "nothing"),
        ("PUT /bucket/{out}/000001.tar", 100, "equal"),
        ("PUT /bucket/{out}/000001.tar.cols", 100, "nothing"),
        ("PUT /bucket/{out}/index.json", 100, "nothing"),
        pytest.param("PUT /bucket/{out}/000001.tar", 100, "another", marks=pytest.mark.slow),
        pytest.param("PUT /bucket/{out}/index.json", 100, "equal", marks=pytest.mark.slow),
        pytest.param(
            "POST /bucket/{out}/000001.tar?uploadId", 5 << 20, "another", marks=pytest.mark.slow
        ),
    ],
)
def test_request_that_arrives_late_replaces_no_file_of_the_next_writer(
    held: str, nbytes: int, before: str, moto: S3Server
) -> None:
    out = uuid.uuid4().hex  # servers of one process share their buckets
    url, hold = f"s3://bucket/{out}", Holding(held.format(out=out))
    if before != "nothing":
        write_shards(url, "b" if before == "equal" else "c", moto, nbytes)
    with spoiling(moto.endpoint, hold) as proxy, ThreadPoolExecutor(1) as pool:
        through_proxy = replace(moto, endpoint=proxy.endpoint)
        late = pool.submit(write_shards, url, "a", through_proxy, nbytes)
        assert hold.arrived.wait(60)
        write_shards(url, "b", moto, nbytes)
        hold.released.set()
        with pytest.raises(
            ss.errors.StorageError,
            match=r"another pack or ShardWriter|by another one that has ended",
        ):
            late.result()
    check_dataset(url, "b", moto)


def test_merge_that_ends_after_another_one_keeps_its_dataset(
    tmp_path: Path, moto: S3Server
) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(str(number))
    out, options = uuid.uuid4().hex, moto.storage_options
    url, hold = f"s3://bucket/{out}", Holding(f"PUT /bucket/{out}/index.json")
    for part in (1, 2):
        ss.pack(
            tmp_path, url, max_samples=2, executor=ss.tasks.Parts(part, 2), storage_options=options
        )
    with spoiling(moto.endpoint, hold) as proxy, ThreadPoolExecutor(1) as pool:
        through_proxy = replace(moto, endpoint=proxy.endpoint).storage_options
        late = pool.submit(merge, url, storage_options=through_proxy)
        assert hold.arrived.wait(60)
        assert merge(url, storage_options=options).samples == 4
        hold.released.set()
        with pytest.raises(ss.errors.StorageError, match="by another one that has ended"):
            late.result()
    assert verify(url, storage_options=options).problems == ()
    assert Storage(options).exists(f"{url}/index.json")


def test_folder_is_unlocked_after_success_and_failure(tmp_path: Path) -> None:
    ss.ShardWriter(tmp_path).abort()
    with pytest.raises(ss.errors.SampleError), ss.ShardWriter(tmp_path) as writer:
        writer.write({"cls": "no number"})
    (tmp_path / "000000.tar").write_bytes(b"")
    with pytest.raises(ss.errors.OptionError, match=r"without an index\.json"):
        ss.ShardWriter(tmp_path)
    dropped: ss.ShardWriter | None = ss.ShardWriter(tmp_path, overwrite=True)
    assert dropped is not None
    dropped = None
    gc.collect()
    with ss.ShardWriter(tmp_path, overwrite=True) as writer:
        write(writer, "a")
    with ss.ShardWriter(tmp_path, overwrite=True) as writer:
        write(writer, "b", 3)
    assert len(ss.ShardDataset(str(tmp_path))) == 3


def test_pack_after_a_stopped_writer_requires_overwrite(
    tmp_path: Path,
) -> None:
    writer = ss.ShardWriter(tmp_path / "a-{shard}.tar", max_samples=10)
    write(writer, "a")
    writer.drain()
    writer.abort()
    before = sorted(path.name for path in tmp_path.iterdir())
    assert "a-0.tar" in before
    for begin in (ss.ShardWriter, lambda dest: ss.pack([{"cls": 1}], dest)):
        with pytest.raises(ss.errors.OptionError, match="writing here, or was stopped"):
            begin(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_overwrite_deletes_shards_of_other_names_left_by_another_pack(
    tmp_path: Path,
) -> None:
    (tmp_path / "notes.tar").write_bytes(b"not of any pack")
    with pytest.raises(ss.errors.SourceError):
        ss.pack([{"cls": value} for value in (1, 2, 3, 4, 5, "no number")], tmp_path / "a-{shard}.tar", max_samples=2)  # fmt: skip
    ss.pack([{"cls": 1}], tmp_path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000000.tar", "000000.tar.idx", "index.json", "notes.tar",
    ]  # fmt: skip


def test_second_writer_in_a_process_is_refused_with_advice(tmp_path: Path) -> None:
    writer = ss.ShardWriter(tmp_path)
    with pytest.raises(ss.errors.StorageError, match=r"of this process has this folder open; call"):
        ss.ShardWriter(tmp_path, overwrite=True)
    writer.abort()
    ss.ShardWriter(tmp_path).abort()


def test_forked_child_neither_holds_nor_releases_the_lock(tmp_path: Path) -> None:
    folder, other = (LocalFolder(str(tmp_path), str(tmp_path)) for _ in range(2))
    folder.lock()
    done, child_waits = os.pipe()
    child = os.fork()
    if child == 0:  # it waits until the parent has released its lock
        os.close(child_waits)
        folder.unlock()
        os.read(done, 1)
        os._exit(0)
    try:
        os.close(done)
        with pytest.raises(ss.errors.StorageError, match="has this folder open"):
            other.lock()
        folder.unlock()
        other.lock()
        other.unlock()
    finally:
        os.close(child_waits)
        os.waitpid(child, 0)
