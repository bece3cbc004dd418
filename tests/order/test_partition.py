from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardstream.distributed import Placement
from shardstream.errors import OptionError
from shardstream.order.epoch_plan import Order, Plan
from shardstream.order.partition import Remainder, Share, Split, fitting_lanes
from shardstream.pipeline.indexed_run import own_steps, planned, upcoming
from tests.order.test_epoch_plan import epochs, orders

many = settings(max_examples=120, deadline=None)
remainders: st.SearchStrategy[Remainder] = st.sampled_from(["pad", "drop", "keep"])


def splits(
    remainder: st.SearchStrategy[Remainder] = remainders,
    drop_last: st.SearchStrategy[bool] = st.just(False),  # noqa: B008  (a strategy is a value)
) -> st.SearchStrategy[Split]:
    return st.builds(
        Split,
        world_size=st.integers(1, 6),
        microbatches=st.integers(1, 4),
        remainder=remainder,
        drop_last=drop_last,
    )


def shares(plan: Plan, split: Split, consumed: int = 0) -> list[Share]:
    return [Share(plan, split, rank=rank, consumed=consumed) for rank in range(split.world_size)]


def steps_of(share: Share) -> list[list[int]]:
    """The samples of each step of a rank."""
    return [numbers.tolist() for numbers in share.samples(np.arange(share.num_steps))]


def in_turn(ranks: list[list[list[int]]]) -> list[int]:
    """What all ranks together see, step after step, rank after rank."""
    num_steps = max(map(len, ranks))
    return [
        number
        for step in range(num_steps)
        for rank in ranks
        if step < len(rank)
        for number in rank[step]
    ]


def draw_consumed(data: st.DataObject, order: Order) -> int:
    return data.draw(st.integers(0, order.num_batches), label="t0") * order.batch


@many
@given(order=orders(), split=splits(), epoch=epochs, data=st.data())
def test_all_ranks_together_see_each_sample_once(
    order: Order, split: Split, epoch: int, data: st.DataObject
) -> None:
    consumed = draw_consumed(data, order)
    plan = Plan(order, epoch)
    counts = Counter(in_turn([steps_of(share) for share in shares(plan, split, consumed)]))
    expected = set(plan.rest(consumed // order.batch).tolist())
    repeated, missing = counts.total() - len(counts), len(expected) - len(counts)
    assert set(counts) <= expected
    if split.remainder == "keep":
        assert (repeated, missing) == (0, 0)
    elif split.remainder == "pad":
        assert missing == 0
        assert repeated <= split.world_size - 1
        assert repeated == -len(expected) % split.world_size
    else:
        assert repeated == 0
        assert missing == len(expected) % split.world_size


@many
@given(order=orders(), split=splits(st.sampled_from(["pad", "drop"])), data=st.data())
def test_ranks_have_equal_steps_of_equal_size(
    order: Order, split: Split, data: st.DataObject
) -> None:
    ranks = shares(Plan(order, 0), split, draw_consumed(data, order))
    sizes = [[len(numbers) for numbers in steps_of(share)] for share in ranks]
    assert all(one == sizes[0] for one in sizes)
    assert all(0 < size <= split.microbatches * order.batch for size in sizes[0])
    assert len(sizes[0]) == ranks[0].num_steps
    assert {share.num_samples for share in ranks} == {sum(sizes[0])}
    for share in ranks:
        assert [share.step_size(step) for step in range(share.num_steps)] == sizes[0]


@given(order=orders(), split=splits(st.just("keep")))
def test_ranks_that_keep_all_differ_by_one_sample(order: Order, split: Split) -> None:
    ranks = shares(Plan(order, 0), split)
    for values in (
        [share.num_samples for share in ranks],
        [share.num_steps for share in ranks],
        [len(share.tail()) for share in ranks],
    ):
        assert max(values) - min(values) <= 1


@given(order=orders(), split=splits(drop_last=st.just(True)))
def test_without_a_last_step_all_steps_are_full(order: Order, split: Split) -> None:
    ranks = [steps_of(share) for share in shares(Plan(order, 0), split)]
    width = split.microbatches * order.batch
    assert all(len(numbers) == width for steps in ranks for numbers in steps)
    together = in_turn(ranks)
    assert len(together) == order.nsamples // (width * split.world_size) * width * split.world_size
    assert len(set(together)) == len(together)


@many
@given(order=orders(), split=splits(), epoch=epochs)
def test_the_sequence_is_the_same_on_every_topology(order: Order, split: Split, epoch: int) -> None:
    plan = Plan(order, epoch)
    together = in_turn([steps_of(share) for share in shares(plan, split)])
    one_rank = plan.rest(0).tolist()
    shown = min(len(together), order.nsamples)  # pad repeats behind, drop cuts
    assert together[:shown] == one_rank[:shown]
    assert order.nsamples - shown < split.world_size


@many
@given(order=orders(), before=splits(), after=splits(), epoch=epochs, data=st.data())
def test_the_rest_is_the_same_on_another_topology(
    order: Order, before: Split, after: Split, epoch: int, data: st.DataObject
) -> None:
    plan = Plan(order, epoch)
    first = shares(plan, before)
    steps = data.draw(st.integers(0, first[0].full_steps), label="steps")
    consumed = [share.consumed_after(steps) for share in first]
    seen = in_turn([steps_of(share)[:steps] for share in first])
    rest = in_turn([steps_of(share) for share in shares(plan, after, consumed[0])])
    together = seen + rest
    shown = min(len(together), order.nsamples)
    assert together[:shown] == plan.rest(0).tolist()[:shown]
    dropped_before = steps == first[0].num_steps and before.remainder == "drop"
    assert order.nsamples - shown < max(after.world_size, before.world_size * dropped_before)
    if steps < first[0].full_steps:
        assert set(consumed) == {len(seen)}


@given(order=orders(), split=splits(st.sampled_from(["pad", "drop"])), data=st.data())
def test_consumed_grows_by_whole_steps_up_to_all(
    order: Order, split: Split, data: st.DataObject
) -> None:
    share = Share(Plan(order, 0), split, rank=0, consumed=draw_consumed(data, order))
    consumed = [share.consumed_after(step) for step in range(share.num_steps + 1)]
    assert consumed == sorted(set(consumed)) or share.num_steps == 0
    assert consumed[-1] == order.nsamples
    width = split.batches_per_step * order.batch
    assert all(b - a == width for a, b in pairwise(consumed[:-1]))


def test_a_rank_without_a_last_step_leaves_the_others_theirs() -> None:
    order = Order(nsamples=9, batch=4, shuffle=False, seed=0, lanes=1, window=4, block=1)
    with_tail, without = shares(Plan(order, 0), Split(world_size=2, remainder="keep"))
    assert (with_tail.num_steps, without.num_steps) == (2, 1)
    assert with_tail.consumed_after(1) == without.consumed_after(1) == 8
    assert with_tail.consumed_after(2) == 9


@many
@given(order=orders(), split=splits(), num_workers=st.integers(1, 5), data=st.data())
def test_workers_part_the_steps_of_a_rank_in_turn(
    order: Order, split: Split, num_workers: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, split.world_size - 1))
    share = Share(Plan(order, 0), split, rank=rank, consumed=draw_consumed(data, order))
    workers = [own_steps(share, worker, num_workers) for worker in range(num_workers)]
    assert sorted(step for steps in workers for step in steps) == list(range(share.num_steps))
    everything = steps_of(share)
    for worker, steps in enumerate(workers):
        found = [numbers.tolist() for some in planned(share, steps) for numbers in some]
        assert found == everything[worker::num_workers]
        first = data.draw(st.integers(0, len(steps)))
        assert own_steps(share, worker, num_workers, first) == steps[first:]


@many
@given(order=orders(), split=splits(), data=st.data())
def test_steps_of_a_window_are_those_that_take_a_batch_of_it(
    order: Order, split: Split, data: st.DataObject
) -> None:
    plan = Plan(order, 0)
    rank = data.draw(st.integers(0, split.world_size - 1))
    share = Share(plan, split, rank=rank, consumed=draw_consumed(data, order))
    windows = plan.windows(share.batches(np.arange(share.full_steps)))
    for window in np.unique(plan.windows(np.arange(order.num_batches))).tolist():
        steps = share.steps_of_window(window)
        full = steps[steps < share.full_steps].tolist()
        assert full == np.flatnonzero((windows == window).any(axis=1)).tolist()


@many
@given(order=orders(), split=splits(), num_workers=st.integers(1, 4), data=st.data())
def test_what_is_fetched_ahead_is_what_is_planned(
    order: Order, split: Split, num_workers: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, split.world_size - 1))
    worker = data.draw(st.integers(0, num_workers - 1))
    share = Share(Plan(order, 0), split, rank=rank, consumed=draw_consumed(data, order))
    first = data.draw(st.integers(0, 5))
    steps = own_steps(share, worker, num_workers, first)
    wanted = [
        number for some in planned(share, steps) for numbers in some for number in numbers.tolist()
    ]
    groups = [numbers.tolist() for numbers in upcoming(share, steps)]
    assert sorted(number for group in groups for number in group) == sorted(wanted)
    first_needs = [min(map(wanted.index, group)) for group in groups]
    assert first_needs == sorted(first_needs)


@given(
    world_size=st.integers(1, 40),
    microbatches=st.integers(1, 8),
    num_workers=st.integers(1, 16),
    lanes=st.integers(1, 5000),
)
def test_fitting_lanes_are_the_next_multiples(
    world_size: int, microbatches: int, num_workers: int, lanes: int
) -> None:
    unit = world_size * microbatches * num_workers
    split = Split(world_size=world_size, microbatches=microbatches)
    down, up = fitting_lanes(split, num_workers, lanes)
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
def test_a_split_that_makes_no_sense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Split(**options)  # type: ignore[arg-type]


def test_a_share_begins_between_two_microbatches() -> None:
    order = Order(nsamples=20, batch=4, shuffle=False, seed=0, lanes=1, window=4, block=1)
    with pytest.raises(OptionError, match="6 samples are no whole number of microbatches of 4"):
        Share(Plan(order, 0), Split(), rank=0, consumed=6)
    assert Share(Plan(order, 0), Split(), rank=0, consumed=20).num_steps == 0


def test_a_rank_outside_the_world_has_no_share() -> None:
    order = Order(nsamples=20, batch=4, shuffle=False, seed=0, lanes=1, window=4, block=1)
    with pytest.raises(OptionError, match="rank 2 of world size 2"):
        Share(Plan(order, 0), Split(world_size=2), rank=Placement(2, 3).rank)


@given(order=orders(), split=splits())
def test_nothing_is_left_after_all_samples(order: Order, split: Split) -> None:
    for share in shares(Plan(order, 0), split, consumed=order.nsamples):
        assert share.num_steps == share.num_samples == 0
        assert steps_of(share) == []


@given(order=orders(), split=splits(drop_last=st.booleans()), data=st.data())
def test_the_short_step_has_what_full_steps_leave(
    order: Order, split: Split, data: st.DataObject
) -> None:
    consumed = draw_consumed(data, order)
    for share in shares(Plan(order, 0), split, consumed):
        left = order.nsamples - consumed - share.full_steps * split.batches_per_step * order.batch
        is_left_out = split.drop_last or split.remainder == "drop"
        assert share.short_step_samples == (0 if is_left_out else left)


@pytest.mark.parametrize("remainder", ["pad", "drop", "keep"])
def test_a_share_that_begins_at_the_end_of_an_epoch_has_consumed_all(remainder: Remainder) -> None:
    order = Order(nsamples=13, batch=4, shuffle=True, seed=0, lanes=1, window=4, block=1)
    for share in shares(Plan(order, 0), Split(world_size=2, remainder=remainder), consumed=13):
        assert (share.num_steps, share.consumed_after(0)) == (0, 13)
        assert share.tail().tolist() == []


def test_a_split_is_by_default_that_of_one_rank() -> None:
    assert Split() == Split(world_size=1, microbatches=1, remainder="pad", drop_last=False)
