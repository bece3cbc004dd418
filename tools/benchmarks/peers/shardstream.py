"""shardstream, shuffled, with default options except those of every `DataLoader`."""

from __future__ import annotations

from typing import Any

import shardstream as ss
from benchmarks.case import Case, Epochs
from benchmarks.loaders import worker_options

FORMAT = "tar"


def make_loader(case: Case) -> Any:
    """Return the loader of a case."""
    dataset = ss.ShardDataset(case.location, shuffle=case.shuffle, seed=0)
    if case.task == "train":
        dataset = _decoded(dataset, case.decoder, case.threads).to_tuple("jpg", "cls")
    elif case.task == "decoded":
        dataset = dataset.decode().to_tuple(*case.fields)
    options = worker_options(case) | {"worker_method": case.worker_method}
    return ss.ShardLoader(dataset, batch_size=case.batch_size, **options)


def _decoded(dataset: Any, decoder: str, threads: int) -> Any:
    from benchmarks import images  # noqa: PLC0415  (imports torch, which the other rows do when they need it)

    # With Pillow as the peers, or with the decoder for users
    jpg, crop = ("rgb8", images.crop_pixels) if decoder == "fast" else (images.load, images.crop)

    def cropped(sample: dict[str, Any]) -> dict[str, Any]:
        return sample | {"jpg": crop(sample["jpg"])}

    return dataset.decode(fields={"jpg": jpg}, threads=threads).map(cropped, threads=threads)


def epochs(case: Case) -> Epochs:
    """Return the function that makes the batches of an epoch."""
    loader = make_loader(case)

    def epoch(number: int) -> Any:
        loader.set_epoch(number)
        return loader

    return epoch
