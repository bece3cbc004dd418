"""Time of the workers by phase, with the bytes and requests of their reading."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields


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
