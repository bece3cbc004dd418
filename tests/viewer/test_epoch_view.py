"""The epoch view shows what loaders hand out."""

from __future__ import annotations

import json
import os
import shlex
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, sampled_from

import shardstream as ss
from shardstream.cli import main
from shardstream.pipeline import IndexedSource
from shardstream.testing import make_shards
from shardstream.viewer import Session, Stored, Training, ViewOptions, read_state, view_epoch
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, labels, loader, numbered

pytestmark = pytest.mark.filterwarnings(FEW_CORES, "ignore:lanes=")


def viewed(*folders: str, training: Any = None) -> Session:
    source = None if training is None else training.pipeline.indexed_source
    return Session(ViewOptions(urls=folders, storage_options={}, training=source))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbers"), 203, columns="cls")


@pytest.fixture(scope="module")
def source(folder: str) -> IndexedSource:
    found = ss.ShardDataset(folder).pipeline.indexed_source
    assert found is not None
    return found


def seen_by_ranks(session: Session, values: dict[str, Any], **more: Any) -> list[list[list[int]]]:
    """Return for each rank its steps, as the view shows them."""
    texts = {name: str(value) for name, value in values.items()}
    steps = session.epoch(texts, **more)["steps"]
    views = [session.epoch(texts | {"step": str(step)}, **more) for step in range(steps)]
    ranks = [
        [view["ranks"][rank]["numbers"] for view in views] for rank in range(int(values["ranks"]))
    ]
    return [[numbers for numbers in steps if numbers] for steps in ranks]


@pytest.mark.filterwarnings("ignore:3 ranks are not a multiple of nodes=2")
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
    nodes=sampled_from([1, 2]),
)
def test_each_step_is_that_of_a_loader_of_each_rank(folder: str, ranks: int, **values: Any) -> None:
    if values["batch_size"] % (values["microbatch"] or 1):
        values["microbatch"] = None
    values["nodes"] = values["nodes"] if values["shuffle"] else 1
    values["exchange"] = 0.25 * (values["nodes"] - 1)
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


@pytest.mark.parametrize(
    ("taken", "nodes"),
    [
        pytest.param(0, 1, marks=pytest.mark.slow),
        (1, 2),
        pytest.param(5, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:3 ranks are not a multiple of nodes=2")
def test_a_state_continues_as_loaders_with_workers_do(folder: str, taken: int, nodes: int) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 7, "lanes": 8, "microbatch": 4}
    options["nodes"] = nodes
    first = loader(folder, 8, num_workers=0, placement=ss.Placement(0, 2), **options)
    iterator = iter(first)
    list(islice(iterator, taken))
    state = first.state_dict()
    session = viewed(folder)
    # The state continues on other ranks, workers and batches.
    values = {"ranks": "3", "workers": "2", "batch_size": "12", "nodes": str(nodes)}
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
        ({"kind": "parts"}, "'parts' are positions of workers"),
        ({"weights": {}}, "weights"),
        ({"fingerprint": "0" * 16}, "fingerprint of the dataset: the state says"),
    ],
)
def test_a_state_that_no_plan_continues_is_refused(
    folder: str, source: IndexedSource, change: dict[str, Any], message: str
) -> None:
    state = loader(folder, 8).state_dict() | change
    with pytest.raises(ss.errors.StateError, match=message):
        read_state(json.dumps(state), source)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"kind": "plan"}', "[" * 5000])
def test_what_is_no_state_is_refused(source: IndexedSource, text: str) -> None:
    with pytest.raises(ss.errors.StateError, match="JSON|not a state"):
        read_state(text, source)


def test_a_state_of_other_data_names_both_fingerprints(
    tmp_path: Path, source: IndexedSource
) -> None:
    state = loader(numbered(tmp_path, 50), 8).state_dict()
    with pytest.raises(ss.errors.StateError, match=f"{state['fingerprint']}.*{source.fingerprint}"):
        read_state(json.dumps(state), source)


def test_shards_and_shares_of_classes_are_those_of_the_step(source: IndexedSource) -> None:
    classes = np.arange(len(source.samples)) % 4
    training = Training(ranks=2, batch_size=20, step=1)
    found = view_epoch(training, source, Stored(lambda numbers: numbers, classes, ["a"]))
    numbers = [number for rank in found["ranks"] for number in rank["numbers"]]
    assert found["shards"]["count"] == len({number // 15 for number in numbers})
    rows = {row["number"]: row["count"] for row in found["classes"]["rows"]}
    assert rows == {kind: sum(number % 4 == kind for number in numbers) for kind in range(4)}
    assert [row["name"] for row in found["classes"]["rows"]] == ["a", None, None, None]


def letters(folder: Path, letter: str, count: int) -> str:
    """Write samples with the keys a0, a1, ...; the names and sizes of shards are those of other letters."""
    with ss.ShardWriter(f"{folder}/{{shard:06d}}.tar", columns="cls", max_samples=15) as writer:
        for number in range(count):
            writer.write({"__key__": f"{letter}{number}", "cls": number % 5})
    return str(folder)


def read(folder: str, at: ss.Placement | None, **options: Any) -> ss.ShardDataset:
    return ss.ShardDataset(folder, placement=at, **options)


def rows(dataset: ss.ShardDataset, count: int) -> ss.ShardDataset:
    lengths = np.arange(count) % 5 + 1
    return dataset.pack_sequences((), 7, lengths=lengths, keep="__key__", repack=True)


def keys_in(batch: Any) -> list[str]:
    """Return the keys of all samples of a batch, or of the rows in it."""
    if "__keys__" in batch:
        return [key for row in batch["__keys__"] for key in row]
    return list(batch["__key__"])


COMPOSED: dict[str, Callable[[str, str, ss.Placement | None], Any]] = {
    "mix": lambda a, b, at: ss.mix([read(a, at), read(b, at)], [3, 1], seed=4),
    "mix that repeats": lambda a, b, at: ss.mix(
        [read(a, at), read(b, at, subset=slice(20))], [1, 1], stop="all_exhausted"
    ),
    "mix without weights": lambda a, b, at: ss.mix([read(a, at), read(b, at)], seed=1),
    "weights": lambda a, _, at: read(a, at, shuffle=True, weights={0: 9, 1: 1, 2: 1, 3: 1, 4: 0}),
    "subset": lambda a, _, at: read(a, at, shuffle=True, seed=3, subset=range(150, 20, -1)),
    "weights of a condition": lambda _, b, at: read(
        b, at, shuffle=True, where="cls < 3", weights=ss.Weights("balanced", num_samples=70)
    ),
    "rows": lambda a, _, at: rows(read(a, at, shuffle=True), 160),
    "mix of rows": lambda a, b, at: ss.mix(
        [rows(read(a, at), 160), rows(read(b, at, subset=range(9, 99)), 90)]
    ),
    "join": lambda a, _, at: ss.join(read(a, at, shuffle=True, seed=9), {a: {"other": "cls"}}),
}


@pytest.mark.parametrize(
    "name", with_slow_rest(["weights of a condition", "mix of rows", "join"], COMPOSED)
)
def test_epochs_of_a_dataset_of_any_kind_are_those_of_its_loaders(
    tmp_path: Path, name: str
) -> None:
    a, b = letters(tmp_path / "a", "a", 160), letters(tmp_path / "b", "b", 160)
    keys = [one["__key__"] for one in ss.ShardDataset([a, b]).by_number()]
    # Another name of the same files.
    session = viewed(os.path.relpath(a), b, training=COMPOSED[name](a, b, None))
    form = {"ranks": 2, "batch_size": 8, "workers": 2, "epoch": 1}
    found = seen_by_ranks(session, form)
    loaders = [
        ss.ShardLoader(COMPOSED[name](a, b, ss.Placement(rank, 2)), 8, num_workers=2)
        for rank in range(2)
    ]
    for rank, made in enumerate(loaders):
        made.set_epoch(1)
        loaded = [keys_in(batch) for batch in made]
        assert loaded == [[keys[number] for number in step] for step in found[rank]]
    batches = iter(loaders[0])
    list(islice(batches, 2))
    state = json.dumps(loaders[0].state_dict())
    values = {key: str(value) for key, value in (form | {"epoch": 0}).items()}
    resumed = session.resume(state, values)["ranks"][0]["numbers"]
    assert keys_in(next(batches)) == [keys[number] for number in resumed]
    if name == "weights":
        with pytest.raises(ss.errors.StateError, match="weights"):
            viewed(a).resume(state, {})


def test_a_step_has_its_command(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    session = viewed(folder)
    values = {"ranks": "2", "batch_size": "8", "seed": "5", "step": "3"}
    shown = session.epoch(values)
    assert main([*shlex.split(shown["command"])[1:], "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    numbers = [number for rank in shown["ranks"] for number in rank["numbers"]]
    assert [one["number"] for one in samples] == numbers
    assert "command" not in session.epoch(values | {"lanes": "4"})
    assert "command" not in session.epoch(values, "cls < 99")


def test_samples_in_other_shards_have_no_number_here(tmp_path: Path) -> None:
    a, b = letters(tmp_path / "a", "a", 80), letters(tmp_path / "b", "b", 80)
    mix = COMPOSED["mix without weights"](a, b, None)
    (numbers,) = viewed(a, training=mix).epoch({"batch_size": "160"})["ranks"]
    assert sorted(numbers["numbers"]) == [
        *[-1] * 80,
        *range(80),
    ]  # though names and sizes are equal


def test_the_order_of_the_dataset_is_that_of_the_form(tmp_path: Path) -> None:
    a, b = letters(tmp_path / "a", "a", 80), letters(tmp_path / "b", "b", 80)
    order = ss.OrderOptions(microbatch=12, lanes=3)
    dataset = ss.ShardDataset(a, shuffle=True, seed=5, order=order)
    shown = viewed(a, training=dataset).epoch({})["training"]
    names = ("seed", "shuffle", "microbatch", "lanes", "window", "batch_size")
    assert [shown[name] for name in names] == [5, True, 12, 3, None, 12]
    changed = viewed(a, training=dataset).epoch({"lanes": "", "seed": "6"})["training"]
    assert (changed["lanes"], changed["seed"]) == (None, 6)
    mix = viewed(a, b, training=COMPOSED["mix"](a, b, None))
    with pytest.raises(ss.errors.OptionError, match="a mix is always shuffled"):
        mix.epoch({"shuffle": "false"})
    with pytest.raises(ss.errors.OptionError, match="leave where and balance empty"):
        mix.epoch({}, "cls = 1")


LENGTHS = np.random.default_rng(0).lognormal(4, 1, 400).astype(int) + 1
BALANCED = ss.OrderOptions(balance="cls")
ON_RANKS = {"ranks": "4", "batch_size": "4", "step": "3"}


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset whose samples have their cost in ``cls``."""
    samples = [{"__key__": f"{i:04d}", "cls": int(n)} for i, n in enumerate(LENGTHS)]
    folder = tmp_path_factory.mktemp("uneven")
    return make_shards(folder, samples=samples, per_shard=50, columns="cls")


def balanced(folder: str, rank: int) -> ss.ShardLoader:
    at = ss.Placement(rank, 4)
    dataset = ss.ShardDataset(folder, shuffle=True, order=BALANCED, placement=at)
    return ss.ShardLoader(dataset.decode(), 4)


def test_costs_of_the_ranks_are_shown_without_and_with_balance(uneven: str) -> None:
    plain = viewed(uneven).epoch(ON_RANKS)
    found = viewed(uneven).epoch(ON_RANKS | {"balance": "cls"})
    assert "costs" not in plain
    assert found["training"]["balance"] == "cls"
    loaded = [[sum(batch["cls"].tolist()) for batch in balanced(uneven, rank)] for rank in range(4)]
    costs = np.array(loaded).T
    shown = found["costs"]
    assert np.allclose(shown["after"]["costs"], costs / costs.mean(), atol=1e-3)
    assert np.mean(shown["after"]["busy"]) > 0.95
    assert np.mean(shown["before"]["busy"]) < 0.75
    for name, view in {"before": plain, "after": found}.items():
        at_step = np.array([LENGTHS[rank["numbers"]].sum() for rank in view["ranks"]])
        assert np.allclose(shown[name]["costs"][3], at_step / costs.mean(), atol=1e-3)


def test_a_state_with_balance_is_continued_with_its_column(uneven: str) -> None:
    saved = balanced(uneven, 0)
    batches = iter(saved)
    list(islice(batches, 2))
    state = json.dumps(saved.state_dict())
    found = viewed(uneven).resume(state, ON_RANKS | {"balance": "cls", "step": "0"})
    assert LENGTHS[found["ranks"][0]["numbers"]].tolist() == next(batches)["cls"].tolist()
    with pytest.raises(ss.errors.StateError, match="balance= of the order"):
        viewed(uneven).resume(state, {})


def test_the_balance_of_the_dataset_is_shown(uneven: str) -> None:
    dataset = ss.ShardDataset(uneven, shuffle=True, order=BALANCED)
    given = viewed(uneven, training=dataset)
    expected = viewed(uneven).epoch(ON_RANKS | {"balance": "cls"})["costs"]
    assert given.epoch(ON_RANKS)["costs"] == expected
    assert "costs" not in given.epoch(ON_RANKS | {"shuffle": "false"})
    with pytest.raises(ss.errors.OptionError, match="leave where and balance empty"):
        given.epoch({"balance": "cls"})
    with pytest.raises(ss.errors.OptionError, match="nothing"):
        viewed(uneven).epoch({"balance": "nothing"})


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
