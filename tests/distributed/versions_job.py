"""The program of test_versions_ranks.py: two ranks that open different versions of a dataset, then different samples of it, then datasets of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

import shardstream as ss


def read(rank: int, url: str, port: int, out: Path) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    dataset = ss.ShardDataset(url)
    dist.barrier()
    if rank == 0:
        ss.delete(url, numbers=[3])
    dist.barrier()
    if rank == 1:
        dataset = ss.ShardDataset(url)
    part = ss.ShardDataset(url, subset=range(rank, 19, 2))
    own = ss.ShardDataset(f"{url}-{rank}")
    for name, one in (("versions", dataset), ("samples", part), ("own", own)):
        text = ""
        try:
            next(iter(ss.ShardLoader(one.decode(), batch_size=4)))
        except ss.errors.OptionError as error:
            text = str(error)
        (out / f"{name}-{rank}.txt").write_text(text)
        dist.barrier()


if __name__ == "__main__":
    folder, number, results = sys.argv[1:]
    mp.spawn(read, args=(folder, int(number), Path(results)), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]
