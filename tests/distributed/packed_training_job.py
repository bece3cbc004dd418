"""A training of a small transformer on packed rows, run by torchrun: prints the loss of each step; saves the model and the loader after each."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import shardstream as ss

LENGTH, BATCH, VOCABULARY, WIDTH = 64, 8, 32, 32


class Transformer(torch.nn.Module):
    """One layer of attention within documents."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.places = torch.nn.Embedding(LENGTH, WIDTH)
        self.query, self.key, self.value, self.head = (
            torch.nn.Linear(WIDTH, size) for size in (WIDTH, WIDTH, WIDTH, VOCABULARY)
        )

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the sum of the losses of all tokens."""
        segments = batch["segments"]
        x = self.tokens(batch["npy"].long()) + self.places(batch["positions"])
        same_document = segments[:, :, None] == segments[:, None, :]
        mask = same_document & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        attended = functional.scaled_dot_product_attention(
            self.query(x), self.key(x), self.value(x), attn_mask=mask
        )
        scores = self.head(x + attended)[:, :-1]
        return functional.cross_entropy(
            scores.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )


def make_loader(url: str, world_size: int) -> ss.ShardLoader:
    order = ss.OrderOptions(lanes=BATCH, microbatch=1)
    dataset = ss.ShardDataset(url, shuffle=True, order=order).decode()
    rows = dataset.pack_sequences("npy", LENGTH, lengths="n", labels=True, repack=True)
    return ss.ShardLoader(rows, batch_size=BATCH // world_size, num_workers=1, drop_last=True)


def train(url: str, out: Path, epochs: int, kill_after: int | None) -> None:
    """Train from the last checkpoint, or from the start."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(Transformer().double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader, checkpoint, step = make_loader(url, world_size), out / "checkpoint.pt", 0
    if checkpoint.exists():
        saved: dict[str, Any] = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
    while loader.epoch < epochs:
        for batch in loader:
            loss = model(batch) / (BATCH * LENGTH)
            optimizer.zero_grad()
            (loss * world_size).backward()  # gradients are averaged over ranks
            optimizer.step()
            step += 1
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                with (out / "losses.jsonl").open("a") as file:
                    file.write(json.dumps([step, total.item()]) + "\n")
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(
                    state | {"loader": loader.state_dict(), "step": step}, out / "checkpoint.new"
                )
                (out / "checkpoint.new").replace(checkpoint)
            if step == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--kill-after", type=int)
    given = parser.parse_args()
    train(given.url, given.out, given.epochs, given.kill_after)
