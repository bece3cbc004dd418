"""Collate items to batches and split batches: batched, unbatched, map_batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shardstream.errors import SampleError
from shardstream.order import derive_key
from shardstream.pipeline.map import like_tuple
from shardstream.pipeline.stage import Context, Run, SourceRun, State, check_at_least

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
