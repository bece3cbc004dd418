"""States have a digest of data, order and steps, and of what the training has continued."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from tests.loader.test_saved_states import DATASETS, SAVED
from tests.small_datasets import FEW_CORES, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digest")
    numbered(folder / "one", 60, 9)
    numbered(folder / "two", 40, 15)
    return folder


def twice(sample: Any) -> Any:
    return sample


def opened(folder: Path, *, rank: int = 0, ranks: int = 1, **options: Any) -> ss.ShardDataset:
    values: dict[str, Any] = {"shuffle": True, "order": ss.OrderOptions(lanes=4, microbatch=2)}
    values |= {"placement": ss.Placement(rank, ranks)}
    return ss.ShardDataset(str(folder / "one"), **(values | options)).decode()


def digest(loader: ss.ShardLoader) -> str:
    found: str = loader.state_dict()["digest"]
    return found


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "reader"])
def test_digest_is_the_same_at_every_position_and_after_a_resume(name: str, folder: Path) -> None:
    def fresh() -> ss.ShardLoader:
        return ss.ShardLoader(DATASETS[name](folder), 4)

    left, found = fresh(), set()
    for epoch in (0, 3):
        left.set_epoch(epoch)
        for _ in islice(left, 4):
            found.add(digest(left))
    again = fresh()
    again.load_state_dict(json.loads(json.dumps(left.state_dict())))
    assert "past" not in again.state_dict()
    found |= {digest(again), digest(fresh())}
    assert len(found) == 1
    assert ss.compare_states(left.state_dict(), fresh().state_dict()) == {}


def test_ranks_and_workers_have_one_digest(folder: Path) -> None:
    found = {
        digest(ss.ShardLoader(opened(folder, rank=rank, ranks=ranks), size, num_workers=workers))
        for ranks, rank, size, workers in [(1, 0, 2, 0), (1, 0, 4, 2), (2, 0, 2, 0), (2, 1, 4, 1)]
    }
    assert len(found) == 1


def test_without_shuffle_workers_do_not_change_the_digest(folder: Path) -> None:
    dataset = ss.ShardDataset(str(folder / "one"))
    found = [ss.ShardLoader(dataset, size, num_workers=n) for size, n in [(4, 0), (4, 2), (8, 1)]]
    assert len(set(map(digest, found))) == 1


def test_all_ranks_of_a_stream_have_one_digest(folder: Path) -> None:
    loaders = [ss.ShardLoader(opened(folder, rank=r, ranks=2).shuffle(3), 4) for r in range(2)]
    assert len(set(map(digest, loaders))) == 1


CHANGES: dict[str, tuple[Callable[[Path], Any], set[str]]] = {
    "data": (
        lambda f: ss.ShardDataset(str(f / "two"), shuffle=True),
        {"fingerprint", "checksums", "steps"},
    ),
    "seed": (lambda f: opened(f, seed=5), {"seed"}),
    "lanes": (lambda f: opened(f, order=ss.OrderOptions(lanes=2, microbatch=2)), {"lanes"}),
    "step": (lambda f: opened(f).map(twice), {"steps"}),
    "version": (lambda f: opened(f).map(twice, version=2), {"steps"}),
    "subset": (lambda f: opened(f, subset=slice(0, 50)), {"fingerprint"}),
    "nodes": (
        lambda f: opened(f, order=ss.OrderOptions(lanes=4, microbatch=2, nodes=2)),
        {"nodes", "exchange"},
    ),
    "weights": (
        lambda f: opened(f, weights=[1.0 + i % 3 for i in range(60)]),
        {"weights.fingerprint", "weights.num_samples", "weights.replacement"},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_digest_is_named(name: str, folder: Path) -> None:
    make, expected = CHANGES[name]
    one, other = ss.ShardLoader(opened(folder), 2), ss.ShardLoader(make(folder), 2)
    found = ss.compare_states(one.state_dict(), other.state_dict())
    assert expected - {"steps"} <= set(found)
    assert ("steps" in found) == (expected == {"steps"})
    assert all(first != second for first, second in found.values())
    assert digest(one) != digest(other)


def test_parts_of_a_mix_are_compared_by_value(folder: Path) -> None:
    def mixed(weight: float, step: Callable[[Any], Any] | None = None) -> dict[str, Any]:
        parts = [ss.ShardDataset(str(folder / name), shuffle=True) for name in ("one", "two")]
        both = {"a": parts[0] if step is None else parts[0].map(step), "b": parts[1]}
        return ss.ShardLoader(ss.mix(both, {"a": weight, "b": 1}, samples=40), 4).state_dict()

    assert ss.compare_states(mixed(1), mixed(1)) == {}
    assert ss.compare_states(mixed(1), mixed(2)) == {"mix.weights.a": (1.0, 2.0)}
    assert set(ss.compare_states(mixed(1), mixed(1, twice))) == {"steps"}


def test_weights_given_in_the_training_change_the_digest(folder: Path) -> None:
    parts = {name: ss.ShardDataset(str(folder / name), shuffle=True) for name in ("one", "two")}
    loader = ss.ShardLoader(ss.mix(parts, {"one": 1, "two": 1}, samples=40), 4)
    before = loader.state_dict()
    loader.set_weights({"one": 3, "two": 1})
    after = loader.state_dict()
    assert set(ss.compare_states(before, after)) == {"mix.changes"}
    again = ss.ShardLoader(ss.mix(parts, {"one": 1, "two": 1}, samples=40), 4)
    again.load_state_dict(after)
    assert again.state_dict() == after


def test_a_training_that_had_other_steps_for_a_time_has_another_digest(folder: Path) -> None:
    plain, changed = opened(folder), opened(folder).map(twice)
    kept, left = ss.ShardLoader(plain, 2), ss.ShardLoader(plain, 2)
    states = [kept.state_dict()]
    for dataset in (changed, changed, plain):  # the second resume changes nothing
        for _ in islice(left, 3):
            pass
        state = left.state_dict()
        left = ss.ShardLoader(dataset, 2)
        left.load_state_dict(state)
        states.append(left.state_dict())
    assert len({state["digest"] for state in states}) == 3
    assert states[1]["digest"] == states[2]["digest"]
    assert states[1]["past"] != states[3]["past"]
    assert ss.compare_states(states[0], states[3]) == {"past": (None, states[3]["past"])}


def test_data_whose_checksums_became_known_are_other_data(folder: Path, tmp_path: Path) -> None:
    copied = numbered(tmp_path, 60, 9)
    known = ss.ShardLoader(ss.ShardDataset(copied), 4).state_dict()
    Path(copied, "index.json").unlink()
    unknown = ss.ShardLoader(ss.ShardDataset(copied), 4).state_dict()
    assert ss.compare_states(known, unknown) == {"checksums": (known["checksums"], [None])}


@pytest.mark.parametrize("name", ["plain", "mix", "whole"])
def test_a_state_without_a_digest_is_the_past_of_the_next(name: str, folder: Path) -> None:
    old = json.loads(SAVED[name][0])
    loader = ss.ShardLoader(DATASETS[name](folder), 4, num_workers=old.get("num_workers", 1))
    loader.load_state_dict(old)
    new = loader.state_dict()
    assert new.get("past") == (old["state_checksum"] if new["kind"] == "plan" else None)
    assert ss.compare_states(old, new) == (
        {"past": (None, old["state_checksum"])} if new["kind"] == "plan" else {}
    )
    again = ss.ShardLoader(DATASETS[name](folder), 4, num_workers=old.get("num_workers", 1))
    again.load_state_dict(new)
    assert again.state_dict() == new


def test_digest_of_a_state_is_pinned(folder: Path) -> None:
    """Otherwise trainings with different versions of this package could not be compared."""
    assert digest(ss.ShardLoader(opened(folder), 2)) == "1ea5ebfdb9a72822"
