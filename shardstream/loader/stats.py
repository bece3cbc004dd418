"""Measure a loader: rates, waiting, bytes, and where the time of workers goes; say what to change if it waits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

from shardstream.display import Bars, bars_html
from shardstream.errors import plural


@dataclass(slots=True, kw_only=True)
class WorkerTimings:
    """Seconds, bytes and requests so far, of one worker or summed over all.

    Args:
        samples: Samples passed to the collate function.
        refused: Samples that ``select`` refused.
        read_s: Seconds of planning, parsing and waiting for bytes.
        wait_s: Of these, seconds of waiting for bytes.
        steps_s: Seconds of the pipeline's steps: decode, map, …
        decode_s: Of these, seconds of ``decode``.
        collate_s: Seconds of making batches.
        mixed_s: Of ``read_s``, seconds of reading and of steps that were not timed apart, as steps change counts.
        read_bytes: Bytes of shards that were read.
        requests: Range requests for them; 0 for local shards, which are memory-mapped.
        throttled: Number of throttling responses of servers.
    """

    samples: int = 0
    refused: int = 0
    read_s: float = 0.0
    wait_s: float = 0.0
    steps_s: float = 0.0
    decode_s: float = 0.0
    collate_s: float = 0.0
    mixed_s: float = 0.0
    read_bytes: float = 0
    requests: float = 0
    throttled: float = 0

    @property
    def busy_s(self) -> float:
        """Seconds of all work."""
        return self.read_s + self.steps_s + self.collate_s

    def since(self, earlier: WorkerTimings) -> WorkerTimings:
        """Return the timings after those of ``earlier``."""
        names = [one.name for one in fields(WorkerTimings)]
        return WorkerTimings(
            **{name: max(0, getattr(self, name) - getattr(earlier, name)) for name in names}
        )


def sum_timings(timings: Iterable[WorkerTimings]) -> WorkerTimings:
    """Return the timings of all workers together."""
    each = [asdict(one) for one in timings]
    return WorkerTimings(
        **{one.name: sum(timing[one.name] for timing in each) for one in fields(WorkerTimings)}
    )


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

_WORDS = {"store": "waiting for bytes", "decoding": "decode", "transforms": "other steps"}
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

    def speedup(self, workers: int, busy_s: float) -> float:
        """Return how many times as fast it would be at most, with other workers or less work."""
        least_s = self.loop_s + busy_s if workers == 0 else max(self.loop_s, busy_s / workers, 1e-9)
        return max(1.0, self.total_s / least_s)


def _phases_of(timings: WorkerTimings) -> dict[Bottleneck, float]:
    """Return the seconds of the work on samples, summed over the workers."""
    if timings.mixed_s:
        return {"reading and steps": timings.read_s, "collate": timings.collate_s}
    return {
        "store": timings.wait_s,
        "reading": timings.read_s - timings.wait_s,
        "decoding": timings.decode_s,
        "transforms": timings.steps_s - timings.decode_s,
        "collate": timings.collate_s,
    }


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
    name, phase_s = max(_phases_of(timings).items(), key=lambda phase: phase[1])
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """The begin of an epoch, until each worker has sent its first batch.

    Args:
        batches: Batches yielded.
        seconds: Since the epoch started in this process.
        loop_wait_s: Of these, seconds that the training loop waited for batches.
        timings: Those of the first batch of each worker, summed.
    """

    batches: int = 0
    seconds: float = 0.0
    loop_wait_s: float = 0.0
    timings: WorkerTimings = field(default_factory=WorkerTimings)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """Timings of an epoch so far, from `ShardLoader.stats`; ``print`` shows a summary.

    If steps change counts, their time is in ``read_s``, all of which is in ``mixed_s``; bytes and requests are unknown. `verdict` says
    what limits the epoch.

    Args:
        epoch: From 0.
        batches: Batches yielded.
        seconds: Since the epoch started in this process.
        loop_wait_s: Of these, seconds that the training loop waited for batches.
        first_wait_s: Of these, seconds until the first batch, with the start of the workers.
        workers: Worker processes; 0 reads in the main process.
        cores: CPU cores that this process may use.
        timings: Sum over the workers; they prefetch, so it may count more samples than were yielded.
        warm_up: The begin of the epoch, which `verdict` leaves out.
    """

    epoch: int
    batches: int
    seconds: float
    loop_wait_s: float
    first_wait_s: float
    workers: int
    cores: int
    timings: WorkerTimings
    warm_up: WarmUp = field(default_factory=WarmUp)

    def as_dict(self) -> dict[str, float]:
        """Return plain numbers by name, for a logger.

        >>> from shardstream.loader.progress import Stopwatch
        >>> Stopwatch(epoch=3, workers=2).stats().as_dict()["epoch"]
        3
        """
        numbers = asdict(self)
        del numbers["warm_up"]
        numbers |= numbers.pop("timings")
        return numbers

    @property
    def verdict(self) -> Verdict | None:
        """What limits the epoch, and what to change; None if too few batches were timed."""
        warm_up = self.warm_up
        return judge(
            Load(
                batches=self.batches - warm_up.batches,
                total_s=self.seconds - warm_up.seconds,
                wait_s=max(0.0, self.loop_wait_s - warm_up.loop_wait_s),
                workers=self.workers,
                cores=self.cores,
                timings=self.timings.since(warm_up.timings),
            )
        )

    def _repr_html_(self) -> str:
        waited = {"training step": max(0.0, self.seconds - self.loop_wait_s)}
        bars = [
            Bars(title="the loop", shares={"waiting for batches": self.loop_wait_s} | waited),
            Bars(title=f"{_named(self.workers)} busy with", shares=self._phases),
        ]
        return bars_html(f"epoch {self.epoch}", bars, str(self).splitlines())

    @property
    def _phases(self) -> dict[str, float]:
        """Seconds of the work on samples, by the words for them."""
        return {
            _WORDS.get(name, name): seconds for name, seconds in _phases_of(self.timings).items()
        }

    def __str__(self) -> str:
        timings, seconds = self.timings, max(self.seconds, 1e-9)
        rate = f"{timings.samples / seconds:,.0f} samples/s, {timings.read_bytes / seconds / 1e6:,.1f} MB/s"
        busy_s = timings.busy_s
        shares = ", ".join(
            f"{name} {100 * value / max(busy_s, 1e-9):.0f} %"
            for name, value in self._phases.items()
        )
        lines = [
            f"epoch {self.epoch}: {plural(self.batches, 'batch')}, {plural(timings.samples, 'sample')} in {seconds:.1f} s ({rate})",
            f"the loop waited {100 * self.loop_wait_s / seconds:.0f} % of the time for batches",
            f"{_named(self.workers)} busy for {busy_s:.1f} s: {shares}",
        ]
        if timings.requests:
            size = timings.read_bytes / timings.requests / 1e6
            throttled = f", {timings.throttled:,.0f} times throttled" if timings.throttled else ""
            lines.append(f"{timings.requests:,.0f} requests of {size:.1f} MB{throttled}")
        if timings.refused:
            lines.append(f"{plural(timings.refused, 'sample')} refused by select")
        if (verdict := self.verdict) is not None:
            lines.append(str(verdict))
        return "\n".join(lines)


def _named(workers: int) -> str:
    if not workers:
        return "the main process was"
    return f"{plural(workers, 'worker')} {'was' if workers == 1 else 'were'}"
