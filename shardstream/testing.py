"""Test helpers for pipelines and custom stages: tiny shards, a stream over a list, a check of exact resume."""

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
        folder: Destination; any URL that fsspec supports.
        samples: Samples to write, or a number of samples to generate: sample i has key ``f"{i:06d}"`` and ``cls`` i.
        per_shard: Samples per shard.
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
    """Stream over a list, as the source of a stage under test; an item's number is its position.

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
        """Return the number of items taken."""
        return {"taken": self._taken}

    def load_state_dict(self, state: State) -> None:
        """Move to the position after the first ``taken`` items."""
        self._taken = state["taken"]

    def close(self) -> None:
        """Record that it was closed."""
        self.closed = True


def assert_resumes_exactly(open_run: Callable[[], Run]) -> None:
    """Check that a run resumes with the same items and numbers at every position.

    At every position, including the end: the state is the same when requested twice, survives JSON, and equals the state of a
    fresh run right after loading it; the remaining items are the same in a fresh run, in a used one, and after a second stop
    one item later.

    Args:
        open_run: Opens the run under test, from its start.

    Raises:
        AssertionError: With the position and the difference.
    """
    states, items = _walk(open_run)
    for place, state in enumerate(states):
        _check_position(open_run, place, state, items[place:])


def _walk(open_run: Callable[[], Run]) -> tuple[list[State], list[Any]]:
    """Return the state at every position, after a JSON round trip, and every item."""
    run = open_run()
    states = [_saved(run, 0)]
    items: list[Any] = []
    for item in run:
        items.append(_comparable((run.number, item)))
        states.append(_saved(run, len(items)))
    states.append(
        _saved(run, len(items))
    )  # after StopIteration: must resume like the state before it
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
    """Replace arrays, tensors and images by values that ``==`` can compare."""
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
