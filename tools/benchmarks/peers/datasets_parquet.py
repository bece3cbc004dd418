"""Hugging Face datasets on Parquet: converted to Arrow files once, which are mapped, and torch's `DataLoader`, shuffled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets as hf
from torch.utils.data import DataLoader

from benchmarks.case import Case, Epochs
from benchmarks.loaders import collate, worker_options

FORMAT = "datasets_parquet"


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    files = sorted(map(str, Path(case.location).glob("*.parquet")))
    table: Any = hf.load_dataset("parquet", data_files=files, split="train")
    options = worker_options(case) | {"batch_size": case.batch_size, "collate_fn": collate(case)}
    loader: Any = DataLoader(table, shuffle=True, **options)
    return lambda _: loader
