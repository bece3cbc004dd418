"""The program of test_set_weights_ranks.py: two ranks that change the weights of a mix."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

import shardstream as ss


def read(rank: int, folders: list[str], out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=2)
    parts = {
        name: ss.ShardDataset(folder, shuffle=True).decode().to_tuple("cls")
        for name, folder in zip("ab", folders, strict=True)
    }
    found: dict[str, Any] = {}
    for name in ("same", "other batch", "other weights"):
        loader = ss.ShardLoader(ss.mix(parts, {"a": 1, "b": 0}, samples=80), batch_size=5)
        found[name] = []
        try:
            for number, (ids,) in enumerate(loader):
                found[name].append(ids.tolist())
                if number == 2 + (name == "other batch") * rank:
                    loader.set_weights({"a": 0, "b": 1 + (name == "other weights") * rank})
        except ss.errors.OptionError as error:
            found[name] = str(error)
        dist.barrier()
    (out / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way (see job.py)


if __name__ == "__main__":
    *urls, folder = sys.argv[1:]
    mp.spawn(read, args=(urls, Path(folder)), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]
