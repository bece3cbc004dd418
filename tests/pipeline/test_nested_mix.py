"""Test nested mixes, and the values that a mix's state must match."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream.errors import OptionError, StateError
from shardstream.testing import make_shards
from tests.small_datasets import FEW_CORES, take

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


class Tag:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, sample: dict[str, Any]) -> str:
        return f"{self.name}{sample['cls']}"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ss.ShardDataset]:
    root = tmp_path_factory.mktemp("mixes")
    sizes = {"tiny": 4, "a": 64, "b": 40}
    return {
        name: ss.ShardDataset(make_shards(root / name, samples=size), shuffle=True)
        .decode()
        .map(Tag(name))
        for name, size in sizes.items()
    }


def names(dataset: Any, batch_size: int = 16) -> list[str]:
    return [name for batch in ss.ShardLoader(dataset, batch_size=batch_size) for name in batch]


def test_nested_mix_loses_no_samples_when_parts_repeat(
    parts: dict[str, ss.ShardDataset],
) -> None:
    inner = ss.mix({"tiny": parts["tiny"], "a": parts["a"]}, [1, 1], stop="all_exhausted")
    outer = ss.mix({"inner": inner, "b": parts["b"]}, [3, 1], samples=512)
    found = names(outer, 256)
    assert len(found) == 512
    counts = Counter(name.rstrip("0123456789") for name in found)
    assert abs(counts["b"] - 128) < 16
    assert abs(counts["tiny"] - counts["a"]) < 32


def draw(item: Any, generator: np.random.Generator) -> tuple[Any, int]:
    return item, int(generator.integers(1 << 40))


def test_random_numbers_of_nested_mixes_do_not_depend_on_the_reader(
    parts: dict[str, ss.ShardDataset],
) -> None:
    """Steps of a part, of an inner and of an outer mix get those of the sample, with and without a loader."""
    drawn = {name: dataset.map(draw, rng=True) for name, dataset in parts.items()}
    inner = ss.mix([drawn["tiny"], drawn["a"]], seed=3).map(draw, rng=True)
    outer = ss.mix([inner, drawn["b"]], seed=5).map(draw, rng=True)
    alone = sorted(outer, key=str)
    assert len(alone) == 4 + 64 + 40
    for num_workers in (0, 2):
        loader = ss.ShardLoader(outer, 4, num_workers=num_workers, collate_fn=list)
        assert sorted((item for batch in loader for item in batch), key=str) == alone
    assert (alone[0], alone[-1]) == (
        (("b0", 490825704345), 165483346601),
        ((("tiny3", 335056185841), 272013031874), 117640477389),
    )  # pinned


def test_weighted_mix_inside_an_unweighted_one_is_refused(
    parts: dict[str, ss.ShardDataset],
) -> None:
    inner = ss.mix({"a": parts["a"], "tiny": parts["tiny"]}, [1, 1])
    with pytest.raises(OptionError, match="'0' is a mix with weights inside a mix without"):
        ss.mix([inner, parts["b"]])


def test_schedule_of_a_nested_mix_gets_training_epochs(
    parts: dict[str, ss.ShardDataset],
) -> None:
    epochs_seen: set[int] = set()

    def schedule(epoch: int) -> dict[str, float]:
        epochs_seen.add(epoch)
        return {"a": 1.0, "tiny": 1.0}

    inner = ss.mix({"a": parts["a"], "tiny": parts["tiny"]}, schedule)
    loader = ss.ShardLoader(
        ss.mix({"inner": inner, "b": parts["b"]}, [1, 1], samples=128), batch_size=16
    )
    loader.set_epoch(2)
    list(loader)
    assert epochs_seen <= {0, 2, 3}


def test_weight_zero_omits_a_part_from_an_epoch(
    parts: dict[str, ss.ShardDataset],
) -> None:
    pair = {"a": parts["a"], "b": parts["b"]}

    def schedule(epoch: int) -> dict[str, float]:
        return {"a": 1.0, "b": float(epoch)}

    loader = ss.ShardLoader(ss.mix(pair, schedule, stop="all_exhausted"), batch_size=8)
    first = {name[0] for batch in loader for name in batch}
    second = {name[0] for batch in loader for name in batch}
    assert (first, second) == ({"a"}, {"a", "b"})


@pytest.mark.parametrize(
    "changed", [{"weights": [9, 1]}, {"stop": "all_exhausted"}, {"samples": 32}]
)
def test_state_of_another_recipe_is_refused(
    parts: dict[str, ss.ShardDataset], changed: dict[str, Any]
) -> None:
    def loader(**options: Any) -> ss.ShardLoader:
        return ss.ShardLoader(
            ss.mix([parts["a"], parts["b"]], **{"weights": [1, 1], **options}), batch_size=4
        )

    left = loader()
    take(left, 2)
    with pytest.raises(StateError, match="mix: the state says"):
        loader(**changed).load_state_dict(left.state_dict())


def stop(name: str) -> str:
    if name == "a7":
        raise StopIteration
    return name


@pytest.mark.parametrize("mapped", [True, False])
def test_function_that_raises_stop_iteration_does_not_end_an_epoch(
    parts: dict[str, ss.ShardDataset], mapped: bool
) -> None:
    mixed = ss.mix([parts["a"].map(stop), parts["b"]])
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(mixed) if mapped else names(mixed)
