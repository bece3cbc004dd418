"""What one measurement is asked to do, and what it found: plain values that cross from process to process as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Epochs = Callable[[int], Iterable[Any]]
"""From the number of an epoch to its batches."""

Mode = Literal["throughput", "first", "resume", "memory", "pack", "index", "scale", "ray"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement of one contestant.

    Args:
        contestant: Name of a module of `benchmarks.peers`, or "limit-…" (see `benchmarks.limits`).
        mode: What is timed (see `benchmarks.child`).
        location: Folder or ``s3://`` prefix of the data, in the contestant's format.
        fields: Of a sample.
        samples: In an epoch; another number is an error.
        payload_bytes: Of all fields in an epoch; another number is an error.
        task: "raw" hands out bytes, "train" decoded, cropped images and labels.
        workers: Loader processes.
        only: Of the ray row: the field that is read; empty for all.
        threads: Decoding threads of each process, 0 for none.
        prefetch: Batches that each loader process is ahead; torch's default is 2.
        decoder: Of images.
        batch_size: Samples.
        min_s: Short epochs are repeated, after a first to warm up, until that long was measured.
        max_s: The epoch is left when that long was measured, 0 for never.
        warm: Whether the first epoch only warms up, however long it takes.
        cache: An empty folder for what the contestant keeps on disk.
        target: Of the pack row: where to write to if not to the cache.
        connections: Of the socket limit.
        began: When the process was started, seconds since 1970.
    """

    contestant: str
    mode: Mode
    location: str
    fields: tuple[str, ...] = ()
    samples: int = 0
    payload_bytes: int = 0
    task: Literal["raw", "train"] = "raw"
    workers: int = 0
    only: str = ""
    threads: int = 0
    prefetch: int = 2
    decoder: Literal["pil", "fast"] = "pil"
    batch_size: int = 64
    min_s: float = 0.0
    max_s: float = 0.0
    warm: bool = False
    cache: str = ""
    target: str = ""
    connections: int = 8
    began: float = 0.0

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"fields": tuple(values["fields"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a measurement found.

    Args:
        seconds: Of what was timed.
        samples: Delivered in that time.
        payload_bytes: Of their fields.
        cpu_s: Processor seconds in that time, of the process and its children.
        peak_rss_bytes: Largest resident memory of the process, or of one of its children.
        wrong: How it delivered something else than asked; empty if it did not.
        extra: Figures of the row's own.
    """

    seconds: float
    samples: int = 0
    payload_bytes: int = 0
    cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    wrong: str = ""
    extra: dict[str, float] = field(default_factory=dict)
