"""Plans say of each step and of each sample what loaders then read."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_plan import datasets as huge_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstream as ss
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES

pytestmark = pytest.mark.filterwarnings(FEW_CORES, "ignore:lanes=", "ignore:an epoch of this mix")

COUNT = 160
LENGTHS = np.arange(COUNT) % 5 + 1
Folders = tuple[str, str]
At = ss.Placement | None
Seen = Counter[tuple[int, int, int, int]]
"""Class, step, rank and place of each sample that was read."""


def numbered_from(folder: Path, first: int) -> str:
    """Write samples whose key is their class, and which are in runs of seven."""
    pattern = f"{folder}/{{shard:06d}}.tar"
    with ss.ShardWriter(pattern, columns="cls,run=json.run", max_samples=15) as writer:
        for number in range(first, first + COUNT):
            run = {"run": number // 7}
            writer.write({"__key__": f"{number:06d}", "cls": number, "json": run})
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made = [numbered_from(tmp_path_factory.mktemp(f"from{one}"), one) for one in (0, 1000)]
    return made[0], made[1]


def read(folder: str, at: At, **options: Any) -> ss.ShardDataset:
    return ss.ShardDataset(folder, placement=at, **options).decode()


def small(folder: str, at: At) -> Any:
    return read(folder, at, shuffle=True, subset=range(40, 20, -1))


def packed(dataset: Any, **options: Any) -> Any:
    return dataset.pack_sequences((), 7, lengths=LENGTHS, keep="cls", **options)


def nested(a: str, b: str, at: At) -> Any:
    inner = ss.mix([read(a, at), small(b, at)], [2, 1], stop="all_exhausted", seed=2)
    return ss.mix([inner, read(b, at, subset=slice(50, 150))], [1, 2], seed=1)


def by_step(a: str, b: str, at: At) -> Any:
    weights: dict[int, dict[str, float]] = {0: {"a": 1, "b": 0}, 3: {"a": 1, "b": 2}}
    schedule = ss.WeightSchedule(weights, step=32)
    return ss.mix({"a": read(a, at), "b": small(b, at)}, schedule, samples=256)


MADE: dict[str, Callable[[str, str, At], Any]] = {
    "plain": lambda a, _, at: read(a, at),
    "shuffled": lambda a, _, at: read(a, at, shuffle=True, seed=3),
    "nodes": lambda a, _, at: read(
        a, at, shuffle=True, order=ss.OrderOptions(nodes=2, exchange=0.5, block=3)
    ),
    "balance": lambda a, _, at: read(
        a, at, shuffle=True, order=ss.OrderOptions(balance=ss.Balance(LENGTHS, steps=3))
    ),
    "weights": lambda a, _, at: read(a, at, shuffle=True, weights=LENGTHS - 1),
    "weights with balance": lambda a, _, at: read(
        a, at, shuffle=True, weights=LENGTHS, order=ss.OrderOptions(balance=LENGTHS)
    ),
    "subset": lambda a, _, at: small(a, at),
    "condition": lambda a, _, at: read(a, at, shuffle=True, where="cls % 3 = 1"),
    "join": lambda a, _, at: ss.join(
        ss.ShardDataset(a, shuffle=True, seed=9, placement=at), {a: {"other": "cls"}}
    ).decode(),
    "mix": lambda a, b, at: ss.mix([read(a, at), read(b, at)], [3, 1], seed=4),
    "mix that repeats": lambda a, b, at: ss.mix(
        [read(a, at), small(b, at)], [1, 1], stop="all_exhausted"
    ),
    "mix without weights": lambda a, b, at: ss.mix([read(a, at), read(b, at)], seed=1),
    "mix with balance": lambda a, b, at: ss.mix(
        [read(a, at), read(b, at)],
        [1, 1],
        order=ss.OrderOptions(balance=np.tile(LENGTHS, 2)),
    ),
    "mix by step": by_step,
    "nested mix": nested,
    "packed rows": lambda a, _, at: packed(read(a, at, shuffle=True)),
    "packed rows of each epoch": lambda a, _, at: packed(read(a, at, shuffle=True), repack=True),
    "rows that are cut": lambda a, _, at: packed(read(a, at, shuffle=True), packing="concat"),
    "windows": lambda a, _, at: read(a, at, shuffle=True).windows(size=4, stride=3, group="run"),
    "cost batches": lambda a, _, at: read(a, at, shuffle=True).batch_by_cost(
        LENGTHS, 30, multiple=4
    ),
    "mix of rows": lambda a, b, at: ss.mix(
        [packed(read(a, at), repack=True), packed(read(b, at))], [1, 2], stop="all_exhausted"
    ),
    "mix of rows and samples": lambda a, b, at: ss.mix([packed(read(a, at)), read(b, at)]),
}
QUICK = ("weights", "subset", "packed rows")


def classes_of(item: Any) -> list[int]:
    """Return the classes of a sample, or of those in a row."""
    return [int(one) for one in np.atleast_1d(np.asarray(item["cls"]))]


def loader(dataset: Any, batch_size: int, **options: Any) -> ss.ShardLoader:
    if dataset.pipeline.source.yields_batches:
        return ss.ShardLoader(dataset, None, **options)
    return ss.ShardLoader(dataset, batch_size, collate_fn=list, **options)


def read_batches(batches: Iterator[Any]) -> Iterator[list[list[int]]]:
    """Yield for each batch the classes of its items."""
    for batch in batches:
        items = batch if isinstance(batch, list) else [{"cls": one} for one in batch["cls"]]
        yield [classes_of(item) for item in items]


def planned_classes(plan: Any) -> dict[int, int]:
    """Return the class of each number of a plan that comes in it."""
    steps = [plan.samples(step) for step in range(plan.num_steps)]
    last = 1 + max(int(one.numbers.max()) for one in steps)
    found = plan.where(numbers=range(last))
    return dict(zip(found.numbers.tolist(), classes_in(plan, found), strict=True))


def classes_in(plan: Any, samples: Any) -> list[int]:
    """Return the classes of planned samples, which are their keys."""
    return [int(key) for key in plan.keys(samples)]


def assert_plan_is_what_is_read(loaders: list[ss.ShardLoader], plan: Any) -> None:
    """Compare a plan with the batches that the ranks then read, both ways."""
    seen: Seen = Counter()
    classes = planned_classes(plan)
    for rank, one in enumerate(loaders):
        for step, items in enumerate(read_batches(iter(one))):
            planned = plan.samples(step, rank)
            read_classes = [number for item in items for number in item]
            assert [classes[number] for number in planned.numbers.tolist()] == read_classes
            places = [place for place, item in enumerate(items) for _ in item]
            assert planned.places.tolist() == places
            assert set(planned.steps.tolist()) == {step}
            assert set(planned.workers.tolist()) == {step % max(1, one.num_workers)}
            of_all = plan.samples(step)
            assert of_all.numbers[of_all.ranks == rank].tolist() == planned.numbers.tolist()
            seen.update(
                (number, step, rank, place) for place, item in enumerate(items) for number in item
            )
    found = plan.where(numbers=list(classes))
    columns = found.steps.tolist(), found.ranks.tolist(), found.places.tolist()
    came = [classes[number] for number in found.numbers.tolist()]
    assert Counter(zip(came, *columns, strict=True)) == seen
    in_order = list(zip(*columns, strict=True))
    assert in_order == sorted(in_order)


@pytest.mark.parametrize("name", with_slow_rest(QUICK, MADE))
@settings(max_examples=3)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    batch_size=st.sampled_from([1, 4, 8]),
    epoch=st.integers(0, 3),
    workers=st.sampled_from([0, 0, 0, 2]),
    taken=st.integers(0, 3),
)
def test_each_step_and_each_sample_come_as_planned(  # noqa: PLR0913, PLR0917
    folders: Folders, name: str, ranks: int, batch_size: int, epoch: int, workers: int, taken: int
) -> None:
    places = [ss.Placement(rank, ranks) for rank in range(ranks)]
    loaders = [loader(MADE[name](*folders, at), batch_size, num_workers=workers) for at in places]
    for one in loaders:
        one.set_epoch(epoch)
    assert_plan_is_what_is_read(loaders, loaders[0].plan(epoch))
    # The rest of an epoch, on other ranks; planned without a loader.
    first = loader(MADE[name](*folders, ss.Placement(0, 1)), batch_size)
    first.set_epoch(epoch)
    list(islice(first, taken))
    state = first.state_dict()
    others = [loader(MADE[name](*folders, at), batch_size, num_workers=workers) for at in places]
    for one in others:
        one.load_state_dict(state)
    dataset = MADE[name](*folders, None)
    size = None if dataset.pipeline.source.yields_batches else batch_size
    plan = ss.plan(dataset, ranks=ranks, workers=workers, batch_size=size, state=state)
    assert plan.num_steps == others[0].plan().num_steps == others[0].batches_left
    if plan.num_steps:
        assert_plan_is_what_is_read(others, plan)
    whole = [
        ss.plan(dataset, epoch, ranks=ranks, workers=workers, batch_size=size),
        loaders[0].plan(epoch),
    ]
    numbers = [[made.samples(n).numbers.tolist() for n in range(made.num_steps)] for made in whole]
    assert numbers[0] == numbers[1]


HUGE = 10**10


@pytest.mark.parametrize("name", with_slow_rest(["mix"], ["shuffled", "nodes", "mix"]))
def test_samples_of_ten_thousand_million_are_found_where_they_are_planned(name: str) -> None:
    made = ss.plan(huge_datasets(HUGE)[name], 3, ranks=64, workers=2, batch_size=32)
    assert made.num_steps == -(-HUGE // (64 * 32))
    for step in (0, 1_234_567, made.num_steps - 1):
        planned = made.samples(step)
        found = made.where(numbers=planned.numbers)
        rows = [
            {
                *zip(
                    one.numbers.tolist(),
                    one.steps.tolist(),
                    one.ranks.tolist(),
                    one.places.tolist(),
                    strict=True,
                )
            }
            for one in (planned, found)
        ]
        assert rows[0] <= rows[1]


@settings(max_examples=8)
@given(
    ranks=st.integers(1, 4),
    batch_size=st.sampled_from([4, 8, 12, 36]),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    nodes=st.sampled_from([1, 2, 3]),
    remainder=st.sampled_from(["pad", "drop", "keep"]),
    lanes=st.sampled_from([None, 6, 24]),
    microbatch=st.sampled_from([None, 1, 4]),
)
def test_last_steps_come_as_planned(
    folders: Folders,
    ranks: int,
    batch_size: int,
    *,
    shuffle: bool,
    drop_last: bool,
    nodes: int,
    **options: Any,
) -> None:
    order = ss.OrderOptions(**options, nodes=nodes if shuffle else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaders = [
            loader(
                read(folders[0], ss.Placement(rank, ranks), shuffle=shuffle, order=order),
                batch_size,
                drop_last=drop_last,
            )
            for rank in range(ranks)
        ]
        assert_plan_is_what_is_read(loaders, loaders[0].plan(0))


@pytest.mark.parametrize("epoch", range(3))
def test_samples_are_found_in_each_pass_of_a_nested_mix(folders: Folders, epoch: int) -> None:
    inner = ss.mix([read(folders[0], None), small(folders[1], None)], [1, 1])
    mixed = ss.mix([inner, read(folders[1], None)], [2, 1], stop="all_exhausted")
    plan = ss.plan(mixed, epoch, workers=2, batch_size=8)
    seen: Seen = Counter()
    for one in map(plan.samples, range(plan.num_steps)):
        seen.update(zip(one.numbers, one.copies, one.steps, one.places, strict=True))
    found = plan.where(numbers=range(340))
    assert len(set(found.copies.tolist())) > 5
    assert Counter(zip(found.numbers, found.copies, found.steps, found.places, strict=True)) == seen


def test_weights_given_in_a_training_are_planned_from_there(folders: Folders) -> None:
    datasets = {"a": read(folders[0], None), "b": read(folders[1], None)}
    first = loader(ss.mix(datasets, {"a": 1, "b": 1}, samples=160), 8)
    batches = read_batches(iter(first))
    done = list(islice(batches, 5))
    first.set_weights({"a": 1, "b": 0})
    plan = first.plan(0)
    done += batches
    planned = [classes_in(plan, plan.samples(step)) for step in range(20)]
    assert [[[number] for number in step] for step in planned] == done
    assert all(number < 1000 for batch in done[5:] for (number,) in batch)


def test_samples_of_a_mix_have_the_name_of_their_dataset(folders: Folders) -> None:
    plan = loader(MADE["mix by step"](*folders, None), 8).plan(0)
    some = plan.samples(20)
    assert plan.datasets(some) == ["ab"[one >= 1000] for one in classes_in(plan, some)]
    plan = loader(MADE["nested mix"](*folders, None), 8).plan(0)
    names = {name for step in range(9) for name in plan.datasets(plan.samples(step))}
    assert names == {"0/0", "0/1", "1"}
    plan = loader(MADE["plain"](*folders, None), 8).plan(0)
    assert plan.datasets(plan.samples(5)) == [""] * 8


def test_copies_and_ranks_and_workers_are_told_apart(folders: Folders) -> None:
    plan = loader(MADE["weights"](*folders, ss.Placement(1, 2)), 4, num_workers=2).plan(1)
    most = plan.where(numbers=[4])
    assert len(most) == len(set(most.copies.tolist())) >= 1
    assert plan.where(keys=["000000"]).numbers.tolist() == []  # its weight is 0
    assert plan.where(keys=["000004"]).steps.tolist() == most.steps.tolist()
    assert plan.samples(3).workers.tolist() == [1] * 8
    assert plan.num_ranks == 2
    assert "of 2 ranks" in repr(plan)


def test_steps_that_leave_samples_out_make_a_plan_inexact(folders: Folders) -> None:
    dataset = read(folders[0], None)
    assert loader(dataset, 4).plan(0).is_exact
    assert not loader(dataset.select(bool), 4).plan(0).is_exact
    assert not loader(read(folders[0], None, on_error="skip"), 4).plan(0).is_exact


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda plan: plan.samples(40), "no step 40: they are numbered from 0 to 39"),
        (lambda plan: plan.samples(0, 1), "no rank 1: they are numbered from 0 to 0"),
        (lambda plan: plan.samples(-1), "no step -1"),
        (lambda plan: plan.where(), "numbers= or keys=, one of them"),
        (lambda plan: plan.where(numbers=[1], keys=["a"]), "one of them"),
        (lambda plan: plan.where(numbers=[160]), "no sample 160: they are numbered from 0 to 159"),
        (lambda plan: plan.where(numbers=[-1]), "no sample -1"),
        (lambda plan: plan.where(numbers=[1.5]), "takes a list of whole numbers"),
        (lambda plan: plan.where(numbers=np.ones(160, bool)), "takes a list of whole numbers"),
        (lambda plan: plan.where(numbers={1, 2}), "takes a list of whole numbers"),
        (lambda plan: plan.where(numbers=3), "takes a list of whole numbers, .* not 3"),
        (lambda plan: plan.where(keys="000005"), "not found.*000005"),
        (lambda plan: plan.where(keys=["a", "b"]), "no sample has the key 'a', 'b'"),
        (lambda plan: plan.where(keys=[]), "keys= chooses no sample"),
    ],
)
def test_what_there_is_not_is_named(
    folders: Folders, ask: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(ss.ShardStreamError, match=message):
        ask(loader(read(folders[0], None), 4).plan(0))


def test_a_plan_needs_a_state_of_its_data_and_a_batch_size(folders: Folders) -> None:
    state = loader(read(folders[0], None, shuffle=True, seed=1), 4).state_dict()
    with pytest.raises(ss.errors.StateError, match="seed"):
        ss.plan(read(folders[0], None, shuffle=True), batch_size=4, state=state)
    with pytest.raises(ss.errors.StateError, match="checksums of the dataset"):
        ss.plan(read(folders[1], None, shuffle=True, seed=1), batch_size=4, state=state)
    with pytest.raises(ss.errors.StateError, match="does not divide batch_size=6"):
        ss.plan(read(folders[0], None, shuffle=True, seed=1), batch_size=6, state=state)
    with pytest.raises(ss.ShardStreamError, match="needs batch_size="):
        ss.plan(read(folders[0], None))
    with pytest.raises(ss.ShardStreamError, match="batch_size must be at least 1, not 0"):
        ss.plan(read(folders[0], None), batch_size=0)
    with pytest.raises(ss.ShardStreamError, match="ranks must be at least 1"):
        ss.plan(read(folders[0], None), batch_size=1, ranks=0)
    later = ss.plan(read(folders[0], None, shuffle=True, seed=1), 2, batch_size=8, state=state)
    assert (later.epoch, later.num_steps) == (2, 20)
    small_set = ss.plan(read(folders[0], None), batch_size=161, drop_last=True)
    with pytest.raises(ss.ShardStreamError, match="no step 0: the plan has no steps"):
        small_set.samples(0)


def test_the_rest_of_an_epoch_of_an_earlier_version_is_planned(tmp_path: Path) -> None:
    folder = numbered_from(tmp_path, 0)
    first = loader(read(folder, None, shuffle=True, seed=1), 4)
    list(islice(first, 5))
    state = first.state_dict()
    ss.delete(folder, numbers=range(100, 110))
    second = loader(read(folder, None, shuffle=True, seed=1), 4)
    second.load_state_dict(state)
    plan = ss.plan(read(folder, None, shuffle=True, seed=1), batch_size=4, state=state)
    assert not plan.is_exact  # deleted samples leave holes
    planned = [plan.samples(step).numbers.tolist() for step in range(plan.num_steps)]
    left = [[number for number in step if number not in range(100, 110)] for step in planned]
    batches = [
        [number for item in items for number in item] for items in read_batches(iter(second))
    ]
    assert batches == [step for step in left if step]
    later = ss.plan(read(folder, None, shuffle=True, seed=1), 1, batch_size=4, state=state)
    assert (later.num_steps, later.is_exact) == (38, True)


def test_trainings_without_a_plan_are_refused(folders: Folders) -> None:
    dataset = read(folders[0], None)
    with pytest.raises(ss.ShardStreamError, match="the step Shuffle changes how many"):
        loader(dataset.shuffle(10), 4).plan(0)
    with pytest.raises(ss.ShardStreamError, match="batch_size= is None"):
        ss.ShardLoader(dataset, None).plan(0)
    whole = ss.ShardDataset(folders[0], read=ss.ReadOptions(index="ignore"))
    with pytest.raises(ss.ShardStreamError, match="without an index"):
        ss.ShardLoader(whole, 4).plan(0)
