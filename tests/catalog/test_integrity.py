"""Test checksums: flipped bytes are read again from the source or raise an error, and are never returned."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import shardstream as ss
from shardstream.catalog import ShardCatalog, VerifiedReader
from shardstream.errors import IndexMismatchError, OptionError, StorageError
from shardstream.fetch import RangeFetcher
from shardstream.format import ShardInfo
from shardstream.samples import FetchOptions
from shardstream.storage import (
    AdaptiveLimit,
    RangeResponse,
    Storage,
    locate_shards,
    open_cache,
    publish_bytes,
)
from shardstream.testing import make_shards
from tests.small_datasets import FEW_CORES, flat, labels

pytestmark = pytest.mark.filterwarnings(FEW_CORES)

MIB = 1 << 20
DATA = random.Random(0).randbytes(9 * MIB + 12_345)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


class Wire:
    """Record the requests to the store, and damage some responses."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []
        self.spoil: Callable[[int, int], int | None] = lambda _start, _end: None
        """Function of the range that returns the byte of the response to flip."""
        self.before: Callable[[], None] = lambda: None


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    made = Wire()
    really_read = Storage.read_once

    def read_once(
        self: Storage, url: str, start: int = 0, end: int | None = None, **_: Any
    ) -> RangeResponse:
        response = really_read(self, url, start, end)
        if not url.endswith(".tar"):
            return response
        made.before()
        made.reads.append((start, start + len(response.data)))
        at = made.spoil(start, start + len(response.data))
        return response if at is None else RangeResponse(data=flipped(bytes(response.data), at))

    monkeypatch.setattr(Storage, "read_once", read_once)
    return made


def shard_of(data: bytes = DATA) -> ShardInfo:
    url = f"memory://verified-{uuid.uuid4().hex}/a.tar"
    publish_bytes(Storage(), url, data)
    return ShardInfo(
        url=url, nsamples=1, filesize=len(data), sha256=hashlib.sha256(data).hexdigest().upper()
    )


def damage(shard: ShardInfo, at: int) -> None:
    """Flip a bit in place: a file that is written again would have another version."""
    stored = fsspec.filesystem("memory").store[f"/{shard.url.partition('://')[2]}"]
    stored.getbuffer()[:] = flipped(DATA, at)


# --- reads


@pytest.mark.parametrize(
    ("start", "end"),
    [(0, 1), (MIB - 1, MIB + 1), (MIB, 2 * MIB), (5, len(DATA)), (len(DATA) - 3, len(DATA))],
)
def test_first_and_later_reads_return_the_bytes_of_the_file(start: int, end: int) -> None:
    checks = VerifiedReader([shard_of()], Storage())
    for _ in range(2):
        assert checks.read(0, start, end) == DATA[start:end]


def test_first_read_fetches_whole_shard_and_later_reads_whole_chunks(wire: Wire) -> None:
    checks = VerifiedReader([shard_of()], Storage())
    checks.read(0, 3 * MIB + 5, 4 * MIB + 5)  # taken from the read of the whole shard
    assert wire.reads == [(0, 4 * MIB), (4 * MIB, 8 * MIB), (8 * MIB, len(DATA))]
    wire.reads.clear()
    checks.read(0, 3 * MIB + 5, 4 * MIB + 5)
    checks.read(0, len(DATA) - 1, len(DATA))
    assert wire.reads == [(3 * MIB, 5 * MIB), (9 * MIB, len(DATA))]


def test_waiting_iterators_get_activity_reports_during_a_check() -> None:
    now = [0.0]
    concurrency = AdaptiveLimit(8, 32, lambda: now[0])
    now[0] = 50.0
    VerifiedReader([shard_of()], Storage()).read(0, 0, 1, concurrency)
    assert concurrency.last_response_at == 50.0


def test_the_time_of_each_read_of_a_whole_shard_is_recorded(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def take_a_second() -> None:
        now[0] += 1.0

    wire.before = take_a_second
    concurrency = AdaptiveLimit(clock=lambda: now[0])
    checks = VerifiedReader([shard_of(), shard_of()], Storage())
    for shard in (0, 1):
        checks.read(shard, 0, 1, concurrency)
    assert len(wire.reads) == 6
    assert concurrency.hedge_after_s == 3.0  # times the median


def test_concurrent_threads_share_one_check_of_a_shard(wire: Wire) -> None:
    checks = VerifiedReader([shard_of()], Storage())
    barrier = threading.Barrier(8)

    def read(number: int) -> bytes:
        barrier.wait(300)
        return checks.read(0, number * 1000, number * 1000 + 500)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(read, range(8)))
    assert found == [DATA[n * 1000 : n * 1000 + 500] for n in range(8)]
    assert len([read for read in wire.reads if read == (4 * MIB, 8 * MIB)]) == 1


def test_failed_check_raises_in_all_waiting_threads_and_is_repeated_later(wire: Wire) -> None:
    shard = shard_of()
    storage = Storage({"retry_timeout_s": 0.01})
    checks = VerifiedReader([shard], storage)
    has_started, go_on = threading.Event(), threading.Event()

    def fail() -> None:
        has_started.set()
        go_on.wait(300)
        raise OSError("503 SlowDown")

    wire.before = fail
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(checks.read, 0, 0, 10)
        assert has_started.wait(300)
        second = pool.submit(checks.read, 0, 0, 10)
        go_on.set()
        for request in (first, second):
            with pytest.raises(StorageError, match="SlowDown"):
                request.result(300)
    wire.before = lambda: None
    assert checks.read(0, 0, 10) == DATA[:10]


# --- bit flips


def once(at: int) -> Callable[[int, int], int | None]:
    """Flip one byte of the file at its first read."""
    left = [at]

    def damage_byte(start: int, end: int) -> int | None:
        return left.pop() - start if left and start <= left[0] < end else None

    return damage_byte


def test_cancelled_check_is_taken_over_by_a_waiting_thread(wire: Wire) -> None:
    # An epoch is stopped during a fault, and the next one begins at once.
    checks = VerifiedReader([shard_of()], Storage())
    left, failing = AdaptiveLimit(), threading.Event()
    waits = threading.Event()

    def fail() -> None:
        if threading.current_thread() is not here:
            failing.set()
            waits.wait(300)
            raise OSError("connection lost")

    here, wire.before = threading.current_thread(), fail
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(checks.read, 0, 0, 10, left)
        assert failing.wait(300)
        left.close()
        threading.Timer(0.2, waits.set).start()  # this thread waits by then
        assert checks.read(0, 5, 20, AdaptiveLimit()) == DATA[5:20]
        with pytest.raises(StorageError, match="connection lost"):
            first.result(300)


def test_bit_flip_in_first_read_is_corrected_by_reading_again(wire: Wire) -> None:
    checks = VerifiedReader([shard_of()], Storage())
    wire.spoil = once(5 * MIB)
    assert checks.read(0, 5 * MIB, 5 * MIB + 9) == DATA[5 * MIB : 5 * MIB + 9]
    assert len(wire.reads) == 6


@pytest.mark.parametrize("at", [2 * MIB, 3 * MIB - 1, 3 * MIB, len(DATA) - 1])
def test_bit_flip_in_later_read_costs_one_extra_chunk_read(at: int, wire: Wire) -> None:
    checks = VerifiedReader([shard_of()], Storage())
    checks.read(0, 0, 1)
    wire.reads.clear()
    wire.spoil = once(at)
    assert checks.read(0, 2 * MIB + 1, len(DATA)) == DATA[2 * MIB + 1 :]
    low = at // MIB * MIB
    assert wire.reads == [(2 * MIB, len(DATA)), (low, min(low + MIB, len(DATA)))]


def test_bit_flip_in_the_cache_is_replaced(wire: Wire, tmp_path: Path) -> None:
    shard = shard_of()

    def storage() -> Storage:
        return Storage(cache=open_cache(tmp_path, "100MB"))

    wire.spoil = once(5 * MIB)
    damaged = storage()
    assert damaged.read(shard.url, 0, len(DATA)) == flipped(DATA, 5 * MIB)  # cached now
    assert VerifiedReader([shard], storage()).read(0, 5 * MIB, 6 * MIB) == DATA[5 * MIB : 6 * MIB]
    wire.reads.clear()
    assert storage().read(shard.url, 0, len(DATA)) == DATA
    assert wire.reads == []


def test_damaged_chunk_cached_after_the_check_is_replaced(wire: Wire, tmp_path: Path) -> None:
    shard = shard_of()
    storage = Storage(cache=open_cache(tmp_path, "100MB"))
    checks = VerifiedReader([shard], storage)
    checks.read(0, 0, 1)
    storage.forget(shard.url, 4 * MIB, 6 * MIB)
    wire.spoil = once(5 * MIB)
    wire.reads.clear()
    for _ in range(2):
        assert checks.read(0, 4 * MIB, 6 * MIB) == DATA[4 * MIB : 6 * MIB]
    assert wire.reads == [(4 * MIB, 6 * MIB), (5 * MIB, 6 * MIB)]


def test_shard_damaged_in_the_store_raises_with_both_digests(wire: Wire) -> None:
    shard = shard_of()
    damage(shard, 77)
    checks = VerifiedReader([shard], Storage())
    with pytest.raises(IndexMismatchError) as raised:
        checks.read(0, 5 * MIB, 6 * MIB)  # of the valid part
    assert (shard.sha256 or "").lower() in str(raised.value)
    assert raised.value.shard == shard.url
    assert len(wire.reads) == 6  # the same twice: not an error in transfer


def test_permanent_bit_flips_raise_an_error(wire: Wire) -> None:
    noise = random.Random(1)
    wire.spoil = lambda start, end: noise.randrange(end - start)
    with pytest.raises(IndexMismatchError, match="its sha256 is"):
        VerifiedReader([shard_of()], Storage()).read(0, 0, 1)
    assert len(wire.reads) == 12


def test_damage_after_the_check_raises_with_its_offset(wire: Wire) -> None:
    shard = shard_of()
    checks = VerifiedReader([shard], Storage())
    checks.read(0, 0, 1)
    damage(shard, 5 * MIB + 3)
    wire.reads.clear()
    assert checks.read(0, 4 * MIB, 5 * MIB) == DATA[4 * MIB : 5 * MIB]
    with pytest.raises(IndexMismatchError, match=f"at byte {5 * MIB}") as raised:
        checks.read(0, 4 * MIB, 6 * MIB)
    assert (raised.value.shard, raised.value.offset) == (shard.url, 5 * MIB)
    assert len(wire.reads) == 5


def test_a_chunk_that_stays_wrong_is_not_left_in_the_cache(wire: Wire, tmp_path: Path) -> None:
    shard = shard_of()
    storage = Storage(cache=open_cache(tmp_path, "100MB"))
    checks = VerifiedReader([shard], storage)
    checks.read(0, 0, 1)
    storage.forget(shard.url, 5 * MIB, 6 * MIB)
    wire.spoil = lambda start, _end: 3 if start == 5 * MIB else None
    with pytest.raises(IndexMismatchError, match=f"at byte {5 * MIB}"):
        checks.read(0, 5 * MIB, 6 * MIB)
    wire.spoil = lambda _start, _end: None
    again = Storage(cache=open_cache(tmp_path, "100MB"))
    assert again.read(shard.url, 0, len(DATA)) == DATA


# --- among processes


def in_fork(function: Callable[[], Any]) -> Any:
    """Return the result of a function in a forked process."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send(function()))
    child.start()
    assert mine.poll(60)
    found = mine.recv()
    child.join(300)
    return found


def test_forked_processes_share_the_digests(wire: Wire) -> None:
    shards = [shard_of(), shard_of()]
    checks = VerifiedReader(shards, Storage())
    checks.read(0, 0, 1)
    wire.reads.clear()

    def read() -> tuple[bool, int]:
        right = all(checks.read(shard, 10, 20) == DATA[10:20] for shard in (0, 1))
        return right, len(wire.reads)

    assert in_fork(read) == (True, 1 + 3)  # this process has not checked the second
    assert checks.read(1, 30, 40) == DATA[30:40]
    assert wire.reads == [(0, MIB)]  # its digests are shared with this process


def test_process_forked_during_a_check_does_not_wait_for_it(wire: Wire) -> None:
    checks = VerifiedReader([shard_of()], Storage())
    parent, has_started, go_on = os.getpid(), threading.Event(), threading.Event()

    def stall() -> None:
        if os.getpid() == parent:
            has_started.set()
            go_on.wait(300)

    wire.before = stall
    thread = threading.Thread(target=checks.read, args=(0, 0, 1))
    thread.start()
    assert has_started.wait(300)
    assert in_fork(lambda: checks.read(0, 10, 20)) == DATA[10:20]
    go_on.set()
    thread.join(300)


def test_pickled_copy_starts_without_digests(wire: Wire) -> None:
    checks = VerifiedReader([shard_of()], Storage())
    checks.read(0, 0, 1)
    copied = ForkingPickler.loads(ForkingPickler.dumps(checks))
    wire.reads.clear()
    assert copied.read(0, 0, 9) == DATA[:9]
    assert len(wire.reads) == 3


# --- in datasets


def arrays(folder: Path | str, nsamples: int = 24, per_shard: int = 8, **options: Any) -> str:
    rng = np.random.default_rng(0)
    samples = ({"__key__": f"{i:06d}", "cls": i, "bin": rng.bytes(50_000)} for i in range(nsamples))
    return make_shards(folder, samples=samples, per_shard=per_shard, **options)


def damage_file(path: Path, at: int) -> None:
    path.write_bytes(flipped(path.read_bytes(), at))


BODY = 200_000  # in the body of a sample: no header is damaged


def test_bit_flip_ends_the_epoch_only_with_verify(
    tmp_path: Path,
) -> None:
    folder = Path(arrays(tmp_path))
    damage_file(sorted(folder.glob("*.tar"))[1], BODY)
    assert len(list(ss.ShardDataset(str(folder)))) == 24
    for dataset in (
        ss.ShardDataset(str(folder), read=ss.ReadOptions(verify="sha256"), on_error="skip"),
        ss.ShardDataset(str(folder), read=ss.ReadOptions(verify="sha256")).by_number(),
        ss.mix([ss.ShardDataset(str(folder), read=ss.ReadOptions(verify="sha256"))]),
    ):
        with pytest.raises(IndexMismatchError, match="the manifest says"):
            list(dataset)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_damaged_remote_shard_ends_the_epoch_at_its_position(num_workers: int) -> None:
    url = arrays(f"memory://verified-{uuid.uuid4().hex}")
    storage = Storage()
    tar = sorted(file.url for file in storage.find(url) if file.url.endswith(".tar"))[1]
    publish_bytes(storage, tar, flipped(storage.read(tar), BODY))
    dataset = ss.ShardDataset(url, read=ss.ReadOptions(verify="sha256"), on_error="skip")
    loader = ss.ShardLoader(dataset.decode().to_tuple("cls"), 4, num_workers=num_workers)
    seen: list[int] = []
    with pytest.raises(IndexMismatchError, match="the manifest says"):
        seen.extend(label for (batch,) in loader for label in batch.tolist())
    assert seen == list(range(len(seen)))
    assert loader.skipped == {}


def test_wait_for_another_check_has_no_timeout_while_bytes_arrive(wire: Wire) -> None:
    """Two iterators over one dataset, and a shard whose read takes longer than the timeout of a read without bytes."""
    url = f"memory://verified-{uuid.uuid4().hex}"
    with ss.ShardWriter(url) as writer:
        for number in range(40):  # ten chunks
            writer.write({"__key__": str(number), "bin": DATA[:MIB]})
    storage = Storage({"read_timeout_s": 0.1, "retry_timeout_s": 3.0})
    catalog = ShardCatalog(locate_shards(url, storage), storage, "sha256")
    begun = threading.Event()

    def be_slow() -> None:
        begun.set()
        time.sleep(0.4)

    wire.before = be_slow
    fetchers = [RangeFetcher(catalog, iter(()), FetchOptions(prefetch_bytes=0)) for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fetchers[0].samples, np.array([0]))
        begun.wait(300)
        second = fetchers[1].samples(np.array([1]))
    assert [type(sample) for sample in (*first.result(), *second)] == [dict, dict], second
    for fetcher in fetchers:
        fetcher.close()


def test_unchanged_local_shards_are_hashed_once_for_all_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = arrays(tmp_path)
    hashed: list[int] = []
    really_hash = hashlib.sha256

    def sha256(data: Any = b"") -> Any:
        hashed.append(len(data))
        return really_hash(data)

    dataset = ss.ShardDataset(folder, read=ss.ReadOptions(verify="sha256")).decode()
    monkeypatch.setattr("hashlib.sha256", sha256)
    for _ in range(2):
        assert [sample["cls"] for sample in dataset] == list(range(24))
    assert len(hashed) == 3
    damage_file(sorted(tmp_path.glob("*.tar"))[2], BODY)
    with pytest.raises(IndexMismatchError, match="the manifest says"):
        list(dataset)


def test_epoch_with_bit_flips_in_transfer_returns_correct_samples(wire: Wire) -> None:
    url = arrays(f"memory://verified-{uuid.uuid4().hex}", 60, 20)
    noise = random.Random(2)
    dataset = ss.ShardDataset(
        url,
        shuffle=True,
        read=ss.ReadOptions(verify="sha256"),
        order=ss.OrderOptions(window=8, block=2),
    )
    wanted = {sample["__key__"]: sample["bin"] for sample in ss.ShardDataset(url)}
    wire.spoil = lambda start, end: noise.randrange(end - start) if noise.random() < 0.2 else None
    assert {sample["__key__"]: sample["bin"] for sample in dataset} == wanted


def test_mix_maps_shard_numbers_to_the_verified_parts(tmp_path: Path) -> None:
    remote = arrays(f"memory://verified-{uuid.uuid4().hex}")
    local = arrays(tmp_path)
    mixed = ss.mix(
        [
            ss.ShardDataset(url, read=ss.ReadOptions(verify="sha256")).decode()
            for url in (remote, local)
        ]
    )
    assert sorted(flat(labels(ss.ShardLoader(mixed, 4)))) == sorted([*range(24)] * 2)
    damage_file(sorted(tmp_path.glob("*.tar"))[2], BODY)
    parts = [
        ss.ShardDataset(url, read=ss.ReadOptions(verify="sha256")).decode()
        for url in (remote, local)
    ]
    with pytest.raises(IndexMismatchError, match=str(tmp_path)):
        list(ss.ShardLoader(ss.mix(parts), 4))


def test_shards_without_checksums_are_refused_until_they_are_indexed(tmp_path: Path) -> None:
    folder = arrays(tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(OptionError, match="run 'shardstream index' on the folder"):
        ss.ShardDataset(folder, read=ss.ReadOptions(verify="sha256"))
    ss.index(folder)
    assert len(list(ss.ShardDataset(folder, read=ss.ReadOptions(verify="sha256")))) == 24


def test_verify_without_checksums_or_with_unknown_value_is_refused(tmp_path: Path) -> None:
    folder = arrays(tmp_path)
    with pytest.raises(OptionError, match="remove index='ignore'"):
        ss.ShardDataset(folder, read=ss.ReadOptions(verify="sha256", index="ignore"))
    with pytest.raises(OptionError, match="verify is 'sha256' or None, not 'md5'"):
        ss.ShardDataset(folder, read=ss.ReadOptions(verify="md5"))  # type: ignore[arg-type]


# --- indexes


def test_damaged_index_response_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = arrays(f"memory://verified-{uuid.uuid4().hex}")
    really_read = Storage.read_once
    left = [1, 2, 3]

    def read_once(self: Storage, at: str, *arguments: Any, **options: Any) -> RangeResponse:
        response = really_read(self, at, *arguments, **options)
        if at.endswith("1.tar.idx") and left:
            left.pop()
            return RangeResponse(data=flipped(bytes(response.data), 8))
        return response

    monkeypatch.setattr(Storage, "read_once", read_once)
    storage = Storage(cache=open_cache(tmp_path, "100MB"))
    catalog = ShardCatalog(locate_shards(url, storage), storage)
    assert [catalog.read_sample(number)["cls"] for number in range(24)] == [
        b"%d" % number for number in range(24)
    ]
    assert left == []


def test_checked_local_file_is_not_hashed_again(tmp_path: Path) -> None:
    other = shard_of(b"other")
    path = str(tmp_path / "a.tar")
    Path(path).write_bytes(DATA)
    checks = VerifiedReader([other, shard_of(), other], Storage())
    assert not checks.knows_file(1, path)
    checks.check_file(1, path, memoryview(DATA))
    assert checks.knows_file(1, path)
    assert not checks.knows_file(0, path)
    checks.check_file(1, path, memoryview(b"what is not looked at"))
    Path(path).write_bytes(DATA[:-1])
    assert not checks.knows_file(1, path)
    with pytest.raises(IndexMismatchError, match="its sha256 is"):
        checks.check_file(1, path, memoryview(DATA[:-1]))
