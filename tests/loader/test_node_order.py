"""Test that an order in which each node keeps its blocks is as exact as any other, through the loader."""

from __future__ import annotations

import json
from typing import Any

import pytest

import shardstream as ss
from shardstream.errors import OptionError, StateError
from tests.pairs import with_slow_rest
from tests.small_datasets import FEW_CORES, all_ranks, flat, labels, loader, numbered, take

pytestmark = pytest.mark.filterwarnings(FEW_CORES)

SAMPLES = 203
OPTIONS: dict[str, Any] = {"shuffle": True, "seed": 5, "lanes": 16, "microbatch": 4, "block": 3}
NODES = OPTIONS | {"nodes": 4, "exchange": 0.25}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return numbered(tmp_path_factory.mktemp("numbered"), SAMPLES, 30)


def steps_of(loaders: list[ss.ShardLoader]) -> list[list[int]]:
    """Return the samples of each step of all ranks together, sorted."""
    ranks = [labels(one) for one in loaders]
    return [sorted(flat(batches)) for batches in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("ranks", "num_workers"),
    with_slow_rest([(1, 0), (2, 2), (4, 0), (8, 0)], [1, 2, 4, 8], [0, 2]),
)
@pytest.mark.filterwarnings("ignore:.* ranks are not a multiple of nodes=4")
def test_global_batches_are_the_same_on_every_topology(
    ranks: int, num_workers: int, folder: str
) -> None:
    options = NODES | {"num_workers": num_workers, "batch_size": 32 // ranks}
    steps = steps_of(list(all_ranks(ranks, folder, **options)))
    (whole,) = all_ranks(1, folder, **NODES, batch_size=32)
    expected = steps_of([whole])
    assert steps[:-1] == expected[:-1]
    assert set(steps[-1]) == set(expected[-1])
    assert set(flat(steps)) == set(range(SAMPLES))


@pytest.mark.filterwarnings("ignore:.* ranks are not a multiple of nodes=4")
def test_an_epoch_that_is_resumed_twice_elsewhere_has_each_sample_once(folder: str) -> None:
    state: dict[str, Any] | None = None
    seen: list[int] = []
    for ranks, batch_size in ((8, 4), (2, 8), (1, 16)):
        loaders = list(all_ranks(ranks, folder, **NODES, batch_size=batch_size, remainder="keep"))
        for one in loaders:
            if state is not None:
                one.load_state_dict(json.loads(json.dumps(state)))
            seen += flat(labels(one if ranks == 1 else take(one, 2)))
        state = loaders[0].state_dict()
    assert sorted(seen) == list(range(SAMPLES))


def test_ranks_of_a_node_read_its_samples_in_every_epoch(folder: str) -> None:
    options = OPTIONS | {"nodes": 2, "batch_size": 8, "drop_last": True}
    before: list[set[int]] = []
    for epoch in range(3):
        loaders = list(all_ranks(4, folder, **options))
        for one in loaders:
            one.set_epoch(epoch)
        ranks = [set(flat(labels(one))) for one in loaders]
        nodes = [ranks[0] | ranks[1], ranks[2] | ranks[3]]
        before = before or [set(), set()]
        assert before[0].isdisjoint(nodes[1])
        assert before[1].isdisjoint(nodes[0])
        before = [old | new for old, new in zip(before, nodes, strict=True)]


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (
            NODES,
            NODES | {"nodes": 2},
            "nodes= of the order: the state says 4, here it is 2; finish the",
        ),
        (NODES, OPTIONS, "nodes= of the order: the state says 4, here are none; finish the epoch"),
        (OPTIONS, NODES, "nodes= of the order: the state says None, here it is 4"),
        (NODES, NODES | {"exchange": 0.5}, "exchange: the state says 0.25, here it is 0.5"),
    ],
)
def test_a_state_of_other_nodes_is_refused(
    saved: dict[str, Any], here: dict[str, Any], message: str, folder: str
) -> None:
    state = loader(folder, **saved).state_dict()
    with pytest.raises(StateError, match=message):
        loader(folder, **here).load_state_dict(state)


def test_states_without_nodes_have_no_fields_for_them(folder: str) -> None:
    assert not {"nodes", "exchange"} & loader(folder, **OPTIONS).state_dict().keys()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lanes": 6}, "lanes=6 must be a multiple of nodes=4"),
        ({"nodes": 1}, "exchange= has no effect with one node"),
        ({"exchange": "all"}, "exchange must be a number, not 'all'"),
        ({"exchange": -0.1}, "exchange must be from 0 to 1, not -0.1"),
        ({"shuffle": False}, "nodes= has no effect without shuffle"),
        ({"weights": [1.0] * SAMPLES}, "nodes= has no effect with weights="),
        (
            {"index": "ignore", "block": None, "lanes": None, "microbatch": None},
            "nodes= has no eff",
        ),
    ],
)
def test_nodes_without_effect_are_refused(
    changed: dict[str, Any], message: str, folder: str
) -> None:
    with pytest.raises(OptionError, match=message):
        loader(folder, **(NODES | changed))


def _mix(kind: str, folder: str, placement: ss.Placement, nodes: int = 2) -> Any:
    whole, odd = (
        ss.ShardDataset(folder, shuffle=True, placement=placement, seed=seed, subset=subset)
        for seed, subset in ((1, None), (2, range(1, SAMPLES, 2)))
    )
    order = ss.OrderOptions(nodes=nodes, lanes=8, microbatch=1)
    match kind:
        case "each once":
            return ss.mix([whole, odd], order=order)
        case "nested":
            weights = {"both": 1.0, "odd": 2.0}
            both = ss.mix([whole, odd], [3, 1])
            return ss.mix({"both": both, "odd": odd}, weights, samples=400, order=order)
        case _:
            return ss.mix([whole, odd], [1, 1], stop="all_exhausted", order=order)


@pytest.mark.parametrize(
    "kind", with_slow_rest(["each once", "nested"], ["each once", "weights", "nested"])
)
@pytest.mark.filterwarnings("ignore:an epoch of this mix")
def test_nodes_of_a_mix_keep_blocks_of_all_its_datasets(kind: str, folder: str) -> None:
    read: list[set[int]] = [set(), set()]
    for epoch in range(3):
        whole = ss.ShardLoader(_mix(kind, folder, ss.Placement()), 8, drop_last=True)
        steps = []
        for rank in range(4):
            one = ss.ShardLoader(_mix(kind, folder, ss.Placement(rank, 4)), 2, drop_last=True)
            one.set_epoch(epoch)
            plan = one.plan(epoch)
            numbers = [plan.samples(step, rank).numbers for step in range(len(one))]
            steps.append(numbers)
            read[rank // 2] |= set(flat([found.tolist() for found in numbers]))
            found = plan.where(numbers=numbers[1])
            assert {1} <= set(found.steps[found.ranks == rank].tolist())
        whole.set_epoch(epoch)
        together = [
            sorted(flat([one.tolist() for one in ranks])) for ranks in zip(*steps, strict=True)
        ]
        planned = whole.plan(epoch)
        assert together == [
            sorted(planned.samples(step).numbers.tolist()) for step in range(len(whole))
        ]
    # The samples that fill no batch of a node alone, at most one for each pass of a dataset.
    assert len(read[0] & read[1]) <= 12
    assert min(map(len, read)) > 100


def test_mixes_refuse_nodes_that_have_no_effect(folder: str) -> None:
    order = ss.OrderOptions(nodes=2)
    whole = ss.ShardDataset(folder, shuffle=True)
    drawn = ss.ShardDataset(folder, shuffle=True, weights=[1.0] * SAMPLES)
    with pytest.raises(OptionError, match="nodes= has no effect in a dataset of a mix"):
        ss.mix([ss.ShardDataset(folder, shuffle=True, order=order), whole], [1, 1])
    for other in (drawn, ss.ShardDataset(folder)):
        with pytest.raises(OptionError, match="nodes= has no effect on datasets without shuffle"):
            ss.mix([whole, other], [1, 1], order=order)


def test_rows_keep_their_nodes_unless_they_differ_by_epoch(folder: str) -> None:
    lengths = [6] * SAMPLES
    read: list[set[int]] = []
    for epoch in (0, 1):
        for rank in range(2):
            order, placement = ss.OrderOptions(nodes=2, block=2), ss.Placement(rank, 2)
            whole = ss.ShardDataset(folder, shuffle=True, order=order, placement=placement)
            flattened = whole.decode().map(lambda sample: {"ids": sample["npy"].ravel()})
            rows = ss.ShardLoader(flattened.pack_sequences("ids", 24, lengths=lengths), 4)
            rows.set_epoch(epoch)
            read.append({int(label) for batch in rows for label in batch["ids"].unique()})
            with pytest.raises(
                OptionError, match="nodes= has no effect where pack_sequences makes"
            ):
                flattened.pack_sequences("ids", 24, lengths=lengths, repack=True)
    assert read[0] | read[1] == set(range(SAMPLES))
    assert len(read[0] & read[3]) + len(read[1] & read[2]) <= 8  # a last row that is read twice


def test_ranks_that_cannot_keep_blocks_cause_a_warning(folder: str) -> None:
    with pytest.warns(UserWarning, match="6 ranks are not a multiple of nodes=4"):
        next(all_ranks(6, folder, **NODES | {"lanes": 24}, batch_size=4))


def test_default_lanes_are_a_multiple_of_the_nodes(folder: str) -> None:
    one = loader(folder, shuffle=True, nodes=4, placement=ss.Placement(0, 4))
    assert one.state_dict()["lanes"] == 4
    one = loader(folder, shuffle=True, nodes=3)
    assert one.state_dict()["lanes"] == 3
    assert sorted(flat(labels(one))) == list(range(SAMPLES))
