"""Checks of test_trainers.py: torch.distributed.checkpoint, on one rank and on two, and with the other number of ranks.

A training saves after some steps with `saved`; `loaded` continues the one that had the other number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import shardstream as ss
from tests.distributed.trainers_job import document_block

STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {"batch_size": 4, "num_workers": 1},
    "lanes": {"batch_size": 4, "num_workers": 1, "lanes": 4, "microbatch": 4},
}


def make_loader(folder: str, lanes: int | None = None, microbatch: int | None = None, **options: Any) -> ss.ShardLoader:  # fmt: skip
    dataset = ss.ShardDataset(
        folder, shuffle=True, order=ss.OrderOptions(lanes=lanes, microbatch=microbatch)
    )
    return ss.ShardLoader(dataset.decode().to_tuple("cls"), **options)


def numbers(batch: Any) -> list[int]:
    found: list[int] = batch[0].tolist()
    return found


def saved(folder: str, out: Path) -> dict[str, list[list[int]]]:
    """Take some steps, then save the loaders by their own methods."""
    seen = {}
    for name, options in OPTIONS.items():
        loader = make_loader(folder, **options)
        seen[name] = [numbers(batch) for _, batch in zip(range(STEPS), loader, strict=False)]
        save({"loader": loader}, checkpoint_id=out / name)
    return seen


def loaded(folder: str, out: Path) -> dict[str, list[list[int]]]:
    """Load the state of a job with another number of ranks, and read the rest of the epoch."""
    other = out.with_name(f"saved-{3 - dist.get_world_size()}")
    rest = {}
    for name, options in OPTIONS.items():
        loader = make_loader(folder, **options)
        load({"loader": loader}, checkpoint_id=other / name)
        rest[name] = [numbers(batch) for batch in loader]
    return rest


def titan_saved(folder: str, out: Path) -> list[list[int]]:
    """Read an epoch and some steps of the next one by the adapter of docs/trainers.md for torchtitan, then save it."""
    loader = _make_titan(folder)
    seen = _read_titan(loader, len(loader.loader) + STEPS)
    save({"dataloader": loader}, checkpoint_id=out)
    return seen


def titan_loaded(folder: str, out: Path) -> list[list[int]]:
    """Read the rest of that epoch on another number of ranks."""
    loader = _make_titan(folder)
    other = out.with_name(f"titan_saved-{3 - dist.get_world_size()}")
    load({"dataloader": loader}, checkpoint_id=other)
    return _read_titan(loader, loader.loader.batches_left)


def _make_titan(folder: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(document_block("docs/trainers.md", "titan_loader.py"), namespace)  # noqa: S102  (our own docs)
    placement = ss.Placement(dist.get_rank(), dist.get_world_size())
    dataset = ss.ShardDataset(folder, shuffle=True, placement=placement)
    tokens = dataset.decode().map(_as_tokens)
    return namespace["TokenLoader"](ss.ShardLoader(tokens, batch_size=8))


def _as_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": torch.full((9,), int(sample["cls"]))}


def _read_titan(loader: Any, steps: int) -> list[list[int]]:
    seen = []
    for inputs, labels in loader:
        assert inputs["input"].shape == labels.shape == (len(labels), 8)
        seen.append(labels[:, 0].tolist())
        if len(seen) == steps:
            break
    return seen


CHECKS = {saved: (1, 2), loaded: (1, 2), titan_saved: (1, 2), titan_loaded: (1, 2)}
