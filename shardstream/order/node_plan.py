"""Compute an order in which each node keeps its blocks: what its cache holds from one epoch serves the next.

The dataset is cut into areas of a few blocks, which are dealt to the nodes once, by the seed. An epoch shuffles the blocks of each node,
exchanges a share of them, and then continues as `EpochPlan` does: lanes of whole batches, windows, shuffled samples.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain

import numpy as np

from shardstream.order.epoch_plan import EpochOrder, EpochPlan
from shardstream.order.permutation import Ints, derive_key, derive_keys, permute

_AREA_BLOCKS = 4  # a cache keeps whole MiB, so a single block of 2 MiB would cost 3
# Enough to give each node a fair sample of the data; few enough for a table.
_LEAST_AREAS, _MOST_AREAS = 1024, 65_536
_AREAS, _SHORT, _BLOCKS, _TURNS, _EXCHANGE = 10, 11, 12, 13, 14  # purposes of the random keys


class NodeEpochPlan(EpochPlan):
    """The batches of one epoch of an order with nodes.

    The samples of all nodes, one node after the other, are a sequence that is the same in each epoch. Node h has the places from
    ``bounds[h]`` to ``bounds[h + 1]``: whole blocks, and at both ends parts of blocks, which together get a random place in the epoch.

    Args:
        order: Parameters of the order.
        epoch: Epoch number, from 0.
    """

    def __init__(self, order: EpochOrder, epoch: int) -> None:
        super().__init__(order, epoch)
        numbers = np.arange(order.nodes + 1, dtype=np.int64)
        size, extra = divmod(order.nsamples, order.nodes)
        self._bounds = numbers * size + np.minimum(numbers, extra)
        # Samples of each node in batches of its own.
        self._batched = order.num_batches // order.nodes * order.batch
        starts, ends = self._bounds[:-1], self._bounds[1:]
        self._firsts = -(-starts // order.block)
        self._counts = np.maximum(ends // order.block - self._firsts, 0)
        self._short_sizes = ends - starts - self._counts * order.block
        key = derive_key(order.seed, epoch)
        short_keys = derive_keys(derive_key(key, _SHORT), numbers[:-1])
        places = (short_keys % (self._counts + 1).astype(np.uint64)).astype(np.int64)
        self._short_starts = places * order.block
        self._block_keys = derive_keys(derive_key(key, _BLOCKS), numbers[:-1])
        self._turn_keys = derive_keys(derive_key(key, _TURNS), numbers[:-1])
        self._exchange_key = derive_key(key, _EXCHANGE)
        self._exchanged = int(order.exchange * int(self._counts.min()))

    def rest(self, start: int) -> Ints:
        """Return the samples of the batches from ``start`` on, with the last incomplete batch, sorted by node, shape (n,)."""
        order, count = self.order, self.order.num_batches // self.order.nodes * self.order.nodes
        numbers = np.arange(start, count, dtype=np.int64)
        leftover = np.arange(max(start, count) * order.batch, order.nsamples, dtype=np.int64)
        samples = np.concatenate((self.batches(numbers).ravel(), self._samples_at(leftover)))
        nodes = (np.repeat(numbers % order.nodes, order.batch), self._find(leftover)[0])
        return samples[np.argsort(np.concatenate(nodes), kind="stable")]

    def _find(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the node of each place of the epoch, and which of the node's samples it is; the last samples alternate."""
        nodes, size = self.order.nodes, self._batched
        node, place = np.divmod(places, max(1, size))
        turn, node_of_rest = np.divmod(places - nodes * size, nodes)
        is_rest = places >= nodes * size
        return np.where(is_rest, node_of_rest, node), np.where(is_rest, size + turn, place)

    def _samples_at(self, places: Ints) -> Ints:
        order, (node, place) = self.order, self._find(places)
        start, short = place - self._short_starts[node], self._short_sizes[node]
        is_short = (start >= 0) & (start < short)
        block, offset = np.divmod(np.where(start < 0, place, place - short), order.block)
        giver, block = self._stored_blocks(node, np.where(is_short, 0, block))
        # Parts of blocks at both ends of the node's places.
        head = self._firsts[node] * order.block - self._bounds[node]
        gap = np.where(start < head, 0, self._counts[node] * order.block)
        in_sequence = np.where(
            is_short,
            self._bounds[node] + start + gap,
            (self._firsts[giver] + block) * order.block + offset,
        )
        return _stored(in_sequence, order)

    def _stored_blocks(self, nodes: Ints, blocks: Ints) -> tuple[Ints, Ints]:
        """Return for the blocks of nodes in this epoch the nodes that keep them, and which blocks of these they are."""
        counts = np.maximum(self._counts, 1)
        most = int(counts.max())
        # Many samples are of one block.
        pairs, inverse = np.unique(nodes * most + blocks, return_inverse=True)
        nodes, blocks = np.divmod(pairs, most)
        if self._exchanged:
            turns = permute(blocks, counts[nodes], self._turn_keys[nodes])
            given = np.flatnonzero(turns < self._exchanged)
            slots = nodes[given] * self._exchanged + turns[given]
            slots = permute(slots, len(counts) * self._exchanged, self._exchange_key)
            nodes[given], turns[given] = np.divmod(slots, self._exchanged)
            blocks = turns
        blocks = permute(blocks, counts[nodes], self._block_keys[nodes])
        return nodes[inverse], blocks[inverse]

    def _places_of(self, samples: Ints) -> Ints:
        """Return the places of samples in the epoch: the inverse of `_samples_at`."""
        order = self.order
        in_sequence = _stored(samples, order, inverse=True)
        giver = np.searchsorted(self._bounds, in_sequence, side="right") - 1
        block, offset = np.divmod(in_sequence, order.block)
        block -= self._firsts[giver]
        is_short = (block < 0) | (block >= self._counts[giver])
        gap = np.where(block < 0, 0, self._counts[giver] * order.block)
        start = in_sequence - self._bounds[giver] - gap
        node, block = self._epoch_blocks(giver, np.where(is_short, 0, block))
        place = block * order.block + offset
        place += np.where(place < self._short_starts[node], 0, self._short_sizes[node])
        node = np.where(is_short, giver, node)
        place = np.where(is_short, self._short_starts[giver] + start, place)
        rest = place - self._batched
        return np.where(
            rest < 0, node * self._batched + place, order.nodes * (self._batched + rest) + node
        )

    def _epoch_blocks(self, givers: Ints, blocks: Ints) -> tuple[Ints, Ints]:
        """Return the nodes that read blocks in this epoch, and which of their blocks these are: the inverse of `_stored_blocks`."""
        counts = np.maximum(self._counts, 1)
        turns = permute(blocks, counts[givers], self._block_keys[givers], inverse=True)
        if not self._exchanged:
            return givers, turns
        nodes = givers.copy()
        given = np.flatnonzero(turns < self._exchanged)
        slots = nodes[given] * self._exchanged + turns[given]
        slots = permute(slots, len(counts) * self._exchanged, self._exchange_key, inverse=True)
        nodes[given], turns[given] = np.divmod(slots, self._exchanged)
        return nodes, permute(turns, counts[nodes], self._turn_keys[nodes], inverse=True)


def _stored(places: Ints, order: EpochOrder, *, inverse: bool = False) -> Ints:
    """Return the samples at places of the sequence of all nodes; or the places of samples."""
    blocks = order.nsamples // order.block
    of_area = max(1, blocks // _MOST_AREAS, min(_AREA_BLOCKS, blocks // _LEAST_AREAS))
    size = of_area * order.block
    count = order.nsamples // size
    area, offset = np.divmod(places, size)
    areas = _deal_areas(count, order.nodes, order.seed, inverse=inverse)
    return areas[area] * size + offset


@lru_cache(maxsize=16)
def _deal_areas(count: int, nodes: int, seed: int, *, inverse: bool = False) -> Ints:
    """Return the areas of node 0, node 1, ..., and the incomplete last one, or the place of each area; shape (count + 1,).

    One node more takes its share from all others, which keep the rest: so as few areas as possible move.
    """
    areas = permute(np.arange(count, dtype=np.int64), count, derive_key(seed, _AREAS)).tolist()
    of_node = [areas]
    for number in range(2, nodes + 1):
        given = []
        for node, own in enumerate(of_node):
            kept = count * (node + 1) // number - count * node // number
            given += own[kept:]
            del own[kept:]
        of_node.append(given)
    dealt = np.array([*chain.from_iterable(of_node), count], dtype=np.int64)
    dealt = np.argsort(dealt) if inverse else dealt
    dealt.flags.writeable = False  # callers share it
    return dealt
