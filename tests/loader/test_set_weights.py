"""Weights given in a running training: from the next batch on, on any ranks and workers, and after resumes on others."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.errors import OptionError, StateError
from shardstream.testing import make_shards
from tests.pipeline.test_mix_by_step import MICROBATCH, SAMPLES, SIZES, TABLE, mixed, shares
from tests.small_datasets import FEW_CORES

pytestmark = [pytest.mark.filterwarnings("ignore:lanes="), pytest.mark.filterwarnings(FEW_CORES)]
ONLY_A, ONLY_B, ONLY_C = ({name: float(name == one) for name in SIZES} for one in SIZES)
STEP = 16  # samples of a step of 4 ranks and batches of 4
WEIGHTS = st.sampled_from([ONLY_A, ONLY_B, ONLY_C, {"a": 1, "b": 2, "c": 1}, {"a": 0, "b": 1, "c": 5}])  # fmt: skip
MIXES = {"weights": {"a": 2, "b": 1, "c": 0}, "schedule": ss.WeightSchedule(TABLE, step=16)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("mix")
    return {
        name: make_shards(root / name, samples=size, per_shard=17) for name, size in SIZES.items()
    }


def read(
    loaders: list[ss.ShardLoader], end: int, changes: dict[int, Any], state: Any
) -> list[list[str]]:
    """Return the microbatches of all ranks from a state to a sample of epoch 1, with changes at samples of it."""
    begin = 0
    for loader in loaders:
        loader.set_epoch(1)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
            begin = state["consumed"] if state["epoch"] == 1 else SAMPLES
    iterators: list[Iterator[Any]] = [iter(loader) for loader in loaders]
    seen, size = list[list[str]](), len(loaders) * (loaders[0].batch_size or 1)
    for at in range(begin, end, size):
        if at in changes:
            samples = [loader.set_weights(changes[at]) for loader in loaders]
            assert samples == [SAMPLES + at] * len(loaders)
        for batch in [next(iterator) for iterator in iterators]:
            seen += [batch[first : first + MICROBATCH] for first in range(0, len(batch), 2)]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXES)
@given(data=st.data())
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_two_resumes_elsewhere_give_the_same_samples(
    folders: dict[str, str], name: str, data: st.DataObject
) -> None:
    places = st.integers(0, SAMPLES // STEP - 1).map(lambda step: step * STEP)
    changes = data.draw(st.dictionaries(places, WEIGHTS, max_size=4))
    whole = ss.ShardLoader(mixed(folders, MIXES[name]), 4)
    expected = read([whole], SAMPLES, changes, None)
    ends = [*sorted(data.draw(st.lists(places, min_size=2, max_size=2))), SAMPLES]
    state: Any = None
    seen = list[list[str]]()
    for end in ends:
        ranks, workers = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([0, 2]))
        loaders = [
            ss.ShardLoader(mixed(folders, MIXES[name], placement=ss.Placement(rank, ranks)), 4, num_workers=workers)
            for rank in range(ranks)
        ]  # fmt: skip
        seen += read(loaders, end, changes, state)
        states = [loader.state_dict() for loader in loaders]
        assert all(one == states[0] for one in states)
        state = states[0]
    assert seen == expected
    replayed = ss.ShardLoader(mixed(folders, MIXES[name]), 4)
    replayed.load_state_dict(state)
    assert read([replayed], SAMPLES, {}, None) == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        pytest.param(
            {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "spawn"},
            marks=pytest.mark.slow,
        ),
        {"num_workers": 2, "worker_method": "thread"},
    ],
    ids=str,
)
def test_weights_hold_from_the_next_batch_on(folders: dict[str, str], options: Any) -> None:
    plain = list(ss.ShardLoader(mixed(folders, {"a": 1, "b": 1, "c": 0}), 8))
    loader = ss.ShardLoader(mixed(folders, {"a": 1, "b": 1, "c": 0}), 8, **options)
    seen, batches = list[list[str]](), iter(loader)
    for batch in batches:
        seen.append(batch)
        if len(seen) == 5:
            assert loader.set_weights(ONLY_B) == 40
        if len(seen) == 7:
            assert loader.set_weights(ONLY_C) == 56
    assert len(seen) == len(loader) == SAMPLES // 8
    assert seen[:5] == plain[:5]
    assert [shares([batch]) for batch in seen[5:]] == [{"b": 8}] * 2 + [{"c": 8}] * 17
    assert loader.samples_per_dataset == shares(seen)
    assert shares(list(loader)) == {"c": SAMPLES}  # the next epoch


def test_a_dataset_that_had_no_weight_is_shuffled(folders: dict[str, str]) -> None:
    loader = ss.ShardLoader(mixed(folders, ONLY_A, lanes=1), 8)
    batches = iter(loader)
    seen = [next(batches)]
    loader.set_weights({"a": 0, "b": 1, "c": 0})
    seen += [next(batches) for _ in range(5)]
    loader.set_weights(ONLY_A)
    seen += list(batches)
    of_b = [int(sample[1:]) for batch in seen for sample in batch if sample[0] == "b"]
    of_a = [sample for batch in seen[:16] for sample in batch if sample[0] == "a"]
    assert of_b != sorted(of_b)
    assert len(of_b) == len(set(of_b)) == 40
    assert len(of_a) == len(set(of_a)) == 88


def test_weights_between_iterations_and_after_a_break(folders: dict[str, str]) -> None:
    loader = ss.ShardLoader(mixed(folders, ONLY_A), 8, num_workers=2, persistent_workers=True)
    loader.set_weights(ONLY_B)
    for batch in loader:
        assert shares([batch]) == {"b": 8}
        break
    assert loader.set_weights(ONLY_C) == 8
    state = loader.state_dict()
    assert shares(list(loader)) == {"c": SAMPLES}  # epoch 1
    loader.load_state_dict(state)
    assert shares(list(loader)) == {"c": SAMPLES - 8}  # the rest of epoch 0
    loader.set_epoch(0)
    assert [shares([batch]) for batch in loader][:2] == [{"b": 8}, {"c": 8}]  # replayed
    last = iter(loader)
    for _ in range(SAMPLES // 8):
        next(last)
    assert loader.set_weights(ONLY_A) == 2 * SAMPLES
    assert list(last) == []
    assert shares(list(loader)) == {"a": SAMPLES}


def test_a_state_brings_its_weights_and_one_without_drops_those_of_the_loader(
    folders: dict[str, str],
) -> None:
    loader, fresh = (ss.ShardLoader(mixed(folders, ONLY_A), 8) for _ in range(2))
    before, unchanged = fresh.state_dict(), list(fresh)
    loader.set_weights(ONLY_B)
    changed = loader.state_dict()
    assert changed["mix"]["changes"] == [[0, ONLY_B]]
    assert "changes" not in before["mix"]
    loader.load_state_dict(before)
    assert list(loader) == unchanged
    loader.load_state_dict(changed)
    assert shares(list(loader)) == {"b": SAMPLES}
    edited = copy.deepcopy(changed)
    edited["mix"]["changes"][0][1] = ONLY_C
    with pytest.raises(StateError, match="damaged or was edited"):
        loader.load_state_dict(edited)


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ({"a": 1.0}, r"weights are for \['a'\], the datasets are"),
        ({"a": 1, "b": 1, "d": 1}, "the datasets are"),
        ({"a": -1, "b": 1, "c": 1}, "at least 0"),
        ({"a": float("nan"), "b": 1, "c": 1}, "must be finite"),
        ({"a": 0, "b": 0, "c": 0}, "one of them above 0"),
    ],
)
def test_invalid_weights_change_nothing(folders: dict[str, str], weights: Any, match: str) -> None:
    loader = ss.ShardLoader(mixed(folders, ONLY_A), 8)
    batches = iter(loader)
    seen = [next(batches)]
    state = loader.state_dict()
    with pytest.raises(OptionError, match=match):
        loader.set_weights(weights)
    assert loader.state_dict() == state
    assert shares(seen + list(batches)) == {"a": SAMPLES}


def test_weights_that_cannot_change_are_refused(folders: dict[str, str]) -> None:
    single = ss.ShardDataset(folders["a"])
    others = {
        "needs the dataset of ss.mix": single,
        "that yield one item per item": mixed(folders, ONLY_A).batched(4),
        "needs a mix with weights= and samples=": mixed(folders, ONLY_A, samples=None),
        "needs a mix with weights=": mixed(folders, None, samples=None),
    }
    for match, dataset in others.items():
        with pytest.raises(OptionError, match=match):
            ss.ShardLoader(dataset, 4).set_weights(ONLY_B)
    few = ss.ShardLoader(mixed(folders, ONLY_A, lanes=32), 2)
    with pytest.raises(OptionError, match="'c' has fewer samples than the mix has lanes"):
        few.set_weights(ONLY_C)
