"""Steps that change the number or order of items: shuffle, slice, repeat, compose, batched, unbatched, group_batched.

States hold positions, never items: after a resume a buffer is filled again from its first item. A run that collects items in bins, until a bin
becomes a batch, has the position of the oldest waiting item, and the places of all waiting items, which a resume puts in the same bins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from shardstream.errors import OptionError, SampleError, StateError
from shardstream.order import derive_key, permute
from shardstream.pipeline.bad_samples import SkipTracker
from shardstream.pipeline.sample_steps import add_place, like_tuple, name_of
from shardstream.pipeline.stage import Context, Run, SourceRun, State, check_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle:
    """Shuffle within windows of ``window`` items; place it before decode, where samples are small."""

    window: int
    purpose: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, window=self.window)

    def open(self, source: Run, context: Context) -> Run:
        """Open the stage on a stream."""
        return _ShuffleRun(
            source, self.window, derive_key(context.seed, context.epoch, self.purpose, 1)
        )


class _ShuffleRun(SourceRun):
    def __init__(self, source: Run, window: int, key: int) -> None:
        super().__init__(source)
        self._window = window
        self._key = key
        self._items: list[tuple[Any, int]] | None = None
        self._order: list[int] = []
        self._start = source.state_dict()
        self._turn = 0
        self._taken = 0
        self._number = 0

    @property
    def number(self) -> int:
        return self._number

    def __next__(self) -> Any:
        if self._items is None:
            self._items = self._fill()
        if self._items and self._taken == len(self._items):
            self._turn, self._taken, self._start = self._turn + 1, 0, self.source.state_dict()
            self._items = self._fill()
        if not self._items:
            raise StopIteration
        item, self._number = self._items[self._order[self._taken]]
        self._taken += 1
        return item

    def _fill(self) -> list[tuple[Any, int]]:
        items = [(item, self.source.number) for item in islice(self.source, self._window)]
        if items:
            self._order = permute(
                np.arange(len(items)), len(items), derive_key(self._key, self._turn)
            ).tolist()
        return items

    def state_dict(self) -> State:
        return {"source": self._start, "turn": self._turn, "taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        self._start, self._turn, self._taken = state["source"], state["turn"], state["taken"]
        self._items = None
        self.source.load_state_dict(self._start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Return items ``start``, ``start + step``, … below ``stop`` of each worker."""

    start: int
    stop: int | None
    step: int

    def open(self, source: Run, context: Context) -> Run:  # noqa: ARG002
        """Open the stage on a stream."""
        return _SliceRun(source, self)


class _SliceRun(SourceRun):
    def __init__(self, source: Run, bounds: Slice) -> None:
        super().__init__(source)
        self._bounds = bounds
        self._taken = 0

    def __next__(self) -> Any:
        bounds = self._bounds
        while bounds.stop is None or self._taken < bounds.stop:
            item = next(self.source)
            place = self._taken - bounds.start
            self._taken += 1
            if place >= 0 and place % bounds.step == 0:
                return item
        raise StopIteration

    def state_dict(self) -> State:
        return {"source": self.source.state_dict(), "taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        self._taken = state["taken"]
        self.source.load_state_dict(state["source"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Repeat the epoch several times, or until ``items`` have been returned.

    Args:
        times: Number of passes; None means no limit.
        items: Maximum of items per worker; None means no limit.
    """

    times: int | None = None
    items: int | None = None

    def __post_init__(self) -> None:
        check_at_least(0, times=self.times, items=self.items)

    def open(self, source: Run, context: Context) -> Run:  # noqa: ARG002
        """Open the stage on a stream."""
        return _RepeatRun(source, self)


class _RepeatRun(SourceRun):
    def __init__(self, source: Run, repeat: Repeat) -> None:
        super().__init__(source)
        self._repeat = repeat
        self._begin = source.state_dict()
        self._round = 0
        self._taken = 0
        self._in_round = 0

    @property
    def number(self) -> int:
        """Number of the item; it differs between rounds, so that random augmentation does too."""
        return derive_key(self.source.number, self._round) if self._round else self.source.number

    def __next__(self) -> Any:
        times, items = self._repeat.times, self._repeat.items
        if items is not None and self._taken >= items:
            raise StopIteration
        while times is None or self._round < times:
            for item in self.source:
                self._taken += 1
                self._in_round += 1
                return item
            if self._in_round == 0:  # an empty source: repeating it would never end
                break
            self._round, self._in_round = self._round + 1, 0
            self.source.load_state_dict(self._begin)
        raise StopIteration

    def state_dict(self) -> State:
        source = self.source.state_dict()
        return {
            "source": source,
            "round": self._round,
            "taken": self._taken,
            "in_round": self._in_round,
        }

    def load_state_dict(self, state: State) -> None:
        self._round, self._taken, self._in_round = state["round"], state["taken"], state["in_round"]
        self.source.load_state_dict(state["source"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Compose:
    """Apply a user function to the stream: iterator in, iterator out.

    The function's own state is unknown, so a resume runs it from the start of the epoch and skips the items returned before. Name and
    version are as in `Map`.
    """

    function: Callable[[Iterator[Any]], Iterable[Any]]
    name: str | None = None
    version: int | str | None = None

    def open(self, source: Run, context: Context) -> Run:
        """Open the stage on a stream."""
        return _ComposeRun(source, self.function, context.global_worker)


class _ComposeRun(SourceRun):
    def __init__(
        self, source: Run, function: Callable[[Iterator[Any]], Iterable[Any]], global_worker: int
    ) -> None:
        super().__init__(source)
        self._function = function
        self._global_worker = global_worker
        self._begin = source.state_dict()
        self._taken = 0
        self._items: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._items is None:
            self._items = self._start()
        item = next(self._items)
        self._taken += 1
        return item

    def _start(self) -> Iterator[Any]:
        """Call the function, and skip the items returned before a resume."""
        try:
            items = iter(self._function(iter(self.source)))
        except StopIteration as error:  # would silently end the epoch
            text = f"compose({name_of(self._function)}) raised StopIteration"
            raise RuntimeError(text) from error
        num_skipped = sum(1 for _ in islice(items, self._taken))
        if num_skipped < self._taken:
            raise StateError(
                f"compose({name_of(self._function)}) returned {num_skipped} items, the state has {self._taken}; "
                "use a deterministic function, or restart the epoch"
            )
        return items

    @property
    def number(self) -> int:
        # Items in and out need not match, so the number comes from the place in this worker's stream, which a resume repeats.
        return derive_key(self._global_worker, self._taken)

    def state_dict(self) -> State:
        return {"taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        self._taken = state["taken"]
        self._items = None
        self.source.load_state_dict(self._begin)

    def close(self) -> None:
        self._items = None
        super().close()


Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batched:
    """Collate each ``size`` items to one batch.

    Args:
        size: Items of a batch.
        collate: Function that makes a batch from a list of items.
        drop_last: Drop a last batch of fewer items.
        name: As in `Map`.
        version: As in `Map`.
    """

    size: int
    collate: Collate
    drop_last: bool = False
    name: str | None = None
    version: int | str | None = None

    def __post_init__(self) -> None:
        check_at_least(1, batch_size=self.size)

    def open(self, source: Run, context: Context) -> Run:  # noqa: ARG002
        """Open the stage on a stream."""
        return _BatchedRun(source, self)


class _BatchedRun(SourceRun):
    def __init__(self, source: Run, batched: Batched) -> None:
        super().__init__(source)
        self._batched = batched

    def __next__(self) -> Any:
        items = list(islice(self.source, self._batched.size))
        if not items or (len(items) < self._batched.size and self._batched.drop_last):
            raise StopIteration
        return collated(self._batched.collate, items)


def collated(collate: Collate, items: list[Any]) -> Any:
    """Return the batch of some items.

    Raises:
        RuntimeError: If the function raised StopIteration, which would silently end the epoch.
    """
    try:
        return collate(items)
    except StopIteration as error:
        raise RuntimeError("collate_fn raised StopIteration") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbatched:
    """Split batches into items: a dict or tuple of equally long columns, or a list of items."""

    def open(self, source: Run, context: Context) -> Run:  # noqa: ARG002
        """Open the stage on a stream."""
        return _UnbatchedRun(source)


class _UnbatchedRun(SourceRun):
    def __init__(self, source: Run) -> None:
        super().__init__(source)
        self._items: deque[Any] = deque()
        self._state_before = source.state_dict()  # position before the current batch
        self._taken = 0  # items returned of the current batch
        self._items_to_skip = 0  # items of it still to be skipped after a resume

    @property
    def number(self) -> int:
        return derive_key(self.source.number, self._taken)

    def __next__(self) -> Any:
        while not self._items:
            self._state_before, self._taken = self.source.state_dict(), self._items_to_skip
            self._items = deque(islice(split_batch(next(self.source)), self._items_to_skip, None))
            self._items_to_skip = 0
        self._taken += 1
        return self._items.popleft()

    def state_dict(self) -> State:
        if not self._items and not self._items_to_skip:
            return {"source": self.source.state_dict(), "taken": 0}
        return {"source": self._state_before, "taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        self._items.clear()
        self._state_before, self._taken = state["source"], state["taken"]
        self._items_to_skip = self._taken
        self.source.load_state_dict(self._state_before)


def split_batch(batch: Any) -> Iterator[Any]:
    """Yield the items of a batch; the inverse of a collate function that stacks or lists each field.

    >>> list(split_batch({"a": [1, 2], "b": ["x", "y"]}))
    [{'a': 1, 'b': 'x'}, {'a': 2, 'b': 'y'}]

    Raises:
        SampleError: If there are no columns, so that the number of items is unknown, or their lengths differ.
    """
    if isinstance(batch, Mapping):
        for row in _rows(list(batch.values()), [str(name) for name in batch]):
            yield dict(zip(batch, row, strict=True))
    elif isinstance(batch, tuple):
        for row in _rows(list(batch), [str(place) for place in range(len(batch))]):
            yield like_tuple(batch, row)
    else:
        yield from batch


def _rows(columns: Sequence[Any], names: list[str]) -> Iterator[tuple[Any, ...]]:
    if not columns:
        raise SampleError(
            "cannot split a batch without columns; batch samples that have fields, or use a list"
        )
    lengths = {name: len(column) for name, column in zip(names, columns, strict=True)}
    if len(set(lengths.values())) > 1:
        raise SampleError(f"cannot split a batch whose columns differ in length: {lengths}")
    return zip(*columns, strict=True)


@dataclass(slots=True)
class _Waiting:
    item: Any
    place: int  # in the stream of this worker
    number: int  # sample number
    state_before: State  # position of the run before this one, before this item


class BinningRun(SourceRun, ABC):
    """Base of runs that collect items in bins; subclasses choose the bins, and when too many items wait.

    Args:
        source: The run before.
        skips: Skip policy and counts of bad samples.
        capacity: Size of a full bin, which becomes a batch.
        keeps_incomplete: Whether incomplete bins become batches at the end.
    """

    def __init__(
        self, source: Run, skips: SkipTracker, capacity: int, *, keeps_incomplete: bool = True
    ) -> None:
        super().__init__(source)
        self._skips, self._capacity, self._keeps_incomplete = skips, capacity, keeps_incomplete
        self._bins: dict[Hashable, list[_Waiting]] = {}
        self.filled: dict[Hashable, int] = {}
        """Size of the waiting items of each bin, oldest bin first."""
        self._read = 0  # items read so far
        self._ended = False
        self._resume: State | None = None
        self._number = -1

    @property
    def number(self) -> int:
        """Sample number of the last item of the batch; that of the run before would be the same for all batches at the end."""
        return self._number

    @abstractmethod
    def choose_bin(self, item: Any) -> tuple[Hashable, int] | None:
        """Return an open or a new bin for an item, and the size of the item; None drops it.

        Must depend on waiting items only, or a resume differs.
        """

    @abstractmethod
    def is_overflowing(self) -> bool:
        """Return whether too many items wait, so that the fullest bin becomes a batch."""

    @abstractmethod
    def batch(self, items: list[Any]) -> Any:
        """Return the batch of the items of a bin."""

    def __next__(self) -> Any:
        self._refill()
        while not self._ended:
            name = self._read_item()
            if name is not None and self.filled[name] >= self._capacity:
                return self._batch_bin(name)
            if self.is_overflowing():
                return self._batch_bin(max(self.filled, key=self.filled.__getitem__))
        if not self._keeps_incomplete or not self._bins:
            raise StopIteration
        return self._batch_bin(next(iter(self._bins)))

    def _read_item(self, wanted: frozenset[int] | None = None) -> Hashable | None:
        """Read an item into its bin if its place is wanted; return the bin, or None if the item was not kept."""
        state_before = self.source.state_dict()
        item = next(self.source, self)
        if item is self:
            self._ended = True
            return None
        place = self._read
        self._read += 1
        if wanted is not None and place not in wanted:
            return None
        try:
            chosen = self.choose_bin(item)
        except Exception as error:  # noqa: BLE001  (the skip policy decides)
            self._skips.skip_or_raise(error, item)
            return None
        if chosen is None:
            return None
        name, size = chosen
        self.filled[name] = self.filled.get(name, 0) + size
        waiting = _Waiting(item, place, self.source.number, state_before)
        self._bins.setdefault(name, []).append(waiting)
        return name

    def _batch_bin(self, name: Hashable) -> Any:
        waiting = self._bins.pop(name)
        del self.filled[name]
        self._number = waiting[-1].number
        return self.batch([one.item for one in waiting])

    def _oldest(self) -> _Waiting | None:
        return min(
            (waiting[0] for waiting in self._bins.values()), key=lambda one: one.place, default=None
        )

    def _refill(self) -> None:
        """Read the items again that were waiting when the state was taken."""
        if self._resume is None:
            return
        state, self._resume = self._resume, None
        self._read, wanted = state["first"], frozenset(state["waiting"])
        while self._read < state["read"] and not self._ended:
            self._read_item(wanted)

    def state_dict(self) -> State:
        """Return the position before the oldest waiting item, and the places of all waiting items."""
        if self._resume is not None:
            return self._resume
        oldest = self._oldest()
        return {
            "source": self.source.state_dict() if oldest is None else oldest.state_before,
            "first": self._read if oldest is None else oldest.place,
            "read": self._read,
            "waiting": sorted(one.place for waiting in self._bins.values() for one in waiting),
        }

    def load_state_dict(self, state: State) -> None:
        """Move to the oldest waiting item."""
        self._bins.clear()
        self.filled.clear()
        self._ended = False
        self._resume = state
        self.source.load_state_dict(state["source"])


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBatched:
    """Collate ``size`` items of one group to a batch.

    Args:
        group: ``group(item)`` returns the group of an item, hashable.
        size: Items of a batch.
        buffer: Maximum of waiting items; beyond it the largest group becomes a smaller batch.
        collate: Function that makes a batch from a list of items.
        drop_last: Drop the incomplete groups at the end; else they are smaller batches.
        name: As in `Map`.
        version: As in `Map`.
    """

    group: Callable[[Any], Any]
    size: int
    buffer: int
    collate: Collate
    drop_last: bool = False
    name: str | None = None
    version: int | str | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or self.buffer < self.size:
            raise OptionError(
                f"a buffer of {self.buffer} items cannot fill batches of {self.size}; use buffer >= batch_size >= 1"
            )

    def open(self, source: Run, context: Context) -> Run:
        """Open the stage on a stream."""
        return _GroupBatchedRun(source, self, context)


class _GroupBatchedRun(BinningRun):
    def __init__(self, source: Run, stage: GroupBatched, context: Context) -> None:
        super().__init__(source, context.skips, stage.size, keeps_incomplete=not stage.drop_last)
        self._stage = stage

    def choose_bin(self, item: Any) -> tuple[Hashable, int]:
        try:
            group: Hashable = self._stage.group(item)
            hash(group)
        except Exception as error:
            add_place(error, f"group_batched({name_of(self._stage.group)})", item)
            raise
        return (group,), 1  # a group may be None

    def is_overflowing(self) -> bool:
        return sum(self.filled.values()) > self._stage.buffer

    def batch(self, items: list[Any]) -> Any:
        return collated(self._stage.collate, items)
