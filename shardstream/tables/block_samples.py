"""Samples that are read by whole blocks of consecutive ones, such as the row groups of Parquet; names of their fields and keys."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from shardstream.errors import OptionError, SourceError, plural
from shardstream.fetch import DaemonThreads
from shardstream.format import KEY_COLUMN, Columns, Rows, is_reserved_column
from shardstream.samples import Fetcher, FetchOptions, Numbers, Samples, check_numbers
from shardstream.storage import Storage

_THREADS = 4  # blocks that a process reads at the same time
_KEPT_BYTES = 128 << 20  # of blocks, where it is not known which samples come next
_PLANNED_SAMPLES = 1 << 15
"""Numbers that are looked at in advance, so that a block stays until its last sample."""
Fields = Sequence[str] | Mapping[str, str] | None
"""Columns to read, or field -> column; None for all. The field ``__key__`` is made of the column that is given for it, or of the one of this name;
without one, a key is the file and the number of the row in it."""


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


def choose_columns(
    names: Sequence[str], fields: Fields, url: str
) -> tuple[dict[str, str], str | None]:
    """Return field -> column, and the column of the keys.

    Args:
        names: The columns that there are.
        fields: The user's choice.
        url: URL of the table, for messages.

    Raises:
        OptionError: If there is no such column, or a field has a reserved name.
        SourceError: If two columns have one name.
    """
    if len({*names}) < len(names):
        raise SourceError("two columns have one name; rename one", shard=url)
    if fields is None:
        fields = [name for name in names if not is_reserved_column(name)]
    chosen = dict(fields) if isinstance(fields, Mapping) else {name: name for name in fields}
    key = chosen.pop(KEY_COLUMN, KEY_COLUMN if KEY_COLUMN in names else None)
    for name in [*chosen.values(), *([key] if key else [])]:
        if name not in names:
            raise OptionError(f"no column {name!r}; there are: {', '.join(names)}", shard=url)
    reserved = [name for name in chosen if is_reserved_column(name)]
    if reserved or not chosen:
        problem = f"{reserved[0]!r} is no name of a field" if reserved else "fields= names none"
        raise OptionError(f"{problem}; name columns, or {{field: column}}", shard=url)
    return chosen, key


def keys_of(cells: Sequence[Any] | None, rows: Numbers, file: tuple[str, str]) -> list[str]:
    """Return the keys of rows.

    Args:
        cells: Their values in the column of keys; None if there is none.
        rows: Their numbers in the file, shape (n,).
        file: Its URL, and its name in keys.

    Raises:
        SourceError: If a key is missing, or neither text nor a whole number.
    """
    url, stem = file
    if cells is None:
        return [f"{stem}/{row:08d}" for row in rows.tolist()]
    for row, cell in zip(rows.tolist(), cells, strict=True):
        if cell in (None, "") or isinstance(cell, bool) or not isinstance(cell, str | int):
            raise SourceError(
                f"row {row} has the key {cell!r}: a key is text or a whole number; name another column",
                shard=url,
            )
    return list(map(str, cells))


def names_below(urls: Sequence[str], suffix: str) -> list[str]:
    """Return the paths of files below their common folder, up to a suffix.

    >>> names_below(["s3://b/a/0.mds.zstd", "s3://b/b/0.mds"], ".mds")
    ['a/0', 'b/0']
    """
    folders = [url.split("/")[:-1] for url in urls]
    shared = len([*takewhile(lambda names: len({*names}) == 1, zip(*folders, strict=False))])
    paths = ["/".join(url.split("/")[shared:]) for url in urls]
    return [path[: path.lower().rindex(suffix)] for path in paths]
