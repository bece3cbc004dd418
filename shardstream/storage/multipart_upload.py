"""A file that goes to S3 while it is written: in parts, several at a time; it appears whole when they are joined.

Parts are 8 MiB: one is being filled while up to four are on their way, of each of which the client makes a copy. So a file under
way takes 72 MiB of memory at most, and no room on the disk. A file of less than one part goes in one request. Each request carries the MD5 of its bytes, which the server
checks; at last the ETag of the whole is compared, or, where that is no MD5 of ours, its length.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import logging
import mimetypes
import re
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, cast

from shardstream.errors import NotFoundError, StorageError
from shardstream.storage.retry import retry_call
from shardstream.storage.store import Storage

_log = logging.getLogger(__name__)

PART_BYTES = 8 << 20
_IN_FLIGHT = 4
_PARTS_OF_A_SIZE = 2000  # S3 takes 10,000: sizes double every 2,000, which makes 520 GB
_ANSWER_S = 120.0  # for 8 MiB: over 0.07 MB/s, and no server that has stopped reading is waited for
_GRACE_S = 5.0
_MD5 = re.compile(r"[0-9a-f]{32}(-\d+)?")


class _Part(NamedTuple):
    md5: bytes
    size: int
    etag: str
    """What the server calls it."""


class S3Upload(io.RawIOBase):
    """A stream whose bytes are sent as they come; then `finish` or `abort`. Not to be written from two threads at a time.

    Args:
        storage: Whose file system of the URL is s3fs (see `takes_parts`).
        url: Of the file.
        alone: Whether nobody else writes this file now: then unfinished uploads of it, which a killed writer left, are dropped.
    """

    def __init__(self, storage: Storage, url: str, *, alone: bool = False) -> None:
        super().__init__()
        self._alone = alone
        self._object = _S3Object(storage, url)
        self._pieces: list[memoryview] = []
        self._held_bytes = 0
        self._parts: list[Future[_Part]] = []
        self._uploads_under_way: deque[Future[_Part]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._upload_id: Future[str] | None = None
        self.etag: str | None = None
        """What the server calls the file; known after `finish`, if it said so."""

    def writable(self) -> bool:
        """Say that it can be written."""
        return True

    def write(self, data: Any, /) -> int:
        """Append bytes; waits while four parts are on their way.

        Raises:
            StorageError: If a part could not be sent.
        """
        # Bytes stay as they are until they are sent; any other buffer may be filled anew meanwhile.
        view = memoryview(data if isinstance(data, bytes) else bytes(data))
        at = 0
        while at < len(view):
            if self._held_bytes == self._part_bytes:  # and there is more: at least two parts
                self._send_part()
            piece = view[at : at + self._part_bytes - self._held_bytes]
            self._pieces.append(piece)
            self._held_bytes += len(piece)
            at += len(piece)
        return len(view)

    def end(self) -> None:
        """Send what is left of a file of several parts: nothing more will be written. Waits as `write` does, not for the answer.

        Raises:
            StorageError: If an earlier part could not be sent.
        """
        if self._upload_id is not None and self._pieces:
            self._send_part()

    def finish(self) -> None:
        """Send what is left, make the file appear, and check it.

        Raises:
            StorageError: If that fails, or other bytes arrived.
        """
        if self._upload_id is None:
            parts = [self._object.put("put_object", self._take(), **self._object.kind)]
            told: str | None = parts[0].etag
        else:
            self.end()
            parts = [future.result() for future in self._parts]
            told = self._object.join(self._upload_id.result(), parts)
            self._upload_id = None
        self.etag = None if told is None else _plain(told)
        if told is None or _plain(told) != _etag_of(parts):
            self._object.check(parts, is_known=told is not None)
        self.abort()

    def abort(self) -> None:
        """Forget what was sent; after `finish`, or a second time, it does nothing."""
        self._pieces.clear()
        self._held_bytes = 0
        self._object.give_up(self._uploads_under_way)
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        begun, self._upload_id = self._upload_id, None
        if begun is not None and not begun.cancelled() and begun.exception() is None:
            self._object.abort(begun.result())

    @property
    def _part_bytes(self) -> int:
        return int(PART_BYTES << (len(self._parts) // _PARTS_OF_A_SIZE))

    def _take(self) -> bytes:
        body = b"".join(self._pieces)
        self._pieces.clear()
        self._held_bytes = 0
        return body

    def _send_part(self) -> None:
        if self._upload_id is None or self._pool is None:
            self._pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="shardstream-part")
            self._upload_id = self._pool.submit(self._object.begin, alone=self._alone)
        while len(self._uploads_under_way) >= _IN_FLIGHT:
            self._uploads_under_way.popleft().result()
        number = len(self._parts) + 1
        future = self._pool.submit(self._object.put_part, self._upload_id, number, self._take())
        self._uploads_under_way.append(future)
        self._parts.append(future)


class _S3Object:
    """One object of a bucket: requests about it, tried again where that can help."""

    def __init__(self, storage: Storage, url: str) -> None:
        self._storage, self._url = storage, url
        filesystem, path = storage.resolve(url)
        self._filesystem = filesystem
        self._bucket, self._key, _ = filesystem.split_path(path)
        self._cancelled = threading.Event()
        self._requests: set[Future[Any]] = set()
        kind = mimetypes.guess_type(self._key)[0]
        self.kind: dict[str, Any] = {} if kind is None else {"ContentType": kind}

    def begin(self, *, alone: bool) -> str:
        """Begin an upload in parts."""
        if alone:
            self.abort_all()
        return str(self._ask("create_multipart_upload", **self.kind)["UploadId"])

    def put(self, method: str, body: bytes, **arguments: Any) -> _Part:
        """Send bytes with their MD5."""
        md5 = hashlib.md5(body, usedforsecurity=False).digest()
        digest = base64.b64encode(md5).decode()
        answer = self._ask(method, len(body), Body=body, ContentMD5=digest, **arguments)
        return _Part(md5, len(body), str(answer.get("ETag", "")))

    def put_part(self, begun: Future[str], number: int, body: bytes) -> _Part:
        """Send one part of an upload that is being begun."""
        return self.put("upload_part", body, UploadId=begun.result(), PartNumber=number)

    def join(self, upload_id: str, sent: list[_Part]) -> str | None:
        """Make the object of its parts; return its ETag, None if the upload is not there any more."""
        parts = [{"PartNumber": n, "ETag": part.etag} for n, part in enumerate(sent, start=1)]
        try:
            answer = self._ask(
                "complete_multipart_upload",
                UploadId=upload_id,
                MultipartUpload={"Parts": parts},
            )
        except (
            NotFoundError
        ):  # joined already, and the answer to that got lost; or dropped by another writer
            _log.info("%s: the upload is not known any more; looking at what is there", self._url)
            return None
        return str(answer.get("ETag", ""))

    def abort(self, upload_id: str) -> None:
        """Drop an upload with its parts; what stands in the way of that is logged."""
        try:
            with self._storage.translate_errors(self._url):
                self._request("abort_multipart_upload", UploadId=upload_id)
        except NotFoundError:
            return
        except StorageError as error:
            _log.warning("%s: an unfinished upload is left on the server (%s)", self._url, error)

    def abort_all(self) -> None:
        """Drop all uploads of this object, begun by whomever.

        Where the server does not let us look, they stay: they cost room, and harm nothing.
        """
        try:
            with self._storage.translate_errors(self._url):
                answer = self._request("list_multipart_uploads", Prefix=self._key, Key=None)
        except StorageError as error:
            _log.info("%s: cannot look for unfinished uploads: %s", self._url, error)
            return
        for upload in answer.get("Uploads") or ():
            if upload["Key"] == self._key:
                self.abort(upload["UploadId"])

    def check(self, parts: list[_Part], *, is_known: bool) -> None:
        """Compare what is there with what was sent.

        Args:
            parts: What was sent.
            is_known: Whether the server said that it made the object of them: else it may be an older one.

        Raises:
            StorageError: If it is something else.
        """
        found = self._ask("head_object")
        size = sum(part.size for part in parts)
        if found["ContentLength"] != size:
            raise StorageError(
                f"{found['ContentLength']} of {size} bytes arrived; write it again", shard=self._url
            )
        etag = _plain(found.get("ETag", ""))
        tells = _is_md5(etag, found, len(parts))
        if etag != _etag_of(parts) if tells else not is_known:
            self._compare(parts)

    def give_up(self, under_way: deque[Future[_Part]]) -> None:
        """End attempts; those that have been made get five seconds to be answered."""
        self._cancelled.set()
        wait(under_way, timeout=_GRACE_S)
        for request in list(self._requests):
            request.cancel()

    def _compare(self, parts: list[_Part]) -> None:
        """Read back what an ETag says is something else: not every server means MD5 by what looks so."""
        start = 0
        for part in parts:
            data = self._storage.read(self._url, start, start + part.size)
            if hashlib.md5(data, usedforsecurity=False).digest() != part.md5:
                raise StorageError(
                    "other bytes arrived than were sent; check the network and the server, and write it again",
                    shard=self._url,
                    offset=start,
                )
            start += part.size

    def _ask(self, method: str, nbytes: int = 0, **arguments: Any) -> dict[str, Any]:
        return retry_call(
            self._storage,
            self._url,
            lambda: self._request(method, nbytes, **arguments),
            cancelled=self._cancelled,
        )

    def _request(self, method: str, nbytes: int = 0, **arguments: Any) -> dict[str, Any]:
        target = {"Bucket": self._bucket, "Key": self._key} | arguments
        target = {name: value for name, value in target.items() if value is not None}
        limit_s = _ANSWER_S * max(1, nbytes // PART_BYTES)
        request = asyncio.run_coroutine_threadsafe(
            asyncio.wait_for(self._filesystem._call_s3(method, **target), limit_s),
            self._filesystem.loop,
        )
        self._requests.add(request)
        try:
            return cast("dict[str, Any]", request.result())
        except CancelledError as error:
            raise StorageError("given up", shard=self._url) from error
        finally:
            self._requests.discard(request)


def put_if(storage: Storage, url: str, body: bytes, condition: Mapping[str, str]) -> None:
    """Send a small file in one request that the server refuses unless a condition holds.

    Args:
        storage: Whose file system of the URL is s3fs.
        url: Of the file.
        body: Its bytes.
        condition: ``{"IfNoneMatch": "*"}`` if there is to be none, ``{"IfMatch": ETag}`` if it is to be that one.

    Raises:
        ChangedError: If the condition does not hold, or the answer to an earlier attempt was lost.
        StorageError: If that fails; also where the server knows no conditions.
    """
    target = _S3Object(storage, url)
    target.put("put_object", body, **condition, **target.kind)


def takes_parts(filesystem: Any) -> bool:
    """Tell whether `S3Upload` can write to a file system: to s3fs."""
    return hasattr(filesystem, "_call_s3")


def _plain(etag: str) -> str:
    return etag.strip('"').lower()


def _is_md5(etag: str, found: dict[str, Any], num_parts: int) -> bool:
    """Tell whether an ETag may be the MD5 of the bytes, or for parts the MD5 of their MD5s: that of encrypted ones is not."""
    if found.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in found:
        return False
    match = _MD5.fullmatch(etag)
    return match is not None and match[1] in (None if num_parts == 1 else f"-{num_parts}",)


def _etag_of(parts: list[_Part]) -> str:
    if len(parts) == 1:
        return parts[0].md5.hex()
    joined = hashlib.md5(b"".join(part.md5 for part in parts), usedforsecurity=False)
    return f"{joined.hexdigest()}-{len(parts)}"
