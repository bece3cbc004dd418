"""Convert the tensors of nested batches: dicts, lists, tuples, named tuples and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from shardstream.pipeline import like_tuple

_ATOMS = frozenset({str, bytes, int, float, bool, type(None)})


def map_nested(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a batch with converted values; containers keep their types, and the given batch is not changed.

    Args:
        value: The batch, or a part of it.
        convert: Returns the new value; None to search a container, or to leave any other value as it is. It is not called
            for text, bytes and plain numbers.
    """
    if type(value) in _ATOMS:
        return value
    converted = convert(value)
    if converted is not None:
        return converted
    if isinstance(value, Mapping):
        return _map_mapping(value, convert)
    if isinstance(value, Sequence):
        return _map_sequence(value, convert)
    if is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, convert)
    return value


def _map_mapping(value: Mapping[Any, Any], convert: Callable[[Any], Any]) -> Any:
    new = {name: map_nested(one, convert) for name, one in value.items()}
    if type(value) is dict:
        return new
    # As in torch's pin_memory: a mapping may have more than its items, such as a default factory.
    if isinstance(value, MutableMapping):
        clone = copy.copy(value)
        for name, one in new.items():  # not update(): transformers.ModelOutput refuses it
            clone[name] = one
        return clone
    return _rebuilt(value, new)


def _map_sequence(value: Sequence[Any], convert: Callable[[Any], Any]) -> Any:
    if all(type(one) in _ATOMS for one in value):  # columns of keys, ranges, bytearrays
        return value
    new = [map_nested(one, convert) for one in value]
    if type(value) is list:
        return new
    if isinstance(value, tuple):
        return like_tuple(value, new)
    if isinstance(value, MutableSequence):
        clone = copy.copy(value)
        for place, one in enumerate(new):
            clone[place] = one
        return clone
    return _rebuilt(value, new)


def _rebuilt(model: Any, new: Any) -> Any:
    """Return new contents in a container like ``model``; as they are, if its type cannot be built from them."""
    try:
        return type(model)(new)
    except TypeError:
        return new


def _map_dataclass(value: Any, convert: Callable[[Any], Any]) -> Any:
    old = {one.name: getattr(value, one.name) for one in fields(value)}
    changed = {
        name: new for name, one in old.items() if (new := map_nested(one, convert)) is not one
    }
    if not changed:
        return value
    clone = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(clone, name, new)  # it may be frozen
    return clone
