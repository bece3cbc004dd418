"""Datasets of so many shards that their manifest is written in pages; here from four shards on, three in each page."""

from __future__ import annotations

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
from shardstream.errors import ChangedError, ManifestError, OptionError, ShardStreamError
from shardstream.format import (
    Manifest,
    ManifestPage,
    PagedManifest,
    ShardInfo,
    decode_manifest,
    decode_page,
    encode_manifest_files,
    encode_page,
    is_pages_name,
)
from shardstream.storage import Storage, locate_shards, publish_bytes
from tests.small_datasets import flat, labels, loader, numbered, take

PAGES = "shardstream.format.manifest_pages"
COUNT = 100
ARRAY = np.zeros((2, 3), dtype=np.int32)


@pytest.fixture(autouse=True)
def _few_shards_in_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{PAGES}.MAX_LISTED_SHARDS", 4)
    monkeypatch.setattr(f"{PAGES}.PAGE_SHARDS", 3)


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest) -> str:
    """URL of a dataset of 100 samples in 10 shards, with a manifest in pages."""
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
    mine = [name for name in names if name == "index.json" or is_pages_name(name)]
    return {name: storage.read(f"{folder}/{name}") for name in mine}


def put(folder: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        publish_bytes(Storage(), f"{folder}/{name}", data)


def unpaged(folder: Path) -> str:
    """Return a copy of a local dataset whose manifest lists all shards."""
    copy = shutil.copytree(folder, folder.parent / "listed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{PAGES}.MAX_LISTED_SHARDS", 1000)
        ss.index(str(copy))
    return str(copy)


def test_samples_are_those_of_the_dataset_in_any_order(folder: str) -> None:
    assert len(files_of(folder)) == 2
    assert flat(labels(loader(folder))) == list(range(COUNT))
    shuffled = flat(labels(loader(folder, shuffle=True)))
    assert sorted(shuffled) == list(range(COUNT)) != shuffled
    assert int(ss.ShardDataset(folder).by_number().decode()[57]["cls"]) == 57


def test_order_and_state_are_those_of_a_manifest_that_lists_all_shards(tmp_path: Path) -> None:
    paged = numbered(tmp_path / "data", COUNT, 10)
    listed = unpaged(tmp_path / "data")
    kinds = [json.loads(Path(one, "index.json").read_text())["__kind__"] for one in (paged, listed)]
    assert kinds == ["shardstream-paged-index-v1", "wids-shard-index-v1"]
    orders = [flat(labels(loader(one, shuffle=True, seed=3))) for one in (paged, listed)]
    assert orders[0] == orders[1]
    reader = loader(listed, shuffle=True, seed=3)
    seen = flat(labels(take(reader, 4)))
    resumed = loader(paged, shuffle=True, seed=3)
    resumed.load_state_dict(reader.state_dict())
    assert seen + flat(labels(resumed)) == orders[0]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_the_pages_that_they_need(folder: str, method: str) -> None:
    if folder.startswith("memory:"):
        pytest.skip("only this process has the files")
    dataset = ss.ShardDataset(folder, shuffle=True).decode()
    reader = ss.ShardLoader(dataset, 8, num_workers=2, multiprocessing_context=method)
    for _ in range(2):
        assert sorted(flat(labels(reader))) == list(range(COUNT))


def test_commands_read_a_manifest_in_pages(folder: str) -> None:
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


def test_verified_reads_compare_the_checksums_of_pages(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "data", COUNT, 10)
    assert flat(labels(loader(folder, verify="sha256"))) == list(range(COUNT))
    tar = tmp_path / "data" / "000004.tar"
    data = bytearray(tar.read_bytes())
    data[700] ^= 1
    tar.write_bytes(data)
    with pytest.raises(ShardStreamError, match="sha256"):
        list(loader(folder, verify="sha256"))


# --- writing


def test_a_new_dataset_has_its_own_pages_only(folder: str) -> None:
    old = files_of(folder)
    numbered(folder, COUNT + 1, 10, overwrite=True)
    new = files_of(folder)
    assert len(new) == len(old) == 2
    assert new.keys() & old.keys() == {"index.json"}
    assert ss.verify(folder).problems == ()
    numbered(folder, 12, 10, overwrite=True)  # few shards
    assert [*files_of(folder)] == ["index.json"]
    assert flat(labels(loader(folder))) == list(range(12))


def test_index_writes_pages(tmp_path: Path) -> None:
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


def test_shards_that_are_added_during_an_epoch_are_no_error(folder: str) -> None:
    reader = loader(folder)
    batches = iter(reader)
    seen = flat(labels([next(batches)]))
    with ss.ShardWriter(f"{folder}-more", max_samples=10) as writer:
        for number in range(30):
            writer.write({"__key__": f"x{number:06d}", "cls": 1000 + number, "npy": ARRAY})
    storage = Storage()
    for number in range(3):
        data = storage.read(f"{folder}-more/{number:06d}.tar")
        put(folder, {f"{number + 10:06d}.tar": data})
    ss.index(folder)
    assert len(locate_shards(folder, storage).shards) == 13
    assert seen + flat(labels(batches)) == list(range(COUNT))  # pages are read from the new file
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
    numbered(folder, 12, 10, overwrite=True)  # without pages
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


def test_a_last_page_that_changes_ends_the_epoch(tmp_path: Path) -> None:
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
        lambda d: d.pop("pages"),
        lambda d: d["pages"].pop("ends"),
        lambda d: d["pages"].update(url="../other.jsonl"),
        lambda d: d["pages"].update(url="index-pages-0123456789abcdef.jsonl/../../x"),
        lambda d: d["pages"]["sha256"].pop(),
        lambda d: d["pages"]["nsamples"].reverse(),
        lambda d: d["pages"]["ends"].append(1),
        lambda d: d["pages"]["ends"].__setitem__(-1, 20 << 30),
        lambda d: d["pages"]["ends"].__setitem__(0, -1),
        lambda d: d["pages"]["ends"].__setitem__(0, 1e3),
        lambda d: d["pages"]["first"].__setitem__(0, "../000000.tar"),
        lambda d: d["pages"]["first"].__setitem__(0, 7),
        lambda d: d.update(shards=0),
        lambda d: d.update(shards=1 << 70),
        lambda d: d.update(page_shards=0),
        lambda d: d.update(nsamples=COUNT + 1),
        lambda d: d.update(total_bytes=-1),
        lambda d: d.update(fingerprint="x"),
        lambda d: d.update(fields=["cls"]),
        lambda d: d.update(version=2),
    ],
)
def test_an_inconsistent_manifest_is_refused(tmp_path: Path, change: Any) -> None:
    folder = damaged(numbered(tmp_path / "data", COUNT, 10), change)
    with pytest.raises(ManifestError, match=re.escape(f"{folder}/index.json")):
        ss.ShardDataset(folder)


def test_damaged_pages_are_an_error_that_names_the_file(folder: str) -> None:
    (name, data) = next((n, d) for n, d in files_of(folder).items() if is_pages_name(n))
    put(folder, {name: data.replace(b"000004.tar", b"000005.tar")})
    with pytest.raises(ShardStreamError, match=re.escape(name)):
        list(loader(folder))
    put(folder, {name: data[:-9]})
    with pytest.raises(ShardStreamError, match=re.escape(name)):
        list(loader(folder))


def test_missing_pages_are_an_error_that_names_the_file(folder: str) -> None:
    name = next(filter(is_pages_name, files_of(folder)))
    filesystem, path = Storage().resolve(f"{folder}/{name}")
    filesystem.rm_file(path)
    with pytest.raises(ShardStreamError, match=re.escape(name)):
        list(loader(folder))


@pytest.mark.parametrize(
    "name",
    ["../0.tar", "/etc/0.tar", "s3://b/0.tar", "%2e%2e%2fa.tar", "a\\b.tar", "", "..", "a\0"],
)
def test_pages_name_files_of_their_folder_only(tmp_path: Path, name: str) -> None:
    folder = numbered(tmp_path / "data", COUNT, 10)
    manifest = decode_manifest(files_of(folder)["index.json"], url="index.json")
    assert isinstance(manifest, PagedManifest)
    page = decode_page(
        files_of(folder)[manifest.pages_name][: manifest.ends[1]], nshards=3, nsamples=30, url="x"
    )
    hostile = ManifestPage(
        names=[page.names[0], name, page.names[2]],
        nsamples=page.nsamples,
        filesizes=page.filesizes,
        sha256=page.sha256,
    )
    with pytest.raises(ManifestError, match="url"):
        decode_page(encode_page(hostile), nshards=3, nsamples=30, url="x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nsamples": np.array([1 << 59, 1, 1])}, "more samples than fit"),
        ({"filesize": np.array([0, 4096, 4096])}, "more samples than fit"),
        ({"sha256": "abc"}, "sha256"),
        ({"url": ["a.tar", "b.tar", "a.tar"]}, "a.tar is listed twice"),
        ({"sha256": {"a": 1, "b": 2, "c": 3}}, "sha256"),
    ],
)
def test_pages_that_no_writer_makes_are_refused(change: dict[str, Any], message: str) -> None:
    columns: dict[str, Any] = {
        "url": ["a.tar", "b.tar", "c.tar"],
        "nsamples": np.array([1, 1, 1]),
        "filesize": np.array([4096, 4096, 4096]),
        "sha256": [None, None, None],
    }
    columns |= change
    nsamples = int(columns["nsamples"].sum())
    text = json.dumps(columns, default=np.ndarray.tolist)
    with pytest.raises(ManifestError, match=message):
        decode_page(text.encode(), nshards=3, nsamples=nsamples, url="x")


@pytest.mark.parametrize(("first", "message"), [("000002.tar", "first"), ("000003.tar", "sorted")])
def test_shard_in_two_pages_is_refused(tmp_path: Path, first: str, message: str) -> None:
    data = numbered(tmp_path / "data", COUNT, 10)
    manifest = decode_manifest(files_of(data)["index.json"], url="index.json")
    assert isinstance(manifest, PagedManifest)
    second = files_of(data)[manifest.pages_name][manifest.ends[1] : manifest.ends[2]]
    text = second.replace(b"000003.tar", first.encode()).replace(b"000005.tar", b"000006.tar")
    bounds = manifest.bounds(1)
    with pytest.raises(ManifestError, match=message):
        decode_page(text, nshards=3, nsamples=30, url="x", bounds=bounds)


# --- many shards


def test_memory_and_pickles_do_not_grow_with_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # pages of their real size
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
    for number in range(0, 2 * 10**9, 9_999_999):  # each on another page
        found = catalog.shards_of(np.array([number]))
        assert found == [number // 10_000]
    assert len(catalog.shards._kept) <= 128  # type: ignore[attr-defined]
    assert located.shards[123_456].url == f"{tmp_path}/0123456.tar"


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
        timeout=60,
    )
    assert int(done.stdout) == sum(range(COUNT))
