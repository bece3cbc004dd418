"""The result of one request, the memory that its bytes may be received into, and the protocol of clients that send it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol, TypedDict, Unpack

if TYPE_CHECKING:
    from shardstream.storage.transfer import Cancellation, Transfer

_MAX_PIECES = 256  # of one call: systems have a limit (IOV_MAX, 1024 on Linux)


class ReceiveBuffer:
    """Memory that the bytes of a range are received into, one piece after the other.

    Args:
        pieces: Writable memory, shape (n,) each, uint8.
    """

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._left = [*pieces]
        self._left.reverse()  # the next piece is the last: cheap to remove

    @property
    def is_full(self) -> bool:
        """Whether all of it was filled."""
        return not any(map(len, self._left))

    def next_pieces(self, size: int) -> list[memoryview]:
        """Return the memory of the next ``size`` bytes, or of fewer if it is in over 256 pieces."""
        pieces: list[memoryview] = []
        for piece in islice(reversed(self._left), _MAX_PIECES):
            pieces.append(piece[:size])
            size -= len(pieces[-1])
            if not size:
                break
        return pieces

    def advance(self, size: int) -> None:
        """Go on after ``size`` bytes that were received."""
        while size:
            piece = self._left.pop()
            if len(piece) > size:
                self._left.append(piece[size:])
            size -= min(size, len(piece))

    def fill(self, data: bytes | memoryview) -> None:
        """Copy the next bytes; those for which there is no memory are ignored."""
        view = memoryview(data)
        while view and (pieces := self.next_pieces(len(view))):
            for piece in pieces:
                piece[:] = view[: len(piece)]
                view = view[len(piece) :]
            self.advance(sum(map(len, pieces)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeResponse:
    """The bytes of one response.

    Args:
        data: From the start of the request on; fewer than requested if the response broke off.
        received: Bytes that were received into the request's `ReceiveBuffer` instead.
        size: Length of the whole file, if the server sends it.
        version: ETag without quotes, if the server sends one.
        error: Why the bytes end early.
    """

    data: bytes | memoryview = b""
    received: int = 0
    size: int | None = None
    version: str | None = None
    error: Exception | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the response, wherever they are."""
        return self.received + len(self.data)


class RequestOptions(TypedDict, total=False):
    """Optional arguments of `RangeReader.read`."""

    max_bytes: int | None
    """Bytes that are needed of a file that is read to its end; a client may read more."""
    into: ReceiveBuffer | None
    """Memory that a client which can do so receives the bytes into."""
    on_receive: Callable[[], None] | None
    """Called each time bytes have arrived."""
    cancelled: Cancellation | None
    """Set when the bytes are not needed any more."""


class RangeReader(Protocol):
    """A client that is open in this process and reads ranges; thread-safe."""

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        transfer: Transfer,
        **options: Unpack[RequestOptions],
    ) -> RangeResponse:
        """Request the bytes ``start`` to ``end`` once; None is the end of the file.

        It returns or raises when no byte arrives in time, or the bytes arrive too slowly.

        Args:
            path: The path on the file system; "bucket/key" on S3.
            start: Offset of the first byte.
            end: Offset after the last byte.
            transfer: Has the limit of its time, and records its bytes.
            options: See `RequestOptions`.

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
