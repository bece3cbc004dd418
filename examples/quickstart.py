"""Train a network on images from S3: pack, verify, stream, train.

The data are real: the 1,797 handwritten digits of the UCI repository that come with scikit-learn, as PNG files of 8 x 8 grey
pixels. They are packed to tar shards in a train and a val split, sent to S3, checked there, and streamed into the training of
a small network, which must then classify 95 % of the held-out digits correctly.

    python examples/quickstart.py                          starts a temporary S3 server
    python examples/quickstart.py --dest /tmp/digits       on disk
    python examples/quickstart.py --dest s3://bucket/digits     your own server, configured by the AWS_* variables
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from embedded_s3 import embedded_s3
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from torch import Tensor, nn

import shardstream as ss

TARGET = 0.95  # of the held-out digits
BATCH_SIZE = 64
EPOCHS = 8


def samples() -> list[dict[str, object]]:
    """Return the digits: an image, which is written as PNG, and its label."""
    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)  # 16 is white there
    return [
        {"png": image, "cls": int(label)}
        for image, label in zip(pixels, digits.target, strict=True)
    ]


def write(dest: str, *, overwrite: bool, bar: Progress) -> None:
    """Pack the digits to ``dest/train`` and ``dest/val``, and verify the result."""
    task = bar.add_task("pack", total=None)
    report = ss.pack(
        samples(),
        dest,
        name="digits",
        split={"train": 0.8, "val": 0.2},
        max_samples=250,
        overwrite=overwrite,
        progress=lambda done: bar.update(task, completed=done.samples, total=done.total),
    )
    bar.update(task, completed=report.samples, total=report.samples)
    for split in report.splits:
        bar.print(
            f"[green]✓[/] packed    {split.samples:,} digits, {split.shards} shards: {split.url}"
        )
        found = ss.verify(split.url)
        if found.errors:
            raise SystemExit("\n".join(map(str, found.errors)))
        bar.print(
            f"[green]✓[/] verified  {found.samples:,} digits, {found.bytes / 1000:,.0f} kB read again"
        )
    bar.remove_task(task)


def to_input(sample: dict[str, Any]) -> tuple[Tensor, int]:
    """Return the network's input, shape (1, 8, 8), -1 to 1, and the label."""
    return torch.from_numpy(sample["png"])[None] * 2 - 1, sample["cls"]


def open_split(url: str, *, shuffle: bool) -> ss.ShardLoader:
    """Return the batches of one split."""
    dataset = ss.ShardDataset(url, shuffle=shuffle).decode("l").map(to_input)
    return ss.ShardLoader(dataset, batch_size=BATCH_SIZE, num_workers=2, persistent_workers=True)


def build() -> nn.Module:
    """Return a small network: two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip


def train(model: nn.Module, loader: ss.ShardLoader, bar: Progress) -> None:
    """Train for some epochs, each in a different order."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    total = 0.0
    task = bar.add_task("train", total=EPOCHS * len(loader))
    for epoch in range(EPOCHS):
        total = 0.0
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            bar.update(task, advance=1, description=f"train, epoch {epoch + 1}/{EPOCHS}")
    bar.remove_task(task)
    bar.print(
        f"[green]✓[/] trained   {EPOCHS} epochs, {EPOCHS * len(loader)} steps, loss {total / len(loader):.3f}"
    )


def accuracy(model: nn.Module, loader: ss.ShardLoader) -> tuple[int, int]:
    """Return the number of correctly classified digits, and of all digits."""
    known = count = 0
    with torch.no_grad():
        for images, labels in loader:
            known += int((model(images).argmax(1) == labels).sum())
            count += len(labels)
    return known, count


def main() -> int:
    """Run all steps; the exit code is 0 if the accuracy is high enough."""
    parser = argparse.ArgumentParser(description="Pack, verify, stream, train.")
    parser.add_argument("--dest", help="folder or s3:// URL; by default a server is started")
    parser.add_argument("--overwrite", action="store_true", help="replace what is at --dest")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is tiny, and the workers need the other cores
    start_s = time.monotonic()
    console = Console(highlight=False)
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with ExitStack() as stack:
        dest = args.dest or stack.enter_context(embedded_s3()) + "/digits"
        console.print(f"[bold]shardstream quickstart[/]: handwritten digits by way of {dest}")
        bar = stack.enter_context(Progress(*columns, console=console, transient=True))
        write(dest, overwrite=args.overwrite, bar=bar)
        model = build()
        train(model, open_split(f"{dest}/train", shuffle=True), bar)
        known, count = accuracy(model, open_split(f"{dest}/val", shuffle=False))
    ok = known >= TARGET * count
    console.print(
        f"[{'green' if ok else 'red'}]{'✓' if ok else '✗'}[/] accuracy  [bold]{known / count:.1%}[/] of {count} held-out digits "
        f"(at least {TARGET:.0%} expected), {time.monotonic() - start_s:.0f} s in all"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ss.ShardStreamError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
