"""Datasets of so many shards that their manifest has a file of records; here from four shards on, three in each chunk."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream.catalog import ShardCatalog, list_shards
from shardstream.errors import (
    ChangedError,
    ManifestError,
    NotFoundError,
    OptionError,
    ShardStreamError,
    SourceError,
)
from shardstream.format import (
    BinaryManifest,
    Manifest,
    Records,
    ShardInfo,
    decode_manifest,
    encode_manifest_files,
    is_records_name,
)
from shardstream.storage import Storage, locate_shards, publish_bytes
from tests.limits import set_limits
from tests.small_datasets import flat, labels, loader, numbered, take

COUNT = 100
ARRAY = np.zeros((2, 3), dtype=np.int32)


@pytest.fixture(autouse=True)
def _few_shards_in_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, decode_manifest, MAX_LISTED_SHARDS=4)
    set_limits(monkeypatch, is_records_name, CHUNK_SHARDS=3)


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest) -> str:
    """URL of a dataset of 100 samples in 10 shards, with a binary manifest."""
    if request.param == "local":
        place = f"{request.getfixturevalue('tmp_path')}/data"
    elif request.param == "memory":
        place = f"memory://test-{uuid.uuid4().hex}"
    else:
        request.getfixturevalue("s3_env")
        place = f"{request.getfixturevalue('bucket')}/data"
    return numbered(place, COUNT, 10)


def files_of(folder: str) -> dict[str, bytes]:
    """Return the files of the manifest."""
    storage = Storage()
    names = [file.url.rsplit("/", 1)[-1] for file in storage.list_folder(folder)[0]]
    mine = [name for name in names if name == "index.json" or is_records_name(name)]
    return {name: storage.read(f"{folder}/{name}") for name in mine}


def put(folder: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        publish_bytes(Storage(), f"{folder}/{name}", data)


def listed_copy(folder: Path) -> str:
    """Return a copy of a local dataset whose manifest lists all shards."""
    copy = shutil.copytree(folder, folder.parent / "listed")
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, decode_manifest, MAX_LISTED_SHARDS=1000)
        ss.index(str(copy))
    return str(copy)


def test_samples_are_those_of_the_dataset_in_any_order(folder: str) -> None:
    assert len(files_of(folder)) == 2
    assert flat(labels(loader(folder))) == list(range(COUNT))
    shuffled = flat(labels(loader(folder, shuffle=True)))
    assert sorted(shuffled) == list(range(COUNT)) != shuffled
    assert int(ss.ShardDataset(folder).by_number().decode()[57]["cls"]) == 57


def test_order_and_state_are_those_of_a_manifest_that_lists_all_shards(tmp_path: Path) -> None:
    binary = numbered(tmp_path / "data", COUNT, 10)
    listed = listed_copy(tmp_path / "data")
    kinds = [
        json.loads(Path(one, "index.json").read_text())["__kind__"] for one in (binary, listed)
    ]
    assert kinds == ["shardstream-binary-index-v1", "wids-shard-index-v1"]
    orders = [flat(labels(loader(one, shuffle=True, seed=3))) for one in (binary, listed)]
    assert orders[0] == orders[1]
    reader = loader(listed, shuffle=True, seed=3)
    seen = flat(labels(take(reader, 4)))
    resumed = loader(binary, shuffle=True, seed=3)
    resumed.load_state_dict(reader.state_dict())
    assert seen + flat(labels(resumed)) == orders[0]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_the_chunks_that_they_need(folder: str, method: str) -> None:
    if folder.startswith("memory:"):
        pytest.skip("only this process has the files")
    dataset = ss.ShardDataset(folder, shuffle=True).decode()
    reader = ss.ShardLoader(dataset, 8, num_workers=2, multiprocessing_context=method)
    for _ in range(2):
        assert sorted(flat(labels(reader))) == list(range(COUNT))


def test_commands_read_a_binary_manifest(folder: str) -> None:
    assert ss.verify(folder).problems == ()
    listing = list_shards(folder)
    assert (len(listing.shards), listing.nsamples) == (10, COUNT)
    assert [shard.url for shard in listing.shards] == [f"{folder}/{n:06d}.tar" for n in range(10)]
    dataset = ss.ShardDataset(folder)
    assert "10 shards, 100 samples" in repr(dataset)


def test_tars_that_are_named_have_their_entries(folder: str) -> None:
    found = locate_shards(f"{folder}/00000{{2..5}}.tar", Storage())
    assert [shard.url for shard in found.shards] == [f"{folder}/00000{n}.tar" for n in range(2, 6)]
    assert all(shard.nsamples == 10 and shard.sha256 for shard in found.shards)
    assert flat(labels(loader(f"{folder}/00000{{2..5}}.tar"))) == list(range(20, 60))


def test_tars_that_are_not_sorted_are_found_by_name(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "data", COUNT, 10)
    names = [f"{folder}/{number:06d}.tar" for number in (3, 1, 8, 0, 2, 9, 4, 7, 5, 6)]
    ss.index(names)
    assert flat(labels(loader(folder)))[:20] == [*range(30, 40), *range(10, 20)]
    found = locate_shards(names[4], Storage())
    assert (len(found.shards), found.shards[0].nsamples) == (1, 10)
    assert found.shards[0].sha256 is not None


def test_ranks_lists_and_mixes_read_all_samples(folder: str) -> None:
    parts = [
        flat(labels(loader(folder, placement=ss.Placement(rank, 2), shuffle=True)))
        for rank in range(2)
    ]
    assert sorted(label for part in parts for label in part) == list(range(COUNT))
    assert len(ss.ShardDataset([f"{folder}/000005.tar", f"{folder}/000003.tar"])) == 20
    with pytest.raises(OptionError, match="named twice"):
        ss.ShardDataset([folder, f"{folder}/000003.tar"])
    mixed = ss.mix([ss.ShardDataset(folder).decode(), ss.ShardDataset(folder).decode()])
    assert sorted(flat(labels(ss.ShardLoader(mixed, 8)))) == sorted([*range(COUNT)] * 2)


def test_verified_reads_compare_the_checksums_of_records(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "data", COUNT, 10)
    assert flat(labels(loader(folder, verify="sha256"))) == list(range(COUNT))
    tar = tmp_path / "data" / "000004.tar"
    data = bytearray(tar.read_bytes())
    data[700] ^= 1
    tar.write_bytes(data)
    with pytest.raises(ShardStreamError, match="sha256"):
        list(loader(folder, verify="sha256"))


# --- writing


def test_a_new_dataset_has_its_own_records_only(folder: str) -> None:
    old = files_of(folder)
    numbered(folder, COUNT + 1, 10, overwrite=True)
    new = files_of(folder)
    assert len(new) == len(old) == 2
    assert new.keys() & old.keys() == {"index.json"}
    assert ss.verify(folder).problems == ()
    numbered(folder, 12, 10, overwrite=True)  # few shards
    assert [*files_of(folder)] == ["index.json"]
    assert flat(labels(loader(folder))) == list(range(12))


def test_index_writes_records(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "data", COUNT, 10)
    before = files_of(folder)
    for name in before:
        (tmp_path / "data" / name).unlink()
    ss.index(folder)
    assert files_of(folder).keys() == before.keys()


def test_manifest_lists_all_shards_where_they_have_unusual_names() -> None:
    for name in ("more/{}.tar", "s3://b/{}.tar", "100%{}.tar"):
        shards = [ShardInfo(url=name.format(n), nsamples=1, filesize=1024) for n in range(9)]
        assert [*encode_manifest_files(Manifest(shards=shards))] == ["index.json"]
    uncounted = [ShardInfo(url=f"{n}.tar") for n in range(9)]
    assert [*encode_manifest_files(Manifest(shards=uncounted))] == ["index.json"]


# --- replaced while it is read


@pytest.mark.parametrize("suffix", ["", "-with-a-name-that-is-longer"])
def test_shards_that_are_added_during_an_epoch_are_no_error(folder: str, suffix: str) -> None:
    reader = loader(folder)
    batches = iter(reader)
    seen = flat(labels([next(batches)]))
    with ss.ShardWriter(f"{folder}-more", max_samples=10) as writer:
        for number in range(30):
            writer.write({"__key__": f"x{number:06d}", "cls": 1000 + number, "npy": ARRAY})
    storage = Storage()
    for number in range(3):
        data = storage.read(f"{folder}-more/{number:06d}.tar")
        put(folder, {f"{number + 10:06d}{suffix}.tar": data})
    ss.index(folder)
    assert len(locate_shards(folder, storage).shards) == 13
    assert seen + flat(labels(batches)) == list(range(COUNT))  # records are read from the new file
    assert len(flat(labels(loader(folder)))) == COUNT + 30


def test_another_dataset_in_its_place_ends_the_epoch(folder: str) -> None:
    batches = iter(loader(folder))
    next(batches)
    samples = [{"__key__": f"y{n:06d}", "cls": n, "npy": ARRAY} for n in range(COUNT)]
    with ss.ShardWriter(folder, max_samples=10, overwrite=True) as writer:
        for sample in samples:
            writer.write(sample)
    with pytest.raises(ChangedError):
        list(batches)


def test_a_smaller_dataset_in_its_place_is_named(tmp_path: Path) -> None:
    folder = numbered(f"memory://test-{uuid.uuid4().hex}", COUNT, 10)
    dataset = ss.ShardDataset(folder)
    numbered(folder, 12, 10, overwrite=True)  # without records
    with pytest.raises(ChangedError, match="replaced since it was opened"):
        list(dataset)


def test_some_shards_of_a_local_dataset_that_is_replaced_are_noticed(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "data", COUNT, 10)
    storage = Storage()
    part = ShardCatalog(locate_shards(folder, storage), storage).restrict_to(
        np.arange(70, 90)
    )  # as on Ray
    part.check_manifests()
    samples = [{"__key__": f"y{n:06d}", "cls": n, "npy": ARRAY} for n in range(COUNT)]
    with ss.ShardWriter(folder, max_samples=10, overwrite=True) as writer:
        for sample in samples:
            writer.write(sample)
    part.read_sample(70)  # the first use: there is no version of the file from before
    with pytest.raises(ChangedError, match="2 shards changed"):
        part.check_manifests()


def test_a_cache_does_not_hide_that_the_manifest_was_written_again(tmp_path: Path) -> None:
    folder = numbered(f"memory://test-{uuid.uuid4().hex}", COUNT, 10)
    dataset = ss.ShardDataset(folder, read=ss.ReadOptions(cache_dir=tmp_path)).decode()
    other = ss.ShardDataset(folder, read=ss.ReadOptions(cache_dir=tmp_path)).decode()
    put(folder, {"more.tar": Storage().read(f"{folder}/000000.tar")})
    ss.index(folder)
    assert [sample["cls"] for sample in dataset] == list(range(COUNT))
    numbered(folder, COUNT + 1, 7, overwrite=True)
    with pytest.raises(ChangedError):
        list(other)


def test_a_last_chunk_that_changes_ends_the_epoch(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "data", COUNT, 10)
    batches = iter(loader(folder))
    next(batches)
    other = numbered(tmp_path / "other", COUNT - 1, 10)
    shutil.copy(f"{other}/000009.tar", f"{folder}/000009.tar")
    ss.index(folder)
    with pytest.raises(ChangedError):
        list(batches)


# --- damaged or hostile files


def damaged(folder: str, change: Any) -> str:
    files = files_of(folder)
    document = json.loads(files["index.json"])
    change(document)
    put(folder, {"index.json": json.dumps(document).encode()})
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("records"),
        lambda d: d.pop("chunk_ends"),
        lambda d: d.update(records="../other.npy"),
        lambda d: d.update(records="shards-0123456789abcdef.npy/../../x"),
        lambda d: d.update(records=7),
        lambda d: d["chunk_sha256"].pop(),
        lambda d: d["chunk_sha256"].__setitem__(0, 7),
        lambda d: d.update(chunk_sha256="0123"),
        lambda d: d["chunk_ends"].reverse(),
        lambda d: d["chunk_ends"].append(1),
        lambda d: d["chunk_ends"].__setitem__(-1, 20 << 30),
        lambda d: d["chunk_ends"].__setitem__(0, -1),
        lambda d: d["chunk_ends"].__setitem__(0, 1e3),
        lambda d: d.update(chunk_ends=dict.fromkeys("0123", 1)),
        lambda d: d["chunk_names"].__setitem__(0, 7),
        lambda d: d["chunk_names"].pop(),
        lambda d: d.update(num_shards=0),
        lambda d: d.update(num_shards=13),
        lambda d: d.update(num_shards=1 << 70),
        lambda d: d.update(num_shards=True),
        lambda d: d.update(chunk_shards=0),
        lambda d: d.update(header_bytes=-1),
        lambda d: d.update(name_bytes=0),
        lambda d: d.update(name_bytes=1 << 30),
        lambda d: d.update(nsamples=COUNT + 1),
        lambda d: d.update(total_bytes=-1),
        lambda d: d.update(fingerprint="x"),
        lambda d: d.update(checksum="../x"),
        lambda d: d.update(fields=["cls"]),
        lambda d: d.update(version=2),
    ],
)
def test_an_inconsistent_manifest_is_refused(tmp_path: Path, change: Any) -> None:
    folder = damaged(numbered(tmp_path / "data", COUNT, 10), change)
    with pytest.raises(ManifestError, match=re.escape(f"{folder}/index.json")):
        ss.ShardDataset(folder)


def test_a_manifest_in_pages_of_before_names_the_remedy(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "data", COUNT, 10)
    damaged(folder, lambda d: d.update(__kind__="shardstream-paged-index-v1"))
    with pytest.raises(ManifestError, match="run 'shardstream index'"):
        ss.ShardDataset(folder)
    ss.index(folder)
    assert flat(labels(loader(folder))) == list(range(COUNT))


def records_of(folder: str) -> tuple[str, bytes]:
    """Return the name and the bytes of the file of records."""
    return next((name, data) for name, data in files_of(folder).items() if is_records_name(name))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"000004.tar", b"000005.tar"),
        lambda data: data[:-9],
        pytest.param(lambda data: data[:200], marks=pytest.mark.slow),
        pytest.param(lambda data: data[:0], marks=pytest.mark.slow),
        lambda data: b"\0" * 64 + data,
    ],
)
def test_damaged_records_are_an_error_that_names_the_file(folder: str, change: Any) -> None:
    name, data = records_of(folder)
    put(folder, {name: change(data)})
    with pytest.raises(ShardStreamError, match=re.escape(name)):
        list(loader(folder))
    assert ss.index(folder).manifest.nsamples == COUNT  # the old one is not needed
    assert flat(labels(loader(folder))) == list(range(COUNT))


def test_records_of_another_dataset_are_an_error(tmp_path: Path) -> None:
    folder, other = (numbered(tmp_path / one, COUNT, 10) for one in ("data", "other"))
    numbered(other, COUNT - 1, 10, overwrite=True)
    put(folder, {records_of(folder)[0]: records_of(other)[1]})
    with pytest.raises(ShardStreamError, match="does not match its sha256 in index.json"):
        list(loader(folder))


def test_missing_records_are_an_error_that_names_the_file(folder: str) -> None:
    name, _ = records_of(folder)
    filesystem, path = Storage().resolve(f"{folder}/{name}")
    filesystem.rm_file(path)
    message = f"records of the shards is missing, .*; fetch the whole folder.*{re.escape(name)}"
    with pytest.raises(NotFoundError, match=message):
        list(loader(folder))


def rewritten(folder: str, change: Any) -> str:
    """Change the records of a dataset, and write their checksums to ``index.json``, as no writer does."""
    files = files_of(folder)
    name, data = records_of(folder)
    manifest = decode_manifest(files["index.json"], url="index.json")
    assert isinstance(manifest, BinaryManifest)
    head, start = data[: manifest.header_bytes], manifest.header_bytes
    records = np.frombuffer(data[start:], manifest.files[0].record_type).copy()
    change(records)
    put(folder, {name: head + records.tobytes()})
    sums = [hashlib.sha256(records[at : at + 3].tobytes()).hexdigest() for at in range(0, 10, 3)]
    return damaged(folder, lambda document: document.update(chunk_sha256=sums))


def setting(column: str, place: int, value: Any) -> Any:
    def change(records: Records) -> None:
        records[column][place] = value

    return change


@pytest.mark.parametrize(
    "name", ["../0.tar", "/etc/0.tar", "s3://b/0.tar", "%2e%2ea.tar", "a\\b.tar", "", "..", "a\0b"]
)
def test_records_name_files_of_their_folder_only(tmp_path: Path, name: str) -> None:
    folder = numbered(tmp_path / "data", COUNT, 10)
    rewritten(folder, setting("name", 1, name.encode()))
    with pytest.raises(ManifestError, match="no file name"):
        list(loader(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setting("nsamples", 1, 1 << 59), "more samples than fit"),
        (setting("nsamples", 1, -1), "more samples than fit"),
        (setting("nsamples", 1, 9), "29 samples instead of 30"),
        (setting("filesize", 1, 0), "more samples than fit"),
        (setting("filesize", 1, -(1 << 63)), "more samples than fit"),
        (setting("filesize", 1, (1 << 63) - 1), "over total_bytes"),
        (setting("name", 1, b"000000.tar"), "000000.tar is listed twice"),
        (setting("name", 2, b"000003.tar"), "not sorted"),  # the first of the next chunk
        (setting("name", 3, b"000002.tar"), "the first shard is 000002.tar"),
        (setting("name", 4, b"000009.tar"), "not sorted"),
    ],
)
def test_records_that_no_writer_makes_are_refused(
    tmp_path: Path, change: Any, message: str
) -> None:
    folder = rewritten(numbered(tmp_path / "data", COUNT, 10), change)
    with pytest.raises(ManifestError, match=message):
        list(loader(folder))


def test_numpy_reads_the_records(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "data", COUNT, 10)
    records = np.load(f"{folder}/{records_of(folder)[0]}")
    assert records["name"].tolist() == [b"%06d.tar" % number for number in range(10)]
    assert records["nsamples"].tolist() == [10] * 10
    tar = Path(folder, "000003.tar").read_bytes()
    assert records[3]["filesize"] == len(tar)
    assert bytes(records[3]["sha256"]) == hashlib.sha256(tar).digest()


# --- many shards


def test_memory_and_pickles_do_not_grow_with_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # chunks of their real size
    shards = [
        ShardInfo(url=f"{n:07d}.tar", nsamples=10_000, filesize=10**8, sha256=f"{n:064x}")
        for n in range(200_000)
    ]
    put(str(tmp_path), encode_manifest_files(Manifest(shards=shards, fields={"txt": 1})))
    storage = Storage()
    located = locate_shards(str(tmp_path), storage)
    catalog = ShardCatalog(located, storage)
    assert (len(catalog), catalog.num_shards) == (2 * 10**9, 200_000)
    assert len(pickle.dumps(catalog)) < 100_000
    for number in range(0, 2 * 10**9, 9_999_999):  # each in another chunk
        found = catalog.shards_of(np.array([number]))
        assert found == [number // 10_000]
    assert len(catalog.shards._kept) <= 128  # type: ignore[attr-defined]
    assert located.shards[123_456].url == f"{tmp_path}/0123456.tar"


@pytest.mark.slow
def test_a_new_process_opens_a_pickled_dataset(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "data", COUNT, 10)
    (tmp_path / "dataset.pkl").write_bytes(pickle.dumps(ss.ShardDataset(folder).decode()))
    code = (
        "import pickle, sys; dataset = pickle.loads(open(sys.argv[1], 'rb').read()); "
        "print(sum(int(one['cls']) for one in dataset))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "dataset.pkl")],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert int(done.stdout) == sum(range(COUNT))


def test_index_deletes_the_records_of_an_earlier_version(tmp_path: Path) -> None:
    folder = numbered(f"{tmp_path}/data", COUNT, 10)
    before = files_of(folder)
    put(folder, {"index-pages-0123456789abcdef.jsonl": b"{}", "index-pages.jsonl": b"{}"})
    ss.index(folder)
    assert files_of(folder) == before
    assert (tmp_path / "data" / "index-pages.jsonl").exists()


# --- shards that are appended


def append(folder: str, first: int, count: int, per_shard: int) -> None:
    """Append ``count`` samples whose keys and labels go on from ``first``."""
    with ss.ShardWriter(folder, append=True, max_samples=per_shard) as writer:
        for number in range(first, first + count):
            writer.write({"__key__": f"{number:06d}", "cls": number, "npy": ARRAY})


def records_files(folder: str) -> list[str]:
    document = json.loads(files_of(folder)["index.json"])
    return [document["records"], *(one["records"] for one in document.get("further", ()))]


def test_appended_shards_are_read_as_the_others(folder: str) -> None:
    end = COUNT
    first = files_of(folder)
    for count in (1, 10, 3, 30, 1, 1, 7):
        append(folder, end, count, 4)
        end += count
        assert flat(labels(loader(folder))) == list(range(end))
    shuffled = flat(labels(loader(folder, shuffle=True)))
    assert sorted(shuffled) == list(range(end)) != shuffled
    assert int(ss.ShardDataset(folder).by_number().decode()[end - 1]["cls"]) == end - 1
    assert flat(labels(loader(folder, version=3))) == list(range(COUNT + 11))
    (records,) = first.keys() - {"index.json"}
    assert records_files(folder)[0] == records  # it is not written again
    assert files_of(folder)[records] == first[records]


def test_one_shard_at_a_time_makes_few_files(tmp_path: Path) -> None:
    url = numbered(tmp_path / "data", COUNT, 10)
    for number in range(COUNT, COUNT + 30):
        append(url, number, 1, 1)
    assert len(records_files(url)) <= 5
    assert flat(labels(loader(url))) == list(range(COUNT + 30))
    ss.versions.gc(url, keep=1, dry_run=False)
    assert flat(labels(loader(url))) == list(range(COUNT + 30))
    tars = [shard.url for shard in locate_shards(url, Storage()).shards]
    named = [int(sample["cls"]) for sample in ss.ShardDataset(tars[-3:])]
    assert named == list(range(COUNT + 27, COUNT + 30))
    with pytest.raises(SourceError, match=f"'{COUNT + 3:06d}'"):
        append(url, COUNT + 3, 1, 1)


def test_a_list_becomes_records_when_shards_are_appended(tmp_path: Path) -> None:
    url = numbered(tmp_path / "data", 30, 10)
    append(url, 30, 40, 10)
    assert len(records_files(url)) == 1
    append(url, 70, 5, 10)
    assert flat(labels(loader(url))) == list(range(75))
    assert flat(labels(loader(url, version=1))) == list(range(30))


def test_an_opened_dataset_stays_that_of_its_version(folder: str) -> None:
    reader = loader(folder)
    before = take(reader, 2)
    append(folder, COUNT, 20, 4)
    rest = loader(folder, version=1)
    rest.load_state_dict(reader.state_dict())
    assert flat(labels(before)) + flat(labels(rest)) == list(range(COUNT))
