"""Datasets on S3 that are replaced while they are read give an error, never old and new samples in one epoch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import shardstream as ss
from shardstream.errors import ChangedError
from tests.loader.test_overwritten_files import NEW, NSAMPLES, made, read
from tests.pairs import with_slow_rest
from tests.servers import ShapedS3
from tests.small_datasets import FEW_CORES

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two datasets with equal names and lengths and different labels."""
    folder = tmp_path_factory.mktemp("pair")
    return [made(folder / name, 1000 + first, 100) for name, first in (("a", 0), ("b", NEW))]


def upload(folder: Path, url: str) -> None:
    filesystem = fsspec.filesystem("s3")
    names = [path.name for path in folder.iterdir() if path.suffix in (".tar", ".idx")]
    for name in [*sorted(names), "index.json"]:
        filesystem.put_file(str(folder / name), f"{url}/{name}")


@pytest.fixture
def remote(pair: list[Path], bucket: str, s3_env: None) -> str:
    """The first dataset of the pair on S3."""
    upload(pair[0], f"{bucket}/set")
    return f"{bucket}/set"


def enlarged(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample whose batches are so large that a worker is few of them ahead."""
    return {**sample, "padding": np.zeros(1 << 19, np.uint8)}


@pytest.mark.parametrize(
    ("workers", "index", "shuffle"),
    with_slow_rest(
        [(0, "require", True), (0, "ignore", False), (2, "require", False), (2, "ignore", True)],
        [0, 2],
        ["require", "ignore"],
        [False, True],
    ),
)
def test_replaced_dataset_on_s3_ends_the_epoch(
    workers: int, index: Any, shuffle: bool, remote: str, pair: list[Path]
) -> None:
    limits: dict[str, Any] = {"prefetch_bytes": 1} if index == "require" else {}
    dataset = ss.ShardDataset(
        remote,
        read=ss.ReadOptions(index=index, **limits),
        shuffle=shuffle,
        order=ss.OrderOptions(window=10),
    ).decode()
    loader = ss.ShardLoader(dataset.map(enlarged), 5, num_workers=workers)
    batches, found = iter(loader), list[int]()
    read(batches, found, 1)
    upload(pair[1], remote)  # shards with the same names and lengths
    with pytest.raises(
        ChangedError, match="the dataset was replaced during this epoch|the file changed while"
    ):
        read(batches, found)


def test_dataset_replaced_between_epochs_is_an_error(remote: str, pair: list[Path]) -> None:
    loader = ss.ShardLoader(ss.ShardDataset(remote).decode(), 5, num_workers=2)
    read(iter(loader), [])
    upload(pair[1], remote)
    with pytest.raises(ChangedError, match=r"the dataset was replaced .*\n?.*index\.json"):
        read(iter(loader), [])


def test_dataset_on_s3_may_grow_with_a_new_manifest(
    remote: str, pair: list[Path], tmp_path: Path
) -> None:
    loader = ss.ShardLoader(ss.ShardDataset(remote).decode(), 5)
    batches, found = iter(loader), list[int]()
    read(batches, found, 1)
    more = Path(shutil.copytree(pair[0], tmp_path / "more"))
    for suffix in (".tar", ".tar.idx"):
        new = next(pair[1].glob(f"*{suffix}"))
        shutil.copy(new, more / f"zz{suffix}")
    ss.index(more)
    upload(more, remote)
    read(batches, found)
    assert found == list(range(1000, 1000 + NSAMPLES))


def test_datasets_with_a_common_name_prefix_can_be_read_together(
    remote: str, pair: list[Path], tmp_path: Path
) -> None:
    upload(pair[1], f"{remote}-more")
    strange = f"{remote}/strange.tar"  # not in the manifest
    fsspec.filesystem("s3").put_file(str(next(pair[0].glob("*.tar"))), strange)
    fsspec.filesystem("s3").put_file(str(next(pair[0].glob("*.idx"))), f"{strange}.idx")
    tars = [f"{remote}/{path.name}" for path in sorted(pair[0].glob("*.tar"))]
    loader = ss.ShardLoader(ss.ShardDataset([*tars, strange, f"{remote}-more"]).decode(), 5)
    batches, found = iter(loader), list[int]()
    read(batches, found, 1)
    manifest = f"{remote}/index.json"
    text = fsspec.filesystem("s3").cat_file(manifest)
    fsspec.filesystem("s3").pipe_file(manifest, text + b"\n")  # the same shards, other bytes
    found += [label for batch in batches for label in batch["cls"].tolist()]
    assert len(found) == 2 * NSAMPLES + 20


def test_deleted_manifest_on_s3_ends_the_epoch(remote: str) -> None:
    batches = iter(ss.ShardLoader(ss.ShardDataset(remote).decode(), 5))
    next(batches)
    fsspec.filesystem("s3").rm_file(f"{remote}/index.json")
    with pytest.raises(ChangedError, match="its manifest is missing"):
        list(batches)


def test_unreachable_manifest_at_the_end_of_an_epoch_is_a_warning(
    remote: str, shaped_s3: ShapedS3
) -> None:
    shaped_s3.control("/set?profile=chaos&slow=0&reset=0&trunc=0&stall=0")
    options = shaped_s3.chaos.storage_options | {"retry_timeout_s": 0.5}
    dataset = ss.ShardDataset(remote, storage_options=options).decode()
    batches, found = iter(ss.ShardLoader(dataset, 5)), list[int]()
    read(batches, found, NSAMPLES // 5)  # all except the last batch
    shaped_s3.control("/set?profile=chaos&slow=1")
    with pytest.warns(UserWarning, match="whether the dataset was replaced during this epoch"):
        assert list(batches) == []
    assert len(found) == NSAMPLES
