"""Lance's `SafeLanceDataset`: samples by number, a batch in one request, in torch's `DataLoader`, whose workers are spawned, as it needs."""

from __future__ import annotations

from typing import Any

from lance.torch.data import SafeLanceDataset
from torch.utils.data import DataLoader

from benchmarks.case import Case, Epochs
from benchmarks.loaders import collate, worker_options

FORMAT = "lancedb"


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    dataset = SafeLanceDataset(f"{case.location}/samples.lance")
    options = worker_options(case) | {"batch_size": case.batch_size, "collate_fn": collate(case)}
    if case.workers:
        options["multiprocessing_context"] = "spawn"
    loader: Any = DataLoader(dataset, shuffle=True, **options)
    return lambda _: loader
