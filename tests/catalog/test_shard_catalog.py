from __future__ import annotations

import multiprocessing
import pickle
import struct
import threading
import uuid
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.catalog import ShardCatalog, choose_samples, lacks_index
from shardstream.errors import (
    IndexMismatchError,
    OptionError,
    ShardError,
    ShardStreamError,
    StorageError,
)
from shardstream.format import Manifest, ShardInfo, encode_manifest
from shardstream.storage import RangeResponse, Storage, locate_shards, map_file, publish_bytes
from tests.limits import set_limits
from tests.servers import S3Server
from tests.small_datasets import numbered
from tests.strategies import make_index, make_shard

CHUNK = "shardstream.catalog.shard_catalog.INDEX_CHUNK_SAMPLES"
UNEQUAL = (3, 0, 1, 0, 0, 5, 2, 0)


def new_folder() -> str:
    return f"memory://test-{uuid.uuid4().hex}"


def write_dataset(folder: str, counts: tuple[int, ...], *, storage: Storage | None = None) -> None:
    """Write shards with running keys, each with its index."""
    first = 0
    for number, count in enumerate(counts):
        tar = make_shard(count, first=first, body_bytes=number * 300)
        publish_bytes(storage or Storage(), f"{folder}/{number:03d}.tar", tar)
        publish_bytes(storage or Storage(), f"{folder}/{number:03d}.tar.idx", make_index(tar))
        first += count


def open_catalog(folder: str, *, storage: Storage | None = None) -> ShardCatalog:
    storage = storage or Storage()
    return ShardCatalog(locate_shards(folder, storage), storage)


def read_keys(catalog: ShardCatalog) -> list[str]:
    return [catalog.read_sample(number)["__key__"] for number in range(len(catalog))]


# --- numbers -> bytes


@settings(max_examples=20)
@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=6).map(tuple))
def test_sample_numbers_continue_over_unequal_and_empty_shards(counts: tuple[int, ...]) -> None:
    folder = new_folder()
    write_dataset(folder, counts)
    catalog = open_catalog(folder)
    assert len(catalog) == sum(counts)
    assert read_keys(catalog) == [f"{number:04d}" for number in range(sum(counts))]


def test_extents_have_the_order_of_the_request() -> None:
    folder = new_folder()
    write_dataset(folder, UNEQUAL)
    catalog = open_catalog(folder)
    wanted = [10, 0, 3, 3, 8, 4]
    shards, starts, ends = catalog.extents(wanted)
    assert shards.tolist() == [6, 0, 2, 2, 5, 5]
    for number, shard, start, end in zip(wanted, shards, starts, ends, strict=True):
        info = catalog.shards[shard]
        assert catalog.storage.read(info.url, start, end)[:4] == b"%04d" % number
    assert [len(column) for column in catalog.extents([])] == [0, 0, 0]
    assert [column.dtype.name for column in catalog.extents([])] == ["int64"] * 3


@pytest.mark.parametrize("numbers", [[-1], [11], [0, 11], [1 << 62]])
def test_sample_numbers_out_of_range_raise_index_error(numbers: list[int]) -> None:
    folder = new_folder()
    write_dataset(folder, UNEQUAL)
    with pytest.raises(IndexError, match="sample numbers go from 0 to 10, requested"):
        open_catalog(folder).extents(numbers)


def test_sample_is_a_plain_dict() -> None:
    folder = new_folder()
    write_dataset(folder, (2,))
    sample = open_catalog(folder).read_sample(1)
    assert sample == {"__key__": "0001", "__url__": f"{folder}/000.tar", "x": b"0001"}


def test_totals_and_fingerprint_change_with_the_dataset() -> None:
    one, copy, other = new_folder(), new_folder(), new_folder()
    for folder, counts in ((one, (2, 3)), (copy, (2, 3)), (other, (3, 2))):
        write_dataset(folder, counts)
    sizes = [shard.filesize for shard in open_catalog(one).shards]
    assert open_catalog(one).total_bytes == sum(size or 0 for size in sizes)
    assert open_catalog(one).fingerprint == open_catalog(copy).fingerprint
    assert open_catalog(one).fingerprint != open_catalog(other).fingerprint


# --- without an index


def test_local_tars_without_an_index_are_scanned(tmp_path: Path) -> None:
    write_dataset(str(tmp_path / "with"), UNEQUAL)
    write_dataset(str(tmp_path / "without"), UNEQUAL)
    for index in (tmp_path / "without").glob("*.idx"):
        index.unlink()
    with_index, without = (
        open_catalog(str(tmp_path / "with")),
        open_catalog(str(tmp_path / "without")),
    )
    assert read_keys(without) == read_keys(with_index)
    assert without.fingerprint == with_index.fingerprint
    assert [list(c) for c in without.extents([0, 10])] == [list(c) for c in with_index.extents([0, 10])]  # fmt: skip


def test_scan_that_contradicts_the_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(make_shard(3))
    manifest = Manifest(shards=(ShardInfo(url="a.tar", nsamples=4),))
    (tmp_path / "index.json").write_bytes(encode_manifest(manifest))
    with pytest.raises(IndexMismatchError, match=r"the tar holds 3 samples, the manifest says 4"):
        open_catalog(str(tmp_path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"the file is empty: not a tar"),
        (make_shard(3)[:700], r"is cut"),
        (b"x" * 2048, r"not a tar file"),
    ],
)
def test_damaged_local_tar_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(ShardError, match=f"{message}.*a\\.tar, at byte 0"):
        open_catalog(str(tmp_path))


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "a.tar.zst"])
def test_shards_without_index_cannot_be_read_by_number(name: str, tmp_path: Path) -> None:
    folder = new_folder() if name == "a.tar" else str(tmp_path)
    publish_bytes(Storage(), f"{folder}/{name}", make_shard(1))
    located = locate_shards(folder, Storage())
    assert lacks_index(located, Storage()) == f"{folder}/{name}"
    with pytest.raises(OptionError, match=rf"no index, so .* run 'shardstream index'.*/{name}"):
        ShardCatalog(located, Storage())


def test_indexed_and_local_tars_need_no_index_file(tmp_path: Path) -> None:
    write_dataset(str(tmp_path), (1, 2))
    (tmp_path / "000.tar.idx").unlink()
    assert lacks_index(locate_shards(str(tmp_path), Storage()), Storage()) is None


# --- wrong indexes


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (struct.pack("<3Q", 0, 1024, 99 * 512), "ends at byte 50688, but the tar ends at"),
        (struct.pack("<3Q", 0, 512, 256), "growing multiples of 512"),
        (bytes(17), "an index of 17 bytes is cut"),
        (struct.pack("<3Q", 512, 1024, 2048), "not a tar header|checksum"),
        (struct.pack("<3Q", 0, 2048, 2560), "two samples, '0000' and '0001'"),
    ],
)
def test_index_that_contradicts_its_tar_is_refused(index: bytes, message: str) -> None:
    folder = new_folder()
    write_dataset(folder, (2, 1))
    publish_bytes(Storage(), f"{folder}/000.tar.idx", index)
    with pytest.raises(ShardError, match=message) as raised:
        read_keys(open_catalog(folder))
    assert (raised.value.shard or "").startswith(f"{folder}/000.tar")


def test_index_with_another_count_than_the_manifest_is_refused() -> None:
    folder = new_folder()
    write_dataset(folder, (2,))
    manifest = Manifest(shards=(ShardInfo(url="000.tar", nsamples=3, filesize=9999),))
    publish_bytes(Storage(), f"{folder}/index.json", encode_manifest(manifest))
    with pytest.raises(
        IndexMismatchError, match=r"has 2 samples, the manifest says 3.*000\.tar\.idx"
    ):
        open_catalog(folder).read_sample(0)


def test_shard_cut_after_indexing_is_refused() -> None:
    folder = new_folder()
    write_dataset(folder, (3,))
    catalog = open_catalog(folder)
    whole = Storage().read(f"{folder}/000.tar")
    publish_bytes(Storage(), f"{folder}/000.tar", whole[:1600])
    with pytest.raises(StorageError, match=r"has 1600 bytes, the manifest.*index' again.*000\.tar"):
        catalog.read_sample(2)


# --- memory, threads and processes


def test_indexes_are_read_once_and_the_least_recently_used_is_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = new_folder()
    write_dataset(folder, (1, 1, 1, 1))
    set_limits(
        monkeypatch, ShardCatalog, OFFSETS_KEPT_BYTES=2 * 16
    )  # room for two indexes of one sample
    catalog = open_catalog(folder)
    reads: list[str] = []
    original = catalog.storage.read_once

    def read_once(url: str, *args: Any, **options: Any) -> RangeResponse:
        reads.append(url[-len("000.tar.idx") : -len(".tar.idx")])
        return original(url, *args, **options)

    monkeypatch.setattr(catalog.storage, "read_once", read_once)
    for shard in (0, 1, 0, 1, 2, 1, 0, 0, 3, 0):
        assert catalog.offsets(shard).tolist() == [0, 1024 if shard == 0 else 1024 + 512 * (shard > 1)] or shard  # fmt: skip
    assert reads == ["000", "001", "002", "000", "003"]


def test_index_larger_than_the_memory_limit_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_folder()
    write_dataset(folder, (3, 3))
    set_limits(monkeypatch, ShardCatalog, OFFSETS_KEPT_BYTES=1)
    catalog = open_catalog(folder)
    assert read_keys(catalog) == [f"{number:04d}" for number in range(6)]
    assert vars(catalog)["_kept_bytes"] == 4 * 8


def test_threads_share_a_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new_folder()
    write_dataset(folder, (4,) * 8)
    set_limits(monkeypatch, ShardCatalog, OFFSETS_KEPT_BYTES=3 * 5 * 8)
    catalog = open_catalog(folder)
    barrier = threading.Barrier(4)

    def read(offset: int) -> list[str]:
        barrier.wait(timeout=300)
        numbers = [(number * 7 + offset) % 32 for number in range(96)]
        return [catalog.read_sample(number)["__key__"] for number in numbers if number % 32 == number]  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        for offset, keys in enumerate(pool.map(read, range(4))):
            assert keys == [f"{(number * 7 + offset) % 32:04d}" for number in range(96)]
    kept = vars(catalog)["_kept"]
    assert vars(catalog)["_kept_bytes"] == sum(offsets.nbytes for offsets in kept.values()) <= 120


def test_pickled_catalog_omits_a_large_index_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dataset(str(tmp_path), (400, 1))
    (tmp_path / "001.tar.idx").unlink()  # a scanned index is pickled
    catalog = open_catalog(str(tmp_path))
    before = len(pickle.dumps(catalog))
    keys = read_keys(catalog)
    assert len(pickle.dumps(catalog)) > before
    set_limits(monkeypatch, ShardCatalog, OFFSETS_SENT_BYTES=0)
    assert len(pickle.dumps(catalog)) == before < 4000
    again = pickle.loads(pickle.dumps(catalog))  # noqa: S301  (our own bytes)
    assert (read_keys(again), again.fingerprint) == (keys, catalog.fingerprint)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_catalog_on_s3_works_in_a_forked_child(s3: S3Server, bucket: str) -> None:
    storage = Storage(s3.storage_options)
    write_dataset(bucket, (2, 2), storage=storage)
    catalog = open_catalog(bucket, storage=storage)
    assert catalog.read_sample(0)["__key__"] == "0000"
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(catalog.read_sample, 3).result(timeout=30)["__key__"] == "0003"
    assert catalog.read_sample(1)["__key__"] == "0001"


# --- local files


def test_mapped_file_holds_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(b"1234")
    mapped = map_file(str(path), "a.tar")
    path.unlink()
    assert mapped[1:3] == b"23"


def test_unmappable_file_raises_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"not found.*in a\.tar"):
        map_file(str(tmp_path / "none.tar"), "a.tar")


def test_memory_filesystem_is_not_local() -> None:
    assert Storage(filesystem=fsspec.filesystem("memory")).local_path("a.tar") is None


# --- indexes of many samples


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(0, 13), min_size=1, max_size=4).map(tuple),
    chunk=st.integers(1, 6),
    data=st.data(),
)
def test_chunks_of_indexes_give_the_same_extents_as_whole_indexes(
    counts: tuple[int, ...], chunk: int, data: st.DataObject
) -> None:
    folder = new_folder()
    write_dataset(folder, counts)
    total = sum(counts)
    numbers = data.draw(st.lists(st.integers(0, max(0, total - 1)), max_size=20 if total else 0))
    expected = open_catalog(folder).extents(numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CHUNK, chunk)
        catalog = open_catalog(folder)
        for one in catalog.index_chunks(np.array(numbers, dtype=np.int64)):
            catalog.load_index(one)
        found = catalog.extents(numbers)
        whole = [catalog.offsets(shard).tolist() for shard in range(len(counts))]
    assert [column.tolist() for column in found] == [column.tolist() for column in expected]
    assert [len(offsets) - 1 for offsets in whole] == list(counts)


@pytest.mark.parametrize("place", ["local", "memory", "s3"])
def test_of_a_large_index_the_parts_that_are_needed_are_read(
    place: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = {"local": str(tmp_path), "memory": new_folder(), "s3": ""}[place]
    if place == "s3":
        request.getfixturevalue("s3_env")
        folder = f"{request.getfixturevalue('bucket')}/data"
    with ss.ShardWriter(folder, max_samples=20_000, max_bytes="1GB") as writer:
        for number in range(30_000):
            writer.write({"__key__": f"{number:05d}", "txt": ""})
    reads: list[tuple[str, int, int | None]] = []
    read = Storage.read

    def spy(self: Storage, url: str, start: int = 0, end: int | None = None, **hints: Any) -> bytes:
        reads.append((url.rsplit("/", 1)[-1], start, end))
        return read(self, url, start, end, **hints)

    catalog = open_catalog(folder)
    catalog._kept.clear()  # small indexes come with the manifest
    monkeypatch.setattr(Storage, "read", spy)
    wanted = [19_999, 8_191, 8_192, 29_999, 12]
    assert [catalog.read_sample(n)["__key__"] for n in wanted] == [f"{n:05d}" for n in wanted]
    assert reads == [
        ("000000.tar.idx", 131_072, 160_008),
        ("000000.tar.idx", 0, 65_544),
        ("000000.tar.idx", 65_536, 131_080),
        ("000001.tar.idx", 65_536, 80_008),
    ]


@pytest.mark.parametrize("place", ["local", "memory"])
@pytest.mark.parametrize(
    "change",
    [
        lambda index: index[:-8],
        lambda index: index + index[-8:],
        lambda index: index[:16] + index[8:16] + index[24:],
        lambda index: index[:-8] + struct.pack("<Q", 1 << 40),
    ],
)
def test_a_large_index_that_is_wrong_is_refused(
    place: str, change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHUNK, 4)
    folder = str(tmp_path) if place == "local" else new_folder()
    with ss.ShardWriter(folder) as writer:
        for number in range(7):
            writer.write({"__key__": f"{number:05d}", "txt": ""})
    index = Storage().read(f"{folder}/000000.tar.idx")
    publish_bytes(Storage(), f"{folder}/000000.tar.idx", change(index))
    with pytest.raises(ShardStreamError, match=r"000000\.tar\.idx"):
        read_keys(open_catalog(folder))


def test_part_of_a_subset_refuses_samples_that_it_lacks(tmp_path: Path) -> None:
    folder = numbered(tmp_path, 12, 4)
    whole = ShardCatalog(locate_shards(folder, Storage()), Storage())
    part = choose_samples(whole, [0, 5, 9]).restrict_to(np.array([0, 2]))
    fetcher = part.open_fetcher()
    assert len(fetcher.samples(np.array([0, 2]))) == 2
    for numbers in ([1], [0, 1, 2]):
        with pytest.raises(IndexError, match="lacks"):
            fetcher.samples(np.array(numbers))
