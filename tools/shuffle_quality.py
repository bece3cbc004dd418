"""Measure shuffle quality against shuffled shards with a buffer, on data sorted by class (the worst case).

    python tools/shuffle_quality.py [--plot docs/shuffle.png] [--costs]

100,000 samples of 100 kB in 100 shards, 100 classes stored in sequence, batches of 64, 8 readers. Two figures:

* spread: mean distance of samples that are neighbours on disk, as a part of the epoch (ideal: one third)
* classes: number of different classes in a batch (ideal: that of a random draw)

"buffer" is the method of stream loaders: each reader shuffles its shards and draws from a buffer of samples.

A second table has orders in which each node keeps its blocks (``nodes=``), with the share of an epoch's samples that the same node
read in the epoch before, and the classes that the poorest node reads in an epoch.

``--costs`` measures ``balance=`` instead, for samples of lognormal lengths n that cost n + n^2 / 8192:

* busy: mean over the steps of the mean cost / the largest cost of the ranks, before and after
* classes by cost: the costs are cut into 100 classes of equal size (the worst case); different ones in a batch of a rank, and in a
  step of 64 samples, against a random draw
* the costs of 8 ranks at some steps, before and after
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import numpy.typing as npt

from shardstream.order import (
    BalancedEpochPlan,
    EpochOrder,
    EpochPlan,
    NodeEpochPlan,
    StepBalance,
    default_block,
    default_window,
)

_SAMPLES, _SHARDS, _CLASSES, _BATCH, _READERS = 100_000, 100, 100, 64, 8
_TOTAL_BYTES = _SAMPLES * 100_000
_USED = _SAMPLES // _BATCH * _BATCH
_SIGMAS, _RANKS = (0.6, 1.0, 1.4), (8, 64, 512)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


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


def lognormal_costs(sigma: float, samples: int) -> Floats:
    """Return the costs of samples with lognormal lengths, of 16 to 32,768."""
    lengths = np.random.default_rng(0).lognormal(6.5, sigma, samples).clip(16, 32768)
    return lengths + lengths**2 / 8192


def costs_of_ranks(costs: Floats, ranks: int, batch: int, steps: int) -> tuple[Floats, Ints]:
    """Return the cost of each rank at each step, shape (steps, ranks), and the samples; ``steps=0`` does not balance."""
    order = EpochOrder(
        nsamples=len(costs),
        batch=batch,
        shuffle=True,
        seed=0,
        lanes=ranks,
        window=640 // batch * batch,
        block=20,
    )
    plan = EpochPlan(order, 0)
    if steps:
        balance = StepBalance(
            costs=costs.astype(np.float32), steps=steps, group_size=None, padded=False
        )
        plan = BalancedEpochPlan(plan, balance)
    numbers = plan.batches(np.arange(order.num_batches // ranks * ranks))
    return costs[numbers].sum(axis=1).reshape(-1, ranks), numbers.reshape(-1, ranks, batch)


def busy(of_ranks: Floats) -> float:
    """Return the mean over the steps of the mean cost / the largest cost of the ranks."""
    return float((of_ranks.mean(axis=1) / of_ranks.max(axis=1)).mean())


def print_costs() -> None:
    """Measure what ``balance=`` gains, and its price in shuffle quality."""
    print(f"{'busy share of the ranks':28}{'before':>8}{'16':>8}{'64':>8}{'256 steps':>11}")
    for batch in (8, 1):
        for sigma in _SIGMAS:
            for ranks in _RANKS:
                costs = lognormal_costs(sigma, max(_SAMPLES, ranks * batch * 256 * 2))
                shares = [busy(costs_of_ranks(costs, ranks, batch, k)[0]) for k in (0, 16, 64, 256)]
                name = f"batch {batch}, sigma {sigma}, {ranks} ranks"
                print(f"{name:28}" + "".join(f"{share:8.3f}" for share in shares))
    costs = lognormal_costs(1.0, _SAMPLES)
    by_cost = np.argsort(np.argsort(costs)) * _CLASSES // _SAMPLES
    print(f"\n{'classes by cost':28}{'ideal':>8}{'before':>8}{'16':>8}{'64':>8}{'256 steps':>11}")
    for batch, ranks in ((8, 8), (4, 16), (2, 32), (1, 64)):
        ideal = np.random.default_rng(1).permutation(_SAMPLES)[:_USED].reshape(-1, ranks, batch)
        found = [ideal, *(costs_of_ranks(costs, ranks, batch, k)[1] for k in (0, 16, 64, 256))]
        for what, size in (("rank", batch), ("step", batch * ranks)):
            name = f"a {what}, {ranks} ranks x batch {batch}"
            kinds = [_kinds(by_cost[numbers].reshape(-1, size)) for numbers in found]
            print(f"{name:28}" + "".join(f"{mean:8.1f}" for mean in kinds))
    for what, steps in (("before", 0), ("after", 64)):
        print(f"\ncosts of 8 ranks x batch 8 at steps 0 to 7, {what} (1 is the mean)")
        of_ranks = costs_of_ranks(costs, 8, 8, steps)[0]
        for row in of_ranks[:8] / of_ranks.mean():
            print("".join(f"{cost:6.2f}" for cost in row))


def _kinds(batches: Ints) -> float:
    return float(np.mean([len(np.unique(batch)) for batch in batches]))


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
    parser.add_argument("--costs", action="store_true", help="measure balance= instead")
    options = parser.parse_args()
    if options.costs:
        print_costs()
        return
    path = options.plot
    window, block = (
        default_window(_SAMPLES, _TOTAL_BYTES, _BATCH),
        default_block(_SAMPLES, _TOTAL_BYTES),
    )
    rows = {
        "ideal": np.random.default_rng(1).permutation(_SAMPLES)[:_USED].astype(np.int64),
        f"shardstream (window {window}, block {block})": ours(window, block),
        f"shardstream (window {window}, block 1)": ours(window, 1),
        "shardstream, balance=": costs_of_ranks(
            lognormal_costs(1.0, _SAMPLES), _READERS, _BATCH, 64
        )[1].ravel(),
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
