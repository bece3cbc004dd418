"""Batches whose samples share a group: similar shapes, lengths, languages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from shardstream.errors import OptionError
from shardstream.read.batch import Collate
from shardstream.read.stage import Context, Run, SourceRun, State
from shardstream.read.transform import add_place, name_of

Leftover = Literal["keep", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBatched:
    """Collate ``size`` items of one group to a batch.

    Args:
        group: ``group(item)`` returns what items of a batch have in common; hashable.
        size: Items of a batch.
        buffer: Items that may wait for their group to fill; past that the largest group goes out as it is.
        collate: Makes a batch of a list of items.
        leftover: What becomes of groups that are not full at the end: "keep" hands out smaller batches, "drop" drops them.
    """

    group: Callable[[Any], Any]
    size: int
    buffer: int
    collate: Collate
    leftover: Leftover = "keep"

    def __post_init__(self) -> None:
        if self.size < 1 or self.buffer < self.size:
            raise OptionError(
                f"a buffer of {self.buffer} items cannot fill batches of {self.size}; use buffer >= batch_size >= 1"
            )
        if self.leftover not in ("keep", "drop"):
            raise OptionError(f"leftover is 'keep' or 'drop', not {self.leftover!r}")

    def open(self, source: Run, context: Context) -> Run:
        """Start it on a stream."""
        return _GroupBatchedRun(source, self, context)


@dataclass(slots=True)
class _Waiting:
    item: Any
    place: int  # in the stream of this reader
    before: State  # position of the run before, in front of this item


class _GroupBatchedRun(SourceRun):
    """Its state is where the oldest waiting item begins and which items behind it have gone out: a resume reads those again."""

    def __init__(self, source: Run, stage: GroupBatched, context: Context) -> None:
        super().__init__(source)
        self._stage = stage
        self._skips = context.skips
        self._groups: dict[Any, list[_Waiting]] = {}
        self._read = 0  # items read so far
        self._gone: set[int] = set()  # places behind the oldest waiting item that have gone out
        self._ended = False
        self._resume: State | None = None

    def __next__(self) -> Any:
        self._refill()
        while not self._ended:
            group = self._read_item()
            if group is not None and len(self._groups[group]) == self._stage.size:
                return self._hand_out(group)
            if sum(map(len, self._groups.values())) > self._stage.buffer:
                return self._hand_out(max(self._groups, key=lambda group: len(self._groups[group])))
        if self._stage.leftover == "drop" or not self._groups:
            raise StopIteration
        return self._hand_out(next(iter(self._groups)))

    def _read_item(self) -> Any:
        """Read an item to its group; return the group, or None if there was nothing to keep."""
        before = self.source.state_dict()
        item = next(self.source, self)
        if item is self:
            self._ended = True
            return None
        place = self._read
        self._read += 1
        if place in self._gone:
            return None
        try:
            group = self._stage.group(item)
        except Exception as error:  # noqa: BLE001  (the skip policy decides)
            add_place(error, f"group_batched({name_of(self._stage.group)})", item)
            self._skips.take(error)
            self._gone.add(place)
            return None
        self._groups.setdefault(group, []).append(_Waiting(item, place, before))
        return group

    def _hand_out(self, group: Any) -> Any:
        waiting = self._groups.pop(group)
        self._gone.update(one.place for one in waiting)
        oldest = self._oldest()
        first = self._read if oldest is None else oldest.place
        self._gone = {place for place in self._gone if place > first}
        return self._stage.collate([one.item for one in waiting])

    def _oldest(self) -> _Waiting | None:
        return min(
            (group[0] for group in self._groups.values()), key=lambda one: one.place, default=None
        )

    def _refill(self) -> None:
        """Read what was waiting when the state was taken."""
        if self._resume is None:
            return
        state, self._resume = self._resume, None
        self._read, self._gone = state["first"], set(state["gone"])
        while self._read < state["read"] and not self._ended:
            self._read_item()

    def state_dict(self) -> State:
        if self._resume is not None:
            return self._resume
        oldest = self._oldest()
        return {
            "source": self.source.state_dict() if oldest is None else oldest.before,
            "first": self._read if oldest is None else oldest.place,
            "read": self._read,
            "gone": sorted(self._gone),
        }

    def load_state_dict(self, state: State) -> None:
        self._groups.clear()
        self._ended = False
        self._resume = state
        self.source.load_state_dict(state["source"])
