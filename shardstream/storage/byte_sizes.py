"""Parse sizes such as "2 GB"."""

from __future__ import annotations

import re

from shardstream.errors import OptionError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_EXPONENTS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(size: int | str) -> int:
    """Return a number of bytes: 1 MB is 10^6, 1 MiB is 2^20.

    >>> parse_bytes("256MB"), parse_bytes("1.5 GiB"), parse_bytes(512)
    (256000000, 1610612736, 512)

    Raises:
        OptionError: If it is not a size, or less than 1.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise OptionError(f"{size!r} is not a size; write '256MB', '1GiB' or a number of bytes")
        number, prefix, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** _EXPONENTS[prefix.lower()])
    if size < 1:
        raise OptionError(f"a size must be 1 byte or more, not {size}")
    return size
