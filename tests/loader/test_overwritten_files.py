"""Local datasets that are overwritten while they are read give an error with the file, never old and new samples in one epoch."""

from __future__ import annotations

import os
import shutil
import tarfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import shardstream as ss
from shardstream.catalog import ShardCatalog
from shardstream.errors import ChangedError, IndexMismatchError
from shardstream.storage import FileVersions
from shardstream.testing import make_shards
from tests.limits import set_limits
from tests.small_datasets import FEW_CORES

pytestmark = pytest.mark.filterwarnings(FEW_CORES)
NSAMPLES, NEW = 120, 1000


def made(folder: Path, first: int, nbytes: int) -> Path:
    samples = (
        {"__key__": f"{n:06d}", "cls": first + n, "npy": np.full(nbytes, 7, np.uint8)}
        for n in range(NSAMPLES)
    )
    # Large samples are located per window, and copied per batch.
    return Path(make_shards(folder, samples=samples, per_shard=120 if nbytes > 1000 else 20))


@pytest.fixture(scope="module", params=[100, 20_000], ids=["small", "large"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two datasets with equal names and lengths and different labels."""
    folder = tmp_path_factory.mktemp("pair")
    return [made(folder / name, 1000 + first, request.param) for name, first in (("a", 0), ("b", NEW))]  # fmt: skip


@pytest.fixture
def folder(pair: list[Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair[0], tmp_path / "set"))


def in_place(new: Path, old: Path) -> None:
    old.write_bytes(new.read_bytes())


def by_rename(new: Path, old: Path) -> None:
    shutil.copyfile(new, beside := old.with_suffix(".other"))
    beside.replace(old)


def by_rename_with_the_old_time(new: Path, old: Path) -> None:
    before = old.stat()
    shutil.copyfile(new, beside := old.with_suffix(".other"))
    os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
    beside.replace(old)


def cut_short(_: Path, old: Path) -> None:
    """Write only end-of-archive blocks, as a copy in place may look for a moment."""
    old.write_bytes(bytes(1024))


WAYS = [in_place, by_rename, by_rename_with_the_old_time]


def overwrite(way: Callable[[Path, Path], None], pair: list[Path], folder: Path) -> None:
    for new in sorted(pair[1].glob("*.tar")):
        way(new, folder / new.name)


def read(batches: Iterator[Any], found: list[int], count: int = NSAMPLES) -> None:
    for _ in range(count):
        if (batch := next(batches, None)) is None:
            return
        found += batch["cls"].tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("index", ["require", "ignore"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_epoch_reads_one_version_of_the_files(
    way: Callable[[Path, Path], None], index: Any, shuffle: bool, folder: Path, pair: list[Path]
) -> None:
    dataset = ss.ShardDataset(
        folder,
        read=ss.ReadOptions(index=index),
        shuffle=shuffle,
        order=ss.OrderOptions(window=10),
        on_error="skip",
    ).decode()
    batches, found = iter(ss.ShardLoader(dataset, batch_size=5)), list[int]()
    read(batches, found, 6)
    overwrite(way, pair, folder)
    with pytest.raises(ChangedError, match=r"overwritten after the dataset was opened.*\.tar"):
        read(batches, found)
    assert max(found) < 1000 + NEW


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_compare_with_the_version_of_the_main_process(
    method: str, folder: Path, pair: list[Path]
) -> None:
    dataset = ss.ShardDataset(folder, shuffle=True).decode()
    loader = ss.ShardLoader(dataset, 5, num_workers=2, multiprocessing_context=method)
    overwrite(by_rename, pair, folder)  # the workers have opened none of the old files
    with pytest.raises(ChangedError, match="overwritten after the dataset was opened"):
        list(loader)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_index", [True, False])
def test_map_dataset_reads_one_version_of_the_files(
    way: Callable[[Path, Path], None], has_index: bool, folder: Path, pair: list[Path]
) -> None:
    for file in () if has_index else [*folder.glob("*.idx"), folder / "index.json"]:
        file.unlink()
    dataset = ss.ShardDataset(folder).by_number().decode()
    assert dataset[3]["cls"] == 1003
    overwrite(way, pair, folder)
    for number in (4, 33):  # for a mapped shard, and for one that is not mapped
        with pytest.raises(ChangedError, match="overwritten after the dataset was opened"):
            dataset[number]
    assert ss.ShardDataset(folder).by_number().decode()[3]["cls"] == 1003 + NEW


def test_local_part_of_a_mix_reads_one_version(folder: Path, pair: list[Path]) -> None:
    remote = f"memory://overwritten-{uuid.uuid4().hex}"
    make_shards(remote, samples=10)
    parts = [
        ss.ShardDataset(url).decode().rename(cls="cls", keep=False) for url in (str(folder), remote)
    ]
    loader = ss.ShardLoader(ss.mix(parts), batch_size=5)
    overwrite(by_rename, pair, folder)
    with pytest.raises(ChangedError, match="overwritten after the dataset was opened"):
        list(loader)


def test_shard_briefly_listed_too_short_does_not_end_the_epoch(
    folder: Path, pair: list[Path]
) -> None:
    dataset = ss.ShardDataset(folder, read=ss.ReadOptions(index="ignore"), on_error="skip").decode()
    batches, found = iter(ss.ShardLoader(dataset, batch_size=5)), list[int]()
    read(batches, found, 6)
    overwrite(cut_short, pair, folder)
    with pytest.raises(ChangedError, match="overwritten"):
        read(batches, found)


def truncate(_: Path, old: Path) -> None:
    os.truncate(old, 4096)


@pytest.mark.parametrize("shuffle", [False, True])
def test_mapped_shard_that_is_cut_is_an_error_and_does_not_kill_the_process(
    shuffle: bool, folder: Path, pair: list[Path]
) -> None:
    dataset = ss.ShardDataset(folder, shuffle=shuffle).decode()
    batches, found = iter(ss.ShardLoader(dataset, batch_size=5)), list[int]()
    read(batches, found, 12)
    overwrite(truncate, pair, folder)
    with pytest.raises(ChangedError, match=r"4096.*\.tar"):
        read(batches, found)


def test_mapped_shard_that_is_cut_is_an_error_in_a_map_dataset(
    folder: Path, pair: list[Path]
) -> None:
    dataset = ss.ShardDataset(folder).by_number().decode()
    assert dataset[3]["cls"] == 1003
    overwrite(truncate, pair, folder)
    with pytest.raises(ChangedError, match=r"overwritten.*4096 now.*\.tar"):
        dataset[19]


@pytest.mark.parametrize("left", [-1, 20_000], ids=["cut between two fields", "longer"])
def test_local_shard_of_another_length_than_in_the_manifest_is_an_error(
    left: int, folder: Path
) -> None:
    last = max(folder.glob("*.tar"))
    with tarfile.open(last) as tar:
        header = tar.getmembers()[-1].offset
    os.truncate(last, header if left < 0 else last.stat().st_size + left)
    dataset = ss.ShardDataset(folder)
    for read_last in (lambda: [*dataset], lambda: dataset.by_number()[NSAMPLES - 1]):
        with pytest.raises(ChangedError, match=r"bytes, \d+ by the manifest.*\.tar"):
            read_last()


@pytest.mark.parametrize("with_listed", [False, True])
def test_local_shard_that_grew_after_its_index_is_an_error_without_a_manifest(
    with_listed: bool, folder: Path, tmp_path: Path
) -> None:
    (folder / "index.json").unlink()
    listed = [make_shards(tmp_path / "listed", samples=1)] if with_listed else []
    last = max(folder.glob("*.tar"))
    for name in ("README", "new.txt"):  # the first is no field of a sample
        assert len([*ss.ShardDataset([*listed, folder])]) == NSAMPLES + with_listed
        with tarfile.open(last, "a") as tar:
            tar.add(__file__, name)
    with pytest.raises(IndexMismatchError, match=r"more samples than its index.*\.tar"):
        list(ss.ShardDataset([*listed, folder]))


@pytest.mark.parametrize("chunk", [8192, 7], ids=["small indexes", "large indexes"])
def test_remote_shard_that_grew_after_its_index_is_an_error_without_a_manifest(
    chunk: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the tar in the listing tells; what fits in the padding of a tar, up to 10 KiB, is not seen."""
    set_limits(monkeypatch, ShardCatalog, INDEX_CHUNK_SAMPLES=chunk)
    memory, url = fsspec.filesystem("memory"), f"memory://{uuid.uuid4().hex}"
    (folder / "index.json").unlink()
    last = max(folder.glob("*.tar"))
    for name, count in (("README", 20), ("new.txt", 1)):
        memory.put(f"{folder}/", f"{url}/", recursive=True)
        assert len([*ss.ShardDataset(url)]) == NSAMPLES
        with tarfile.open(last, "a") as tar:  # which pads the tar
            for _ in range(count):
                tar.add(__file__, name)
    memory.put(f"{folder}/", f"{url}/", recursive=True)
    with pytest.raises(IndexMismatchError, match=r"more samples than its index.*\.tar"):
        list(ss.ShardDataset(url))


def test_matching_checksum_accepts_a_rewritten_file(folder: Path, pair: list[Path]) -> None:
    dataset = ss.ShardDataset(folder, read=ss.ReadOptions(verify="sha256")).by_number().decode()
    assert dataset[3]["cls"] == 1003
    for tar in folder.glob("*.tar"):
        os.utime(tar)
    assert dataset[3]["cls"] == 1003
    overwrite(in_place, pair, folder)
    with pytest.raises(ss.errors.IndexMismatchError, match="its sha256 is"):
        dataset[3]


@pytest.mark.parametrize("index", ["require", "ignore"])
def test_metadata_changes_are_accepted(index: Any, folder: Path) -> None:
    dataset = ss.ShardDataset(folder, read=ss.ReadOptions(index=index)).decode()
    batches, found = iter(ss.ShardLoader(dataset, batch_size=5)), list[int]()
    read(batches, found, 1)
    for tar in sorted(folder.glob("*.tar")):
        tar.chmod(0o600)  # this and the two changes below change the inode only
        os.link(tar, tar.with_suffix(".link"))
        tar.rename(tar.with_suffix(".moved"))
        tar.with_suffix(".moved").rename(tar)
    read(batches, found)
    assert found == list(range(1000, 1000 + NSAMPLES))


def test_mapped_file_is_read_to_its_end_after_deletion(folder: Path) -> None:
    loader = ss.ShardLoader(ss.ShardDataset(folder).decode(), batch_size=5)
    assert len(list(loader)) == 24  # all are mapped now
    shutil.rmtree(folder)
    found: list[int] = []
    read(iter(loader), found)
    assert found == list(range(1000, 1000 + NSAMPLES))


def test_sequential_reads_check_the_version_per_chunk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[list[int]] = []
    monkeypatch.setattr(FileVersions, "check", lambda _, shards: looks.append(list(shards)))
    found: list[int] = []
    read(
        iter(
            ss.ShardLoader(ss.ShardDataset(folder, read=ss.ReadOptions(index="ignore")).decode(), 5)
        ),
        found,
    )
    assert len(found) == NSAMPLES
    shards = len(list(folder.glob("*.tar")))
    assert {shard for look in looks for shard in look} == set(range(shards))
    assert (
        len(looks) <= 3 * shards
    )  # checked when bytes were read and at the end, not for each sample
