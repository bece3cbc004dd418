"""S3 by s3fs: its session, its options and its credentials, with a reading loop of our own."""

from __future__ import annotations

import asyncio
from typing import Any

from fsspec.asyn import sync

from shardstream.storage.response import RangeResponse, max_response_bytes, plain_etag

_BODY_READ_BYTES = 1 << 20
_SLOWEST_BYTES_PER_S = 1000  # a server that sends a byte now and then does not answer


class S3fsReader:
    """Reads objects through the client of an `s3fs.S3FileSystem`; what came before a cut is kept.

    Its own ``cat_file`` starts over after a cut, tells neither length nor ETag, and waits for a minute for a server that stalls.

    Args:
        filesystem: Open in this process.
        read_timeout_s: Limit of the time without a byte.
    """

    def __init__(self, filesystem: Any, read_timeout_s: float) -> None:
        self._filesystem = filesystem
        self._read_timeout_s = read_timeout_s

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        *,
        keep_partial: bool = False,  # noqa: ARG002
        max_bytes: int | None = None,
    ) -> RangeResponse:
        """Ask once for the bytes ``start`` to ``end``."""
        limit = max_response_bytes(start, end, max_bytes)
        response: RangeResponse = sync(self._filesystem.loop, self._read, path, start, end, limit)
        return response

    async def _read(
        self, path: str, start: int, end: int | None, max_bytes: float
    ) -> RangeResponse:
        bucket, key, version_id = self._filesystem.split_path(path)
        request = {"Bucket": bucket, "Key": key}
        if (start, end) != (0, None):
            request["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        if version_id is not None:
            request["VersionId"] = version_id
        async with asyncio.timeout(
            self._read_timeout_s + 10
        ):  # connecting and asking for credentials, too
            answer = await self._filesystem._call_s3("get_object", **request)
        whole = answer.get("ContentRange", "").rpartition("/")[2]
        parts: list[bytes] = []
        error: Exception | None = None
        try:
            await self._collect(answer["Body"], parts, max_bytes)
        except _TooSlowError:
            raise
        except Exception as broken:  # noqa: BLE001  (the caller judges it, and keeps what came)
            error = broken
        finally:
            answer["Body"].close()
        size = int(whole) if whole.isdigit() else answer.get("ContentLength")
        if size is None:  # a chunked answer, whose end looks like any cut
            async with asyncio.timeout(self._read_timeout_s):
                head = await self._filesystem._call_s3("head_object", Bucket=bucket, Key=key)
            size = head["ContentLength"]
        return RangeResponse(
            data=b"".join(parts),
            size=size,
            version=plain_etag(answer.get("ETag")),
            error=error,
        )

    async def _collect(self, body: Any, parts: list[bytes], max_bytes: float) -> None:
        loop = asyncio.get_running_loop()
        size, begin = 0, loop.time()
        async with asyncio.timeout(self._read_timeout_s) as limit:
            while size <= max_bytes and (chunk := await body.read(_BODY_READ_BYTES)):
                parts.append(chunk)
                size += len(chunk)
                passed_s = loop.time() - begin
                if passed_s > self._read_timeout_s + size / _SLOWEST_BYTES_PER_S:
                    raise _TooSlowError(f"{size} bytes came in {passed_s:.0f} s")
                limit.reschedule(loop.time() + self._read_timeout_s)


class _TooSlowError(TimeoutError):
    """Bytes come so slowly that what came of them is no progress."""
