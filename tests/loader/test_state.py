from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardstream as ss
from shardstream.errors import OptionError, StateError
from shardstream.order import EpochOrder
from shardstream.pipeline import (
    VERSION,
    LoaderPosition,
    check_state,
    part_state,
    plan_state,
    seal_state,
)
from shardstream.testing import make_shards
from tests.small_datasets import grouped, labels, loader, numbered, take

ORDER = EpochOrder(nsamples=100, batch=4, shuffle=True, seed=-3, lanes=2, window=8, block=5)
OPTIONS: dict[str, Any] = {"shuffle": True, "seed": 1, "lanes": 4, "microbatch": 4, "window": 8}
OPTIONS["block"] = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbered"), 60, 9)


def state_of(order: EpochOrder, data: dict[str, Any], epoch: int, consumed: int) -> dict[str, Any]:
    return plan_state(order, data, LoaderPosition(epoch=epoch, consumed=consumed))


def test_state_is_a_few_numbers() -> None:
    state = state_of(ORDER, {"fingerprint": "ab12"}, 2, 40)
    assert state == {
        "version": VERSION, "kind": "plan", "fingerprint": "ab12", "seed": -3, "shuffle": True,
        "epoch": 2, "consumed": 40, "microbatch": 4, "lanes": 2, "window": 8, "block": 5,
        "state_checksum": state["state_checksum"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("consumed", "position"), [(0, (2, 0)), (96, (2, 96)), (100, (3, 0)), (101, (3, 0))]
)
def test_end_of_an_epoch_is_the_start_of_the_next(consumed: int, position: tuple[int, int]) -> None:
    state = state_of(ORDER, {}, 2, consumed)
    assert (state["epoch"], state["consumed"]) == position


def test_positions_of_parts_survive_json() -> None:
    position = LoaderPosition(epoch=1, parts={0: {"taken": 3}, 2: {"taken": 1}}, next_part=1)
    state = part_state({"kind": "parts", "num_workers": 3}, position)
    assert json.loads(json.dumps(state)) == state
    assert state["parts"] == {"0": {"taken": 3}, "2": {"taken": 1}}


@pytest.mark.parametrize("state", [None, 3, [], {}, {"epoch": 1}, {"_snapshot": {}}])
def test_invalid_states_are_refused(state: Any) -> None:
    with pytest.raises(StateError, match="not a state of a ShardLoader"):
        check_state(state, expected={})


@pytest.mark.parametrize("version", [1, 99])
def test_state_of_another_version_is_refused(version: int) -> None:
    match = (
        f"the state has version {version}, this shardstream continues version 2; finish the epoch"
    )
    with pytest.raises(StateError, match=match):
        check_state({"version": version, "kind": "plan"}, expected={})


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
def test_state_of_another_order_is_refused_with_both_values(
    changed: dict[str, Any], message: str, folder: str
) -> None:
    state = loader(folder, **OPTIONS).state_dict()
    with pytest.raises(StateError, match=message):
        loader(folder, **(OPTIONS | changed)).load_state_dict(state)


def test_state_of_other_data_is_refused(folder: str, tmp_path: Path) -> None:
    state = loader(folder).state_dict()
    with pytest.raises(
        StateError, match=r"fingerprint of the dataset: .* it was saved with other d"
    ):
        loader(numbered(tmp_path, 61, 9)).load_state_dict(state)


def reordered(folder: Path, seed: int) -> str:
    """Write a dataset of 40 samples whose order depends on the seed, with equal counts, shard names and sizes."""
    order = np.random.default_rng(seed).permutation(40).tolist()
    samples = [{"__key__": f"{i:06d}", "cls": 10 + i} for i in order]
    return make_shards(folder / f"{seed}", samples=samples, per_shard=9)


def steps_for(kind: str, folder: str) -> ss.ShardLoader:
    dataset = ss.ShardDataset(folder, shuffle=True)
    if kind == "mix":
        return ss.ShardLoader(ss.mix([dataset, dataset], [1, 1]), 4)
    if kind == "whole shards":
        return ss.ShardLoader(ss.ShardDataset(folder, read=ss.ReadOptions(index="ignore")), 4)
    return ss.ShardLoader(dataset.shuffle(3) if kind == "stream" else dataset, 4)


@pytest.mark.parametrize("kind", ["plan", "stream", "mix", "whole shards"])
def test_state_of_other_data_of_the_same_size_is_refused(kind: str, tmp_path: Path) -> None:
    one, same, other = (
        reordered(tmp_path / "a", 1),
        reordered(tmp_path / "b", 1),
        reordered(tmp_path, 2),
    )
    state = json.loads(json.dumps(steps_for(kind, one).state_dict()))
    steps_for(kind, same).load_state_dict(state)
    with pytest.raises(
        StateError, match=r"checksums of the dataset: .* it was saved with other data"
    ):
        steps_for(kind, other).load_state_dict(state)
    iterator, state = iter(ss.ShardDataset(other)), iter(ss.ShardDataset(one)).state_dict()
    with pytest.raises(StateError, match="checksums of the dataset"):
        iterator.load_state_dict(state)


def test_missing_checksums_cause_a_warning(
    tmp_path: Path,
) -> None:
    folder = reordered(tmp_path, 1)
    known = steps_for("plan", folder).state_dict()
    Path(folder, "index.json").unlink()
    unknown = steps_for("plan", folder)
    with pytest.warns(UserWarning, match="the bytes were not compared. Write a manifest"):
        unknown.load_state_dict(known)
    state = unknown.state_dict()
    ss.index(folder)
    steps_for("plan", folder).load_state_dict(state)


@pytest.mark.parametrize("make", [lambda ds: ds, lambda ds: ds.shuffle(5)], ids=["plan", "parts"])
def test_edited_state_is_refused(make: Any, folder: str) -> None:
    def fresh() -> ss.ShardLoader:
        return ss.ShardLoader(make(ss.ShardDataset(folder, shuffle=True, seed=1)), 4)

    left = fresh()
    take(left, 3)
    state = json.loads(json.dumps(left.state_dict()))
    fresh().load_state_dict(state)
    for name, value in state.items():
        changed = value + (4 if name == "consumed" else 8) if type(value) is int else "edited"
        with pytest.raises(StateError):
            fresh().load_state_dict(state | {name: changed})
    with pytest.raises(StateError, match="this state is damaged or was edited: its checksum is wr"):
        fresh().load_state_dict(state | {"epoch": 3})


@pytest.mark.parametrize("name", ["epoch", "consumed", "microbatch", "lanes", "window", "block"])
@pytest.mark.parametrize("value", [1 << 70, -(1 << 70), 1.5, float("nan"), "8", None])
def test_absurd_numbers_are_refused(name: str, value: Any, folder: str) -> None:
    state = loader(folder, shuffle=True).state_dict()
    with pytest.raises(StateError, match=f"{name} is "):
        loader(folder, shuffle=True).load_state_dict(state | {name: value})


@pytest.mark.parametrize("epoch", [1.5, "1", None, -1, 1 << 31, 1 << 70])
def test_epoch_is_a_whole_number(epoch: Any, folder: str) -> None:
    fine: Any = np.int64(3)
    for one in (loader(folder), ss.ShardDataset(folder), ss.ShardDataset(folder).by_number()):
        with pytest.raises(OptionError, match="epoch must be"):
            one.set_epoch(epoch)
        one.set_epoch(fine)


def open_as(folder: str, options: dict[str, Any]) -> ss.ShardLoader:
    batch_size: Any = np.int64(8)
    return ss.ShardLoader(ss.ShardDataset(folder, **grouped(shuffle=True, **options)), batch_size)


@pytest.mark.parametrize("name", ["seed", "lanes", "microbatch", "window", "block"])
def test_numbers_of_the_order_are_whole_and_plain(name: str, folder: str) -> None:
    with pytest.raises(OptionError, match=f"{name} must be a whole number, not 8.0"):
        open_as(folder, {name: 8.0})
    state = open_as(folder, {name: np.int64(8)}).state_dict()
    assert json.loads(json.dumps(state)) == state


def test_state_is_accepted_for_a_copy_of_the_data(folder: str, tmp_path: Path) -> None:
    state = loader(folder).state_dict()
    loader(numbered(tmp_path, 60, 9)).load_state_dict(state)


def test_state_of_another_kind_of_pipeline_is_refused(folder: str) -> None:
    exact = ss.ShardDataset(folder).decode()
    one, other = ss.ShardLoader(exact, 4), ss.ShardLoader(exact.shuffle(3), 4)
    for giver, taker in ((one, other), (other, one)):
        with pytest.raises(StateError, match="kind of pipeline: the state says"):
            taker.load_state_dict(giver.state_dict())


def test_default_options_are_taken_from_the_state(folder: str) -> None:
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


def test_a_copy_of_a_loader_has_a_position_of_its_own(folder: str) -> None:
    one = loader(folder, 8, **OPTIONS)
    batches = iter(one)
    next(batches)
    other, before = copy.copy(one), one.state_dict()
    next(batches)
    assert other.state_dict() == before != one.state_dict()


def test_batch_size_that_is_no_multiple_of_the_saved_microbatch_is_refused(folder: str) -> None:
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
def test_damaged_state_is_refused_with_the_field(
    damage: Callable[[dict[str, Any]], dict[str, Any]], message: str, folder: str
) -> None:
    state = loader(folder, shuffle=True).state_dict()
    with pytest.raises(StateError, match=f"this state is damaged: {message}"):
        loader(folder, shuffle=True).load_state_dict(damage(state))


@pytest.mark.parametrize("parts", ["gone", [], 3])
def test_state_without_its_parts_is_refused(parts: Any, folder: str) -> None:
    dataset = ss.ShardDataset(folder).shuffle(3)
    state = broken(parts=parts)(ss.ShardLoader(dataset, 4).state_dict())
    with pytest.raises(StateError, match="this state is damaged: parts is"):
        ss.ShardLoader(dataset, 4).load_state_dict(state)


def test_checksum_of_a_state_is_pinned_and_ignores_key_order() -> None:
    """Otherwise later versions would refuse saved states."""
    state = state_of(ORDER, {"fingerprint": "ab12"}, 2, 40)
    assert state["state_checksum"] == "d3b534f353301a05"
    check_state(dict(reversed(state.items())), expected={})


def test_epoch_of_one_sample_ends_with_it() -> None:
    order = EpochOrder(nsamples=1, batch=1, shuffle=False, seed=0, lanes=1, window=1, block=1)
    assert state_of(order, {}, 0, 1)["epoch"] == 1


@pytest.mark.parametrize("checksums", [None, "aa", ["aa", "bb"], []])
def test_malformed_checksums_are_refused(checksums: Any) -> None:
    state = state_of(ORDER, {"checksums": checksums}, 2, 40)
    check_state(state, expected={})
    with pytest.raises(StateError, match="this state is damaged: checksums is"):
        check_state(state, expected={"checksums": ["aa"]})


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("fingerprint", "use the same dataset"),
        ("num_workers", "resume only on the same topology"),
        ("world_size", "resume only on the same topology"),
        ("seed", "use the same value, or start without the state"),
    ],
)
def test_each_difference_has_a_remedy(name: str, remedy: str) -> None:
    state = state_of(ORDER, {name: 3}, 2, 40)
    with pytest.raises(StateError, match=remedy):
        check_state(state, expected={name: 4})


@pytest.mark.parametrize(("name", "limit"), [("lanes", 1 << 24), ("window", 1 << 62)])
def test_numbers_in_a_state_are_limited(name: str, limit: int) -> None:
    for value, is_fine in ((limit - 1, True), (limit, False)):
        state = seal_state({**state_of(ORDER, {}, 2, 40), name: value})
        if is_fine:
            check_state(state, expected={})
        else:
            with pytest.raises(StateError, match=f"this state is damaged: {name} is {value}"):
                check_state(state, expected={})
