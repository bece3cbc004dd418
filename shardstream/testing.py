"""For tests of pipelines and of stages of one's own: tiny shards, a stream over a list, the check that a resume is exact."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardstream.packing.shard_writer import ShardWriter
from shardstream.pipeline.stage import Run, State


def make_shards(
    folder: str | os.PathLike[str],
    *,
    samples: int | Iterable[Mapping[str, object]],
    per_shard: int = 10,
    **options: Any,
) -> str:
    """Write a dataset of small shards, with index and manifest.

    Args:
        folder: Where to; any URL that fsspec knows.
        samples: Samples to write, or how many to make up: number i has key ``f"{i:06d}"`` and ``cls`` i.
        per_shard: Samples of a shard.
        options: Of `ShardWriter`: ``storage_options``, ``filesystem``, …

    Returns:
        The folder, as `ShardDataset` takes it.
    """
    if isinstance(samples, int):
        samples = [{"__key__": f"{number:06d}", "cls": number} for number in range(samples)]
    with ShardWriter(folder, max_samples=per_shard, **options) as writer:
        for sample in samples:
            writer.write(sample)
    return os.fspath(folder)


class ListRun:
    """A stream over a list: what a stage under test is opened on. The number of an item is its place.

    >>> run = ListRun(["a", "b"])
    >>> next(run), run.number, run.state_dict()
    ('a', 0, {'taken': 1})
    """

    def __init__(self, items: Iterable[Any]) -> None:
        self.number = -1
        self.closed = False
        self._items: Sequence[Any] = list(items)
        self._taken = 0

    def __iter__(self) -> ListRun:
        return self

    def __next__(self) -> Any:
        if self._taken == len(self._items):
            raise StopIteration
        self.number = self._taken
        self._taken += 1
        return self._items[self.number]

    def state_dict(self) -> State:
        """Return how many items were taken."""
        return {"taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        """Go behind the first ``taken`` items."""
        self._taken = state["taken"]

    def close(self) -> None:
        """Note that it was closed."""
        self.closed = True


def assert_resumes_exactly(open_run: Callable[[], Run]) -> None:
    """Check that a run can be stopped anywhere and goes on with the same items and numbers.

    At every position, the end included: the state is the same when asked twice, survives JSON, and what a fresh run that
    loads it says before it reads anything; the rest is the same in a fresh run, in one that was used before, and after a
    second stop one item later.

    Args:
        open_run: Opens the run under test, from its start.

    Raises:
        AssertionError: Naming the position and what differs.
    """
    states, items = _walk(open_run)
    for place, state in enumerate(states):
        _check_position(open_run, place, state, items[place:])


def _walk(open_run: Callable[[], Run]) -> tuple[list[State], list[Any]]:
    """Return the state at every position, as JSON brings it back, and every item."""
    run = open_run()
    states = [_saved(run, 0)]
    items: list[Any] = []
    for item in run:
        items.append(_comparable((run.number, item)))
        states.append(_saved(run, len(items)))
    states.append(_saved(run, len(items)))  # behind the end: as good as the one before it
    run.close()
    return states, items


def _check_position(open_run: Callable[[], Run], place: int, state: State, rest: list[Any]) -> None:
    fresh, used = open_run(), open_run()
    next(used, None)
    for name, run in (("a fresh run", fresh), ("a used run", used)):
        run.load_state_dict(state)
        loaded = _saved(run, place)
        assert loaded == state, f"at {place}, {name} loaded {state}, but says {loaded}"
        _check_rest(run, rest, f"at {place}, {name}")
    again, last = open_run(), open_run()
    again.load_state_dict(state)
    next(again, None)
    last.load_state_dict(_saved(again, place + 1))
    _check_rest(last, rest[1:], f"at {place}, stopped again one item later,")
    for run in (fresh, used, again, last):
        run.close()


def _check_rest(run: Run, rest: list[Any], where: str) -> None:
    found = [_comparable((run.number, item)) for item in run]
    assert found == rest, f"{where} goes on with (number, item) {found[:3]}…, not {rest[:3]}…"


def _saved(run: Run, place: int) -> State:
    state: State = json.loads(json.dumps(run.state_dict()))
    again = json.loads(json.dumps(run.state_dict()))
    assert state == again, f"at {place}, the state is {state} and, asked again, {again}"
    return state


def _comparable(item: Any) -> Any:
    """Replace arrays, tensors and pictures by what ``==`` can compare."""
    if isinstance(item, Mapping):
        return {name: _comparable(value) for name, value in item.items()}
    if isinstance(item, list):
        return list(map(_comparable, item))
    if isinstance(item, tuple):
        return type(item), tuple(map(_comparable, item))
    if hasattr(item, "__array__") or hasattr(item, "__array_interface__"):
        array = np.asarray(item)
        return type(item), array.dtype.str, array.shape, array.tobytes()
    return item
