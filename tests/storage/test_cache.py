"""Test that the cache returns the bytes of the source after any change of its folder."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.errors import CacheWarning, ChangedError, NotFoundError, OptionError
from shardstream.storage import (
    CACHE_CHUNK_BYTES,
    HEADER_BYTES,
    Cache,
    CacheSpace,
    Storage,
    load_usage,
    open_cache,
    publish_bytes,
    version_of,
)
from tests.servers import S3Server

MIB = 1 << 20
DATA = random.Random(0).randbytes(5 * MIB + 12_345)
ROOM = 100 * MIB
URL = "s3://bucket/a.tar"


class Source:
    """A remote file that records the requests of a cache."""

    def __init__(self, data: bytes = DATA, version: str | None = "ETag 1", url: str = URL) -> None:
        self.data, self.version, self.url = data, version, url
        self.reads: list[tuple[int, int | None]] = []
        self.look_ups = 0

    @property
    def bytes_read(self) -> int:
        return sum((len(self.data) if end is None else end) - start for start, end in self.reads)

    def through(self, cache: Cache, start: int = 0, end: int | None = None) -> bytes:
        def read(start: int, end: int | None) -> bytes:
            self.reads.append((start, end))
            return self.data[start:end]

        def look_up() -> None:
            self.look_ups += 1
            cache.record(self.url, len(self.data), self.version)

        found = cache.read(self.url, start, end, read=read, look_up=look_up)
        assert type(found) is bytes
        return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def cached(folder: Path, max_bytes: int | None = ROOM) -> Cache:
    return Cache(str(folder), max_bytes)


def chunks(folder: Path) -> list[Path]:
    """Return the files that hold bytes of shards."""
    return sorted(folder.glob("*/??/*"))


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/parts/*"))


def used_bytes(folder: Path) -> int:
    total = 0
    for path in chunks(folder):
        try:
            total += -(-path.stat().st_size // 4096) * 4096
        except FileNotFoundError:  # another process evicted it
            continue
    return total


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)


# --- hits and misses


@pytest.mark.parametrize(
    ("start", "end"),
    [(0, 1), (0, MIB), (MIB - 1, MIB + 1), (123, 4 * MIB + 7), (5 * MIB, None), (0, None)],
)
def test_cached_bytes_are_not_read_again(folder: Path, start: int, end: int | None) -> None:
    source = Source()
    for _ in range(2):
        assert source.through(cached(folder), start, end) == DATA[start:end]
    assert len(source.reads) == 1


def test_adjacent_missing_chunks_need_one_read(
    folder: Path,
) -> None:
    source, cache = Source(), cached(folder)
    source.through(cache, 2 * MIB, 3 * MIB)
    assert source.through(cache, 100, 5 * MIB) == DATA[100 : 5 * MIB]
    assert source.reads == [(2 * MIB, 3 * MIB), (0, 2 * MIB), (3 * MIB, 5 * MIB)]


def test_ranges_that_split_chunks_read_each_byte_once(folder: Path) -> None:
    source, cache = Source(), cached(folder)
    starts = list(range(0, len(DATA), 300_001))
    random.Random(1).shuffle(starts)
    for start in starts:
        end = min(start + 300_001, len(DATA))
        assert source.through(cache, start, end) == DATA[start:end]
    assert source.bytes_read == len(DATA)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=4))
def test_any_range_of_a_small_file_is_correct(spans: list[tuple[int, int]]) -> None:
    source = Source(DATA[:50])
    with tempfile.TemporaryDirectory() as folder:
        for start, size in spans:
            end = min(start + size, 50)
            assert source.through(cached(Path(folder)), start, end) == DATA[start:end]
    assert len(source.reads) == bool(spans)


def counted_bytes(folder: Path) -> int:
    (path,) = folder.glob("*/total")
    with path.open("rb") as file:
        found = load_usage(file.fileno())
    assert found is not None
    return found.total


@pytest.mark.parametrize(
    ("forgotten", "read_again"),
    [
        ((), (0, len(DATA))),
        ((MIB - 1, 2 * MIB + 1), (0, 3 * MIB)),
        ((MIB, 2 * MIB), (MIB, 2 * MIB)),
        ((5 * MIB + 7,), (5 * MIB, len(DATA))),
    ],
)
def test_only_forgotten_chunks_are_read_again(
    forgotten: tuple[int, ...], read_again: tuple[int, int], folder: Path
) -> None:
    source, cache = Source(), cached(folder)
    cache.forget(URL)  # the cache has no record of it
    source.through(cache)
    before = counted_bytes(folder)
    cache.forget(URL, *forgotten)
    assert counted_bytes(folder) == used_bytes(folder) < before
    source.reads.clear()
    assert source.through(cache) == DATA
    assert source.reads == [read_again]
    assert counted_bytes(folder) == used_bytes(folder) == before


def test_range_past_the_end_is_left_to_the_source(folder: Path) -> None:
    source = Source()
    source.through(cached(folder), len(DATA) - 5, len(DATA) + 5)
    assert source.reads == [(len(DATA) - 5, len(DATA) + 5)]


def test_errors_of_the_source_are_raised(folder: Path) -> None:
    cache = cached(folder)
    cache.record(URL, len(DATA), "ETag 1")

    def read(start: int, end: int | None) -> bytes:
        raise NotFoundError("gone")

    with pytest.raises(NotFoundError, match="gone"):
        cache.read(URL, 0, 5, read=read, look_up=lambda: None)
    assert chunks(folder) == []


def test_cache_can_be_pickled_to_other_processes(folder: Path) -> None:
    source = Source()
    source.through(cached(folder), 0, 5)
    copy: Cache = ForkingPickler.loads(ForkingPickler.dumps(cached(folder)))
    assert source.through(copy, 0, 5) == DATA[:5]
    assert len(source.reads) == 1


def test_cache_folder_is_private_to_the_user(folder: Path) -> None:
    Source().through(cached(folder))
    places = [folder, *folder.rglob("*")]
    assert len(places) > 8
    assert all(place.stat().st_mode & 0o077 == 0 for place in places)


# --- versions


def test_replaced_file_is_read_again(folder: Path) -> None:
    old, new = Source(), Source(DATA[::-1], "ETag 2")
    old.through(cached(folder), 0, 100)
    assert new.through(cached(folder), 0, 100) == DATA[::-1][:100]
    assert old.through(cached(folder), 0, 100) == DATA[:100]
    assert (len(old.reads), len(new.reads)) == (1, 1)


@pytest.mark.parametrize(
    "other",
    [
        Source(DATA[:-1]),
        Source(url="s3://bucket/b.tar"),
        Source(version="mtime 1"),
    ],
)
def test_files_differ_by_length_url_and_version_type(folder: Path, other: Source) -> None:
    Source().through(cached(folder), 0, 100)
    other.reads.clear()
    other.through(cached(folder), 0, 100)
    assert len(other.reads) == 1


def test_url_signature_is_ignored_if_there_is_an_etag(folder: Path) -> None:
    first = Source(url="https://host/a.tar?X-Amz-Signature=1")
    second = Source(url="https://host/a.tar?X-Amz-Signature=2")
    first.through(cached(folder))
    second.through(cached(folder))
    assert second.reads == []
    dated = [Source(url=f"https://host/get?id={i}", version="Last-Modified 5") for i in range(2)]
    for source in dated:
        source.through(cached(folder))
    assert [len(source.reads) for source in dated] == [1, 1]


def test_file_is_looked_up_once(folder: Path) -> None:
    source, cache = Source(), cached(folder)
    for start in range(10):
        source.through(cache, start, start + 1)
    assert source.look_ups == 1


def test_read_with_an_unexpected_length_bypasses_the_cache(folder: Path) -> None:
    cache, requested = cached(folder), []
    cache.record(URL, len(DATA), "ETag 1")

    def read(start: int, end: int | None) -> bytes:
        requested.append((start, end))
        return b"the source"

    size = len(DATA) - 1
    found = cache.read(URL, 3, 9, size=size, read=read, look_up=lambda: None)
    assert (found, requested, chunks(folder)) == (b"the source", [(3, 9)], [])


def test_files_without_a_version_are_not_cached(folder: Path) -> None:
    source, cache = Source(version=None), cached(folder)
    with pytest.warns(CacheWarning, match="neither an ETag nor a modification time"):
        source.through(cache, 0, 9)
    assert source.through(cache, 0, 9) == DATA[:9]  # no second warning
    assert (len(source.reads), chunks(folder)) == (2, [])


@pytest.mark.parametrize(
    ("entry", "version"),
    [
        ({"ETag": '"1f"', "LastModified": "today"}, 'ETag "1f"'),
        ({"ETag": "", "mtime": 5}, "mtime 5"),
        ({"etag": "x"}, "ETag x"),
        ({"e_tag": "x", "last_modified": None}, "ETag x"),
        ({"Last-Modified": "Mon"}, "Last-Modified Mon"),
        ({"generation": 1712, "etag": "CJD", "mtime": 5}, "generation 1712"),
        ({"mtime": datetime.fromtimestamp(12.5, tz=UTC)}, "mtime 12.5"),
        ({"size": 5}, None),
    ],
)
def test_version_is_an_etag_or_a_time(entry: dict[str, Any], version: str | None) -> None:
    assert version_of(entry) == version


# --- size limits


def test_size_limit_holds_and_cached_part_serves_each_epoch(folder: Path) -> None:
    source, room = Source(), 4 * MIB
    cache = cached(folder, room)
    hits: list[int] = []
    for epoch in range(4):
        source.reads.clear()
        order = list(range(0, len(DATA), 200_000))
        random.Random(epoch).shuffle(order)
        for start in order:
            end = min(start + 200_000, len(DATA))
            assert source.through(cache, start, end) == DATA[start:end]
            assert used_bytes(folder) <= room
        hits.append(len(DATA) - source.bytes_read)
    kept = sum(path.stat().st_size - HEADER_BYTES for path in chunks(folder))
    assert kept >= room - 2 * CACHE_CHUNK_BYTES
    assert hits[1:] == [kept] * 3  # all cached chunks are used, and no other bytes are read


def test_read_larger_than_the_cache_fills_the_free_space(folder: Path) -> None:
    source, cache = Source(), cached(folder, 4 * MIB)
    assert source.through(cache, 5, len(DATA) - 5) == DATA[5:-5]
    assert source.through(cache, 5, len(DATA) - 5) == DATA[5:-5]
    assert source.reads == [(0, len(DATA) - 5), (3 * MIB, len(DATA) - 5)]


@pytest.mark.parametrize("last", [8192 - HEADER_BYTES, MIB, 4096 - HEADER_BYTES + 1])
def test_read_that_just_fits_is_cached_completely(last: int, folder: Path) -> None:
    whole, rest = (-(-(HEADER_BYTES + size) // 4096) * 4096 for size in (MIB, last))
    source = Source(random.Random(1).randbytes(2 * MIB + last))
    source.through(cached(folder, 2 * whole + rest))
    assert len(chunks(folder)) == 3
    source.url = "s3://bucket/b.tar"
    source.through(cached(folder / "smaller", 2 * whole + rest - 4096))
    assert len(chunks(folder / "smaller")) == 2


def test_run_evicts_chunks_of_earlier_runs(folder: Path) -> None:
    old, new = Source(), Source(DATA[::-1], url="s3://bucket/b.tar")
    old.through(cached(folder, 6 * MIB))
    run = cached(folder, 6 * MIB)
    old.through(run, 0, MIB)  # used again, so it stays
    for start in range(0, 4 * MIB, MIB):
        new.through(run, start, start + MIB)
    assert used_bytes(folder) <= 6 * MIB
    old.reads.clear()
    new.reads.clear()
    old.through(run, 0, MIB)
    for start in range(0, 4 * MIB, MIB):
        new.through(run, start, start + MIB)
    assert old.reads == new.reads == []


def test_smaller_limit_applies_from_the_next_write(folder: Path) -> None:
    Source().through(cached(folder))
    assert used_bytes(folder) > 5 * MIB
    Source(url="s3://bucket/b.tar").through(cached(folder, 4 * MIB), 0, 5)
    assert used_bytes(folder) <= 4 * MIB


def test_by_default_a_tenth_of_the_disk_stays_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_bavail=100 + 2 * MIB // 4096 + 4, f_blocks=1000, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    assert Source().through(cached(folder, None)) == DATA
    assert len(chunks(folder)) == 2
    disk.f_bavail = 100
    with pytest.warns(CacheWarning, match="less than a tenth of its disk is free"):
        assert Source(version="ETag 2").through(cached(folder, None)) == DATA
    assert len(chunks(folder)) == 0  # chunks of an earlier run
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Source().through(cached(folder, 6 * MIB)) == DATA  # an explicit limit holds
    assert len(chunks(folder)) == len(DATA) // MIB + 1


def test_cache_that_fills_the_disk_to_its_tenth_does_so_silently(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_bavail=100 + MIB // 4096 + 4, f_blocks=1000, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    run = cached(folder, None)
    Source().through(run, 0, MIB)
    disk.f_bavail = 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Source().through(run) == DATA
    assert len(chunks(folder)) == 1


def test_files_deleted_by_others_are_detected(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = Source(), cached(folder, 5 * MIB)
    for start in range(0, len(DATA), MIB):
        source.through(cache, start, min(start + MIB, len(DATA)))
    for path in chunks(folder):
        path.unlink()
    assert source.through(cache, 0, 9) == DATA[:9]
    assert chunks(folder) == []  # full according to the usage count
    monkeypatch.setattr(CacheSpace, "survey_ns", 0)
    source.through(cache, 0, 9)
    assert len(chunks(folder)) == 1


def test_the_count_stays_exact_when_nothing_can_be_evicted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CacheSpace, "survey_ns", 0)  # each read of a full cache counts its files
    source, cache = Source(), cached(folder, 4 * MIB)
    for start in range(0, len(DATA), MIB):
        source.through(cache, start, min(start + MIB, len(DATA)))
    assert len(chunks(folder)) == 4  # three whole ones, and the short one at the end
    assert counted_bytes(folder) == used_bytes(folder)


@pytest.mark.parametrize("wrong", [b"", b"garbage" * 20, b"\xff" * 36])
def test_lost_usage_count_is_recomputed(folder: Path, wrong: bytes) -> None:
    source = Source()
    source.through(cached(folder))
    [total] = folder.glob("*/total")
    total.write_bytes(wrong)
    run = cached(folder, 6 * MIB)
    Source(url="s3://bucket/b.tar").through(run)
    assert used_bytes(folder) <= 6 * MIB


def test_files_with_future_times_are_evicted(folder: Path) -> None:
    Source().through(cached(folder, 6 * MIB))
    for path in chunks(folder):
        os.utime(path, (time.time() + 1e6, time.time() + 1e6))
    new = Source(url="s3://bucket/b.tar")
    for _ in range(2):
        new.through(cached(folder, 6 * MIB), 0, 4 * MIB)
    assert len(new.reads) == 1


# --- damage


@pytest.mark.parametrize("at", [0, 9, 25, 60, HEADER_BYTES, HEADER_BYTES + 70_000, -1])
def test_bit_flip_is_detected_and_read_again(
    folder: Path, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source()
    source.through(cached(folder), 0, MIB)
    [path] = chunks(folder)
    flip(path, at)
    assert source.through(cached(folder), 0, MIB) == DATA[:MIB]
    assert "is read from its source" in caplog.text
    assert source.through(cached(folder), 0, MIB) == DATA[:MIB]
    assert len(source.reads) == 2


def hostile_files(path: Path, secret: Path) -> Iterator[None]:
    """Replace a chunk by one hostile file after another."""
    good = path.read_bytes()

    path.write_bytes(b"")
    yield
    path.write_bytes(b"\0" * len(good))
    yield
    path.write_bytes(good[:-1])
    yield
    with path.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse: it must not be read
    yield
    path.unlink()
    path.symlink_to(secret)
    yield
    path.unlink(missing_ok=True)
    os.mkfifo(path)  # opening it would wait for a writer
    yield
    path.unlink(missing_ok=True)
    path.mkdir()
    yield
    path.rmdir()


def test_forged_files_are_never_returned(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret" * 300_000)
    source = Source()
    source.through(cached(folder), 0, MIB)
    [path] = chunks(folder)
    for _ in hostile_files(path, secret):
        cache = cached(folder)
        assert source.through(cache, 0, MIB) == DATA[:MIB]
        assert source.through(cache, MIB, 2 * MIB) == DATA[MIB : 2 * MIB]
    assert secret.read_bytes() == b"secret" * 300_000


def test_eviction_does_not_follow_links(folder: Path, tmp_path: Path) -> None:
    target_folder = tmp_path / "elsewhere"
    target_folder.mkdir()
    (target_folder / "thesis").write_bytes(bytes(MIB))
    os.utime(target_folder / "thesis", (1, 1))
    cached(folder)
    (folder / "shardstream-cache-1" / "zz").symlink_to(target_folder)
    for number in range(3):
        Source(version=f"ETag {number}").through(cached(folder, 6 * MIB))
    assert (target_folder / "thesis").exists()


def test_chunk_under_the_name_of_another_is_refused(folder: Path) -> None:
    source = Source()
    source.through(cached(folder), 0, MIB)
    [first] = chunks(folder)
    source.through(cached(folder), MIB, 2 * MIB)
    [second] = set(chunks(folder)) - {first}
    shutil.copy(second, first)
    assert source.through(cached(folder), 0, MIB) == DATA[:MIB]


ACTS = ("flip", "cut", "delete", "directory", "drop_total", "drop_all", "new_run", "old")


@settings(max_examples=30)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("read"), st.integers(0, len(DATA) - 1), st.integers(1, 3 * MIB)),
            st.tuples(st.sampled_from(ACTS), st.integers(0, 20), st.integers(0, 2 * MIB)),
        ),
        max_size=15,
    )
)
def test_reads_are_correct_after_any_change_of_the_folder(
    acts: list[tuple[str, int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, source = Path(name), Source()
        cache = cached(folder, 4 * MIB)
        for act, first, second in acts:
            if act == "read":
                end = min(first + second, len(DATA))
                assert source.through(cache, first, end) == DATA[first:end]
            elif act == "new_run":
                cache = cached(folder, 4 * MIB)
            else:
                harm(folder, act, first, second)


def harm(folder: Path, act: str, which: int, at: int) -> None:
    files = [path for path in chunks(folder) if path.is_file()]
    path = files[which % len(files)] if files else None
    if act == "drop_all":
        shutil.rmtree(folder, ignore_errors=True)
    elif act == "drop_total":
        for total in folder.glob("*/total"):
            total.unlink()
    elif path is None:
        return
    elif act == "flip":
        flip(path, at)
    elif act == "cut":
        os.truncate(path, at)
    elif act == "old":
        os.utime(path, (1, 1))
    else:
        path.unlink()
        if act == "directory":
            path.mkdir()


# --- disk errors


def test_deleted_folder_is_created_again(folder: Path) -> None:
    source, cache = Source(), cached(folder)
    for _ in range(2):
        assert source.through(cache) == DATA
        shutil.rmtree(folder)
    assert source.through(cache) == DATA
    assert source.through(cache) == DATA
    assert len(source.reads) == 3


FULL_DISK = """
    import resource, signal, sys, warnings
    from tests.storage.test_cache import DATA, Source, cached, Path, chunks, parts
    warnings.simplefilter("always")
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
    folder, source = Path(sys.argv[1]), Source()
    cache = cached(folder)
    with warnings.catch_warnings(record=True) as warned:
        for start in range(0, len(DATA), 500_000):
            assert source.through(cache, start, start + 9) == DATA[start : start + 9]
    assert (chunks(folder), parts(folder)) == ([], [])
    print(len(warned), warned[0].message)
"""


def run_python(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return done.stdout


def test_full_disk_causes_one_warning_and_disables_the_cache(folder: Path) -> None:
    results = run_python(FULL_DISK, folder)
    assert results.startswith("1 cannot write to the cache")
    assert "File too large" in results


def test_full_disk_is_retried_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = Source(), cached(folder)
    (folder / "shardstream-cache-1" / "parts").rmdir()
    (folder / "shardstream-cache-1" / "parts").write_bytes(b"")
    with pytest.warns(CacheWarning, match="Not a directory"):
        source.through(cache, 0, 5)
    source.through(cache, 0, 5)  # no second warning
    (folder / "shardstream-cache-1" / "parts").unlink()
    source.through(cache, 0, 5)
    assert chunks(folder) == []
    later = time.monotonic() + 61
    monkeypatch.setattr("time.monotonic", lambda: later)
    source.through(cache, 0, 5)
    assert len(chunks(folder)) == 1


def test_folder_that_cannot_be_created_causes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "cannot write to the cache /proc/no-such-place/.*: No such file or directory; reads continue without it"
    with pytest.warns(CacheWarning, match=message):
        cache = Cache("/proc/no-such-place/cache", ROOM)
    assert Source().through(cache, 0, 5) == DATA[:5]


# --- several processes


def read_all(folder: Path, room: int, seed: int, rounds: int, results: Any) -> None:
    """Read all files; each process of these tests runs this."""
    source, cache = Source(), cached(folder, room)
    starts = list(range(0, len(DATA), 250_000))
    for turn in range(rounds):
        random.Random(seed + turn).shuffle(starts)
        for start in starts:
            end = min(start + 250_000, len(DATA))
            assert source.through(cache, start, end) == DATA[start:end]
    results.put(source.bytes_read)


def start_all(
    folder: Path, room: int, count: int, rounds: int
) -> tuple[list[multiprocessing.process.BaseProcess], Any]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=read_all, args=(folder, room, seed, rounds, results))
        for seed in range(count)
    ]
    for worker in workers:
        worker.start()
    return list(workers), results


@pytest.mark.parametrize("room", [pytest.param(ROOM, marks=pytest.mark.slow), 4 * MIB])
def test_concurrent_processes_stay_within_the_cache_size(folder: Path, room: int) -> None:
    workers, results = start_all(folder, room, 2, rounds=3)
    most = 0
    while any(worker.is_alive() for worker in workers):
        most = max(most, used_bytes(folder))
        time.sleep(0.002)
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert most <= room
    assert parts(folder) == []
    again = Source()
    assert again.through(cached(folder, room)) == DATA
    if room == ROOM:
        assert again.reads == []
        assert sum(results.get(timeout=300) for _ in workers) <= 2 * len(DATA)


WRITE_FOR_EVER = """
    import itertools, sys
    from tests.storage.test_cache import MIB, Source, cached, Path
    cache = cached(Path(sys.argv[1]), 20 * MIB)
    print("ready", flush=True)
    for number in itertools.count():
        Source(version=f"ETag {number}").through(cache)
"""


@pytest.mark.slow
def test_processes_killed_during_a_write_leave_no_files(folder: Path) -> None:
    for wait_s in (0.05, 0.1, 0.02, 0.07):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITE_FOR_EVER), folder], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(wait_s)
            writer.send_signal(signal.SIGKILL)
    (parts(folder) or [folder / "shardstream-cache-1" / "parts" / "left"])[0].write_bytes(b"x" * 9)
    left = parts(folder)
    for path in left:
        os.utime(path, (time.time() - 61, time.time() - 61))
    source, cache = Source(version="ETag of another"), cached(folder, 20 * MIB)
    for _ in range(2):
        assert source.through(cache) == DATA
    assert len(source.reads) == 1  # no lock is left
    assert parts(folder) == []
    for number in range(40):  # all chunks of killed processes are complete
        assert Source(version=f"ETag {number}").through(cache) == DATA
    assert used_bytes(folder) <= 20 * MIB


def test_an_old_part_is_deleted_even_if_it_is_a_link_and_a_fresh_one_stays(
    folder: Path, tmp_path: Path
) -> None:
    cache, left = cached(folder), folder / "shardstream-cache-1" / "parts"
    (left / "old").symlink_to(tmp_path / "nowhere")
    os.utime(left / "old", (1, 1), follow_symlinks=False)
    (left / "fresh").touch()  # another process may be writing it
    Source().through(cache, 0, 5)
    assert parts(folder) == [left / "fresh"]


@pytest.mark.parametrize("name", ["total", "evicting"])
def test_lock_that_another_process_holds_is_not_waited_for(folder: Path, name: str) -> None:
    old = Source(url="s3://bucket/b.tar")
    old.through(cached(folder, 6 * MIB))
    source, cache = Source(), cached(folder, 6 * MIB)
    with (folder / "shardstream-cache-1" / name).open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert source.through(cache) == DATA
        assert source.through(cache) == DATA
    assert len(source.reads) == 2
    source.through(cache)
    source.through(cache)
    assert len(source.reads) == 3


def test_a_lock_that_another_process_holds_for_a_moment_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cached(folder)
    with (folder / "shardstream-cache-1" / "total").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(held, fcntl.LOCK_UN))
        Source().through(cache, 0, 5)
    assert len(chunks(folder)) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_forked_during_a_write_keeps_no_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_replace, children = os.replace, list[int]()
    test_has_ended, end_test = os.pipe()

    def fork_first(*paths: str) -> None:  # as another thread may, while the lock is held
        if not children:
            child = os.fork()
            if child == 0:
                os.close(end_test)
                os.read(test_has_ended, 1)
                os._exit(0)
            children.append(child)
        really_replace(*paths)

    monkeypatch.setattr(os, "replace", fork_first)
    Source().through(cached(folder), 0, 5)
    other = Source(url="s3://bucket/b.tar")
    for _ in range(2):
        other.through(cached(folder), 0, 5)
    os.close(end_test)
    os.close(test_has_ended)
    for child in children:
        os.waitpid(child, 0)
    assert (len(children), len(other.reads)) == (1, 1)


# --- options, and reads through `Storage`


@pytest.mark.parametrize(
    ("cache_dir", "cache_bytes", "message"),
    [
        (None, "1GB", "cache_bytes is set without cache_dir"),
        ("s3://bucket/cache", None, "a folder on this machine"),
        ("", None, "a folder on this machine"),
        ("here", "many", "is not a size"),
        ("here", 1000, "4,194,304 or more"),
        (__file__, None, "cache_dir is not a folder"),
    ],
)
def test_invalid_options_are_refused(
    cache_dir: str | None, cache_bytes: Any, message: str, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=message):
        open_cache(cache_dir, cache_bytes)


def test_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(folder)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(OptionError, match="belongs to another user"):
        cached(folder)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_folder_that_others_can_write_is_refused(folder: Path, mode: int) -> None:
    cached(folder)
    (folder / "shardstream-cache-1").chmod(mode)
    with pytest.raises(OptionError, match=f"can be written by others \\(mode {mode:o}"):
        cached(folder)
    (folder / "shardstream-cache-1").chmod(0o755)
    cached(folder)


def test_folder_that_is_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    cached(folder)
    (folder / "shardstream-cache-1").rename(tmp_path / "elsewhere")
    (folder / "shardstream-cache-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OptionError, match="is a link; delete it"):
        cached(folder)
    (tmp_path / "other").symlink_to(folder)  # a link that the user names is allowed
    (folder / "shardstream-cache-1").unlink()
    cached(tmp_path / "other")


def test_chunk_that_is_a_link_is_read_from_its_source(folder: Path, tmp_path: Path) -> None:
    """Even if its target looks valid."""
    source = Source()
    source.through(cached(folder), 0, MIB)
    [path] = chunks(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    before = len(source.reads)
    assert source.through(cached(folder), 0, MIB) == DATA[:MIB]
    assert len(source.reads) == before + 1
    assert not path.is_symlink()


def test_no_lock_is_made_or_taken_through_a_link(folder: Path, tmp_path: Path) -> None:
    cached(folder)
    target = tmp_path / "elsewhere"
    (folder / "shardstream-cache-1" / "evicting").symlink_to(target)

    def fill() -> None:
        for number in range(4):  # more than fits
            Source(version=f"ETag {number}").through(cached(folder, 6 * MIB))

    with pytest.warns(CacheWarning, match="cannot write to the cache"):
        fill()
    assert not target.exists()


def test_usage_count_that_is_a_link_is_ignored(folder: Path, tmp_path: Path) -> None:
    """Even if its target looks valid."""
    Source(version="ETag 0").through(cached(folder))
    count = folder / "shardstream-cache-1" / "total"
    count.rename(tmp_path / "elsewhere")
    count.symlink_to(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    source = Source()
    with pytest.warns(CacheWarning, match="cannot write to the cache"):
        source.through(cached(folder), 0, 10)
    assert source.reads == [(0, 10)]  # not the whole chunk, because it cannot be cached
    assert (tmp_path / "elsewhere").read_bytes() == before


def test_remote_files_are_read_through_the_cache_and_local_ones_are_not(
    folder: Path, tmp_path: Path
) -> None:
    storage = Storage(cache=cached(folder))
    url = f"memory://cache-{random.getrandbits(64):x}/a.tar"
    filesystem, path = storage.resolve(url)
    filesystem.pipe_file(path, DATA)
    assert storage.read(url, 5, 9) == DATA[5:9]  # looked up, because no listing has it
    assert len(chunks(folder)) == 1
    filesystem.rm(path)
    assert storage.read(url, 7, MIB) == DATA[7:MIB]
    with pytest.raises(NotFoundError):
        Storage(cache=cached(folder)).read(url, 7, MIB)
    (tmp_path / "b.tar").write_bytes(DATA)
    assert storage.read(str(tmp_path / "b.tar"), 5, 9) == DATA[5:9]
    assert len(chunks(folder)) == 1


def test_file_replaced_after_the_listing_is_not_cached_under_the_old_version(
    folder: Path, bucket: str, s3: S3Server
) -> None:
    url = f"{bucket}/a.tar"
    publish_bytes(Storage(s3.storage_options), url, DATA)
    storage = Storage(s3.storage_options, cache=cached(folder))
    storage.info(url)
    publish_bytes(Storage(s3.storage_options), url, bytes(len(DATA)))
    with pytest.raises(ChangedError, match="the file changed while it was read: its version was"):
        storage.read(url, 0, 10)
    assert chunks(folder) == []
    assert Storage(s3.storage_options, cache=cached(folder)).read(url, 0, 10) == bytes(10)


def test_replaced_file_can_be_read_whole_but_not_by_range(bucket: str, s3: S3Server) -> None:
    url, storage = f"{bucket}/index.json", Storage(s3.storage_options)
    for data in (b"old!", b"new!"):
        publish_bytes(Storage(s3.storage_options), url, data)
        assert storage.read(url) == data
    assert storage.read(url, 0, 2) == b"ne"
    publish_bytes(Storage(s3.storage_options), url, b"last")
    with pytest.raises(ChangedError, match="the file changed while it was read: its version was"):
        storage.read(url, 0, 2)


def test_cache_warning_is_public() -> None:
    assert ss.errors.CacheWarning is CacheWarning
