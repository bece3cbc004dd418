"""LanceDB: a table of raw bytes, in random order by its `StreamingDataset`, whose threads read and decode.

Workers are threads here. Processes must be spawned for it, and started again in each epoch.
"""

from __future__ import annotations

from typing import Any

import lancedb
from lancedb.streaming import StreamingDataset
from torch.utils.data import DataLoader, default_collate

from benchmarks import images
from benchmarks.case import Case, Epochs
from benchmarks.loaders import keep

FORMAT = "lancedb"


def _examples(rows: Any) -> list[Any]:
    return list(map(images.example, rows.to_pylist()))


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    table = lancedb.connect(case.location).open_table("samples")
    options: dict[str, Any] = {"transform_parallelism": max(1, case.workers)}
    if case.task == "train":
        options["transform"] = _examples

    def epoch(number: int) -> Any:
        dataset = StreamingDataset(table, epoch=number, **options)
        if case.task == "raw":
            return DataLoader(dataset, batch_size=case.batch_size, collate_fn=keep)
        return map(
            tuple, DataLoader(dataset, batch_size=case.batch_size, collate_fn=default_collate)
        )

    return epoch
