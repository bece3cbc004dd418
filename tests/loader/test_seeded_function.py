"""Test map(rng="torch"): the draws of a sample depend on seed, epoch and sample only, and the global generators are restored."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardstream as ss
from shardstream.errors import OptionError
from tests.small_datasets import FEW_CORES, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


def draw(sample: dict[str, Any]) -> dict[str, Any]:
    legacy = np.random.random()
    draws = [torch.rand(()).item(), legacy, random.random()]
    return {"cls": sample["cls"], "draws": torch.tensor(draws, dtype=torch.float64)}


def global_draws() -> tuple[Any, ...]:
    return draw({"cls": 0})["draws"].tolist()  # type: ignore[no-any-return]


def fail(sample: dict[str, Any]) -> None:
    torch.rand(())
    raise RuntimeError("no")


def draws_of(dataset: ss.ShardDataset, epoch: int = 0, **options: Any) -> dict[int, list[float]]:
    loader = ss.ShardLoader(dataset, batch_size=5, **options)
    loader.set_epoch(epoch)
    return {
        label: row
        for batch in loader
        for label, row in zip(batch["cls"].tolist(), batch["draws"].tolist(), strict=True)
    }


def test_draws_depend_on_seed_epoch_and_sample_only(tmp_path: Path) -> None:
    folder = numbered(tmp_path, 20)
    dataset = ss.ShardDataset(folder, shuffle=True, seed=1).decode().map(draw, rng="torch")
    one = draws_of(dataset)
    assert len(one) == 20
    assert len({value for row in one.values() for value in row}) == 60
    assert draws_of(dataset, num_workers=2, multiprocessing_context="fork") == one
    ranks = [
        ss.ShardDataset(folder, shuffle=True, seed=1, placement=ss.Placement(rank, 2))
        for rank in (0, 1)
    ]
    parts = [draws_of(part.decode().map(draw, rng="torch")) for part in ranks]
    assert parts[0] | parts[1] == one
    assert draws_of(dataset, epoch=1).keys() == one.keys()
    assert not {tuple(row) for row in draws_of(dataset, epoch=1).values()} & set(
        map(tuple, one.values())
    )
    twice = dataset.map(draw, rng="torch")  # a second step has other draws
    assert not set(map(tuple, draws_of(twice).values())) & set(map(tuple, one.values()))


def test_global_generators_are_restored_after_values_and_errors(tmp_path: Path) -> None:
    dataset = ss.ShardDataset(numbered(tmp_path, 4)).decode()

    def seed() -> None:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)

    seed()
    expected = [global_draws() for _ in range(2)]
    seed()
    list(dataset.map(draw, rng="torch"))
    assert global_draws() == expected[0]
    with pytest.raises(RuntimeError, match="no") as caught:
        list(dataset.map(fail, rng="torch"))
    assert caught.value.__notes__[0].startswith("in map(fail) on sample '000000'")
    assert global_draws() == expected[1]


def test_threads_and_unknown_generators_are_refused(tmp_path: Path) -> None:
    dataset = ss.ShardDataset(numbered(tmp_path, 4)).decode()
    with pytest.raises(OptionError, match="works without threads"):
        dataset.map(draw, rng="torch", threads=2)
    with pytest.raises(OptionError, match="rng must be True, False or 'torch', not 'numpy'"):
        dataset.map(draw, rng="numpy")  # type: ignore[arg-type]


def test_second_number_of_a_pair_of_gaussians_is_restored(tmp_path: Path) -> None:
    dataset = ss.ShardDataset(numbered(tmp_path, 3)).decode().map(draw, rng="torch")
    np.random.seed(0)
    expected = np.random.randn(3).tolist()
    np.random.seed(0)
    found = [np.random.randn()]
    list(dataset)
    assert [*found, *np.random.randn(2)] == expected


def draw_label(label: int) -> float:
    return label + torch.rand(()).item()


def draw_numbers(label: int, generator: np.random.Generator) -> float:
    return label + generator.random()


@pytest.mark.parametrize(("function", "rng"), [(draw_label, "torch"), (draw_numbers, True)])
def test_parts_of_tuples_draw_by_seed_epoch_and_sample(
    function: Any, rng: Any, tmp_path: Path
) -> None:
    folder = numbered(tmp_path, 12)
    found: list[set[tuple[float, float]]] = []
    for rank, world_size in [(0, 1), (0, 2), (1, 2)]:
        data = ss.ShardDataset(folder, shuffle=True, placement=ss.Placement(rank, world_size))
        pairs = data.decode().to_tuple("cls", "cls").map_tuple(function, function, rng=rng)
        found.append(set(pairs))
    assert found[0] == found[1] | found[2]
    assert len({value for pair in found[0] for value in pair}) == 24
    with pytest.raises(OptionError, match="rng must be True"):
        ss.ShardDataset(folder).map_tuple(function, rng="numpy")  # type: ignore[arg-type]
