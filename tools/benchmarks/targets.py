"""Targets of rows, and whether results meet them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.case import Result

OURS = "shardstream"
Metric = Literal["samples/s", "members/s", "seconds"]
Results = Mapping[str, Sequence[Result]]
"""Valid results of each contestant."""
_NEAR = 0.8  # of the best speed; slower peers will not become the best in more repetitions
_SAFE = 1.3  # times the target: met regardless of more repetitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure that shardstream should reach.

    Args:
        text: Description.
        wanted: Minimum or, with ``at_most``, maximum.
        reached: Function from results to the figure; None if unknown.
        at_most: Whether less is better.
        names: Peers or limit of the comparison; none for the best peer.
        alone: Whether it depends only on figures of shardstream.
        ours: Contestant that should reach it.
    """

    text: str
    wanted: float
    reached: Callable[[Results], float | None]
    at_most: bool = False
    names: tuple[str, ...] = ()
    alone: bool = False
    ours: str = OURS

    def is_met(self, figure: float) -> bool:
        """Return whether a figure meets the target."""
        return figure <= self.wanted if self.at_most else figure >= self.wanted

    def is_at_stake(self, results: Results) -> bool:
        """Return whether more repetitions might change whether the target is met.

        >>> found = {OURS: [Result(seconds=1)], "a": [Result(seconds=2)]}
        >>> against("a", 2.0).is_at_stake(found), against("a", 1.5).is_at_stake(found)
        (True, False)
        """
        reached = self.reached(results)
        return self.at_most or reached is None or reached < self.wanted * _SAFE

    def lowest_limit(self, results: Results) -> tuple[str, float] | None:
        """Return the limit with the lowest figure, and that figure; None if there is none.

        >>> found = {OURS: [Result(seconds=2)], "a": [Result(seconds=1)], "limit-x": [Result(seconds=0.5)]}
        >>> best_peer(3.0).lowest_limit(found)
        ('limit-x', 2.0)
        """
        if self.at_most or any(map(is_limit, self.names)):
            return None
        variation = self.ours.partition("+")[2]
        limits = [n for n in results if is_limit(n) and n.partition("+")[2] == variation]
        reached = {name: self.reached({**results, self.ours: results[name]}) for name in limits}
        known = [(figure, name) for name, figure in reached.items() if figure is not None]
        return min(known)[::-1] if known else None


def is_limit(name: str) -> bool:
    """Return whether a contestant measures a limit of the machine."""
    return name.startswith("limit-")


def is_alone(targets: Sequence[Target]) -> bool:
    """Return whether all targets depend only on figures of shardstream."""
    return all(target.alone for target in targets)


def speed(result: Result) -> float:
    """Return samples per second; for a result with only a time, its reciprocal.

    >>> speed(Result(seconds=2.0, samples=10)), speed(Result(seconds=2.0, samples=0))
    (5.0, 0.5)
    """
    return (result.samples or 1) / result.seconds


def median_speed(results: Results, name: str) -> float | None:
    """Return the median speed; None if there is no valid result."""
    return statistics.median(map(speed, results[name])) if results.get(name) else None


def peers(results: Results) -> list[str]:
    """Return the contestants with results, except shardstream and limits."""
    return [
        name
        for name, found in results.items()
        if found and not name.startswith(OURS) and not is_limit(name)
    ]


def are_worth_repeating(results: Results, targets: Sequence[Target]) -> list[str]:
    """Return the contestants that decide a target: shardstream, peers near the best, named peers, and limits below a target.

    >>> found = {OURS: [Result(seconds=1)], "a": [Result(seconds=2)], "b": [Result(seconds=9)], "c": [Result(seconds=9)]}
    >>> are_worth_repeating(found, [best_peer(1.0), against("c", 2.0)])
    ['shardstream', 'a', 'c']
    >>> are_worth_repeating(found, [as_fresh(1.2)])
    ['shardstream']
    """
    if is_alone(targets):
        return [name for name in results if name.startswith(OURS)]
    named = {name for target in targets if target.is_at_stake(results) for name in target.names}
    lowest = [(target, target.lowest_limit(results)) for target in targets]
    named |= {limit[0] for target, limit in lowest if limit and not target.is_met(limit[1])}
    speeds = {name: median_speed(results, name) or 0.0 for name in peers(results)}
    least = max(speeds.values(), default=0.0) * _NEAR
    near = {name for name, speed in speeds.items() if speed >= least}
    return [name for name in results if name.startswith(OURS) or name in named | near]


def against(peer: str, wanted: float, ours: str = OURS) -> Target:
    """Return a target: a multiple of a peer's speed."""
    return Target(
        text=f"x {peer}",
        wanted=wanted,
        reached=lambda results: _ratio(results, peer, ours),
        names=(peer,),
        ours=ours,
    )


def best_peer(wanted: float, ours: str = OURS) -> Target:
    """Return a target: a multiple of the best peer's speed."""

    def reached(results: Results) -> float | None:
        ratios = [_ratio(results, name, ours) for name in peers(results)]
        return min((ratio for ratio in ratios if ratio is not None), default=None)

    label = "x best peer" if ours == OURS else f"{ours} x best peer"
    return Target(text=label, wanted=wanted, reached=reached, ours=ours)


def of_limit(wanted: float, limit: str, ours: str = OURS) -> Target:
    """Return a target: a share of a limit of the machine."""
    return Target(
        text=f"{ours}, share of {limit}",
        wanted=wanted,
        reached=lambda results: _ratio(results, limit, ours),
        names=(limit,),
        ours=ours,
    )


def less_cpu() -> Target:
    """Return a target: at most the CPU seconds per byte of the most efficient peer."""

    def reached(results: Results) -> float | None:
        costs = {name: cpu_s_per_gb(found) for name, found in results.items() if found}
        theirs = [costs[name] for name in peers(results)]
        return costs[OURS] / min(theirs) if theirs and OURS in costs else None

    return Target(
        text="CPU s per GB, by the least of peers", wanted=1.0, reached=reached, at_most=True
    )


def cpu_s_per_gb(results: Sequence[Result]) -> float:
    """Return the median CPU seconds per 10^9 bytes of fields."""
    return statistics.median(found.cpu_s * 1e9 / max(1, found.payload_bytes) for found in results)


def figure(text: str, name: str, most: float) -> Target:
    """Return a target: a maximum for the median of a figure in ``extra``."""

    def reached(results: Results) -> float | None:
        found = results.get(OURS)
        return statistics.median(result.extra[name] for result in found) if found else None

    return Target(text=text, wanted=most, reached=reached, at_most=True, alone=True)


def as_fresh(most: float) -> Target:
    """Return a target: a resume takes at most a multiple of shardstream's first batch."""

    def reached(results: Results) -> float | None:
        found = results.get(OURS)
        if not found:
            return None
        return statistics.median(result.seconds / result.extra["fresh_s"] for result in found)

    return Target(text="x own first batch", wanted=most, reached=reached, at_most=True, alone=True)


def _ratio(results: Results, other: str, ours: str) -> float | None:
    mine, theirs = median_speed(results, ours), median_speed(results, other)
    return None if mine is None or not theirs else mine / theirs
