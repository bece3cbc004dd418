"""Indexes and a manifest in another folder than the tars, for data that one may only read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream.errors import ChangedError, IndexMismatchError, ManifestError, OptionError
from shardstream.storage import Storage, publish_bytes
from tests.small_datasets import flat, labels, loader, numbered

COUNT = 60


@pytest.fixture
def theirs(tmp_path: Path) -> str:
    """Tars of 60 samples, without indexes and manifest."""
    folder = numbered(tmp_path / "theirs", COUNT, 25)
    for path in Path(folder).iterdir():
        if path.suffix != ".tar":
            path.unlink()
    return folder


@pytest.fixture
def s3_theirs(s3_env: None, bucket: str, theirs: str) -> str:
    for path in Path(theirs).iterdir():
        publish_bytes(Storage(), f"{bucket}/theirs/{path.name}", path.read_bytes())
    return f"{bucket}/theirs"


def names_in(folder: Path | str) -> set[str]:
    return {file.url.rpartition("/")[2] for file in Storage().list_folder(str(folder))[0]}


@pytest.mark.parametrize("sha256", [True, False])
def test_tars_of_a_folder_that_is_read_only_are_read_by_number(
    theirs: str, tmp_path: Path, sha256: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chmod(theirs, stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.chdir(tmp_path)
    report = ss.index("theirs", to="mine", sha256=sha256)
    assert names_in("mine") == {"index.json", *(f"00000{n}.tar.idx" for n in range(3))}
    assert names_in(theirs) == {f"00000{n}.tar" for n in range(3)}
    assert report.manifest_url == str(tmp_path / "mine" / "index.json")
    shuffled = flat(labels(loader("mine", shuffle=True, num_workers=1)))
    assert sorted(shuffled) == list(range(COUNT)) != shuffled
    assert int(ss.ShardDataset("mine").by_number().decode()[41]["cls"]) == 41
    assert ss.verify("mine").problems == ()
    listed = json.loads(Path("mine/index.json").read_text())["shardlist"]
    assert [("sha256" in shard) for shard in listed] == [sha256] * 3


@pytest.mark.slow
def test_tars_of_a_store_have_their_index_here_or_in_another_bucket_folder(
    s3_theirs: str, tmp_path: Path
) -> None:
    places = {
        str(tmp_path / "mine"): None,
        f"{s3_theirs}-mine": ss.tasks.LocalExecutor(processes=2),
    }
    for mine, executor in places.items():
        ss.index(s3_theirs, to=mine, executor=executor)
        assert names_in(s3_theirs) == {f"00000{n}.tar" for n in range(3)}
        assert flat(labels(loader(mine, num_workers=2))) == list(range(COUNT))
        assert ss.verify(mine).problems == ()


def test_tars_of_several_folders_are_one_dataset(tmp_path: Path) -> None:
    tars = []
    for part in range(2):
        folder = numbered(tmp_path / f"part{part}", 20, 20)
        tars.append(f"{folder}/part{part}.tar")
        Path(f"{folder}/000000.tar").rename(tars[-1])
    ss.index(tars, to=tmp_path / "mine")
    assert flat(labels(loader(tmp_path / "mine"))) == [*range(20)] * 2


def test_tars_of_the_same_name_are_refused(theirs: str, tmp_path: Path) -> None:
    other = numbered(tmp_path / "other", 5)
    with pytest.raises(OptionError, match=r"two tars are named 000000\.tar"):
        ss.index([theirs, other], to=tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_tars_that_change_are_noticed(s3_theirs: str, tmp_path: Path) -> None:
    ss.index(s3_theirs, to=f"{s3_theirs}-mine")
    batches = iter(loader(f"{s3_theirs}-mine"))
    next(batches)
    numbered(tmp_path / "new", 61, 25)
    for number in range(3):
        data = (tmp_path / "new" / f"00000{number}.tar").read_bytes()
        publish_bytes(Storage(), f"{s3_theirs}/00000{number}.tar", data)
    ss.index(s3_theirs, to=f"{s3_theirs}-mine")
    with pytest.raises((ChangedError, IndexMismatchError)):
        list(batches)
    assert len(flat(labels(loader(f"{s3_theirs}-mine")))) == 61


def test_a_remote_manifest_names_indexes_of_its_own_store_only(bucket: str, s3_env: None) -> None:
    document: dict[str, Any] = {
        "__kind__": "wids-shard-index-v1",
        "shardlist": [{"url": "a.tar", "nsamples": 1, "filesize": 2048, "index": "/etc/passwd"}],
    }
    publish_bytes(Storage(), f"{bucket}/data/index.json", json.dumps(document).encode())
    with pytest.raises(ManifestError, match="not in its own store"):
        ss.ShardDataset(f"{bucket}/data")


def test_without_hashes_few_bytes_of_large_samples_are_read(
    s3_env: None,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = np.zeros(3_000_000, dtype=np.uint8)
    with ss.ShardWriter(f"{bucket}/large") as writer:
        for number in range(12):
            writer.write({"__key__": f"{number:02d}", "npy": large})
    read_bytes = 0
    read = Storage.read_view

    def spy(self: Storage, *arguments: Any, **hints: Any) -> Any:
        nonlocal read_bytes
        data = read(self, *arguments, **hints)
        read_bytes += len(data)
        return data

    monkeypatch.setattr(Storage, "read_view", spy)
    report = ss.index(f"{bucket}/large", sha256=False)
    assert report.manifest.nsamples == 12
    assert read_bytes < 0.2 * report.manifest.total_bytes
    assert len(list(ss.ShardDataset(f"{bucket}/large").decode())) == 12
