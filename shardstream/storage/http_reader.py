"""Files over HTTP: whatever a server sends, bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import http
from typing import Any

from fsspec.asyn import sync

from shardstream.storage.error_messages import ranges_ignored_error
from shardstream.storage.response import RangeResponse, max_response_bytes

_SLOWEST_BYTES_PER_S = 10_000


class HttpReader:
    """Reads through the session of an fsspec ``HTTPFileSystem``, whose ``cat_file`` keeps all that comes.

    A server may send more than the range it was asked for, or a file without end.

    Args:
        filesystem: Open in this process.
        read_timeout_s: Limit of the time for the first byte; 10 kB a second are asked for after that.
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
        """Ask once for the bytes ``start`` to ``end``, and take one byte more than that at most."""
        limit = max_response_bytes(start, end, max_bytes)
        return RangeResponse(data=sync(self._filesystem.loop, self._read, path, start, end, limit))

    async def _read(self, path: str, start: int, end: int | None, max_bytes: float) -> bytes:
        filesystem, loop = self._filesystem, asyncio.get_running_loop()
        options = dict(filesystem.kwargs)
        if (start, end) != (0, None):  # a range on an empty file would be refused
            last = "" if end is None else end - 1
            options["headers"] = {**options.get("headers", {}), "Range": f"bytes={start}-{last}"}
        session = await filesystem.set_session()
        data = bytearray()
        begin = loop.time()
        async with asyncio.timeout(self._read_timeout_s) as limit:
            async with session.get(filesystem.encode_url(path), **options) as answer:
                filesystem._raise_not_found_for_status(answer, path)
                if start and answer.status == http.HTTPStatus.OK:
                    raise ranges_ignored_error(
                        path, start
                    )  # these bytes are from the start of the file
                async for chunk in answer.content.iter_any():
                    data += chunk
                    if len(data) > max_bytes:
                        break
                    earned_s = len(data) / _SLOWEST_BYTES_PER_S
                    limit.reschedule(begin + self._read_timeout_s + earned_s)
        return bytes(data)
