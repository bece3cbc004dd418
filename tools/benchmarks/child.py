"""The process that measures: ``python -m benchmarks.child CASE`` prints one line of JSON.

Each measurement has a process of its own, so that imports, caches and threads of contestants do not meet.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from benchmarks.case import Case, Epochs, Result
from benchmarks.processes import cpu_s, peak_rss_bytes


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
    """Go through an epoch; return its samples, the bytes of their fields, and whether it was whole.

    Args:
        batches: Of an epoch.
        fields: Of a sample.
        until: When to stop before its end (`time.perf_counter`).
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
    """Say what is wrong with what was delivered; nothing if nothing is."""
    if samples != epochs * case.samples:
        return f"{samples} samples instead of {epochs} x {case.samples}"
    if case.task == "raw" and payload_bytes != epochs * case.payload_bytes:
        return f"{payload_bytes} bytes instead of {epochs} x {case.payload_bytes}"
    return ""


def throughput(case: Case, epochs: Epochs) -> Result:
    """Time an epoch, or as much of it as fits in ``max_s``.

    With ``min_s``, an epoch shorter than that only warms up, and then whole ones are repeated until it is reached.
    """
    number, took = 0, _go(case, epochs, 0)
    if took.seconds < case.min_s:
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


def _go(case: Case, epochs: Epochs, number: int) -> Result:
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


def measure(case: Case) -> Result:
    """Run a case in this process."""
    name = case.contestant.replace("-", "_")
    if name.startswith("limit_"):
        limits = importlib.import_module("benchmarks.limits")
        return limits.measure(case)  # type: ignore[no-any-return]
    peer = importlib.import_module(f"benchmarks.peers.{name}")
    epochs: Epochs = peer.epochs(case)
    modes = {"throughput": throughput, "first": first_batch}
    return modes[case.mode](case, epochs)


def main() -> None:
    """Measure the case of the command line."""
    result = measure(Case.from_json(sys.argv[1]))
    print("RESULT " + json.dumps(asdict(result)), flush=True)
    os._exit(0)  # what a contestant still has running is not what is measured


if __name__ == "__main__":
    main()
