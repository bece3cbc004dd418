"""Parameters and result of one measurement: plain values that are sent between processes as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Epochs = Callable[[int], Iterable[Any]]
"""Function from the number of an epoch to its batches."""

Mode = Literal[
    "throughput",
    "first",
    "resume",
    "memory",
    "pack",
    "index",
    "scale",
    "many-shards",
    "ray",
    "ray-write",
    "view",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement of one contestant.

    Args:
        contestant: Name of a module of `benchmarks.peers`, or "limit-…" (see `benchmarks.limits`).
        mode: Quantity to time (see `benchmarks.child`).
        location: Folder or ``s3://`` prefix of the data, in the contestant's format.
        fields: Fields of a sample.
        samples: Samples of an epoch; another number is an error.
        payload_bytes: Bytes of all fields in an epoch; another number is an error.
        task: "raw" returns bytes, "decoded" each field's value, "train" decoded, cropped images and labels.
        workers: Loader processes.
        worker_method: Whether shardstream's workers are processes or threads.
        only: Of the ray row: the field that is read; empty for all.
        shuffle: Whether shardstream shuffles.
        threads: Decoding threads of each process, 0 for none.
        prefetch: Batches that each loader process prefetches; torch's default is 2.
        decoder: Decoder of images.
        batch_size: Samples of a batch.
        min_s: Minimum duration; short epochs are repeated after one warm-up epoch.
        max_s: Maximum duration of an epoch; 0 for none.
        warm: Whether the first epoch is a warm-up, however long it takes.
        cold: Whether the pages of the data are dropped before the first epoch.
        cache: Empty folder for files that the contestant caches.
        target: Destination of the pack row, if not the cache.
        max_side: Of the pack row: longest side to which photos are scaled down, in pixels; 0 packs files as they are.
        connections: Connections of the socket limit.
        began: Start time of the process, seconds since 1970.
    """

    contestant: str
    mode: Mode
    location: str
    fields: tuple[str, ...] = ()
    samples: int = 0
    payload_bytes: int = 0
    task: Literal["raw", "decoded", "train"] = "raw"
    workers: int = 0
    worker_method: Literal["multiprocessing", "thread"] = "multiprocessing"
    only: str = ""
    shuffle: bool = True
    threads: int = 0
    prefetch: int = 2
    decoder: Literal["pil", "fast"] = "pil"
    batch_size: int = 64
    min_s: float = 0.0
    max_s: float = 0.0
    warm: bool = False
    cold: bool = False
    cache: str = ""
    target: str = ""
    max_side: int = 0
    connections: int = 8
    began: float = 0.0

    def to_json(self) -> str:
        """Return the case as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Parse the output of `to_json`."""
        values = json.loads(text)
        return cls(**values | {"fields": tuple(values["fields"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a measurement.

    Args:
        seconds: Measured time.
        samples: Samples delivered in that time.
        payload_bytes: Bytes of their fields.
        cpu_s: Processor seconds in that time, of the process and its children.
        peak_rss_bytes: Largest resident memory of the process, or of one of its children.
        wrong: How the output differs from the expected one; empty if it does not.
        extra: Additional figures of the row.
    """

    seconds: float
    samples: int = 0
    payload_bytes: int = 0
    cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    wrong: str = ""
    extra: dict[str, float] = field(default_factory=dict)
