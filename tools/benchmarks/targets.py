"""What we want of a row, and whether the figures say so."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.case import Result

OURS = "shardstream"
Results = Mapping[str, Sequence[Result]]
"""The sound results of each contestant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A ratio that we want to reach.

    Args:
        text: What it says.
        wanted: The least (or, with ``at_most``, the greatest) ratio.
        reached: From results to the ratio, None if a contestant is missing.
        at_most: Whether less is better.
    """

    text: str
    wanted: float
    reached: Callable[[Results], float | None]
    at_most: bool = False

    def is_met(self, ratio: float) -> bool:
        """Say whether a ratio is good enough."""
        return ratio <= self.wanted if self.at_most else ratio >= self.wanted


def rate(result: Result) -> float:
    """Return samples a second."""
    return result.samples / result.seconds


def median_rate(results: Results, name: str) -> float | None:
    """Return the median of samples a second; None if there is no sound result."""
    return statistics.median(map(rate, results[name])) if results.get(name) else None


def peers(results: Results) -> list[str]:
    """Return the contestants with results that are neither ourselves nor limits."""
    return [
        name
        for name, found in results.items()
        if found and not name.startswith((OURS, "limit-"))
    ]


def against(peer: str, wanted: float) -> Target:
    """Want a multiple of a peer's samples a second."""
    return Target(text=f"x {peer}", wanted=wanted, reached=lambda r: _ratio(r, peer))


def best_peer(wanted: float) -> Target:
    """Want a multiple of the best peer's samples a second."""

    def reached(results: Results) -> float | None:
        ratios = [_ratio(results, name) for name in peers(results)]
        return min((ratio for ratio in ratios if ratio is not None), default=None)

    return Target(text="x best peer", wanted=wanted, reached=reached)


def of_limit(wanted: float) -> Target:
    """Want a share of what the machine allows."""

    def reached(results: Results) -> float | None:
        limit = next((name for name in results if name.startswith("limit-")), None)
        return _ratio(results, limit) if limit else None

    return Target(text="of the limit", wanted=wanted, reached=reached)


def _ratio(results: Results, other: str) -> float | None:
    ours, theirs = median_rate(results, OURS), median_rate(results, other)
    return None if ours is None or not theirs else ours / theirs
