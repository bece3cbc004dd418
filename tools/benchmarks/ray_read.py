"""Row `ray`: rows a second of a Ray dataset, read by `ss.ray.read` or by Ray's own `read_webdataset`, on a local cluster with two CPUs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow.compute as pc
import ray
import ray.data

import shardstream as ss
from benchmarks.case import Case, Result
from benchmarks.objects import list_tars
from benchmarks.processes import cpu_s, peak_rss_bytes

_CPUS = 2
_OBJECT_STORE_BYTES = 1 << 30


def measure(case: Case) -> Result:
    """Read whole epochs until ``min_s`` is reached, after one to start Ray's workers; a dataset is opened anew for each."""
    opened: Callable[[Case], Any] = ours if case.contestant == "shardstream" else webdataset
    with local_cluster():
        took = read(opened(case), case)
        began_cpu, began = cpu_s(), time.perf_counter()
        epochs = rows = payload = 0
        while time.perf_counter() - began < max(case.min_s, 0.001):
            took = read(opened(case), case)
            epochs, rows, payload = epochs + 1, rows + took.samples, payload + took.payload_bytes
        seconds = time.perf_counter() - began
        return replace(
            took,
            seconds=seconds,
            samples=rows,
            payload_bytes=payload,
            cpu_s=cpu_s() - began_cpu,
            peak_rss_bytes=peak_rss_bytes(),
            wrong=check(case, rows, payload, epochs),
        )


@contextmanager
def local_cluster() -> Iterator[None]:
    """Start Ray with two CPUs and 1 GiB for objects, quietly, and stop it at the end."""
    ray.init(
        num_cpus=_CPUS,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield
    finally:
        ray.shutdown()


def ours(case: Case) -> Any:
    """Return the dataset by the index, decoded by our own decoders."""
    dataset = ss.ShardDataset(case.location)
    if case.task == "train":
        dataset = dataset.decode("rgb8")
    return ss.ray.read(dataset, fields=[case.only] if case.only else None)


def webdataset(case: Case) -> Any:
    """Return the dataset by Ray's reader, which reads each tar from start to end and decodes by Pillow."""
    return ray.data.read_webdataset(
        list_tars(case.location),
        decoder=True if case.task == "train" else None,
        suffixes=[case.only] if case.only else None,
    )


def read(rows: Any, case: Case) -> Result:
    """Read all rows of a dataset; count them, and the bytes of their fields."""
    begin = time.perf_counter()
    count = payload = 0
    for batch in rows.iter_batches(batch_size=None, batch_format="pyarrow"):
        count += batch.num_rows
        if case.task == "raw":
            for name in [case.only] if case.only else case.fields:
                payload += pc.sum(pc.binary_length(batch[name])).as_py()
    return Result(seconds=time.perf_counter() - begin, samples=count, payload_bytes=payload)


def check(case: Case, rows: int, payload_bytes: int, epochs: int) -> str:
    """Say what is wrong with the rows that were delivered; nothing if nothing is."""
    if rows != epochs * case.samples:
        return f"{rows} rows instead of {epochs} x {case.samples}"
    if case.task == "raw" and not case.only and payload_bytes != epochs * case.payload_bytes:
        return f"{payload_bytes} bytes instead of {epochs} x {case.payload_bytes}"
    return ""
