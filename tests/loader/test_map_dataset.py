from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Subset,
    WeightedRandomSampler,
    random_split,
)

import shardstream as ss
from shardstream.errors import OptionError
from shardstream.storage import RangeResponse, Storage
from tests.limits import set_limits
from tests.small_datasets import FEW_CORES, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


def label(sample: Any) -> int:
    return int(sample["cls"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbers") / "set", 100, 15)


@pytest.fixture
def dataset(folder: str) -> ss.ShardMapDataset:
    return ss.ShardMapDataset(folder).decode()


def test_map_dataset_is_a_sequence(dataset: ss.ShardMapDataset) -> None:
    assert len(dataset) == 100
    assert [label(dataset[i]) for i in (0, 14, 15, 99, -1, -100)] == [0, 14, 15, 99, 99, 0]
    assert [label(sample) for sample in dataset[10:30:7]] == [10, 17, 24]
    assert [label(sample) for sample in dataset[::-1][:3]] == [99, 98, 97]
    assert [label(sample) for sample in dataset.__getitems__([5, 3, 5])] == [5, 3, 5]
    assert sum(1 for _ in dataset) == 100


@pytest.mark.parametrize("index", [100, -101])
def test_number_out_of_range_is_refused(dataset: ss.ShardMapDataset, index: int) -> None:
    with pytest.raises(IndexError, match="-100 to 99"):
        dataset[index]


@pytest.mark.parametrize("workers", [0, 2])
def test_samplers_subsets_and_splits_of_torch_work(
    dataset: ss.ShardMapDataset, workers: int
) -> None:
    numbers = dataset.map(label)

    def read(data: Any, **options: Any) -> list[int]:
        loader: DataLoader[Any] = DataLoader(data, batch_size=8, num_workers=workers, **options)
        return [int(number) for batch in loader for number in batch]

    assert read(numbers) == list(range(100))
    assert sorted(read(numbers, shuffle=True, generator=torch.Generator().manual_seed(0))) == list(
        range(100)
    )
    ranks = [read(numbers, sampler=DistributedSampler(numbers, 3, rank)) for rank in range(3)]
    assert sorted({number for rank in ranks for number in rank}) == list(range(100))
    weights = [1.0 if number < 10 else 0.0 for number in range(100)]
    drawn = read(
        numbers,
        sampler=WeightedRandomSampler(weights, 50, generator=torch.Generator().manual_seed(0)),
    )
    assert len(drawn) == 50
    assert max(drawn) < 10
    parts = random_split(numbers, [70, 30], generator=torch.Generator().manual_seed(0))
    assert sorted(read(parts[0]) + read(parts[1])) == list(range(100))
    assert read(Subset(numbers, [3, 1, 4])) == [3, 1, 4]


def test_batch_of_neighbours_needs_few_range_requests(
    bucket: str, s3_env: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered(f"{bucket}/set", 100, 50)
    dataset = ss.ShardMapDataset(f"{bucket}/set").decode()
    asked: list[tuple[int, int | None]] = []
    real = Storage.read_once

    def counting(
        self: Storage, url: str, start: int = 0, end: int | None = None, **options: Any
    ) -> RangeResponse:
        if url.endswith(".tar"):
            asked.append((start, end))
        return real(self, url, start, end, **options)

    monkeypatch.setattr(Storage, "read_once", counting)
    batch = dataset.__getitems__([*range(10, 40), 60, 61])
    assert [label(sample) for sample in batch] == [*range(10, 40), 60, 61]
    assert len(asked) == 2, "one range for each shard"


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_read_from_s3_after_the_main_process(
    bucket: str, s3_env: None, workers: int
) -> None:
    numbered(f"{bucket}/set", 40, 15)
    dataset = ss.ShardMapDataset(f"{bucket}/set").decode().map(label)
    assert dataset[7] == 7  # this opens connections and threads in this process
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=8, num_workers=workers, timeout=30 if workers else 0
    )
    assert [int(number) for batch in loader for number in batch] == list(range(40))


def draw(sample: Any, rng: Any) -> tuple[int, float]:
    return label(sample), float(rng.random())


def drawn(loader: Any) -> dict[int, float]:
    return {int(number): value for batch in loader for number, value in batch}


def test_random_augmentation_depends_on_epoch_number_and_times_read(folder: str) -> None:
    dataset = ss.ShardMapDataset(folder, seed=3).decode().map(draw, rng=True)
    first: Sequence[tuple[int, float]] = [dataset[i] for i in (4, 5, 6)]
    again = dataset.__getitems__([4, 5, 6, 4])
    assert len({value for _, value in [*first, *again]}) == 7
    for epoch in (1, 0):
        dataset.set_epoch(epoch)
        assert (dataset.__getitems__([5, 6, 4]) == [*first[1:], first[0]]) == (epoch == 0)


@pytest.mark.parametrize(
    ("workers", "context", "sets_epoch"),
    [
        *((0, None, sets) for sets in (False, True)),
        *((2, context, sets) for context in ("fork", "persistent") for sets in (False, True)),
        pytest.param(1, "spawn", True, marks=pytest.mark.slow),
    ],
)
def test_each_epoch_of_a_plain_loader_has_its_own_random_numbers(
    folder: str, workers: int, context: str | None, sets_epoch: bool
) -> None:
    dataset = copy.deepcopy(ss.ShardMapDataset(folder)[:12].decode().map(draw, rng=True))
    alone = ss.ShardMapDataset(folder)[:12].decode().map(draw, rng=True)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=3,
        shuffle=True,
        num_workers=workers,
        persistent_workers=context in ("persistent", "spawn"),
        collate_fn=list,
        multiprocessing_context="fork" if context == "persistent" else context,
    )
    for epoch in range(3):
        if sets_epoch:
            dataset.set_epoch(epoch)
            alone.set_epoch(epoch)
        assert drawn(loader) == dict(alone)  # on every number of workers
    assert len({value for _ in range(3) for _, value in alone}) == 36


@pytest.mark.slow
def test_spawned_workers_of_a_rank_draw_as_the_rank_itself(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    dataset = ss.ShardMapDataset(folder)[:6].decode().map(draw, rng=True)
    alone = dict(copy.copy(dataset))
    loader: DataLoader[Any] = DataLoader(
        dataset, 3, num_workers=1, collate_fn=list, multiprocessing_context="spawn"
    )
    assert drawn(loader) == alone


def test_random_numbers_of_many_samples_do_not_depend_on_the_order_of_reading(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, ss.ShardMapDataset, MAX_COUNTERS=4)
    dataset = ss.ShardMapDataset(folder).decode().map(draw, rng=True)
    assert len({dataset[n] for n in (1, 5, 1, 5)}) == 4
    dataset.set_epoch(1)
    first = [dataset[n] for n in (1, 5)]
    dataset.set_epoch(1)
    assert [dataset[n] for n in (5, 1)] == first[::-1]


def test_datasets_chained_from_a_map_dataset_follow_its_epoch(dataset: ss.ShardMapDataset) -> None:
    chained = dataset[:5].map(label)
    dataset.set_epoch(2)
    chained.set_epoch(chained.epoch + 1)
    assert (dataset.epoch, chained.epoch) == (2, 3)


@pytest.mark.parametrize(
    "travel",
    [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],  # noqa: S301
)
def test_a_copy_of_a_map_dataset_has_an_epoch_and_random_numbers_of_its_own(
    folder: str, travel: Any
) -> None:
    dataset = ss.ShardMapDataset(folder).decode().map(draw, rng=True)
    other = travel(dataset)
    assert dataset[3] == other[3]
    other.set_epoch(4)
    assert (dataset.epoch, other.epoch) == (0, 4)


def test_steps_that_change_counts_are_refused(dataset: ss.ShardMapDataset) -> None:
    assert not hasattr(dataset, "select")


def test_remote_set_without_index_is_refused_with_the_command(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "set", 5)
    for file in Path(folder).iterdir():
        Storage().resolve("memory://")[0].pipe_file(f"/unindexed/{file.name}", file.read_bytes())
        if file.suffix != ".tar":
            Storage().resolve("memory://")[0].rm_file(f"/unindexed/{file.name}")
    with pytest.raises(OptionError, match="shardstream index"):
        ss.ShardMapDataset("memory://unindexed")
