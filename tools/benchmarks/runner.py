"""Run settings, with alternating repetitions of contestants, to a document of plain values, which ``--json`` writes."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Result
from benchmarks.setting import Setting, place
from benchmarks.sizes import Sizes
from benchmarks.targets import OURS, Results, are_worth_repeating
from benchmarks.work import Work, last_line
from shardstream import ShardStreamError
from tests.servers import ServerError

Document = dict[str, Any]
Say = Callable[[str], None]
_PACKAGES = (
    "shardstream",
    "torch",
    "numpy",
    "pillow",
    "fsspec",
    "s3fs",
    "adlfs",
    "obstore",
    "simplejpeg",
    "webdataset",
    "litdata",
    "mosaicml-streaming",
    "datasets",
    "s3torchconnector",
    "torchdata",
    "grain",
    "array-record",
    "spdl",
    "lancedb",
    "pylance",
    "webshart",
    "datago",
    "nvidia-dali-cuda130",
)


def describe_machine() -> dict[str, Any]:
    """Return the properties of the machine."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory_kb = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory_kb / 1e6, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def find_versions(work: Work) -> dict[str, str]:
    """Return the versions of all installed packages that take part."""
    code = (
        "import json, sys; from importlib import metadata as m; print(json.dumps("
        "{name: m.version(name) for name in sys.argv[1:] if any(m.distributions(name=name))}))"
    )
    found: dict[str, str] = {}
    for python in {*work.interpreters.values()} | {sys.executable}:
        done = subprocess.run(  # noqa: S603
            [python, "-c", code, *_PACKAGES], capture_output=True, text=True, check=True
        )
        versions = json.loads(done.stdout)
        found = found | versions if python == sys.executable else versions | found
    return {name: found[name] for name in _PACKAGES if name in found}


def run(
    settings: Iterable[Setting],
    sizes: Sizes,
    work: Work,
    *,
    say: Say,
    done: Callable[[Document], None],
) -> Document:
    """Measure all settings. One that cannot run, such as for want of a server, is a result with its reason.

    Args:
        settings: Settings to measure.
        sizes: Sizes of data and repetitions.
        work: Work folder and servers.
        say: Called with the name of the current measurement.
        done: Called after each setting, with the document so far.
    """
    began = time.time()
    document: Document = {
        "machine": describe_machine(),
        "versions": find_versions(work),
        "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
        "s3_slow": {"latency_ms": work.latency_ms, "rate_mb_s": work.rate / 1e6},
        "settings": [],
        "seconds": 0.0,
    }
    for setting in settings:
        started = time.time()
        measured = run_setting(setting, sizes, work, say)
        measured["seconds"] = round(time.time() - started, 1)  # including the generation of data
        document["settings"].append(measured)
        document["seconds"] = round(time.time() - began, 1)
        done(document)
    return document


def run_setting(setting: Setting, sizes: Sizes, work: Work, say: Say) -> Document:
    """Measure one setting: all contestants in turn, repeatedly; limits right after shardstream, under equal conditions."""
    ours = [name for name in setting.contestants if name.startswith(OURS)]
    names = [*ours, *setting.limits, *(n for n in setting.contestants if n not in ours)]
    try:
        environment = work.environment(setting.store, setting.rate)
    except ServerError as error:
        return as_document(setting, {name: [_failure("no server", error)] for name in names})
    cases: dict[str, Case] = {}
    results: dict[str, list[Result]] = {name: [] for name in names}
    for name in names:
        try:
            cases[name] = place(setting, name, work)
        except subprocess.CalledProcessError as error:
            results[name].append(_failure("no data", last_line(error.stderr)))
        except (ShardStreamError, subprocess.TimeoutExpired) as error:
            results[name].append(_failure("no data", error))
    repetitions = setting.count_repetitions(sizes)
    for repetition in range(repetitions):
        chosen = (
            are_worth_repeating(valid_results(results), setting.targets) if repetition else cases
        )
        for name in chosen:
            case = cases[name]
            say(f"{setting.name} · {name} · {repetition + 1} of {repetitions}")
            if repetition == 0:  # a whole epoch, which is checked
                case = replace(case, max_s=0.0)
            results[name].append(work.measure(case, environment))
    return as_document(setting, results)


def _failure(what: str, why: object) -> Result:
    return Result(seconds=0.0, wrong=f"{what}: {why}")


def valid_results(results: Results) -> Results:
    """Return the results of contestants that have some and no wrong ones."""
    return {
        name: found
        for name, found in results.items()
        if found and not any(result.wrong for result in found)
    }


def as_document(setting: Setting, results: dict[str, list[Result]]) -> Document:
    """Return a setting's results as plain values, with targets and reached values."""
    targets = []
    for target in setting.targets:
        reached, limit = (
            target.reached(valid_results(results)),
            target.lowest_limit(valid_results(results)),
        )
        targets.append(
            {
                "text": target.text,
                "wanted": target.wanted,
                "at_most": target.at_most,
                "reached": reached,
                "met": None if reached is None else target.is_met(reached),
                "limit": limit and {"name": limit[0], "reached": limit[1]},
            }
        )
    return {
        "row": setting.row,
        "label": setting.label,
        "metric": setting.metric,
        "ours": setting.contestants[0],
        "results": {name: [asdict(result) for result in found] for name, found in results.items()},
        "targets": targets,
    }
