from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.errors import OptionError
from shardstream.order import (
    EpochOrder,
    NodeEpochPlan,
    PartitionConfig,
    RankPartition,
    Remainder,
    WorkerSteps,
)
from shardstream.pipeline import group_by_window, plan_steps
from tests.order.test_epoch_plan import epochs
from tests.order.test_partition import in_turn, steps_of

many = settings(max_examples=120, deadline=None)
remainders: st.SearchStrategy[Remainder] = st.sampled_from(["pad", "drop", "keep"])
topologies = st.builds(
    PartitionConfig,
    world_size=st.integers(1, 8),
    microbatches=st.integers(1, 4),
    remainder=remainders,
    whole_lanes=st.booleans(),
)


@st.composite
def orders(draw: st.DrawFn, *, exchange: bool = True) -> EpochOrder:
    batch, nodes = draw(st.integers(1, 9)), draw(st.integers(2, 5))
    return EpochOrder(
        nsamples=draw(st.integers(0, 400)),
        batch=batch,
        shuffle=True,
        seed=draw(st.integers(0, 1 << 40)),
        lanes=nodes * draw(st.integers(1, 4)),
        window=batch * draw(st.integers(1, 6)),
        block=draw(st.integers(1, 40)),
        nodes=nodes,
        exchange=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])) if exchange else 0.0,
    )


def large(nodes: int, exchange: float = 0.0, nsamples: int = 40_000) -> EpochOrder:
    return EpochOrder(
        nsamples=nsamples,
        batch=8,
        shuffle=True,
        seed=3,
        lanes=2 * nodes,
        window=64,
        block=8,
        nodes=nodes,
        exchange=exchange,
    )


def samples_of_nodes(
    order: EpochOrder, epoch: int, ranks_per_node: int = 1, remainder: Remainder = "pad"
) -> list[set[int]]:
    """Return the samples that each node reads in an epoch."""
    config = PartitionConfig(world_size=order.nodes * ranks_per_node, remainder=remainder)
    plan = NodeEpochPlan(order, epoch)
    ranks = [
        {number for step in steps_of(RankPartition(plan, config, rank=rank)) for number in step}
        for rank in range(config.world_size)
    ]
    starts = range(0, config.world_size, ranks_per_node)
    return [set().union(*ranks[start : start + ranks_per_node]) for start in starts]


def kept_share(before: list[set[int]], after: list[set[int]]) -> float:
    """Return the share of the samples of ``after`` that the same node had before."""
    kept = sum(len(old & new) for old, new in zip(before, after, strict=False))
    return kept / sum(map(len, after))


@many
@given(order=orders(), epoch=epochs)
def test_epoch_has_each_sample_once(order: EpochOrder, epoch: int) -> None:
    plan = NodeEpochPlan(order, epoch)
    batches = plan.batches(np.arange(order.num_batches))
    assert sorted(plan.rest(0).tolist()) == list(range(order.nsamples))
    assert len(np.unique(batches)) == batches.size == order.num_batches * order.batch
    found = plan.find(np.arange(order.nsamples))
    assert batches[found.batches, found.slots].tolist() == found.numbers.tolist()
    assert len(found.numbers) == batches.size


@pytest.mark.slow
@many
@given(order=orders(), config=topologies, epoch=epochs, data=st.data())
def test_steps_have_the_same_samples_on_every_topology(
    order: EpochOrder, config: PartitionConfig, epoch: int, data: st.DataObject
) -> None:
    plan = NodeEpochPlan(order, epoch)
    start = data.draw(st.integers(0, order.num_batches), label="t0")
    ranks = [
        RankPartition(plan, config, rank=rank, consumed=start * order.batch)
        for rank in range(config.world_size)
    ]
    counts = Counter(in_turn([steps_of(one) for one in ranks]))
    expected = set(plan.rest(start).tolist())
    size = config.batches_per_step
    for step in range(ranks[0].full_steps):
        together = [one.samples(np.array([step]))[0] for one in ranks]
        first = start + step * size
        wanted = plan.batches(np.arange(first, first + size))
        assert sorted(np.concatenate(together)) == sorted(wanted.ravel())
    if config.remainder == "drop":
        assert counts.total() == len(counts) == len(expected) - len(expected) % config.world_size
        assert set(counts) <= expected
    else:
        repeated = 0 if config.remainder == "keep" else -len(expected) % config.world_size
        assert set(counts) == expected
        assert counts.total() - len(counts) == repeated
    if config.remainder == "keep":
        sizes = [one.num_samples for one in ranks]
        assert max(sizes) - min(sizes) <= 1
        assert {one.max_steps for one in ranks} == {max(one.num_steps for one in ranks)}


@given(order=orders(), config=topologies, num_workers=st.integers(1, 4), data=st.data())
def test_workers_fetch_what_they_return(
    order: EpochOrder, config: PartitionConfig, num_workers: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, config.world_size - 1), label="rank")
    partition = RankPartition(NodeEpochPlan(order, 0), config, rank=rank)
    for worker in range(num_workers):
        steps = WorkerSteps(partition, worker, num_workers)
        returned = [
            number for some in plan_steps(partition, steps) for one in some for number in one
        ]
        fetched = [number for group in group_by_window(partition, steps) for number in group]
        assert sorted(fetched) == sorted(returned)


@many
@given(
    order=orders(exchange=False),
    ranks_per_node=st.integers(1, 3),
    epoch=epochs,
    remainder=remainders,
)
def test_nodes_read_no_sample_of_another_node(
    order: EpochOrder, ranks_per_node: int, epoch: int, remainder: Remainder
) -> None:
    if (
        remainder == "pad"
    ):  # where the last samples are fewer than nodes, some nodes repeat one of another
        order = replace(order, nsamples=order.nsamples // order.nodes * order.nodes)
    before, after = (
        samples_of_nodes(order, number, ranks_per_node, remainder) for number in (epoch, epoch + 1)
    )
    for node, own in enumerate(before):
        assert own.isdisjoint(set().union(*after[:node], *after[node + 1 :]))


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize(("exchange", "least", "most"), [(0, 1, 1), (0.1, 0.8, 0.95), (1, 0, 0.55)])
def test_exchange_is_the_share_of_blocks_that_other_nodes_read(
    nodes: int, exchange: float, least: float, most: float
) -> None:
    order = large(nodes, exchange)
    first, second = samples_of_nodes(order, 0), samples_of_nodes(order, 1)
    assert least <= kept_share(first, second) <= most
    assert NodeEpochPlan(order, 0).rest(0).tolist() != NodeEpochPlan(order, 1).rest(0).tolist()


@pytest.mark.parametrize(("before", "after"), [(4, 5), (5, 4), (8, 4), (4, 8), (7, 8)])
def test_another_number_of_nodes_moves_as_few_blocks_as_possible(before: int, after: int) -> None:
    kept = kept_share(samples_of_nodes(large(before), 0), samples_of_nodes(large(after), 0))
    assert kept == pytest.approx(min(before, after) / max(before, after), abs=0.01)


def test_order_is_pinned() -> None:
    """Otherwise saved states would continue with other samples."""
    order = EpochOrder(
        nsamples=30,
        batch=3,
        shuffle=True,
        seed=0,
        lanes=4,
        window=6,
        block=4,
        nodes=2,
        exchange=0.5,
    )
    plan = NodeEpochPlan(order, 1)
    assert plan.batches(np.arange(10)).tolist() == [
        [25, 23, 24], [17, 13, 16], [7, 5, 2], [29, 28, 9], [20, 22, 21],
        [14, 12, 15], [3, 4, 6], [11, 27, 10], [1, 0, 26], [8, 19, 18],
    ]  # fmt: skip
    assert plan.rest(7).tolist() == [1, 0, 26, 11, 27, 10, 8, 19, 18]  # sorted by node


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nodes": 0}, "nodes must be at least 1, not 0"),
        ({"nodes": 3}, "lanes=4 must be a multiple of nodes=3"),
        ({"exchange": 1.5}, "exchange must be from 0 to 1, not 1.5"),
        ({"nodes": 1, "exchange": 0.5}, "exchange= has no effect with one node"),
        ({"shuffle": False}, "nodes= has no effect without shuffle"),
    ],
)
def test_impossible_options_are_refused(changed: dict[str, float], message: str) -> None:
    options = {"nsamples": 9, "batch": 1, "seed": 0, "lanes": 4, "window": 1, "block": 1}
    with pytest.raises(OptionError, match=message):
        EpochOrder(**({"shuffle": True, "nodes": 2} | options | changed))  # type: ignore[arg-type]
