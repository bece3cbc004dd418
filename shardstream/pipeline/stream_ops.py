"""Change the number or order of items: shuffle, slice, repeat, with_epoch, compose.

States hold positions, never items: after a resume a buffer is filled again from its first item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from shardstream.errors import StateError
from shardstream.order import derive_key, permute
from shardstream.pipeline.map import name_of
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
