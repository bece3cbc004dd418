"""Test the draw of samples by weight, and its plan."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.errors import OptionError
from shardstream.order import EpochOrder, WeightedDraw, WeightedEpochPlan, draw_by_weight

weights_lists = st.lists(
    st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-6, 1e6)), min_size=1, max_size=60
).filter(any)
PRECISION = 1e-6  # expected copies are whole numbers of 2**-32


def drawn(
    weights: list[float] | np.ndarray, num_samples: int | None = None, *, replacement: bool = True
) -> WeightedDraw:
    return draw_by_weight(
        np.asarray(weights, dtype=np.float64), num_samples=num_samples, replacement=replacement
    )


def order_of(nsamples: int, *, batch: int = 4, shuffle: bool = True, block: int = 3) -> EpochOrder:
    return EpochOrder(
        nsamples=nsamples,
        batch=batch,
        shuffle=shuffle,
        seed=5,
        lanes=2,
        window=4 * batch,
        block=block,
    )


def copies_of(draw: WeightedDraw, epoch: int, *, shuffle: bool = True) -> np.ndarray:
    """Return how often each sample comes in an epoch."""
    plan = WeightedEpochPlan(order_of(draw.num_samples, shuffle=shuffle), epoch, draw)
    return np.bincount(plan.rest(0) % len(draw.copies), minlength=len(draw.copies))


@given(
    weights=weights_lists,
    num_samples=st.integers(1, 300),
    epoch=st.integers(0, 1 << 40),
    shuffle=st.booleans(),
)
def test_copies_are_the_expected_ones_rounded_and_their_total_is_exact(
    weights: list[float], num_samples: int, epoch: int, shuffle: bool
) -> None:
    draw = drawn(weights, num_samples)
    copies = copies_of(draw, epoch, shuffle=shuffle)
    assert draw.copies.sum() == num_samples << 32
    expected = np.array(weights) / sum(weights) * num_samples
    assert copies.sum() == num_samples
    assert (copies >= np.floor(expected - PRECISION)).all()
    assert (copies <= np.ceil(expected + PRECISION)).all()
    assert not copies[np.array(weights) == 0].any()


@given(weights=weights_lists, epoch=st.integers(0, 1 << 40), data=st.data())
def test_without_replacement_each_sample_comes_at_most_once(
    weights: list[float], epoch: int, data: st.DataObject
) -> None:
    num_samples = data.draw(st.integers(1, sum(map(bool, weights))))
    draw = drawn(weights, num_samples, replacement=False)
    copies = copies_of(draw, epoch)
    assert copies.sum() == num_samples
    assert copies.max() == 1 == draw.max_copies
    assert not copies[np.array(weights) == 0].any()


@pytest.mark.slow
@pytest.mark.parametrize("replacement", [True, False])
def test_mean_copies_are_the_exact_shares(replacement: bool) -> None:
    weights = np.array([0, 1, 1, 2, 4, 0.5, 40, 3, 3, 1])
    draw = drawn(weights, 5, replacement=replacement)
    mean = np.mean([copies_of(draw, epoch) for epoch in range(4000)], axis=0)
    expected = 5 * weights / weights.sum()
    if not replacement:  # the two heaviest are certain, the others share the three that are left
        expected = np.where(weights >= 4, 1, 3 * weights / (weights.sum() - 44))
    assert abs(draw.copies / 2**32 - expected).max() < PRECISION
    assert abs(mean - expected).max() < 0.04


def test_pairs_of_neighbours_are_drawn_independently() -> None:
    copies = np.array([copies_of(drawn(np.ones(200), 100), epoch) for epoch in range(400)])
    both = (copies[:, :-1] & copies[:, 1:]).mean()
    assert both == pytest.approx(0.25, abs=0.02)  # 0 if every second one were drawn


def test_equal_weights_draw_every_sample_once() -> None:
    for weight in (1.0, 0.1, 1e-300, 1e300):
        assert copies_of(drawn(np.full(1000, weight)), 7).tolist() == [1] * 1000


@given(
    weights=weights_lists,
    repeats=st.integers(1, 5),
    epoch=st.integers(0, 1000),
    shuffle=st.booleans(),
)
def test_plan_has_the_drawn_copies_under_numbers_of_their_own(
    weights: list[float], repeats: int, epoch: int, shuffle: bool
) -> None:
    draw, count = drawn(weights * repeats, 101), len(weights) * repeats
    order = order_of(101, shuffle=shuffle)
    plan = WeightedEpochPlan(order, epoch, draw)
    everything = plan.rest(0)
    batches = plan.batches(np.arange(order.num_batches))
    assert batches.ravel().tolist() == everything[: batches.size].tolist()
    assert np.unique(everything).size == 101
    found = plan.find(np.arange(count))
    assert batches[found.batches, found.slots].tolist() == found.numbers.tolist()
    assert found.numbers.size == batches.size
    assert everything.max() < count * plan.passes
    copies = np.bincount(everything % count, minlength=count)
    # copy c of a sample comes only with all copies before it
    assert sorted(everything.tolist()) == sorted(
        sample + copy * count for sample in range(count) for copy in range(copies[sample])
    )
    again = WeightedEpochPlan(order_of(101, batch=1, shuffle=shuffle, block=7), epoch, draw)
    assert sorted(again.rest(0).tolist()) == sorted(everything.tolist())
    if not shuffle:
        assert (np.diff(everything % count) >= 0).all()


def test_each_epoch_draws_anew() -> None:
    draw = drawn(np.ones(1000), 500)
    sets = [set(WeightedEpochPlan(order_of(500), epoch, draw).rest(0)) for epoch in range(3)]
    assert 150 < len(sets[0] & sets[1]) < 350
    assert sets[1] != sets[2]


def test_order_of_a_draw_is_pinned() -> None:
    draw = drawn([1, 2, 3, 0, 2], 12)
    assert draw.fingerprint == "1132f40c96c86e72"
    plan = WeightedEpochPlan(order_of(12), 0, draw)
    assert plan.rest(0).tolist() == [2, 7, 1, 14, 22, 12, 0, 17, 4, 11, 9, 6]
    digests = []
    for weights in (
        np.arange(300) % 50,
        np.array([1] * 299 + [100]),
    ):  # in several groups and layers
        found = WeightedEpochPlan(order_of(900), 7, drawn(weights, 900)).rest(0)
        digests.append(hashlib.sha256(found.astype("<i8").tobytes()).hexdigest()[:16])
    assert digests == ["aca151b2f6137617", "5968cd2931bb0ad7"]


def test_copies_of_a_sample_are_spread_over_the_epoch() -> None:
    weights = np.ones(10_000)
    weights[::100] = 99  # a hundredth of the samples is half of the epoch: 50 copies of each
    order = EpochOrder(
        nsamples=10_000, batch=64, shuffle=True, seed=0, lanes=1, window=640, block=20
    )
    numbers = WeightedEpochPlan(order, 0, drawn(weights)).batches(np.arange(156)) % 10_000
    rare = numbers % 100 == 0
    # Of 32 rare places in a batch on 100 samples: 27.5 different ones if drawn at random.
    different = np.mean(
        [len(set(row[is_rare])) for row, is_rare in zip(numbers, rare, strict=True)]
    )
    assert different > 25
    assert rare.mean(axis=1).std() < 0.08  # 0.0625 if drawn at random


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ([1, -1.5, -2], {}, r"has -1\.5 for sample 1, and 2 such weights in all"),
        ([1, 2, float("nan")], {}, "has nan for sample 2, and 1 such weight in all"),
        ([float("inf")], {}, "has inf for sample 0"),
        ([0, 0], {}, "are 0 for all 2 samples"),
        ([1, 1], {"num_samples": 0}, "num_samples must be from 1 to 2147483646, not 0"),
        ([1, 1], {"num_samples": 1 << 31}, "must be from 1 to 2147483646, not 2147483648"),
        ([1, 1], {"replacement": False}, "replacement=False needs num_samples="),
        (
            [1, 0, 1],
            {"replacement": False, "num_samples": 3},
            "num_samples=3 with replacement=False, but only 2 samples of 3 have a weight above 0; choose at most 2",
        ),
    ],
)
def test_impossible_weights_are_refused(
    weights: list[float], options: dict[str, int], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        draw_by_weight(
            np.array(weights, dtype=np.float64),
            **({"num_samples": None, "replacement": True} | options),  # type: ignore[arg-type]
        )
