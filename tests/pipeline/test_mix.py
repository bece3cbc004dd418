from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstream as ss
from shardstream.errors import OptionError, StateError
from shardstream.order import MixSchedule, derive_key
from shardstream.testing import make_shards
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, grouped, take

pytestmark = pytest.mark.filterwarnings(FEW_CORES)

SIZES = {"a": 90, "b": 40, "c": 25}
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}


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


def datasets(folders: dict[str, str], **options: Any) -> dict[str, ss.ShardDataset]:
    return {
        name: ss.ShardDataset(folder, **grouped(shuffle=True, **options)).decode().map(Tag(name))
        for name, folder in folders.items()
    }


def flat(lists: Iterable[list[str]]) -> list[str]:
    return list(chain.from_iterable(lists))


def seen(loader: ss.ShardLoader) -> list[list[str]]:
    return list(loader)


@settings(deadline=None, max_examples=60)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    stream=st.integers(0, 5),
    length=st.integers(0, 400),
)
def test_each_source_is_sampled_at_its_rate_without_gaps(
    weights: list[float], stream: int, length: int
) -> None:
    stratified = MixSchedule(weights, derive_key(3))
    sources, before = stratified.assign_sources(np.arange(400), np.full(400, stream))
    for kind, weight in enumerate(weights):
        assert before[sources == kind].tolist() == list(range((sources == kind).sum()))
        expected = 400 * weight / sum(weights)
        assert abs((sources == kind).sum() - expected) < 2 * stratified.length
    counts = stratified.counts(np.array([length]), np.array([stream]))[0]
    assert counts.tolist() == np.bincount(sources[:length], minlength=len(weights)).tolist()


def test_without_weights_each_sample_is_returned_once(folders: dict[str, str]) -> None:
    mixed = ss.mix(datasets(folders))
    batches = seen(ss.ShardLoader(mixed, batch_size=8))
    assert sorted(flat(batches)) == sorted(
        f"{name}{i}" for name, size in SIZES.items() for i in range(size)
    )
    assert mixed.counts() == SIZES


@pytest.mark.parametrize(
    ("options", "most_repeats"),
    [({}, 1), ({"stop": "all_exhausted"}, 3), ({"samples": 64}, 1)],
    ids=["first", "all", "fixed"],
)
def test_mix_follows_its_weights_and_stop_rule(
    folders: dict[str, str], options: dict[str, Any], most_repeats: int
) -> None:
    mixed = ss.mix(datasets(folders), WEIGHTS, **grouped(lanes=2, **options))
    loader = ss.ShardLoader(mixed, batch_size=8)
    length = len(loader)
    names = flat(seen(loader))
    assert len(names) == length * 8
    counts = Counter(name[0] for name in names)
    assert counts == mixed.counts(batch_size=8)
    for name, weight in WEIGHTS.items():
        assert abs(counts[name] / len(names) - weight) < 0.1
    assert max(Counter(names).values()) <= most_repeats
    if options.get("stop") == "all_exhausted":
        assert len(set(names)) == sum(SIZES.values())
    if "samples" in options:
        assert len(names) == 64


@pytest.mark.filterwarnings("ignore:an epoch of this mix")  # 8 lanes of 125 samples
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_mix_has_the_same_global_batches_on_every_topology(
    folders: dict[str, str], weights: dict[str, float] | None
) -> None:
    def steps(world_size: int, workers: int) -> list[list[str]]:
        ranks = []
        for rank in range(world_size):
            parts = datasets(folders, placement=ss.Placement(rank, world_size))
            mixed = ss.mix(parts, weights, order=ss.OrderOptions(lanes=8, microbatch=2))
            ranks.append(
                seen(
                    ss.ShardLoader(
                        mixed, batch_size=8 // world_size, num_workers=workers, drop_last=True
                    )
                )
            )
        return [flat(at_once) for at_once in zip(*ranks, strict=True)]

    assert steps(1, 0) == steps(2, 0) == steps(4, 2)


def test_mix_whose_lanes_leave_few_or_no_samples_says_so(folders: dict[str, str]) -> None:
    parts = datasets(folders)
    with pytest.warns(UserWarning, match=r"only 64% of the 125 samples .* 8 lanes .* batches of 4"):
        ss.ShardLoader(ss.mix(parts, WEIGHTS, order=ss.OrderOptions(lanes=8)), batch_size=4)
    with pytest.raises(OptionError, match="none of the 125 samples"):
        ss.ShardLoader(ss.mix(parts, WEIGHTS, order=ss.OrderOptions(lanes=16)), batch_size=32)
    with pytest.raises(OptionError, match="none of the 50 samples"):
        ss.ShardLoader(ss.mix(parts, WEIGHTS, samples=50), batch_size=64)


@pytest.mark.parametrize(("workers", "taken"), with_slow_rest([(0, 1), (2, 5)], [0, 2], [1, 5]))
def test_mix_resumes_exactly(folders: dict[str, str], workers: int, taken: int) -> None:
    def loader() -> ss.ShardLoader:
        return ss.ShardLoader(
            ss.mix(datasets(folders), WEIGHTS, stop="all_exhausted"),
            batch_size=8,
            num_workers=workers,
        )

    whole = seen(loader())
    left = loader()
    first = take(left, taken)
    state = json.loads(json.dumps(left.state_dict()))
    again = loader()
    again.load_state_dict(state)
    assert first + seen(again) == whole


def test_epochs_of_a_mix_differ_also_after_a_resume(folders: dict[str, str]) -> None:
    loader = ss.ShardLoader(ss.mix(datasets(folders), WEIGHTS), batch_size=8)
    epochs = [seen(loader), seen(loader), seen(loader)]
    assert epochs[0] != epochs[1] != epochs[2]
    other = ss.ShardLoader(ss.mix(datasets(folders), WEIGHTS), batch_size=8)
    other.set_epoch(2)
    assert seen(other) == epochs[2]


def test_weights_may_follow_a_schedule(folders: dict[str, str]) -> None:
    def weights(epoch: int) -> dict[str, float]:
        return {"a": 1.0, "b": 1.0 + epoch, "c": 1.0}

    mixed = ss.mix(datasets(folders), weights, samples=60)
    assert mixed.counts(0, batch_size=10)["b"] < mixed.counts(4, batch_size=10)["b"]
    loader = ss.ShardLoader(mixed, batch_size=10)
    loader.set_epoch(4)
    assert Counter(name[0] for name in flat(seen(loader))) == mixed.counts(4, batch_size=10)


def test_mixes_can_be_nested(folders: dict[str, str]) -> None:
    parts = datasets(folders)
    inner = ss.mix({"a": parts["a"], "b": parts["b"]}, [1, 1])
    outer = ss.mix({"ab": inner, "c": parts["c"]}, {"ab": 3, "c": 1})
    names = flat(seen(ss.ShardLoader(outer, batch_size=4)))
    counts = Counter(name[0] for name in names)
    assert max(Counter(names).values()) == 1
    assert abs(counts["a"] - counts["b"]) <= 8
    assert abs(counts["c"] / len(names) - 0.25) < 0.1


def test_mix_works_in_plain_iteration_and_a_plain_data_loader(folders: dict[str, str]) -> None:
    names = list(ss.mix(datasets(folders)))
    assert sorted(names) == sorted(
        f"{name}{i}" for name, size in SIZES.items() for i in range(size)
    )


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (lambda dataset: dataset.map(dict).batched(4), "Batched"),
        (lambda dataset: dataset.shuffle(10), "Shuffle"),
    ],
)
def test_steps_that_change_counts_come_after_a_mix(
    folders: dict[str, str], step: Any, name: str
) -> None:
    parts = {"a": ss.ShardDataset(folders["a"]), "b": ss.ShardDataset(folders["b"])}
    with pytest.raises(OptionError, match=f"the step {name} of the dataset 'b' .* after ss.mix, or choose .* where="):  # fmt: skip
        ss.mix(parts | {"b": step(parts["b"])})
    assert list(step(ss.mix(parts)))


def test_part_without_an_index_is_refused(folders: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="'0' of a mix: .* without an index, .*; run 'shardstream index'"):  # fmt: skip
        ss.mix([ss.ShardDataset(folders["a"], read=ss.ReadOptions(index="ignore"))])


@pytest.mark.parametrize(
    ("weights", "options", "match"),
    [
        ({"a": 1.0}, {}, r"weights are for \['a'\], the datasets are \['a', 'b', 'c'\]"),
        ({"a": 1.0, "b": -1.0, "c": 1.0}, {}, "weights must be finite, at least 0"),
        ({"a": 1.0, "b": 1e-12, "c": 1.0}, {}, "weights differ too much"),
        ([1.0], {}, "1 weight for 3 datasets"),
        (WEIGHTS, {"stop": "never"}, "stop is 'first_exhausted' or 'all_exhausted'"),
        (None, {"samples": 5}, "needs weights"),
        (WEIGHTS, {"lanes": 30}, "'c' has fewer samples than the mix has lanes"),
    ],
)
def test_invalid_mix_is_refused(
    folders: dict[str, str], weights: Any, options: Any, match: str
) -> None:
    with pytest.raises(OptionError, match=match):
        ss.ShardLoader(
            ss.mix(datasets(folders), weights, **grouped(**options)), batch_size=2
        ).__len__()


def test_state_of_another_mix_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    state = ss.ShardLoader(ss.mix(datasets(folders), WEIGHTS), batch_size=8).state_dict()
    other = {**folders, "c": make_shards(tmp_path / "c", samples=26, per_shard=17)}
    with pytest.raises(StateError, match="fingerprint of the dataset"):
        ss.ShardLoader(ss.mix(datasets(other), WEIGHTS), batch_size=8).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_counts_samples_per_dataset(folders: dict[str, str], workers: int) -> None:
    loader = ss.ShardLoader(ss.mix(datasets(folders), WEIGHTS), batch_size=8, num_workers=workers)
    seen_so_far: list[str] = []
    for batch in loader:
        seen_so_far += batch
        assert loader.samples_per_dataset == Counter(name[0] for name in seen_so_far)
