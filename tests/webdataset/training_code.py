"""Run the loader code of open_clip or timm over small shards; print the samples that one epoch gives, as JSON.

Usage: ``python training_code.py open_clip|timm FOLDER_OF_ITS_PACKAGE FOLDER_OF_SHARDS NUM_SAMPLES WORLD_SIZE webdataset|shardstream``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

SHARDS = "shard-{000000..000007}.tar"
WORKERS, BATCH = 2, 5


def read_open_clip(package: Path, shards: str, num_samples: int, world_size: int) -> list[int]:
    sys.path.insert(0, str(package / "open_clip_train"))
    data: Any = importlib.import_module("data")
    args = SimpleNamespace(
        train_data=f"{shards}/{SHARDS}", train_num_samples=num_samples, train_data_upsampling_factors=None, dataset_resampled=False,
        seed=0, workers=WORKERS, batch_size=BATCH, world_size=world_size,
    )  # fmt: skip
    loader = data.get_wds_dataset(
        args,
        lambda image: torch.tensor(image.size),
        True,
        tokenizer=lambda text: [torch.tensor(int(text))],
    ).dataloader
    return [int(number) for _, texts in loader for number in texts]


def read_timm(package: Path, shards: str, num_samples: int, world_size: int) -> list[int]:
    for name in (
        "timm",
        "timm.data",
        "timm.data.readers",
    ):  # without their __init__, which imports torchvision
        module = types.ModuleType(name)
        module.__path__ = [str(package.joinpath(*name.split(".")))]
        sys.modules[name] = module
    reader: Any = importlib.import_module("timm.data.readers.reader_wds").ReaderWds(
        shards,
        split=f"{SHARDS}|{num_samples}",
        is_training=True,
        batch_size=BATCH,
        sample_shuffle_size=20,
        sample_initial_size=5,
    )
    reader.dist_rank, reader.dist_num_replicas = int(os.environ["RANK"]), world_size
    reader.set_loader_cfg(WORKERS)

    class Dataset(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return (target for _, target in reader)

    return [
        int(number)
        for numbers in DataLoader(Dataset(), BATCH, num_workers=WORKERS)
        for number in numbers
    ]


if __name__ == "__main__":
    _, name, package, shards, num_samples, world_size, reader = sys.argv
    if reader == "shardstream":
        importlib.import_module("shim")
    read = {"open_clip": read_open_clip, "timm": read_timm}[name]
    json.dump(read(Path(package), shards, int(num_samples), int(world_size)), sys.stdout)
