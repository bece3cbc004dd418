"""Import packages of extras when they are needed, and find decoders of installed packages by their entry points."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
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


GROUP = "shardstream.decoders"


@dataclass(frozen=True, slots=True)
class InstalledDecoder:
    """A decoder that is imported when the first field of its name is decoded; picklable.

    Args:
        name: Last part of the field name, such as ``dcm``.
        targets: ``module:function`` of each package that provides it.
    """

    name: str
    targets: tuple[str, ...]

    def __call__(self, data: bytes) -> Any:
        """Decode the bytes of a field.

        Raises:
            OptionError: If several packages offer this name, or the function cannot be imported.
        """
        return _load_decoder(self)(data)


@cache
def _load_decoder(decoder: InstalledDecoder) -> Callable[[bytes], Any]:
    choice = f"choose one with decode(fields={{{decoder.name!r}: function}})"
    if len(decoder.targets) > 1:
        raise OptionError(
            f"several installed packages decode {decoder.name!r}: {', '.join(decoder.targets)}; {choice}"
        )
    entry = EntryPoint(name=decoder.name, value=decoder.targets[0], group=GROUP)
    try:
        found = entry.load()
    except Exception as error:
        raise OptionError(
            f"the installed decoder of {decoder.name!r}, {entry.value}, cannot be imported: {error}; "
            f"install its dependencies, or {choice}"
        ) from error
    if not callable(found):
        raise OptionError(
            f"the installed decoder of {decoder.name!r}, {entry.value}, is not callable; {choice}"
        )
    return found  # type: ignore[no-any-return]  # its type is known only to the other package


@cache
def installed_decoders() -> dict[str, InstalledDecoder]:
    """Return the decoders of all installed packages by field name, without importing them."""
    targets = defaultdict[str, list[str]](list)
    for entry in entry_points(group=GROUP):
        if entry.value not in targets[entry.name]:
            targets[entry.name].append(entry.value)
    return {name: InstalledDecoder(name, tuple(found)) for name, found in targets.items()}
