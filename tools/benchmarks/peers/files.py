"""Loose files, a map-style `Dataset` and torch's `DataLoader`, shuffled: what most begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from benchmarks import images
from benchmarks.case import Case, Epochs

FORMAT = "files"


class Files(Dataset[Any]):
    """Samples of a folder, a file a field: ``000/00000000.jpg``, ``000/00000000.cls``."""

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
    """Return what makes the batches of an epoch."""
    collate: dict[str, Any] = {} if case.task == "train" else {"collate_fn": list}
    loader = DataLoader(
        Files(case),
        batch_size=case.batch_size,
        shuffle=True,
        num_workers=case.workers,
        persistent_workers=case.workers > 0,
        **collate,
    )
    if case.task == "train":
        return lambda _: map(tuple, loader)
    return lambda _: loader
