from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
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
from shardstream.testing import make_shards
from tests.limits import set_limits
from tests.small_datasets import FEW_CORES, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


def label(sample: Any) -> int:
    return int(sample["cls"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbers") / "set", 100, 15)


@pytest.fixture
def dataset(folder: str) -> ss.loader.MapDataset:
    return ss.ShardDataset(folder).by_number().decode()


def test_map_dataset_is_a_sequence(dataset: ss.loader.MapDataset) -> None:
    assert len(dataset) == 100
    assert [label(dataset[i]) for i in (0, 14, 15, 99, -1, -100)] == [0, 14, 15, 99, 99, 0]
    assert [label(sample) for sample in dataset[10:30:7]] == [10, 17, 24]
    assert [label(sample) for sample in dataset[::-1][:3]] == [99, 98, 97]
    assert [label(sample) for sample in dataset.__getitems__([5, 3, 5])] == [5, 3, 5]
    assert sum(1 for _ in dataset) == 100


def test_transform_that_is_set_is_refused(dataset: ss.loader.MapDataset, folder: str) -> None:
    for one in (dataset, ss.ShardDataset(folder)):  # timm's create_loader sets it
        with pytest.raises(
            OptionError, match=r"is not called; append it with map .* under another name"
        ):
            one.transform = str
        assert not hasattr(one, "transform")


@pytest.mark.parametrize("index", [100, -101])
def test_number_out_of_range_is_refused(dataset: ss.loader.MapDataset, index: int) -> None:
    with pytest.raises(IndexError, match="-100 to 99"):
        dataset[index]


@pytest.mark.parametrize("workers", [0, 2])
def test_samplers_subsets_and_splits_of_torch_work(
    dataset: ss.loader.MapDataset, workers: int
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
    dataset = ss.ShardDataset(f"{bucket}/set").by_number().decode()
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
    dataset = ss.ShardDataset(f"{bucket}/set").by_number().decode().map(label)
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
    dataset = ss.ShardDataset(folder, seed=3).by_number().decode().map(draw, rng=True)
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
    dataset = copy.deepcopy(ss.ShardDataset(folder).by_number()[:12].decode().map(draw, rng=True))
    alone = ss.ShardDataset(folder).by_number()[:12].decode().map(draw, rng=True)
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
    dataset = ss.ShardDataset(folder).by_number()[:6].decode().map(draw, rng=True)
    alone = dict(copy.copy(dataset))
    loader: DataLoader[Any] = DataLoader(
        dataset, 3, num_workers=1, collate_fn=list, multiprocessing_context="spawn"
    )
    assert drawn(loader) == alone


def test_random_numbers_of_many_samples_do_not_depend_on_the_order_of_reading(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, ss.loader.MapDataset, MAX_COUNTERS=4)
    dataset = ss.ShardDataset(folder).by_number().decode().map(draw, rng=True)
    assert len({dataset[n] for n in (1, 5, 1, 5)}) == 4
    dataset.set_epoch(1)
    first = [dataset[n] for n in (1, 5)]
    dataset.set_epoch(1)
    assert [dataset[n] for n in (5, 1)] == first[::-1]


def test_datasets_chained_from_a_map_dataset_follow_its_epoch(
    dataset: ss.loader.MapDataset,
) -> None:
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
    dataset = ss.ShardDataset(folder).by_number().decode().map(draw, rng=True)
    other = travel(dataset)
    assert dataset[3] == other[3]
    other.set_epoch(4)
    assert (dataset.epoch, other.epoch) == (0, 4)


def test_steps_that_change_counts_are_refused(dataset: ss.loader.MapDataset) -> None:
    assert not hasattr(dataset, "batched")


def noise(item: Any, rng: np.random.Generator) -> tuple[int, float]:
    return label(item), float(rng.random())


def datasets_of(folder: str) -> Any:
    """Return a dataset of each kind, with a step; its samples have the numbers 0 to n - 1 in ``cls``."""
    whole = ss.ShardDataset(folder, shuffle=True, seed=4, order=ss.OrderOptions(window=16))
    return {
        "shuffled": whole.decode(),
        "subset": ss.ShardDataset(folder, subset=range(40), on_error="skip").decode(),
        "fields": ss.ShardDataset(folder, fields=["cls"]).decode(),
        "join": ss.join(whole, {folder: {"other.npy": "npy"}}).decode(),
        "mix": ss.mix(
            [
                ss.ShardDataset(folder, subset=range(60)).decode(),
                ss.ShardDataset(folder, subset=range(60, 100)),
            ]
        ),
        "mix of mixes": ss.mix([ss.mix([whole.decode()])]),
        "samples": ss.loader.CatalogDataset(whole.samples).decode(),
    }


KINDS = ("shuffled", "subset", "fields", "join", "mix", "mix of mixes", "samples")


@pytest.mark.parametrize("kind", KINDS)
def test_each_dataset_is_read_by_number(folder: str, kind: str) -> None:
    stream = datasets_of(folder)[kind]
    numbered = stream.by_number()
    expected = list(range(len(stream)))
    assert [label(sample) for sample in numbered] == expected
    assert sorted(label(sample) for sample in stream) == expected
    assert len(numbered.samples) == len(stream.samples) == len(expected)
    assert [label(one) for one in numbered.__getitems__([7, 3, 7, 7])] == [7, 3, 7, 7]
    assert len(numbered[5:9].samples) == 4
    assert next(iter(numbered)).keys() == next(iter(stream)).keys()


@pytest.mark.parametrize("kind", KINDS)
def test_samples_that_are_asked_for_twice_draw_twice(folder: str, kind: str) -> None:
    stream = datasets_of(folder)[kind].map(noise, rng=True)
    numbered = stream.by_number()
    found = numbered.__getitems__([7, 3, 7, 7])
    assert [number for number, _ in found] == [7, 3, 7, 7]
    assert len({draw for _, draw in found}) == 4
    other = datasets_of(folder)[kind].by_number().map(noise, rng=True)
    assert other.__getitems__([7, 3, 7, 7]) == found


def test_each_part_of_a_mix_applies_its_steps_to_samples_asked_for_twice(folder: str) -> None:
    parts = {
        "a": ss.ShardDataset(folder, subset=range(10)).map(lambda one: ("a", label(one))),
        "b": ss.ShardDataset(folder, subset=range(10)).map(noise, rng=True),
    }
    found = ss.mix(parts).by_number().__getitems__([13, 3, 13, 3, 14])
    assert [one[0] for one in found] == [3, "a", 3, "a", 4]
    assert found[0][1] != found[2][1]


def test_samples_by_number_begin_at_the_epoch_of_their_dataset(folder: str) -> None:
    stream = ss.ShardDataset(folder)
    stream.set_epoch(5)
    numbered = stream.by_number().map(noise, rng=True)
    assert numbered.epoch == 5
    stream.set_epoch(6)
    assert numbered.epoch == 5
    direct = ss.ShardDataset(folder).by_number().map(noise, rng=True)
    direct.set_epoch(5)
    assert direct[4] == numbered[4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.shuffle(9), "the step Shuffle changes how many items"),
        (lambda one: one.decode().batched(4), "the step Batched changes how many items"),
        (lambda one: ss.mix([one], weights=[1.0]), "weights draw the samples of an epoch"),
        (lambda one: ss.mix({"a": one}, weights=lambda _: {"a": 1.0}), "weights draw"),
    ],
)
def test_items_without_numbers_are_refused(folder: str, change: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        change(ss.ShardDataset(folder)).by_number()


def test_the_samples_of_one_rank_have_no_numbers_of_their_own(folder: str) -> None:
    dataset = ss.ShardDataset(folder, placement=ss.Placement(0, 2))
    with pytest.raises(OptionError, match="leave it out, and use torch's DistributedSampler"):
        dataset.by_number()
    assert len(ss.ShardDataset(folder, placement=ss.Placement()).by_number()) == 100


def test_a_bad_sample_is_an_error_by_number(tmp_path: Path) -> None:
    folder = make_shards(
        tmp_path, samples=[{"__key__": "a", "cls": 1}, {"__key__": "b", "json": b"{"}]
    )
    dataset = ss.ShardDataset(folder, on_error="skip").decode()
    assert dataset.by_number()[0]["cls"] == 1
    with pytest.raises(ss.errors.DecodeError):
        dataset.by_number()[1]


def test_remote_set_without_index_is_refused_with_the_command(tmp_path: Path) -> None:
    folder = numbered(tmp_path / "set", 5)
    for file in Path(folder).iterdir():
        Storage().resolve("memory://")[0].pipe_file(f"/unindexed/{file.name}", file.read_bytes())
        if file.suffix != ".tar":
            Storage().resolve("memory://")[0].rm_file(f"/unindexed/{file.name}")
    with pytest.raises(OptionError, match="shardstream index"):
        ss.ShardDataset("memory://unindexed", read=ss.ReadOptions(index="require"))
    with (
        pytest.warns(ss.errors.NoIndexWarning),
        pytest.raises(
            OptionError, match="so their samples have no numbers; run 'shardstream index'"
        ),
    ):
        ss.ShardDataset("memory://unindexed").by_number()
