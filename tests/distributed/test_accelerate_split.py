"""Either the dataset or an Accelerate loader splits the samples over ranks: all ranks of a job in one process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from accelerate.data_loader import prepare_data_loader
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from torch.utils.data import DataLoader, IterableDataset

import shardstream as ss
from tests.small_datasets import numbered

SAMPLES = 40


@pytest.fixture(autouse=True)
def clean_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the job state that Accelerate keeps for the whole process."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return numbered(tmp_path / "set", SAMPLES, 15)


def dataset(folder: str, placement: ss.Placement | None = None) -> ss.ShardDataset:
    return (
        ss.ShardDataset(folder, order=ss.OrderOptions(microbatch=4), placement=placement)
        .decode()
        .to_tuple("cls")
    )


class Wrapped(IterableDataset[Any]):
    """A wrapper around a loader, as users write it."""

    def __init__(self, items: ss.ShardLoader) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def prepared(loader: DataLoader[Any], rank: int, num_processes: int = 2) -> Any:
    return prepare_data_loader(loader, num_processes=num_processes, process_index=rank)


def numbers(loader: Any) -> list[int]:
    return list(chain.from_iterable(batch[0].tolist() for batch in loader))


def job(make: Callable[[int], Any]) -> list[int]:
    """Return the samples of both ranks, sorted."""
    return sorted(numbers(make(0)) + numbers(make(1)))


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 1, "multiprocessing_context": "spawn"}], ids=["here", "spawned"]
)
def test_given_placement_is_refused_where_accelerate_splits(
    folder: str, workers: dict[str, Any]
) -> None:
    loader = DataLoader(dataset(folder, ss.Placement(1, 2)), batch_size=4, **workers)
    with pytest.raises(ss.errors.OptionError, match=r"Placement\(1, 2\).* split that part again"):
        numbers(prepared(loader, 1))


def test_shard_loader_of_a_given_placement_is_refused_where_accelerate_splits(
    folder: str,
) -> None:
    inner = ss.ShardLoader(dataset(folder, ss.Placement(1, 2)), 4)
    with pytest.raises(ss.errors.OptionError, match="split that part again"):
        list(prepared(DataLoader(Wrapped(inner), batch_size=2), 1))


def test_given_placement_of_one_rank_leaves_the_split_to_accelerate(folder: str) -> None:
    whole = dataset(folder, ss.Placement())
    assert job(lambda rank: prepared(DataLoader(whole, batch_size=4), rank)) == list(range(SAMPLES))


@pytest.mark.parametrize(
    "workers",
    [
        {},
        {"num_workers": 1},
        pytest.param(
            {"num_workers": 1, "multiprocessing_context": "spawn"}, marks=pytest.mark.slow
        ),
    ],
    ids=["here", "forked", "spawned"],
)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_each_sample_is_returned_once_with_either_splitter(
    folder: str, monkeypatch: pytest.MonkeyPatch, num_processes: int, workers: dict[str, Any]
) -> None:
    """An Accelerate loader made for one process does not split, so the dataset does."""

    def rank_of_two(rank: int) -> Any:
        PartialState()  # before the variables are set: they would start a process group
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        loader = prepared(DataLoader(dataset(folder), batch_size=4, **workers), rank, num_processes)
        assert len(loader) == SAMPLES // 4 // 2
        return loader

    assert job(rank_of_two) == list(range(SAMPLES))


def test_ranks_that_share_a_model_get_the_same_samples(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PartialState()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = ParallelismConfig(tp_size=2)
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", config)
    loader = prepared(DataLoader(dataset(folder), batch_size=4), 0, num_processes=1)
    assert len(loader) == SAMPLES // 4
    assert numbers(loader) == list(range(SAMPLES))


def test_inspecting_a_loader_changes_nothing(folder: str) -> None:
    loader = ss.ShardLoader(dataset(folder, ss.Placement(0, 2)), 4)
    assert not dict(inspect.getmembers(loader))["_is_accelerate_prepared"]
    assert not loader._serves_accelerate
    changes_counts = ss.ShardLoader(
        dataset(folder, ss.Placement(0, 2)).select(_is_odd).shuffle(9), 4
    )
    assert not changes_counts.use_stateful_dataloader


def _is_odd(sample: tuple[Any, ...]) -> bool:
    return bool(sample[0] % 2)
