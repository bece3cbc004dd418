"""Checks in which one rank looks at a batch before the training, each run by every rank of a job (see trainers_job.py)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

import shardstream as ss
from tests.small_datasets import grouped


def dataset(folder: str, **options: Any) -> ss.ShardDataset:
    shuffled = ss.ShardDataset(folder, **grouped(shuffle=True, microbatch=8, **options))
    return shuffled.decode("rgb8").to_tuple("cls")


def _train(loader: Iterable[Any], chosen: ss.ShardDataset | None = None) -> list[list[list[int]]]:
    """Return the batches of three epochs, after rank 0 alone has looked at one."""
    if dist.get_rank() == 0:
        next(iter(loader))
    epochs: list[list[list[int]]] = []
    for epoch in range(3):
        if chosen is not None:
            chosen.set_epoch(epoch)
        epochs.append([])
        for (ids,) in loader:
            epochs[-1].append(ids.tolist())
            dist.barrier()  # as the gradients of a step
    return epochs


def shard_loader(folder: str, out: Path) -> Any:
    """Errors of a `ShardLoader`, which counts the epochs, of detected ranks and of the same ranks given."""
    said = {}
    given = {"placement": ss.Placement(dist.get_rank(), dist.get_world_size())}
    for way, options in (("detected", {}), ("given", given)):
        loader = ss.ShardLoader(dataset(folder, **options), 8)
        if dist.get_rank() == 0:
            next(iter(loader))
        try:
            said[way] = str([[ids.tolist() for (ids,) in loader] for _ in range(3)])
        except ss.errors.OptionError as error:
            said[way] = str(error)
        dist.barrier()
    return said


def plain_loader(folder: str, out: Path) -> Any:
    """Three epochs of a plain `DataLoader` without set_epoch, and three with it."""
    found = {}
    for workers in (0, 1):
        read = dataset(folder)
        found[f"repeated, {workers} workers"] = _train(
            DataLoader(read, batch_size=8, num_workers=workers)
        )
        read = dataset(folder)
        found[f"chosen, {workers} workers"] = _train(
            DataLoader(read, batch_size=8, num_workers=workers), read
        )
    return found


# Check -> the numbers of ranks that it runs on.
CHECKS = {shard_loader: (2,), plain_loader: (2,)}
