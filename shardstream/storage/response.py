"""What a client hands back for one request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The bytes that one request brought.

    Args:
        data: From where the request began; fewer than asked for if it broke off.
        size: Length of the whole file, where the server tells.
        version: Changes with the file's content (ETag), where the server tells.
        error: Why the bytes end early.
    """

    data: bytes | memoryview
    size: int | None = None
    version: str | None = None
    error: Exception | None = None


class Reader(Protocol):
    """One way to read files: a client that is open in this process. Safe among threads."""

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        *,
        piecemeal: bool = False,
        most: int | None = None,
    ) -> Piece:
        """Ask once for the bytes ``start`` to ``end``; None is the file's end.

        It returns, or raises, within a bounded time after the last byte that came.

        Args:
            path: As the file system names it; "bucket/key" on S3.
            start: Offset of the first byte.
            end: Offset behind the last.
            piecemeal: Keep what comes before an answer breaks off, at the price of a copy.
            most: Bytes that are wanted of a file that is read to its end; where a client can, it reads little more.

        Raises:
            Exception: Whatever the client raises if nothing came.
        """


def most_bytes(start: int, end: int | None, most: int | None) -> float:
    """Return how many bytes an answer may have: more are not those that were asked for."""
    if end is not None:
        return end - start
    return math.inf if most is None else most
