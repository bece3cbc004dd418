"""Call the functions of the user: of samples that the viewer cannot decode by itself, and of the dataset of a training."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from shardstream.errors import OptionError
from shardstream.pipeline import IndexedSource

UserDecode = Callable[[dict[str, Any]], Mapping[str, Any]]
"""A sample as bytes by field, with ``__key__`` and ``__url__`` -> values to show by name."""


def load_function(name: str, option: str) -> Callable[..., Any]:
    """Import a function by its name.

    >>> load_function("os.path:basename", "--decode")("a/b")
    'b'

    Args:
        name: ``module:function``.
        option: Option that names it, for errors.

    Raises:
        OptionError: If there is no such function.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise OptionError(f"give {option} as module:function, not {name!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{option} {name}: {error}") from error
    if not callable(found):
        raise OptionError(f"{option} {name}: it is no function")
    function: Callable[..., Any] = found
    return function


def open_source(make_dataset: Callable[[], Any]) -> IndexedSource:
    """Return the source of the dataset that the user's function makes.

    Raises:
        OptionError: If it makes none, or one whose order is no plan.
        Exception: Any error of the function.
    """
    dataset = make_dataset()
    source = getattr(getattr(dataset, "pipeline", None), "indexed_source", None)
    if not isinstance(source, IndexedSource):
        raise OptionError(
            f"the function of --dataset returned {type(dataset).__name__}; it must return a ShardDataset, mix or join of shards with an "
            "index, and no step of it may change the number of samples: else no plan says which sample comes when"
        )
    return source


def call(function: UserDecode, sample: dict[str, Any]) -> Mapping[str, Any]:
    """Return the values that the user's function makes of a sample.

    Raises:
        OptionError: If it returns no dict.
        Exception: Any error of the function.
    """
    values = function(sample)
    if not isinstance(values, Mapping):
        raise OptionError(
            f"the function of --decode returned {type(values).__name__}; it must return a dict of values by name"
        )
    return values
