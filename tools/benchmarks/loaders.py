"""What contestants' loaders have in common with torch's `DataLoader`."""

from __future__ import annotations

from typing import Any

from benchmarks.case import Case, Epochs


def loader_options(case: Case) -> dict[str, Any]:
    """Return what a loader is made with; raw samples stay a list."""
    options: dict[str, Any] = {
        "batch_size": case.batch_size,
        "num_workers": case.workers,
        "persistent_workers": case.workers > 0,
    }
    return options if case.task == "train" else options | {"collate_fn": list}


def alike(case: Case, loader: Any) -> Epochs:
    """Return what makes the batches of an epoch, by a loader that is not told which it is."""
    return (lambda _: map(tuple, loader)) if case.task == "train" else (lambda _: loader)
