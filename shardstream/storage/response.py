"""The result of one request, and the protocol of clients that send it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeResponse:
    """The bytes of one response.

    Args:
        data: From the start of the request on; fewer than requested if the response broke off.
        size: Length of the whole file, if the server sends it.
        version: ETag without quotes, if the server sends one.
        error: Why the bytes end early.
    """

    data: bytes | memoryview
    size: int | None = None
    version: str | None = None
    error: Exception | None = None


class RangeReader(Protocol):
    """A client that is open in this process and reads ranges; thread-safe."""

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        *,
        keep_partial: bool = False,
        max_bytes: int | None = None,
    ) -> RangeResponse:
        """Request the bytes ``start`` to ``end`` once; None is the end of the file.

        It returns or raises within a bounded time after the last byte.

        Args:
            path: The path on the file system; "bucket/key" on S3.
            start: Offset of the first byte.
            end: Offset after the last byte.
            keep_partial: Keep the bytes before a cut, which costs a copy.
            max_bytes: Bytes that are needed of a file that is read to its end; a client may read more.

        Raises:
            Exception: Any error of the client, if no byte arrived.
        """


def max_response_bytes(start: int, end: int | None, max_bytes: int | None) -> float:
    """Return how many bytes a response may have; a longer one is not the requested range."""
    if end is not None:
        return end - start
    return math.inf if max_bytes is None else max_bytes


def plain_etag(etag: str | None) -> str | None:
    """Return an ETag without quotes: Azure quotes it in headers, but not in listings.

    >>> plain_etag('"0x8D"')
    '0x8D'
    """
    return None if etag is None else etag.strip('"')
