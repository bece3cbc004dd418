"""Read ranges through fsspec file systems: any of them, fsspec's own for HTTP, s3fs, and that of the Hugging Face Hub.

`FilesystemReader` uses only what every file system has. The others read through the session of the file system instead of its
``cat_file``, to keep the bytes before a cut, to bound the bytes and the time of a response, and to learn lengths and ETags.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fsspec.asyn import sync

from shardstream.errors import StorageError
from shardstream.storage.response import (
    RangeResponse,
    ReceiveBuffer,
    max_response_bytes,
)
from shardstream.storage.response_head import check_head, range_header

# A server that sends fewer bytes per second, averaged over a response, is treated like one that sends none.
_SLOWEST_FILESYSTEM = 100_000
_SLOWEST_HTTP = 10_000
_SLOWEST_S3 = 1000
_BODY_READ_BYTES = 1 << 20


class FilesystemReader:
    """Reads with ``cat_file``, which returns neither the length of a file nor its version.

    Args:
        filesystem: Opened in this process.
        read_timeout_s: Limit of the time for the first byte. Where the file system allows it, 100 kB per second are expected after
            that.
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
        into: ReceiveBuffer | None = None,  # noqa: ARG002
    ) -> RangeResponse:
        """Request the bytes ``start`` to ``end`` once."""
        # start=0, end=None is a plain GET: a range of an empty object would be refused
        options = {} if (start, end) == (0, None) else {"start": start, "end": end}
        filesystem = self._filesystem
        is_async = getattr(filesystem, "async_impl", False)
        if max_bytes is not None and not is_async:  # these cut a range at the end of the file
            options = {"start": start, "end": start + max_bytes}
        if end is not None and is_async:
            limit_s = self._read_timeout_s + (end - start) / _SLOWEST_FILESYSTEM
            data = sync(filesystem.loop, filesystem._cat_file, path, timeout=limit_s, **options)
        else:
            data = filesystem.cat_file(path, **options)
        return RangeResponse(data=bytes(data))


class HttpReader(FilesystemReader):
    """Reads through the session of fsspec's ``HTTPFileSystem``, whose ``cat_file`` keeps all bytes that arrive.

    A server may send more than the requested range, or a file without end.

    Args:
        filesystem: Opened in this process.
        read_timeout_s: Limit of the time for the first byte; 10 kB per second are expected after that.
    """

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        *,
        keep_partial: bool = False,  # noqa: ARG002
        max_bytes: int | None = None,
        into: ReceiveBuffer | None = None,  # noqa: ARG002
    ) -> RangeResponse:
        """Request the bytes ``start`` to ``end`` once; return at most one response chunk more."""
        limit = max_response_bytes(start, end, max_bytes)
        response: RangeResponse = sync(self._filesystem.loop, self._read, path, start, end, limit)
        return response

    async def _read(
        self, path: str, start: int, end: int | None, max_bytes: float
    ) -> RangeResponse:
        filesystem, loop = self._filesystem, asyncio.get_running_loop()
        options = dict(filesystem.kwargs)
        # Ranges of a compressed body would be other bytes.
        wanted = {"Accept-Encoding": "identity"} | range_header(start, end)
        options["headers"] = {**options.get("headers", {}), **wanted}
        session = await filesystem.set_session()
        data = bytearray()
        begin = loop.time()
        async with asyncio.timeout(self._read_timeout_s) as limit:
            async with session.get(filesystem.encode_url(path), **options) as response:
                filesystem._raise_not_found_for_status(response, path)
                size, version = check_head(path, start, end, response.status, response.headers)
                is_compressed = response.headers.get("Content-Encoding", "") not in ("", "identity")
                if is_compressed and (start, end) != (0, None):
                    raise StorageError("the server compresses ranges; serve the file as it is")
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > max_bytes:
                        break
                    allowed_s = len(data) / _SLOWEST_HTTP
                    limit.reschedule(begin + self._read_timeout_s + allowed_s)
        # A compressed body was unpacked.
        return RangeResponse(
            data=bytes(data), size=None if is_compressed else size, version=version
        )


class S3fsReader(FilesystemReader):
    """Reads objects through the client of an `s3fs.S3FileSystem`; the bytes before a cut are kept.

    Its ``cat_file`` starts again after a cut, returns neither length nor ETag, and waits a minute for a server that stalls.

    Args:
        filesystem: Opened in this process.
        read_timeout_s: Limit of the time without a byte.
    """

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        *,
        keep_partial: bool = False,  # noqa: ARG002
        max_bytes: int | None = None,
        into: ReceiveBuffer | None = None,  # noqa: ARG002
    ) -> RangeResponse:
        """Request the bytes ``start`` to ``end`` once."""
        limit = max_response_bytes(start, end, max_bytes)
        response: RangeResponse = sync(self._filesystem.loop, self._read, path, start, end, limit)
        return response

    async def _read(
        self, path: str, start: int, end: int | None, max_bytes: float
    ) -> RangeResponse:
        bucket, key, version_id = self._filesystem.split_path(path)
        request = {"Bucket": bucket, "Key": key, **range_header(start, end)}
        if version_id is not None:
            request["VersionId"] = version_id
        # 10 s more: it may connect and look up credentials first
        async with asyncio.timeout(self._read_timeout_s + 10):
            response = await self._filesystem._call_s3("get_object", **request)
        about = response["ResponseMetadata"]
        parts: list[bytes] = []
        error: Exception | None = None
        try:
            size, version = check_head(
                path, start, end, about["HTTPStatusCode"], about["HTTPHeaders"]
            )
        except Exception:
            response["Body"].close()
            raise
        try:
            await self._collect(response["Body"], parts, max_bytes)
        except _TooSlowError:
            raise
        except Exception as broken:  # noqa: BLE001  (the caller judges it and keeps the bytes before it)
            error = broken
        finally:
            response["Body"].close()
        if size is None:  # a chunked response, whose end looks like a cut
            async with asyncio.timeout(self._read_timeout_s):
                head = await self._filesystem._call_s3("head_object", Bucket=bucket, Key=key)
            size = head["ContentLength"]
        return RangeResponse(data=b"".join(parts), size=size, version=version, error=error)

    async def _collect(self, body: Any, parts: list[bytes], max_bytes: float) -> None:
        loop = asyncio.get_running_loop()
        size, begin = 0, loop.time()
        async with asyncio.timeout(self._read_timeout_s) as limit:
            while size <= max_bytes and (chunk := await body.read(_BODY_READ_BYTES)):
                parts.append(chunk)
                size += len(chunk)
                passed_s = loop.time() - begin
                if passed_s > self._read_timeout_s + size / _SLOWEST_S3:
                    raise _TooSlowError(f"{size} bytes came in {passed_s:.0f} s")
                limit.reschedule(loop.time() + self._read_timeout_s)


class HubReader(FilesystemReader):
    """Reads files of the Hugging Face Hub, in ranges of any size, through the HTTP client of huggingface_hub.

    ``cat_file`` of its `HfFileSystem` reads 5 MiB ahead at each call, retries by itself, and returns no ETag.

    Args:
        filesystem: Opened in this process.
        read_timeout_s: Limit of the time without a byte; 10 kB per second are expected.
    """

    def read(
        self,
        path: str,
        start: int,
        end: int | None,
        *,
        keep_partial: bool = False,  # noqa: ARG002
        max_bytes: int | None = None,
        into: ReceiveBuffer | None = None,  # noqa: ARG002
    ) -> RangeResponse:
        """Request the bytes ``start`` to ``end`` once; return at most one response chunk more."""
        from huggingface_hub import get_session  # noqa: PLC0415  (only for hf://)
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # noqa: PLC0415
            build_hf_headers,
            hf_raise_for_status,
        )

        headers = build_hf_headers(token=self._filesystem.token)
        headers["Accept-Encoding"] = "identity"
        headers |= range_header(start, end)
        parts: list[bytes] = []
        error: Exception | None = None
        with get_session().stream(
            "GET", self._url(path), headers=headers, timeout=self._read_timeout_s
        ) as response:
            if response.is_error:
                response.read()  # for the message
                hf_raise_for_status(response)
            size, version = check_head(path, start, end, response.status_code, response.headers)
            try:
                self._collect(response, parts, max_response_bytes(start, end, max_bytes))
            except _TooSlowError:
                raise
            except Exception as broken:  # noqa: BLE001  (the caller judges it and keeps the bytes before it)
                error = broken
        return RangeResponse(data=b"".join(parts), size=size, version=version, error=error)

    def _url(self, path: str) -> str:
        """Return the URL of a file; `HfFileSystem.url` would list its folder."""
        from huggingface_hub import hf_hub_url  # noqa: PLC0415

        resolved = self._filesystem.resolve_path(path)  # asks for the repository once
        if not hasattr(resolved, "repo_id"):  # a bucket
            return str(self._filesystem.url(path))
        return hf_hub_url(
            resolved.repo_id,
            resolved.path_in_repo,
            repo_type=resolved.repo_type,
            revision=resolved.revision,
            endpoint=self._filesystem.endpoint,
        )

    def _collect(self, response: Any, parts: list[bytes], max_bytes: float) -> None:
        size, begin = 0, time.monotonic()
        for chunk in response.iter_raw(_BODY_READ_BYTES):
            parts.append(chunk)
            size += len(chunk)
            passed_s = time.monotonic() - begin
            if passed_s > self._read_timeout_s + size / _SLOWEST_HTTP:
                raise _TooSlowError(f"{size} bytes came in {passed_s:.0f} s")
            if size > max_bytes:
                break


class _TooSlowError(TimeoutError):
    """Bytes arrive too slowly."""
