"""The epoch view shows what loaders hand out."""

from __future__ import annotations

import json
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, sampled_from

import shardstream as ss
from shardstream.catalog import ShardCatalog
from shardstream.storage import Storage, locate_shards
from shardstream.viewer import Session, Training, ViewOptions, read_state, view_epoch
from tests.small_datasets import FEW_CORES, labels, loader, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES, "ignore:lanes=")


def viewed(folder: str) -> Session:
    return Session(ViewOptions(urls=(folder,), storage_options={}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbers"), 203, columns="cls")


@pytest.fixture(scope="module")
def catalog(folder: str) -> ShardCatalog:
    storage = Storage()
    return ShardCatalog(locate_shards(folder, storage), storage)


def seen_by_ranks(session: Session, values: dict[str, Any], **more: Any) -> list[list[list[int]]]:
    """Return for each rank its steps, as the view shows them."""
    texts = {name: str(value) for name, value in values.items()}
    steps = session.epoch(texts, **more)["steps"]
    views = [session.epoch(texts | {"step": str(step)}, **more) for step in range(steps)]
    ranks = [
        [view["ranks"][rank]["numbers"] for view in views] for rank in range(int(values["ranks"]))
    ]
    return [[numbers for numbers in steps if numbers] for steps in ranks]


@settings(max_examples=8)
@given(
    ranks=integers(1, 4),
    batch_size=sampled_from([4, 8, 12, 36]),
    epoch=integers(0, 3),
    shuffle=booleans(),
    remainder=sampled_from(["pad", "drop", "keep"]),
    drop_last=booleans(),
    lanes=sampled_from([None, 4, 24]),
    microbatch=sampled_from([None, 1, 4]),
)
def test_each_step_is_that_of_a_loader_of_each_rank(folder: str, ranks: int, **values: Any) -> None:
    if values["batch_size"] % (values["microbatch"] or 1):
        values["microbatch"] = None
    seed = 3
    shown = {name: "" if value is None else str(value).lower() for name, value in values.items()}
    found = seen_by_ranks(viewed(folder), shown | {"ranks": ranks, "seed": seed})
    batch_size, epoch = values.pop("batch_size"), values.pop("epoch")
    for rank in range(ranks):
        made = loader(folder, batch_size, seed=seed, placement=ss.Placement(rank, ranks), **values)
        made.set_epoch(epoch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert labels(made) == found[rank]


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_state_continues_as_loaders_with_workers_do(folder: str, taken: int) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 7, "lanes": 8, "microbatch": 4}
    first = loader(folder, 8, num_workers=0, placement=ss.Placement(0, 2), **options)
    iterator = iter(first)
    list(islice(iterator, taken))
    state = first.state_dict()
    session = viewed(folder)
    # The state continues on other ranks, workers and batches.
    values = {"ranks": "3", "workers": "2", "batch_size": "12"}
    text = json.dumps({"epoch": 1, "loader": state})
    steps = session.resume(text, values)["steps"]
    views = [session.resume(text, values | {"step": str(step)}) for step in range(steps)]
    for rank in range(3):
        second = loader(folder, 12, num_workers=2, placement=ss.Placement(rank, 3), **options)
        second.load_state_dict(state)
        shown = [view["ranks"][rank]["numbers"] for view in views]
        assert labels(second) == shown
    assert [view["ranks"][0]["worker"] for view in views] == [step % 2 for step in range(steps)]


def test_a_chosen_part_is_viewed_as_a_dataset_reads_it(folder: str) -> None:
    where = "cls % 3 = 1"
    found = seen_by_ranks(viewed(folder), {"ranks": 1, "batch_size": 8, "seed": 0}, where=where)
    assert labels(loader(folder, 8, shuffle=True, where=where)) == found[0]


def test_only_the_numbers_of_a_plan_without_shuffle(folder: str) -> None:
    state = loader(folder, 8).state_dict()
    session = viewed(folder)
    found = session.resume(json.dumps(state), {"batch_size": "8"})
    assert found["ranks"][0]["numbers"] == [*range(8)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"consumed": 16}, "damaged or was edited"),
        ({"version": 1}, "version 1"),
        ({"kind": "parts"}, "kind 'parts'"),
        ({"weights": {}}, "weights"),
        ({"fingerprint": "0" * 16}, "fingerprint of the dataset: the state says"),
    ],
)
def test_a_state_that_no_plan_continues_is_refused(
    folder: str, catalog: ShardCatalog, change: dict[str, Any], message: str
) -> None:
    state = loader(folder, 8).state_dict() | change
    with pytest.raises(ss.errors.StateError, match=message):
        read_state(json.dumps(state), catalog)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"kind": "plan"}', "[" * 5000])
def test_what_is_no_state_is_refused(catalog: ShardCatalog, text: str) -> None:
    with pytest.raises(ss.errors.StateError, match="JSON|not a state"):
        read_state(text, catalog)


def test_a_state_of_other_data_names_both_fingerprints(
    tmp_path: Path, catalog: ShardCatalog
) -> None:
    state = loader(numbered(tmp_path, 50), 8).state_dict()
    with pytest.raises(
        ss.errors.StateError, match=f"{state['fingerprint']}.*{catalog.fingerprint}"
    ):
        read_state(json.dumps(state), catalog)


def test_shards_and_shares_of_classes_are_those_of_the_step(catalog: ShardCatalog) -> None:
    import numpy as np  # noqa: PLC0415

    classes = np.arange(len(catalog)) % 4
    found = view_epoch(Training(ranks=2, batch_size=20, step=1), catalog, None, classes, ["a"])
    numbers = [number for rank in found["ranks"] for number in rank["numbers"]]
    assert found["shards"]["count"] == len({number // 15 for number in numbers})
    rows = {row["number"]: row["count"] for row in found["classes"]["rows"]}
    assert rows == {kind: sum(number % 4 == kind for number in numbers) for kind in range(4)}
    assert [row["name"] for row in found["classes"]["rows"]] == ["a", None, None, None]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ranks": "0"}, "ranks must be at least 1"),
        ({"ranks": "x"}, "ranks must be a whole number"),
        ({"rank": "4", "ranks": "4"}, "rank=4 below ranks=4"),
        ({"step": "999"}, "no step 999"),
        ({"batch_size": "7", "microbatch": "2"}, "multiple of microbatch=2"),
        ({"batch_size": "9999999"}, "too many to show"),
        ({"window": "30", "batch_size": "8"}, "multiple of the microbatch"),
        ({"remainder": "none"}, "remainder is 'pad'"),
        ({"what": "1"}, "no field 'what'"),
    ],
)
def test_impossible_trainings_are_refused(
    folder: str, values: dict[str, str], message: str
) -> None:
    with pytest.raises(ss.errors.OptionError, match=message):
        viewed(folder).epoch(values)
