"""Checks of test_trainers.py: torch.distributed.checkpoint, on one rank and on two, and with the other number of ranks.

A training saves after some steps with `saved`; `loaded` continues the one that had the other number of ranks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import shardstream as ss
from tests.distributed.trainers_job import document_block

STEPS = 4
TOKENS, DOCUMENTS = 8, 128
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


def titan_saved(_: str, out: Path) -> list[list[int]]:
    """Read an epoch and some steps of the next one by the loader of docs/trainers.md for torchtitan, then save it."""
    loader = _make_titan(out)
    seen = _read_titan(loader, len(loader.loader) + STEPS)
    save({"dataloader": loader}, checkpoint_id=out)
    return seen


def titan_loaded(_: str, out: Path) -> list[list[int]]:
    """Read the rest of that epoch on another number of ranks."""
    loader = _make_titan(out)
    other = out.with_name(f"titan_saved-{3 - dist.get_world_size()}")
    load({"dataloader": loader}, checkpoint_id=other)
    return _read_titan(loader, loader.loader.batches_left)


class _Configurable:
    """As torchtitan's: `Config.build(**runtime)` makes the class in which the Config is."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Options."""


def _make_titan(out: Path) -> Any:
    folder = f"{out}-tokens-{dist.get_rank()}"
    documents = ({"npy": np.full(TOKENS + 1, number)} for number in range(DOCUMENTS))
    ss.pack(documents, folder, max_samples=16, columns={"n": "npy.len"})
    module = ModuleType("torchtitan.components.data.loader")
    module.BaseDataLoader = _Configurable  # type: ignore[attr-defined]
    parts = module.__name__.split(".")
    for end in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(parts[end - 1]))
    sys.modules[module.__name__] = module
    page = sys.modules["titan_loader"] = ModuleType("titan_loader")  # where its dataclass looks
    exec(document_block("docs/trainers.md", "titan_loader.py"), page.__dict__)  # noqa: S102  (our own docs)
    loader = page.ShardDataLoader
    config = loader.Config(url=folder, num_workers=0)
    return loader(
        config,
        dp_world_size=dist.get_world_size(),
        dp_rank=dist.get_rank(),
        tokenizer=None,
        max_context_length=TOKENS,
        num_tokens_per_batch=8 * TOKENS,
    )


def _read_titan(loader: Any, steps: int) -> list[list[int]]:
    """Return the number of each row: a document has one token that is repeated, and fills a row."""
    seen = []
    for inputs, labels in loader:
        tokens = inputs["input"]
        assert tokens.shape == inputs["positions"].shape == labels.shape == (8 * TOKENS,)
        inside = torch.arange(len(tokens) - 1) % TOKENS != TOKENS - 1
        assert ((labels[:-1] == tokens[1:]) | (labels[:-1] == -100))[inside].all()
        seen.append(tokens[::TOKENS].tolist())
        if len(seen) == steps:
            break
    return seen


CHECKS = {saved: (1, 2), loaded: (1, 2), titan_saved: (1, 2), titan_loaded: (1, 2)}
