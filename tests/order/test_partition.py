from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.distributed import Placement
from shardstream.errors import OptionError
from shardstream.order import (
    EpochOrder,
    EpochPlan,
    PartitionConfig,
    RankPartition,
    Remainder,
    WorkerSteps,
    find_even_lane_counts,
    uneven_effect,
)
from shardstream.pipeline import group_by_window, plan_steps
from tests.order.test_epoch_plan import epochs, orders

many = settings(max_examples=120, deadline=None)
remainders: st.SearchStrategy[Remainder] = st.sampled_from(["pad", "drop", "keep"])


def splits(
    remainder: st.SearchStrategy[Remainder] = remainders,
    drop_last: st.SearchStrategy[bool] = st.just(False),  # noqa: B008  (a strategy is a value)
) -> st.SearchStrategy[PartitionConfig]:
    return st.builds(
        PartitionConfig,
        world_size=st.integers(1, 6),
        microbatches=st.integers(1, 4),
        remainder=remainder,
        drop_last=drop_last,
        whole_lanes=st.booleans(),
    )


def partitions(plan: EpochPlan, config: PartitionConfig, consumed: int = 0) -> list[RankPartition]:
    return [
        RankPartition(plan, config, rank=rank, consumed=consumed)
        for rank in range(config.world_size)
    ]


def steps_of(partition: RankPartition) -> list[list[int]]:
    """Return the samples of each step of a rank."""
    return [numbers.tolist() for numbers in partition.samples(np.arange(partition.num_steps))]


def in_turn(ranks: list[list[list[int]]]) -> list[int]:
    """Return the samples of all ranks, by step and rank."""
    num_steps = max(map(len, ranks))
    return [
        number
        for step in range(num_steps)
        for rank in ranks
        if step < len(rank)
        for number in rank[step]
    ]


def draw_consumed(data: st.DataObject, order: EpochOrder) -> int:
    return data.draw(st.integers(0, order.num_batches), label="t0") * order.batch


@many
@given(order=orders(), config=splits(), epoch=epochs, data=st.data())
def test_all_ranks_together_return_each_sample_once(
    order: EpochOrder, config: PartitionConfig, epoch: int, data: st.DataObject
) -> None:
    consumed = draw_consumed(data, order)
    plan = EpochPlan(order, epoch)
    counts = Counter(
        in_turn([steps_of(partition) for partition in partitions(plan, config, consumed)])
    )
    expected = set(plan.rest(consumed // order.batch).tolist())
    repeated, missing = counts.total() - len(counts), len(expected) - len(counts)
    assert set(counts) <= expected
    if config.remainder == "keep":
        assert (repeated, missing) == (0, 0)
    elif config.remainder == "pad":
        assert missing == 0
        assert repeated <= config.world_size - 1
        assert repeated == -len(expected) % config.world_size
    else:
        assert repeated == 0
        assert missing == len(expected) % config.world_size


@many
@given(order=orders(), config=splits(st.sampled_from(["pad", "drop"])), data=st.data())
def test_ranks_have_equal_steps_of_equal_size(
    order: EpochOrder, config: PartitionConfig, data: st.DataObject
) -> None:
    ranks = partitions(EpochPlan(order, 0), config, draw_consumed(data, order))
    sizes = [[len(numbers) for numbers in steps_of(partition)] for partition in ranks]
    assert all(one == sizes[0] for one in sizes)
    assert all(0 < size <= config.microbatches * order.batch for size in sizes[0])
    assert len(sizes[0]) == ranks[0].num_steps
    assert {partition.num_samples for partition in ranks} == {sum(sizes[0])}
    for partition in ranks:
        assert [partition.step_size(step) for step in range(partition.num_steps)] == sizes[0]


@given(order=orders(), config=splits(st.just("keep")))
def test_with_keep_ranks_differ_by_at_most_one_sample(
    order: EpochOrder, config: PartitionConfig
) -> None:
    ranks = partitions(EpochPlan(order, 0), config)
    for values in (
        [partition.num_samples for partition in ranks],
        [partition.num_steps for partition in ranks],
        [len(partition.tail()) for partition in ranks],
    ):
        assert max(values) - min(values) <= 1


@given(order=orders(), config=splits(drop_last=st.just(True)))
def test_without_a_last_step_all_steps_are_full(order: EpochOrder, config: PartitionConfig) -> None:
    found = partitions(EpochPlan(order, 0), config)
    ranks = [steps_of(partition) for partition in found]
    width = config.microbatches * order.batch
    assert [partition.num_samples for partition in found] == [width * len(one) for one in ranks]
    assert all(len(numbers) == width for steps in ranks for numbers in steps)
    together = in_turn(ranks)
    assert (
        len(together) == order.nsamples // (width * config.world_size) * width * config.world_size
    )
    assert len(set(together)) == len(together)


@many
@given(order=orders(), config=splits(), epoch=epochs)
def test_sequence_is_the_same_on_every_topology(
    order: EpochOrder, config: PartitionConfig, epoch: int
) -> None:
    plan = EpochPlan(order, epoch)
    together = in_turn([steps_of(partition) for partition in partitions(plan, config)])
    one_rank = plan.rest(0).tolist()
    shown = min(len(together), order.nsamples)  # pad repeats samples at the end, drop omits some
    assert together[:shown] == one_rank[:shown]
    assert order.nsamples - shown < config.world_size


@many
@given(order=orders(), before=splits(), after=splits(), epoch=epochs, data=st.data())
def test_remaining_samples_are_equal_on_another_topology(
    order: EpochOrder,
    before: PartitionConfig,
    after: PartitionConfig,
    epoch: int,
    data: st.DataObject,
) -> None:
    plan = EpochPlan(order, epoch)
    first = partitions(plan, before)
    steps = data.draw(st.integers(0, first[0].full_steps), label="steps")
    consumed = [partition.consumed_after(steps) for partition in first]
    seen = in_turn([steps_of(partition)[:steps] for partition in first])
    rest = in_turn([steps_of(partition) for partition in partitions(plan, after, consumed[0])])
    together = seen + rest
    shown = min(len(together), order.nsamples)
    assert together[:shown] == plan.rest(0).tolist()[:shown]
    dropped_before = steps == first[0].num_steps and before.remainder == "drop"
    assert order.nsamples - shown < max(after.world_size, before.world_size * dropped_before)
    if steps < first[0].full_steps:
        assert set(consumed) == {len(seen)}


@given(order=orders(), config=splits(st.sampled_from(["pad", "drop"])), data=st.data())
def test_consumed_grows_by_whole_steps_up_to_all(
    order: EpochOrder, config: PartitionConfig, data: st.DataObject
) -> None:
    partition = RankPartition(
        EpochPlan(order, 0), config, rank=0, consumed=draw_consumed(data, order)
    )
    consumed = [partition.consumed_after(step) for step in range(partition.num_steps + 1)]
    assert consumed == sorted(set(consumed)) or partition.num_steps == 0
    assert consumed[-1] == order.nsamples
    width = config.batches_per_step * order.batch
    assert all(b - a == width for a, b in pairwise(consumed[:-1]))


def test_rank_without_a_last_step_does_not_affect_other_ranks() -> None:
    order = EpochOrder(nsamples=9, batch=4, shuffle=False, seed=0, lanes=1, window=4, block=1)
    with_tail, without = partitions(
        EpochPlan(order, 0), PartitionConfig(world_size=2, remainder="keep")
    )
    assert (with_tail.num_steps, without.num_steps) == (2, 1)
    assert with_tail.consumed_after(1) == without.consumed_after(1) == 8
    assert with_tail.consumed_after(2) == 9


@many
@given(order=orders(), config=splits(), num_workers=st.integers(1, 5), data=st.data())
def test_steps_of_a_rank_are_assigned_to_workers_round_robin(
    order: EpochOrder, config: PartitionConfig, num_workers: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, config.world_size - 1))
    partition = RankPartition(
        EpochPlan(order, 0), config, rank=rank, consumed=draw_consumed(data, order)
    )
    workers = [WorkerSteps(partition, worker, num_workers) for worker in range(num_workers)]
    everything = steps_of(partition)
    for worker, steps in enumerate(workers):
        assert [partition.worker_of(step, num_workers) for step in steps] == [
            (worker, place) for place in range(len(steps))
        ]
        found = [numbers.tolist() for some in plan_steps(partition, steps) for numbers in some]
        assert found == [everything[step] for step in steps]
        first = data.draw(st.integers(0, len(steps)))
        later = WorkerSteps(partition, worker, num_workers, first)
        assert [*later] == [*steps][first:] == later[:].tolist() == steps[first:].tolist()
        for outside in (-1, len(steps)):
            with pytest.raises(IndexError):
                steps[outside]
    assert sorted(chain(*workers)) == list(range(partition.num_steps))


@pytest.mark.parametrize(
    ("lanes", "num_workers", "most_of_a_worker"),
    [(64, 24, 3), (8, 3, 3), (48, 24, 2), (16, 16, 1), (8, 5, 2), (5, 4, 5), (3, 2, 3), (2, 4, 1)],
)
def test_workers_take_whole_lanes_if_few_turns_are_gaps(
    lanes: int, num_workers: int, most_of_a_worker: int
) -> None:
    order = EpochOrder(
        nsamples=40_000, batch=4, shuffle=True, seed=0, lanes=lanes, window=40, block=2
    )
    config = PartitionConfig(whole_lanes=True)
    partition = RankPartition(EpochPlan(order, 0), config, rank=0)
    workers = [WorkerSteps(partition, worker, num_workers) for worker in range(num_workers)]
    lanes_of = [{step % lanes for step in steps} for steps in workers]
    assert max(map(len, lanes_of)) == most_of_a_worker
    windows = [
        {*partition.plan.windows(partition.batches(steps[: steps.num_full]).ravel()).tolist()}
        for steps in workers
    ]
    is_shared = sum(map(len, windows)) > len(set[int]().union(*windows))
    assert is_shared == (lanes in (5, 3, 2))
    assert sorted(chain(*workers)) == list(range(partition.num_steps))


@many
@given(order=orders(), config=splits(), data=st.data())
def test_steps_of_window_returns_steps_with_its_batches(
    order: EpochOrder, config: PartitionConfig, data: st.DataObject
) -> None:
    plan = EpochPlan(order, 0)
    rank = data.draw(st.integers(0, config.world_size - 1))
    partition = RankPartition(plan, config, rank=rank, consumed=draw_consumed(data, order))
    windows = plan.windows(partition.batches(np.arange(partition.full_steps)))
    for window in np.unique(plan.windows(np.arange(order.num_batches))).tolist():
        steps = partition.steps_of_window(window)
        full = steps[steps < partition.full_steps].tolist()
        assert full == np.flatnonzero((windows == window).any(axis=1)).tolist()


@many
@given(order=orders(), config=splits(), num_workers=st.integers(1, 4), data=st.data())
def test_prefetched_samples_equal_planned_samples(
    order: EpochOrder, config: PartitionConfig, num_workers: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, config.world_size - 1))
    worker = data.draw(st.integers(0, num_workers - 1))
    partition = RankPartition(
        EpochPlan(order, 0), config, rank=rank, consumed=draw_consumed(data, order)
    )
    first = data.draw(st.integers(0, 5))
    steps = WorkerSteps(partition, worker, num_workers, first)
    wanted = [
        number
        for some in plan_steps(partition, steps)
        for numbers in some
        for number in numbers.tolist()
    ]
    groups = [numbers.tolist() for numbers in group_by_window(partition, steps)]
    assert sorted(number for group in groups for number in group) == sorted(wanted)
    first_needs = [min(map(wanted.index, group)) for group in groups]
    assert first_needs == sorted(first_needs)


@given(
    world_size=st.integers(1, 40),
    microbatches=st.integers(1, 8),
    num_workers=st.integers(1, 16),
    lanes=st.integers(1, 5000),
)
def test_even_lane_counts_are_the_nearest_multiples(
    world_size: int, microbatches: int, num_workers: int, lanes: int
) -> None:
    unit = world_size * microbatches * num_workers
    config = PartitionConfig(world_size=world_size, microbatches=microbatches)
    down, up = find_even_lane_counts(config, num_workers, lanes)
    assert down % unit == up % unit == 0
    assert lanes <= up < lanes + unit
    assert down == max(unit, lanes - lanes % unit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remainder": "wrap"}, "remainder is 'pad', 'drop' or 'keep', not 'wrap'"),
        ({"microbatches": 0}, "at least one microbatch, not 0"),
    ],
)
def test_invalid_partition_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PartitionConfig(**options)  # type: ignore[arg-type]


def test_partition_starts_at_a_microbatch_boundary() -> None:
    order = EpochOrder(nsamples=20, batch=4, shuffle=False, seed=0, lanes=1, window=4, block=1)
    with pytest.raises(
        OptionError, match="6 consumed samples are not a multiple of the microbatch, 4"
    ):
        RankPartition(EpochPlan(order, 0), PartitionConfig(), rank=0, consumed=6)
    assert RankPartition(EpochPlan(order, 0), PartitionConfig(), rank=0, consumed=20).num_steps == 0


def test_rank_outside_the_world_is_refused() -> None:
    order = EpochOrder(nsamples=20, batch=4, shuffle=False, seed=0, lanes=1, window=4, block=1)
    with pytest.raises(OptionError, match="rank 2 of world size 2"):
        RankPartition(EpochPlan(order, 0), PartitionConfig(world_size=2), rank=Placement(2, 3).rank)


@given(order=orders(), config=splits())
def test_partition_after_all_samples_is_empty(order: EpochOrder, config: PartitionConfig) -> None:
    for partition in partitions(EpochPlan(order, 0), config, consumed=order.nsamples):
        assert partition.num_steps == partition.num_samples == 0
        assert steps_of(partition) == []


@given(order=orders(), config=splits(drop_last=st.booleans()), data=st.data())
def test_short_step_has_the_samples_left_by_full_steps(
    order: EpochOrder, config: PartitionConfig, data: st.DataObject
) -> None:
    consumed = draw_consumed(data, order)
    for partition in partitions(EpochPlan(order, 0), config, consumed):
        left = (
            order.nsamples - consumed - partition.full_steps * config.batches_per_step * order.batch
        )
        is_left_out = config.drop_last or config.remainder == "drop"
        assert partition.short_step_samples == (0 if is_left_out else left)


@pytest.mark.parametrize("remainder", ["pad", "drop", "keep"])
def test_partition_at_the_end_of_an_epoch_has_consumed_all(remainder: Remainder) -> None:
    order = EpochOrder(nsamples=13, batch=4, shuffle=True, seed=0, lanes=1, window=4, block=1)
    for partition in partitions(
        EpochPlan(order, 0), PartitionConfig(world_size=2, remainder=remainder), consumed=13
    ):
        assert (partition.num_steps, partition.consumed_after(0)) == (0, 13)
        assert partition.tail().tolist() == []


def test_default_partition_is_for_one_rank() -> None:
    assert PartitionConfig() == PartitionConfig(
        world_size=1, microbatches=1, remainder="pad", drop_last=False, whole_lanes=False
    )


@given(order=orders(), config=splits(drop_last=st.booleans()), data=st.data())
def test_every_rank_knows_the_steps_of_the_rank_that_has_the_most(
    order: EpochOrder, config: PartitionConfig, data: st.DataObject
) -> None:
    ranks = partitions(EpochPlan(order, 0), config, draw_consumed(data, order))
    most = max(partition.num_steps for partition in ranks)
    assert {partition.max_steps for partition in ranks} == {most}


MANY_LANES = EpochOrder(nsamples=9000, batch=3, shuffle=True, seed=0, lanes=64, window=30, block=2)


@pytest.mark.parametrize(
    ("order", "config"),
    [
        (MANY_LANES, PartitionConfig()),
        (replace(MANY_LANES, shuffle=False), PartitionConfig(whole_lanes=True)),
        (MANY_LANES, PartitionConfig(whole_lanes=True, world_size=3, microbatches=32)),
    ],
    ids=["parts of lanes", "in order", "fewer lanes than workers"],
)
def test_workers_take_turns_at_steps_unless_they_take_whole_lanes(
    order: EpochOrder, config: PartitionConfig
) -> None:
    partition = RankPartition(EpochPlan(order, 0), config, rank=0)
    for worker in range(24):
        steps = WorkerSteps(partition, worker, 24)
        assert [*steps] == [*range(worker, partition.num_steps, 24)]


@pytest.mark.parametrize(
    ("world_size", "microbatches", "num_workers", "cycle"),
    [(2, 1, 11, 32), (1, 2, 11, 32), (6, 4, 3, 8)],
)
def test_workers_take_whole_lanes_of_their_rank(
    world_size: int, microbatches: int, num_workers: int, cycle: int
) -> None:
    config = PartitionConfig(world_size=world_size, microbatches=microbatches, whole_lanes=True)
    partition = RankPartition(EpochPlan(MANY_LANES, 0), config, rank=0)
    for worker in range(num_workers):
        steps = WorkerSteps(partition, worker, num_workers)
        lanes = [frozenset(row.tolist()) for row in partition.batches(steps[: steps.num_full]) % 64]
        assert len({*lanes}) == len(range(worker, cycle, num_workers))
    everything = chain(*(WorkerSteps(partition, n, num_workers) for n in range(num_workers)))
    assert sorted(everything) == [*range(partition.num_steps)]


@pytest.mark.parametrize(
    ("lanes", "whole_lanes", "num_workers", "effect"),
    [
        (64, True, 11, "some workers read one lane more than others"),
        (64, False, 11, "workers read parts of the same windows"),
        (63, True, 11, "workers read parts of the same windows"),
        (64, True, 40, "workers read parts of the same windows"),
    ],
)
def test_effect_of_uneven_lanes_is_named(
    lanes: int, whole_lanes: bool, num_workers: int, effect: str
) -> None:
    config = PartitionConfig(world_size=2, whole_lanes=whole_lanes)
    assert uneven_effect(replace(MANY_LANES, lanes=lanes), config, num_workers) == effect
