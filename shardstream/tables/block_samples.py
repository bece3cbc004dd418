"""Samples that are read by whole blocks of consecutive ones, such as the row groups of Parquet."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import numpy as np

from shardstream.errors import plural
from shardstream.fetch import DaemonThreads
from shardstream.format import Columns, Rows
from shardstream.samples import Fetcher, FetchOptions, Numbers, Samples, check_numbers
from shardstream.storage import Storage

_THREADS = 4  # blocks that a process reads at the same time
_KEPT_BYTES = 128 << 20  # of blocks, where it is not known which samples come next
_PLANNED_SAMPLES = (
    1 << 15
)  # numbers that are looked at in advance, so that a block stays until its last sample


class Block(Protocol):
    """The samples of a block, in memory."""

    def columns(self, places: Numbers) -> Mapping[str, list[Any]]:
        """Return ``__key__``, ``__url__`` and the fields of some samples.

        Args:
            places: Places in the block, shape (n,).
        """


class BlockSamples(Samples):
    """Samples of which a whole block is read and decoded at once; blocks count as shards.

    Args:
        counts: Samples of each block, at least 1 each.
        block_bytes: Bytes of each block in memory.
        storage: Storage of the files.
    """

    has_bytes = False

    def __init__(self, counts: Numbers, block_bytes: Numbers, storage: Storage) -> None:
        self.blocks: Numbers = np.concatenate(([0], np.cumsum(counts)))
        self.least_block = int(counts.max())
        self.block_bytes = block_bytes
        self._storage = storage

    def __len__(self) -> int:
        return int(self.blocks[-1])

    @abstractmethod
    def read_block(self, block: int) -> Block:
        """Read a block; called by several threads.

        Raises:
            ShardStreamError: If it cannot be read or decoded, or its file was replaced.
        """

    @property
    def storage(self) -> Storage:
        """The storage of the files."""
        return self._storage

    @property
    def num_shards(self) -> int:
        """Number of blocks."""
        return len(self.block_bytes)

    @property
    def summary(self) -> str:
        """Size of the dataset, for ``repr``."""
        return f"{plural(self.num_shards, 'block')}, {plural(len(self), 'sample')}"

    def find_shards(self, numbers: Numbers) -> Numbers:
        """Return the block of each sample, shape (n,)."""
        return np.searchsorted(self.blocks, numbers % len(self), side="right") - 1

    def open_fetcher(
        self, upcoming: Iterable[Numbers] | None = None, options: FetchOptions | None = None
    ) -> Fetcher:
        """Open a fetcher, which reads the next blocks in advance if their numbers are known."""
        return BlockFetcher(self, upcoming, options or FetchOptions())


class BlockFetcher(Fetcher):
    """Read blocks in threads, and keep each until no planned sample of it is left; without a plan, the last ones.

    Args:
        samples: The samples.
        upcoming: As in `Samples.open_fetcher`.
        options: Of the fetcher. Blocks that are in use, and one more, may exceed ``prefetch_bytes``.
    """

    def __init__(
        self, samples: BlockSamples, upcoming: Iterable[Numbers] | None, options: FetchOptions
    ) -> None:
        self._samples = samples
        self._upcoming = None if upcoming is None else iter(upcoming)
        self._budget = _KEPT_BYTES if upcoming is None else options.prefetch_bytes
        self._threads = DaemonThreads(_THREADS, "shardstream-blocks")
        self._lock = threading.Lock()  # guards all below
        self._held: OrderedDict[int, Future[Block]] = OrderedDict()
        self._ahead: set[int] = set()  # held, and not asked for yet
        self._left: Counter[int] = Counter()  # block -> planned samples that were not asked for yet
        self._queue: deque[int] = deque()  # blocks of the plan, in order of use
        self._read_bytes = self._requests = 0
        self._wait_s = 0.0

    def request(self, numbers: Numbers) -> Callable[[], Rows]:
        """Begin to read the blocks of samples that are not in memory; return a function that waits for them, as `samples`."""
        if not len(numbers):
            return list
        numbers = numbers % len(self._samples)
        check_numbers(numbers, len(self._samples))
        of_block = self._samples.find_shards(numbers)
        wanted = dict(
            zip(*map(np.ndarray.tolist, np.unique(of_block, return_counts=True)), strict=True)
        )
        with self._lock:
            self._plan(len(numbers))
            blocks = {block: self._start(block) for block in wanted}
            self._ahead.difference_update(wanted)
            self._release(wanted)
            self._prefetch()
        return partial(self._wait, numbers, of_block, blocks)

    def stats(self) -> dict[str, float]:
        """Return the statistics so far: bytes of blocks in memory, and blocks as requests."""
        return {"read_bytes": self._read_bytes, "requests": self._requests, "wait_s": self._wait_s}

    def close(self) -> None:
        """Free all blocks and read no more, without waiting for those that are being read."""
        self._threads.close()
        with self._lock:
            self._held.clear()
            self._queue.clear()

    def _plan(self, count: int) -> None:
        """Look at the plan until more than the requested samples are known."""
        while self._upcoming is not None and self._left.total() < count + _PLANNED_SAMPLES:
            numbers = next(self._upcoming, None)
            if numbers is None or not len(numbers):
                self._upcoming = iter(())
                return
            of_block = self._samples.find_shards(numbers)
            blocks, firsts, counts = np.unique(of_block, return_index=True, return_counts=True)
            self._queue.extend(blocks[np.argsort(firsts)].tolist())
            self._left.update(dict(zip(blocks.tolist(), counts.tolist(), strict=True)))

    def _start(self, block: int) -> Future[Block]:
        """Return a block that is held, or begin to read it."""
        if block not in self._held:
            self._held[block] = self._threads.submit(self._samples.read_block, block)
            self._read_bytes += int(self._samples.block_bytes[block])
            self._requests += 1
        self._held.move_to_end(block)
        return self._held[block]

    def _release(self, used: Mapping[int, int]) -> None:
        """Drop the blocks of which no planned sample is left; without a plan, the least recently used ones over the budget."""
        if self._upcoming is None:
            while len(self._held) > len(used) and self._held_bytes > self._budget:
                self._held.popitem(last=False)
            return
        for block, count in used.items():
            self._left[block] -= count
            if self._left[block] <= 0:
                del self._left[block], self._held[block]

    @property
    def _held_bytes(self) -> int:
        return int(self._samples.block_bytes[list(self._held)].sum())

    def _prefetch(self) -> None:
        """Begin to read the next blocks of the plan within the budget, at least one."""
        held_bytes = self._held_bytes
        while self._queue:
            block = self._queue[0]
            if block not in self._held and block in self._left:
                held_bytes += int(self._samples.block_bytes[block])
                if self._ahead and held_bytes > self._budget:
                    return
                self._start(block)
                self._ahead.add(block)
            self._queue.popleft()

    def _wait(
        self, numbers: Numbers, of_block: Numbers, blocks: Mapping[int, Future[Block]]
    ) -> Rows:
        found: dict[str, list[Any]] = {}
        for block, reading in blocks.items():
            begin = time.monotonic()
            try:
                values = reading.result()
            except BaseException:
                with self._lock:
                    self._held.pop(block, None)  # a later request tries again
                raise
            finally:
                self._wait_s += time.monotonic() - begin
            mine = np.flatnonzero(of_block == block)
            columns = values.columns(numbers[mine] - self._samples.blocks[block])
            if len(blocks) == 1:
                return Columns(dict(columns))
            for name, column in columns.items():
                whole = found.setdefault(name, [None] * len(numbers))
                for place, value in zip(mine.tolist(), column, strict=True):
                    whole[place] = value
        return Columns(found)
