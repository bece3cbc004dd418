"""Judge the timings of an epoch: what limits it, what to change, and what that would give."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from shardstream.loader.stats import LoaderStats

Bottleneck = Literal[
    "training step", "store", "reading", "decoding", "transforms", "collate", "hand-over"
]
"""What takes the time: the loop's own work; waiting for bytes of the store; planning, copying and parsing; decoders; other steps;
making batches; passing them to the main process."""

_FEWEST_BATCHES, _SHORTEST_S = 5, 0.2
_HIDDEN = 0.1
"""Share of the time that the loop waits below which the data keep up."""
_IDLE = 0.5
"""Share of the time that workers are busy below which they wait for the main process."""
_WORTH = 1.05
_SMALL_REQUEST_BYTES = 1 << 20
_STORE_WORKERS = 4  # for each core: a worker that waits needs none

_WORK = {
    "store": "waiting for bytes of the store",
    "reading": "reading and parsing",
    "decoding": "decoding",
    "transforms": "steps other than decoding",
    "collate": "making batches",
}
_REMEDIES: dict[str, tuple[str, ...]] = {
    "store": ("keep the bytes on local disk (cache_dir=)", "raise prefetch_bytes="),
    "reading": ("leave out fields that are not used (fields=)", "copy the shards to a local disk"),
    "decoding": (
        "decode smaller pictures: decode(..., max_side=), or pack them smaller (--max-side)",
        "decode on the GPU: decode(..., device='cuda')",
    ),
    "transforms": ("do costly steps on whole batches or on the GPU", "give map() threads="),
    "collate": ("return arrays of equal shape and type, or a collate_fn that copies less",),
    "hand-over": (
        "send fewer bytes: uint8 pictures ('rgb8'), cropped in the worker, and no fields that the loop ignores",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What limits an epoch; ``print`` shows a sentence and the advice.

    Args:
        bottleneck: What takes the time.
        speedup: How many times as fast the epoch would be without it; 1.0 for the training step.
        sentence: The same in words.
        workers: Advice on ``num_workers``; None if it is fine.
        advice: What else to change, the most promising first.
    """

    bottleneck: Bottleneck
    speedup: float
    sentence: str
    workers: str | None = None
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = self.advice if self.workers is None else (self.workers, *self.advice)
        return "\n".join([self.sentence, *(f"  - {line}" for line in lines)])


@dataclass(frozen=True, slots=True)
class _Load:
    """Seconds of an epoch after its first batch."""

    total_s: float
    loop_s: float
    """The loop's own work."""
    busy_s: float
    """Work on samples, summed over the workers."""
    workers: int
    samples: int

    def seconds(self, workers: int, busy_s: float | None = None) -> float:
        """Return how long it would take at least."""
        busy_s = self.busy_s if busy_s is None else busy_s
        return self.loop_s + busy_s if workers == 0 else max(self.loop_s, busy_s / workers)


def judge(stats: LoaderStats) -> Verdict | None:
    """Return what limits an epoch; None if too few batches were timed."""
    timings = stats.timings
    busy_s = timings.read_s + timings.steps_s + timings.collate_s
    total_s = stats.seconds - stats.first_wait_s
    if stats.batches < _FEWEST_BATCHES or total_s < _SHORTEST_S or not busy_s:
        return None
    wait_s = max(0.0, stats.loop_wait_s - stats.first_wait_s)
    load = _Load(total_s, max(total_s - wait_s, 1e-9), busy_s, stats.workers, timings.samples)
    if wait_s < _HIDDEN * total_s:
        return _fast_enough(load, wait_s)
    phases: dict[Bottleneck, float] = {
        "store": timings.wait_s,
        "reading": timings.read_s - timings.wait_s,
        "decoding": timings.decode_s,
        "transforms": timings.steps_s - timings.decode_s,
        "collate": timings.collate_s,
    }
    share = wait_s / total_s
    if stats.workers and busy_s < _IDLE * stats.workers * total_s:
        speedup = total_s / load.seconds(stats.workers)
        return Verdict(
            bottleneck="hand-over",
            speedup=speedup,
            sentence=f"The hand-over of batches to the main process is the bottleneck: the loop waits {share:.0%} of the time, but the workers "
            f"work only {busy_s / stats.workers / total_s:.0%} of it. Without it an epoch would be {speedup:.1f} times as fast.",
            advice=_REMEDIES["hand-over"],
        )
    name = max(phases, key=lambda phase: phases[phase])
    speedup = total_s / load.seconds(stats.workers, busy_s - phases[name])
    who = "workers spend" if stats.workers else "it spends"
    return Verdict(
        bottleneck=name,
        speedup=speedup,
        sentence=f"{_titled(name)} is the bottleneck: the loop waits {share:.0%} of the time for batches, and {who} {phases[name] / busy_s:.0%} of the work "
        f"on them with {_WORK[name]}. Without that an epoch would be {speedup:.1f} times as fast.",
        workers=_more_workers(load, stats.cores, waits=name == "store"),
        advice=(*_larger_requests(stats), *_REMEDIES[name]),
    )


def _fast_enough(load: _Load, wait_s: float) -> Verdict:
    spare = load.workers - math.ceil(load.busy_s / load.loop_s)
    advice = (
        f"num_workers={load.workers - spare} (now {load.workers}) would keep up, too"
        if load.workers and 0 < spare < load.workers
        else None
    )
    feeds = max(load.workers, 1) * load.total_s / load.busy_s
    return Verdict(
        bottleneck="training step",
        speedup=1.0,
        sentence=f"The training step is the bottleneck: the loop waits {wait_s / load.total_s:.0%} of the time for batches, which could come "
        f"{feeds:.1f} times as fast.",
        workers=advice,
    )


def _more_workers(load: _Load, cores: int, *, waits: bool) -> str | None:
    """Advise more workers where they would help: up to one for each core, or more if they only wait."""
    most = cores * (_STORE_WORKERS if waits else 1)
    workers = min(most, math.ceil(load.busy_s / load.loop_s))
    gain = load.total_s / load.seconds(workers) if workers else 0.0
    if workers <= load.workers or gain < _WORTH:
        if load.workers >= cores and not waits:
            return (
                f"all {cores} cores are used: only less work for each sample, or more cores, help"
            )
        return None
    rate = load.samples / load.total_s
    return f"num_workers={workers} (now {load.workers}) would give up to {rate * gain:,.0f} samples/s instead of {rate:,.0f}"


def _larger_requests(stats: LoaderStats) -> tuple[str, ...]:
    timings = stats.timings
    if not timings.requests or timings.wait_s < timings.read_s / 2:
        return ()
    if timings.read_bytes / timings.requests >= _SMALL_REQUEST_BYTES:
        return ()
    return (
        "requests are small: raise block=, or shuffle once with 'shardstream reshard --seed' and read in order",
    )


def _titled(name: str) -> str:
    return {"store": "The store", "transforms": "The work of map and other steps"}.get(
        name, name.capitalize()
    )
