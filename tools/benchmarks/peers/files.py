"""Loose files, a map-style `Dataset` and torch's `DataLoader`, shuffled: the usual first setup."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from benchmarks import images
from benchmarks.case import Case, Epochs
from benchmarks.loaders import epochs_of, loader_options

FORMAT = "files"


class Files(Dataset[Any]):
    """Samples of a folder with one file per field: ``000/00000000.jpg``, ``000/00000000.cls``."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __len__(self) -> int:
        return self._case.samples

    def __getitem__(self, number: int) -> Any:
        stem = f"{self._case.location}/{number // 1000:04d}/{number:08d}"
        sample = {name: Path(f"{stem}.{name}").read_bytes() for name in self._case.fields}
        if self._case.task == "raw":
            return sample
        return images.example(sample)


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    return epochs_of(case, DataLoader(Files(case), shuffle=True, **loader_options(case)))
