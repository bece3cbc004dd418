"""Import packages of extras when they are first needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shardstream.errors import OptionError, how_to_install


def import_extra(name: str, *, extra: str, purpose: str) -> Any:
    """Import a package of an extra.

    Args:
        name: Module to import.
        extra: The extra of shardstream that installs it.
        purpose: What needs it, for the error.

    Raises:
        OptionError: If it cannot be imported.
    """
    try:
        return import_module(name)
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        raise OptionError(
            f"{purpose} needs the package {name} ({error}): {how_to_install(extra)}"
        ) from error
