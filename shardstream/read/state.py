"""What a loader's state holds, and the checks before it is continued."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardstream.errors import StateError
from shardstream.read.plan import Order
from shardstream.read.stage import Position, State

VERSION = 1


def plan_state(order: Order, *, fingerprint: str, epoch: int, consumed: int) -> State:
    """Return the state of an exact loader: a few numbers, the same on every rank.

    Args:
        order: What the batches are made of.
        fingerprint: Of the dataset.
        epoch: From 0.
        consumed: Samples of the epoch that all ranks together have seen; all of them means the start of the next epoch.
    """
    if consumed >= order.nsamples > 0:
        epoch, consumed = epoch + 1, 0
    return {
        "version": VERSION,
        "kind": "plan",
        "fingerprint": fingerprint,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "epoch": epoch,
        "consumed": consumed,
        "microbatch": order.batch,
        "lanes": order.lanes,
        "window": order.window,
        "block": order.block,
    }


def part_state(topology: State, position: Position) -> State:
    """Return the state of a loader whose workers each have a position of their own.

    Args:
        topology: What it must agree with when it is continued.
        position: Where it is.
    """
    parts = {str(part): value for part, value in position.parts.items()}
    return {
        "version": VERSION,
        **topology,
        "epoch": position.epoch,
        "next_part": position.next_part,
        "parts": parts,
    }


def check_state(state: Any, *, mine: Mapping[str, Any]) -> None:
    """Refuse a state that cannot be continued exactly here.

    Args:
        state: What was saved.
        mine: What it must agree with, by name; a value of None agrees with anything.

    Raises:
        StateError: Naming the first difference, with both values.
    """
    if not isinstance(state, Mapping) or "version" not in state or "kind" not in state:
        raise StateError(f"no state of a ShardLoader: {str(state)[:80]}")
    if state["version"] != VERSION:
        raise StateError(
            f"a state of version {state['version']!r}; this shardstream continues version {VERSION}"
        )
    for name, value in mine.items():
        if value is not None and state.get(name) != value:
            raise StateError(
                f"{_WHAT.get(name, name)}: the state says {state.get(name)!r}, here it is {value!r}; {_remedy(name)}"
            )
    _check_position(state)


def _check_position(state: Mapping[str, Any]) -> None:
    """Refuse a position that no state has."""
    for name in _NUMBERS.get(state["kind"], ()):
        value = state.get(name)
        if not isinstance(value, int) or value < (name in _ORDER):
            raise StateError(f"this state is damaged: {name} is {value!r}")
    for name in _POSITIONS.get(state["kind"], ()):
        if not isinstance(state.get(name), Mapping):
            raise StateError(f"this state is damaged: {name} is {str(state.get(name))[:80]!r}")
    if state["kind"] == "plan" and state["consumed"] % state["microbatch"]:
        raise StateError(
            f"this state is damaged: consumed is {state['consumed']}, microbatch {state['microbatch']}"
        )


_ORDER = ("microbatch", "lanes", "window", "block")
_NUMBERS = {
    "plan": ("epoch", "consumed", *_ORDER),
    "parts": ("epoch", "next_part"),
    "reader": ("epoch",),
}
_POSITIONS = {"parts": ("parts",), "reader": ("run",)}
_WHAT = {
    "kind": "kind of pipeline",
    "fingerprint": "fingerprint of the dataset",
    "stages": "steps of the pipeline",
    "num_workers": "number of workers",
    "world_size": "number of ranks",
}


def _remedy(name: str) -> str:
    if name == "fingerprint":
        return "it was taken on other data (shards, counts or sizes differ); name the same dataset, or start anew"
    if name in ("num_workers", "world_size", "rank", "batch_size"):
        return (
            "steps that change counts (select, shuffle, batched, …) resume on the same topology alone; "
            "use the same one, or move them before packing"
        )
    return "use the same value, or start anew"
