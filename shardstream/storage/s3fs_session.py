"""The HTTP session of s3fs, with limits, and without redirects: aiohttp would send the session token to the server that one names."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

from aiobotocore.httpsession import AIOHTTPSession

from shardstream.storage.aiohttp_limits import read_whole
from shardstream.storage.response import HttpStatusError


class SessionWithoutRedirects(AIOHTTPSession):  # type: ignore[misc]
    """A session for which a redirect is an error, unless it names the bucket's region, where botocore then asks."""

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
