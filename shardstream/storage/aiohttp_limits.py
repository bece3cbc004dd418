"""Limit the time and the bytes of responses that a file system on aiohttp, also s3fs, takes whole: pages of listings, look-ups, errors.

aiohttp limits the time between two bytes, and a whole response to five minutes; a server can send gigabytes in that time.
"""

from __future__ import annotations

import asyncio
import http
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import aiohttp

from shardstream.storage.response import HttpStatusError, TooSlowError, Transfer, collect

_PAGE_BYTES, _ERROR_BYTES = 32 << 20, 64 << 10
_CONNECT_S = 10.0


class TooLongError(OSError):
    """A response that is no file, and has more bytes than one of its kind."""


def session_options(read_timeout_s: float) -> dict[str, Any]:
    """Return the options of an `aiohttp.ClientSession` whose responses have limits."""

    class LimitedResponse(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            """Receive the headers, in time: else they may arrive byte by byte, or be announced without end (100 Continue)."""
            async with asyncio.timeout(read_timeout_s):
                return await super().start(connection)

        async def read(self) -> bytes:
            """Receive the body."""
            if self._body is None:
                self._body = await read_whole(self, read_timeout_s)
            return await super().read()

    timeouts = aiohttp.ClientTimeout(
        total=None, sock_connect=min(_CONNECT_S, read_timeout_s), sock_read=read_timeout_s
    )
    return {"timeout": timeouts, "response_class": LimitedResponse}


@cache
def s3fs_session() -> type[Any]:
    """Return the class of a session of s3fs that has limits, and for which a redirect is an error, unless it names the bucket's region.

    In that region botocore asks again. aiohttp would send the session token to the server that a redirect names.
    """
    from aiobotocore.httpsession import AIOHTTPSession  # noqa: PLC0415  (comes with s3fs, an extra)

    class SessionWithoutRedirects(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            read_timeout_s = session.timeout.sock_read

            async def request(*args: Any, **options: Any) -> Any:
                # The response to an upload begins after its last byte.
                limit_s = None if options.get("data") else 2 * read_timeout_s  # connecting, too
                async with asyncio.timeout(limit_s):
                    response = await session.request(*args, allow_redirects=False, **options)
                headers = response.headers
                if "Location" in headers and "x-amz-bucket-region" not in headers:
                    response.close()
                    raise HttpStatusError(response.status, "redirect")
                # botocore takes all bodies whole but those of files, which it reads piece by piece.
                response.read = partial(read_whole, response, read_timeout_s)
                return response

            return SimpleNamespace(request=request)

    return SessionWithoutRedirects


async def read_whole(response: aiohttp.ClientResponse, read_timeout_s: float) -> bytes:
    """Receive the whole body of a response that is no file; of an error as much as arrives in time.

    Raises:
        OSError: If it is too long (TooLongError), or arrives too slowly.
    """
    is_error = response.status >= http.HTTPStatus.BAD_REQUEST
    limit, transfer = _ERROR_BYTES if is_error else _PAGE_BYTES, Transfer(read_timeout_s)
    try:
        data, error = await collect(response.content.iter_any(), transfer, limit)
    except TooSlowError as slow:
        data, error = b"", slow
    if error is None and len(data) <= limit:
        return data
    response.close()
    if is_error:
        return data
    raise error or TooLongError(f"the response has over {limit:,} bytes, the limit of its kind")
