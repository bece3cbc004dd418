"""Test sequential reading of shards without an index."""

from __future__ import annotations

import gzip
import random
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard

import shardstream as ss
from shardstream.errors import NoIndexWarning, OptionError, ShardError, StateError
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, flat, grouped, labels, numbered, take

pytestmark = pytest.mark.filterwarnings(FEW_CORES, "ignore::shardstream.errors.NoIndexWarning")


@pytest.fixture
def bare() -> str:
    """60 samples in 9 remote shards without index and manifest."""
    url = numbered(f"memory://bare-{random.getrandbits(64):x}", 60, 7)
    files = fsspec.filesystem("memory")
    for path in files.ls(url, detail=False):
        if not path.endswith(".tar"):
            files.rm(path)
    return url


@pytest.fixture(params=[".tar", ".tar.gz", ".tgz", ".tar.zst"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The same samples as local files, compressed or not."""
    made = Path(numbered(tmp_path / "made", 60, 7))
    compress = {
        ".tar": lambda data: data,
        ".tar.zst": zstandard.ZstdCompressor().compress,
    }.get(request.param, gzip.compress)
    for tar in sorted(made.glob("*.tar")):
        (tmp_path / f"{tar.stem}{request.param}").write_bytes(compress(tar.read_bytes()))
    return f"{tmp_path}/*{request.param}"


def make(url: str, *, num_workers: int = 0, batch_size: int = 4, **options: Any) -> ss.ShardLoader:
    dataset = ss.ShardDataset(url, **grouped(index="ignore", **options)).decode()
    return ss.ShardLoader(dataset, batch_size, num_workers=num_workers)


def test_missing_index_causes_a_warning_with_the_command(bare: str) -> None:
    with pytest.warns(NoIndexWarning, match=rf"Run once: shardstream index {bare}  \(") as caught:
        dataset = ss.ShardDataset(bare)
    assert caught[0].filename == __file__
    assert "split by whole shards" in str(caught[0].message)
    assert "read=ss.ReadOptions(index='ignore') silences this" in str(caught[0].message)
    assert len(list(dataset)) == 60


def test_index_ignore_causes_no_warning(bare: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ss.ShardDataset(bare, read=ss.ReadOptions(index="ignore"))


def test_index_can_be_required(bare: str) -> None:
    with pytest.raises(
        OptionError, match=r"run 'shardstream index' on its folder \[in memory://.*tar"
    ):
        ss.ShardDataset(bare, read=ss.ReadOptions(index="require"))


@pytest.mark.parametrize(
    ("num_workers", "shuffle"),
    with_slow_rest([(0, False), (0, True), (2, True)], [0, 2], [False, True]),
)
def test_each_sample_is_returned_once_for_any_compression(
    num_workers: int,
    shuffle: bool,
    local: str,
) -> None:
    one = make(local, num_workers=num_workers, shuffle=shuffle)
    first, second = flat(labels(one)), flat(labels(one))
    assert sorted(first) == sorted(second) == list(range(60))
    assert (first == second) is not shuffle
    if not shuffle and num_workers == 0:
        assert first == list(range(60))


@pytest.mark.parametrize(
    ("num_workers", "shuffle"),
    with_slow_rest([(0, True), (2, True)], [0, 2], [False, True]),
)
def test_sequential_dataset_resumes_on_the_same_topology(
    num_workers: int,
    shuffle: bool,
    local: str,
) -> None:
    full = labels(make(local, num_workers=num_workers, shuffle=shuffle))
    every = (0, 1, 6, len(full) - 1, len(full))
    # With workers each cut forks four of them: three cuts for one kind of tar.
    few = (0, 6, len(full)) if local.endswith(".tar") else (6,)
    for cut in few if num_workers else every:
        one = make(local, num_workers=num_workers, shuffle=shuffle)
        seen = labels(take(one, cut))
        other = make(local, num_workers=num_workers, shuffle=shuffle)
        other.load_state_dict(one.state_dict())
        assert other.state_dict() == one.state_dict()
        assert seen + labels(other) == full


def test_resume_begins_at_the_byte_offset(tmp_path: Path) -> None:
    folder = numbered(tmp_path, 60, 30)
    one = make(folder)
    take(one, 2)
    part = one.state_dict()["parts"]["0"]
    assert part["taken"] == 8
    index = (tmp_path / "000000.tar.idx").read_bytes()
    assert part["offset"] == int.from_bytes(index[64:72], "little")
    tar = tmp_path / "000000.tar"
    tar.write_bytes(bytes(part["offset"]) + tar.read_bytes()[part["offset"] :])  # not read again
    other = make(folder)
    other.load_state_dict(one.state_dict())
    assert flat(labels(other)) == list(range(8, 60))


def test_another_topology_is_refused_with_both_values(bare: str) -> None:
    state = make(bare, num_workers=0).state_dict()
    with pytest.raises(StateError, match="number of workers: the state says 1, here it is 2"):
        make(bare, num_workers=2).load_state_dict(state)
    with pytest.raises(StateError, match="number of ranks: the state says 1, here it is 2"):
        make(bare, placement=ss.Placement(0, 2)).load_state_dict(state)


def test_another_buffer_is_refused(bare: str) -> None:
    state = make(bare, shuffle=True, window=10).state_dict()
    with pytest.raises(StateError, match="of the pipeline: the state says"):
        make(bare, shuffle=True, window=20).load_state_dict(state)


def test_ranks_and_workers_partition_the_shards(bare: str) -> None:
    seen = [
        flat(labels(make(bare, shuffle=True, num_workers=2, placement=ss.Placement(rank, 3))))
        for rank in range(3)
    ]
    assert sorted(label for rank in seen for label in rank) == list(range(60))
    assert all(seen)


def test_more_workers_than_shards_leave_some_without_samples(bare: str) -> None:
    seen = [flat(labels(make(bare, placement=ss.Placement(rank, 12)))) for rank in range(12)]
    assert sorted(label for rank in seen for label in rank) == list(range(60))
    assert [] in seen


def test_length_is_unknown_without_with_length(bare: str) -> None:
    dataset = ss.ShardDataset(bare, read=ss.ReadOptions(index="ignore"))
    with pytest.raises(TypeError, match="length is not known in advance.*with_length"):
        len(dataset)
    loader = ss.ShardLoader(dataset.with_length(61), 4)
    assert len(loader) == 16
    assert len(ss.ShardLoader(dataset.with_length(61), 4, drop_last=True)) == 15


@pytest.mark.parametrize("cut", [700, 1024 + 100])
def test_cut_shard_is_an_error_or_a_counted_skip(cut: int, tmp_path: Path) -> None:
    folder = Path(numbered(tmp_path, 60, 30))
    tar = folder / "000000.tar"
    tar.write_bytes(tar.read_bytes()[: 4096 + cut])
    (folder / "index.json").unlink()
    urls = [str(tar), str(folder / "000001.tar")]
    with pytest.raises(ShardError, match=r"cut.*000000\.tar, at byte"):
        list(make(urls))  # type: ignore[arg-type]
    loader = make(urls, on_error="skip")  # type: ignore[arg-type]
    found = flat(labels(loader))
    assert found[-30:] == list(range(30, 60))
    assert loader.skipped == {"ShardError": 1}
