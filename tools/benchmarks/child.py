"""Run a measurement: ``python -m benchmarks.child CASE`` prints one line of JSON.

Each measurement has its own process, so that imports, caches and threads of contestants do not interfere.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict

from benchmarks.case import Case, Result
from benchmarks.targets import is_limit

_WHOLE = {
    "index": "benchmarks.indexing",
    "many-shards": "benchmarks.many_shards",
    "pack": "benchmarks.packing",
    "ray": "benchmarks.ray_read",
    "ray-write": "benchmarks.ray_write",
    "scale": "benchmarks.scale",
    "view": "benchmarks.view",
}
_LIMITS = {"first": "benchmarks.start", "resume": "benchmarks.start"}


def measure(case: Case) -> Result:
    """Run a case in this process."""
    if is_limit(case.contestant):
        module = _LIMITS.get(case.mode, "benchmarks.limits")
    else:
        module = _WHOLE.get(case.mode, "")
    if module:
        whole: Callable[[Case], Result] = importlib.import_module(module).measure
        return whole(case)
    peer = importlib.import_module(f"benchmarks.peers.{case.contestant.partition('+')[0]}")
    from benchmarks import modes  # noqa: PLC0415  (after the peer, as its user would import it)

    random.seed(0)  # the crops
    if case.mode == "resume":
        return modes.resume(case, peer)
    works = {"throughput": modes.throughput, "first": modes.first_batch, "memory": modes.memory}
    return works[case.mode](case, peer.epochs(case))


def main() -> None:
    """Measure the case of the command line."""
    result = measure(Case.from_json(sys.argv[1]))
    print("RESULT " + json.dumps(asdict(result)), flush=True)
    os._exit(0)  # threads and processes that a contestant still runs are not measured


if __name__ == "__main__":
    main()
