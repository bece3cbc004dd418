"""Call the user's function on samples: values that the viewer cannot decode by itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from shardstream.errors import OptionError

UserDecode = Callable[[dict[str, Any]], Mapping[str, Any]]
"""A sample as bytes by field, with ``__key__`` and ``__url__`` -> values to show by name."""


def load_function(name: str) -> UserDecode:
    """Import a function by its name.

    >>> load_function("os.path:basename")("a/b")  # type: ignore[arg-type]
    'b'

    Args:
        name: ``module:function``.

    Raises:
        OptionError: If there is no such function.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise OptionError(f"give --decode as module:function, not {name!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"--decode {name}: {error}") from error
    if not callable(found):
        raise OptionError(f"--decode {name}: it is no function")
    function: UserDecode = found
    return function


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
