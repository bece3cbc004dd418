"""Requests and responses of a file: what a client gets and returns, the meaning of a status, and whether a response is the requested range.

Only 404 and 410 say that a file is missing. Of the other 4xx, three are temporary (408, 425, 429); a 5xx is, unless the server says
that it cannot do such a request at all (https://www.rfc-editor.org/rfc/rfc9110#section-15). Only the requested bytes of one version of
a file are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict, Unpack

if TYPE_CHECKING:
    from shardstream.storage.transfer import Cancellation, Transfer


import http
import re
from collections.abc import Mapping
from typing import NamedTuple

from shardstream.errors import AccessDeniedError, ChangedError, NotFoundError, StorageError


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
    """Optional arguments of `RangeReader.read`."""

    max_bytes: int | None
    """Bytes that are needed of a file that is read to its end; a client may read more."""
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
    "access refused; check the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and the bucket's policy",
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


def range_header(start: int, end: int | None) -> dict[str, str]:
    """Return the header that requests a range; none for a whole file, because a range of an empty one would be refused.

    >>> range_header(5, 9), range_header(5, None), range_header(0, None)
    ({'Range': 'bytes=5-8'}, {'Range': 'bytes=5-'}, {})
    """
    if (start, end) == (0, None):
        return {}
    return {"Range": f"bytes={start}-{'' if end is None else end - 1}"}


def check_head(
    url: str, start: int, end: int | None, status: int, headers: Mapping[str, str]
) -> FileFacts:
    """Return what a response says about its file, if its body is the requested range, or begins with it.

    A shorter range is accepted: the rest is requested again.

    Args:
        url: The URL, for messages.
        start: First byte of the request.
        end: The byte after the last; None is the end of the file.
        status: Status of the response.
        headers: Its headers, found by names in lower case.

    Raises:
        StorageError: If the body is not the requested range.
        HttpStatusError: If there is none, as in a redirect without an address.
    """
    if status == http.HTTPStatus.PARTIAL_CONTENT:
        size = _check_range(url, start, end, headers)
    elif status != http.HTTPStatus.OK:
        raise HttpStatusError(status, "without a file")
    elif start:  # the file from its first byte
        raise ranges_ignored_error(url, start)
    else:
        # A length beside chunks counts for nothing (RFC 9112, 6.3).
        length = "" if "transfer-encoding" in headers else headers.get("content-length", "")
        size = int(length) if length.isdigit() else None
    return FileFacts(size, version_in(headers))


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


def _check_range(url: str, start: int, end: int | None, headers: Mapping[str, str]) -> int | None:
    """Return the length of the file of a partial response."""
    sent = headers.get("content-range", "")
    found = _CONTENT_RANGE.fullmatch(sent)
    if found is None:
        raise _other_range_error(url, start, end, repr(sent))
    first, after, size = int(found[1]), int(found[2]) + 1, found[3]
    whole = None if size == "*" else int(size)
    is_inside = first < after and (whole is None or after <= whole)
    is_asked = first == start and (end is None or after <= end)
    # A request without a range, to which a proxy returned a part of the file that it had.
    is_cut = (start, end) == (0, None) and after != whole
    if not is_inside or not is_asked or is_cut:
        raise _other_range_error(url, start, end, repr(sent))
    return whole


def ranges_ignored_error(url: str, offset: int) -> StorageError:
    """Return the error of a response that is longer than the requested range."""
    return StorageError(
        "the server ignored the requested range and sent more bytes; "
        "serve the files with one that supports ranges, such as nginx, Caddy or an S3 server (Python's http.server does not)",
        shard=url,
        offset=offset,
    )


def _other_range_error(url: str, start: int, end: int | None, sent: str) -> StorageError:
    asked = range_header(start, end).get("Range", "the whole file")
    return StorageError(
        f"the server sent other bytes than the requested ones: Content-Range {sent} for {asked}",
        remedy="a cache before the server may mix up ranges: read past it, or switch off that it keeps parts of files",
        shard=url,
        offset=start,
    )
