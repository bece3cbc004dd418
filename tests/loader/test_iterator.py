"""Test datasets in loaders that save the state of each worker's iterator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

import shardstream as ss
from shardstream.errors import StateError
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, grouped, labels, numbered, take

pytestmark = [
    pytest.mark.filterwarnings(FEW_CORES),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # a warning of torchdata
]


def is_odd(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 2)


def planned(folder: str) -> ss.ShardDataset:
    return ss.ShardDataset(folder, shuffle=True).decode()


def streamed(folder: str) -> ss.ShardDataset:
    return ss.ShardDataset(folder, shuffle=True).decode().select(is_odd).shuffle(20)


@pytest.mark.parametrize(
    ("make", "workers", "taken"),
    with_slow_rest(
        [(planned, 0, 1), (planned, 2, 4), (streamed, 0, 4), (streamed, 2, 1)],
        [planned, streamed],
        [0, 2],
        [1, 4],
    ),
)
def test_torchdata_resumes_exactly(tmp_path: Path, make: Any, workers: int, taken: int) -> None:
    folder = numbered(tmp_path / "set", 150, 20)

    def loader() -> Any:
        return StatefulDataLoader(make(folder), batch_size=8, num_workers=workers)

    whole = labels(loader())
    left = loader()
    first = labels(take(left, taken))
    again = loader()
    again.load_state_dict(left.state_dict())
    assert first + labels(again) == whole


def test_state_contains_the_epoch(tmp_path: Path) -> None:
    dataset = planned(numbered(tmp_path / "set", 30))
    dataset.set_epoch(3)
    iterator = iter(dataset)
    first = [sample["cls"] for sample in take(iterator, 10)]
    again = iter(planned(str(tmp_path / "set")))
    again.load_state_dict(iterator.state_dict())
    dataset.set_epoch(3)
    assert first + [sample["cls"] for sample in again] == [sample["cls"] for sample in dataset]


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"seed": 9}, "seed: the state says 0, here it is 9"),
        ({"lanes": 7}, "lanes: the state says 1, here it is 7"),
        ({"placement": ss.Placement(1, 2)}, "rank: the state says 0, here it is 1"),
    ],
)
def test_state_of_another_reader_is_refused(
    tmp_path: Path, changed: dict[str, Any], match: str
) -> None:
    folder = numbered(tmp_path / "set", 30)
    state = iter(ss.ShardDataset(folder, shuffle=True)).state_dict()
    with pytest.raises(StateError, match=match):
        iter(ss.ShardDataset(folder, **grouped(shuffle=True, **changed))).load_state_dict(state)
