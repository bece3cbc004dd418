"""Measure batches to a GPU: torch's DataLoader with pin_memory, ShardLoader with pin_memory, ShardLoader with device.

    python tools/bench_device.py [--samples N] [--side PIXELS] [--workers N] [--epochs N]

Each row is the median of the epochs after a first one, in samples per second; "step" adds a matrix product for each batch, which
copies can overlap.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import shardstream as ss
from shardstream.testing import make_shards

_BATCH = 64


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument(
        "--side", type=int, default=224, help="of the arrays: SIDE x SIDE x 3, uint8"
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5)
    return parser.parse_args()


def loaders(folder: str, workers: int) -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield the names of the ways to the GPU, with their loaders."""
    dataset = (
        ss.ShardDataset(folder, shuffle=True, order=ss.OrderOptions(microbatch=_BATCH))
        .decode()
        .to_tuple("npy")
    )
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True}
    yield "DataLoader, pin_memory=True", DataLoader(dataset, _BATCH, pin_memory=True, **options)
    yield "ShardLoader", ss.ShardLoader(dataset, _BATCH, **options)
    yield (
        "ShardLoader, pin_memory=True",
        ss.ShardLoader(dataset, _BATCH, pin_memory=True, **options),
    )
    yield "ShardLoader, device='cuda'", ss.ShardLoader(dataset, _BATCH, device="cuda", **options)


def samples_per_s(loader: Iterable[Any], epochs: int, work: torch.Tensor | None) -> float:
    """Return the median over the epochs; all batches arrive on the GPU and are used there."""
    rates = []
    for _ in range(epochs + 1):
        began, samples = time.perf_counter(), 0
        total = torch.zeros((), device="cuda")
        for (batch,) in loader:
            total += batch.to("cuda", non_blocking=True).sum()
            if work is not None:
                total += (work @ work).mean()
            samples += len(batch)
        total.item()  # waits for the GPU
        rates.append(samples / (time.perf_counter() - began))
    return statistics.median(rates[1:])


def main() -> None:
    """Print the table, or that there is no GPU."""
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return
    pixels = np.random.default_rng(0).integers(
        0, 256, (arguments.side, arguments.side, 3), np.uint8
    )
    samples = ({"__key__": f"{n:06d}", "npy": pixels} for n in range(arguments.samples))
    work = torch.rand(4096, 4096, device="cuda")
    print(f"{torch.cuda.get_device_name()}, {arguments.workers} workers, batches of {_BATCH}")
    with tempfile.TemporaryDirectory() as folder:
        data = make_shards(folder, samples=list(samples), per_shard=512)
        for name, loader in loaders(data, arguments.workers):
            plain = samples_per_s(loader, arguments.epochs, None)
            step = samples_per_s(loader, arguments.epochs, work)
            print(f"{name:30} {plain:10,.0f} samples/s   step {step:10,.0f} samples/s")


if __name__ == "__main__":
    main()
