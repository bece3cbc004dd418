"""Read ranges, and list pages, through fsspec file systems: any of them, fsspec's own for HTTP, s3fs, adlfs, that of the Hugging Face Hub.

`FilesystemReader` uses only what every file system has. The others read through the session of the file system instead of its
``cat_file``, to keep the bytes before a cut, to bound the bytes and the time of a response, and to learn lengths and ETags.

aiohttp limits the time between two bytes, and a whole response to five minutes; a server can send gigabytes in that time. So its sessions
get limits for responses that a file system takes whole: pages of listings, look-ups, errors.
"""

from __future__ import annotations

import asyncio
import http
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardstream.errors import StorageError
from shardstream.storage.response import (
    SLOWEST_BYTES_PER_S,
    HttpStatusError,
    RangeRequest,
    RangeResponse,
    TooSlowError,
    Transfer,
    collect,
    collect_parts,
    plain_etag,
    run_on_loop,
)

if TYPE_CHECKING:
    import aiohttp

_BODY_READ_BYTES = 1 << 20
_AZURE_BODY_BYTES = 32 << 20  # largest first response that the client asks for
_PAGE_BYTES, _ERROR_BYTES = 32 << 20, 64 << 10
_CONNECT_S = 10.0


class FilesystemReader:
    """Reads with ``cat_file``, which returns neither the length of a file nor its version.

    The time of a response is limited where the file system allows it.

    Args:
        filesystem: Opened in this process.
    """

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def read(self, request: RangeRequest, transfer: Transfer) -> RangeResponse:
        """Send a request once."""
        filesystem, start, end = self._filesystem, request.start, request.end
        span = {} if request.is_whole_file else {"start": start, "end": end}
        is_async = getattr(filesystem, "async_impl", False)
        if request.max_bytes is not None and not is_async:  # a range ends at that of the file
            span = {"start": start, "end": start + request.max_bytes}
        if end is None or not is_async:
            return RangeResponse(data=bytes(filesystem.cat_file(request.path, **span)))
        limit_s = transfer.left_s + (end - start) / SLOWEST_BYTES_PER_S
        work = asyncio.wait_for(filesystem._cat_file(request.path, **span), limit_s)
        return RangeResponse(data=bytes(run_on_loop(filesystem.loop, work, transfer.cancelled)))


class _EventLoopReader(FilesystemReader, ABC):
    """Reads by a coroutine on the event loop of its file system."""

    def read(self, request: RangeRequest, transfer: Transfer) -> RangeResponse:
        """Send a request once; return at most one response chunk more than it asks for."""
        work = self._read(request, transfer)
        return run_on_loop(self._filesystem.loop, work, transfer.cancelled)

    @abstractmethod
    async def _read(self, request: RangeRequest, transfer: Transfer) -> RangeResponse: ...


class HttpReader(_EventLoopReader):
    """Reads through the session of fsspec's ``HTTPFileSystem``, whose ``cat_file`` keeps all bytes that arrive.

    A server may send more than the requested range, or a file without end.
    """

    async def _read(self, request: RangeRequest, transfer: Transfer) -> RangeResponse:
        filesystem = self._filesystem
        options = dict(filesystem.kwargs)
        # Ranges of a compressed body would be other bytes.
        wanted = {"Accept-Encoding": "identity"} | request.header
        options["headers"] = {**options.get("headers", {}), **wanted}
        session = await filesystem.set_session()
        async with asyncio.timeout(transfer.left_s):
            response = await session.get(filesystem.encode_url(request.path), **options)
        async with response:
            filesystem._raise_not_found_for_status(response, request.path)
            size, version = request.check_head(response.status, response.headers)
            is_compressed = response.headers.get("Content-Encoding", "") not in ("", "identity")
            if is_compressed and not request.is_whole_file:
                raise StorageError("the server compresses ranges; serve the file as it is")
            transfer.begin_body()
            data, error = await collect(response.content.iter_any(), transfer, request.limit_bytes)
        if is_compressed:  # the body was unpacked
            size = None
        if error is not None and (is_compressed or not _can_be_resumed(response)):
            raise error
        return RangeResponse(data=data, size=size, version=version, error=error)


def _can_be_resumed(response: Any) -> bool:
    """Return whether the server sends ranges, and names a version that no other bytes have (a strong validator, RFC 9110, 8.8.1)."""
    is_range = response.status == http.HTTPStatus.PARTIAL_CONTENT
    has_ranges = is_range or response.headers.get("Accept-Ranges") == "bytes"
    return has_ranges and str(response.headers.get("ETag", "")).startswith('"')


class S3fsReader(_EventLoopReader):
    """Reads objects through the client of an `s3fs.S3FileSystem`; the bytes before a cut are kept.

    Its ``cat_file`` starts again after a cut, returns neither length nor ETag, and waits a minute for a server that stalls.
    """

    async def _read(self, request: RangeRequest, transfer: Transfer) -> RangeResponse:
        bucket, key, version_id = self._filesystem.split_path(request.path)
        file = {"Bucket": bucket, "Key": key}
        if version_id is not None:
            file["VersionId"] = version_id
        # 10 s more: it may connect and look up credentials first
        limit_s = transfer.left_s + 10
        async with asyncio.timeout(limit_s):
            response = await self._filesystem._call_s3("get_object", **file, **request.header)
        about, body = response["ResponseMetadata"], response["Body"]
        try:
            size, version = request.check_head(about["HTTPStatusCode"], about["HTTPHeaders"])
            transfer.begin_body()
            data, error = await collect(_chunks(body), transfer, request.limit_bytes)
        finally:
            body.close()
        if size is None:  # a chunked response, whose end looks like a cut
            async with asyncio.timeout(limit_s):
                head = await self._filesystem._call_s3("head_object", **file)
            size = head["ContentLength"]
        return RangeResponse(data=data, size=size, version=version, error=error)


class AzureReader(_EventLoopReader):
    """Reads blobs through the client of an `adlfs.AzureBlobFileSystem`.

    Its ``cat_file`` drops length and ETag of the response, so that each range would need a look-up.
    """

    async def _read(self, request: RangeRequest, transfer: Transfer) -> RangeResponse:
        span: dict[str, int] = {}
        if not request.is_whole_file:
            span["offset"] = request.start
            if math.isfinite(request.limit_bytes):
                span["length"] = int(request.limit_bytes)
        container, blob, version_id = self._filesystem.split_path(request.path)
        # The client returns after the first body.
        limit_s = (
            transfer.left_s + min(request.limit_bytes, _AZURE_BODY_BYTES) / SLOWEST_BYTES_PER_S
        )
        client = self._filesystem.service_client.get_blob_client(container=container, blob=blob)
        async with client:
            async with asyncio.timeout(limit_s):
                stream = await client.download_blob(
                    version_id=version_id, **span, **self._filesystem._timeout_kwargs
                )
            transfer.begin_body()
            data, error = await collect(stream.chunks(), transfer, request.limit_bytes)
        _, _, size = (stream.properties.content_range or "").partition("/")
        return RangeResponse(
            data=data,
            size=int(size) if size.isdigit() else None,
            version=plain_etag(stream.properties.etag),
            error=error,
        )


async def _chunks(body: Any) -> AsyncIterator[bytes]:
    """Yield the bytes of a body as they arrive; at its end the client compares their number with Content-Length."""
    while chunk := await body.read(_BODY_READ_BYTES):
        yield chunk


class HubReader(FilesystemReader):
    """Reads files of the Hugging Face Hub, in ranges of any size, through the HTTP client of huggingface_hub.

    ``cat_file`` of its `HfFileSystem` reads 5 MiB ahead at each call, retries by itself, and returns no ETag.
    """

    def read(self, request: RangeRequest, transfer: Transfer) -> RangeResponse:
        """Send a request once; return at most one response chunk more than it asks for."""
        from huggingface_hub import get_session  # noqa: PLC0415  (only for hf://)
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # noqa: PLC0415
            build_hf_headers,
            hf_raise_for_status,
        )

        headers = build_hf_headers(token=self._filesystem.token)
        headers |= {"Accept-Encoding": "identity"} | request.header
        with get_session().stream(
            "GET", self._url(request.path), headers=headers, timeout=transfer.left_s
        ) as response:
            if response.is_error:
                response.read()  # for the message
                hf_raise_for_status(response)
            size, version = request.check_head(response.status_code, response.headers)
            transfer.begin_body()
            chunks = response.iter_raw(_BODY_READ_BYTES)
            parts, error = collect_parts(chunks, transfer, request.limit_bytes)
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


@dataclass(frozen=True, slots=True)
class Page:
    """Some files of a listing, as entries of fsspec, and the names of some folders."""

    entries: Sequence[Mapping[str, Any]]
    folders: list[str] = field(default_factory=list)


def open_listing(filesystem: Any, path: str, *, url: str, recursive: bool) -> S3Listing | None:
    """Return the listing of a folder in pages; None if this client lists all at once.

    Args:
        filesystem: An fsspec file system.
        path: The folder or prefix on it, with its bucket.
        url: Its URL, for messages.
        recursive: Whether to list files in folders below it, and no folders.
    """
    if not path.strip("/"):  # all buckets
        return None
    s3fs = sys.modules.get("s3fs")
    if s3fs is None or not isinstance(filesystem, s3fs.S3FileSystem) or filesystem.version_aware:
        return None
    return S3Listing(filesystem, path, url, recursive)


def endless_error(problem: str, url: str) -> StorageError:
    """Return the error of a listing that would have no end."""
    return StorageError(
        f"the listing is not complete, but the server {problem}",
        remedy="list it again, or look for a fault of the server or of a proxy before it",
        shard=url,
    )


class S3Listing:
    """Pages of s3fs, one request each and repeatable, without the dict of over 1 kB that its `find` makes for each file and keeps."""

    def __init__(self, filesystem: Any, path: str, url: str, recursive: bool) -> None:
        bucket, key, _ = filesystem.split_path(path)
        self._filesystem, self._bucket, self._url = filesystem, bucket, url
        self._request = {"Bucket": bucket, "Delimiter": "" if recursive else "/"}
        self._request["Prefix"] = self._prefix = f"{key.lstrip('/')}/" if key else ""
        self._tokens: set[str] = set()
        self.is_complete = False

    def next_page(self) -> Page:
        """Send one request."""
        response = self._filesystem.call_s3(
            "list_objects_v2", self._filesystem.req_kw, **self._request
        )
        entries = [
            one | {"name": f"{self._bucket}/{one['Key']}", "size": one["Size"]}
            for one in response.get("Contents", ())
            if one["Key"] != self._prefix or not self._request["Delimiter"]
        ]
        folders = [
            one["Prefix"][len(self._prefix) : -1] for one in response.get("CommonPrefixes", ())
        ]
        self.is_complete = not response.get("IsTruncated")
        if not self.is_complete:
            self._request["ContinuationToken"] = self._next_token(response)
        return Page(entries, folders)

    def _next_token(self, response: Mapping[str, Any]) -> str:
        """Return the token of the next page.

        Raises:
            StorageError: If the listing would have no end.
        """
        token = response.get("NextContinuationToken")
        if not token:
            raise endless_error("sends no token for the next page", self._url)
        if token in self._tokens:
            raise endless_error("repeats a page", self._url)
        self._tokens.add(token)
        return str(token)


class TooLongError(OSError):
    """A response that is no file, and has more bytes than one of its kind."""


def session_options(read_timeout_s: float) -> dict[str, Any]:
    """Return the options of an `aiohttp.ClientSession` whose responses have limits."""
    import aiohttp  # noqa: PLC0415  (fsspec needs it for HTTP alone, and it is slow to import)

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
