"""What contestants' loaders have in common with torch's `DataLoader`."""

from __future__ import annotations

from typing import Any

from benchmarks.case import Case, Epochs


def loader_options(case: Case) -> dict[str, Any]:
    """Return what a loader is made with; raw samples stay a list."""
    options = {"batch_size": case.batch_size} | worker_options(case)
    return options if case.task == "train" else options | {"collate_fn": list}


def worker_options(case: Case) -> dict[str, Any]:
    """Return what a loader is told of its processes."""
    if not case.workers:
        return {"num_workers": 0}
    return {
        "num_workers": case.workers,
        "persistent_workers": True,
        "prefetch_factor": case.prefetch,
    }


def alike(case: Case, loader: Any) -> Epochs:
    """Return what makes the batches of an epoch, by a loader that is not told which it is."""
    return (lambda _: map(tuple, loader)) if case.task == "train" else (lambda _: loader)
