"""The program of test_late_ranks.py: a dataset and loaders that are made before the ranks of torch.distributed are known."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

import shardstream as ss


def read(rank: int, dataset: ss.ShardDataset, out: Path) -> None:
    made = {
        "no workers": ss.ShardLoader(dataset, batch_size=5),
        "persistent worker": make_loader(dataset),
    }
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=2)
    made["made later"] = ss.ShardLoader(dataset, batch_size=5)
    seen: dict[str, Any] = {}
    for name, loader in made.items():
        seen[name] = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            batches = [labels.tolist() for (labels,) in loader]
            assert len(loader) == len(batches), name
            seen[name].append(batches)
    (out / f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way (see job.py)


def make_loader(dataset: ss.ShardDataset) -> ss.ShardLoader:
    # spawned, as all workers of a spawned process are
    return ss.ShardLoader(dataset, batch_size=5, num_workers=1, persistent_workers=True)


def main(url: str, out: str) -> None:
    dataset = ss.ShardDataset(url, shuffle=True).decode().to_tuple("cls")
    mp.spawn(read, args=(dataset, Path(out)), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main(*sys.argv[1:])
