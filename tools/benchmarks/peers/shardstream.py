"""shardstream as it comes: shuffled, all else by default."""

from __future__ import annotations

from typing import Any

import shardstream as ss
from benchmarks import images
from benchmarks.case import Case, Epochs
from shardstream.read import fast

FORMAT = "tar"


def make_loader(case: Case) -> Any:
    """Return the loader of a case."""
    dataset = ss.ShardDataset(case.location, shuffle=True, seed=0)
    if case.task == "train":
        if case.decoder == "pil":
            fast.simplejpeg = None  # as if the extra were not installed: Pillow, as the peers
        dataset = dataset.decode("pil").map_dict(jpg=images.crop).to_tuple("jpg", "cls")
    return ss.ShardLoader(
        dataset,
        batch_size=case.batch_size,
        num_workers=case.workers,
        persistent_workers=case.workers > 0,
    )


def epochs(case: Case) -> Epochs:
    """Return what makes the batches of an epoch."""
    loader = make_loader(case)

    def epoch(number: int) -> Any:
        loader.set_epoch(number)
        return loader

    return epoch
