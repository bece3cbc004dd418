"""Make the keys of records from a template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardstream.errors import OptionError

FILE_KEYS = ("{stem}", "{path}", "{path}_{index:08d}")
"""Default templates of images: the first is taken that gives each image of a dataset a key of its own."""
# Next to another name the number may not tell keys apart: "{class}{index}" gives "1" + "11" and "11" + "1".
_RUNNING = re.compile(r"[^{}]*\{index(:\d*d?)?\}[^{}]*")


def has_numbers(template: str) -> bool:
    """Return whether keys are running numbers with constant text, so that they all differ.

    >>> [has_numbers(key) for key in ("a/{index:08d}", "{class}{index}", "{index:.0e}", "{{index}}")]
    [True, False, False, False]
    """
    return _RUNNING.fullmatch(template) is not None


def make_key(template: str, names: Mapping[str, Any], *, source: str) -> str:
    """Return a key; a dot would end it, so in its last part each becomes "_".

    >>> make_key("photos/{stem}", {"stem": "a.b"}, source="photos")
    'photos/a_b'

    Args:
        template: `str.format` text, e.g. ``"{index:08d}"``.
        names: What it may name.
        source: Name of the source, for messages.

    Raises:
        OptionError: If the template names something unknown.
    """
    try:
        folder, slash, last = template.format_map(names).rpartition("/")
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise OptionError(
            f"the key {template!r} cannot be filled in ({type(error).__name__}: {error}); "
            f"known here: {', '.join(f'{{{name}}}' for name in names)}",
            shard=source,
        ) from error
    return folder + slash + last.replace(".", "_")
