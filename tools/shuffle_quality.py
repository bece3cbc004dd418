"""Measure shuffle quality against shuffled shards with a buffer, on data sorted by class (the worst case).

    python tools/shuffle_quality.py [--plot docs/shuffle.png]

100,000 samples of 100 kB in 100 shards, 100 classes stored in sequence, batches of 64, 8 readers. Two figures:

* spread: mean distance of samples that are neighbours on disk, as a part of the epoch (ideal: one third)
* classes: number of different classes in a batch (ideal: that of a random draw)

"buffer" is the method of stream loaders: each reader shuffles its shards and draws from a buffer of samples.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.order import EpochOrder, EpochPlan, default_block, default_window

_SAMPLES, _SHARDS, _CLASSES, _BATCH, _READERS = 100_000, 100, 100, 64, 8
_TOTAL_BYTES = _SAMPLES * 100_000
_USED = _SAMPLES // _BATCH * _BATCH

Ints = npt.NDArray[np.int64]


def ours(window: int, block: int) -> Ints:
    """Return an epoch in the order of the plan."""
    order = EpochOrder(
        nsamples=_SAMPLES,
        batch=_BATCH,
        shuffle=True,
        seed=0,
        lanes=_READERS,
        window=window,
        block=block,
    )
    return EpochPlan(order, 0).batches(np.arange(order.num_batches)).ravel()


def buffered(size: int) -> Ints:
    """Return an epoch of shuffled shards with a buffer in each reader, with alternating batches."""
    rng = np.random.default_rng(0)
    per_shard = _SAMPLES // _SHARDS
    shards = rng.permutation(_SHARDS)
    streams = []
    for reader in range(_READERS):
        stream = (shards[reader::_READERS, None] * per_shard + np.arange(per_shard)).ravel()
        buffer, out = list(stream[:size]), []
        for sample in stream[size:]:
            place = int(rng.integers(len(buffer)))
            out.append(buffer[place])
            buffer[place] = sample
        rest = np.array(buffer)
        rng.shuffle(rest)
        streams.append(np.concatenate((np.array(out, dtype=np.int64), rest)))
    rounds = max(len(stream) for stream in streams) // _BATCH
    batches = [
        stream[turn * _BATCH : (turn + 1) * _BATCH] for turn in range(rounds) for stream in streams
    ]
    return np.concatenate([batch for batch in batches if len(batch) == _BATCH])


def spread(epoch: Ints) -> float:
    """Return the mean distance in the epoch of samples that are neighbours on disk, as a part of its length."""
    place = np.full(_SAMPLES, -1)
    place[epoch] = np.arange(len(epoch))
    both = (place[:-1] >= 0) & (place[1:] >= 0)
    return float(np.abs(np.diff(place))[both].mean() / len(epoch))


def classes(epoch: Ints) -> Ints:
    """Return the number of classes in each batch."""
    batches = (epoch * _CLASSES // _SAMPLES)[: len(epoch) // _BATCH * _BATCH].reshape(-1, _BATCH)
    return np.array([len(np.unique(batch)) for batch in batches])


def plot(rows: dict[str, Ints], path: str) -> None:
    """Draw the distribution of classes per batch."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (only for the picture)

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes: Any = figure.subplots()
    for name, epoch in rows.items():
        counts = np.bincount(classes(epoch), minlength=_BATCH + 1)
        axes.plot(
            np.arange(_BATCH + 1),
            counts / counts.sum(),
            label=f"{name}: mean {classes(epoch).mean():.1f}",
            marker=".",
        )
    axes.set(
        xlabel=f"different classes in a batch of {_BATCH}",
        ylabel="part of the batches",
        title=f"{_CLASSES} classes stored one after the other: how mixed are batches?",
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the classes a batch")
    path = parser.parse_args().plot
    window, block = (
        default_window(_SAMPLES, _TOTAL_BYTES, _BATCH),
        default_block(_SAMPLES, _TOTAL_BYTES),
    )
    rows = {
        "ideal": np.random.default_rng(1).permutation(_SAMPLES)[:_USED].astype(np.int64),
        f"shardstream (window {window}, block {block})": ours(window, block),
        f"shardstream (window {window}, block 1)": ours(window, 1),
        f"shards + buffer of {window}": buffered(window),
        "shards + buffer of 5000": buffered(5000),
    }
    print(f"{'':44}{'spread':>8}{'classes':>9}{'worst':>7}")
    for name, epoch in rows.items():
        counts = classes(epoch)
        print(f"{name:44}{spread(epoch):8.3f}{counts.mean():9.1f}{counts.min():7}")
    if path:
        plot(rows, path)


if __name__ == "__main__":
    main()
