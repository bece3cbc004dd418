"""Test the limit of requests in flight, with a simulated clock."""

from __future__ import annotations

import math
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstream.storage import AdaptiveLimit, Slot, share_requests


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def window(concurrency: AdaptiveLimit, clock: Clock, rate: float, *, crowded: bool = True) -> int:
    """Record one window of responses at a rate in bytes per second; return the limit after it."""
    concurrency._is_saturated = crowded  # set by a request that waits for a slot
    count = concurrency.limit
    for _ in range(count):
        clock.now += 0.2 / count
        concurrency.record_response(int(rate * 0.2 / count), 0.1)
    return concurrency.limit


def test_limit_grows_while_the_rate_grows(clock: Clock) -> None:
    concurrency = AdaptiveLimit(8, 32, clock)
    limits = [
        window(concurrency, clock, rate) for rate in (8e6, 10e6, 12e6, 15e6, 19e6, 24e6, 30e6, 38e6)
    ]
    assert limits == [10, 12, 15, 18, 22, 27, 32, 32]


def test_increase_without_gain_is_reverted_and_retried_later(clock: Clock) -> None:
    concurrency = AdaptiveLimit(8, 32, clock)
    assert [window(concurrency, clock, rate) for rate in (8e6, 8e6)] == [10, 8]
    assert [window(concurrency, clock, 8e6) for _ in range(16)] == [8] * 16
    assert window(concurrency, clock, 8e6) == 10


def test_limit_is_constant_if_the_consumer_is_slow(clock: Clock) -> None:
    concurrency = AdaptiveLimit(8, 32, clock)
    assert [window(concurrency, clock, rate, crowded=False) for rate in (1e6, 9e6, 80e6)] == [
        8,
        8,
        8,
    ]


def test_few_responses_or_a_short_time_do_not_change_the_limit(clock: Clock) -> None:
    concurrency = AdaptiveLimit(8, 32, clock)
    concurrency._is_saturated = True
    for _ in range(100):  # in no time
        concurrency.record_response(1 << 20, 0.001)
    assert concurrency.limit == 8
    clock.now += 10
    concurrency = AdaptiveLimit(8, 32, clock)
    concurrency._is_saturated = True
    for _ in range(7):  # fewer than slots
        clock.now += 1
        concurrency.record_response(1 << 20, 0.001)
    assert concurrency.limit == 8


def test_throttling_halves_the_limit_at_most_once_per_second(clock: Clock) -> None:
    concurrency = AdaptiveLimit(32, 32, clock)
    limits = []
    for passed_s in (0.0, 0.1, 0.5, 0.5, 0.2, 1.0, 1.0, 1.0, 1.0):
        clock.now += passed_s
        concurrency.record_throttling()
        limits.append(concurrency.limit)
    assert limits == [16, 16, 16, 8, 8, 4, 2, 1, 1]
    assert concurrency.num_throttled == 9


def test_limit_stays_after_throttling_before_it_grows(clock: Clock) -> None:
    concurrency = AdaptiveLimit(16, 32, clock)
    concurrency.record_throttling()
    assert [window(concurrency, clock, 9e6) for _ in range(16)] == [8] * 16
    assert window(concurrency, clock, 9e6) == 10


@given(
    st.integers(1, 32),
    st.integers(0, 31),
    st.lists(
        st.one_of(
            st.tuples(st.just("arrived"), st.integers(0, 1 << 30)),
            st.tuples(st.just("throttled"), st.just(0)),
            st.tuples(st.just("window"), st.integers(1, 1 << 34)),
        ),
        max_size=60,
    ),
    st.floats(0, 3),
)
def test_limit_stays_between_one_and_the_maximum(
    most: int, below: int, events: list[tuple[str, int]], step_s: float
) -> None:
    clock = Clock()
    concurrency = AdaptiveLimit(max(1, most - below), most, clock)
    for what, amount in events:
        clock.now += step_s
        if what == "arrived":
            concurrency.record_response(amount, step_s)
        elif what == "throttled":
            concurrency.record_throttling()
        else:
            window(concurrency, clock, amount)
        assert 1 <= concurrency.limit <= most


def test_hedge_delay_follows_the_median_latency(clock: Clock) -> None:
    concurrency = AdaptiveLimit(8, 32, clock)
    assert concurrency.hedge_after_s == 2.0  # no latency is known while connections are made
    for seconds in (0.1, 0.1, 0.1, 3.0, 3.0):  # a few stalls do not change the median
        concurrency.record_response(1000, seconds)
    assert concurrency.hedge_after_s == pytest.approx(0.3)
    for _ in range(32):
        concurrency.record_response(1000, 0.01)
    assert concurrency.hedge_after_s == 0.2


def test_no_hedging_while_the_server_throttles(clock: Clock) -> None:
    concurrency = AdaptiveLimit(8, 32, clock)
    concurrency.record_throttling()
    assert concurrency.hedge_after_s == math.inf
    clock.now += 0.9
    concurrency.record_throttling()  # too early for a second halving, but hedging stays off
    clock.now += 0.9
    assert concurrency.hedge_after_s == math.inf
    clock.now += 0.2
    assert concurrency.hedge_after_s == 2.0


class Holder:
    """A thread that takes a slot and keeps it until `let_go` is set."""

    def __init__(self, concurrency: AdaptiveLimit) -> None:
        self.has_slot, self.let_go = threading.Event(), threading.Event()
        self.slot: Slot | None = None
        self._thread = threading.Thread(target=self._hold, args=(concurrency,), daemon=True)
        self._thread.start()

    def _hold(self, concurrency: AdaptiveLimit) -> None:
        with concurrency.slot() as self.slot:
            self.has_slot.set()
            self.let_go.wait(300)

    def end(self) -> None:
        self.let_go.set()
        self._thread.join(300)


def with_slots(made: list[Holder], count: int) -> list[Holder]:
    """Wait until this number of holders have a slot; return them."""
    deadline = time.monotonic() + 300
    while sum(one.has_slot.is_set() for one in made) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    held = [one for one in made if one.has_slot.is_set()]
    assert len(held) == count
    return held


def test_released_slot_wakes_one_waiting_thread() -> None:
    concurrency = AdaptiveLimit(2, 8)
    made = [Holder(concurrency) for _ in range(4)]
    first = with_slots(made, 2)
    first[0].end()
    with_slots(made, 3)
    first[1].end()
    with_slots(made, 4)
    for one in made:
        one.end()
    assert concurrency._active == 0


def test_slots_are_granted_in_order_of_arrival(clock: Clock) -> None:
    concurrency = AdaptiveLimit(1, 8)
    made: list[Holder] = []
    for _ in range(5):  # in sequence
        made.append(Holder(concurrency))
        while len(concurrency._waiting) + concurrency._active < len(made):
            time.sleep(0.01)
    for number, one in enumerate(made):
        assert with_slots(made, number + 1) == made[: number + 1]
        one.end()


def test_added_slots_wake_waiting_threads(clock: Clock) -> None:
    concurrency = AdaptiveLimit(2, 8, clock)
    made = [Holder(concurrency) for _ in range(3)]
    with_slots(made, 2)
    window(concurrency, clock, 1e6)
    assert concurrency.limit == 3
    with_slots(made, 3)
    for one in made:
        one.end()


@given(
    st.lists(
        st.sampled_from(["record_throttling", "record_response", "record_activity"]), max_size=5
    ),
    st.integers(1, 3),
)
def test_close_wakes_all_waiting_threads(events: list[str], active: int) -> None:
    """Neither waiting nor later threads wait, even if responses arrive."""
    concurrency = AdaptiveLimit(1, 8)
    made = [Holder(concurrency) for _ in range(active)]
    with_slots(made, 1)
    concurrency.close()
    for event in events:
        concurrency.record_response(1, 0.1) if event == "record_response" else getattr(
            concurrency, event
        )()
    made += [Holder(concurrency) for _ in range(3)]
    with_slots(made, len(made))
    for one in made:
        one.end()
    assert concurrency._active == 0


def test_slot_released_before_the_end_of_its_request_counts_once() -> None:
    concurrency = AdaptiveLimit(1, 8)
    made = [Holder(concurrency), Holder(concurrency)]
    late = with_slots(made, 1)[0]
    assert late.slot is not None
    late.slot.release()
    late.slot.release()
    with_slots(made, 2)
    assert concurrency._active == 1
    for one in made:
        one.end()
    assert concurrency._active == 0


@pytest.mark.parametrize(
    ("num_workers", "cores", "expected"),
    [(1, 2, (24, 32)), (2, 2, (24, 32)), (8, 2, (6, 8)), (24, 2, (2, 3)), (24, 64, (24, 32))],
)
def test_workers_share_the_requests_of_a_machine(
    num_workers: int, cores: int, expected: tuple[int, int]
) -> None:
    assert share_requests(24, num_workers, cores) == expected


@pytest.mark.parametrize("num_workers", [1, 2, 5, 48, 1000])
def test_every_worker_has_requests(num_workers: int) -> None:
    initial, most = share_requests(24, num_workers, cores=1)
    assert 2 <= initial <= most <= 32
