"""Test plans whose batches cost the same at each step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.errors import OptionError
from shardstream.order import (
    BalancedEpochPlan,
    EpochOrder,
    EpochPlan,
    Ints,
    PartitionConfig,
    RankPartition,
    StepBalance,
    WorkerSteps,
)
from shardstream.pipeline import group_by_window, plan_steps
from tests.pairs import with_slow_rest
from tests.servers import in_ci

many = settings(max_examples=300 if in_ci() else 50, deadline=None)


@st.composite
def plans(draw: st.DrawFn) -> tuple[EpochPlan, StepBalance]:
    batch, lanes = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    order = EpochOrder(
        nsamples=draw(st.integers(0, 400)),
        batch=batch,
        shuffle=True,
        seed=draw(st.integers(0, 1 << 40)),
        lanes=lanes,
        window=batch * draw(st.integers(1, 6)),
        block=draw(st.integers(1, 40)),
    )
    costs = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3.5, 100, 1e30]), min_size=1, max_size=30))
    balance = StepBalance(
        costs=np.array(costs, dtype=np.float32),
        steps=draw(st.sampled_from([1, 2, 5, 64, 10**9])),
        group_size=draw(st.sampled_from([None, 1, lanes, max(1, lanes // 2)])),
        padded=draw(st.booleans()),
    )
    return EpochPlan(order, draw(st.integers(0, 1000))), balance


@pytest.mark.slow
@many
@given(plans())
def test_the_samples_of_each_stretch_stay_the_same(made: tuple[EpochPlan, StepBalance]) -> None:
    plan, balance = made
    balanced, order = BalancedEpochPlan(plan, balance), plan.order
    numbers = np.arange(order.num_batches)
    before, after = plan.batches(numbers), balanced.batches(numbers)
    assert after.shape == before.shape
    for first in range(0, order.num_batches, min(balance.steps, 10**6) * order.lanes):
        some = slice(first, first + balance.steps * order.lanes)
        assert sorted(after[some].ravel().tolist()) == sorted(before[some].ravel().tolist())
    everything = balanced.rest(0).tolist()
    assert everything[: after.size] == after.ravel().tolist()
    assert everything[after.size :] == plan.rest(order.num_batches).tolist()


@pytest.mark.slow
@many
@given(plans(), st.data())
def test_batches_do_not_depend_on_the_request(
    made: tuple[EpochPlan, StepBalance], data: st.DataObject
) -> None:
    balanced = BalancedEpochPlan(*made)
    count = balanced.order.num_batches
    everything = balanced.batches(np.arange(count))
    numbers = data.draw(st.lists(st.integers(0, count - 1), max_size=8)) if count else []
    wanted = np.array(numbers, dtype=np.int64)
    assert BalancedEpochPlan(*made).batches(wanted).tolist() == everything[wanted].tolist()
    windows = balanced.windows(np.arange(count))
    for window in np.unique(windows).tolist():
        members = balanced.batches_of_window(window).tolist()
        assert members == np.flatnonzero(windows == window).tolist()


@pytest.mark.slow
@many
@given(plans(), st.integers(1, 8), st.integers(1, 3), st.integers(1, 4), st.data())
def test_prefetched_samples_equal_planned_samples(
    made: tuple[EpochPlan, StepBalance],
    ranks: int,
    microbatches: int,
    workers: int,
    data: st.DataObject,
) -> None:
    balanced = BalancedEpochPlan(*made)
    config = PartitionConfig(world_size=ranks, microbatches=microbatches)
    taken = data.draw(st.integers(0, balanced.order.num_batches)) * balanced.order.batch
    rank, worker = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, workers - 1))
    partition = RankPartition(balanced, config, rank=rank, consumed=taken)
    steps = WorkerSteps(partition, worker, workers, data.draw(st.integers(0, 5)))
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


def lognormal_costs(sigma: float) -> Ints:
    lengths = np.random.default_rng(0).lognormal(6.5, sigma, 100_000).clip(16, 32768)
    costs: Ints = (lengths + lengths**2 / 8192).astype(np.int64)
    return costs


def busy_share(plan: EpochPlan, costs: Ints, ranks: int, *, padded: bool = False) -> float:
    """Return the mean over steps of mean cost / largest cost over the ranks."""
    batches = costs[plan.batches(np.arange(plan.order.num_batches // ranks * ranks))]
    of_rank = (batches.max(axis=1) if padded else batches.sum(axis=1)).reshape(-1, ranks)
    return float((of_rank.mean(axis=1) / of_rank.max(axis=1)).mean())


@pytest.mark.parametrize("sigma", with_slow_rest([1.4], [0.6, 1.0, 1.4]))
@pytest.mark.parametrize(("ranks", "batch", "least"), [(8, 8, 0.97), (64, 8, 0.96), (64, 1, 0.92)])
def test_ranks_work_equally_long_at_each_step(
    sigma: float, ranks: int, batch: int, least: float
) -> None:
    costs = lognormal_costs(sigma)
    plan = EpochPlan(order_of(lanes=ranks, batch=batch), 0)
    before = busy_share(plan, costs, ranks)
    balanced = BalancedEpochPlan(plan, balance_of(costs))
    assert busy_share(balanced, costs, ranks) > least > before + 0.2
    assert busy_share(balanced, costs, ranks // 2) > least  # any number that divides the lanes


def test_padded_batches_have_samples_of_similar_cost() -> None:
    costs = lognormal_costs(1.0)
    plan = EpochPlan(order_of(lanes=8, batch=8), 0)
    summed = BalancedEpochPlan(plan, balance_of(costs))
    padded = BalancedEpochPlan(plan, balance_of(costs, padded=True))
    shares = [busy_share(one, costs, 8, padded=True) for one in (plan, summed, padded)]
    assert shares[2] > 0.95 > shares[1] > shares[0]
    used = [
        batches.sum() / batches.max(axis=1).sum() / 8
        for one in (plan, padded)
        for batches in [costs[one.batches(np.arange(one.order.num_batches))]]
    ]
    assert used[1] > 0.9  # the rest is padding
    assert used[0] < 0.5


def test_batches_keep_a_mix_of_large_and_small_samples() -> None:
    costs = lognormal_costs(0.6)
    plan = EpochPlan(order_of(lanes=8, batch=8), 0)
    balanced = BalancedEpochPlan(plan, balance_of(costs))
    octiles = np.searchsorted(np.quantile(costs, np.arange(1, 8) / 8), costs)
    kinds = [
        np.mean([len(np.unique(batch)) for batch in octiles[one.batches(np.arange(10_000))]])
        for one in (plan, balanced)
    ]
    assert kinds[1] > kinds[0]


def test_only_batches_of_one_group_of_ranks_are_equal() -> None:
    costs = lognormal_costs(1.0)
    plan = EpochPlan(order_of(lanes=64, batch=1), 0)
    balanced = BalancedEpochPlan(plan, balance_of(costs, group_size=8))
    assert busy_share(balanced, costs, 8) > 0.98
    assert busy_share(balanced, costs, 64) < 0.5
    with pytest.raises(OptionError, match="group_size=7 needs lanes"):
        BalancedEpochPlan(plan, balance_of(costs, group_size=7))


def test_order_of_seed_0_is_pinned() -> None:
    order = EpochOrder(nsamples=23, batch=2, shuffle=True, seed=0, lanes=2, window=4, block=4)
    balance = StepBalance(
        costs=(np.arange(23) % 7).astype(np.float32), steps=3, group_size=None, padded=False
    )
    assert BalancedEpochPlan(EpochPlan(order, 0), balance).rest(0).tolist() == [
        *(8, 16, 3, 21, 5, 7, 0, 6, 2, 9, 1, 10),
        *(12, 17, 11, 19, 20, 14, 22, 13, 18, 4, 15),
    ]


def order_of(*, lanes: int, batch: int) -> EpochOrder:
    return EpochOrder(
        nsamples=100_000, batch=batch, shuffle=True, seed=0, lanes=lanes, window=1024, block=20
    )


def balance_of(costs: Ints, *, group_size: int | None = None, padded: bool = False) -> StepBalance:
    return StepBalance(
        costs=costs.astype(np.float32), steps=64, group_size=group_size, padded=padded
    )
