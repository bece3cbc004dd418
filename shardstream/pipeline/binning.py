"""Collect items in bins until a bin becomes a batch: groups of similar samples, sequences packed to one length.

The position is that of the oldest waiting item, with the places of all waiting items: a resume reads them again and puts
them in the same bins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from shardstream.pipeline.bad_samples import SkipTracker
from shardstream.pipeline.stage import Run, SourceRun, State


@dataclass(slots=True)
class _Waiting:
    item: Any
    place: int  # in the stream of this worker
    number: int  # sample number
    state_before: State  # position of the run before this one, before this item


class BinningRun(SourceRun, ABC):
    """Base of runs that collect items in bins; subclasses choose the bins and when they become batches."""

    def __init__(self, source: Run, skips: SkipTracker) -> None:
        super().__init__(source)
        self._skips = skips
        self._bins: dict[Hashable, list[_Waiting]] = {}
        self._read = 0  # items read so far
        self._ended = False
        self._resume: State | None = None
        self._number = -1

    @property
    def number(self) -> int:
        """Sample number of the last item of the batch; that of the run before would be the same for all batches at the end."""
        return self._number

    @abstractmethod
    def choose_bin(self, item: Any) -> Hashable | None:
        """Return an open or a new bin for an item; None drops it. Must depend on waiting items only, or a resume differs."""

    @abstractmethod
    def is_full(self, name: Hashable) -> bool:
        """Return True if a bin is complete."""

    @abstractmethod
    def find_overflowing_bin(self) -> Hashable | None:
        """Return the bin to batch because too many items wait; None if none."""

    @abstractmethod
    def keeps_incomplete(self) -> bool:
        """Return True if incomplete bins become batches at the end."""

    @abstractmethod
    def batch(self, items: list[Any]) -> Any:
        """Return the batch of the items of a bin."""

    def drop_bin(self, name: Hashable) -> None:
        """Remove the subclass's record of a bin that became a batch."""

    def clear(self) -> None:
        """Remove the subclass's record of all bins."""

    def __next__(self) -> Any:
        self._refill()
        while not self._ended:
            name = self._read_item()
            if name is not None and self.is_full(name):
                return self._batch_bin(name)
            overflowing = self.find_overflowing_bin()
            if overflowing is not None:
                return self._batch_bin(overflowing)
        if not self.keeps_incomplete() or not self._bins:
            raise StopIteration
        return self._batch_bin(next(iter(self._bins)))

    def sizes(self) -> dict[Hashable, int]:
        """Return the number of waiting items of each bin, oldest bin first."""
        return {name: len(waiting) for name, waiting in self._bins.items()}

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
            name = self.choose_bin(item)
        except Exception as error:  # noqa: BLE001  (the skip policy decides)
            self._skips.skip_or_raise(error, item)
            return None
        if name is not None:
            self._bins.setdefault(name, []).append(
                _Waiting(item, place, self.source.number, state_before)
            )
        return name

    def _batch_bin(self, name: Hashable) -> Any:
        waiting = self._bins.pop(name)
        self.drop_bin(name)
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
        self.clear()
        self._ended = False
        self._resume = state
        self.source.load_state_dict(state["source"])
