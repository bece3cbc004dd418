"""Compute the order of an epoch: a pure function from a batch number to sample numbers.

The inputs are the sizes, the seed and the epoch, so all ranks and workers compute the same sequence of batches without
communication or stored state. ``partition.py`` assigns the batches to ranks and workers.

With several nodes each node keeps its blocks, so that what its cache holds from one epoch serves the next. The dataset is cut into areas
of a few blocks, which are dealt to the nodes once, by the seed. An epoch shuffles the blocks of each node, exchanges a share of them, and
then continues as for one node: lanes of whole batches, windows, shuffled samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from shardstream.errors import OptionError
from shardstream.order.permutation import Ints, derive_key, derive_keys, permute

_BLOCK_BYTES = 2 << 20
_WINDOW_BYTES = 64 << 20
_BLOCKS_PER_EPOCH = 128  # minimum, if there are enough samples
_WINDOW_SAMPLES = 16_384
FEW_BLOCKS = 4096  # up to this number the block order is computed once per epoch, because small calls are mostly overhead
_AREA_BLOCKS = 4  # a cache keeps whole MiB, so a single block of 2 MiB would cost 3
# Enough to give each node a fair sample of the data; few enough for a table.
_LEAST_AREAS, _MOST_AREAS = 1024, 65_536
# Purposes of the random keys, without nodes and with them.
_BLOCK_ORDER, _SHORT_BLOCK, _WINDOW_ORDER = 1, 2, 3
_AREAS, _SHORT, _BLOCKS, _TURNS, _EXCHANGE = 10, 11, 12, 13, 14


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOrder:
    """The parameters that determine the batches of every epoch.

    Args:
        nsamples: Samples of the dataset, N.
        batch: Samples of a batch (the microbatch), b.
        shuffle: False keeps the stored order; the options below then only affect reading.
        seed: Any whole number.
        lanes: Canonical streams that an epoch is partitioned into, L.
        window: Samples of one lane that are shuffled together, w; a multiple of `batch`.
        block: Consecutive samples that stay together until a window shuffles them, k.
        nodes: Machines of which each keeps its own blocks, H; lanes are a multiple of it, and batch t belongs to node t modulo H.
        exchange: Share of the blocks that all nodes exchange in an epoch, 0 to 1.
    """

    nsamples: int
    batch: int
    shuffle: bool
    seed: int
    lanes: int
    window: int
    block: int
    nodes: int = 1
    exchange: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batch", "lanes", "window", "block", "nodes"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.nsamples < 0:
            raise OptionError(f"nsamples must be at least 0, not {self.nsamples}")
        if self.window % self.batch:
            raise OptionError(
                f"window={self.window} must be a multiple of the microbatch, {self.batch}; use "
                f"{-(-self.window // self.batch) * self.batch}"
            )
        if self.nodes > 1 or self.exchange:
            check_nodes(self.nodes, self.lanes, self.exchange)
        if self.nodes > 1 and not self.shuffle:
            raise OptionError(
                "nodes= has no effect without shuffle: each rank reads the same samples in every epoch; leave it out"
            )

    @property
    def num_batches(self) -> int:
        """Full batches of an epoch, T."""
        return self.nsamples // self.batch


def check_nodes(nodes: int, lanes: int, exchange: float) -> None:
    """Check the options of an order with nodes, see `EpochOrder`.

    Raises:
        OptionError: If they exclude each other, or one is out of range.
    """
    if lanes % nodes:
        raise OptionError(f"lanes={lanes} must be a multiple of nodes={nodes}")
    if not 0 <= exchange <= 1:
        raise OptionError(f"exchange must be from 0 to 1, not {exchange}")
    if exchange and nodes == 1:
        raise OptionError("exchange= has no effect with one node; set nodes=, too")


def default_block(nsamples: int, total_bytes: int) -> int:
    """Return k: 2 MiB of samples, or fewer so that an epoch has at least 128 blocks to shuffle.

    >>> default_block(1_000_000, 100_000_000_000), default_block(1797, 2_000_000)
    (20, 14)
    """
    if total_bytes == 0:
        return 1
    by_bytes = _BLOCK_BYTES * nsamples // total_bytes
    return max(1, min(by_bytes, nsamples // _BLOCKS_PER_EPOCH))


def default_window(nsamples: int, total_bytes: int, batch: int) -> int:
    """Return w: 64 MiB of samples, at most 16,384 of them, at least a batch; a multiple of the batch."""
    by_bytes = _WINDOW_BYTES * nsamples // total_bytes if total_bytes else _WINDOW_SAMPLES
    return max(1, min(by_bytes, _WINDOW_SAMPLES) // batch) * batch


class Places(NamedTuple):
    """Places of samples in the full batches of an epoch: an entry for each time that one comes, in any order.

    Args:
        numbers: The sample's number, as in the batch: copy c of sample i is ``i + c * nsamples``.
        batches: Number of the batch.
        slots: Place in the batch.
    """

    numbers: Ints
    batches: Ints
    slots: Ints


class EpochPlan:
    """The batches of one epoch.

    Args:
        order: Parameters of the order.
        epoch: Epoch number, from 0.
    """

    def __init__(self, order: EpochOrder, epoch: int) -> None:
        self.order = order
        self.epoch = epoch
        self.nsamples = order.nsamples  # that are numbered: copies have the numbers after them
        self.passes = 1  # a mix repeats its parts, and each pass has its own sample numbers
        self.spread = 1  # batches that are planned for each one that is asked for
        if not order.shuffle:
            return  # nothing is random
        self._blocks, self._short = divmod(order.nsamples, order.block)
        key = derive_key(order.seed, epoch)
        self._block_key = derive_key(key, _BLOCK_ORDER)
        self._window_key = derive_key(key, _WINDOW_ORDER)
        # The short block gets a random place; at the end its samples would be the tail of every epoch.
        self._short_start = derive_key(key, _SHORT_BLOCK) % (self._blocks + 1) * order.block

    def batches(self, numbers: Ints) -> Ints:
        """Return the samples of some batches.

        Args:
            numbers: Shape (n,), each from 0 to ``order.num_batches - 1``.

        Returns:
            Sample numbers, shape (n, b).
        """
        order = self.order
        slots = np.arange(order.batch, dtype=np.int64)
        if not order.shuffle:
            return numbers[:, None] * order.batch + slots
        first, window, offset, size = self._windows(numbers)
        shape = (len(numbers), order.batch)
        keys = derive_keys(self._window_key, numbers % order.lanes, window)
        offset_in_window = permute(
            (offset[:, None] + slots).ravel(),
            np.repeat(size, order.batch),
            np.repeat(keys, order.batch),
        ).reshape(shape)
        return self._samples_at((first[:, None] + offset_in_window).ravel()).reshape(shape)

    def find(self, samples: Ints) -> Places:
        """Return the full batches in which samples come, and where: the inverse of `batches`.

        Args:
            samples: Numbers from 0 to ``nsamples - 1``, each once; shape (n,).
        """
        order = self.order
        places = self._places_of(samples) if order.shuffle else samples
        is_full = places < order.num_batches * order.batch
        samples, places = samples[is_full], places[is_full]
        if not order.shuffle:
            return Places(samples, *np.divmod(places, order.batch))
        return Places(samples, *self._batches_at(places))

    def rest(self, start: int) -> Ints:
        """Return the samples of the batches from ``start`` on, with the last incomplete batch, in order, shape (n,)."""
        order = self.order
        full = self.batches(np.arange(start, order.num_batches, dtype=np.int64)).ravel()
        leftover = np.arange(order.num_batches * order.batch, order.nsamples, dtype=np.int64)
        return np.concatenate((full, self._samples_at(leftover) if order.shuffle else leftover))

    def windows(self, numbers: Ints) -> Ints:
        """Return the window number of each batch, shape (n,); batches of one window share their reads."""
        if not self.order.shuffle:
            return numbers // (self.order.window // self.order.batch)
        return self._windows(numbers)[1] * self.order.lanes + numbers % self.order.lanes

    def batches_of_window(self, window: int) -> Ints:
        """Return the numbers of the batches of one window, in order: the inverse of `windows`."""
        order = self.order
        batches = order.window // order.batch
        if not order.shuffle:
            return np.arange(
                window * batches, min((window + 1) * batches, order.num_batches), dtype=np.int64
            )
        round_, lane = divmod(window, order.lanes)
        numbers = (
            np.arange(round_ * batches, (round_ + 1) * batches, dtype=np.int64)
        ) * order.lanes + lane
        return numbers[numbers < order.num_batches]

    def _windows(self, numbers: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Return for each batch its window's first place in the epoch, number in the lane, offset of the batch in it, and size."""
        order = self.order
        count = order.num_batches // order.nodes * order.nodes
        node, lane = numbers % order.nodes, numbers % order.lanes // order.nodes
        batches_per_lane, extra = divmod(count // order.nodes, order.lanes // order.nodes)
        lane_first = (
            node * (count // order.nodes) + lane * batches_per_lane + np.minimum(lane, extra)
        )
        lane_size = (batches_per_lane + (lane < extra)) * order.batch
        window, offset = np.divmod(numbers // order.lanes * order.batch, order.window)
        first = lane_first * order.batch + window * order.window
        size = np.minimum(order.window, lane_size - window * order.window)
        is_of_one = numbers < count  # the last batches are of several nodes, and are shuffled alone
        return (
            np.where(is_of_one, first, numbers * order.batch),
            window,
            np.where(is_of_one, offset, 0),
            np.where(is_of_one, size, order.batch),
        )

    def _batches_at(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the batches that have these places of the epoch in their windows, and the slots there: the inverse of `_windows`."""
        order, batch, nodes = self.order, self.order.batch, self.order.nodes
        batches_per_node = order.num_batches // nodes
        batches_per_lane, extra = divmod(batches_per_node, order.lanes // nodes)
        is_of_one = places < batches_per_node * nodes * batch
        node, within = np.divmod(places, max(1, batches_per_node * batch))
        longer = (
            extra * (batches_per_lane + 1) * batch
        )  # places of the lanes that have a batch more
        lane = np.where(
            within < longer,
            within // ((batches_per_lane + 1) * batch),
            extra + (within - longer) // max(1, batches_per_lane * batch),
        )
        lane_first = (lane * batches_per_lane + np.minimum(lane, extra)) * batch
        window, offset = np.divmod(within - lane_first, order.window)
        lane_size = (batches_per_lane + (lane < extra)) * batch
        size = np.minimum(order.window, lane_size - window * order.window)
        # The last batches are of several nodes, and are shuffled alone.
        number, slot = np.divmod(places, batch)
        lane = np.where(is_of_one, lane * nodes + node, number % order.lanes)
        window = np.where(is_of_one, window, number // order.lanes * batch // order.window)
        offset = permute(
            np.where(is_of_one, offset, slot),
            np.where(is_of_one, size, batch),
            derive_keys(self._window_key, lane, window),
            inverse=True,
        )
        turn, slot_there = np.divmod(window * order.window + offset, batch)
        batches = np.where(is_of_one, turn * order.lanes + lane, number)
        return batches, np.where(is_of_one, slot_there, offset)

    def _permuted(self, blocks: Ints) -> Ints:
        """Return the source of each block, shape (n,); blocks close together, as in a window, are computed once each."""
        first, last = (int(blocks.min()), int(blocks.max())) if blocks.size else (0, 0)
        if self._blocks <= FEW_BLOCKS:
            return self._block_order[blocks]
        if last - first >= blocks.size:
            return permute(blocks, self._blocks, self._block_key)
        block_range = np.arange(first, last + 1, dtype=np.int64)
        return permute(block_range, self._blocks, self._block_key)[blocks - first]

    @cached_property
    def _block_order(self) -> Ints:
        return permute(np.arange(self._blocks, dtype=np.int64), self._blocks, self._block_key)

    def _samples_at(self, places: Ints) -> Ints:
        """Return the samples at places of the permuted sequence of blocks."""
        short = (places >= self._short_start) & (places < self._short_start + self._short)
        without_short = np.where(places < self._short_start, places, places - self._short)
        if self._blocks == 0:
            return places
        block, offset_in_window = np.divmod(np.where(short, 0, without_short), self.order.block)
        samples = self._permuted(block) * self.order.block + offset_in_window
        return np.where(
            short, self._blocks * self.order.block + places - self._short_start, samples
        )

    def _places_of(self, samples: Ints) -> Ints:
        """Return the places of samples in the permuted sequence of blocks: the inverse of `_samples_at`."""
        if self._blocks == 0:
            return samples
        block, offset = np.divmod(samples, self.order.block)
        is_short = block >= self._blocks
        moved = permute(np.where(is_short, 0, block), self._blocks, self._block_key, inverse=True)
        places = moved * self.order.block + offset
        places += np.where(places < self._short_start, 0, self._short)
        return np.where(is_short, self._short_start + offset, places)


class StoredBlocksPlan(EpochPlan):
    """The batches of one epoch that shuffles blocks of given sizes, such as row groups, each of which is read as a whole.

    Args:
        order: Parameters of the order; its ``block`` has no effect.
        epoch: Epoch number, from 0.
        firsts: Number of the first sample of each block, and of all samples; shape (blocks + 1,).
    """

    def __init__(self, order: EpochOrder, epoch: int, *, firsts: Ints) -> None:
        super().__init__(order, epoch)
        self._firsts, count = firsts, len(firsts) - 1
        key = derive_key(derive_key(order.seed, epoch), _BLOCK_ORDER)
        self._moved = permute(np.arange(count, dtype=np.int64), count, key)
        self._starts = np.concatenate(([0], np.cumsum(np.diff(firsts)[self._moved])))
        self._turns = np.argsort(self._moved)

    def _samples_at(self, places: Ints) -> Ints:
        turn = np.searchsorted(self._starts, places, side="right") - 1
        return self._firsts[self._moved[turn]] + places - self._starts[turn]

    def _places_of(self, samples: Ints) -> Ints:
        block = np.searchsorted(self._firsts, samples, side="right") - 1
        return self._starts[self._turns[block]] + samples - self._firsts[block]


class CopyPlan(EpochPlan):
    """The batches of one epoch of copies: those of `EpochPlan`, with ``i + copy * nsamples`` in place of sample i.

    Args:
        order: Parameters of the order.
        epoch: Epoch number, from 0.
        copy: Number of the copies.
    """

    def __init__(self, order: EpochOrder, epoch: int, *, copy: int) -> None:
        super().__init__(order, epoch)
        self.passes = copy + 1
        self._first = copy * order.nsamples
        self._samples = EpochPlan(order, epoch)

    def batches(self, numbers: Ints) -> Ints:
        """Return the samples of some batches, shape (n, b)."""
        return self._samples.batches(numbers) + self._first

    def find(self, samples: Ints) -> Places:
        """Return the full batches in which samples come, and where."""
        numbers, batches, slots = self._samples.find(samples)
        return Places(numbers + self._first, batches, slots)

    def rest(self, start: int) -> Ints:
        """Return the samples of the batches from ``start`` on, with the last incomplete batch, in order, shape (n,)."""
        return self._samples.rest(start) + self._first


class RangePlan(EpochPlan):
    """The batches of some samples in a row, in their order.

    Args:
        order: Parameters of the order, without shuffle; its ``nsamples`` are those of the range.
        epoch: Epoch number, from 0.
        first: Number of the first sample.
    """

    def __init__(self, order: EpochOrder, epoch: int, *, first: int) -> None:
        super().__init__(order, epoch)
        self.first = first

    def batches(self, numbers: Ints) -> Ints:
        """Return the samples of some batches, shape (n, b)."""
        return super().batches(numbers) + self.first

    def rest(self, start: int) -> Ints:
        """Return the samples of the batches from ``start`` on, with the last incomplete batch, in order, shape (n,)."""
        order = self.order
        return np.arange(start * order.batch, order.nsamples, dtype=np.int64) + self.first


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
