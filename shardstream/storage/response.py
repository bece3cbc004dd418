"""What a client hands back for one request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeResponse:
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


class RangeReader(Protocol):
    """One way to read files: a client that is open in this process. Safe among threads."""

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        *,
        keep_partial: bool = False,
        max_bytes: int | None = None,
    ) -> RangeResponse:
        """Ask once for the bytes ``start`` to ``end``; None is the file's end.

        It returns, or raises, within a bounded time after the last byte that came.

        Args:
            path: As the file system names it; "bucket/key" on S3.
            start: Offset of the first byte.
            end: Offset behind the last.
            keep_partial: Keep what comes before an answer breaks off, at the price of a copy.
            max_bytes: Bytes that are wanted of a file that is read to its end; where a client can, it reads little more.

        Raises:
            Exception: Whatever the client raises if nothing came.
        """


def max_response_bytes(start: int, end: int | None, max_bytes: int | None) -> float:
    """Return how many bytes an answer may have: more are not those that were asked for."""
    if end is not None:
        return end - start
    return math.inf if max_bytes is None else max_bytes


def plain_etag(etag: str | None) -> str | None:
    """Return an ETag without quotes: Azure quotes it in headers, but not in listings.

    >>> plain_etag('"0x8D"')
    '0x8D'
    """
    return None if etag is None else etag.strip('"')
