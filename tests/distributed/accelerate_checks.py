"""Checks with Hugging Face Accelerate, each run by every rank of a job (see trainers_job.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset

import shardstream as ss
from tests.distributed.trainers_job import document_block
from tests.small_datasets import grouped


def dataset(folder: str, **options: Any) -> ss.ShardDataset:
    return ss.ShardDataset(folder, **grouped(shuffle=True, **options)).decode().to_tuple("cls")


def numbers(batches: Iterable[Any]) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def prepared_loader(folder: str, out: Path) -> Any:
    """Two epochs of a prepared `ShardLoader`: samples of this rank, of all ranks, and the batches after which gradients are applied."""
    accelerator = Accelerator(gradient_accumulation_steps=4)
    loader = accelerator.prepare(ss.ShardLoader(dataset(folder), 8, num_workers=1))
    model = torch.nn.Linear(1, 1)
    mine, gathered, applied = [], [], []
    for _ in range(2):
        for (ids,) in loader:
            with accelerator.accumulate(model):
                applied.append(accelerator.sync_gradients)
            mine.append(ids.tolist())
            gathered.append(accelerator.gather_for_metrics(ids).tolist())
    return {"mine": mine, "gathered": gathered, "applied": applied, "length": len(loader)}


def resumed_loader(folder: str, out: Path) -> Any:
    """Samples of an epoch that stops after batch 5, of its rest with another Accelerator, and of an uninterrupted epoch."""

    def prepared() -> tuple[Accelerator, Any]:
        accelerator = Accelerator()
        return accelerator, accelerator.prepare(ss.ShardLoader(dataset(folder), 4, num_workers=1))

    return _resumed(prepared, out / "checkpoint")


def registered_loader(folder: str, out: Path) -> Any:
    """The same with a loader that is registered for checkpoints instead of prepared."""

    def registered() -> tuple[Accelerator, Any]:
        accelerator, loader = Accelerator(), ss.ShardLoader(dataset(folder), 4)
        accelerator.register_for_checkpointing(loader)
        return accelerator, loader

    return _resumed(registered, out / "checkpoint")


def _resumed(make: Callable[[], tuple[Accelerator, Any]], checkpoint: Path) -> Any:
    _, whole = make()
    accelerator, loader = make()
    seen = []
    for (ids,) in loader:
        seen.append(ids.tolist())
        if len(seen) == 5:
            accelerator.save_state(str(checkpoint))
            break
    accelerator.wait_for_everyone()
    accelerator, loader = make()
    accelerator.load_state(str(checkpoint))
    return {"seen": seen + numbers(loader), "whole": numbers(whole)}


def readme(folder: str, out: Path) -> Any:
    """The epoch after the lines of docs/trainers.md, run twice."""
    os.chdir(out)
    epochs = []
    for _ in range(2):
        samples = ss.ShardDataset(folder, shuffle=True).decode().to_tuple("npy", "cls")
        model = torch.nn.Linear(1, 1)
        names: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
        names |= {"loader": ss.ShardLoader(samples, 8)}
        exec(document_block("docs/trainers.md", "accelerate_train.py"), names)  # noqa: S102  (our own docs)
        epochs.append(names["loader"].epoch)
    return epochs


def _prepared_dataset(folder: str, dispatch: bool | None, split: bool, num_workers: int) -> Any:
    options = DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=split)
    loader = DataLoader(dataset(folder, microbatch=8), batch_size=8, num_workers=num_workers)
    return numbers(Accelerator(dataloader_config=options).prepare(loader))


def prepared_datasets(folder: str, out: Path) -> Any:
    """Samples of a DataLoader over a `ShardDataset`, for each way in which Accelerate splits it."""
    return {
        f"dispatch={dispatch} split={split} workers={num_workers}": _prepared_dataset(
            folder, dispatch, split, num_workers
        )
        for dispatch, split, num_workers in [
            (None, False, 0),
            (None, False, 2),
            (True, True, 0),
            (False, False, 0),
            (False, False, 2),
            (False, True, 0),
        ]
    }


def epochs_of_dataset(folder: str, out: Path) -> Any:
    """Samples of three epochs of a DataLoader over a `ShardDataset`, which Accelerate counts."""
    loaders = [
        Accelerator().prepare(
            DataLoader(dataset(folder, microbatch=8), batch_size=8, num_workers=workers)
        )
        for workers in (0, 2)
    ]
    return [[numbers(loader) for _ in range(3)] for loader in loaders]


def unprepared_dataset(folder: str, out: Path) -> Any:
    """Samples of a plain DataLoader that is not prepared, while an Accelerator exists."""
    Accelerator()
    return numbers(DataLoader(dataset(folder, microbatch=8), batch_size=8))


class Wrapped(IterableDataset[Any]):
    """A wrapper as users write it."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def refusals(folder: str, out: Path) -> Any:
    """Errors of configurations in which a loader would give wrong samples."""
    accelerator = Accelerator()
    loader = accelerator.prepare(ss.ShardLoader(dataset(folder), 8))
    said = []
    try:
        numbers(accelerator.skip_first_batches(loader, 3))
    except ss.errors.OptionError as error:
        said.append(str(error))
    try:
        numbers(accelerator.prepare(ss.ShardLoader(dataset(folder), 8, device="meta")))
    except ss.errors.OptionError as error:
        said.append(str(error))
    odd = dataset(folder).select(_is_odd).shuffle(9)
    accelerator.prepare(ss.ShardLoader(odd, 8))
    try:
        accelerator.save_state(str(out / "checkpoint"))
    except ss.errors.StateError as error:
        said.append(str(error))
    wrapped = Accelerator().prepare(DataLoader(Wrapped(ss.ShardLoader(dataset(folder))), 8))
    try:
        numbers(wrapped)
    except ss.errors.OptionError as error:
        said.append(str(error))
    options = DataLoaderConfiguration(dispatch_batches=True, use_stateful_dataloader=True)
    try:
        plain = DataLoader(dataset(folder, microbatch=8), batch_size=8)
        numbers(Accelerator(dataloader_config=options).prepare(plain))
    except ss.errors.StateError as error:
        said.append(str(error))
    return said


def _is_odd(sample: tuple[Any, ...]) -> bool:
    return bool(sample[0] % 2)


# Check -> the numbers of ranks that it runs on.
CHECKS = {
    prepared_loader: (1, 2),
    resumed_loader: (1, 2),
    registered_loader: (2,),
    prepared_datasets: (2,),
    epochs_of_dataset: (1, 2),
    unprepared_dataset: (2,),
    readme: (2,),
    refusals: (1, 2),
}
