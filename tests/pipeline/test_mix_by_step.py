"""Weights of a mix by the step of the training: exact shares, on any ranks and after resumes on others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.errors import OptionError, StateError
from shardstream.testing import make_shards
from tests.small_datasets import FEW_CORES, grouped, take

pytestmark = [pytest.mark.filterwarnings("ignore:lanes="), pytest.mark.filterwarnings(FEW_CORES)]
SIZES = {"a": 90, "b": 40, "c": 25}
MICROBATCH, LANES, SAMPLES = 2, 8, 192
TABLE = {0: {"a": 1, "b": 0, "c": 0}, 5: {"a": 0, "b": 3, "c": 1}, 9: {"a": 1, "b": 1, "c": 0}}


class Tag:
    """A picklable step of one dataset of the mix."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, sample: dict[str, Any]) -> str:
        return f"{self.name}{sample['cls']}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("mix")
    return {
        name: make_shards(root / name, samples=size, per_shard=17) for name, size in SIZES.items()
    }


def mixed(folders: dict[str, str], weights: Any, **options: Any) -> ss.loader.StreamDataset:
    own = {"placement": options.pop("placement")} if "placement" in options else {}
    parts = {
        name: ss.ShardDataset(folder, shuffle=True, **own).decode().map(Tag(name))
        for name, folder in folders.items()
    }
    options = {"samples": SAMPLES, "lanes": LANES, "microbatch": MICROBATCH, "seed": 3, **options}
    return ss.mix(parts, weights, **grouped(**options))


def microbatches(loaders: list[ss.ShardLoader], steps: int | None = None) -> list[list[str]]:
    """Return the microbatches of all ranks together, in the order of the epoch."""
    ranks = [list(loader) if steps is None else take(loader, steps) for loader in loaders]
    return [
        batch[at : at + MICROBATCH]
        for step in zip(*ranks, strict=True)
        for batch in step
        for at in range(0, len(batch), MICROBATCH)
    ]


def every_other(step: int) -> dict[str, float]:
    return {"a": 1 - step % 2, "b": step % 2, "c": 0}


SCHEDULES = {
    "table": ss.WeightSchedule(TABLE, step=16),
    "a step that is no multiple of a round": ss.WeightSchedule(TABLE, step=7),
    "function": ss.WeightSchedule(every_other, step=8, every=3),
}


@pytest.mark.parametrize(
    "name", ["table", *(pytest.param(name, marks=pytest.mark.slow) for name in [*SCHEDULES][1:])]
)
@given(data=st.data())
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_two_resumes_on_other_ranks_give_the_same_samples(
    folders: dict[str, str], name: str, data: st.DataObject
) -> None:
    schedule, epoch = SCHEDULES[name], data.draw(st.integers(0, 2))
    whole = ss.ShardLoader(mixed(folders, schedule), 2)
    whole.set_epoch(epoch)
    expected = microbatches([whole])
    assert len(expected) == SAMPLES // MICROBATCH
    state, ranks = None, 1
    seen: list[list[str]] = []
    for last in (False, False, True):
        ranks, batch = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([2, 4]))
        loaders = [
            ss.ShardLoader(mixed(folders, schedule, placement=ss.Placement(rank, ranks)), batch)
            for rank in range(ranks)
        ]
        for loader in loaders:
            loader.set_epoch(epoch)
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        seen += microbatches(loaders, None if last else data.draw(st.integers(0, 7)))
        states = [loader.state_dict() for loader in loaders]
        assert all(one == states[0] for one in states)
        state = states[0]
        if state["epoch"] > epoch:  # its last step was taken
            break
    full = len(seen) - 2 * ranks  # the last step may be shorter, and repeat samples
    assert seen[:full] == expected[:full]
    assert {one for batch in seen for one in batch} == {one for batch in expected for one in batch}


def shares(batches: list[list[str]]) -> Counter[str]:
    return Counter(sample[0] for batch in batches for sample in batch)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_step_has_its_weights_from_its_first_sample_on(
    folders: dict[str, str], workers: int
) -> None:
    schedule = ss.WeightSchedule({0: {"a": 1, "b": 0, "c": 0}, 4: {"a": 0, "b": 0, "c": 1}, 8: {"a": 0, "b": 3, "c": 1}}, step=16)  # fmt: skip
    loader = ss.ShardLoader(mixed(folders, schedule), 16, num_workers=workers)
    steps = list(loader)
    assert [shares([step]) for step in steps[:8]] == [{"a": 16}] * 4 + [{"c": 16}] * 4
    assert shares(steps[8:]).keys() == {"b", "c"}
    assert abs(shares(steps[8:])["c"] - 16) <= LANES
    assert loader.samples_per_dataset == shares(steps)
    following = list(loader)  # the training goes on with step 12
    assert shares(following).keys() == {"b", "c"}
    assert abs(shares(following)["c"] - SAMPLES / 4) <= LANES


def test_steps_count_over_epochs(folders: dict[str, str]) -> None:
    table = {0: {"a": 1, "b": 0, "c": 0}, SAMPLES + 32: {"a": 0, "b": 1, "c": 0}}
    loader = ss.ShardLoader(mixed(folders, ss.WeightSchedule(table, step=1)), 16)
    epochs = [list(loader) for _ in range(3)]
    assert shares(epochs[0]) == {"a": SAMPLES}
    assert (shares(epochs[1][:2]), shares(epochs[1][2:])) == ({"a": 32}, {"b": SAMPLES - 32})
    assert shares(epochs[2]) == {"b": SAMPLES}


def test_a_function_is_called_with_steps_not_with_epochs(folders: dict[str, str]) -> None:
    called: list[int] = []

    def weights(step: int) -> Mapping[str, float]:
        called.append(step)
        return {"a": 1, "b": 1, "c": 1}

    loader = ss.ShardLoader(mixed(folders, ss.WeightSchedule(weights, step=8, every=10)), 8)
    assert set(called) == {0, 10, 20}
    called.clear()
    loader.set_epoch(2)  # begins at step 48
    take(loader, 1)
    assert {40, 50, 60, 70} <= set(called) <= {0, 10, 20, 40, 50, 60, 70}


def test_equal_weights_at_all_steps_are_those_of_no_schedule(folders: dict[str, str]) -> None:
    same = {"a": 2, "b": 1, "c": 1}
    loaders = [
        ss.ShardLoader(mixed(folders, weights), 4)
        for weights in (same, ss.WeightSchedule({0: same}, step=4))
    ]
    assert list(loaders[0]) == list(loaders[1])


def test_a_state_of_another_schedule_is_refused(folders: dict[str, str]) -> None:
    state = ss.ShardLoader(mixed(folders, SCHEDULES["table"]), 4).state_dict()
    ss.ShardLoader(mixed(folders, SCHEDULES["table"]), 4).load_state_dict(json.loads(json.dumps(state)))  # fmt: skip
    changed = ss.WeightSchedule(TABLE | {9: {"a": 1, "b": 2, "c": 0}}, step=16)
    for other in (changed, ss.WeightSchedule(TABLE, step=8), TABLE[0], SCHEDULES["function"]):
        with pytest.raises(StateError, match="mix: the state says"):
            ss.ShardLoader(mixed(folders, other), 4).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ss.WeightSchedule({5: TABLE[0]}, step=1), "begin with 0"),
        (lambda: ss.WeightSchedule({0: TABLE[0], -1: TABLE[0]}, step=1), "begin with 0"),
        (lambda: ss.WeightSchedule({0.5: TABLE[0]}, step=1), "whole number"),  # type: ignore[dict-item]
        (lambda: ss.WeightSchedule(TABLE, step=0), "step must be at least 1"),
        (lambda: ss.WeightSchedule(TABLE, step=1, every=5), "needs every= for a function"),
        (lambda: ss.WeightSchedule(every_other, step=1), "needs every= for a function"),
    ],
)
def test_an_invalid_schedule_is_refused(make: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        make()


@pytest.mark.parametrize(
    ("schedule", "options", "match"),
    [
        (ss.WeightSchedule(TABLE, step=1), {"samples": None}, "needs samples= of the mix"),
        (ss.WeightSchedule({0: {"a": 1.0}}, step=1), {}, r"weights are for \['a'\]"),
        (ss.WeightSchedule({0: TABLE[0], 9: {"a": -1, "b": 1, "c": 1}}, step=1), {}, "at least 0"),
        (ss.WeightSchedule({0: TABLE[0], 10**6: {"a": 1}}, step=1), {}, r"weights are for \['a'\]"),
        (ss.WeightSchedule(every_other, step=1, every=1), {"samples": 2048}, "larger every="),
    ],
)
def test_a_schedule_that_does_not_fit_the_mix_is_refused(
    folders: dict[str, str], schedule: Any, options: Any, match: str
) -> None:
    with pytest.raises(OptionError, match=match):
        len(ss.ShardLoader(mixed(folders, schedule, **options), 2))


def test_a_schedule_belongs_to_the_outermost_mix(folders: dict[str, str]) -> None:
    inner = mixed(folders, SCHEDULES["table"])
    for weights in (None, [1.0, 1.0]):
        with pytest.raises(OptionError, match="a mix with WeightSchedule inside a mix"):
            ss.mix([inner, ss.ShardDataset(folders["a"])], weights)
