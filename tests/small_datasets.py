"""Small datasets, and helpers that read them in different ways."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

import shardstream as ss
from shardstream.testing import make_shards

# torch warns if there are more workers than cores; these tests fork
# while threads run on purpose.
FEW_CORES = "ignore:This DataLoader will create:UserWarning"
# At the end of an epoch a manifest is read for 5 s at most; a server that fails a third of the requests may fail all of these.
UNCHECKED = "ignore:cannot check whether the dataset was replaced:UserWarning"


def numbered(folder: Path | str, nsamples: int = 100, per_shard: int = 15, **options: Any) -> str:
    """Write a dataset whose sample i has ``cls`` i and its own small array."""
    samples = [
        {"__key__": f"{i:06d}", "cls": i, "npy": np.full((2, 3), i, dtype=np.int32)}
        for i in range(nsamples)
    ]
    return make_shards(folder, samples=samples, per_shard=per_shard, **options)


def grouped(**options: Any) -> dict[str, Any]:
    """Return the options of a dataset, of which those of `OrderOptions`, `ReadOptions` and `Weights` are given by their own names."""
    for name, kind in {"order": ss.OrderOptions, "read": ss.ReadOptions}.items():
        own = {one.name: options.pop(one.name) for one in fields(kind) if one.name in options}
        if own:
            options[name] = replace(options.get(name) or kind(), **own)
    draw = {name: options.pop(name) for name in ("replacement", "num_samples") if name in options}
    if draw:
        options["weights"] = ss.Weights(options["weights"], **draw)
    return options


def loader(
    folder: str | Path,
    batch_size: int | None = 8,
    *,
    num_workers: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> ss.ShardLoader:
    """Return a loader over a dataset without steps, as most tests need."""
    dataset = ss.ShardDataset(str(folder), **grouped(**options)).decode()
    return ss.ShardLoader(dataset, batch_size, num_workers=num_workers, drop_last=drop_last)


def labels(batches: Iterable[Any]) -> list[list[int]]:
    """Return the ``cls`` of each sample, by batch."""
    return [batch["cls"].tolist() for batch in batches]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [label for batch in batches for label in batch]


def take(batches: Iterable[Any], count: int) -> list[Any]:
    """Return the first batches; the loader stops during its epoch."""
    return list(islice(batches, count))


def all_ranks(world_size: int, folder: str, **options: Any) -> Iterator[ss.ShardLoader]:
    for rank in range(world_size):
        yield loader(folder, placement=ss.Placement(rank, world_size), **options)


def picture(mode: str = "RGB", size: tuple[int, int] = (13, 9), *, fmt: str = "PNG") -> bytes:
    """Return the bytes of an image file whose pixels all differ."""
    shape = (size[1], size[0], len(mode)) if len(mode) > 1 else (size[1], size[0])
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    stream = io.BytesIO()
    PIL.Image.fromarray(noise, mode=None).save(stream, fmt)
    return stream.getvalue()
