"""The program of test_follow_ranks.py: two ranks that follow a dataset; rank 0 appends to it, and serves their store."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

import shardstream as ss


def append(url: str, first: int, last: int) -> None:
    with ss.ShardWriter(url, append=True) as writer:
        for number in range(first, last):
            writer.write({"__key__": f"{number:06d}", "cls": number})


def read(rank: int, url: str, port: int, out: Path) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    dataset = ss.ShardDataset(url, version=ss.loader.Follow(poll_s=0.01, timeout_s=5))
    loader = ss.ShardLoader(dataset.decode(), batch_size=4)
    found: list[list[list[int]]] = [[]]
    for batch in loader:
        found[0].append(batch["cls"].tolist())
        if len(found[0]) == 2:  # the last one
            break
    dist.barrier()
    if not rank:
        append(url, 11, 16)
    dist.barrier()
    found += [[batch["cls"].tolist() for batch in loader] for _ in range(2)]
    found.append([[loader.state_dict()["consumed"]]])
    text = ""
    if rank:  # alone
        try:
            next(iter(loader))
        except ss.errors.UnfinishedError as error:
            text = str(error)
    fork = ss.ShardDataset(
        str(out / str(rank) / "fork"), version=ss.loader.Follow()
    )  # which begins as the other
    refusal = ""
    try:
        next(iter(ss.ShardLoader(fork.decode(), batch_size=4)))
    except ss.errors.OptionError as error:
        refusal = str(error)
    dist.barrier()
    (out / f"{rank}.json").write_text(json.dumps([*found, text, refusal]))
    os._exit(0)  # at once, and with it the store


if __name__ == "__main__":
    folder, number, results = sys.argv[1:]
    mp.spawn(read, args=(folder, int(number), Path(results)), nprocs=2)  # type: ignore[attr-defined,no-untyped-call]
