from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import StateError
from shardstream.read.plan import Order
from shardstream.read.stage import Position
from shardstream.read.state import VERSION, check_state, part_state, plan_state
from tests.read.sets import labels, loader, numbered, take

ORDER = Order(nsamples=100, batch=4, shuffle=True, seed=-3, lanes=2, window=8, block=5)
OPTIONS: dict[str, Any] = {"shuffle": True, "seed": 1, "lanes": 4, "microbatch": 4, "window": 8}
OPTIONS["block"] = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbered"), 60, 9)


def test_a_state_is_a_few_numbers() -> None:
    assert plan_state(ORDER, fingerprint="ab12", epoch=2, consumed=40) == {
        "version": VERSION, "kind": "plan", "fingerprint": "ab12", "seed": -3, "shuffle": True,
        "epoch": 2, "consumed": 40, "microbatch": 4, "lanes": 2, "window": 8, "block": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("consumed", "position"), [(0, (2, 0)), (96, (2, 96)), (100, (3, 0)), (101, (3, 0))]
)
def test_the_end_of_an_epoch_is_the_start_of_the_next(
    consumed: int, position: tuple[int, int]
) -> None:
    state = plan_state(ORDER, fingerprint="", epoch=2, consumed=consumed)
    assert (state["epoch"], state["consumed"]) == position


def test_positions_of_parts_survive_json() -> None:
    position = Position(epoch=1, parts={0: {"taken": 3}, 2: {"taken": 1}}, next_part=1)
    state = part_state({"kind": "parts", "num_workers": 3}, position)
    assert json.loads(json.dumps(state)) == state
    assert state["parts"] == {"0": {"taken": 3}, "2": {"taken": 1}}


@pytest.mark.parametrize("state", [None, 3, [], {}, {"epoch": 1}, {"_snapshot": {}}])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(StateError, match="no state of a ShardLoader"):
        check_state(state, mine={})


def test_a_state_of_another_version_is_refused() -> None:
    with pytest.raises(StateError, match="a state of version 99; this shardstream continues versi"):
        check_state({"version": 99, "kind": "plan"}, mine={})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 2}, "seed: the state says 1, here it is 2"),
        ({"shuffle": False}, "shuffle: the state says True, here it is False"),
        ({"lanes": 8}, "lanes: the state says 4, here it is 8"),
        ({"microbatch": 2}, "microbatch: the state says 4, here it is 2"),
        ({"window": 16}, "window: the state says 8, here it is 16"),
        ({"block": 4}, "block: the state says 3, here it is 4"),
    ],
)
def test_a_state_of_another_order_is_refused_with_both_values(
    changed: dict[str, Any], message: str, folder: str
) -> None:
    state = loader(folder, **OPTIONS).state_dict()
    with pytest.raises(StateError, match=message):
        loader(folder, **(OPTIONS | changed)).load_state_dict(state)


def test_a_state_of_other_data_is_refused(folder: str, tmp_path: Path) -> None:
    state = loader(folder).state_dict()
    with pytest.raises(StateError, match=r"fingerprint of the dataset: .* it was taken on other d"):
        loader(numbered(tmp_path, 61, 9)).load_state_dict(state)


def test_the_same_data_elsewhere_is_the_same(folder: str, tmp_path: Path) -> None:
    state = loader(folder).state_dict()
    loader(numbered(tmp_path, 60, 9)).load_state_dict(state)


def test_a_state_of_another_kind_of_pipeline_is_refused(folder: str) -> None:
    exact = ss.ShardDataset(folder).decode()
    one, other = ss.ShardLoader(exact, 4), ss.ShardLoader(exact.shuffle(3), 4)
    for giver, taker in ((one, other), (other, one)):
        with pytest.raises(StateError, match="kind of pipeline: the state says"):
            taker.load_state_dict(giver.state_dict())


def test_what_was_not_said_is_taken_from_the_state(folder: str) -> None:
    explicit = loader(folder, 8, **OPTIONS)
    full = labels(explicit)
    explicit.set_epoch(0)
    take(explicit, 3)
    other = loader(folder, 8, shuffle=True, seed=1)
    other.load_state_dict(explicit.state_dict())
    assert labels(other) == full[3:]
    assert labels(other) == labels(loader_at(folder, 1))


def loader_at(folder: str, epoch: int) -> ss.ShardLoader:
    one = loader(folder, 8, **OPTIONS)
    one.set_epoch(epoch)
    return one


def test_a_batch_size_that_the_state_does_not_divide_is_refused(folder: str) -> None:
    state = loader(folder, 8, shuffle=True).state_dict()
    with pytest.raises(StateError, match="microbatch: the state says 8, .* batch_size=12 here"):
        loader(folder, 12, shuffle=True).load_state_dict(state)


def broken(**changed: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {k: v for k, v in (state | changed).items() if v != "gone"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (broken(epoch="gone"), "epoch is None"),
        (broken(epoch=-1), "epoch is -1"),
        (broken(consumed="gone"), "consumed is None"),
        (broken(consumed="12"), "consumed is '12'"),
        (broken(consumed=13), "consumed is 13, microbatch 8"),
        (broken(microbatch=0), "microbatch is 0"),
        (broken(lanes=None), "lanes is None"),
    ],
)
def test_a_damaged_state_is_refused_by_name(
    damage: Callable[[dict[str, Any]], dict[str, Any]], message: str, folder: str
) -> None:
    state = loader(folder, shuffle=True).state_dict()
    with pytest.raises(StateError, match=f"this state is damaged: {message}"):
        loader(folder, shuffle=True).load_state_dict(damage(state))


@pytest.mark.parametrize("parts", ["gone", [], 3])
def test_a_state_without_its_parts_is_refused(parts: Any, folder: str) -> None:
    dataset = ss.ShardDataset(folder).shuffle(3)
    state = broken(parts=parts)(ss.ShardLoader(dataset, 4).state_dict())
    with pytest.raises(StateError, match="this state is damaged: parts is"):
        ss.ShardLoader(dataset, 4).load_state_dict(state)
