"""Options that contestants' loaders share with torch's `DataLoader`."""

from __future__ import annotations

from typing import Any

from benchmarks.case import Case, Epochs


def loader_options(case: Case) -> dict[str, Any]:
    """Return the arguments of a loader; raw samples stay a list."""
    options = {"batch_size": case.batch_size} | worker_options(case)
    return options | {"collate_fn": list} if case.task == "raw" else options


def worker_options(case: Case) -> dict[str, Any]:
    """Return the arguments of a loader for its processes."""
    if not case.workers:
        return {"num_workers": 0}
    return {
        "num_workers": case.workers,
        "persistent_workers": True,
        "prefetch_factor": case.prefetch,
    }


def epochs_of(case: Case, loader: Any) -> Epochs:
    """Return the function that makes the batches of an epoch, for a loader without epoch numbers."""
    return (lambda _: loader) if case.task == "raw" else (lambda _: map(tuple, loader))
