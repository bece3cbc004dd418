"""Compare the head of a response with the request: only the requested bytes of one version of a file are accepted."""

from __future__ import annotations

import http
import re
from collections.abc import Mapping
from typing import NamedTuple

from shardstream.errors import StorageError
from shardstream.storage.http_status import HttpStatusError
from shardstream.storage.response import plain_etag

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
