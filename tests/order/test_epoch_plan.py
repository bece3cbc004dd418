from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.errors import OptionError
from shardstream.order import (
    CopyPlan,
    EpochOrder,
    EpochPlan,
    PartitionConfig,
    RankPartition,
    StoredBlocksPlan,
    WorkerSteps,
    default_block,
    default_window,
)
from shardstream.pipeline import group_by_window, plan_steps
from tests.limits import set_limits


@st.composite
def orders(draw: st.DrawFn, *, shuffle: bool | None = None, min_samples: int = 0) -> EpochOrder:
    batch = draw(st.integers(1, 9))
    return EpochOrder(
        nsamples=draw(st.integers(min_samples, 400)),
        batch=batch,
        shuffle=draw(st.booleans()) if shuffle is None else shuffle,
        seed=draw(st.integers(0, 1 << 40)),
        lanes=draw(st.integers(1, 12)),
        window=batch * draw(st.integers(1, 6)),
        block=draw(st.integers(1, 40)),
    )


epochs = st.integers(0, 1000)


def order_of(nsamples: int = 100, *, batch: int = 4, seed: int = 0) -> EpochOrder:
    return EpochOrder(
        nsamples=nsamples, batch=batch, shuffle=True, seed=seed, lanes=2, window=4 * batch, block=5
    )


@given(order=orders(), epoch=epochs)
def test_epoch_has_each_sample_once(order: EpochOrder, epoch: int) -> None:
    plan = EpochPlan(order, epoch)
    everything = plan.rest(0)
    assert sorted(everything.tolist()) == list(range(order.nsamples))
    batches = plan.batches(np.arange(order.num_batches))
    assert batches.shape == (order.num_batches, order.batch)
    assert batches.ravel().tolist() == everything[: batches.size].tolist()
    found = plan.find(np.arange(order.nsamples))
    assert batches[found.batches, found.slots].tolist() == found.numbers.tolist()
    assert len(found.numbers) == batches.size


@given(order=orders(min_samples=20), epoch=epochs, data=st.data())
def test_order_does_not_depend_on_the_cached_block_order(
    order: EpochOrder, epoch: int, data: st.DataObject
) -> None:
    numbers = np.array(
        data.draw(st.lists(st.integers(0, order.num_batches - 1), min_size=1, max_size=8))
    )
    kept = EpochPlan(order, epoch)
    everything, some = kept.rest(0), kept.batches(numbers)
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, EpochPlan, FEW_BLOCKS=0)
        computed = EpochPlan(order, epoch)
        assert computed.rest(0).tolist() == everything.tolist()
        assert computed.batches(numbers).tolist() == some.tolist()


@given(order=orders(min_samples=20), epoch=epochs, data=st.data())
def test_batches_do_not_depend_on_the_request(
    order: EpochOrder, epoch: int, data: st.DataObject
) -> None:
    numbers = data.draw(st.lists(st.integers(0, order.num_batches - 1), min_size=1, max_size=8))
    everything = EpochPlan(order, epoch).batches(np.arange(order.num_batches))
    some = EpochPlan(order, epoch).batches(np.array(numbers))
    assert some.tolist() == everything[numbers].tolist()


@given(order=orders(), epoch=epochs)
def test_windows_partition_the_batches(order: EpochOrder, epoch: int) -> None:
    plan = EpochPlan(order, epoch)
    numbers = np.arange(order.num_batches)
    windows = plan.windows(numbers)
    for window in np.unique(windows).tolist():
        members = plan.batches_of_window(window).tolist()
        assert members == numbers[windows == window].tolist()
        assert len(members) * order.batch <= order.window


@given(order=orders(shuffle=False), epoch=epochs)
def test_without_shuffle_samples_have_stored_order(order: EpochOrder, epoch: int) -> None:
    assert EpochPlan(order, epoch).rest(0).tolist() == list(range(order.nsamples))


def test_copies_have_the_order_of_the_samples() -> None:
    samples, copies = EpochPlan(order_of(103), 5), CopyPlan(order_of(103), 5, copy=2)
    assert copies.rest(3).tolist() == (samples.rest(3) + 206).tolist()
    assert copies.batches(np.arange(9)).tolist() == (samples.batches(np.arange(9)) + 206).tolist()
    assert copies.passes == 3


@given(order=orders(shuffle=True, min_samples=20), epoch=epochs, data=st.data())
def test_stored_blocks_stay_together_until_a_window_shuffles_them(
    order: EpochOrder, epoch: int, data: st.DataObject
) -> None:
    cuts = data.draw(st.sets(st.integers(1, order.nsamples - 1)))
    firsts = np.array([0, *sorted(cuts), order.nsamples])
    plan = StoredBlocksPlan(order, epoch, firsts=firsts)
    everything = plan.rest(0)
    assert sorted(everything.tolist()) == list(range(order.nsamples))
    full = np.arange(order.num_batches)
    found = plan.find(everything[: order.num_batches * order.batch])
    assert plan.batches(full)[found.batches, found.slots].tolist() == found.numbers.tolist()
    single = replace(order, batch=1, window=1, lanes=1)  # windows shuffle nothing
    sequence = StoredBlocksPlan(single, epoch, firsts=firsts).rest(0)
    starts = sequence[np.flatnonzero(np.diff(sequence, prepend=-2) != 1)]
    assert {*starts.tolist()} <= {*firsts[:-1].tolist()}


def test_order_of_seed_0_is_pinned() -> None:
    order = EpochOrder(nsamples=23, batch=3, shuffle=True, seed=0, lanes=2, window=6, block=4)
    epochs_ = [EpochPlan(order, epoch).rest(0).tolist() for epoch in (0, 1)]
    assert epochs_[0] == [
        *(1, 2, 20, 6, 10, 9, 21, 0, 3, 8, 7, 5),
        *(22, 17, 4, 12, 11, 13, 18, 16, 19, 14, 15),
    ]
    assert epochs_[1] == [
        *(13, 3, 12, 9, 17, 8, 0, 2, 1, 18, 16, 19),
        *(6, 15, 5, 20, 11, 10, 4, 14, 7, 21, 22),
    ]
    assert EpochPlan(order, 0).passes == 1  # a mix gives repeated samples new numbers


@pytest.mark.parametrize(("seed", "epoch"), [(0, 1), (1, 0), (-1, 0), (1 << 63, 0), (0, 1 << 40)])
def test_seeds_and_epochs_have_different_orders(seed: int, epoch: int) -> None:
    first = EpochPlan(order_of(), 0).rest(0).tolist()
    assert EpochPlan(order_of(seed=seed), epoch).rest(0).tolist() != first


def test_samples_left_out_of_full_batches_differ_from_epoch_to_epoch() -> None:
    order = order_of(103)
    tails = {tuple(sorted(EpochPlan(order, epoch).rest(25).tolist())) for epoch in range(50)}
    assert len(tails) > 10
    assert any(100 not in tail for tail in tails)  # not always samples of the short block


@pytest.mark.parametrize("shuffle", [True, False])
def test_plan_of_ten_billion_samples_uses_constant_memory(*, shuffle: bool) -> None:
    order = EpochOrder(
        nsamples=10**10 + 7, batch=64, shuffle=shuffle, seed=0, lanes=512, window=16_384, block=20
    )
    tracemalloc.start()
    partition = RankPartition(
        EpochPlan(order, 0), PartitionConfig(world_size=64), rank=5, consumed=order.batch * 10**8
    )
    firsts = (0, 10_000, len(WorkerSteps(partition, 1, 8)) - 1)
    parts = [WorkerSteps(partition, 1, 8, first) for first in firsts]
    some = np.concatenate([next(plan_steps(partition, steps))[0] for steps in parts])
    steps = parts[0]
    ahead = next(iter(group_by_window(partition, steps)))
    tail = partition.tail()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10e6
    assert 0 <= some.min() <= some.max() < order.nsamples
    assert some[:64].tolist() == ahead[:64].tolist()
    assert len(tail) == partition.num_samples - partition.full_steps * 64
    assert partition.num_steps == -(-(order.nsamples - order.batch * 10**8) // (64 * 64))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": 0, "window": 1}, "batch must be at least 1, not 0"),
        ({"lanes": 0}, "lanes must be at least 1"),
        ({"window": 0}, "window must be at least 1"),
        ({"block": -1}, "block must be at least 1, not -1"),
        ({"nsamples": -1}, "nsamples must be at least 0"),
        ({"window": 10}, "window=10 must be a multiple of the microbatch, 4; use 12"),
    ],
)
def test_invalid_order_is_refused(changed: dict[str, int], message: str) -> None:
    options = {"nsamples": 9, "batch": 4, "seed": 0, "lanes": 1, "window": 8, "block": 1}
    with pytest.raises(OptionError, match=message):
        EpochOrder(shuffle=True, **(options | changed))


@pytest.mark.parametrize(
    ("nsamples", "total_bytes", "block"),
    [
        (0, 0, 1),
        (5, 0, 1),
        (0, 5, 1),
        (1797, 2_000_000, 14),
        (1_000_000, 100_000_000_000, 20),
        (1000, 10**12, 1),
        (128, 1, 1),
        (10_000, 1, 78),
    ],
)
def test_default_blocks_are_pinned(nsamples: int, total_bytes: int, block: int) -> None:
    assert default_block(nsamples, total_bytes) == block


@given(
    nsamples=st.integers(0, 10**11),
    total_bytes=st.integers(0, 10**16),
    batch=st.integers(1, 5000),
)
def test_default_windows_are_whole_batches(nsamples: int, total_bytes: int, batch: int) -> None:
    window = default_window(nsamples, total_bytes, batch)
    assert window % batch == 0
    assert batch <= window <= max(16_384, batch)


@pytest.mark.parametrize(
    ("nsamples", "total_bytes", "batch", "window"),
    [
        (1_000_000, 100_000_000_000, 64, 640),
        (1797, 2_000_000, 64, 16_384),
        (50_000_000, 5_000_000_000, 32, 16_384),
        (1000, 10_000_000_000, 8, 8),
        (100, 0, 7, 16_380),
        (1000, 1000 << 20, 1, 64),
    ],
)
def test_default_windows_are_pinned(
    nsamples: int, total_bytes: int, batch: int, window: int
) -> None:
    """Defaults are part of the order: changing one would change the order of every dataset."""
    assert default_window(nsamples, total_bytes, batch) == window
