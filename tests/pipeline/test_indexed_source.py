from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from shardstream.catalog import ShardCatalog
from shardstream.distributed import Placement, WorkerInfo
from shardstream.errors import IndexMismatchError, ShardError
from shardstream.format import Sample
from shardstream.order import EpochOrder, EpochPlan, PartitionConfig, RankPartition
from shardstream.pipeline import IndexedRun, ReadOptions, SamplesSource, SkipBudget, SkipTracker
from shardstream.storage import Storage, locate_shards
from shardstream.testing import assert_resumes_exactly
from tests.small_datasets import numbered


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    place = f"memory://source-{random.getrandbits(64):x}"
    return numbered(place if request.param == "memory" else tmp_path, 37, 9)


def opener(
    url: str, *, worker: int = 0, skips: SkipTracker | None = None
) -> Callable[[], IndexedRun]:
    storage = Storage()
    catalog = ShardCatalog(locate_shards(url, storage), storage)
    order = EpochOrder(
        nsamples=len(catalog), batch=2, shuffle=True, seed=1, lanes=3, window=4, block=3
    )
    partition = RankPartition(
        EpochPlan(order, 0), PartitionConfig(world_size=2, microbatches=2), rank=1, consumed=4
    )
    source = SamplesSource(samples=catalog, reading=ReadOptions(prefetch_bytes=1000))
    worker_info = WorkerInfo(Placement(1, 2), worker, 2)
    return lambda: IndexedRun(source, partition, worker_info, skips or SkipTracker())


@pytest.mark.parametrize("worker", [0, 1])
def test_indexed_run_resumes_exactly_at_every_sample(worker: int, url: str) -> None:
    assert_resumes_exactly(opener(url, worker=worker))


@pytest.mark.parametrize("worker", [0, 1])
def test_steps_contain_the_same_samples_as_iteration(worker: int, url: str) -> None:
    one, other = opener(url, worker=worker)(), opener(url, worker=worker)()
    samples = [(one.number, sample["__key__"]) for sample in one]
    steps = list(other.steps())
    assert [cast("Sample", s)["__key__"] for _, step in steps for s in step] == [
        key for _, key in samples
    ]
    assert [n for numbers, _ in steps for n in numbers] == [number for number, _ in samples]
    assert all(len(step) == 4 for _, step in steps[:-1])
    one.close()
    other.close()


def test_each_sample_has_its_number(url: str) -> None:
    run = opener(url)()
    for sample in run:
        assert sample["__key__"] == f"{run.number:06d}"
        assert set(sample) == {"__key__", "__url__", "cls", "npy"}
    run.close()


def test_closed_run_can_be_closed_again_and_continued(url: str) -> None:
    run = opener(url)()
    first = next(run)["__key__"]
    run.close()
    run.close()
    rest = [sample["__key__"] for sample in run]
    assert [first, *rest] == [sample["__key__"] for sample in opener(url)()]


def test_damaged_sample_is_raised_or_skipped(tmp_path: Path) -> None:
    url = numbered(tmp_path, 37, 9)
    keys = [sample["__key__"] for sample in opener(url)()]
    shard, place = divmod(int(keys[5]), 9)
    tar = tmp_path / f"{shard:06d}.tar"
    start = int(np.fromfile(f"{tar}.idx", dtype="<u8")[place])
    data = bytearray(tar.read_bytes())
    data[start + 3] ^= 0xFF
    tar.write_bytes(data)
    with pytest.raises(ShardError, match=rf"checksum.*{tar.name}, at byte {start}"):
        list(opener(url)())
    skips = SkipTracker(SkipBudget(samples=1))
    found = [sample["__key__"] for sample in opener(url, skips=skips)()]
    assert found == keys[:5] + keys[6:]
    assert skips.counts == {"ShardError": 1}
    assert_resumes_exactly(opener(url, skips=SkipTracker(SkipBudget(samples=1000))))


def test_wrong_index_is_never_skipped(tmp_path: Path) -> None:
    url = numbered(tmp_path, 37, 9)
    keys = [sample["__key__"] for sample in opener(url)()]
    shard, place = next(divmod(int(key), 9) for key in keys if int(key) % 9 < 8)
    index = tmp_path / f"{shard:06d}.tar.idx"
    offsets = np.fromfile(index, dtype="<u8")
    offsets[place + 1] += 1024  # a member of the next sample counts for this one
    offsets.tofile(index)
    skips = SkipTracker(SkipBudget(samples=100))
    with pytest.raises(IndexMismatchError, match=rf"two samples.*{shard:06d}\.tar, at byte"):
        list(opener(url, skips=skips)())
