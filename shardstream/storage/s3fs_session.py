"""The HTTP session of s3fs, without redirects: aiohttp would send the session token to the server that one names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiobotocore.httpsession import AIOHTTPSession

from shardstream.storage.http_status import HttpStatusError


class SessionWithoutRedirects(AIOHTTPSession):  # type: ignore[misc]
    """A session for which a redirect is an error, unless it names the bucket's region, where botocore then asks."""

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)

        async def request(*args: Any, **options: Any) -> Any:
            response = await session.request(*args, allow_redirects=False, **options)
            headers = response.headers
            if "Location" in headers and "x-amz-bucket-region" not in headers:
                response.close()
                raise HttpStatusError(response.status, "redirect")
            return response

        return SimpleNamespace(request=request)
