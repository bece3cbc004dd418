"""The parts of a concatenation have one limit of requests, and none waits for another one."""

from __future__ import annotations

import os
import threading
import uuid
from concurrent.futures import CancelledError
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from shardstream.catalog import ShardCatalog
from shardstream.samples import Concat, FetchOptions, Numbers, Subset
from shardstream.storage import AdaptiveLimit, Storage, locate_shards, share_requests
from shardstream.testing import make_shards

NUM_SAMPLES = 12


class Gate(ShardCatalog):
    """Remote shards of one sample, whose bytes come when several requests are in flight at the same time."""

    def __init__(self, barrier: threading.Barrier) -> None:
        folder = f"memory://gate-{uuid.uuid4().hex}"
        make_shards(folder, samples=NUM_SAMPLES, per_shard=1)
        super().__init__(locate_shards(folder, Storage()), Storage())
        self.barrier = barrier

    def fetch(
        self, shard: int, start: int, end: int, concurrency: AdaptiveLimit | None = None
    ) -> bytes | memoryview:
        self.barrier.wait(timeout=10)
        return super().fetch(shard, start, end, concurrency)


def read_keys(samples: Concat, numbers: Numbers, num_workers: int = 1) -> list[str]:
    options = FetchOptions(prefetch_bytes=1 << 20, num_workers=num_workers)
    with closing(samples.open_fetcher(iter([numbers]), options)) as fetcher:
        rows: list[Any] = list(fetcher.samples(numbers))
    return [row["__key__"] for row in rows]


def test_a_part_has_all_requests_while_the_others_need_none() -> None:
    cores = os.cpu_count() or 1
    num_workers = max(48, 16 * cores) // NUM_SAMPLES
    assert share_requests(24, num_workers, cores)[0] == NUM_SAMPLES
    gate = Gate(threading.Barrier(NUM_SAMPLES))
    mixed = Concat([gate, Gate(threading.Barrier(1))])
    keys = read_keys(mixed, np.arange(NUM_SAMPLES), num_workers)
    assert keys == [f"{n:06d}" for n in range(NUM_SAMPLES)]


def test_samples_of_all_parts_are_requested_before_one_is_waited_for() -> None:
    barrier = threading.Barrier(4)
    first, second, third = Gate(barrier), Gate(barrier), Gate(barrier)
    mixed = Concat([first, Subset(second, np.array([5, 0, 3])), Concat([third])])
    numbers = np.array([0, 1, NUM_SAMPLES, NUM_SAMPLES + 3])
    assert read_keys(mixed, numbers) == ["000000", "000001", "000005", "000000"]


def test_waiting_for_requests_that_a_close_has_cancelled_ends() -> None:
    released = threading.Event()

    class Slow(Gate):
        def fetch(self, *args: Any) -> bytes | memoryview:
            released.wait(timeout=10)
            return super().fetch(*args)

    numbers = np.arange(NUM_SAMPLES)
    workers = 1000  # so that each has few requests, and the others of these wait for them
    fetcher = Slow(threading.Barrier(1)).open_fetcher(
        iter([numbers]), FetchOptions(prefetch_bytes=1 << 20, num_workers=workers)
    )
    rows = fetcher.request(numbers)
    fetcher.close()
    released.set()
    with pytest.raises(CancelledError):
        rows()
