"""Timings of an epoch: the workers' time by phase, and the training loop's wait."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field

from shardstream.display import Bars, bars_html
from shardstream.errors import plural
from shardstream.loader.stats_advice import Load, Verdict, judge
from shardstream.loader.worker_timings import WorkerTimings, sum_timings
from shardstream.process_memory import num_cores


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
        """Seconds of the work on samples."""
        timings = self.timings
        if timings.mixed_s:
            return {"reading and steps": timings.read_s, "collate": timings.collate_s}
        return {
            "waiting for bytes": timings.wait_s,
            "reading": timings.read_s - timings.wait_s,
            "decode": timings.decode_s,
            "other steps": timings.steps_s - timings.decode_s,
            "collate": timings.collate_s,
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


@dataclass(slots=True)
class Stopwatch:
    """Collects the timings of an epoch in the main process.

    Args:
        epoch: From 0.
        workers: Worker processes.
    """

    epoch: int
    workers: int
    batches: int = 0
    wait_s: float = 0.0
    first_wait_s: float = 0.0
    _begun: float = field(default_factory=time.perf_counter)
    _ended: float | None = None
    _timings: dict[int, WorkerTimings] = field(default_factory=dict)
    _warm_up: tuple[int, float, float] = (0, 0.0, 0.0)  # batches, seconds, loop_wait_s
    _first_timings: list[WorkerTimings] = field(default_factory=list)

    def add_batch(self, part: int, timings: WorkerTimings, *, waited_s: float) -> None:
        """Count a received batch."""
        if not self.batches:
            self.first_wait_s = waited_s
        self.batches += 1
        self.wait_s += waited_s
        is_first = part not in self._timings
        self._timings[part] = timings
        if is_first:
            self._first_timings.append(timings)
            self._warm_up = self.batches, time.perf_counter() - self._begun, self.wait_s

    def stop(self) -> None:
        """End the epoch."""
        self._ended = time.perf_counter()

    def stats(self) -> LoaderStats:
        """Return the timings so far."""
        batches, seconds, loop_wait_s = self._warm_up
        warm_up = WarmUp(
            batches=batches,
            seconds=seconds,
            loop_wait_s=loop_wait_s,
            timings=sum_timings(list(self._first_timings)),
        )
        return LoaderStats(
            epoch=self.epoch,
            batches=self.batches,
            seconds=(self._ended or time.perf_counter()) - self._begun,
            loop_wait_s=self.wait_s,
            first_wait_s=self.first_wait_s,
            workers=self.workers,
            cores=num_cores(),
            timings=sum_timings(list(self._timings.values())),  # a thread of an exporter may ask
            warm_up=warm_up,
        )
