"""Test ``balance=`` of the order: equal costs of all ranks at each step, with the lengths, splits and states of other orders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import shardstream as ss
from shardstream.errors import OptionError, StateError
from shardstream.testing import make_shards
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, flat, labels, take

pytestmark = pytest.mark.filterwarnings(FEW_CORES, "ignore:an epoch of this mix has:UserWarning")

COUNT, GLOBAL_BATCH = 400, 16
COLUMNS = {"n": "json.n", "m": "json.m"}
LENGTHS = np.random.default_rng(0).lognormal(4, 1.0, COUNT).astype(int) + 1
DatasetOf = Callable[[ss.Placement, ss.OrderOptions], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of 400 samples with the columns ``n`` (a length), ``m`` and ``cls`` (the number of the sample)."""
    samples = [
        {"__key__": f"{i:04d}", "cls": i, "json": {"n": int(n), "m": i % 3}}
        for i, n in enumerate(LENGTHS)
    ]
    made = tmp_path_factory.mktemp("lengths")
    return make_shards(made, samples=samples, per_shard=60, columns=COLUMNS)


def datasets(folder: str) -> dict[str, DatasetOf]:
    def part(placement: ss.Placement, order: ss.OrderOptions | None, **options: Any) -> Any:
        return ss.ShardDataset(folder, shuffle=True, order=order, placement=placement, **options)

    weights = np.arange(COUNT) % 4 * 1.0
    return {
        "all": part,
        "subset": lambda at, order: part(at, order, subset=np.arange(0, COUNT, 2)),
        "where": lambda at, order: part(at, order, where="n < 100"),
        "weights": lambda at, order: part(at, order, weights=weights),
        "mix": lambda at, order: ss.mix([part(at, None), part(at, None)], order=order),
        "weighted mix": lambda at, order: ss.mix(
            [part(at, None), part(at, None, weights=weights)], [0.7, 0.3], order=order
        ),
    }


def read(
    dataset_of: DatasetOf,
    order: ss.OrderOptions,
    ranks: int,
    *,
    num_workers: int = 0,
    state: Any = None,
    count: int | None = None,
) -> tuple[list[list[int]], Any]:
    """Return batches of all ranks together, and the state of rank 0 after ``count`` of them."""
    found, states = list[list[list[int]]](), list[Any]()
    for rank in range(ranks):
        dataset = dataset_of(ss.Placement(rank, ranks), order).decode()
        loader = ss.ShardLoader(dataset, GLOBAL_BATCH // ranks, num_workers=num_workers)
        if state is not None:
            loader.load_state_dict(state)
        found.append(labels(loader if count is None else take(loader, count)))
        states.append(json.loads(json.dumps(loader.state_dict())))
    return [flat(parts) for parts in zip_longest(*found, fillvalue=[])], states[0]


def order_of(balance: Any = None, **options: Any) -> ss.OrderOptions:
    return ss.OrderOptions(balance=balance, **{"lanes": 8, "microbatch": 2, "window": 16} | options)


def shares(batches: list[list[int]], ranks: int = 8) -> float:
    """Return the mean over the full steps of mean cost / largest cost over the ranks."""
    full = [batch for batch in batches if len(batch) == GLOBAL_BATCH]
    costs = LENGTHS[np.array(full)].reshape(len(full), ranks, -1).sum(axis=2)
    return float((costs.mean(axis=1) / costs.max(axis=1)).mean())


@pytest.mark.parametrize(
    "kind",
    with_slow_rest(
        ["all", "weighted mix"], ["all", "subset", "where", "weights", "mix", "weighted mix"]
    ),
)
def test_the_samples_of_some_steps_stay_and_their_costs_are_equal(folder: str, kind: str) -> None:
    dataset_of = datasets(folder)[kind]
    before, _ = read(dataset_of, order_of(remainder="keep"), 8)
    after, _ = read(dataset_of, order_of(ss.Balance("n", steps=5), remainder="keep"), 8)
    assert len(before) == len(after)
    for first in range(0, len(before) - 5, 5):
        stretch = slice(first, first + 5)
        assert sorted(flat(after[stretch])) == sorted(flat(before[stretch]))
    assert sorted(flat(after)) == sorted(flat(before))
    assert shares(after) > shares(before) + 0.2


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_global_batches_are_the_same_on_every_topology_and_after_two_resumes(
    folder: str, data: st.DataObject
) -> None:
    dataset_of = data.draw(st.sampled_from([*datasets(folder).values()]))
    balance = ss.Balance(
        "n",
        steps=data.draw(st.sampled_from([1, 3, 64])),
        padded=data.draw(st.booleans()),
    )
    order = order_of(balance, remainder=data.draw(st.sampled_from(["pad", "drop", "keep"])))
    whole = [one for one in read(dataset_of, order, 1)[0] if len(one) == GLOBAL_BATCH]
    found, state = list[list[int]](), None
    for count in (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)), None):
        some, state = read(
            dataset_of, order, data.draw(st.sampled_from([1, 2, 4, 8])), state=state, count=count
        )
        found += some
    assert found[: len(whole)] == whole
    assert len(found) <= len(whole) + 1  # a last step of fewer samples is split evenly


@pytest.mark.parametrize(
    ("ranks", "num_workers"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.slow), (4, 0)]
)
def test_workers_read_the_same_batches(folder: str, ranks: int, num_workers: int) -> None:
    dataset_of, order = datasets(folder)["all"], order_of("n")
    whole, _ = read(dataset_of, order, 1)
    assert read(dataset_of, order, ranks, num_workers=num_workers)[0] == whole


def test_a_resume_in_the_middle_of_a_step_is_exact_and_says_that_costs_are_not_equal(
    folder: str,
) -> None:
    def loader(rank: int, ranks: int) -> ss.ShardLoader:
        dataset = datasets(folder)["all"](ss.Placement(rank, ranks), order_of("n"))
        return ss.ShardLoader(dataset.decode(), 2)

    (whole,) = (flat(labels(loader(0, 1))),)
    first = [labels(take(one, 3)) for one in [loader(0, 2), loader(1, 2)]]
    stopped = loader(0, 2)
    take(stopped, 3)
    rest = []
    for rank in range(4):
        resumed = loader(rank, 4)
        with pytest.warns(UserWarning, match="in the middle of a step of 4 batches"):
            resumed.load_state_dict(stopped.state_dict())
        rest.append(labels(resumed))
    found = [*zip(*first, strict=True), *zip(*rest, strict=True)]
    assert flat([flat(step) for step in found]) == whole


def test_lanes_that_the_ranks_do_not_divide_warn(folder: str) -> None:
    dataset = datasets(folder)["all"](ss.Placement(0, 3), order_of("n"))
    with pytest.warns(UserWarning, match="lanes=8 are not a multiple of the 3 batches of a step"):
        ss.ShardLoader(dataset, 2)


def test_ranks_of_a_group_have_equal_costs(folder: str) -> None:
    dataset_of = datasets(folder)["all"]
    order = order_of(ss.Balance("n", steps=8, group_size=2))
    batches, _ = read(dataset_of, order, 8)
    pairs = [batch[first : first + 4] for batch in batches for first in range(0, 16, 4)]
    costs = np.array([LENGTHS[pair].reshape(2, 2).sum(axis=1) for pair in pairs if len(pair) == 4])
    assert (costs.mean(axis=1) / costs.max(axis=1)).mean() > 0.98
    with pytest.raises(OptionError, match="group_size=2, but 3 ranks x 1 microbatches"):
        ss.ShardLoader(dataset_of(ss.Placement(0, 3), order), 2)
    with pytest.raises(OptionError, match="group_size=3 needs lanes that are a multiple of it"):
        len(ss.ShardLoader(dataset_of(ss.Placement(), order_of(ss.Balance("n", group_size=3))), 2))


def test_costs_are_a_column_a_file_an_array_or_a_function(folder: str, tmp_path: Path) -> None:
    def order(balance: Any) -> list[list[int]]:
        return read(datasets(folder)["all"], order_of(balance), 1)[0]

    expected = order("n")
    for same in (LENGTHS, LENGTHS.tolist(), ss.Balance(LENGTHS.astype(np.float64))):
        assert order(same) == expected
    np.save(tmp_path / "costs.npy", LENGTHS.astype(np.float32))
    assert order(str(tmp_path / "costs.npy")) == expected
    seen: list[Any] = []

    def cost(n: Any) -> Any:
        seen.append((n.dtype, n.shape))
        return n * n

    squared = LENGTHS.astype(np.int64) ** 2
    assert order(ss.Balance("n", cost=cost)) == order(squared) == order(squared * 1e300) != expected
    assert seen == [(np.dtype(np.float64), (COUNT,))]


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        (ss.Balance("n", cost=lambda n: np.where(n == n[7], np.nan, n)), "sample 7 has nan"),
        (ss.Balance("n", cost=lambda n: n - n[3] - 0.5), "sample .* has -.*at least 0"),
        (ss.Balance("n", cost=lambda n: n * np.inf), "sample 0 has inf"),
        (ss.Balance("n", cost=lambda n: n[1:]), r"shape \(399,\) for an array of shape \(400,\)"),
        (ss.Balance("n", cost=lambda n: n.sum()), r"returned float64 of shape \(\)"),
        (ss.Balance("n", cost=lambda n: n.astype(str)), "returned <U"),
        (ss.Balance("n", cost=lambda _: None), "returned object"),
        (LENGTHS[:-1], "balance= has 399 numbers, but there are 400 samples"),
        ([[1], [1, 2]], "one list of numbers"),
        ("missing", "missing"),
        ([], "balance= has 0 numbers"),
    ],
)
def test_costs_that_are_no_numbers_are_refused(folder: str, balance: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ss.ShardDataset(folder, shuffle=True, order=ss.OrderOptions(balance=balance))


def test_samples_without_a_length_are_refused(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"{i:02d}", "json": {"n": 5 if i != 6 else None, "m": 1}} for i in range(12)
    ]
    url = make_shards(tmp_path, samples=samples, per_shard=5, columns=COLUMNS)
    with pytest.raises(OptionError, match="sample 6 has no value in the column 'n'") as caught:
        ss.ShardDataset(url, shuffle=True, order=ss.OrderOptions(balance="n"))
    assert "000001" in str(caught.value)
    ss.ShardDataset(url, shuffle=True, where="n > 0", order=ss.OrderOptions(balance="n"))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"steps": 0}, "steps"), ({"steps": 2.5}, "steps"), ({"group_size": 0}, "group_size")],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ss.Balance("n", **options)


def test_nodes_that_keep_their_samples_exclude_balance() -> None:
    with pytest.raises(OptionError, match="nodes= keeps them on one"):
        ss.OrderOptions(balance="n", nodes=2)


def test_balance_needs_a_shuffle_an_index_and_samples_and_belongs_to_the_mix(folder: str) -> None:
    order = ss.OrderOptions(balance="n")
    with pytest.raises(OptionError, match="shuffle=False keeps the stored order"):
        ss.ShardDataset(folder, order=order)
    with pytest.raises(OptionError, match="balance= has no effect on shards that are read whole"):
        ss.ShardDataset(folder, shuffle=True, order=order, read=ss.ReadOptions(index="ignore"))
    part = ss.ShardDataset(folder, shuffle=True, order=order)
    with pytest.raises(OptionError, match="balance= has no effect in a dataset of a mix"):
        ss.mix([part, part])


@pytest.mark.parametrize(
    "other",
    [None, "m", ss.Balance("n", steps=5), ss.Balance("n", padded=True), ss.Balance("n", group_size=2)],
)  # fmt: skip
def test_states_of_another_balance_are_refused(folder: str, other: Any) -> None:
    loaders = [
        ss.ShardLoader(datasets(folder)["all"](ss.Placement(), order_of(one)).decode(), 2)
        for one in ("n", other)
    ]
    for saved, opened in (loaders, loaders[::-1]):
        take(saved, 3)
        message = re.escape(
            "balance= of the order" if "balance" in saved.state_dict() else "balance"
        )
        with pytest.raises(StateError, match=message):
            opened.load_state_dict(saved.state_dict())


def test_more_steps_than_an_epoch_has_are_one_stretch(folder: str) -> None:
    batches, _ = read(datasets(folder)["all"], order_of(ss.Balance("n", steps=10**12)), 8)
    assert sorted(flat(batches)) == list(range(COUNT))
    assert shares(batches) > 0.95


def test_without_a_loader_a_warning_says_that_batch_size_and_lanes_are_needed(folder: str) -> None:
    def costs(order: ss.OrderOptions) -> list[int]:
        found = [datasets(folder)["all"](ss.Placement(rank, 4), order) for rank in range(4)]
        parts = [DataLoader(one.decode(), 4, collate_fn=list) for one in found]
        steps = zip(*parts, strict=True)
        sums = [[sum(one["json"]["n"] for one in batch) for batch in step] for step in steps]
        return [max(step) - min(step) for step in sums]

    with pytest.warns(UserWarning, match=r"balance= makes microbatches equal, .*microbatch=N"):
        without = costs(ss.OrderOptions(balance="n"))
    balanced = costs(ss.OrderOptions(balance="n", microbatch=4, lanes=4))
    assert np.median(balanced) < np.median(without) / 4


def test_balance_of_a_mix_whose_weights_change_by_step_warns_that_they_change_elsewhere(
    folder: str,
) -> None:
    part = ss.ShardDataset(folder, shuffle=True)
    schedule = ss.WeightSchedule({0: {"a": 1, "b": 0}, 20: {"a": 0, "b": 1}}, step=8)
    with pytest.warns(UserWarning, match=r"new weights of a WeightSchedule begin .* steps="):
        ss.mix({"a": part, "b": part}, schedule, samples=320, order=order_of("n"))


def test_the_samples_that_drop_last_drops_are_others_in_each_epoch(folder: str) -> None:
    order = ss.OrderOptions(balance="n", lanes=7, microbatch=1)  # 57 rounds, and one sample
    dropped = set[int]()
    for epoch in range(8):
        dataset = datasets(folder)["all"](ss.Placement(0, 1), order).decode()
        loader = ss.ShardLoader(dataset, 7, drop_last=True)
        loader.set_epoch(epoch)
        dropped |= set(range(COUNT)) - set(flat(labels(loader)))
    assert len(dropped) > 4
