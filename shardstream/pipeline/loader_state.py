"""The position of a loader, its state in JSON values, and the check before a resume."""

from __future__ import annotations

import hashlib
import json
import reprlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from shardstream.errors import StateError
from shardstream.order import EpochOrder
from shardstream.pipeline.indexed_source import IndexedSource
from shardstream.pipeline.mix import MixIndexedSource
from shardstream.pipeline.options import OrderOptions
from shardstream.pipeline.stage import EPOCHS, State

VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPosition:
    """Position of a loader.

    Args:
        epoch: Epoch number, from 0.
        consumed: Samples of the epoch that all ranks together have received, for indexed sources.
        parts: For other sources: the state of each worker's part of the epoch.
        next_part: For other sources: the part that is read next.
    """

    epoch: int = 0
    consumed: int = 0
    parts: Mapping[int, State] = field(default_factory=dict)
    next_part: int = 0

    def after_part(self, part: int, state: State, num_parts: int) -> LoaderPosition:
        """Return the position after a batch of a part."""
        parts = {**self.parts, part: state}
        return replace(self, parts=parts, next_part=(part + 1) % num_parts)


def seal_state(state: Mapping[str, Any]) -> State:
    """Add version and checksum to a state, to detect edits and damage."""
    state = {"version": VERSION, **state, "state_checksum": None}
    text = json.dumps(state, sort_keys=True, default=str)
    return {**state, "state_checksum": hashlib.sha256(text.encode()).hexdigest()[:16]}


def find_states(value: Any) -> list[State]:
    """Return the states of loaders in nested dicts and lists, such as a checkpoint; the outer ones first."""
    found, waiting = list[State](), [value]
    for one in waiting:  # grows
        if isinstance(one, Mapping) and {"state_checksum", "kind"} <= one.keys():
            found.append(dict(one))
        elif isinstance(one, Mapping | list | tuple):
            waiting += one.values() if isinstance(one, Mapping) else one
    return found


def state_digest(state: Mapping[str, Any]) -> str:
    """Return 16 hex digits that change with the data, order and steps of a state, and with its past, but not with its position.

    Args:
        state: Its fields, and those that describe the steps.
    """
    left_out = (*_NOT_COMPARED, "versions")  # a tag is a version of the same data
    if state["kind"] == "plan" and not state["shuffle"]:
        left_out += _ORDER  # without shuffle they do not affect the sequence
    compared = dict(state)
    for name in left_out:
        compared.pop(name, None)
    digest: str = seal_state(compared)["state_checksum"]
    return digest


def past_of(state: Mapping[str, Any], digest: str) -> str | None:
    """Return the ``past`` of the states that follow a saved one: another one if data, order or steps have changed since.

    So a training that has read other data for some time does not have the digest of one that has not.

    Args:
        state: The saved state.
        digest: Digest that it would have if it were saved here.
    """
    return state.get("past") if state.get("digest") == digest else state["state_checksum"]


def compare_states(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the differences in data, order and steps of two states: name -> both values; empty if their digests are equal.

    Positions and topologies are not compared. Names of nested values are joined by dots: ``mix.weights.web``. ``past`` is the checksum of a state
    of other data, order or steps that the training has continued; None if there was none. For steps that differ both values are the
    digests, unless states list their steps. Steps and past of a state without a digest, of an earlier version, are not known.

    >>> compare_states({"seed": 1, "epoch": 2, "digest": "ab"}, {"seed": 3, "epoch": 4, "digest": "cd"})
    {'seed': (1, 3)}
    """
    if one.get("digest", 0) == other.get("digest"):
        return {}
    values = [dict(_flat(state)) for state in (one, other)]
    pairs = {name: (values[0].get(name), values[1].get(name)) for name in values[0] | values[1]}
    found = {
        name: pair
        for name, pair in pairs.items()
        if pair[0] != pair[1] and name.partition(".")[0] not in _NOT_COMPARED
    }
    if "fingerprint" not in found:  # a tag is a version of the same data
        found.pop("versions", None)
    if not found and "digest" in one and "digest" in other:
        return {"steps": (one["digest"], other["digest"])}
    return found


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner


def plan_state(order: EpochOrder, data: State, position: LoaderPosition) -> State:
    """Return the state of an exact loader: a few numbers, the same on every rank.

    Args:
        order: Order of the samples.
        data: Fields that the dataset must match (fingerprint, checksums, and for a mix its recipe), and the digest.
        position: The position; after all samples it is the start of the next epoch.
    """
    epoch, consumed = position.epoch, position.consumed
    if consumed >= order.nsamples > 0:
        epoch, consumed = epoch + 1, 0
    return seal_state(
        {
            "kind": "plan",
            **data,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "epoch": epoch,
            "consumed": consumed,
            "microbatch": order.batch,
            "lanes": order.lanes,
            "window": order.window,
            "block": order.block,
        }
    )


def data_identity(source: IndexedSource) -> State:
    """Return the fields of the data that a state must match."""
    samples = source.samples
    identity: State = {"fingerprint": samples.fingerprint, "checksums": samples.checksums}
    return identity | source.describe(steps=False)


def part_state(topology: State, position: LoaderPosition) -> State:
    """Return the state of a loader with a position per worker.

    Args:
        topology: Fields that must match at a resume.
        position: Position of the loader.
    """
    parts = {str(part): value for part, value in position.parts.items()}
    return seal_state(
        {
            **topology,
            "digest": state_digest(topology),
            "epoch": position.epoch,
            "next_part": position.next_part,
            "parts": parts,
        }
    )


def position_in(state: Mapping[str, Any]) -> LoaderPosition:
    """Return the position in a state that was checked."""
    if state["kind"] == "plan":
        return LoaderPosition(epoch=state["epoch"], consumed=state["consumed"])
    parts = {int(part): value for part, value in state["parts"].items()}
    return LoaderPosition(epoch=state["epoch"], parts=parts, next_part=state["next_part"])


def parse_state(text: str) -> State:
    """Return the state of a loader in JSON, as ``json.dumps(loader.state_dict())`` writes it, or in an object that contains it.

    Raises:
        StateError: If it is no JSON, or as in `state_in`.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateError(
            f"not JSON: {error}; give what json.dumps(loader.state_dict()) prints"
        ) from error
    return state_in(value)


def state_in(value: Any) -> State:
    """Return the state of a loader in nested dicts and lists, such as a checkpoint.

    Raises:
        StateError: If there is none, or there are several.
    """
    found = find_states(value)
    if not found:
        raise StateError(
            "not a state of a ShardLoader: no state_checksum; give json.dumps(loader.state_dict())"
        )
    if any(state != found[0] for state in found):
        raise StateError(f"states of {len(found)} loaders; give the one of them as JSON")
    return found[0]


def resumed_source(
    source: IndexedSource, given: OrderOptions, state: Any, batch_size: int
) -> IndexedSource:
    """Return a source with the order of a state, and with the weights that were given in its training.

    Args:
        source: The dataset.
        given: Options of its order, as the user gave them; None matches any.
        state: A state of kind "plan".
        batch_size: Samples of a batch of one rank.

    Raises:
        StateError: If an exact resume is impossible.
    """
    if isinstance(source, MixIndexedSource):
        mix = state.get("mix") if isinstance(state, Mapping) else None
        changes = mix.get("changes", ()) if isinstance(mix, Mapping) else ()
        source = replace(source, changes=changes)
    # Without shuffle, window and block do not affect the sequence.
    names = _ORDER if source.shuffle else _ORDER[:2]
    own = {"seed": source.seed, "shuffle": source.shuffle}
    own |= {name: getattr(given, name) for name in names}
    check_state(state, expected={"kind": "plan"} | own | data_identity(source))
    if batch_size % state["microbatch"]:
        raise StateError(
            f"microbatch: the state says {state['microbatch']}, which does not divide batch_size={batch_size} here; "
            "use a multiple of it, or start without the state"
        )
    return source.with_options(**{name: state[name] for name in names})


def check_state(state: Any, *, expected: Mapping[str, Any]) -> None:
    """Refuse a state that cannot be continued exactly here.

    Args:
        state: The saved state.
        expected: Fields that it must match, by name; a value of None matches any. ``versions`` are for the message only.

    Raises:
        StateError: With the first difference and both values.
    """
    if not isinstance(state, Mapping) or "version" not in state or "kind" not in state:
        raise StateError(f"not a state of a ShardLoader: {str(state)[:80]}")
    if state["version"] != VERSION:
        raise StateError(
            f"the state has version {state['version']!r}, this shardstream continues version {VERSION}; finish the epoch with "
            "the shardstream that saved it, or restart it with set_epoch"
        )
    for name, value in expected.items():
        if name in ("checksums", "stages", "versions"):
            continue
        if value is not None and state.get(name) != value:
            if name == "fingerprint":
                _check_versions(state.get("versions"), expected.get("versions"))
            raise StateError(
                f"{_WHAT.get(name, name)}: the state says {state.get(name)!r}, here it is {value!r}; {_remedy(name)}"
            )
    for name in ("weights", "nodes", "balance"):
        if name in state and name not in expected:
            raise StateError(
                f"{_WHAT[name]}: the state says {state[name]!r}, here are none; {_remedy(name)}"
            )
    _check_steps(state.get("stages", []), expected.get("stages", []))
    _check_checksums(state.get("checksums"), expected.get("checksums"))
    _check_position(state)
    if seal_state(state)["state_checksum"] != state.get("state_checksum"):
        raise StateError(
            "this state is damaged or was edited: its checksum is wrong; use the state as it was saved"
        )


def _check_versions(saved: Any, here: Any) -> None:
    """Name the versions in the error of other data, if they are known to differ."""
    if saved and here and saved != here:
        raise StateError(
            f"version of the dataset: the state says {saved}, here it is {here}; only a ShardLoader without steps that change counts finishes the epoch "
            "of an earlier version: open the dataset with version= until the epoch ends, or start without the state"
        )


def _check_steps(saved_values: Any, expected: Sequence[str]) -> None:
    """Refuse a state whose steps differ; name the first difference."""
    pairs = zip_longest(saved_values if isinstance(saved_values, list) else [], expected)
    for place, (saved, current) in enumerate(pairs, start=1):
        if current not in (saved, _with_new_names(saved)):
            raise StateError(
                f"step {place} of the pipeline: the state says {saved or 'nothing'}, here it is {current or 'nothing'}; use the same "
                "steps (for a renamed function pass its old name as name='…'), or restart the epoch"
            )


def _with_new_names(step: object) -> object:
    """Return a saved step with the present names of its options."""
    for old, new in _NEW_NAMES.items():
        step = step.replace(old, new) if isinstance(step, str) else step
    return step


def _check_checksums(saved_values: Any, expected: Sequence[str | None] | None) -> None:
    """Refuse a state with other checksums; warn if only the state has checksums."""
    if expected is None:
        return
    if not isinstance(saved_values, list) or len(saved_values) != len(expected):
        raise StateError(f"this state is damaged: checksums is {str(saved_values)[:80]!r}")
    pairs = [pair for pair in zip(saved_values, expected, strict=True) if pair[0] is not None]
    for saved, current in pairs:
        if current not in (None, saved):
            raise StateError(
                f"checksums of the dataset: the state says {saved!r}, here it is {current!r}; {_remedy('fingerprint')}"
            )
    if any(current is None for _, current in pairs):
        warnings.warn(
            "the state has checksums of its data, but the dataset here has none: names, counts and sizes match, the bytes were not "
            "compared. Write a manifest (shardstream index) to compare them.",
            UserWarning,
            stacklevel=4,
        )


def _check_position(state: Mapping[str, Any]) -> None:
    """Refuse an impossible position."""
    for name in _NUMBERS.get(state["kind"], ()):
        value, limit = state.get(name), _LIMITS.get(name, _MAX_VALUE)
        if not isinstance(value, int) or not (name in _ORDER) <= value < limit:
            raise StateError(f"this state is damaged: {name} is {reprlib.repr(value)}")
    for name in _POSITIONS.get(state["kind"], ()):
        if not isinstance(state.get(name), Mapping):
            raise StateError(f"this state is damaged: {name} is {str(state.get(name))[:80]!r}")
    if state["kind"] == "plan" and state["consumed"] % state["microbatch"]:
        raise StateError(
            f"this state is damaged: consumed is {state['consumed']}, microbatch {state['microbatch']}"
        )


# As states have them, and as they are called since.
_NEW_NAMES = {", partial=False": ", drop_last=True", ", leftover='drop'": ", drop_last=True"}
_ORDER = ("microbatch", "lanes", "window", "block")
_NOT_COMPARED: tuple[str, ...] = (
    "epoch", "consumed", "parts", "next_part", "run", "rank", "worker", "topology", "digest", "state_checksum",
)  # fmt: skip
_MAX_VALUE = 1 << 62
_LIMITS = {"epoch": EPOCHS, "lanes": 1 << 24}
_NUMBERS = {
    "plan": ("epoch", "consumed", *_ORDER),
    "follow": ("consumed", "origin"),
    "parts": ("epoch", "next_part"),
    "reader": ("epoch",),
}
_POSITIONS = {"parts": ("parts",), "reader": ("run",)}
_WHAT = {
    "kind": "kind of pipeline",
    "fingerprint": "fingerprint of the dataset",
    "weights": "weights= of the samples",
    "nodes": "nodes= of the order",
    "balance": "balance= of the order",
    "num_workers": "number of workers",
    "world_size": "number of ranks",
}


def _remedy(name: str) -> str:
    if name == "fingerprint":
        return "it was saved with other data (shards, counts, sizes or checksums differ); use the same dataset, or start without the state"
    if name in ("num_workers", "world_size", "rank", "batch_size"):
        return (
            "steps that change counts (shuffle, batched, …) resume only on the same topology; "
            "use the same one, or move these steps before packing"
        )
    if name == "nodes":
        return "finish the epoch with the same value, then leave out the state and call set_epoch"
    if name == "kind":
        return (
            "'follow' is of a dataset with version=Follow(); 'parts' are positions of workers: steps change counts, or the state was saved before select kept the numbers of samples: use the "
            "same steps, or restart the epoch with set_epoch"
        )
    return "use the same value, or start without the state"
