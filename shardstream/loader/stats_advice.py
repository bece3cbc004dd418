"""Judge the timings of an epoch: what limits it, what to change, and what that would give."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shardstream.loader.worker_timings import WorkerTimings

Bottleneck = Literal[
    "training step",
    "store",
    "reading",
    "decoding",
    "transforms",
    "reading and steps",
    "collate",
    "hand-over",
]
"""What takes the time: the loop's own work; waiting for bytes of the store; planning, copying and parsing; decoders; other steps;
all of these, if steps change counts; making batches; passing them to the main process."""

_FEWEST_BATCHES, _SHORTEST_S = 4, 0.2  # after the first batch of each worker
_HIDDEN = 0.1
"""Share of the time that the loop waits below which the data keep up."""
_IDLE = 0.5
"""Share of the time that workers are busy below which they wait for the main process."""
_WORTH = 1.05
_SMALL_REQUEST_BYTES = 1 << 20
_LARGEST_FACTOR = 100
_STORE_WORKERS = 4  # for each core: a worker that waits needs none

_WORK = {
    "store": "waiting for bytes of the store",
    "reading": "reading and parsing",
    "decoding": "decoding",
    "transforms": "steps other than decoding",
    "reading and steps": "reading and the steps, which are not timed apart as they change counts",
    "collate": "making batches",
}
_REMEDIES: dict[str, tuple[str, ...]] = {
    "store": (
        "keep the bytes on local disk: read=ss.ReadOptions(cache_dir=)",
        "raise prefetch_bytes= there",
    ),
    "reading": ("leave out fields that are not used (fields=)", "copy the shards to a local disk"),
    "decoding": (
        "decode smaller pictures: decode(..., max_side=), or pack them smaller (--max-side)",
    ),
    "transforms": ("do costly steps on whole batches or on the GPU", "give map() threads="),
    "reading and steps": (
        "make the steps cheaper: smaller pictures, and costly steps on whole batches or on the GPU",
        "time a loader without the steps that change counts: it tells reading, decoding and other steps apart",
    ),
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
        speedup: How many times as fast the epoch would be without it, at least 1.0; 1.0 for the training step.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Work of an epoch after the first batch of each worker.

    Args:
        batches: Batches yielded.
        total_s: Seconds.
        wait_s: Of these, seconds that the loop waited for batches.
        workers: Worker processes; 0 reads in the main process.
        cores: CPU cores that this process may use.
        timings: Sum over the workers.
    """

    batches: int
    total_s: float
    wait_s: float
    workers: int
    cores: int
    timings: WorkerTimings

    @property
    def loop_s(self) -> float:
        """The loop's own work."""
        return max(self.total_s - self.wait_s, 1e-9)

    @property
    def phases(self) -> dict[Bottleneck, float]:
        """Work on samples, summed over the workers."""
        timings = self.timings
        if timings.mixed_s:
            return {"reading and steps": timings.read_s, "collate": timings.collate_s}
        return {
            "store": timings.wait_s,
            "reading": timings.read_s - timings.wait_s,
            "decoding": timings.decode_s,
            "transforms": timings.steps_s - timings.decode_s,
            "collate": timings.collate_s,
        }

    def speedup(self, workers: int, busy_s: float) -> float:
        """Return how many times as fast it would be at most, with other workers or less work."""
        least_s = self.loop_s + busy_s if workers == 0 else max(self.loop_s, busy_s / workers, 1e-9)
        return max(1.0, self.total_s / least_s)


def judge(load: Load) -> Verdict | None:
    """Return what limits an epoch; None if too few batches were timed, or if nothing stands out."""
    timings, busy_s = load.timings, load.timings.busy_s
    if (
        load.batches < _FEWEST_BATCHES
        or load.total_s < _SHORTEST_S
        or not busy_s
        or not timings.samples
    ):
        return None
    if load.wait_s < _HIDDEN * load.total_s:
        return _fast_enough(load)
    if load.workers and busy_s < _IDLE * load.workers * load.total_s:
        return _handed_over_slowly(load)
    name = max(load.phases, key=lambda phase: load.phases[phase])
    phase_s = load.phases[name]
    speedup = load.speedup(load.workers, busy_s - phase_s)
    if speedup < _WORTH:
        return None
    who = "workers spend" if load.workers else "it spends"
    return Verdict(
        bottleneck=name,
        speedup=speedup,
        sentence=f"{_titled(name)} the bottleneck: the loop waits {load.wait_s / load.total_s:.0%} of the time for batches, and {who} {phase_s / busy_s:.0%} "
        f"of the work on them with {_WORK[name]}. Without that an epoch would be {_times(speedup)} as fast.",
        workers=_more_workers(load, waits=name == "store"),
        advice=(*_larger_requests(timings), *_REMEDIES[name]),
    )


def _handed_over_slowly(load: Load) -> Verdict:
    busy_s = load.timings.busy_s
    speedup = load.speedup(load.workers, busy_s)
    return Verdict(
        bottleneck="hand-over",
        speedup=speedup,
        sentence=f"The hand-over of batches to the main process is the bottleneck: the loop waits {load.wait_s / load.total_s:.0%} of the time, but the workers "
        f"work only {busy_s / load.workers / load.total_s:.0%} of it. Without it an epoch would be {_times(speedup)} as fast.",
        advice=_REMEDIES["hand-over"],
    )


def _fast_enough(load: Load) -> Verdict:
    busy_s = load.timings.busy_s
    needed = math.ceil(busy_s / load.loop_s)
    advice = (
        f"num_workers={needed} (now {load.workers}) would keep up, too"
        if 0 < needed < load.workers
        else None
    )
    feeds = max(load.workers, 1) * load.total_s / busy_s
    faster = f", which could come {_times(feeds)} as fast" if feeds >= _WORTH else ""
    return Verdict(
        bottleneck="training step",
        speedup=1.0,
        sentence=f"The training step is the bottleneck: the loop waits {load.wait_s / load.total_s:.0%} of the time for batches{faster}.",
        workers=advice,
    )


def _more_workers(load: Load, *, waits: bool) -> str | None:
    """Advise more workers where they would help: up to one for each core, or more if they only wait."""
    busy_s, cores = load.timings.busy_s, load.cores
    most = cores * (_STORE_WORKERS if waits else 1)
    workers = min(most, math.ceil(busy_s / load.loop_s))
    gain = load.speedup(workers, busy_s) if workers else 1.0
    if workers <= load.workers or gain < _WORTH:
        if load.workers >= cores and not waits:
            return (
                f"all {cores} cores are used: only less work for each sample, or more cores, help"
            )
        return None
    rate = load.timings.samples / load.total_s
    return f"num_workers={workers} (now {load.workers}) would give up to {_rate(rate * gain)} samples/s instead of {_rate(rate)}"


def _larger_requests(timings: WorkerTimings) -> tuple[str, ...]:
    if not timings.requests or timings.wait_s < timings.read_s / 2:
        return ()
    if timings.read_bytes / timings.requests >= _SMALL_REQUEST_BYTES:
        return ()
    return (
        "requests are small: raise block= with order=ss.OrderOptions, or shuffle once with 'shardstream reshard --seed' and read in order",
    )


def _titled(name: str) -> str:
    titles = {
        "store": "The store is",
        "transforms": "The work of map and other steps is",
        "reading and steps": "Reading and steps together are",
    }
    return titles.get(name, f"{name.capitalize()} is")


def _times(factor: float) -> str:
    """Return a factor in words; larger ones would be noise."""
    if factor > _LARGEST_FACTOR:
        return f"over {_LARGEST_FACTOR} times"
    return f"{factor:.1f} times"


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"
