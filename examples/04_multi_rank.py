"""Train on several ranks: each sample goes to one rank, and all ranks have the same number of steps.

You learn: once ``torch.distributed`` is initialised (or RANK and WORLD_SIZE are set, as torchrun does) there is nothing to
configure. Every rank computes the same plan and reads its part, without a coordinator. With 1,000 samples on 3 ranks the last
step cannot be split evenly: ``order=ss.OrderOptions(remainder=)`` controls what happens then.

The ranks here are real processes, joined by gloo; each reads with its own worker.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import shardstream as ss

WORLD_SIZE = 3
SAMPLES = 1000


def read_epoch(loader: ss.ShardLoader) -> tuple[list[int], list[int]]:
    """Return the samples of all ranks in this epoch, and the number of steps of each."""
    mine = [ids.tolist() for (ids,) in loader]
    parts: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, mine)
    samples = [number for part in parts for batch in part for number in batch]
    return samples, [len(part) for part in parts]


def run_rank(rank: int, scratch: str) -> None:
    """Run one rank: read its part, then train with the others."""
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch}/meeting", rank=rank, world_size=WORLD_SIZE
    )
    for remainder in ("pad", "drop", "keep"):
        dataset = ss.ShardDataset(
            f"{scratch}/data", shuffle=True, order=ss.OrderOptions(remainder=remainder)
        )
        loader = ss.ShardLoader(dataset.decode().to_tuple("cls"), batch_size=16, num_workers=1)
        samples, steps = read_epoch(loader)
        seen = Counter(samples)
        if rank == 0:
            twice = sum(count - 1 for count in seen.values())
            print(
                f"{remainder}: {len(seen)} of {SAMPLES} samples, {twice} of them twice; steps {steps}"
            )
        assert set(steps) == {len(loader)}  # equal on all ranks, so none hangs in a collective
        if remainder == "pad":  # every sample; at most W - 1 are repeated
            assert len(seen) == SAMPLES
            assert len(samples) - SAMPLES < WORLD_SIZE
        elif remainder == "drop":  # no repeats; at most W - 1 are dropped
            assert len(samples) == len(seen)
            assert SAMPLES - len(seen) < WORLD_SIZE
        else:  # exactly once
            assert sorted(samples) == list(range(SAMPLES))

    # The usual training loop.
    model = DistributedDataParallel(nn.Linear(1, 1))
    for (ids,) in ss.ShardLoader(
        ss.ShardDataset(f"{scratch}/data", shuffle=True).decode().to_tuple("cls"), batch_size=100
    ):
        model(ids[:, None].float() / SAMPLES).mean().backward()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        with ss.ShardWriter(Path(scratch, "data"), max_samples=90) as writer:
            for number in range(SAMPLES):
                writer.write({"__key__": f"{number:04d}", "cls": number})
        torch.set_num_threads(1)
        start_processes(run_rank, (scratch,), WORLD_SIZE, start_method="fork")  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
