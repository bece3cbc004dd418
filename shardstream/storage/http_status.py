"""Decide the meaning of an HTTP status: the class of the error, its advice, and whether a retry can help.

Only 404 and 410 say that a file is missing. Of the other 4xx, three are temporary (408, 425, 429); a 5xx is, unless the server says
that it cannot do such a request at all (https://www.rfc-editor.org/rfc/rfc9110#section-15).
"""

from __future__ import annotations

from typing import NamedTuple

from shardstream.errors import AccessDeniedError, ChangedError, NotFoundError, StorageError


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
_UNSUPPORTED = ErrorMeaning("the server does not support this request")
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
    501: _UNSUPPORTED,
    503: THROTTLED,
    505: _UNSUPPORTED,
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
