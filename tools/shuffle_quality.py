"""Measure shuffle quality against shuffled shards with a buffer, on data sorted by class (the worst case).

    python tools/shuffle_quality.py [--plot docs/shuffle.png]

100,000 samples of 100 kB in 100 shards, 100 classes stored in sequence, batches of 64, 8 readers. Two figures:

* spread: mean distance of samples that are neighbours on disk, as a part of the epoch (ideal: one third)
* classes: number of different classes in a batch (ideal: that of a random draw)

"buffer" is the method of stream loaders: each reader shuffles its shards and draws from a buffer of samples.

A second table has orders in which each node keeps its blocks (``nodes=``), with the share of an epoch's samples that the same node
read in the epoch before, and the classes that the poorest node reads in an epoch.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.order import (
    EpochOrder,
    EpochPlan,
    NodeEpochPlan,
    default_block,
    default_window,
)

_SAMPLES, _SHARDS, _CLASSES, _BATCH, _READERS = 100_000, 100, 100, 64, 8
_TOTAL_BYTES = _SAMPLES * 100_000
_USED = _SAMPLES // _BATCH * _BATCH

Ints = npt.NDArray[np.int64]


def ours(window: int, block: int, *, nodes: int = 1, exchange: float = 0, epoch: int = 0) -> Ints:
    """Return an epoch in the order of the plan."""
    order = EpochOrder(
        nsamples=_SAMPLES,
        batch=_BATCH,
        shuffle=True,
        seed=0,
        lanes=_READERS,
        window=window,
        block=block,
        nodes=nodes,
        exchange=exchange,
    )
    plan = EpochPlan(order, epoch) if nodes == 1 else NodeEpochPlan(order, epoch)
    return plan.batches(np.arange(order.num_batches)).ravel()


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


def by_node(epoch: Ints, nodes: int) -> list[Ints]:
    """Return the samples of each node, without those of the last batches: the batches of a step are split evenly."""
    batches = epoch.reshape(-1, _BATCH)[: _USED // _BATCH // _READERS * _READERS]
    numbers = np.arange(len(batches)) % nodes
    return [batches[numbers == node].ravel() for node in range(nodes)]


def print_nodes(window: int, block: int) -> None:
    """Print how well orders with nodes shuffle, and how much of an epoch the same nodes have read before."""
    print(f"\n{'':44}{'spread':>8}{'classes':>9}{'worst':>7}{'of node':>9}{'again':>7}")
    for nodes in (2, 4, 8):
        plain = [ours(window, block, epoch=epoch) for epoch in (0, 1)]
        orders = {f"{nodes} nodes, without nodes=": plain}
        for exchange in (0.0, 0.1, 0.5, 1.0):
            orders[f"nodes={nodes}, exchange={exchange}"] = [
                ours(window, block, nodes=nodes, exchange=exchange, epoch=epoch) for epoch in (0, 1)
            ]
        for name, (first, second) in orders.items():
            before, after = by_node(first, nodes), by_node(second, nodes)
            again = np.mean(
                [np.isin(new, old).mean() for old, new in zip(before, after, strict=True)]
            )
            fewest = min(len(np.unique(own * _CLASSES // _SAMPLES)) for own in after)
            counts = classes(second)
            print(
                f"{name:44}{spread(second):8.3f}{counts.mean():9.1f}{counts.min():7}{fewest:9}{again:7.2f}"
            )


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
    print_nodes(window, block)
    if path:
        plot(rows, path)


if __name__ == "__main__":
    main()
