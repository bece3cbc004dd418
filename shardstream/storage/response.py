"""Requests and responses of a file: the range that a client gets, the limits of a response, its meaning, and whether it is the requested range.

Only 404 and 410 say that a file is missing. Of the other 4xx, three are temporary (408, 425, 429); a 5xx is, unless the server says
that it cannot do such a request at all (https://www.rfc-editor.org/rfc/rfc9110#section-15). Only the requested bytes of one version of
a file are accepted.

A `Transfer` limits the time of a response by the bytes that have arrived, and another thread can end it. Any client may use it; those with
an event loop do so by `collect` and `run_on_loop`.
"""

from __future__ import annotations

import asyncio
import http
import math
import re
import threading
import time
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

from shardstream.errors import AccessDeniedError, ChangedError, NotFoundError, StorageError

_T = TypeVar("_T")
SLOWEST_BYTES_PER_S = 10_000
"""A server that sends fewer, averaged over a response, is treated like one that sends none."""


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """A range of a file.

    Args:
        path: The path on the file system; "bucket/key" on S3.
        start: Offset of the first byte.
        end: Offset after the last byte; None is the end of the file.
        max_bytes: Bytes that are needed of a file that is read to its end; a client may read more.
    """

    path: str
    start: int = 0
    end: int | None = None
    max_bytes: int | None = None

    @property
    def is_whole_file(self) -> bool:
        """Whether a plain GET is sent: a range of an empty file would be refused."""
        return (self.start, self.end) == (0, None)

    @property
    def header(self) -> dict[str, str]:
        """The header that asks for the range; none for a whole file.

        >>> RangeRequest("a", 5, 9).header, RangeRequest("a", 5).header, RangeRequest("a").header
        ({'Range': 'bytes=5-8'}, {'Range': 'bytes=5-'}, {})
        """
        if self.is_whole_file:
            return {}
        return {"Range": f"bytes={self.start}-{'' if self.end is None else self.end - 1}"}

    @property
    def limit_bytes(self) -> float:
        """Bytes that a response may have; a longer one is not the range."""
        if self.end is not None:
            return self.end - self.start
        return math.inf if self.max_bytes is None else self.max_bytes

    def check_head(self, status: int, headers: Mapping[str, str]) -> FileFacts:
        """Return what a response says about its file, if its body is the range, or begins with it.

        A shorter range is accepted: the rest is requested again.

        Args:
            status: Status of the response.
            headers: Its headers, found by names in lower case.

        Raises:
            StorageError: If the body is not the range.
            HttpStatusError: If there is none, as in a redirect without an address.
        """
        if status == http.HTTPStatus.PARTIAL_CONTENT:
            size = self._check_range(headers.get("content-range", ""))
        elif status != http.HTTPStatus.OK:
            raise HttpStatusError(status, "without a file")
        elif self.start:  # the file from its first byte
            raise ranges_ignored_error(self.path, self.start)
        else:
            # A length beside chunks counts for nothing (RFC 9112, 6.3).
            length = "" if "transfer-encoding" in headers else headers.get("content-length", "")
            size = int(length) if length.isdigit() else None
        return FileFacts(size, version_in(headers))

    def _check_range(self, sent: str) -> int | None:
        """Return the length of the file, by the Content-Range of a partial response."""
        found = _CONTENT_RANGE.fullmatch(sent)
        if found is not None:
            first, after = int(found[1]), int(found[2]) + 1
            whole = None if found[3] == "*" else int(found[3])
            is_inside = first < after and (whole is None or after <= whole)
            is_asked = first == self.start and (self.end is None or after <= self.end)
            # A request without a range, to which a proxy returned a part of the file that it had.
            is_cut = self.is_whole_file and after != whole
            if is_inside and is_asked and not is_cut:
                return whole
        asked = self.header.get("Range", "the whole file")
        raise StorageError(
            f"the server sent other bytes than the requested ones: Content-Range {sent!r} for {asked}",
            remedy="a cache before the server may mix up ranges: read past it, or switch off that it keeps parts of files",
            shard=self.path,
            offset=self.start,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeResponse:
    """The bytes of one response.

    Args:
        data: From the start of the request on; fewer than requested if the response broke off.
        size: Length of the whole file, if the server sends it.
        version: ETag without quotes, if the server sends one.
        error: Why the bytes end early.
    """

    data: bytes | memoryview = b""
    size: int | None = None
    version: str | None = None
    error: Exception | None = None


class RequestOptions(TypedDict, total=False):
    """Optional arguments of `Storage.read_once`."""

    max_bytes: int | None
    """Bytes that are needed of a file that is read to its end, whatever length a hostile server claims; a client may read more."""
    on_receive: Callable[[], None] | None
    """Called each time bytes have arrived, where the client reports them."""
    cancelled: Cancellation | None
    """Set when the bytes are not needed any more: ends a pause and a receive, and prevents further requests."""


class RangeReader(Protocol):
    """A client that is open in this process and reads ranges; thread-safe."""

    def read(self, request: RangeRequest, transfer: Transfer) -> RangeResponse:
        """Send a request once; return at most one response chunk more than it asks for.

        It returns or raises when no byte arrives in time, or the bytes arrive too slowly.

        Args:
            request: The range.
            transfer: Has the limit of its time, and records its bytes.

        Raises:
            Exception: Any error of the client, if no byte arrived.
        """


def plain_etag(etag: str | None) -> str | None:
    """Return an ETag without quotes: Azure quotes it in headers, but not in listings.

    >>> plain_etag('"0x8D"')
    '0x8D'
    """
    return None if etag is None else etag.strip('"')


class ErrorMeaning(NamedTuple):
    """The meaning of a failed request, without its place."""

    advice: str
    """The problem and, after "; ", the action."""
    kind: type[StorageError] = StorageError
    is_retryable: bool = False
    """Whether the same request may work later."""
    is_throttled: bool = False
    """Whether the server throttles."""
    is_past_end: bool = False
    """Whether the range begins after the end of the file."""
    is_silent: bool = False
    """Whether the server did not respond at all."""


REFUSED = ErrorMeaning(
    "access refused; check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and the bucket's policy (docs/minio.md)",
    AccessDeniedError,
)
NOT_FOUND = ErrorMeaning("not found; check the URL", NotFoundError)
THROTTLED = ErrorMeaning(
    "the server throttles requests; use fewer workers", is_retryable=True, is_throttled=True
)
PAST_END = ErrorMeaning("the file is shorter than its index says", is_past_end=True)
CHANGED = ErrorMeaning("the file was changed meanwhile", ChangedError)
FAILED = ErrorMeaning("the server failed; see its log, or try again later", is_retryable=True)
REDIRECTED = ErrorMeaning(
    "the server redirects to another address, which is not followed; use that address"
)
_REJECTED = ErrorMeaning("the server rejects this request; check the URL and the storage options")
UNSUPPORTED = ErrorMeaning("the server does not support this request")
_MEANINGS = {
    401: REFUSED,
    403: REFUSED,
    404: NOT_FOUND,
    408: FAILED,
    410: NOT_FOUND,
    412: CHANGED,
    416: PAST_END,
    425: FAILED,
    429: THROTTLED,
    501: UNSUPPORTED,
    503: THROTTLED,
    505: UNSUPPORTED,
    509: THROTTLED,  # "bandwidth limit exceeded" of some web hosts
}
_OTHERS = {3: REDIRECTED, 4: _REJECTED, 5: FAILED}


def meaning_of_status(status: int) -> ErrorMeaning:
    """Return the meaning of a status from 300 to 599.

    >>> meaning_of_status(410).kind.__name__, meaning_of_status(520).is_retryable
    ('NotFoundError', True)
    """
    return _MEANINGS.get(status) or _OTHERS[status // 100]


class HttpStatusError(OSError):
    """A response whose status is an error.

    Args:
        status: The status.
        text: Its reason, and the message of the server.
        code: The code of S3, such as "NoSuchKey".
        region: The region of the bucket.
    """

    def __init__(
        self, status: int, text: str, *, code: str | None = None, region: str | None = None
    ) -> None:
        super().__init__(f"status code: {status} {text}")
        self.status, self.s3_code, self.region = status, code, region


_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class FileFacts(NamedTuple):
    """Length and version of the file that a response is of; None if the server does not send them."""

    size: int | None
    version: str | None


def version_in(headers: Mapping[str, str]) -> str | None:
    """Return the ETag without quotes, else the time of the last change, else None."""
    etag, time = headers.get("etag"), headers.get("last-modified")
    return plain_etag(etag) if etag else f"Last-Modified {time}" if time else None


def response_version(listed: str | None) -> str | None:
    """Return the version that a response has, of a version that `version_of` found in a listing.

    >>> response_version('ETag "9a03"'), response_version("mtime 12.5")
    ('9a03', 'mtime 12.5')
    """
    kind, _, value = (listed or "").partition(" ")
    return plain_etag(value) if kind == "ETag" else listed


def ranges_ignored_error(url: str, offset: int) -> StorageError:
    """Return the error of a response that is longer than the requested range."""
    return StorageError(
        "the server ignored the requested range and sent more bytes; "
        "serve the files with one that supports ranges, such as nginx, Caddy or an S3 server (Python's http.server does not)",
        shard=url,
        offset=offset,
    )


class CancelledReadError(ConnectionAbortedError):
    """A response that is not needed any more."""

    def __init__(self) -> None:
        super().__init__("the response is not needed any more")


class Cancellation(threading.Event):
    """An event that ends what blocks a thread when it is set, such as a receive."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: set[Callable[[], object]] = set()
        self._lock = threading.Lock()

    def set(self) -> None:
        """Set it, and call the functions of all `ending` blocks."""
        with self._lock:
            super().set()
            ends, self._ends = self._ends, set()
        for end in ends:
            end()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Call a function, once, if the event is set within the block or was before.

        Raises:
            CancelledReadError: If it was before.
        """
        with self._lock:
            if self.is_set():
                raise CancelledReadError
            self._ends.add(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.discard(end)


class Transfer:
    """A response on its way: by when its next bytes are due, and whether they are still needed.

    Args:
        read_timeout_s: Limit of the time without a byte. On average `SLOWEST_BYTES_PER_S` must arrive after that time.
        on_receive: Called when bytes have arrived.
        cancelled: Set when the response is not needed any more.
    """

    def __init__(
        self,
        read_timeout_s: float,
        *,
        on_receive: Callable[[], None] | None = None,
        cancelled: Cancellation | None = None,
    ) -> None:
        self.cancelled = cancelled or Cancellation()
        self.nbytes = 0
        self._begin = time.monotonic()
        self._read_timeout_s, self._on_receive = read_timeout_s, on_receive

    @property
    def due_at(self) -> float:
        """By when the next bytes must arrive, in seconds of the monotonic clock, which is the one of event loops, too."""
        average_s = self.nbytes / SLOWEST_BYTES_PER_S
        return min(time.monotonic(), self._begin + average_s) + self._read_timeout_s

    @property
    def left_s(self) -> float:
        """Seconds within which the next bytes must arrive.

        Raises:
            TimeoutError: If none are left.
        """
        left_s = self.due_at - time.monotonic()
        if left_s <= 0:
            raise self.late()
        return left_s

    def begin_body(self) -> None:
        """Count the time from now on, when the headers have arrived."""
        self._begin = time.monotonic()

    def receive(self, nbytes: int) -> None:
        """Record that bytes have arrived.

        Raises:
            CancelledReadError: If they are not needed any more.
            TimeoutError: If they arrive too slowly.
        """
        self.nbytes += nbytes
        if self._on_receive is not None:
            self._on_receive()
        if self.cancelled.is_set():
            raise CancelledReadError
        if time.monotonic() > self.due_at:
            raise self.late()

    def late(self) -> TimeoutError:
        """Return the error of a response that has stalled.

        Raises:
            TooSlowError: If it was too slow on average.
        """
        passed_s = time.monotonic() - self._begin
        problem = f"{self.nbytes} bytes arrived in {passed_s:.1f} s"
        if passed_s >= self._read_timeout_s + self.nbytes / SLOWEST_BYTES_PER_S:
            raise TooSlowError(problem)
        return TimeoutError(problem)


class TooSlowError(TimeoutError):
    """The bytes of a response arrive too slowly; those that did are not kept, or a slow server would be read from for ever."""


def collect_parts(
    chunks: Iterable[bytes], transfer: Transfer, max_bytes: float
) -> tuple[list[bytes], Exception | None]:
    """Collect the parts of a body until they have more than ``max_bytes``; return them, and why they end early.

    Raises:
        TooSlowError: If they arrive too slowly.
    """
    parts: list[bytes] = []
    try:
        for chunk in chunks:
            parts.append(chunk)
            transfer.receive(len(chunk))
            if transfer.nbytes > max_bytes:
                break
    except TooSlowError:
        raise
    except Exception as broken:  # noqa: BLE001  (the caller judges it and keeps the bytes before it)
        return parts, broken
    return parts, None


async def collect(
    chunks: AsyncIterable[bytes], transfer: Transfer, max_bytes: float
) -> tuple[bytes, Exception | None]:
    """Collect a body of an event loop as `collect_parts`, in one piece; it need not send bytes to be found too slow.

    Raises:
        TooSlowError: If they arrive too slowly.
    """
    parts: list[bytes] = []
    try:
        async with asyncio.timeout_at(transfer.due_at) as limit:
            async for chunk in chunks:
                parts.append(chunk)
                transfer.receive(len(chunk))
                if transfer.nbytes > max_bytes:
                    break
                limit.reschedule(transfer.due_at)
    except TimeoutError:
        return b"".join(parts), transfer.late()
    except Exception as broken:  # noqa: BLE001  (the caller judges it and keeps the bytes before it)
        return b"".join(parts), broken
    return b"".join(parts), None


def run_on_loop(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _T], cancelled: Cancellation
) -> _T:
    """Run a coroutine on a loop of another thread, and wait for its result; it ends when it is not needed any more.

    Raises:
        CancelledReadError: If it was cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        with cancelled.ending(future.cancel):
            return future.result()
    except CancelledError:
        raise CancelledReadError from None
    finally:
        future.cancel()  # after an interrupt of this thread
