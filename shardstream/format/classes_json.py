"""Encode and decode ``classes.json``: a JSON list of class names, in which item n is class number n."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

from shardstream.errors import ManifestError

CLASSES_NAME = "classes.json"


def encode_classes(names: Sequence[str]) -> bytes:
    r"""Return the bytes of ``classes.json``; equal names give equal bytes.

    >>> encode_classes(["ant", "bee"])
    b'[\n "ant",\n "bee"\n]\n'
    """
    try:
        return (json.dumps(list(names), ensure_ascii=False, indent=1) + "\n").encode()
    except UnicodeEncodeError:  # names that are not valid UTF-8
        return (json.dumps(list(names), indent=1) + "\n").encode()


def decode_classes(data: bytes, *, url: str) -> tuple[str, ...]:
    """Read the bytes of a ``classes.json``.

    Raises:
        ManifestError: If they are not a list of unique names.
    """
    try:
        names = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            f"not JSON: {error}", remedy="write a list of class names", shard=url
        ) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ManifestError(
            f"not a list of class names: {reprlib.repr(names)}",
            remedy='write ["cat", "dog"]',
            shard=url,
        )
    twice, count = max(Counter(names).items(), key=itemgetter(1), default=("", 1))
    if count > 1:
        raise ManifestError(
            f"the class {twice!r} is listed twice", remedy="list each once", shard=url
        )
    return tuple(names)
