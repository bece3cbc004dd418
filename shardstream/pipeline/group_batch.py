"""Collate batches of samples that share a group, such as a shape, length or language."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from shardstream.errors import OptionError
from shardstream.pipeline.batch import Collate, collated
from shardstream.pipeline.binning import BinningRun
from shardstream.pipeline.map import add_place, name_of
from shardstream.pipeline.stage import Context, Run


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
        super().__init__(source, context.skips)
        self._stage = stage

    def choose_bin(self, item: Any) -> Hashable:
        try:
            group: Hashable = self._stage.group(item)
            hash(group)
        except Exception as error:
            add_place(error, f"group_batched({name_of(self._stage.group)})", item)
            raise
        return (group,)  # a group may be None

    def is_full(self, name: Hashable) -> bool:
        return self.sizes()[name] >= self._stage.size

    def find_overflowing_bin(self) -> Hashable | None:
        sizes = self.sizes()
        return (
            max(sizes, key=sizes.__getitem__) if sum(sizes.values()) > self._stage.buffer else None
        )

    def keeps_incomplete(self) -> bool:
        return not self._stage.drop_last

    def batch(self, items: list[Any]) -> Any:
        return collated(self._stage.collate, items)
