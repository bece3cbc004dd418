"""Modes of measurement: epochs, the first batch, a resume, memory over epochs."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from benchmarks.case import Case, Epochs, Result
from benchmarks.objects import drop_pages
from benchmarks.processes import cpu_s, memory_bytes, peak_rss_bytes
from benchmarks.watch import Watch

_MEMORY_EPOCHS = 5


def count(batch: Any, fields: tuple[str, ...]) -> tuple[int, int]:
    """Return the samples of a batch, and the bytes of their fields.

    >>> count([{"a": b"12", "b": b"3"}, {"a": b"", "b": b"4"}], ("a", "b"))
    (2, 4)
    >>> count({"a": [b"12", b""], "b": [b"3", b"4"]}, ("a", "b"))
    (2, 4)
    """
    if isinstance(batch, Mapping):
        return len(batch[fields[0]]), sum(sum(map(len, batch[name])) for name in fields)
    if isinstance(batch, tuple):  # images, labels
        return len(batch[1]), 0
    return len(batch), sum(sum([len(sample[name]) for sample in batch]) for name in fields)


def consume(
    batches: Iterable[Any], fields: tuple[str, ...], until: float = math.inf
) -> tuple[int, int, bool]:
    """Read an epoch; return its samples, the bytes of their fields, and whether it was complete.

    Args:
        batches: Batches of an epoch.
        fields: Fields of a sample.
        until: Time at which to stop early (`time.perf_counter`).
    """
    samples = payload = 0
    for batch in batches:
        more, size = count(batch, fields)
        samples += more
        payload += size
        if time.perf_counter() > until:
            return samples, payload, False
    return samples, payload, True


def check(case: Case, samples: int, payload_bytes: int, epochs: int = 1) -> str:
    """Return how the output differs from the expected one; an empty string if it does not."""
    if samples != epochs * case.samples:
        return f"{samples} samples instead of {epochs} x {case.samples}"
    if case.task == "raw" and payload_bytes != epochs * case.payload_bytes:
        return f"{payload_bytes} bytes instead of {epochs} x {case.payload_bytes}"
    return ""


def throughput(case: Case, epochs: Epochs) -> Result:
    """Time an epoch, or as much of it as fits in ``max_s``.

    With ``min_s``, a shorter epoch (with ``warm``, any) is a warm-up, and whole epochs are repeated until ``min_s`` is reached.
    """
    if case.cold:
        drop_pages(case.location)
    number, took = 0, _run_epoch(case, epochs, 0)
    if case.warm or took.seconds < case.min_s:
        began_cpu, began = cpu_s(), time.perf_counter()
        samples = payload = 0
        while time.perf_counter() - began < case.min_s:
            number += 1
            more, size, _ = consume(epochs(number), case.fields)
            samples, payload = samples + more, payload + size
        seconds = time.perf_counter() - began
        wrong = check(case, samples, payload, number)
        took = Result(
            seconds=seconds,
            samples=samples,
            payload_bytes=payload,
            cpu_s=cpu_s() - began_cpu,
            wrong=wrong,
        )
    return replace(took, peak_rss_bytes=peak_rss_bytes())


def _run_epoch(case: Case, epochs: Epochs, number: int) -> Result:
    began_cpu, began = cpu_s(), time.perf_counter()
    until = began + case.max_s if case.max_s else math.inf
    samples, payload, whole = consume(epochs(number), case.fields, until)
    return Result(
        seconds=time.perf_counter() - began,
        samples=samples,
        payload_bytes=payload,
        cpu_s=cpu_s() - began_cpu,
        wrong=check(case, samples, payload) if whole else "",
    )


def first_batch(case: Case, epochs: Epochs) -> Result:
    """Time from the start of the process to the first batch."""
    batch = next(iter(epochs(0)))
    seconds = time.time() - case.began
    samples, payload = count(batch, case.fields)
    wrong = "" if samples == case.batch_size else f"{samples} samples in the first batch"
    return Result(
        seconds=seconds, samples=samples, payload_bytes=payload, cpu_s=cpu_s(), wrong=wrong
    )


def resume(case: Case, peer: Any) -> Result:
    """Time the first batch of a loader that resumes at 90 % of an epoch; "fresh_s" is the time without a resume.

    The median of three each, alternating, after an epoch that stops at 90 %. The start of the workers is included.
    """
    loader = peer.make_loader(case)
    taken = int(0.9 * math.ceil(case.samples / case.batch_size))
    for _ in islice(iter(loader), taken):
        pass
    left = case.samples - taken * case.batch_size
    state = loader.state_dict()
    times: dict[str, list[float]] = {"fresh": [], "resumed": []}
    size = 0
    for turn in range(6):
        kind = ("fresh", "resumed")[turn % 2]
        fresh_cache = f"{case.cache}/{turn}"
        loader = None  # ending the workers before is not part of the time
        began = time.perf_counter()
        loader = peer.make_loader(replace(case, cache=fresh_cache))
        if kind == "resumed":
            loader.load_state_dict(state)
        size, _ = count(next(iter(loader)), case.fields)  # the last one was resumed
        times[kind].append(time.perf_counter() - began)
    wrong = "" if size == min(left, case.batch_size) else f"{size} samples, not those left"
    return Result(
        seconds=statistics.median(times["resumed"]),
        samples=size,
        wrong=wrong,
        extra={"fresh_s": statistics.median(times["fresh"])},
    )


def memory(case: Case, epochs: Epochs) -> Result:
    """Read five epochs; "base" is the memory of a worker after the fork, "growth" its increase after the first epoch.

    From the means of the second and third to those of the fourth and fifth. Peaks vary more: depending on how responses and batches
    meet, that of one epoch varies by 3 %.
    """
    base_bytes = memory_bytes(os.getpid())["anon"]
    peaks: list[int] = []
    means: list[int] = []
    began_cpu, began = cpu_s(), time.perf_counter()
    samples = payload = 0
    with Watch() as on_chunk:
        for number in range(_MEMORY_EPOCHS):
            more, size, _ = consume(epochs(number), case.fields)
            samples, payload = samples + more, payload + size
            peak, mean = on_chunk.held_bytes()
            peaks.append(peak)
            means.append(mean)
    return Result(
        seconds=time.perf_counter() - began,
        samples=samples,
        payload_bytes=payload,
        cpu_s=cpu_s() - began_cpu,
        peak_rss_bytes=max(peaks),
        wrong=check(case, samples, payload, _MEMORY_EPOCHS),
        extra={
            "growth": sum(means[3:]) / sum(means[1:3]) - 1,
            "base_bytes": base_bytes,
            "held_bytes": max(peaks) - base_bytes,
        },
    )
