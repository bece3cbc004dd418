"""States that an earlier version saved are continued: these were saved by revision 275e256."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import StateError
from tests.small_datasets import FEW_CORES, labels, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES)


def keeps(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 3)


def shuffled(folder: Path, **options: Any) -> ss.ShardDataset:
    return ss.ShardDataset(str(folder / "one"), shuffle=True, seed=1, **options)


def mixed(folder: Path) -> ss.loader.StreamDataset:
    other = ss.ShardDataset(str(folder / "two"), shuffle=True)
    parts = {"a": shuffled(folder).decode(), "b": other.decode()}
    return ss.mix(parts, {"a": 2, "b": 1}, seed=3)


def joined(folder: Path) -> ss.loader.StreamDataset:
    first = ss.ShardDataset(str(folder / "one"), shuffle=True)
    other: Any = {str(folder / "two"): {"other": "cls"}}
    return ss.join(first, other, by="key", missing="drop").decode()


def selected(folder: Path) -> ss.loader.StreamDataset:
    return shuffled(folder).decode().select(keeps, name="keeps")


DATASETS: dict[str, Callable[[Path], ss.loader.StreamDataset]] = {
    "plain": lambda folder: shuffled(folder).decode(),
    "mix": mixed,
    "join": joined,
    "subset": lambda folder: shuffled(folder, subset=slice(0, None, 2)).decode(),
    "weights": lambda folder: shuffled(folder, weights=[1.0 + i % 4 for i in range(60)]).decode(),
    "select": selected,
    "batched": lambda folder: selected(folder).batched(4, drop_last=True).unbatched(),
    "group": lambda folder: (
        shuffled(folder).decode().group_batched("cls", 2, buffer=4, drop_last=True).unbatched()
    ),
    "whole": lambda folder: ss.ShardDataset(
        str(folder / "one"),
        read=ss.ReadOptions(index="ignore"),
        shuffle=True,
        order=ss.OrderOptions(window=10),
    ).decode(),
    "reader": lambda folder: shuffled(folder).decode(),
}
# Name -> the state after three batches of epoch 2 (of a reader: seven samples of epoch 0), and the labels that follow.
SAVED: dict[str, tuple[str, list[Any]]] = {
    "plain": (
        ('{"version": 2, "kind": "plan", "fingerprint": "54d06cd08e150b91", "checksums": ["0d6b0869f93ad6c1"], '
        '"seed": 1, "shuffle": true, "epoch": 2, "consumed": 12, "microbatch": 4, "lanes": 1, "window": 16384, '
        '"block": 1, "state_checksum": "4d9db77d240144d7"}'),
        [[33, 21, 4, 40], [18, 53, 28, 15], [50, 57, 27, 54]],
    ),
    "mix": (
        ('{"version": 2, "kind": "plan", "fingerprint": "ff2a48c36cd3c4b1", "checksums": ["0d6b0869f93ad6c1", '
        '"0c80c1a8ddb739ff"], "mix": {"weights": {"a": 2.0, "b": 1.0}, "stop": "first_exhausted", "samples": null, '
        '"parts": {"a": {"seed": 1, "shuffle": true, "window": null, "block": null}, "b": {"seed": 0, '
        '"shuffle": true, "window": null, "block": null}}}, "seed": 3, "shuffle": true, "epoch": 2, "consumed": 12, '
        '"microbatch": 4, "lanes": 1, "window": 16384, "block": 1, "state_checksum": "5b61e58ef7dd9935"}'),
        [[11, 23, 25, 24], [55, 33, 18, 21], [4, 40, 18, 19]],
    ),
    "join": (
        ('{"version": 2, "kind": "plan", "fingerprint": "03c048d5d24efb4a", "checksums": ["0d6b0869f93ad6c1", '
        '"0c80c1a8ddb739ff"], "seed": 0, "shuffle": true, "epoch": 2, "consumed": 12, "microbatch": 4, "lanes": 1, '
        '"window": 15632, "block": 1, "state_checksum": "0ffc1cd516490b8f"}'),
        [[20, 8, 15, 36], [24, 21, 27, 4], [11, 39, 35, 32]],
    ),
    "subset": (
        ('{"version": 2, "kind": "plan", "fingerprint": "b0fc9a56d69faefa", "checksums": ["0d6b0869f93ad6c1"], '
        '"seed": 1, "shuffle": true, "epoch": 2, "consumed": 12, "microbatch": 4, "lanes": 1, "window": 16384, '
        '"block": 1, "state_checksum": "342fdedab09b9181"}'),
        [[48, 10, 4, 24], [54, 8, 22, 14], [58, 18, 34, 30]],
    ),
    "weights": (
        ('{"version": 2, "kind": "plan", "fingerprint": "54d06cd08e150b91", "checksums": ["0d6b0869f93ad6c1"], '
        '"weights": {"fingerprint": "3fe331bbc9fe228a", "num_samples": 60, "replacement": true}, "seed": 1, '
        '"shuffle": true, "epoch": 2, "consumed": 12, "microbatch": 4, "lanes": 1, "window": 16384, "block": 1, '
        '"state_checksum": "db9b2cbbd5bd3a85"}'),
        [],
    ),
    "select": (
        ('{"version": 2, "kind": "parts", "fingerprint": "54d06cd08e150b91", "checksums": ["0d6b0869f93ad6c1"], '
        '"seed": 1, "shuffle": true, "stages": ["Decode()", "Select(predicate=keeps)"], "rank": 0, "world_size": 1, '
        '"num_workers": 2, "microbatch": 3, "lanes": 2, "block": 1, "remainder": "pad", "window": 16383, '
        '"batch_size": 4, "epoch": 2, "next_part": 1, "parts": {"0": {"taken": 11}, "1": {"taken": 6}}, '
        '"state_checksum": "54bff833c0bfad6f"}'),
        [[8, 56, 44, 52], [49, 58, 43, 2], [25, 35, 7, 23]],
    ),
    "batched": (
        ('{"version": 2, "kind": "parts", "fingerprint": "54d06cd08e150b91", "checksums": ["0d6b0869f93ad6c1"], '
        '"seed": 1, "shuffle": true, "stages": ["Decode()", "Select(predicate=keeps)", "Batched(size=4, '
        'collate=collate, partial=False)", "Unbatched()"], "rank": 0, "world_size": 1, "num_workers": 2, '
        '"microbatch": 3, "lanes": 2, "block": 1, "remainder": "pad", "window": 16383, "batch_size": 4, "epoch": 2, '
        '"next_part": 1, "parts": {"0": {"source": {"taken": 11}, "taken": 0}, "1": {"source": {"taken": 6}, '
        '"taken": 0}}, "state_checksum": "6a8ce2b8b93d2d79"}'),
        [[8, 56, 44, 52], [49, 58, 43, 2], [25, 35, 7, 23]],
    ),
    "group": (
        ('{"version": 2, "kind": "parts", "fingerprint": "54d06cd08e150b91", "checksums": ["0d6b0869f93ad6c1"], '
        '"seed": 1, "shuffle": true, "stages": ["Decode()", "GroupBatched(group=_FieldGetter(field=\'cls\'), size=2, '
        'buffer=4, collate=collate, leftover=\'drop\')", "Unbatched()"], "rank": 0, "world_size": 1, '
        '"num_workers": 1, "microbatch": 7, "lanes": 1, "block": 1, "remainder": "pad", "window": 16380, '
        '"batch_size": 4, "epoch": 2, "next_part": 0, "parts": {"0": {"source": {"source": {"taken": 12}, '
        '"first": 12, "read": 16, "waiting": [12, 13, 14, 15]}, "taken": 0}}, '
        '"state_checksum": "3075e37e3ae538bc"}'),
        [[33, 21, 4, 40], [18, 53, 28, 15], [50, 57, 27, 54]],
    ),
    "whole": (
        ('{"version": 2, "kind": "parts", "fingerprint": "54d06cd08e150b91", "checksums": ["0d6b0869f93ad6c1"], '
        '"seed": 0, "shuffle": true, "stages": ["Shuffle(window=10)", "Decode()"], "rank": 0, "world_size": 1, '
        '"num_workers": 1, "batch_size": 4, "epoch": 2, "next_part": 0, "parts": {"0": {"source": {"shard": 1, '
        '"taken": 1, "offset": 2048}, "turn": 1, "taken": 2}}, "state_checksum": "f4aef5785f59b419"}'),
        [[11, 13, 0, 17], [16, 15, 14, 1], [5, 7, 8, 2]],
    ),
    "reader": (
        ('{"version": 2, "kind": "reader", "fingerprint": "54d06cd08e150b91", "checksums": ["0d6b0869f93ad6c1"], '
        '"seed": 1, "shuffle": true, "stages": ["Decode()"], "rank": 0, "world_size": 1, "num_workers": 1, '
        '"microbatch": 7, "lanes": 1, "block": 1, "remainder": "pad", "window": 16380, "worker": 0, "epoch": 0, '
        '"run": {"taken": 7}, "state_checksum": "dbe3b1bafbc75e28"}'),
        [16, 19, 40, 4, 58, 1, 26, 8, 34, 23, 13, 41],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    numbered(folder / "one", 60, 9)
    numbered(folder / "two", 40, 15)
    return folder


@pytest.mark.parametrize(
    "name", [name for name in SAVED if name not in ("reader", "select", "weights")]
)
def test_a_state_of_an_earlier_version_continues(name: str, folder: Path) -> None:
    text, rest = SAVED[name]
    state = json.loads(text)
    loader = ss.ShardLoader(DATASETS[name](folder), 4, num_workers=state.get("num_workers", 1))
    loader.load_state_dict(state)
    assert loader.epoch == 2
    assert loader.state_dict()["epoch"] == 2
    assert labels(loader)[: len(rest)] == rest
    assert loader.epoch == 3


def test_a_state_of_an_earlier_reader_continues(folder: Path) -> None:
    text, rest = SAVED["reader"]
    reader = iter(DATASETS["reader"](folder))
    reader.load_state_dict(json.loads(text))
    assert [sample["cls"] for sample in islice(reader, len(rest))] == rest


def test_a_state_in_which_select_had_positions_of_workers_is_refused(folder: Path) -> None:
    loader = ss.ShardLoader(selected(folder), 4, num_workers=2)
    match = "the state says 'parts', here it is 'plan'; .* before select kept the numbers of samples: .* set_epoch"
    with pytest.raises(StateError, match=match):
        loader.load_state_dict(json.loads(SAVED["select"][0]))


@pytest.mark.parametrize("taken", [4, 5])
def test_three_workers_go_on_in_their_turns(taken: int, folder: Path) -> None:
    dataset = selected(folder).shuffle(1)
    whole = labels(ss.ShardLoader(dataset, 4, num_workers=3))
    left, again = (ss.ShardLoader(dataset, 4, num_workers=3) for _ in range(2))
    first = labels(islice(left, taken))
    again.load_state_dict(left.state_dict())
    assert first + labels(again) == whole


def test_a_state_of_samples_by_weight_needs_the_weights(folder: Path) -> None:
    loader = ss.ShardLoader(DATASETS["plain"](folder), 4)
    with pytest.raises(StateError, match=r"weights= of the samples: .*, here are none; use the"):
        loader.load_state_dict(json.loads(SAVED["weights"][0]))
    loader = ss.ShardLoader(DATASETS["weights"](folder), 4)  # which draws otherwise since then
    with pytest.raises(StateError, match=r"the state says .*, here it is .*'draw': 'groups of 64'"):
        loader.load_state_dict(json.loads(SAVED["weights"][0]))


@pytest.mark.parametrize(("name", "step"), [("batched", 3), ("group", 2)])
def test_a_step_that_keeps_a_short_rest_is_another_one(name: str, step: int, folder: Path) -> None:
    dataset = selected(folder).batched(4).unbatched()
    if name == "group":
        dataset = shuffled(folder).decode().group_batched("cls", 2, buffer=4).unbatched()
    state = json.loads(SAVED[name][0])
    loader = ss.ShardLoader(dataset, 4, num_workers=state["num_workers"])
    with pytest.raises(
        StateError, match=rf"step {step} of the pipeline: the state says \w*Batched"
    ):
        loader.load_state_dict(state)
